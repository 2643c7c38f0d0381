"""wide_sm90 launched by hand on the host: a batch over a page table, NaN wherever nobody owns."""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np

from cupyattn import jit
from cupyattn.core import dtypes
from cupyattn.launch.attention import merge_splits
from cupyattn.launch.driver import params as structs
from cupyattn.launch.tiles import wide_sm90
from cupyattn.reference import attention
from cupyattn.schedule.batch import WORK_FIELDS

from . import build, library
from .library import Range

LATENT, ROPE = 512, 64
TILE_Q = 64
_TYPES = {
    "float16": np.dtype(np.float16),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "float32": np.dtype(np.float32),
}
# kernels/cupyattn/params/latent.cuh, behind AttentionParams.
_LATENT = struct.Struct("<2Q 4q f i")
_EPSILON = {"float16": 2.0**-11, "bfloat16": 2.0**-8, "float32": 2.0**-24}


@dataclass(frozen=True)
class Case:
    """One launch, and a merge if keys are split.

    splits     into how many parts the keys of a tile are split
    packed     latent and rope parts share rows of 576 elements
    spare      items of zeros at the end of the work list
    sharpness  multiplies queries, so that maxima move
    overlaps   as in tiles/wide_sm90.py
    sparse     the table has an entry for each key, some negative: those keys are hidden
    rising     logits grow towards the first key, which is visited last
    """

    qo_len: tuple[int, ...] = (1,)
    kv_len: tuple[int, ...] = (150,)
    num_heads: int = 16
    page_size: int = 64
    causal: bool = True
    dtype: str = "bfloat16"
    o_dtype: str = ""
    splits: int = 1
    packed: bool = True
    has_sinks: bool = False
    has_lse: bool = True
    window_left: int = -1
    spare: int = 0
    sharpness: float = 1.0
    rising: float = 0.0
    overlaps: bool = True
    sparse: bool = False
    seed: int = 0


@dataclass
class Answer:
    case: Case
    o: list[np.ndarray]
    lse: list[np.ndarray]
    expected_o: list[np.ndarray]
    expected_lse: list[np.ndarray]

    def check(self) -> None:
        epsilon = _EPSILON[self.case.dtype] + _EPSILON[self.case.o_dtype or self.case.dtype]
        for got, expected in zip(self.o, self.expected_o, strict=True):
            error = np.abs(got.astype(np.float64) - expected)
            bound = epsilon * (np.abs(expected) + 1.5)
            assert (error <= bound).all(), f"largest error {error.max()} of {epsilon}"
        for got, expected in zip(self.lse, self.expected_lse, strict=True):
            np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-3)


class _Memory:
    """Arrays that a launch may touch; everything else is out of bounds."""

    def __init__(self) -> None:
        self.ranges: list[Range] = []
        self._kept: list[np.ndarray] = []

    def __call__(self, x: np.ndarray | None, is_writable: bool = False) -> int:
        if x is None:
            return 0
        self._kept.append(x)
        if x.nbytes:
            self.ranges.append(Range(x.ctypes.data, x.ctypes.data + _span(x), is_writable))
        return x.ctypes.data


def _span(x: np.ndarray) -> int:
    steps = sum((n - 1) * s for n, s in zip(x.shape, x.strides, strict=True))
    return steps + x.itemsize


