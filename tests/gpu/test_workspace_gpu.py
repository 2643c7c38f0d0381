"""Workspaces that hold fewer splits than the fastest plan has: captured graphs of wide heads, runs
of arrays off 16-byte boundaries, calls without a plan."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from helpers import on_gpu
from helpers.batches import offsets

import cupyattn
from cupyattn.engine import prepared
from cupyattn.launch.attention import find_items

pytestmark = pytest.mark.gpu
torch = pytest.importorskip("torch")

PAGE = 16


def tensor(x: Any, dtype: Any = None) -> Any:
    return torch.as_tensor(x, device="cuda", dtype=dtype)


def pages_of(kv_len: np.ndarray, heads: int, dim: int, count: int = 64) -> tuple[Any, ...]:
    """(cache, indptr, indices, last_page_len) of requests that share some pages."""
    rng = np.random.default_rng(0)
    pages = -(-kv_len // PAGE)
    cache = torch.randn(count, 2, PAGE, heads, dim, device="cuda", dtype=torch.float16)
    indices = rng.integers(0, count, pages.sum()).astype(np.int32)
    return cache, offsets(pages).astype(np.int32), indices, ((kv_len - 1) % PAGE + 1)


@pytest.mark.parametrize("dim", [512, 128])
def test_a_graph_of_many_decodes_in_128_mb(dim: int) -> None:
    count, heads = 200, (128, 1) if dim == 512 else (32, 8)
    kv_len = np.random.default_rng(1).integers(1, 3000, count)
    cache, indptr, indices, last = pages_of(kv_len, heads[1], dim)
    buffers = [tensor(np.zeros_like(x), torch.int32) for x in (indptr, indices, last)]
    graph = cupyattn.CUDAGraphBatchDecodeWithPagedKVCacheWrapper(on_gpu.workspace(torch), *buffers)
    graph.plan(indptr, indices, last, *heads, dim, PAGE)
    q = torch.randn(count, heads[0], dim, device="cuda", dtype=torch.float16)
    out = torch.empty_like(q)
    graph.run(q, cache, out=out)
    replay = on_gpu.capture(torch, torch, lambda: graph.run(q, cache, out=out))
    fewer = np.maximum(kv_len // 3, 1)
    pages = -(-fewer // PAGE)
    ends = offsets(pages).astype(np.int32)
    tables = ends, indices[: ends[-1]], (fewer - 1) % PAGE + 1
    graph.plan(*tables, *heads, dim, PAGE)
    out.zero_()
    replay()
    eager = cupyattn.BatchDecodeWithPagedKVCacheWrapper(None)
    eager.plan(*(tensor(x, torch.int32) for x in tables), *heads, dim, PAGE)
    torch.testing.assert_close(out, eager.run(q, cache), rtol=1e-2, atol=1e-2)


def test_arrays_off_16_bytes_make_do_with_the_workspace_of_the_plan() -> None:
    kv_len, qo_len = np.array([9000, 7000]), np.array([200, 130])
    cache, indptr, indices, last = pages_of(kv_len, 1, 128)
    tables = offsets(qo_len).astype(np.int32), indptr, indices, last
    make = cupyattn.BatchPrefillWithPagedKVCacheWrapper
    size, _ = make(on_gpu.workspace(torch)).workspace_size(*tables, 8, 1, 128, PAGE, causal=True)
    w = make(torch.empty(size, dtype=torch.uint8, device="cuda"))
    w.plan(*tables, 8, 1, 128, PAGE, causal=True)
    rows = int(qo_len.sum())
    held = torch.randn(rows * 8 * 128 + 1, device="cuda", dtype=torch.float16)
    q = held[1:].view(rows, 8, 128)
    torch.testing.assert_close(w.run(q, cache), w.run(q.clone(), cache), rtol=1e-2, atol=1e-2)


def test_calls_without_a_plan_split_less_where_the_workspace_is_smaller(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """By the planner on the GPU; blocks that find their items need less, and split as they do."""
    monkeypatch.setattr(find_items, "prepare", lambda *_: None)
    prepared.plan_of.cache_clear()
    count, width = 16, 256
    cache = torch.randn(64, 2, 8, PAGE, 128, device="cuda", dtype=torch.float16)
    table = torch.randint(0, 64, (count, width), device="cuda", dtype=torch.int32)
    lens = torch.randint(1, width * PAGE, (count,), device="cuda", dtype=torch.int32)
    q = torch.randn(count, 32, 128, device="cuda", dtype=torch.float16)

    def call(workspace: Any) -> Any:
        return cupyattn.trtllm_batch_decode_with_kv_cache(
            q, cache, workspace, table, lens, width * PAGE, bmm1_scale=0.09
        )

    with pytest.raises(cupyattn.WorkspaceError, match="needs") as caught:
        call(torch.empty(16, dtype=torch.uint8, device="cuda"))
    need = int(str(caught.value).split(" needs ")[1].split()[0])
    want = call(torch.empty(need, dtype=torch.uint8, device="cuda"))
    small = torch.empty(need // 2 // 16 * 16, dtype=torch.uint8, device="cuda")
    for _ in range(2):  # checked, then cached
        torch.testing.assert_close(call(small), want, rtol=1e-2, atol=1e-2)
    prepared.plan_of.cache_clear()


def test_the_older_wrapper_of_latent_attention() -> None:
    kv_len = np.array([700, 33, 256])
    _, indptr, indices, last = pages_of(kv_len, 1, 64)
    q = [torch.randn(3, 16, n, device="cuda", dtype=torch.float16) for n in (512, 64)]
    cache = [torch.randn(64, PAGE, n, device="cuda", dtype=torch.float16) for n in (512, 64)]
    older = cupyattn.BatchDecodeMlaWithPagedKVCacheWrapper(on_gpu.workspace(torch))
    older.plan(*(tensor(x, torch.int32) for x in (indptr, indices, last)), 16, 512, PAGE, 0.07)
    newer = cupyattn.BatchMLAPagedAttentionWrapper(on_gpu.workspace(torch))
    newer.plan(np.arange(4), indptr, indices, kv_len, 16, 512, 64, PAGE, False, 0.07, "float16")
    for got, want in zip(
        older.run(*q, *cache, return_lse=True),
        newer.run(*q, *cache, return_lse=True),
        strict=True,
    ):
        torch.testing.assert_close(got, want, rtol=1e-2, atol=1e-2)
