"""wide_sm90 launched by hand on the host: a batch of latent or of ordinary wide heads.

Whatever no request owns is NaN.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any
from unittest import mock

import ml_dtypes
import numpy as np

from cupyattn import jit
from cupyattn.core import dtypes
from cupyattn.launch.attention import merge_splits, tma_wide
from cupyattn.launch.driver import params as structs
from cupyattn.launch.driver import tensor_map
from cupyattn.launch.tiles import wide_decode_sm90, wide_sm90
from cupyattn.launch.tiles.config import TileConfig
from cupyattn.reference import attention
from cupyattn.reference.latent_rows import NUM_BYTES, unpack_rows
from cupyattn.schedule.batch import WORK_FIELDS
from cupyattn.schedule.cuts import pack

from . import build, gpu, library
from .library import Range

LATENT, ROPE = 512, 64
DIM_VO = 512
_TYPES = {
    "float16": np.dtype(np.float16),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "float32": np.dtype(np.float32),
    "float8_e4m3fn": np.dtype(ml_dtypes.float8_e4m3fn),
}
_EPSILON = {"float16": 2.0**-11, "bfloat16": 2.0**-8, "float32": 2.0**-24}


@dataclass(frozen=True)
class Case:
    """One launch, and a merge if keys are split.

    num_heads  of queries, for each key head
    head_dims  wide_sm90.LATENT, or of keys and of values that are apart
    kv_heads   of ordinary heads, as is is_paged
    splits     into how many parts the keys of a tile are split
    cuts       where these begin, in key tiles, if they are not equal
    blocks     of 64 rows, of boxes or of lists of one length: so many take all items in turn
    packed     latent and rope parts share rows of 576 elements
    spare      items of zeros at the end of the work list
    sharpness  multiplies queries, so that maxima move
    counts     the last block of a tile may merge few splits
    fused      of 64 rows of ordinary heads, too
    tile_q     64, or 16 or 32 rows of wide_decode_sm90
    tma        boxes of pages bring the keys
    sparse     the table has an entry for each key, some negative: those keys are hidden
    uniform    the grid says who does what, for lists of one length; there is no work list
    rising     logits grow towards the first key, which is visited last
    key_scales of keys of fp8 (core.problem.KEY_SCALES)
    rope_scale of rope columns of keys of fp8
    spoiled    (request, key, column, value): values of keys that are not finite
    """

    qo_len: tuple[int, ...] = (1,)
    kv_len: tuple[int, ...] = (150,)
    num_heads: int = 16
    page_size: int = 64
    causal: bool = True
    dtype: str = "bfloat16"
    o_dtype: str = ""
    kv_dtype: str = ""
    key_scales: str = ""
    rope_scale: float = 1.0
    splits: int = 1
    cuts: tuple[int, ...] = ()
    blocks: int = 0
    packed: bool = True
    head_dims: tuple[int, int] = wide_sm90.LATENT
    kv_heads: int = 1
    is_paged: bool = True
    has_sinks: bool = False
    has_lse: bool = True
    window_left: int = -1
    spare: int = 0
    sharpness: float = 1.0
    rising: float = 0.0
    tile_q: int = 64
    counts: bool = True
    fused: bool = False
    sparse: bool = False
    uniform: bool = False
    tma: bool = False
    spoiled: tuple[tuple[int, int, int, float], ...] = ()
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
            is_finite = np.isfinite(expected)
            np.testing.assert_array_equal(got[~is_finite].astype(np.float64), expected[~is_finite])
            expected = expected[is_finite]
            error = np.abs(got[is_finite].astype(np.float64) - expected)
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
    dtype, dtype_o = _TYPES[case.dtype], _TYPES[case.o_dtype or case.dtype]
    num_rows, heads = sum(case.qo_len), case.num_heads * case.kv_heads
    is_latent = case.head_dims == wide_sm90.LATENT
    scale = 1.0 / math.sqrt(192)

    q = _guarded((num_rows, heads, case.head_dims[0]), dtype, pad=8)
    q[...] = (rng.standard_normal(q.shape) * case.sharpness / 3).astype(dtype)
    keys = [rng.standard_normal((n, case.kv_heads, case.head_dims[0])) for n in case.kv_len]
    if case.rising:
        # All queries lean towards one direction, along which keys grow.
        q[..., :64] += dtype.type(1.0)
        for x in keys:
            x[..., :64] += case.rising * np.linspace(1.0, 0.0, len(x))[:, None, None]
    keys = [x.astype(_TYPES[case.kv_dtype or case.dtype]) for x in keys]
    for request, key, column, value in case.spoiled if is_latent else ():
        keys[request][key, 0, column] = value
    scales = None
    if case.key_scales == "rows":
        raw = [_scaled_rows(x, rng) for x in keys]
        keys = [unpack_rows(x) for x in raw]
        table, starts, k, second = _paginate_latent(case, raw, rng)
    elif is_latent:
        table, starts, k, second = _paginate_latent(case, keys, rng)
        if case.key_scales:
            scales, keys = _scale_tokens(case, table, keys, len(k), rng)
    else:
        values = [
            rng.standard_normal((n, case.kv_heads, DIM_VO)).astype(dtype) for n in case.kv_len
        ]
        for request, key, column, value in case.spoiled:
            values[request][key, -1, column] = value
        table, starts, k, second = _lay_out(case, keys, values, rng)
    if is_latent:
        if case.rope_scale != 1.0:
            keys = [_scale_rope(x, case.rope_scale) for x in keys]
        if case.key_scales and case.tile_q == 64:
            # What the producer that converts makes of them.
            keys = [x.astype(dtype).astype(np.float64) for x in keys]
        values = [x[..., :LATENT] for x in keys]
    o = _guarded((num_rows, heads, DIM_VO), dtype_o, pad=16)
    lse = np.full((num_rows, heads), np.nan, np.float32)
    sinks = rng.standard_normal(heads).astype(np.float32) if case.has_sinks else None
    if case.sparse:
        table, starts, keys = _scatter(case, table, keys, rng)
        values = [x[..., :LATENT] for x in keys]
    items, merges, num_states = _plan(case, starts)
    config = _config(case)
    counts = config.fused_splits > 0 and case.counts and not case.uniform

    memory = _Memory()
    first_q, q_rope = q, None
    if is_latent:
        first_q, q_rope = q[..., :LATENT], q[..., LATENT:]
        if not case.packed:
            q_rope = _guarded((num_rows, heads, ROPE), dtype, pad=24)
            q_rope[...] = q[..., LATENT:]
            q[..., LATENT:] = np.nan
    states = num_states * case.kv_heads
    partial_o = np.full((states, case.tile_q, DIM_VO), np.nan, np.float32)
    partial_lse = np.full((states, case.tile_q), np.nan, np.float32)
    counters = np.zeros(max(1, len(merges) * case.kv_heads), np.uint32)
    spec = SimpleNamespace(
        num_kv_heads=case.kv_heads,
        group_size=case.num_heads,
        window_left=case.window_left,
        right_limit=0 if case.causal else -1,
        logits_soft_cap=0.0,
        page_size=case.page_size,
        value_pages=0,
        pos_encoding="NONE",
        logits=None,
        key_share=None,
        skip_softmax=0.0,
    )
    num_tiles = len(items) // case.splits
    of_grid = {"num_q_tiles": num_tiles, "num_splits": case.splits} if case.uniform else {}
    # Arrays of keys and of values are [pages, rows of a page, heads, columns].
    v = k if is_latent else second
    strides = structs.STRIDES.pack(
        *_strides(first_q, 0, 1),
        *_strides(k, 1, 2),
        *_strides(v, 1, 2),
        *_strides(o, 0, 1),
        *_strides(lse, 0, 1),
        *_strides(k, 0),
        *_strides(v, 0),
    )
    packed = structs.ATTENTION.pack(
        memory(first_q),
        memory(k),
        0 if is_latent else memory(v),
        memory(o, True),
        structs.OPTIONAL.pack(
            memory(lse, True) if case.has_lse else 0,
            0,
            memory(sinks),
            0,
            memory(scales),
            0,
            0,
            b"",
            b"",
        ),
        memory(partial_o, True),
        memory(partial_lse, True),
        memory(counters, True) if counts else 0,
        0 if case.uniform else memory(items),
        0 if case.uniform else memory(merges),
        memory(table),
        0,
        strides,
        0,
        0,
        *((1, case.kv_len[0]) if case.uniform else (len(merges), 0)),
        structs.pack_constants(spec, sm_scale=scale, output_scale=1.0, **of_grid),
    )
    if is_latent:
        assert q_rope is not None
        rope_strides = *_strides(q_rope, 0, 1), *_strides(second, 1, 0)
        list_step = case.kv_len[0] if case.uniform else 0
        packed += structs.LATENT.pack(
            *(memory(q_rope), memory(second), *rope_strides, case.rope_scale, list_step),
            *(0, 0, 0, 0, 0, 1, 0, len(k) * case.page_size),
        )
    if case.tma:
        of_parts = _strides(k, 1, 0), _strides(second, 1, 0)
        boxes = tma_wide.boxes(
            dtypes.parse(case.kv_dtype or case.dtype),
            (LATENT, ROPE),
            *of_parts,
            (case.page_size, len(k)),
        )
        assert boxes is not None
        with mock.patch.object(tensor_map, "encode", gpu.encode_tensor_map):
            packed += boxes.pack(k.ctypes.data, second.ctypes.data)
    grid = case.kv_heads, case.blocks or len(items), 1
    if case.uniform:
        grid = case.kv_heads, case.blocks or num_tiles, case.splits
    _launch(config.name, config.config, packed, grid, config, memory, seed, mode)
    if len(merges):
        merge = jit.Config(
            {
                "DTypeO": dtypes.parse(case.o_dtype or case.dtype),
                "kHeadDimVO": DIM_VO,
                "kTileQ": case.tile_q,
                "kFusedSplits": config.fused_splits,
                "kSharesRows": False,
                "kWholeTokens": False,
                "kWarps": 4,
                "kAligned": True,
            }
        )
        # Fewer blocks than rows, so that each merges several.
        num_blocks = len(merges) * case.tile_q * merge_splits.parts(DIM_VO) // 4
        grid = min(24, num_blocks), case.kv_heads, 1
        size = SimpleNamespace(threads=128, shared_bytes=0)
        _launch("merge_splits", merge, packed, grid, size, memory, seed, mode)
    if q_rope is not None:
        q[..., LATENT:] = q_rope
    _check_guards(o)
    assert not counters.any()
    return _answer(case, q, keys, values, o, lse, sinks, scale)


def _config(case: Case) -> TileConfig:
    dtype = dtypes.parse(case.dtype)
    dtype_o = dtypes.parse(case.o_dtype or case.dtype)
    if case.tile_q != 64:
        return wide_decode_sm90.config(
            dtype,
            dtype_o,
            case.tile_q,
            dtype_kv=dtypes.parse(case.kv_dtype or case.dtype),
            key_scales=case.key_scales,
            sparse=case.sparse,
            tma=case.tma,
        )
    return wide_sm90.config(
        dtype,
        dtype_o,
        case.head_dims,
        dtype_kv=dtypes.parse(case.kv_dtype or case.dtype),
        key_scales=case.key_scales,
        paged=case.is_paged,
        sparse=case.sparse,
        tma=case.tma,
        fused_splits=wide_sm90.FUSED_SPLITS_OF_FEW if case.fused else 0,
    )


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
    kernel = library.load(build.build_kernel(name, config, mode), name)
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


def _make_table(case: Case, rng: np.random.Generator) -> tuple[np.ndarray, list[int], int]:
    """The page table, where requests begin in it, and the number of pages."""
    counts = [-(-n // case.page_size) for n in case.kv_len]
    num_pages = sum(counts) + 3
    table = rng.permutation(num_pages)[: sum(counts)].astype(np.int32)
    return table, [sum(counts[:i]) for i in range(len(counts))], num_pages


def _paginate_latent(
    case: Case, keys: list[np.ndarray], rng: np.random.Generator
) -> tuple[np.ndarray, list[int], np.ndarray, np.ndarray]:
    """Table, starts, and the pools [pages, page_size, 1, columns] of latent and rope parts."""
    table, starts, num_pages = _make_table(case, rng)
    dtype, columns, rows = keys[0].dtype, LATENT + ROPE, case.page_size
    if case.key_scales == "rows":
        whole = np.full((num_pages, rows, 1, NUM_BYTES), 0xFF, np.uint8)
        _fill_pages(case, table, starts, keys, whole)
        return table, starts, whole[..., :LATENT], whole[..., NUM_BYTES - 2 * ROPE :]
    if case.packed:
        whole = np.full((num_pages, rows, 1, columns), np.nan, dtype)
        latent, rope = whole[..., :LATENT], whole[..., LATENT:]
    else:
        # Apart, with strides of their own.
        latent = np.full((num_pages, rows + 1, 1, columns), np.nan, dtype)[:, :rows, :, :LATENT]
        rope = np.full((num_pages + 1, rows + 2, 1, ROPE + 16), np.nan, dtype)
        rope = rope[:num_pages, :rows, :, :ROPE]
    _fill_pages(case, table, starts, keys, latent)
    _fill_pages(case, table, starts, [x[..., LATENT:] for x in keys], rope)
    return table, starts, latent, rope


def _scaled_rows(keys: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Rows of 656 bytes of keys [n, 1, 576] of e4m3, with scales of any size."""
    count = len(keys)
    scales = np.exp2(rng.uniform(-9, 1, (count, 1, 4))).astype(np.float32)
    rope = keys[..., LATENT:].astype(ml_dtypes.bfloat16)
    parts = np.ascontiguousarray(keys[..., :LATENT]), scales, np.ascontiguousarray(rope)
    in_bytes = [
        x.view(np.uint8).reshape(count, 1, n) for x, n in zip(parts, (512, 16, 128), strict=True)
    ]
    return np.concatenate(in_bytes, -1)


