"""Batches over pages or ragged rows, and what the reference answers request by request."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from cupyattn import reference
from cupyattn.core import dtypes

HQ, HKV, D = 4, 2, 16
# It serves any batch. The CPU touches none of it, but refuses what a GPU would find too small.
WORKSPACE = np.zeros(128 << 20, np.uint8)
# For tests that copy what they pass.
SMALL_WORKSPACE = WORKSPACE[: 1 << 20]


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

    def requests(
        self, masks: list[np.ndarray] | None = None, **options: Any
    ) -> Iterator[dict[str, Any]]:
        """The arguments of reference.attention for each request."""
        for i, (k, v) in enumerate(self.keys):
            q = self.q[self.qo_indptr[i] : self.qo_indptr[i + 1]]
            mask = None if masks is None else masks[i]
            yield {"q": q, "k": k, "v": v, "mask": mask, **options}

    def expected(
        self, masks: list[np.ndarray] | None = None, **options: Any
    ) -> tuple[np.ndarray, np.ndarray]:
        """(o, lse) float64 of the whole batch."""
        v_dim = self.cache[1].shape[-1]
        o = np.zeros((*self.q.shape[:2], v_dim))
        lse = np.full(self.q.shape[:2], -np.inf)
        for i, request in enumerate(self.requests(masks, **options)):
            rows = slice(self.qo_indptr[i], self.qo_indptr[i + 1])
            o[rows], lse[rows] = reference.attention(**request)
        return o, lse

    def one_tensor(self, layout: str = "NHD") -> np.ndarray:
        pairs = [as_layout(x, layout) for x in self.cache]
        return np.stack(pairs, axis=1)

    def masks(self, seed: int = 0) -> list[np.ndarray]:
        rng = np.random.default_rng(seed)
        shapes = zip(self.qo_len, self.kv_len, strict=True)
        return [rng.random((q, kv)) < 0.6 for q, kv in shapes]


# A number of int8 stands for so much.
INT8_UNIT = 1 / 32


def normal(rng: np.random.Generator, dtype: str, *shape: int) -> np.ndarray:
    return stored(rng.standard_normal(shape).astype(np.float32), dtype)


def stored(x: np.ndarray, dtype: str) -> np.ndarray:
    """Rounded to a dtype; to int8 in its units."""
    if dtype == "int8":
        return np.clip(np.rint(x / INT8_UNIT), -127, 127).astype(np.int8)
    return x.astype(dtypes.parse(dtype).numpy)


def dtype_of_keys(dtype_q: str, dtype_kv: str) -> str:
    """Keys are int8 beside int8 queries, else of the values' dtype."""
    return "int8" if dtype_q == "int8" else dtype_kv


def as_layout(x: np.ndarray, layout: str) -> np.ndarray:
    return x if layout == "NHD" else np.ascontiguousarray(x.swapaxes(1, 2))


def offsets(lengths: Any) -> np.ndarray:
    """Where requests of these lengths begin, and where the last one ends."""
    return np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)


def last_page_len(kv_len: Sequence[int], page_size: int, of_none: int = 0) -> np.ndarray:
    """Tokens on the last page of each request; `of_none` for a request without keys."""
    return np.array([(n - 1) % page_size + 1 if n else of_none for n in kv_len], np.int32)


def blank_pages(*shape: int, dtype: np.dtype) -> np.ndarray:
    """Pages of one kind, [pages, page_size, heads, dim], all NaN; of int8 all -128."""
    if dtype == np.int8:
        return np.full(shape, -128, np.int8)
    return np.full(shape, np.nan, np.float32).astype(dtype)


def fill_pages(pool: np.ndarray, pages: np.ndarray, values: np.ndarray) -> None:
    """Put the tokens of one request into its pages, in this order."""
    page, slot = np.divmod(np.arange(len(values)), pool.shape[1])
    pool[pages[page], slot] = values


def own_pages(order: np.ndarray, kv_len: Sequence[int], page_size: int) -> list[np.ndarray]:
    """The pages of each request, one after another in this order of all pages."""
    counts = [-(-n // page_size) for n in kv_len]
    return np.split(order, np.cumsum(counts, dtype=int))[: len(counts)]


def make_pools(
    keys: Sequence[Sequence[np.ndarray]],
    orders: Sequence[np.ndarray],
    page_size: int,
    heads: int,
    dims: Sequence[int],
    dtype: np.dtype,
    layout: str = "NHD",
    dtype_k: np.dtype | None = None,
) -> list[np.ndarray]:
    """Pools of K and of V, each with the pages of all requests in an order of its own; whatever no
    request owns is NaN: slots behind a request's last token, spare pages."""
    pools = []
    kinds = dtype_k or dtype, dtype
    for part, (order, dim) in enumerate(zip(orders, dims, strict=True)):
        pool = blank_pages(len(order), page_size, heads, dim, dtype=kinds[part])
        values = [own[part] for own in keys]
        for pages, x in zip(own_pages(order, [*map(len, values)], page_size), values, strict=True):
            fill_pages(pool, pages, x)
        pools.append(as_layout(pool, layout))
    return pools


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
    order = rng.permutation(count + spare_pages).astype(np.int32)
    keys = []
    for n in kv_len:
        k, v = (rng.standard_normal((n, num_kv_heads, dim)).astype(kv_kind) for dim in dims)
        keys.append((k, v))
    k, v = make_pools(keys, (order, order), page_size, num_kv_heads, dims, kv_kind)
    q = rng.standard_normal((sum(qo_len), num_qo_heads, dims[0])).astype(kind)
    table = np.concatenate([order[:count], np.full(5, 2**31 - 1, np.int32)])
    return Batch(
        list(qo_len),
        list(kv_len),
        page_size,
        q,
        (k, v),
        offsets(qo_len),
        offsets(pages),
        table,
        last_page_len(kv_len, page_size),
        keys,
    )
