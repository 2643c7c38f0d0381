"""Batches on the GPU against the float64 answer: random ones, far offsets, splits, bad input."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import numpy as np
import pytest
from helpers import batches, calls, compare, poison
from helpers.batch_calls import planned
from helpers.batch_cases import NUM_CASES, random_case
from helpers.on_gpu import try_random, workspace
from helpers.poison import download, raw, upload
from helpers.share import some

import cupyattn
from cupyattn.errors import ArgumentError, UnsupportedError, WorkspaceError
from cupyattn.launch.driver import enqueue

pytestmark = pytest.mark.gpu

cupy = pytest.importorskip("cupy")

BLOCK = 10  # each case has kernels of its own, which one process compiles in turn


@pytest.mark.parametrize("first", range(0, NUM_CASES, BLOCK))
def test_random_batches(first: int) -> None:
    make = lambda seed, xp: planned(random_case(seed), xp, workspace(xp))  # noqa: E731
    try_random(first, BLOCK, make, turn=3)


# --- answers of single batches ---


def check(got: Any, b: batches.Batch, **options: Any) -> None:
    calls.check_batch(got, b, "a batch", **options)


def decode(
    xp: ModuleType, b: batches.Batch, heads: tuple[int, int], dim: int, **options: Any
) -> Any:
    w = cupyattn.BatchDecodeWithPagedKVCacheWrapper(workspace(xp))
    w.plan(*b.table, *heads, dim, b.page_size, **options)
    return w.run(upload(b.q, xp), upload(b.one_tensor(), xp), return_lse=True)


@pytest.mark.parametrize("name", ["cupy", "torch"])
@pytest.mark.parametrize("page_size", [1, 16, 64])
def test_one_long_request_among_short_ones(name: str, page_size: int) -> None:
    xp = pytest.importorskip(name)
    b = batches.make([1] * 20, [40_000] + [300] * 19, page_size, heads=(8, 2), dims=(128, 128))
    check(decode(xp, b, (8, 2), 128), b)


@pytest.mark.parametrize("name", ["cupy", "torch"])
def test_a_mixed_batch_of_chunks_and_decodes(name: str) -> None:
    xp = pytest.importorskip(name)
    b = batches.make([300] + [1] * 30, [2000] + [700] * 30, 16, heads=(8, 2), dims=(128, 128))
    w = cupyattn.BatchPrefillWithPagedKVCacheWrapper(workspace(xp))
    w.plan(b.qo_indptr, *b.table, 8, 2, 128, 16, causal=True)
    check(w.run(upload(b.q, xp), upload(b.one_tensor(), xp), return_lse=True), b, causal=True)


@pytest.mark.parametrize("where", ["host", "device"])
@pytest.mark.parametrize("kind", ["int32", "int64"])
@pytest.mark.parametrize("name", ["cupy", "torch"])
def test_tables_on_either_side(name: str, kind: str, where: str) -> None:
    xp = pytest.importorskip(name)
    b = batches.make([3, 0, 2], [50, 7, 33], 4, heads=(4, 2), dims=(64, 64))
    table = [x.astype(kind) for x in (b.qo_indptr, *b.table)]
    if where == "device":
        table = [upload(x, xp) for x in table]
    w = cupyattn.BatchPrefillWithPagedKVCacheWrapper(workspace(xp))
    w.plan(*table, 4, 2, 64, 4, causal=True)
    check(w.run(upload(b.q, xp), upload(b.one_tensor(), xp), return_lse=True), b, causal=True)


def test_frameworks_may_be_mixed() -> None:
    """The workspace and the table are CuPy's, queries torch's: streams wait for each other."""
    torch = pytest.importorskip("torch")
    b = batches.make([1, 1], [50, 700], 4, heads=(4, 2), dims=(64, 64))
    w = cupyattn.BatchDecodeWithPagedKVCacheWrapper(workspace(cupy))
    w.plan(b.indptr, upload(b.indices, cupy), b.last_page_len, 4, 2, 64, 4)
    got = w.run(upload(b.q, torch), upload(b.one_tensor(), torch), return_lse=True)
    assert all(isinstance(x, torch.Tensor) for x in got)
    check(got, b)


def test_jax_queries_over_a_jax_cache() -> None:
    jax = pytest.importorskip("jax")
    try:
        device = jax.devices("gpu")[0]
    except RuntimeError:
        pytest.skip("JAX is here without CUDA")
    b = batches.make([1, 1], [50, 700], 4, heads=(4, 2), dims=(64, 64))
    w = cupyattn.BatchDecodeWithPagedKVCacheWrapper(workspace(cupy))
    w.plan(*b.table, 4, 2, 64, 4)
    q, cache = (jax.device_put(x, device) for x in (b.q, b.one_tensor()))
    o, lse = w.run(q, cache, return_lse=True)
    assert isinstance(o, jax.Array) and isinstance(lse, jax.Array)
    host = (cupy.asarray(np.asarray(x)) for x in (o, lse))
    check(tuple(host), b)


@pytest.mark.large(gib=8)
@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("form", ["one", "pair"])
@pytest.mark.parametrize("q_len", [1, 40])
def test_a_cache_of_more_elements_than_31_bits_count(layout: str, form: str, q_len: int) -> None:
    page_size, heads, kv_heads, dim = 16, 8, 8, 128
    b = batches.make(
        [q_len] * 3, [300, 77, 900], page_size, heads=(heads, kv_heads), dims=(dim, dim)
    )
    few = b.one_tensor(layout)
    count = (1 << 31) // few[0].size + 5000
    pool = cupy.empty((count, *few.shape[1:]), np.uint16)
    pool[...] = 0x7E00  # NaN
    rng = np.random.default_rng(0)
    far = np.sort(rng.choice(count, len(few), replace=False))
    far[-1] = count - 1
    pool[cupy.asarray(far)] = cupy.asarray(few.view(np.uint16))
    ids = b.indices.copy()
    used = ids[: b.indptr[-1]]
    ids[: b.indptr[-1]] = far[used]
    assert pool.size > 1 << 31
    cache: Any = pool.view(np.float16)
    if form == "pair":
        cache = (cache[:, 0], cache[:, 1])
    w = cupyattn.BatchPrefillWithPagedKVCacheWrapper(workspace(cupy), layout)
    w.plan(
        b.qo_indptr, b.indptr, ids, b.last_page_len, heads, kv_heads, dim, page_size, causal=True
    )
    got = w.run(upload(b.q, cupy), cache, return_lse=True)
    check(got, b, causal=True)


def test_a_workspace_of_just_the_size_that_is_asked_for() -> None:
    b = batches.make([1] * 3, [20_000, 5, 900], 16, heads=(8, 2), dims=(128, 128))
    sizes = 8, 2, 128, 16
    w = cupyattn.BatchDecodeWithPagedKVCacheWrapper(workspace(cupy))
    need, _ = w.workspace_size(*b.table, *sizes)
    assert need > 0
    exact = poison.embed(np.zeros(need, np.uint8), xp=cupy)
    w = cupyattn.BatchDecodeWithPagedKVCacheWrapper(exact.array)
    w.plan(*b.table, *sizes)
    check(w.run(upload(b.q, cupy), upload(b.one_tensor(), cupy), return_lse=True), b)
    exact.assert_intact("the workspace")
    w = cupyattn.BatchDecodeWithPagedKVCacheWrapper(exact.array[: need - 16])
    with pytest.raises(WorkspaceError, match=f"needs {need} bytes and it has {need - 16}"):
        w.plan(*b.table, *sizes)


# --- the same bits ---


@pytest.mark.parametrize("q_len", [1, 3, 20])
def test_runs_repeat_bit_for_bit(q_len: int) -> None:
    b = batches.make([q_len] * 4, [9000, 10, 700, 3000], 16, heads=(8, 2), dims=(128, 128))
    w = cupyattn.BatchPrefillWithPagedKVCacheWrapper(workspace(cupy))
    w.plan(b.qo_indptr, *b.table, 8, 2, 128, 16, causal=True)
    q, cache = upload(b.q, cupy), upload(b.one_tensor(), cupy)
    first = [download(x) for x in w.run(q, cache, return_lse=True)]
    for _ in range(some(100)):
        for a, x in zip(first, w.run(q, cache, return_lse=True), strict=True):
            compare.assert_bitwise_equal(a, download(x), "a repeated run")


@pytest.mark.parametrize("options", [{"fixed_split_size": 8}, {"disable_split_kv": True}], ids=str)
@pytest.mark.parametrize("q_len", [1, 5, 70])
def test_a_fixed_split_makes_answers_independent_of_the_batch(
    options: dict[str, Any], q_len: int
) -> None:
    """Each request alone, in every batch of its neighbours, and among many copies."""
    lengths = [3000, 17, 400, 0, 1111, 128, 129]
    b = batches.make([q_len] * len(lengths), lengths, 16, heads=(8, 2), dims=(128, 128))
    cache, q = upload(b.one_tensor(), cupy), upload(b.q, cupy)

    def answers(chosen: list[int]) -> list[tuple[np.ndarray, np.ndarray]]:
        ids = [b.indices[b.indptr[i] : b.indptr[i + 1]] for i in chosen]
        indptr = batches.offsets([len(x) for x in ids])
        w = cupyattn.BatchPrefillWithPagedKVCacheWrapper(workspace(cupy))
        w.plan(
            batches.offsets([q_len] * len(chosen)),
            indptr,
            np.concatenate([*ids, np.zeros(1, np.int32)]),
            b.last_page_len[chosen],
            8,
            2,
            128,
            16,
            causal=True,
            **options,
        )
        rows = np.concatenate([np.arange(i * q_len, (i + 1) * q_len) for i in chosen])
        o, lse = w.run(q[cupy.asarray(rows)], cache, return_lse=True)
        host = download(o), download(lse)
        return [tuple(x[i * q_len : (i + 1) * q_len] for x in host) for i in range(len(chosen))]

    alone = [answers([i])[0] for i in range(len(lengths))]
    everyone = list(range(len(lengths)))
    for chosen in (everyone, everyone[::-1], [4, 4, 4, 0], everyone * 5):
        for index, got in zip(chosen, answers(chosen), strict=True):
            for a, x in zip(alone[index], got, strict=True):
                compare.assert_bitwise_equal(a, x, f"request {index} in {chosen[:9]}")


# --- bad input that only a GPU can have ---


def good() -> tuple[Any, batches.Batch, Any, Any]:
    b = batches.make([1, 1], [50, 70], 4, heads=(4, 2), dims=(64, 64))
    w = cupyattn.BatchDecodeWithPagedKVCacheWrapper(workspace(cupy))
    w.plan(*b.table, 4, 2, 64, 4)
    return w, b, upload(b.q, cupy), upload(b.one_tensor(), cupy)


def test_arrays_on_the_host_are_refused() -> None:
    w, b, q, cache = good()
    with pytest.raises(ArgumentError, match="q: is on cpu but float_workspace_buffer is on cuda"):
        w.run(b.q, cache)
    with pytest.raises(ArgumentError, match="paged_kv_cache: is on cpu"):
        w.run(q, b.one_tensor())
    out = cupy.zeros_like(q)
    with pytest.raises(ArgumentError, match="sinks: is on cpu"):
        w.run(q, cache, out=out, sinks=np.zeros(4, np.float32))
    with pytest.raises(ArgumentError, match="out: is on cpu"):
        w.run(q, cache, out=np.zeros_like(b.q))
    assert not bool(raw(out).any())
    check(w.run(q, cache, return_lse=True), b)


def test_what_has_no_kernel_is_refused_by_plan() -> None:
    w, b, q, cache = good()
    with pytest.raises(UnsupportedError, match="q: dtype float32 has no GPU kernel"):
        w.plan(*b.table, 4, 2, 64, 4, q_data_type="float32")
    with pytest.raises(UnsupportedError, match="head_dim_qk: 264"):
        w.plan(*b.table, 4, 2, 264, 4)
    with pytest.raises(UnsupportedError, match="head_dim_qk: 12"):
        w.plan(*b.table, 4, 2, 12, 4)
    check(w.run(q, cache, return_lse=True), b)


def test_page_ids_on_the_gpu_are_bounded_when_debugging(monkeypatch: pytest.MonkeyPatch) -> None:
    w, b, q, cache = good()
    ids = b.indices.copy()
    ids[3] = len(cache)
    w.plan(b.indptr, upload(b.indices, cupy), b.last_page_len, 4, 2, 64, 4)
    monkeypatch.setattr(enqueue.cuda(), "is_debugging", True)
    w.plan(b.indptr, upload(ids, cupy), b.last_page_len, 4, 2, 64, 4)
    with pytest.raises(ArgumentError, match=f"name page {len(cache)}"):
        w.run(q, cache)
    ids[3] = -1
    with pytest.raises(ArgumentError, match="indices: entry 3 is page -1"):
        w.plan(b.indptr, upload(ids, cupy), b.last_page_len, 4, 2, 64, 4)


def test_a_workspace_on_another_gpu_is_refused() -> None:
    if cupy.cuda.runtime.getDeviceCount() < 2:
        pytest.skip("needs two GPUs")
    w, _, q, cache = good()
    with cupy.cuda.Device(1):
        there = cupy.zeros(1 << 20, np.uint8)
    with pytest.raises(ArgumentError, match="float_workspace_buffer: is cupy's on cuda:1"):
        w.reset_workspace_buffer(there)
    w.run(q, cache)
