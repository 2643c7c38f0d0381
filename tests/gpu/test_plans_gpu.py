"""Plans from tables on the GPU: the answers of plans from the host, bit for bit."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from helpers import batches, compare
from helpers.on_gpu import scratch
from helpers.poison import download, upload

import cupyattn
from cupyattn import mla
from cupyattn.errors import ArgumentError
from cupyattn.wrappers import decode

pytestmark = pytest.mark.gpu

HEADS, DIM, PAGE = (8, 2), 64, 16


def lengths_of(seed: int) -> list[int]:
    """Equal ones, uneven ones, few and many, some of them empty or very long."""
    rng = np.random.default_rng(seed)
    count = int(rng.choice([1, 3, 40, 300, 512, 700]))
    if seed % 4 == 0:
        return [int(rng.integers(1, 400))] * count
    lengths = rng.integers(0, 400, count)
    if seed % 4 == 1:
        lengths[rng.integers(count)] = 9000
    return [max(1, int(n)) for n in lengths]


def batch_of(seed: int) -> batches.Batch:
    lengths = lengths_of(seed)
    return batches.make([1] * len(lengths), lengths, PAGE, heads=HEADS, dims=(DIM, DIM), seed=seed)


def run(w: Any, b: batches.Batch, xp: Any) -> list[np.ndarray]:
    answer = w.run(upload(b.q, xp), upload(b.one_tensor(), xp), return_lse=True)
    return [download(x) for x in answer]


def same(got: list[np.ndarray], wanted: list[np.ndarray], what: str) -> None:
    for x, y in zip(got, wanted, strict=True):
        compare.assert_bitwise_equal(x, y, what)


@pytest.mark.parametrize("kind", ["int32", "int64"])
def test_decodes(xp: Any, kind: str) -> None:
    workspace = scratch(xp)
    planned = 0
    for seed in range(8):
        b = batch_of(seed)
        on_host, on_gpu = (cupyattn.BatchDecodeWithPagedKVCacheWrapper(workspace) for _ in range(2))
        on_host.plan(*b.table, *HEADS, DIM, PAGE)
        wanted = run(on_host, b, xp)
        ids = upload(b.table[1], xp)
        tables = [upload(x.astype(kind), xp) for x in (b.table[0], b.table[2])]
        for _ in range(2):
            on_gpu.plan(tables[0], ids, tables[1], *HEADS, DIM, PAGE)
            same(run(on_gpu, b, xp), wanted, f"seed {seed}, {len(b.table[2])} requests")
        ((_, made),) = on_gpu._current.prepared.items()
        planned += made.schedule.words.size == 0
    assert planned >= 3, "the GPU has made too few lists"


def is_made_by_gpu(w: Any) -> bool:
    """Whether the words of the plan were never on the host."""
    ((_, made),) = w._current.prepared.items()
    return made.schedule.words.size == 0


def synchronize(xp: Any) -> None:
    (xp.cuda if xp.__name__ == "torch" else xp.cuda.Device()).synchronize()


@pytest.mark.parametrize("has_ids_on_gpu", [False, True])
def test_an_idle_gpu_makes_lists_of_tables_on_the_host(xp: Any, has_ids_on_gpu: bool) -> None:
    """They split keys as those of the host: in a wrapper's first plan, and while a GPU is busy."""
    workspace, planned = scratch(xp), 0
    again = cupyattn.BatchDecodeWithPagedKVCacheWrapper(workspace)
    for seed in range(12):
        b = batch_of(seed)
        first = cupyattn.BatchDecodeWithPagedKVCacheWrapper(workspace)
        first.plan(*b.table, *HEADS, DIM, PAGE)
        assert not is_made_by_gpu(first)
        wanted = run(first, b, xp)
        tables: list[Any] = [*b.table]
        if has_ids_on_gpu:
            tables[1] = upload(b.table[1], xp)
        for _ in range(2):
            synchronize(xp)
            again.plan(*tables, *HEADS, DIM, PAGE)
            same(run(again, b, xp), wanted, f"seed {seed}, {len(b.table[2])} requests")
            planned += is_made_by_gpu(again)
    assert planned >= 5, "the GPU has made too few lists"


def test_a_busy_gpu_is_not_waited_for(torch: Any) -> None:
    b, big = batch_of(3), torch.randn(8192, 8192, device="cuda")
    w = cupyattn.BatchDecodeWithPagedKVCacheWrapper(scratch(torch))
    w.plan(*b.table, *HEADS, DIM, PAGE)
    wanted = run(w, b, torch)
    for _ in range(3):
        for _ in range(10):
            big @ big
        w.plan(*b.table, *HEADS, DIM, PAGE)
        assert not is_made_by_gpu(w)
        same(run(w, b, torch), wanted, "a busy stream")
    # Nothing is left that torch would take for an error of a launch of its own.
    (big + 1).sum().item()


