"""Cascades on CPU arrays: what the wrapper makes of levels, served by the reference."""

from __future__ import annotations

import numpy as np
import pytest
from helpers import cascade_calls
from helpers.batches import WORKSPACE
from helpers.calls import run_and_check
from helpers.share import one_of

import cupyattn


@pytest.mark.parametrize("first", one_of(2, range(0, 120, 20)))
def test_random_cascades(first: int) -> None:
    for seed in range(first, first + 20):
        case = cascade_calls.random_case(seed)
        run_and_check(cascade_calls.planned(case, np, WORKSPACE))


@pytest.mark.parametrize("cap", [0.0, 5.0])
def test_alibi_means_the_same_in_every_call(cap: float) -> None:
    """So states of different calls merge: their LSEs count biases from the same position."""
    rng = np.random.default_rng(0)
    page, shared_pages, heads = 4, 3, (8, 2, 16)
    shared, own, rows = page * shared_pages, 6, 2
    q = rng.standard_normal((rows, heads[0], heads[2])).astype(np.float16)
    pool = rng.standard_normal((5, 2, page, *heads[1:])).astype(np.float16)
    k, v = pool.swapaxes(0, 1).reshape(2, -1, *heads[1:])[:, : shared + own]
    options = {"pos_encoding_mode": "ALIBI", "logits_soft_cap": cap}
    flat = cupyattn.single_prefill_with_kv_cache(q, k, v, return_lse=True, **options)

    def agree(got: tuple[np.ndarray, np.ndarray]) -> None:
        np.testing.assert_allclose(got[0].astype(float), flat[0].astype(float), atol=2e-3)
        np.testing.assert_allclose(got[1], flat[1], atol=2e-3)

    def table(*pages: int) -> tuple[np.ndarray, np.ndarray]:
        return np.array([0, len(pages)], np.int32), np.array(pages, np.int32)

    levels, last = [table(0, 1, 2), table(3, 4)], [np.array([n], np.int32) for n in (page, 2)]
    indptr, ids = zip(*levels, strict=True)
    every = [np.array([0, rows], np.int32)] * 2
    cascade = cupyattn.MultiLevelCascadeAttentionWrapper(2, WORKSPACE)
    cascade.plan(every, list(indptr), list(ids), last, *heads, page, **options)
    agree(cascade.run(q, pool, return_lse=True))
    # The last keys alone know how far they are from the rows; the first are told by a mask.
    paged = cupyattn.BatchPrefillWithPagedKVCacheWrapper(WORKSPACE)
    paged.plan(every[0], *levels[1], last[1], *heads, page, **options)
    behind = paged.run(q, pool, return_lse=True)
    is_shared = np.broadcast_to(np.arange(shared + own) < shared, (rows, shared + own))
    ahead = cupyattn.single_prefill_with_kv_cache(
        q, k, v, custom_mask=is_shared.copy(), return_lse=True, **options
    )
    agree(cupyattn.merge_state(*ahead, *behind))
    # A decode wrapper's row is the last, and single decode's.
    one = cupyattn.single_decode_with_kv_cache(q[-1], k, v, return_lse=True, **options)
    for got, wanted in zip(one, flat, strict=True):
        np.testing.assert_array_equal(got, wanted[-1])