def _scale_rope(keys: np.ndarray, scale: float) -> np.ndarray:
    scaled = keys.astype(np.float32)
    scaled[..., LATENT:] *= np.float32(scale)
    return scaled


def _scale_tokens(
    case: Case, table: np.ndarray, keys: list[np.ndarray], num_pages: int, rng: np.random.Generator
) -> tuple[np.ndarray, list[np.ndarray]]:
    """Scales [num_pages, page_size] of tokens, NaN where nobody owns one, and keys times these."""
    scales = np.full((num_pages, case.page_size), np.nan, np.float32)
    scaled, place = [], 0
    for own in keys:
        made = np.exp2(rng.uniform(-6, 2, len(own))).astype(np.float32)
        whole = own.astype(np.float32)
        whole[..., :LATENT] *= made[:, None, None]
        scaled.append(whole)
        for i, scale in enumerate(made):
            scales[table[place + i // case.page_size], i % case.page_size] = scale
        place += -(-len(own) // case.page_size)
    return scales, scaled


def _lay_out(
    case: Case, keys: list[np.ndarray], values: list[np.ndarray], rng: np.random.Generator
) -> tuple[np.ndarray, list[int], np.ndarray, np.ndarray]:
    """Table, starts, K and V: pages, or one of all rows if the case is not paged."""
    dtype = keys[0].dtype
    table, starts, num_pages = _make_table(case, rng)
    shape = num_pages, case.page_size
    if not case.is_paged:
        lengths = [len(x) + 3 for x in keys]
        table, starts = np.zeros(0, np.int32), [sum(lengths[:i]) for i in range(len(keys))]
        shape = 1, sum(lengths)
    pools = []
    for own, pad in ((keys, 8), (values, 16)):
        columns = own[0].shape[-1]
        pool = np.full((*shape, case.kv_heads, columns + pad), np.nan, dtype)[..., :columns]
        if case.is_paged:
            _fill_pages(case, table, starts, own, pool)
        else:
            for start, x in zip(starts, own, strict=True):
                pool[0, start : start + len(x)] = x
        pools.append(pool)
    return table, starts, *pools


def _fill_pages(
    case: Case, table: np.ndarray, starts: list[int], rows: list[np.ndarray], pool: np.ndarray
) -> None:
    for start, own in zip(starts, rows, strict=True):
        for i, row in enumerate(own):
            page = table[start + i // case.page_size]
            pool[page, i % case.page_size] = row[..., : pool.shape[-1]]


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
        for first_row in range(0, qo_len * case.num_heads, case.tile_q):
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
                    **_listed(case, kv_len, split, len(items)),
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


def _listed(case: Case, kv_len: int, split: int, place: int) -> dict[str, int]:
    """Where a part begins and ends, and the item behind it."""
    if not (case.cuts or case.blocks):
        return {}
    num_tiles = -(-kv_len // 64)
    bounds = np.array((*(case.cuts or (0,)), num_tiles), np.int64)
    tiles = [-(-n * case.num_heads // case.tile_q) for n in case.qo_len]
    count = case.splits * sum(tiles)
    following = place + case.blocks if case.blocks and place + case.blocks < count else 0
    packed = pack(bounds[split : split + 1], bounds[split + 1 : split + 2], np.int64(following))
    low, high = packed.view(np.int32)
    return {"mask_start_low": int(low), "mask_start_high": int(high)}


def _answer(
    case: Case,
    q: np.ndarray,
    keys: list[np.ndarray],
    values: list[np.ndarray],
    o: np.ndarray,
    lse: np.ndarray,
    sinks: np.ndarray | None,
    scale: float,
) -> Answer:
    answer = Answer(case, [], [], [], [])
    token = 0
    for qo_len, k, v in zip(case.qo_len, keys, values, strict=True):
        rows = slice(token, token + qo_len)
        token += qo_len
        expected_o, expected_lse = attention(
            *(x.astype(np.float64) for x in (q[rows], k, v)),
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
