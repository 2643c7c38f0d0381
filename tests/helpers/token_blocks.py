"""Two requests of 8 bits whose blocks of tokens have scales, as ragged rows and in pages."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np

import cupyattn
from cupyattn import reference

E4M3 = ml_dtypes.float8_e4m3fn
HEADS, KV_HEADS, DIM = 4, 2, 64
# Queries and keys are integers, or hundredths of them.
UNITS = {"float8_e4m3fn": 1.0, "int8": 0.01}


def numbers(rng: np.random.Generator, dtype: str, *shape: int) -> np.ndarray:
    if dtype == "int8":
        return rng.integers(-127, 128, shape).astype(np.int8)
    return rng.standard_normal(shape).astype(E4M3)


def real(x: np.ndarray, scale: Any) -> np.ndarray:
    """What numbers [n, heads, head_dim] stand for."""
    return x.astype(np.float64) * np.reshape(scale, (-1, 1))


class Blocks:
    """Two requests of 8 bits whose blocks of tokens have scales, and means of their keys."""

    QO_LENS, KV_LENS = (70, 131), (200, 330)

    def __init__(self, seed: int, dtype: str, size: int, has_mean: bool = True) -> None:
        rng, self.size, unit = np.random.default_rng(seed), size, UNITS[dtype]
        qo, kv = sum(self.QO_LENS), sum(self.KV_LENS)
        self.qo_indptr = np.cumsum([0, *self.QO_LENS]).astype(np.int32)
        self.kv_indptr = np.cumsum([0, *self.KV_LENS]).astype(np.int32)
        self.q = numbers(rng, dtype, qo, HEADS, DIM)
        self.k = numbers(rng, dtype, kv, KV_HEADS, DIM)
        self.v = numbers(rng, "float8_e4m3fn", kv, KV_HEADS, DIM)
        self.of_q, self.of_k, self.of_v = (
            (x * rng.uniform(0.5, 2, (-(-len(rows) // size) + 2, rows.shape[1]))).astype(np.float32)
            for x, rows in ((unit, self.q), (unit, self.k), (1.0, self.v))
        )
        self.mean = rng.standard_normal((2, KV_HEADS, DIM)).astype(np.float32)
        if not has_mean:
            self.mean *= 0

    def arguments(self, **changes: Any) -> dict[str, Any]:
        own = {
            "q_block_scales": self.of_q,
            "k_block_scales": self.of_k,
            "v_block_scales": self.of_v,
            "k_mean": self.mean,
            "block_size": self.size,
        }
        return own | changes

    def _tokens(self, x: np.ndarray, scales: np.ndarray, start: int, end: int, index: int) -> Any:
        """Rows of a request as what they stand for, token by token."""
        first = start // self.size + index
        return np.stack(
            [real(x[t], scales[first + (t - start) // self.size]) for t in range(start, end)]
        )

    def real(self, index: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        rows, keys = self.qo_indptr[index : index + 2], self.kv_indptr[index : index + 2]
        return (
            self._tokens(self.q, self.of_q, *rows, index),
            self._tokens(self.k, self.of_k, *keys, index) + self.mean[index],
            self._tokens(self.v, self.of_v, *keys, index),
        )

    def check(
        self, out: np.ndarray, lse: np.ndarray | None, limit: float = 1e-5, **options: Any
    ) -> None:
        """limit: of errors of the output, and a tenth of those of the LSE."""
        for index in range(2):
            rows = slice(*self.qo_indptr[index : index + 2])
            exact, exact_lse = reference.attention(*self.real(index), causal=True, **options)
            assert np.abs(out[rows] - exact).max() < limit
            assert lse is None or np.abs(lse[rows] - exact_lse).max() < 10 * limit

    def plan(self, wrapper: Any, places: tuple[np.ndarray, ...], *sizes: int, **more: Any) -> None:
        wrapper.plan(
            *places,
            HEADS,
            KV_HEADS,
            DIM,
            *sizes,
            causal=True,
            q_data_type=self.q.dtype,
            kv_data_type=self.v.dtype,
            o_data_type="float32",
            **more,
        )

    def ragged(self, workspace: Any = None, **more: Any) -> Any:
        workspace = np.zeros(1 << 23, np.uint8) if workspace is None else workspace
        wrapper = cupyattn.BatchPrefillWithRaggedKVCacheWrapper(workspace)
        self.plan(wrapper, (self.qo_indptr, self.kv_indptr), **more)
        return wrapper

    def paged(
        self, page_size: int, workspace: Any = None, **more: Any
    ) -> tuple[Any, tuple[np.ndarray, ...], dict[str, Any]]:
        """A plan of the same keys in shuffled pages; its pages and their scales."""
        counts = [-(-n // page_size) for n in self.KV_LENS]
        ids = np.random.default_rng(7).permutation(sum(counts) + 1).astype(np.int32)[:-1]
        pools = [
            np.zeros((len(ids) + 1, page_size, KV_HEADS, DIM), x.dtype) for x in (self.k, self.v)
        ]
        per_page = page_size // self.size
        scales = [np.full((len(ids) + 1, per_page, KV_HEADS), np.nan, np.float32) for _ in "kv"]
        indptr = np.cumsum([0, *counts]).astype(np.int32)
        for index, kv_len in enumerate(self.KV_LENS):
            start = self.kv_indptr[index]
            for token in range(kv_len):
                page = ids[indptr[index] + token // page_size]
                slot, block = token % page_size, start // self.size + index + token // self.size
                for pool, x in zip(pools, (self.k, self.v), strict=True):
                    pool[page, slot] = x[start + token]
                for own, ragged in zip(scales, (self.of_k, self.of_v), strict=True):
                    own[page, slot // self.size] = ragged[block]
        last = np.array([(n - 1) % page_size + 1 for n in self.KV_LENS], np.int32)
        workspace = np.zeros(1 << 23, np.uint8) if workspace is None else workspace
        wrapper = cupyattn.BatchPrefillWithPagedKVCacheWrapper(workspace)
        self.plan(wrapper, (self.qo_indptr, indptr, ids, last), page_size, **more)
        return wrapper, tuple(pools), {"k_block_scales": scales[0], "v_block_scales": scales[1]}