def run(case: Case, seed: int = 0, mode: str = "checked", **_: Any) -> Answer:
    """Make inputs, launch, and answer in float64 too."""
    rng = np.random.default_rng(case.seed)
    dtype = _TYPES[case.dtype]
    num_rows, heads = sum(case.qo_len), case.num_heads
    scale = 1.0 / math.sqrt(192)

    def numbers(*shape: int) -> np.ndarray:
        return rng.standard_normal(shape)

    q = _guarded((num_rows, heads, LATENT + ROPE), dtype, pad=8)
    q[...] = (numbers(*q.shape) * case.sharpness / 3).astype(dtype)
    keys = [numbers(n, LATENT + ROPE) for n in case.kv_len]
    if case.rising:
        # All queries lean towards one direction, along which keys grow.
        q[..., :64] += dtype.type(1.0)
        for x in keys:
            x[:, :64] += case.rising * np.linspace(1.0, 0.0, len(x))[:, None]
    keys = [x.astype(dtype) for x in keys]
    table, starts, pools = _paginate(case, keys, dtype, rng)
    o = _guarded((num_rows, heads, LATENT), _TYPES[case.o_dtype or case.dtype], pad=16)
    lse = np.full((num_rows, heads), np.nan, np.float32)
    sinks = numbers(heads).astype(np.float32) if case.has_sinks else None
    if case.sparse:
        table, starts, keys = _scatter(case, table, keys, rng)
    items, merges, num_states = _plan(case, starts)

    memory = _Memory()
    latent, rope = pools
    q_rope = q[..., LATENT:]
    if not case.packed:
        q_rope = _guarded((num_rows, heads, ROPE), dtype, pad=24)
        q_rope[...] = q[..., LATENT:]
        q[..., LATENT:] = np.nan
    partial_o = np.full((num_states, TILE_Q, LATENT), np.nan, np.float32)
    partial_lse = np.full((num_states, TILE_Q), np.nan, np.float32)
    latent_q = q[..., :LATENT]
    spec = SimpleNamespace(
        num_kv_heads=1,
        group_size=heads,
        window_left=case.window_left,
        right_limit=0 if case.causal else -1,
        logits_soft_cap=0.0,
        page_size=case.page_size,
        value_pages=0,
        pos_encoding="NONE",
    )
    strides = structs.STRIDES.pack(
        *_strides(latent_q, 0, 1),
        *(_strides(latent, 1)[0], 0),
        *(_strides(latent, 1)[0], 0),
        *_strides(o, 0, 1),
        *_strides(lse, 0, 1),
        *_strides(latent, 0),
        *_strides(latent, 0),
    )
    packed = structs.ATTENTION.pack(
        memory(latent_q),
        memory(latent),
        0,
        memory(o, True),
        structs.OPTIONAL.pack(memory(lse, True) if case.has_lse else 0, 0, memory(sinks), 0, 0, 0),
        memory(partial_o, True),
        memory(partial_lse, True),
        0,
        memory(items),
        memory(merges),
        memory(table),
        0,
        strides,
        0,
        0,
        0,
        0,
        structs.pack_constants(spec, sm_scale=scale, output_scale=1.0),
    )
    packed += _LATENT.pack(
        memory(q_rope),
        memory(rope),
        *_strides(q_rope, 0, 1),
        *_strides(rope, 1, 0),
        1.0,
        0,
    )
    types = (dtypes.parse(x) for x in (case.dtype, case.o_dtype or case.dtype))
    config = wide_sm90.config(*types, overlaps=case.overlaps, sparse=case.sparse)
    _launch("wide_sm90", config.config, packed, (1, len(items), 1), config, memory, seed, mode)
    if len(merges):
        merge = jit.Config(
            {
                "DTypeO": dtypes.parse(case.o_dtype or case.dtype),
                "kHeadDimVO": LATENT,
                "kTileQ": TILE_Q,
                "kWarps": 4,
                "kAligned": True,
            }
        )
        grid = (len(merges) * TILE_Q * merge_splits.parts(LATENT) // 4, 1, 1)
        size = SimpleNamespace(threads=128, shared_bytes=0)
        _launch("merge_splits", merge, packed, grid, size, memory, seed, mode)
    if not case.packed:
        q[..., LATENT:] = q_rope
    _check_guards(o)
    return _answer(case, q, keys, o, lse, sinks, scale)


def _launch(
    name: str,
    config: jit.Config,
    packed: bytes,
    grid: tuple[int, int, int],
    size: Any,
    memory: _Memory,
    seed: int,
    mode: str,
) -> None:
    kernel = library.load(build.build(build.Source.of_kernel(name, config), mode), name)
    room = np.zeros(len(packed) + 64, np.uint8)
    begin = -room.ctypes.data % 64
    room[begin : begin + len(packed)] = np.frombuffer(packed, np.uint8)
    ranges = _merged(memory.ranges)
    kernel.launch(
        room.ctypes.data + begin, grid, (size.threads, 1, 1), size.shared_bytes, ranges, seed
    )


def _merged(ranges: list[Range]) -> list[Range]:
    """Views of one array overlap."""
    merged: list[Range] = []
    for r in sorted(ranges):
        if merged and r.begin < merged[-1].end:
            last = merged.pop()
            r = Range(last.begin, max(last.end, r.end), last.is_writable or r.is_writable)
        merged.append(r)
    return merged


def _strides(x: np.ndarray, *axes: int) -> tuple[int, ...]:
    return tuple(x.strides[axis] // x.itemsize for axis in axes)


def _guarded(shape: tuple[int, int, int], dtype: np.dtype, pad: int) -> np.ndarray:
    """An array [tokens, heads, columns] whose rows are apart, NaN between them."""
    tokens, heads, columns = shape
    whole = np.full((tokens, heads, columns + pad), np.nan, dtype)
    room = np.full(whole.nbytes + 64, 0xFF, np.uint8)
    begin = -room.ctypes.data % 16
    aligned = room[begin : begin + whole.nbytes].view(dtype).reshape(whole.shape)
    aligned[...] = whole
    return aligned[..., :columns]


def _check_guards(o: np.ndarray) -> None:
    whole = np.lib.stride_tricks.as_strided(
        o, (*o.shape[:2], o.strides[1] // o.itemsize), o.strides
    )
    assert np.isnan(whole[..., o.shape[2] :].astype(np.float32)).all(), "wrote between rows of o"


def _paginate(
    case: Case, keys: list[np.ndarray], dtype: np.dtype, rng: np.random.Generator
) -> tuple[np.ndarray, list[int], tuple[np.ndarray, np.ndarray]]:
    """The page table, where requests begin in it, and the pools [pages, page_size, columns]."""
    counts = [-(-n // case.page_size) for n in case.kv_len]
    num_pages = sum(counts) + 3
    table = rng.permutation(num_pages)[: sum(counts)].astype(np.int32)
    columns = LATENT + ROPE
    if case.packed:
        whole = np.full((num_pages, case.page_size, columns), np.nan, dtype)
        pools = whole[..., :LATENT], whole[..., LATENT:]
    else:
        # Apart, with strides of their own.
        whole = np.full((num_pages, case.page_size + 1, columns), np.nan, dtype)
        rope = np.full((num_pages + 1, case.page_size + 2, ROPE + 8), np.nan, dtype)
        pools = whole[:, : case.page_size, :LATENT], rope[:num_pages, : case.page_size, :ROPE]
    starts, place = [], 0
    for own, count in zip(keys, counts, strict=True):
        starts.append(place)
        for i, row in enumerate(own):
            page = table[place + i // case.page_size]
            pools[0][page, i % case.page_size] = row[:LATENT]
            pools[1][page, i % case.page_size] = row[LATENT:]
        place += count
    return table, starts, pools


def _scatter(
    case: Case, table: np.ndarray, keys: list[np.ndarray], rng: np.random.Generator
) -> tuple[np.ndarray, list[int], list[np.ndarray]]:
    """A list of slots for each request in place of the table, and the keys that it names."""
    entries, starts, found, place = [], [], [], 0
    for own in keys:
        starts.append(sum(map(len, entries)))
        # With repetitions, and in any order; the last tile but one is empty.
        chosen = rng.integers(0, len(own), len(own)) if len(own) else np.zeros(0, np.int64)
        pages = table[place + chosen // case.page_size]
        slots = pages * case.page_size + chosen % case.page_size
        is_hidden = rng.random(len(own)) < 0.3
        is_hidden[64:128] = True
        entries.append(np.where(is_hidden, -1 - slots % 2, slots).astype(np.int32))
        found.append(own[chosen[~is_hidden]])
        place += -(-len(own) // case.page_size)
    return np.concatenate(entries), starts, found


def _plan(case: Case, starts: list[int]) -> tuple[np.ndarray, np.ndarray, int]:
    """The work list, an item of each split tile, and the number of states."""
    items, merges, num_states, token = [], [], 0, 0
    for qo_len, kv_len, start in zip(case.qo_len, case.kv_len, starts, strict=True):
        for first_row in range(0, qo_len * case.num_heads, TILE_Q):
            if case.splits > 1:
                merges.append(len(items))
            for split in range(case.splits):
                fields = dict.fromkeys(WORK_FIELDS, 0) | {
                    "q_start": token,
                    "qo_len": qo_len,
                    "kv_start": start,
                    "kv_len": kv_len,
                    "first_row": first_row,
                    "split": split,
                    "num_splits": case.splits,
                    "first_state": num_states,
                    "split_tile": len(merges) - 1 if case.splits > 1 else 0,
                }
                items.append([fields[name] for name in WORK_FIELDS])
            num_states += case.splits if case.splits > 1 else 0
        token += qo_len
    items += [[0] * len(WORK_FIELDS)] * case.spare
    return (
        np.array(items, np.int32).reshape(-1, len(WORK_FIELDS)),
        np.array(merges, np.int32),
        num_states,
    )


def _answer(
    case: Case,
    q: np.ndarray,
    keys: list[np.ndarray],
    o: np.ndarray,
    lse: np.ndarray,
    sinks: np.ndarray | None,
    scale: float,
) -> Answer:
    answer = Answer(case, [], [], [], [])
    token = 0
    for qo_len, own in zip(case.qo_len, keys, strict=True):
        rows = slice(token, token + qo_len)
        token += qo_len
        expected_o, expected_lse = attention(
            q[rows].astype(np.float64),
            own[:, None].astype(np.float64),
            own[:, None, :LATENT].astype(np.float64),
            causal=case.causal,
            window_left=case.window_left,
            sm_scale=scale,
            sinks=None if sinks is None else sinks.astype(np.float64),
        )
        answer.o.append(np.ascontiguousarray(o[rows]))
        answer.expected_o.append(expected_o)
        if case.has_lse:
            answer.lse.append(lse[rows])
            answer.expected_lse.append(expected_lse)
    return answer
