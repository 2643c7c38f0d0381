"""Cascades and mixed batches on the GPU: random ones, against each other, and in graphs."""

from __future__ import annotations

from dataclasses import replace
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from helpers import batches, cascade_calls, compare, mixed_calls
from helpers.on_gpu import capture, framework, ints, same, scratch, try_random, workspace
from helpers.poison import download, raw, upload
from helpers.share import some

import cupyattn
from cupyattn.engine import own_workspace
from cupyattn.launch.attention.batch import BatchLauncher

pytestmark = pytest.mark.gpu

cupy = pytest.importorskip("cupy")

BLOCK = 100


def force(monkeypatch: pytest.MonkeyPatch, is_shared: bool) -> None:
    """Levels are kept, or never, where both would answer."""
    monkeypatch.setattr(BatchLauncher, "gains_by_levels", lambda *_: is_shared)


@pytest.mark.parametrize("first", range(0, cascade_calls.NUM_CASES, BLOCK))
def test_random_cascades(first: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def make(seed: int, xp: ModuleType) -> Any:
        with monkeypatch.context() as patch:
            if seed % 3:
                force(patch, seed % 3 == 1)
            return cascade_calls.planned(cascade_calls.random_case(seed), xp, workspace(xp))

    try_random(first, BLOCK, make, turn=4)


@pytest.mark.parametrize("first", range(0, mixed_calls.NUM_CASES, BLOCK))
def test_random_mixed_batches(first: int) -> None:
    try_random(first, BLOCK, mixed_calls.planned, turn=4)


# --- against each other ---


def test_four_ways_to_the_same_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """A cascade by levels, without levels, the paged wrapper and BatchAttention."""
    count = seed = 0
    while count < some(100):
        case = cascade_calls.random_case(seed)
        xp = framework(seed)
        seed += 1
        if len(case.levels) == 1:
            continue
        call = cascade_calls.Call(case, xp)
        table = call.flat_table()
        if table is None or not len(call.q):
            continue
        count += 1
        arguments, options = call.plan_arguments()
        answers = []
        for is_shared in (True, False):
            with monkeypatch.context() as patch:
                force(patch, is_shared)
                plan = call.plan(workspace(xp))._current
            assert plan is not None and (plan.batch.levels is not None) == is_shared
            answers.append(call.run())
        *rows_and_pages, kv_len = table
        paged = cupyattn.BatchPrefillWithPagedKVCacheWrapper(workspace(xp), case.kv_layout)
        paged.plan(*rows_and_pages, *arguments[4:], **options)
        answers.append(call.run_on(paged))
        has_window = options.pop("window_left") >= 0
        if not has_window and options.pop("pos_encoding_mode") == "NONE":
            mixed = cupyattn.BatchAttention(case.kv_layout)
            dim, page_size = arguments[6:]
            sizes = (*arguments[4:6], dim, dim, page_size)
            mixed.plan(*rows_and_pages[:3], kv_len, *sizes, **options)
            answers.append(call.run_on(mixed))
        for answer in answers:
            call.check(*answer)
        for answer in answers[2:]:
            for a, b in zip(answers[1], answer, strict=True):
                compare.assert_bitwise_equal(a, b, case)


@pytest.mark.parametrize("is_shared", [True, False])
@pytest.mark.parametrize("name", ["cupy", "torch"])
def test_sinks_count_once(name: str, is_shared: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three levels, the first long enough to be split: sinks that outweigh all keys."""
    xp = pytest.importorskip(name)
    force(monkeypatch, is_shared)
    levels = (((40,), (8192,)), ((24, 16), (512, 256)), ((1,) * 40, (33,) * 40))
    base = cascade_calls.random_case(0)
    case = replace(
        base,
        levels=levels,
        page_size=16,
        num_kv_heads=2,
        group=4,
        causal=False,
        window_left=-1,
        has_sinks=True,
    )
    call = cascade_calls.Call(case, xp)
    call.extras["sinks"] = np.linspace(-20, 20, 8).astype(np.float32)
    call.given["sinks"] = upload(call.extras["sinks"], xp)
    call.plan(workspace(xp))
    call.check(*call.run())


# --- graphs ---

HEADS, KV_HEADS, DIM, PAGE, POOL = 8, 2, 128, 16, 400
SIZES = HEADS, KV_HEADS, DIM, PAGE

# Rows of each request, level by level.
_SHAPES = {
    "decode": ([64], [1] * 64),
    "three levels": ([12], [4, 8], [1] * 12),
    "prefill": ([200], [50, 150]),
    "rows of both kinds": ([60], [40, 1, 1, 1, 17]),
}


def random_tables(
    rng: np.random.Generator, rows: tuple[list[int], ...], is_whole: bool
) -> tuple[list[Any], ...]:
    """indptr, ids and last_page_len of each level; some requests have no keys."""
    tables = []
    for level, counts in enumerate(rows):
        is_last = level == len(rows) - 1
        longest = 300 if is_last else 2500
        lengths = rng.integers(0, longest, len(counts)) * (rng.random(len(counts)) < 0.9)
        if is_last:
            lengths = np.maximum(lengths, counts)
        elif is_whole:
            lengths = lengths // PAGE * PAGE
        pages = -(-lengths // PAGE)
        indptr = batches.offsets(list(pages))
        ids = rng.integers(0, POOL, int(indptr[-1]) + 3).astype(np.int32)
        ids[indptr[-1] :] = 2**31 - 1
        last = np.where(lengths > 0, (lengths - 1) % PAGE + 1, 0).astype(np.int32)
        tables.append([indptr, ids, last])
    return tuple(tables)


def graph_wrapper(xp: Any, rows: tuple[list[int], ...]) -> Any:
    buffers: list[list[Any]] = [[], [], [], []]
    for counts in rows:
        sizes = len(counts) + 1, len(counts) + 1, 2000, len(counts)
        for kind, size in zip(buffers, sizes, strict=True):
            kind.append(ints(xp, size))
    return cupyattn.MultiLevelCascadeAttentionWrapper(len(rows), scratch(xp), "NHD", True, *buffers)


@pytest.mark.parametrize("name", ["torch", "cupy"])
@pytest.mark.parametrize("kind", _SHAPES)
def test_replays_follow_the_plans(name: str, kind: str) -> None:
    """Each as an eager run of the same plan answers, bit for bit, and close to pages alone."""
    torch, xp = pytest.importorskip("torch"), pytest.importorskip(name)
    rows = _SHAPES[kind]
    rng = np.random.default_rng(11)
    count = sum(rows[0])
    values = rng.standard_normal((count, HEADS, DIM)).astype(np.float16)
    cache = upload(rng.standard_normal((POOL, 2, PAGE, KV_HEADS, DIM)).astype(np.float16), xp)
    q, out = upload(values, xp), upload(values, xp)
    lse = upload(np.zeros((count, HEADS), np.float32), xp)
    captured, eager = graph_wrapper(xp, rows), graph_wrapper(xp, rows)
    paged = cupyattn.BatchPrefillWithPagedKVCacheWrapper(scratch(xp))

    def plan(tables: tuple[list[Any], ...], dealt: tuple[list[int], ...]) -> None:
        lists = [list(x) for x in zip(*tables, strict=True)]
        indptrs = [batches.offsets(counts) for counts in dealt]
        for wrapper in (captured, eager):
            wrapper.plan(indptrs, *lists, *SIZES, causal=True)

    run = lambda: captured.run(q, cache, out=out, lse=lse, return_lse=True)  # noqa: E731
    plan(random_tables(rng, rows, True), rows)
    run()
    replay = capture(torch, xp, run)
    for step in range(some(60)):
        dealt = rows
        if step % 4 == 3 and len(rows) == 2:  # as many requests, which share the rows otherwise
            cuts = np.sort(rng.integers(0, count + 1, len(rows[1]) - 1))
            if np.diff(cuts, prepend=0, append=count).max() <= max(rows[1]):
                dealt = rows[0], np.diff(cuts, prepend=0, append=count).tolist()
        tables = random_tables(rng, dealt, is_whole=step % 2 == 0)
        given = tables
        if step % 3 == 1:
            given = tuple([a, upload(ids, xp), b] for a, ids, b in tables)
        plan(given, dealt)
        for _ in range(3):
            raw(out)[...] = 0
            replay()
        wanted = eager.run(q, cache, return_lse=True)
        same(out, wanted[0], (kind, step))
        same(lse, wanted[1], (kind, step))
        if step % 2 == 0 and step < 20:
            _compare_with_pages(paged, q, cache, (out, lse), tables, dealt)


def _compare_with_pages(
    paged: Any,
    q: Any,
    cache: Any,
    got: tuple[Any, Any],
    tables: tuple[list[np.ndarray], ...],
    rows: tuple[list[int], ...],
) -> None:
    indptrs = [batches.offsets(counts) for counts in rows]
    ids, pages, last = [], [], []
    for request, first in enumerate(indptrs[-1][:-1]):
        own: list[np.ndarray] = []
        for level, (indptr, all_ids, _) in enumerate(tables):
            place = request
            if level < len(tables) - 1:
                place = int(np.searchsorted(indptrs[level], first, side="right")) - 1
                if place >= len(rows[level]):
                    continue  # no rows
            own.append(all_ids[indptr[place] : indptr[place + 1]])
        ids += own
        pages.append(sum(map(len, own)))
        is_own = len(tables[-1][1][tables[-1][0][request] : tables[-1][0][request + 1]]) > 0
        last.append(tables[-1][2][request] if is_own else PAGE if pages[-1] else 0)
    table = batches.offsets(pages), np.concatenate(ids), np.array(last, np.int32)
    paged.plan(indptrs[-1], *table, *SIZES, causal=True)
    wanted = paged.run(q, cache, return_lse=True)
    for a, b in zip(got, wanted, strict=True):
        np.testing.assert_allclose(
            download(a).astype(np.float64), download(b).astype(np.float64), rtol=2e-3, atol=2e-3
        )


def test_graphs_follow_rows_that_become_fewer() -> None:
    """Rows past those of the plan stay as they are."""
    torch = pytest.importorskip("torch")
    rows = [40], [10] * 4
    rng = np.random.default_rng(12)
    q = upload(rng.standard_normal((40, HEADS, DIM)).astype(np.float16), torch)
    cache = upload(rng.standard_normal((POOL, 2, PAGE, KV_HEADS, DIM)).astype(np.float16), torch)
    out = q.clone()
    captured, eager = graph_wrapper(torch, rows), graph_wrapper(torch, rows)

    def plan(dealt: tuple[list[int], ...]) -> None:
        tables = [list(x) for x in zip(*random_tables(rng, dealt, False), strict=True)]
        for wrapper in (captured, eager):
            wrapper.plan([batches.offsets(x) for x in dealt], *tables, *SIZES, causal=True)

    plan(rows)
    captured.run(q, cache, out=out)
    replay = capture(torch, torch, lambda: captured.run(q, cache, out=out))
    for step in range(some(30)):
        counts = rng.integers(0, 11, 4).tolist()
        dealt = [sum(counts)], counts
        plan(dealt)
        out.fill_(7)
        replay()
        same(out[: sum(counts)], eager.run(q[: sum(counts)], cache), step)
        assert bool((out[sum(counts) :] == 7).all())


def test_plans_against_runs_in_flight() -> None:
    """Two cascades take turns on one wrapper; every run answers for the plan before it."""
    torch = pytest.importorskip("torch")
    rng = np.random.default_rng(13)
    rows = [32], [1] * 32
    q = upload(rng.standard_normal((32, HEADS, DIM)).astype(np.float16), torch)
    cache = upload(rng.standard_normal((POOL, 2, PAGE, KV_HEADS, DIM)).astype(np.float16), torch)
    indptrs = [batches.offsets(x) for x in rows]
    w = cupyattn.MultiLevelCascadeAttentionWrapper(2, scratch(torch))
    tables = [random_tables(rng, rows, index % 2 == 0) for index in range(6)]
    lists = [[list(x) for x in zip(*t, strict=True)] for t in tables]
    for of_device in lists[3:]:
        of_device[1] = [upload(x, torch) for x in of_device[1]]
    wanted = []
    for arguments in lists:
        w.plan(indptrs, *arguments, *SIZES)
        wanted.append(w.run(q, cache).clone())
    for _ in range(some(10)):
        torch.cuda._sleep(10_000_000)
        order = rng.integers(0, len(lists), 20).tolist()
        outs = []
        for index in order:
            w.plan(indptrs, *lists[index], *SIZES)
            outs.append(w.run(q, cache))
        for out, index in zip(outs, order, strict=True):
            assert torch.equal(out, wanted[index])


# --- BatchAttention ---


def test_the_workspace_of_batch_attention_grows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plans of one wrapper, each with more partial states than the last, and runs in flight."""
    torch = pytest.importorskip("torch")
    monkeypatch.setattr(own_workspace, "_FIRST_BYTES", 1 << 16)
    calls = []
    for longest in (300, 3_000, 12_000, 30_000):
        lengths = [700, longest, longest, 300]
        b = batches.make([40, 1, 1, 1], lengths, 16, heads=(8, 2), dims=(128, 128))
        tables = b.qo_indptr, b.indptr, upload(b.indices, torch), np.array(lengths, np.int32)
        calls.append((tables, upload(b.q, torch), upload(b.one_tensor(), torch)))

    def run(w: Any, index: int) -> Any:
        tables, q, cache = calls[index]
        types = {"q_data_type": "float16", "kv_data_type": "float16"}
        w.plan(*tables, 8, 2, 128, 128, 16, causal=True, **types)
        return w.run(q, cache)

    wanted = [run(cupyattn.BatchAttention(), index) for index in range(len(calls))]
    w = cupyattn.BatchAttention()
    torch.cuda._sleep(10_000_000)
    got = [run(w, index) for index in range(len(calls))]
    assert w._outgrown and w._workspace.framework == "torch"
    for index, pair in enumerate(zip(got, wanted, strict=True)):
        for a, x in zip(*pair, strict=True):
            same(a, x, index)


@pytest.mark.parametrize("name", ["cupy", "torch"])
@pytest.mark.parametrize("device", ["cuda", "cuda:0"])
def test_device_arguments_of_batch_attention(name: str, device: str) -> None:
    xp = pytest.importorskip(name)
    b = batches.make([20, 1], [50, 70], 4, heads=(4, 2), dims=(64, 64))
    given = xp.device(device) if name == "torch" else device
    w = cupyattn.BatchAttention("NHD", given)
    w.plan(
        *(upload(x, xp) for x in (b.qo_indptr, b.indptr, b.indices)),
        upload(np.array(b.kv_len, np.int32), xp),
        *(4, 2, 64, 64, 4),
        causal=True,
        q_data_type="float16",
        kv_data_type="float16",
    )
    got = w.run(upload(b.q, xp), upload(b.one_tensor(), xp))
    ref = b.expected(causal=True)
    for x, wanted in zip(got, ref, strict=True):
        np.testing.assert_allclose(download(x).astype(np.float64), wanted, atol=4e-3)
