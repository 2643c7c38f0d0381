"""Block-sparse masks and bidirectional ranges on the host: the kernels that serve them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from helpers import batches, compare, lowprec, sparse_calls
from helpers.calls import check_batch
from helpers.patching import replace
from helpers.range_calls import images, masks

import cupyattn
from cupyattn import array

from . import gpu as gpus


@pytest.fixture(params=[False, True], ids=["hopper", "portable"])
def gpu(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    def restride(x: Any, name: str, shape: Any, strides: Any, offset: int = 0) -> array.ArrayView:
        return array.as_strided(array.view(x, name), shape, strides, offset)

    with gpus.plugged_in(num_sms=16, is_portable=request.param) as emulated:
        # NumPy's arrays stand for CuPy's here.
        replace(monkeypatch, array.restride, restride)
        yield emulated


@pytest.mark.parametrize("make", [sparse_calls.fixed, sparse_calls.variable])
@pytest.mark.parametrize("seed", range(4))
def test_block_sparse(gpu: Any, make: Any, seed: int) -> None:
    call = make(seed, 64)
    w = call.wrapper(gpu.empty((16 << 20,), np.dtype(np.uint8)))
    call.plan_with(w)
    out, lse = w.run(call.q, call.k, call.v, return_lse=True)
    models = call.expected(), call.expected(lowprec.attention)
    compare.assert_close(out, lse, *models[0], *models[1], seed, p_dtype=call.q.dtype)


@pytest.mark.parametrize(("causal", "own"), [(-1, -1), (30, -1), (3, 9)])
def test_ranges(gpu: Any, causal: int, own: int) -> None:
    rng = np.random.default_rng(causal + 1)
    b = batches.make([70, 1, 40], [100, 30, 40], 16, dtype="bfloat16", dims=(64, 64))
    w = cupyattn.BatchPrefillWithCausalBidirectionalRangesWrapper(
        gpu.empty((16 << 20,), np.dtype(np.uint8)), head_dim_qk=64, head_dim_vo=64
    )
    w.plan(b.qo_indptr, *b.table, 4, 2, 64, 16)
    ranges = images(b, rng, 30)
    got = w.run(b.q, b.one_tensor(), ranges, causal, own, return_lse=True)
    assert w._current is not None and w._current.mask.form == ("whole" if own > 0 else "ranges")
    assert gpu.has_launched("prefill_sm90") != gpu.is_portable
    check_batch(got, b, (causal, own), masks=masks(b, ranges, causal, own))
