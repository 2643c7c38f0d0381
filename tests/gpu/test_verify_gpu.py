"""Masks over draft tokens and multi-item scoring on the GPU, against the float64 answer."""

from __future__ import annotations

import functools
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from helpers import batches, compare, item_cases, verify_cases
from helpers.batch_calls import planned
from helpers.on_gpu import capture, try_random, workspace
from helpers.poison import download, upload

import cupyattn

pytestmark = pytest.mark.gpu

cupy = pytest.importorskip("cupy")

BLOCK = 60


@pytest.mark.parametrize("kind", ["verify", "items"])
@pytest.mark.parametrize("first", range(0, verify_cases.NUM_CASES, BLOCK))
def test_random_cases(kind: str, first: int) -> None:
    cases: Any = verify_cases if kind == "verify" else item_cases
    make = lambda seed, xp: planned(cases.random_case(seed), xp, workspace(xp))  # noqa: E731
    try_random(first, BLOCK, make, turn=3)


def flat_prefill(
    xp: ModuleType, b: batches.Batch, masks: list[np.ndarray], heads: tuple[int, int], dim: int
) -> Any:
    """The same through the prefill wrapper and the mask of all keys."""
    w = cupyattn.BatchPrefillWithPagedKVCacheWrapper(workspace(xp))
    flat = upload(np.concatenate([m.ravel() for m in masks]), xp)
    w.plan(b.qo_indptr, *b.table, *heads, dim, b.page_size, custom_mask=flat)
    return w.run(upload(b.q, xp), upload(b.one_tensor(), xp), return_lse=True)


@pytest.mark.parametrize("q_len", [4, 8, 40])
@pytest.mark.parametrize("name", ["cupy", "torch"])
def test_verification_is_prefill_with_the_whole_mask(name: str, q_len: int) -> None:
    xp = cupy if name == "cupy" else pytest.importorskip("torch")
    heads, dim, rng = (8, 2), 128, np.random.default_rng(q_len)
    kv_len = [3000, 700, q_len, 64]
    b = batches.make([q_len] * 4, kv_len, 16, heads=heads, dims=(dim, dim))
    rows = verify_cases.random_tree(rng, 4, q_len)
    masks = verify_cases.whole_masks(rows, kv_len)
    w = cupyattn.BatchDecodeWithPagedKVCacheWrapper(workspace(xp))
    w.plan(*b.table, *heads, dim, 16, q_len_per_req=q_len)
    mask = upload(verify_cases.in_form(rows, "uint16", rng), xp)
    q, cache = upload(b.q, xp), upload(b.one_tensor(), xp)
    got = [download(x) for x in w.run(q, cache, mask=mask, return_lse=True)]
    wanted = [download(x) for x in flat_prefill(xp, b, masks, heads, dim)]
    if q_len * 4 <= 32:
        compare.assert_bitwise_equal(got[0], wanted[0], "o")  # the same kernel, the same tiles
    np.testing.assert_allclose(*(x.astype(np.float32) for x in (got[0], wanted[0])), atol=2e-3)
    np.testing.assert_allclose(got[1], wanted[1], atol=1e-4)


@pytest.mark.parametrize("form", ["bool3", "uint32"])
def test_a_graph_reads_the_mask_of_the_day(form: str) -> None:
    torch = pytest.importorskip("torch")
    heads, dim, q_len, page = (8, 2), 128, 8, 16
    buffers = [torch.zeros(n, dtype=torch.int32, device="cuda") for n in (4, 400, 3)]
    w = cupyattn.CUDAGraphBatchDecodeWithPagedKVCacheWrapper(
        torch.empty(64 << 20, dtype=torch.uint8, device="cuda"), *buffers
    )
    rng = np.random.default_rng(0)
    replay: Any = None
    for step, kv_len in enumerate(([900, 3000, 40], [8, 16, 3100], [2000, 1, 300])):
        b = batches.make([q_len] * 3, kv_len, page, heads=heads, dims=(dim, dim), seed=step)
        rows = verify_cases.random_tree(rng, 3, q_len)
        values = b.q, b.one_tensor(), verify_cases.in_form(rows, form, rng)
        w.plan(*b.table, *heads, dim, page, q_len_per_req=q_len)
        if replay is None:
            q, mask = upload(values[0], torch), upload(values[2], torch)
            cache = torch.zeros(400, *values[1].shape[1:], dtype=torch.float16, device="cuda")
            out = torch.empty_like(q)
            run = functools.partial(w.run, q, cache, mask=mask, out=out)
            run()
            replay = capture(torch, torch, run)
        q.copy_(upload(values[0], torch))
        cache[: len(values[1])].copy_(upload(values[1], torch))
        mask.copy_(upload(values[2], torch))
        replay()
        torch.cuda.synchronize()
        wanted = b.expected(verify_cases.whole_masks(rows, kv_len))[0]
        np.testing.assert_allclose(download(out).astype(np.float64), wanted, atol=4e-3)
