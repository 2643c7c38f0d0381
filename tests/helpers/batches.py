"""Batches over pages or ragged rows, and what the reference answers request by request."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from cupyattn import reference
from cupyattn.core import dtypes

HQ, HKV, D = 4, 2, 16


@dataclass
class Batch:
    """Host arrays of one batch. `cache` is (K, V) in NHD, [pages, page_size, HKV, D]."""

    qo_len: list[int]
    kv_len: list[int]
    page_size: int
    q: np.ndarray
    cache: tuple[np.ndarray, np.ndarray]
    qo_indptr: np.ndarray
    indptr: np.ndarray
    indices: np.ndarray
    last_page_len: np.ndarray
    keys: list[tuple[np.ndarray, np.ndarray]] = field(default_factory=list)

    @property
    def table(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        return self.indptr, self.indices, self.last_page_len

    @property
    def kv_indptr(self) -> np.ndarray:
        return offsets(self.kv_len)

    def ragged(self) -> tuple[np.ndarray, np.ndarray]:
        """k and v of all requests, one after another."""
        k, v = (np.concatenate([pair[i] for pair in self.keys] or [self.q[:0]]) for i in (0, 1))
        return k, v

    def expected(
        self, masks: list[np.ndarray] | None = None, **options: Any
    ) -> tuple[np.ndarray, np.ndarray]:
        """(o, lse) float64 of the whole batch."""
        v_dim = self.cache[1].shape[-1]
        o = np.zeros((*self.q.shape[:2], v_dim))
        lse = np.full(self.q.shape[:2], -np.inf)
        for i, (k, v) in enumerate(self.keys):
            rows = slice(self.qo_indptr[i], self.qo_indptr[i + 1])
            mask = None if masks is None else masks[i]
            o[rows], lse[rows] = reference.attention(self.q[rows], k, v, mask=mask, **options)
        return o, lse

    def one_tensor(self, layout: str = "NHD") -> np.ndarray:
        pairs = [as_layout(x, layout) for x in self.cache]
        return np.stack(pairs, axis=1)

    def masks(self, seed: int = 0) -> list[np.ndarray]:
        rng = np.random.default_rng(seed)
        shapes = zip(self.qo_len, self.kv_len, strict=True)
        return [rng.random((q, kv)) < 0.6 for q, kv in shapes]


def as_layout(x: np.ndarray, layout: str) -> np.ndarray:
    return x if layout == "NHD" else np.ascontiguousarray(x.swapaxes(1, 2))


def offsets(lengths: list[int]) -> np.ndarray:
    return np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)


def make(
    qo_len: list[int],
    kv_len: list[int],
    page_size: int = 4,
    *,
    seed: int = 0,
    dtype: str = "float16",
    kv_dtype: str | None = None,
    heads: tuple[int, int] = (HQ, HKV),
    dims: tuple[int, int] = (D, D),
    spare_pages: int = 3,
) -> Batch:
    """Pages in random order; whatever no request owns is NaN, and unused table entries absurd."""
    rng = np.random.default_rng(seed)
    pages = [-(-n // page_size) for n in kv_len]
    count = sum(pages)
    kind, kv_kind = (dtypes.parse(d).numpy for d in (dtype, kv_dtype or dtype))
    num_qo_heads, num_kv_heads = heads
    order = rng.permutation(count + spare_pages)[:count].astype(np.int32)
    cache = tuple(
        np.full((count + spare_pages, page_size, num_kv_heads, dim), np.nan, np.float32).astype(
            kv_kind
        )
        for dim in dims
    )
    indptr = offsets(pages)
    keys = []
    for i, n in enumerate(kv_len):
        own = order[indptr[i] : indptr[i + 1]]
        pair = []
        for x, dim in zip(cache, dims, strict=True):
            values = rng.standard_normal((n, num_kv_heads, dim)).astype(kv_kind)
            for place, page in enumerate(own):
                part = values[place * page_size : (place + 1) * page_size]
                x[page, : len(part)] = part
            pair.append(values)
        keys.append((pair[0], pair[1]))
    last = [(n - 1) % page_size + 1 if n else 0 for n in kv_len]
    q = rng.standard_normal((sum(qo_len), num_qo_heads, dims[0])).astype(kind)
    table = np.concatenate([order, np.full(5, 2**31 - 1, np.int32)])
    return Batch(
        list(qo_len),
        list(kv_len),
        page_size,
        q,
        (cache[0], cache[1]),
        offsets(qo_len),
        indptr,
        table,
        np.array(last, np.int32),
        keys,
    )
