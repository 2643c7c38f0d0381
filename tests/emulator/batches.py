"""Seeded random batches for BatchLauncher: ragged or paged keys, every option, poisoned memory."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from helpers import cases, poison
from helpers.cases import Case

from cupyattn import dtypes
from cupyattn.launch import params
from cupyattn.launch.attention import AttentionOptions
from cupyattn.launch.batch import BatchLauncher, Capacity
from cupyattn.problem import AttentionProblem
from cupyattn.schedule.batch import BatchRequests

from . import gpu as gpus
from .gpu import STREAM, EmulatedGpu, Launched
from .run import compare_rows

Spoilt = tuple[int, str, Any, float]

_HEADS = ("sinks", "scale_q", "scale_k", "scale_v")


@dataclass(frozen=True)
class Batch:
    """Requests that share the options, heads and dtypes of `case`, and a way to plan them.

    page_size     0: ragged keys
    split_tokens  as BatchLauncher.schedule
    is_captured   planned for a graph: for more requests, rows and tokens than there are
    """

    case: Case
    qo_lens: tuple[int, ...]
    kv_lens: tuple[int, ...]
    page_size: int = 0
    split_tokens: int = 0
    may_split: bool = True
    is_captured: bool = False


@dataclass
class BatchAnswer:
    """What a batch gave: out [rows, heads, dim] and lse, and what is needed to check them."""

    batch: Batch
    out: poison.Poisoned
    lse: poison.Poisoned
    requests: list[dict[str, Any]]
    owned: dict[str, poison.Poisoned]
    num_items: int = 0
    num_merges: int = 0
    launches: list[Launched] = field(default_factory=list)
    seconds: float = 0.0

    def check(self) -> None:
        """Compare each request with the reference; nothing around any array may have moved."""
        case, out, lse = self.batch.case, self.out.values(), self.lse.values()
        row = 0
        for index, arguments in enumerate(self.requests):
            rows = slice(row, row + self.batch.qo_lens[index])
            row = rows.stop
            request = replace(
                case, qo_len=self.batch.qo_lens[index], kv_len=self.batch.kv_lens[index]
            )
            magnitude = cases.logit_magnitude(request)
            what = f"{self.batch}: request {index}"
            compare_rows(out[rows], lse[rows], arguments, what, magnitude)
        for name, poisoned in {**self.owned, "out": self.out, "lse": self.lse}.items():
            poisoned.assert_intact(f"{self.batch}: {name}")


def random_batch(seed: int, base: Case, page_size: int | None = None) -> Batch:
    """A batch of up to six requests with the compile-time options of `base`."""
    rng = np.random.default_rng((seed, 6))
    count = int(rng.integers(1, 7))
    longest = int(rng.choice((1, 4, 20, 70)))
    qo_lens = tuple(
        int(x) for x in rng.integers(0 if rng.random() < 0.3 else 1, longest + 1, count)
    )
    edges = (0, 1, 15, 16, 17, 31, 32, 33, 47, 48, 63, 64, 65, 100, 150, 257)
    kv_lens = tuple(int(rng.choice(edges)) for _ in range(count))
    if rng.random() < 0.5:
        kv_lens = tuple(max(q, kv) for q, kv in zip(qo_lens, kv_lens, strict=True))
    if page_size is None:
        page_size = int(rng.choice((0, 1, 3, 16, 64)))
    case = replace(
        base,
        seed=seed,
        causal=bool(rng.random() < 0.5),
        window_left=int(rng.choice((-1, -1, 0, 5, 40, 1000))),
        num_kv_heads=int(rng.integers(1, 3)),
        group=int(rng.choice((1, 2, 4, 7))),
        has_sinks=bool(rng.random() < 0.25),
    )
    return Batch(
        case,
        qo_lens,
        kv_lens,
        page_size,
        split_tokens=int(rng.choice((0, 0, 32, 64, 130))),
        may_split=bool(rng.random() < 0.85),
        is_captured=bool(rng.random() < 0.3),
    )


def run(batch: Batch, spoil: Sequence[Spoilt] = (), **facts: Any) -> BatchAnswer:
    """Plan and launch a batch on an EmulatedGpu of these facts.

    spoil: (request, name, index, value), to be set in that request's inputs.
    """
    facts.setdefault("num_sms", 16)
    with gpus.plugged_in(**facts) as gpu:
        return _run(batch, spoil, gpu)


def _run(batch: Batch, spoil: Sequence[Spoilt], gpu: EmulatedGpu) -> BatchAnswer:
    case = batch.case
    rng = np.random.default_rng((case.seed, 7))
    made = [
        cases.make_inputs(replace(case, seed=1000 * case.seed + i, qo_len=q, kv_len=kv))
        for i, (q, kv) in enumerate(zip(batch.qo_lens, batch.kv_lens, strict=True))
    ]
    for request, name, index, value in spoil:
        made[request][name][index] = value
    heads = {name: made[0][name] for name in _HEADS}
    for one in made:
        one.update(heads)  # what belongs to heads is the batch's
    owned = {"q": poison.embed(np.concatenate([one["q"] for one in made]))}
    keys = _paged(made, batch.page_size, rng) if batch.page_size else _ragged(made)
    indices, kv_starts = keys.pop("indices"), keys.pop("starts")
    owned |= keys
    requests = BatchRequests(
        np.array(batch.qo_lens, np.int64),
        np.array(batch.kv_lens, np.int64),
        _starts(batch.qo_lens),
        kv_starts,
        None,
    )
    packed = [np.packbits(one["mask"].reshape(-1), bitorder="little") for one in made if _has(one)]
    if packed:
        requests = replace(requests, mask_start=_starts([len(bits) for bits in packed]))
        owned["mask"] = poison.embed(np.concatenate(packed), offset=case.seed % 5)
    for name in _HEADS:
        if isinstance(heads[name], np.ndarray):
            owned[name] = poison.embed(heads[name].astype(np.float32))
    shape = (sum(batch.qo_lens), case.num_qo_heads, case.head_dim_vo)
    answer = BatchAnswer(
        batch,
        poison.blank(shape, case.out_dtype),
        poison.blank(shape[:2], np.dtype(np.float32)),
        [cases.arguments(replace(case, kv_layout="NHD"), one) for one in made],
        owned,
    )
    _launch(answer, requests, indices, gpu)
    answer.launches = gpu.launches
    return answer


def _launch(
    answer: BatchAnswer, requests: BatchRequests, indices: np.ndarray | None, gpu: EmulatedGpu
) -> None:
    batch, case, owned = answer.batch, answer.batch.case, answer.owned
    launcher = BatchLauncher(
        _problem(batch), _options(case), case.num_qo_heads, case.num_kv_heads, batch.page_size, 0
    )
    capacity = None
    if batch.is_captured:
        rows, tokens = sum(batch.qo_lens), sum(batch.kv_lens)
        most = max(batch.qo_lens)
        capacity = Capacity(len(batch.qo_lens) + 2, rows + 30, most, tokens + 100)
    schedule = launcher.schedule(
        requests,
        split_tokens=batch.split_tokens,
        may_split=batch.may_split,
        capacity=capacity,
    )
    for x in owned.values():
        gpu.register(x.array.ctypes.data, _extent(x.array), x.array, is_writable=False)
    for x in (answer.out, answer.lse):
        gpu.register(x.array.ctypes.data, x.array.nbytes, x.array)
    words, _words = gpu.allocate(schedule.words.nbytes)
    _at(words, schedule.words)[...] = schedule.words
    workspace, _workspace = gpu.allocate(schedule.workspace_bytes)
    kv_indices = 0
    if indices is not None:
        kv_indices, _indices = gpu.allocate(indices.nbytes)
        _at(kv_indices, indices)[...] = indices
    pointers = (answer.lse, *(owned.get(name) for name in ("mask", *_HEADS)))
    scales = [case_scale(answer.requests[0][name]) for name in ("scale_q", "scale_k", "scale_v")]
    k, v = owned["k"].array, owned["v"].array
    size = k.dtype.itemsize
    token = 1 if batch.page_size else 0
    steps = [*_steps(owned["q"].array), *(s // size for s in k.strides[token : token + 2])]
    steps += [s // size for s in v.strides[token : token + 2]]
    steps += [*_steps(answer.out.array), *_steps(answer.lse.array, 2)]
    steps += [k.strides[0] // size, v.strides[0] // size] if batch.page_size else [0, 0]
    start = time.perf_counter()
    launcher.launch(
        schedule,
        words,
        workspace,
        owned["q"].array.ctypes.data,
        k.ctypes.data,
        v.ctypes.data,
        answer.out.array.ctypes.data,
        params.OPTIONAL.pack(*(0 if x is None else x.array.ctypes.data for x in pointers)),
        params.STRIDES.pack(*steps),
        kv_indices,
        owned["mask"].array.nbytes if "mask" in owned else 0,
        scales[2],
        launcher.options.sm_scale * scales[0] * scales[1],
        STREAM,
    )
    answer.seconds = time.perf_counter() - start
    after = _at(words, schedule.words)
    assert np.array_equal(after, schedule.words), f"{batch}: the work list or counters changed"
    for part in schedule.parts:
        answer.num_items += sum(launch.grid[1] for launch, _ in part.launches)
        answer.num_merges += (part.counters - part.merges) // 4


def case_scale(value: Any) -> float:
    """A scale that is one number; arrays come to the kernel by themselves."""
    return 1.0 if value is None or isinstance(value, np.ndarray) else float(value)


def _problem(batch: Batch) -> AttentionProblem:
    case = batch.case
    return AttentionProblem(
        dtypes.parse(case.dtype),
        dtypes.parse(case.kv_dtype),
        dtypes.parse(case.o_dtype or case.dtype),
        case.head_dim_qk,
        case.head_dim_vo,
        pos_encoding=case.pos_encoding_mode,
        soft_cap=bool(case.logits_soft_cap),
        custom_mask=case.mask_kind != "none",
        scale_first="per_head" in (case.scale_q, case.scale_k),
        aligned=True,
        paged=batch.page_size > 0,
    )


def _options(case: Case) -> AttentionOptions:
    return AttentionOptions(
        causal=case.causal,
        window_left=case.window_left,
        sm_scale=case.head_dim_qk**-0.5 if case.sm_scale is None else case.sm_scale,
        output_scale=1.0,
        logits_soft_cap=case.logits_soft_cap or 0.0,
        rope_scale=case.rope_scale or 1.0,
        rope_theta=case.rope_theta or 1e4,
    )


def _ragged(made: list[dict[str, Any]]) -> dict[str, Any]:
    k, v = (poison.embed(np.concatenate([one[name] for one in made])) for name in "kv")
    return {"k": k, "v": v, "indices": None, "starts": _starts([len(one["k"]) for one in made])}


def _paged(made: list[dict[str, Any]], page_size: int, rng: np.random.Generator) -> dict[str, Any]:
    """Pages in any order in a pool of more; what no request owns is NaN."""
    counts = [-(-len(one["k"]) // page_size) for one in made]
    num_pages = sum(counts) + 3
    chosen = rng.permutation(num_pages)[: sum(counts)].astype(np.int32)
    starts = _starts(counts)
    pools = {}
    for name in "kv":
        shape = (num_pages, page_size, *made[0][name].shape[1:])
        pool = poison.blank(shape, made[0][name].dtype)
        for start, count, one in zip(starts, counts, made, strict=True):
            for i in range(count):
                rows = one[name][i * page_size : (i + 1) * page_size]
                pool.array[chosen[start + i], : len(rows)] = rows
        pools[name] = pool
    return {**pools, "indices": chosen, "starts": starts}


def _has(one: dict[str, Any]) -> bool:
    return one["mask"] is not None


def _starts(lengths: Any) -> np.ndarray:
    return np.concatenate([[0], np.cumsum(lengths)[:-1]]).astype(np.int64)


def _steps(x: np.ndarray, count: int = 2) -> list[int]:
    return [stride // x.dtype.itemsize for stride in x.strides[:count]]


def _extent(x: np.ndarray) -> int:
    if x.size == 0:
        return 0
    last = sum((n - 1) * s for n, s in zip(x.shape, x.strides, strict=True))
    return last + x.dtype.itemsize


def _at(address: int, like: np.ndarray) -> np.ndarray:
    """The memory at an address as an array like another."""
    import ctypes

    return np.frombuffer((ctypes.c_char * like.nbytes).from_address(address), like.dtype)
