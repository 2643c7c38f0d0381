"""Block-sparse masks, bidirectional ranges, POD and forms of the LSE on the GPU."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import numpy as np
import pytest
from helpers import batches, compare, lowprec, sparse_calls
from helpers.calls import check_batch
from helpers.on_gpu import framework, workspace
from helpers.poison import download, upload
from helpers.range_calls import ahead, anywhere, images, masks
from helpers.share import some

import cupyattn

pytestmark = pytest.mark.gpu

pytest.importorskip("cupy")


@pytest.mark.parametrize("make", [sparse_calls.fixed, sparse_calls.variable])
@pytest.mark.parametrize("dim", [16, 64, 128])
def test_block_sparse(make: Any, dim: int) -> None:
    for seed in range(some(40)):
        try_block_sparse(make(seed, dim), framework(seed), seed)


def try_block_sparse(call: sparse_calls.SparseCall, xp: ModuleType, seed: int) -> None:
    w = call.wrapper(workspace(xp))
    put = lambda x: upload(x, xp)  # noqa: E731
    call.plan_with(w, put if seed % 2 else np.asarray, put)
    for _ in range(2):
        out, lse = map(download, w.run(*map(put, (call.q, call.k, call.v)), return_lse=True))
        models = call.expected(), call.expected(lowprec.attention)
        compare.assert_close(out, lse, *models[0], *models[1], seed, p_dtype=call.q.dtype)


def test_large_blocks() -> None:
    """Blocks of the sizes that video models use, a tenth of them seen."""
    rng = np.random.default_rng(0)
    for seed, (row, column) in enumerate(((64, 64), (128, 128), (48, 80))):
        xp, heads = framework(seed), 2
        shown = rng.random((heads, 20, 24)) < 0.1
        rows, columns = np.full((heads, 20), row, np.int32), np.full((heads, 24), column, np.int32)
        mask = np.repeat(np.repeat(shown, row, axis=1), column, axis=2)
        shapes = (4, 20 * row, 128), *[(heads, 24 * column, 128)] * 2
        q, k, v = (rng.standard_normal(x).astype(np.float16) for x in shapes)
        args: list[Any] = [shown, rows, columns, 4, heads, 128]
        wrapper = cupyattn.VariableBlockSparseAttentionWrapper
        call = sparse_calls.SparseCall(wrapper, q, k, v, mask, (args, {}), True)
        try_block_sparse(call, xp, seed)


@pytest.mark.parametrize("make_ranges", [images, anywhere, ahead])
@pytest.mark.parametrize("dim", [64, 128])
def test_ranges(make_ranges: Any, dim: int) -> None:
    for seed in range(some(8)):
        try_ranges(make_ranges, dim, framework(seed), seed)


def try_ranges(make_ranges: Any, dim: int, xp: ModuleType, seed: int) -> None:
    rng = np.random.default_rng(seed)
    dtype = ("float16", "bfloat16")[seed % 2]
    b = batches.make([300, 1, 0, 90, 40], [400, 9, 4, 90, 700], 16, dtype=dtype, dims=(dim, dim))
    w = cupyattn.BatchPrefillWithCausalBidirectionalRangesWrapper(
        workspace(xp), q_data_type=dtype, kv_data_type=dtype, head_dim_qk=dim, head_dim_vo=dim
    )
    w.plan(b.qo_indptr, *b.table, 4, 2, dim, 16)
    q, cache = upload(b.q, xp), upload(b.one_tensor(), xp)
    for windows in ((-1, -1), (64, -1), (3, 20)):
        ranges = make_ranges(b, rng)
        seen = masks(b, ranges, *windows)
        for given in (ranges, upload(ranges, xp)):
            got = w.run(q, cache, given, *windows, return_lse=True)
            check_batch(got, b, (seed, windows), masks=seen)


@pytest.mark.parametrize("form", ["prompts first", "prompts last", "apart"])
def test_prompts_and_decodes(form: str) -> None:
    for seed in range(some(4)):
        try_pod(form, framework(seed), seed)


def try_pod(form: str, xp: ModuleType, seed: int) -> None:
    p = batches.make([200, 33], [200, 900], 16, seed=seed, dims=(128, 128))
    d = batches.make([1] * 9, [1, 40, 0, 700, 3000, 16, 17, 80, 5], 16, seed=seed, dims=(128, 128))
    pages = len(p.cache[0])
    pool = upload(np.concatenate([p.one_tensor(), d.one_tensor()]), xp)
    tables = [p.qo_indptr, *p.table, d.qo_indptr, d.indptr, d.indices[: d.indptr[-1]] + pages]
    w = cupyattn.BatchPODWithPagedKVCacheWrapper(workspace(xp))
    given = [upload(x, xp) if seed % 2 else x for x in (*tables, d.last_page_len)]
    w.plan(*given, 4, 2, 128, 16)
    q_p, q_d = upload(p.q, xp), upload(d.q, xp)
    if form != "apart":
        first, second = (p, d) if form == "prompts first" else (d, p)
        q = upload(np.concatenate([first.q, second.q]), xp)
        halves = q[: len(first.q)], q[len(first.q) :]
        q_p, q_d = halves if form == "prompts first" else halves[::-1]
    for causal in (True, False):
        got = w.run(q_p, pool, q_d, pool, causal_p=causal, return_lse=True)
        check_batch(got[0], p, (form, seed), causal=causal)
        check_batch(got[1], d, (form, seed))
    assert w._form.is_together == (form != "apart")


def test_forms_of_the_lse(xp: Any) -> None:
    b = batches.make([70, 1, 0], [100, 300, 5], 16, dims=(128, 128))
    w = cupyattn.BatchPrefillWithPagedKVCacheWrapper(workspace(xp))
    w.plan(b.qo_indptr, *b.table, 4, 2, 128, 16, causal=True)
    q, cache = upload(b.q, xp), upload(b.one_tensor(), xp)
    _, wanted = map(download, w.run(q, cache, return_lse=True))
    for base, factor in (("log2", 1.0), ("ln", np.log(2.0))):
        for layout in ("NH", "HN"):
            form = {"lse_base": base, "lse_layout": layout}
            _, lse = map(download, w.run(q, cache, return_lse=True, **form))
            lse = lse if layout == "NH" else lse.T
            np.testing.assert_allclose(lse, wanted * np.float32(factor), rtol=1e-6)
