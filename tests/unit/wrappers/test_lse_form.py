"""lse_base and lse_layout of the prefill wrappers: the same LSE, in another base or layout."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from helpers import batches, fake_batch
from helpers.batches import HKV, HQ, D
from helpers.fake_batch import Device

import cupyattn
from cupyattn import array
from cupyattn.errors import ArgumentError

FORMS = list(itertools.product(("log2", "ln"), ("NH", "HN")))
B = batches.make([3, 0, 5, 1], [17, 4, 11, 0])


def planned(workspace: Any, is_paged: bool) -> Any:
    """run(q, keys, ...) of a wrapper with its plan, and the host's keys."""
    if is_paged:
        w: Any = cupyattn.BatchPrefillWithPagedKVCacheWrapper(workspace)
        w.plan(B.qo_indptr, *B.table, HQ, HKV, D, 4, causal=True)
        return w.run, [B.one_tensor()]
    w = cupyattn.BatchPrefillWithRaggedKVCacheWrapper(workspace)
    w.plan(B.qo_indptr, B.kv_indptr, HQ, HKV, D, causal=True)
    return w.run, list(B.ragged())


def expected(base: str, layout: str) -> tuple[np.ndarray, np.ndarray]:
    o, lse = B.expected(causal=True)
    lse = (lse * (np.log(2.0) if base == "ln" else 1.0)).astype(np.float32)
    return o.astype(np.float16), lse if layout == "NH" else np.ascontiguousarray(lse.T)


@pytest.mark.parametrize("is_paged", [True, False])
@pytest.mark.parametrize(("base", "layout"), FORMS)
@pytest.mark.parametrize("framework", ["numpy", "torch", "jax"])
def test_on_the_cpu(framework: str, is_paged: bool, base: str, layout: str) -> None:
    put: Any = np.asarray
    if framework == "torch":
        put = pytest.importorskip("torch").from_numpy
    elif framework == "jax":
        put = pytest.importorskip("jax.numpy").asarray
    run, keys = planned(np.zeros(16, np.uint8), is_paged)
    q, *keys = map(put, (B.q, *keys))
    form = {"lse_base": base, "lse_layout": layout}
    wanted = expected(base, layout)
    out, lse = run(q, *keys, return_lse=True, **form)
    assert type(lse) is type(q)
    np.testing.assert_array_equal(np.asarray(out), wanted[0])
    np.testing.assert_allclose(np.asarray(lse), wanted[1], rtol=1e-6)
    np.testing.assert_array_equal(np.asarray(run(q, *keys, **form)), wanted[0])
    if framework == "jax":
        return
    given = put(np.full(wanted[1].shape, 7, np.float32))
    _, lse = run(q, *keys, lse=given, return_lse=True, **form)
    assert lse is given
    np.testing.assert_allclose(np.asarray(given), wanted[1], rtol=1e-6)


@pytest.mark.parametrize("is_paged", [True, False])
def test_on_the_gpu(
    device: Device, is_paged: bool, only_cached_runs: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def scaled(x: Any, factor: float) -> None:
        v = array.view(x, "x")
        lse = fake_batch.memory(v.ptr, np.dtype(np.float32), *v.shape)
        device.stream.add(lambda: np.multiply(lse, np.float32(factor), out=lse))

    monkeypatch.setattr(array, "scaled", scaled)
    run, keys = planned(device.workspace(), is_paged)
    q, *keys = (device.put(x) for x in (B.q, *keys))
    for turn in range(2):
        for base, layout in FORMS:
            wanted = expected(base, layout)
            form = {"lse_base": base, "lse_layout": layout}
            given = device.put(np.zeros(wanted[1].shape, np.float32)) if turn else None
            out, lse = run(q, *keys, lse=given, return_lse=True, **form)
            np.testing.assert_array_equal(device.get(out), wanted[0])
            np.testing.assert_allclose(device.get(lse), wanted[1], rtol=1e-6)
    only_cached_runs()
    run(q, *keys, lse=device.put(np.zeros(B.q.shape[:2], np.float32)), lse_base="ln")
    device.stream.finish()


def test_bad_forms() -> None:
    run, keys = planned(np.zeros(16, np.uint8), True)
    with pytest.raises(ArgumentError, match="lse_base: got 'e'; wanted one of 'log2', 'ln'"):
        run(B.q, *keys, return_lse=True, lse_base="e")
    with pytest.raises(ArgumentError, match="lse_layout: got 'TH'"):
        run(B.q, *keys, lse_layout="TH")
    given = np.zeros(B.q.shape[:2], np.float32)
    with pytest.raises(ArgumentError, match=r"lse: dimension 0 of shape .* is 9; wanted"):
        run(B.q, *keys, lse=given, return_lse=True, lse_layout="HN")
    with pytest.raises(ArgumentError, match="lse: overlaps q"):
        run(B.q, *keys, lse=B.q.view(np.float32).ravel()[:36].reshape(4, 9), lse_layout="HN")
    assert not given.any()
