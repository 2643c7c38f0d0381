"""Planned batches whose requests have scales of their own, for each head."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

import cupyattn
from cupyattn import reference
from emulator import gpu

HEADS, KV_HEADS, DIM, PAGE = 4, 2, 64, 16


class Batch:
    """Ragged requests, and the same keys in pages."""

    def __init__(self, qo_lens: list[int], kv_lens: list[int], dtype_kv: Any) -> None:
        rng, self.kv_lens = np.random.default_rng(1), kv_lens
        self.qo_indptr, self.kv_indptr = (
            np.cumsum([0, *lengths]).astype(np.int32) for lengths in (qo_lens, kv_lens)
        )
        self.q = rng.standard_normal((sum(qo_lens), HEADS, DIM)).astype(np.float16)
        self.k, self.v = (
            rng.standard_normal((sum(kv_lens), KV_HEADS, DIM)).astype(dtype_kv) for _ in "kv"
        )
        self.scales = {
            f"{name}_scale": rng.uniform(0.5, 2, (len(qo_lens), heads)).astype(np.float32)
            for name, heads in (("q", HEADS), ("k", KV_HEADS), ("v", KV_HEADS))
        }
        self.plan = {
            "causal": True,
            "q_data_type": np.float16,
            "kv_data_type": dtype_kv,
            "o_data_type": "float32",
        }

    def ragged(self, **more: Any) -> Any:
        wrapper = cupyattn.BatchPrefillWithRaggedKVCacheWrapper(np.zeros(1 << 22, np.uint8))
        sizes = self.qo_indptr, self.kv_indptr, HEADS, KV_HEADS, DIM
        wrapper.plan(*sizes, **self.plan, **more)
        return wrapper.run(self.q, self.k, self.v, return_lse=True, **self.scales)

    def paged(self) -> Any:
        counts = [-(-n // PAGE) for n in self.kv_lens]
        indptr = np.cumsum([0, *counts]).astype(np.int32)
        pools = tuple(
            np.zeros((indptr[-1], PAGE, KV_HEADS, DIM), x.dtype) for x in (self.k, self.v)
        )
        for i, n in enumerate(self.kv_lens):
            for pool, x in zip(pools, (self.k, self.v), strict=True):
                own = pool[indptr[i] : indptr[i + 1]].reshape(-1, KV_HEADS, DIM)
                own[:n] = x[self.kv_indptr[i] :][:n]
        last = np.array([(n - 1) % PAGE + 1 for n in self.kv_lens], np.int32)
        wrapper = cupyattn.BatchPrefillWithPagedKVCacheWrapper(np.zeros(1 << 22, np.uint8))
        tables = self.qo_indptr, indptr, np.arange(indptr[-1], dtype=np.int32), last
        wrapper.plan(*tables, HEADS, KV_HEADS, DIM, PAGE, **self.plan)
        return wrapper.run(self.q, pools, return_lse=True, **self.scales)

    def check(self, out: np.ndarray, lse: np.ndarray) -> None:
        for i in range(len(self.kv_lens)):
            rows = slice(*self.qo_indptr[i : i + 2])
            keys = slice(*self.kv_indptr[i : i + 2])
            real = (
                x.astype(np.float64) * scale[i][:, None]
                for x, scale in zip(
                    (self.q[rows], self.k[keys], self.v[keys]), self.scales.values(), strict=True
                )
            )
            exact, exact_lse = reference.attention(*real, causal=True)
            assert np.abs(out[rows] - exact).max() < 2e-3
            assert np.abs(lse[rows] - exact_lse).max() < 1e-5


@pytest.mark.parametrize("dtype_kv", [np.float16, ml_dtypes.float8_e4m3fn], ids=["16 bits", "fp8"])
@pytest.mark.parametrize("is_paged", [False, True], ids=["ragged", "paged"])
def test_each_request_has_its_scales(dtype_kv: Any, is_paged: bool) -> None:
    with gpu.plugged_in(num_sms=8, is_portable=True):
        batch = Batch([3, 40], [70, 90], dtype_kv)
        out, lse = batch.paged() if is_paged else batch.ragged()
    batch.check(out, lse)


def test_splits_of_their_keys_merge() -> None:
    with gpu.plugged_in(num_sms=8, is_portable=True):
        batch = Batch([1, 2], [200, 90], np.float16)
        out, lse = batch.ragged(fixed_split_size=64)
    batch.check(out, lse)
