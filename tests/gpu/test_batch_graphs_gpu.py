"""Batches in graphs, on streams, and planned again and again while earlier plans are in flight."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from helpers import batches
from helpers.on_gpu import capture, ints, same, scratch
from helpers.poison import download, raw, upload
from helpers.share import some

import cupyattn

pytestmark = pytest.mark.gpu

cupy = pytest.importorskip("cupy")

HEADS, KV_HEADS, DIM, PAGE, POOL = 8, 2, 128, 16, 400
SIZES = HEADS, KV_HEADS, DIM, PAGE
# Cycles of a kernel that only waits: a few milliseconds.
_WAIT = 10_000_000


def pool(xp: Any, seed: int = 0) -> Any:
    rng = np.random.default_rng(seed)
    values = rng.standard_normal((POOL, 2, PAGE, KV_HEADS, DIM)).astype(np.float16)
    return upload(values, xp)


def random_table(rng: np.random.Generator, count: int, longest: int = 1500) -> list[np.ndarray]:
    """indptr, indices and last_page_len of `count` requests over the pool; some are empty."""
    lengths = rng.integers(0, longest, count) * (rng.random(count) < 0.9)
    if rng.random() < 0.3:
        lengths[0] = 2000
    pages = -(-lengths // PAGE)
    indptr = batches.offsets(list(pages))
    while indptr[-1] > 1000:
        return random_table(rng, count, longest // 2)
    ids = rng.integers(0, POOL, int(indptr[-1]) + 3).astype(np.int32)
    ids[indptr[-1] :] = 2**31 - 1
    last = np.where(lengths > 0, (lengths - 1) % PAGE + 1, 0).astype(np.int32)
    return [indptr, ids, last]


def alike(got: Any, wanted: Any, what: object) -> None:
    """Up to rounding: outputs are averages of normal numbers in float16."""
    a, b = (download(x).astype(np.float32) for x in (got, wanted))
    np.testing.assert_allclose(a, b, rtol=0, atol=4e-3, err_msg=str(what))


def queries(xp: Any, rows: int, seed: int = 1) -> Any:
    rng = np.random.default_rng(seed)
    return upload(rng.standard_normal((rows, HEADS, DIM)).astype(np.float16), xp)


# --- graphs: 200 plans of five kinds, ten replays each ---

_KINDS = {
    "decode": (1, 8),
    "decode of one request": (1, 1),
    "verification": (4, 6),
    "append": (30, 4),
    "prefill": (100, 3),
}


@pytest.mark.parametrize("kind", _KINDS)
def test_replays_follow_the_plans(torch: Any, xp: Any, kind: str) -> None:
    """1,000 replays a case, each as the call of another wrapper of graphs answers, bit for bit.

    Plans that no graph keeps may choose other tiles: their answers differ by rounding.
    """
    q_len, count = _KINDS[kind]
    rng = np.random.default_rng(5)
    q, cache = queries(xp, q_len * count), pool(xp)
    out, lse = queries(xp, q_len * count, 2), upload(np.zeros((q_len * count, HEADS), "f4"), xp)
    is_decode = q_len <= 4

    def of_graphs() -> Any:
        buffers = ints(xp, count + 1), ints(xp, 1100), ints(xp, count)
        if is_decode:
            return cupyattn.CUDAGraphBatchDecodeWithPagedKVCacheWrapper(scratch(xp), *buffers)
        cls = cupyattn.BatchPrefillWithPagedKVCacheWrapper
        return cls(scratch(xp), "NHD", True, ints(xp, count + 1), *buffers)

    graph_wrapper, other = of_graphs(), of_graphs()
    eager: Any = cupyattn.BatchPrefillWithPagedKVCacheWrapper(scratch(xp))
    if is_decode:
        eager = cupyattn.BatchDecodeWithPagedKVCacheWrapper(scratch(xp))
    rows = batches.offsets([q_len] * count)

    def plan(wrapper: Any, table: list[Any]) -> None:
        if is_decode:
            wrapper.plan(*table, *SIZES, q_len_per_req=q_len)
        else:
            wrapper.plan(rows, *table, *SIZES, causal=True)

    first = random_table(rng, count)
    plan(graph_wrapper, first)
    plan(other, first)
    run = lambda: graph_wrapper.run(q, cache, out=out, lse=lse, return_lse=True)  # noqa: E731
    run()
    replay = capture(torch, xp, run)
    for step in range(some(100)):
        table: list[Any] = random_table(rng, count)
        if step % 2:
            table[1] = upload(table[1], xp)
        plan(graph_wrapper, table)
        for _ in range(some(10)):
            raw(out)[...] = 0
            replay()
        for wrapper, compare in ((other, same), (eager, alike)):
            plan(wrapper, table)
            wanted = wrapper.run(q, cache, return_lse=True)
            compare(out, wanted[0], (kind, step))
            compare(lse, wanted[1], (kind, step))


def test_masks_change_between_replays(torch: Any) -> None:
    count, q_len = 3, 6
    rng = np.random.default_rng(3)
    q, cache = queries(torch, q_len * count), pool(torch)
    out = queries(torch, q_len * count, 2)
    rows = batches.offsets([q_len] * count)
    cls = cupyattn.BatchPrefillWithPagedKVCacheWrapper
    eager, graph_wrapper = (
        cls(scratch(torch)),
        cls(
            scratch(torch),
            use_cuda_graph=True,
            qo_indptr_buf=ints(torch, count + 1),
            paged_kv_indptr_buf=ints(torch, count + 1),
            paged_kv_indices_buf=ints(torch, 1100),
            paged_kv_last_page_len_buf=ints(torch, count),
            custom_mask_buf=upload(np.zeros(20_000, np.uint8), torch),
            mask_indptr_buf=ints(torch, count + 1),
        ),
    )

    def plan() -> list[Any]:
        table = random_table(rng, count)
        pages = np.diff(table[0])
        kv_len = np.where(pages > 0, (pages - 1) * PAGE + table[2], 0)
        mask = upload(rng.random(int((kv_len * q_len).sum())) < 0.4, torch)
        for wrapper in (graph_wrapper, eager):
            wrapper.plan(rows, *table, *SIZES, custom_mask=mask)
        return table

    plan()
    graph_wrapper.run(q, cache, out=out)
    replay = capture(torch, torch, lambda: graph_wrapper.run(q, cache, out=out))
    for step in range(some(60)):
        plan()
        replay()
        alike(out, eager.run(q, cache), step)


def test_ragged_lengths_change_between_replays(torch: Any) -> None:
    count, max_rows, max_keys = 4, 200, 3000
    rng = np.random.default_rng(4)
    values = rng.standard_normal((2, max_keys, KV_HEADS, DIM)).astype(np.float16)
    k, v = (upload(x, torch) for x in values)
    q, out = queries(torch, max_rows), queries(torch, max_rows, 2)
    cls = cupyattn.BatchPrefillWithRaggedKVCacheWrapper
    buffers = ints(torch, count + 1), ints(torch, count + 1)
    w = cls(scratch(torch), "NHD", True, *buffers)
    sizes = HEADS, KV_HEADS, DIM
    w.plan(batches.offsets([50] * 4), batches.offsets([700] * 4), *sizes, causal=True)
    w.run(q, k, v, out=out)
    replay = capture(torch, torch, lambda: w.run(q, k, v, out=out))
    for step in range(some(60)):
        qo_len = rng.multinomial(int(rng.integers(0, max_rows)), [0.25] * 4)
        kv_len = rng.multinomial(int(rng.integers(0, max_keys)), [0.25] * 4)
        indptr = batches.offsets(list(qo_len)), batches.offsets(list(kv_len))
        w.plan(*indptr, *sizes, causal=True)
        replay()
        rows = int(indptr[0][-1])
        if rows:
            same(out[:rows], w.run(q[:rows], k, v), step)


# --- planning while earlier plans are in flight ---


@pytest.mark.parametrize(
    "count", [3_000, pytest.param(100_000, marks=pytest.mark.slow)], ids=["some", "all"]
)
@pytest.mark.parametrize("ids", ["host", "device"])
def test_plans_against_runs_in_flight(torch: Any, count: int, ids: str) -> None:
    """Batches take turns; every run must answer for the plan before it, however late it starts."""
    rng = np.random.default_rng(6)
    q, cache = queries(torch, 4), pool(torch)
    tables: list[list[Any]] = [random_table(rng, 4) for _ in range(8)]
    if ids == "device":
        tables = [[t[0], upload(t[1], torch), t[2]] for t in tables]
    w = cupyattn.BatchDecodeWithPagedKVCacheWrapper(scratch(torch))
    wanted = []
    for table in tables:
        w.plan(*table, *SIZES)
        wanted.append(w.run(q, cache).clone())
    chunk = 50
    outs = torch.empty((chunk, *q.shape), dtype=q.dtype, device=q.device)
    for first in range(0, some(count), chunk):
        order = rng.integers(0, len(tables), chunk)
        if first % 1000 == 0:
            torch.cuda._sleep(_WAIT)
        for place, index in enumerate(order.tolist()):
            w.plan(*tables[index], *SIZES)
            w.run(q, cache, out=outs[place])
        expected = torch.stack([wanted[index] for index in order.tolist()])
        assert torch.equal(outs, expected), f"after plan {first}"


def test_two_wrappers_on_two_streams(torch: Any) -> None:
    rng = np.random.default_rng(7)
    q, cache = queries(torch, 4), pool(torch)
    streams = [torch.cuda.Stream() for _ in range(2)]
    wrappers = [cupyattn.BatchDecodeWithPagedKVCacheWrapper(scratch(torch)) for _ in range(2)]
    tables = [random_table(rng, 4) for _ in range(6)]
    wanted = []
    for table in tables:
        wrappers[0].plan(*table, *SIZES)
        wanted.append(wrappers[0].run(q, cache).clone())
    torch.cuda.synchronize()
    for round_ in range(some(40)):
        outs = []
        for stream, wrapper in zip(streams, wrappers, strict=True):
            with torch.cuda.stream(stream):
                if round_ % 10 == 0:
                    torch.cuda._sleep(_WAIT)
                for _ in range(5):
                    index = int(rng.integers(len(tables)))
                    wrapper.plan(*tables[index], *SIZES)
                    outs.append((wrapper.run(q, cache), index))
        torch.cuda.synchronize()
        for out, index in outs:
            assert torch.equal(out, wanted[index]), (round_, index)


def test_wrappers_come_and_go_with_copies_in_flight(torch: Any) -> None:
    """Pinned memory of a wrapper that is gone must not be written before its copy is over."""
    rng = np.random.default_rng(8)
    q, cache = queries(torch, 4), pool(torch)
    workspace = scratch(torch)
    tables = [random_table(rng, 4) for _ in range(4)]
    wanted = []
    for table in tables:
        w = cupyattn.BatchDecodeWithPagedKVCacheWrapper(workspace)
        w.plan(*table, *SIZES)
        wanted.append(w.run(q, cache))
    for _ in range(5):
        torch.cuda._sleep(_WAIT)
        outs = []
        for index in [0, 1, 2, 3] * 5:
            w = cupyattn.BatchDecodeWithPagedKVCacheWrapper(workspace)
            w.plan(*tables[index], *SIZES)
            outs.append((w.run(q, cache), index))
            del w
        for out, index in outs:
            assert torch.equal(out, wanted[index])


def test_many_layers_share_a_plan(torch: Any) -> None:
    """A model's layers: one plan, caches that differ, one captured graph."""
    rng = np.random.default_rng(9)
    layers = 6
    q, caches = queries(torch, 8), [pool(torch, seed) for seed in range(layers)]
    outs = [queries(torch, 8, 2) for _ in range(layers)]
    buffers = ints(torch, 9), ints(torch, 1100), ints(torch, 8)
    w = cupyattn.CUDAGraphBatchDecodeWithPagedKVCacheWrapper(scratch(torch), *buffers)

    def forward() -> None:
        for cache, out in zip(caches, outs, strict=True):
            w.run(q, cache, out=out)

    w.plan(*random_table(rng, 8), *SIZES)
    forward()
    replay = capture(torch, torch, forward)
    eager = cupyattn.BatchDecodeWithPagedKVCacheWrapper(scratch(torch))
    for step in range(some(50)):
        table = random_table(rng, 8)
        w.plan(*table, *SIZES)
        replay()
        eager.plan(*table, *SIZES)
        for layer, (cache, out) in enumerate(zip(caches, outs, strict=True)):
            same(out, w.run(q, cache), (step, layer))
            # This plan knows the lengths, so it may have another kernel.
            torch.testing.assert_close(out, eager.run(q, cache), rtol=4e-3, atol=4e-4)