def test_an_idle_gpu_makes_lists_of_wide_heads(xp: Any) -> None:
    workspace, planned = scratch(xp), 0
    again = mla.BatchMLAPagedAttentionWrapper(workspace)
    heads, options = 16, (512, 64, PAGE, True, 192**-0.5, "float16", "float16")
    for seed in range(6):
        rng = np.random.default_rng(seed)
        count = int(rng.choice([1, 3, 40, 300]))
        keys = rng.integers(1, 700, count)
        keys[rng.integers(count)] = int(rng.choice([5, 3000]))
        pages = -(-keys // PAGE)
        kv_indptr = np.concatenate(([0], pages.cumsum())).astype(np.int32)
        ids = rng.permutation(int(kv_indptr[-1])).astype(np.int32)
        tables = np.arange(count + 1, dtype=np.int32), kv_indptr, ids, keys.astype(np.int32)
        q = upload(rng.standard_normal((count, heads, 576)).astype(np.float16), xp)
        pool = upload(rng.standard_normal((ids.size, PAGE, 576)).astype(np.float16), xp)
        first = mla.BatchMLAPagedAttentionWrapper(workspace)
        first.plan(*tables, heads, *options)
        wanted = [download(x) for x in first.run(query=q, kv_cache=pool, return_lse=True)]
        for _ in range(2):
            synchronize(xp)
            again.plan(*tables, heads, *options)
            got = [download(x) for x in again.run(query=q, kv_cache=pool, return_lse=True)]
            same(got, wanted, f"seed {seed}, {count} requests")
            planned += is_made_by_gpu(again)
    assert planned >= 6, "the GPU has made too few lists"


def test_prompts(xp: Any) -> None:
    workspace = scratch(xp)
    for seed in range(8):
        rng = np.random.default_rng(seed)
        rows = rng.integers(0, 200, int(rng.integers(1, 20)))
        keys = [int(n + rng.integers(1, 700)) for n in rows]
        b = batches.make(rows.tolist(), keys, PAGE, heads=HEADS, dims=(DIM, DIM), seed=seed)
        on_host, on_gpu = (
            cupyattn.BatchPrefillWithPagedKVCacheWrapper(workspace) for _ in range(2)
        )
        on_host.plan(b.qo_indptr, *b.table, *HEADS, DIM, PAGE, causal=True)
        wanted = run(on_host, b, xp)
        tables = [upload(x, xp) for x in (b.qo_indptr, *b.table)]
        for _ in range(2):
            on_gpu.plan(*tables, *HEADS, DIM, PAGE, causal=True)
            same(run(on_gpu, b, xp), wanted, f"seed {seed}")


def test_tables_are_read_behind_what_writes_them(torch: Any) -> None:
    """On the current stream, however long it is busy before."""
    b = batch_of(2)
    w = cupyattn.BatchDecodeWithPagedKVCacheWrapper(scratch(torch))
    w.plan(*b.table, *HEADS, DIM, PAGE)
    wanted = run(w, b, torch)
    tables = [upload(x, torch) for x in b.table]
    hidden = [x.clone() for x in tables]
    big = torch.randn(4096, 4096, device="cuda")
    stream = torch.cuda.Stream()
    for _ in range(3):
        for x in tables[::2]:
            x.zero_()
        torch.cuda.synchronize()
        with torch.cuda.stream(stream):
            for _ in range(20):
                big @ big
            for x, y in zip(tables, hidden, strict=True):
                x.copy_(y)
            w.plan(*tables, *HEADS, DIM, PAGE)
            got = run(w, b, torch)
        same(got, wanted, "a busy stream")


def test_wrong_tables_leave_the_plan_before(xp: Any) -> None:
    b = batch_of(3)
    w = cupyattn.BatchDecodeWithPagedKVCacheWrapper(scratch(xp))
    tables = [upload(x, xp) for x in b.table]
    w.plan(*tables, *HEADS, DIM, PAGE)
    wanted = run(w, b, xp)
    falling, late = b.table[0].copy(), b.table[2].copy()
    falling[1], late[-1] = -3, PAGE + 1
    for spoilt, words in (
        ((upload(falling, xp), tables[1], tables[2]), "indptr: falls from 0 to -3"),
        ((tables[0], tables[1][:3], tables[2]), "indices: shape is"),
        ((tables[0], tables[1], upload(late, xp)), "tokens in its last page"),
    ):
        with pytest.raises(ArgumentError, match=words):
            w.plan(*spoilt, *HEADS, DIM, PAGE)
        same(run(w, b, xp), wanted, words)


def test_a_signature_is_found_again(xp: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    w = cupyattn.BatchDecodeWithPagedKVCacheWrapper(scratch(xp))
    first = batch_of(5)
    w.plan(*(upload(x, xp) for x in first.table), *HEADS, DIM, PAGE)
    monkeypatch.setattr(decode, "read_paged", None)
    for seed in (6, 7):
        b = batch_of(seed)
        w.plan(*(upload(x, xp) for x in b.table), *HEADS, DIM, PAGE)
        run(w, b, xp)
