"""Calls that may leave out tiles of keys which weigh next to nothing."""

from __future__ import annotations

from dataclasses import dataclass
from types import ModuleType
from typing import Any

import numpy as np

import cupyattn

from .poison import upload

NAME = "skip_softmax_threshold_scale_factor"


@dataclass(frozen=True)
class Case:
    """Rows that see light keys and heavy ones. Logits are `gap` for the first and 0 for the others,
    so that what a row loses with the light ones is known; their values are large, so it shows.

    dims  of q, k and of v. page_size: 0 for ragged keys. qo_len, kv_len: of each request.
    heavy the first heavy key, a multiple of a tile's keys
    """

    dims: tuple[int, int] = (128, 128)
    page_size: int = 0
    qo_len: tuple[int, ...] = (200, 150)
    kv_len: tuple[int, ...] = (700, 680)
    heads: tuple[int, int] = (2, 1)
    gap: float = -8.0
    dtype: str = "float16"
    causal: bool = True
    window_left: int = -1
    heavy: int = 448

    @property
    def weight(self) -> float:
        """Of a light key, of those of a heavy one."""
        return float(np.exp(self.gap))

    def factor(self, weight: float) -> float:
        """The option by which keys lighter than `weight` are left out of the longest request, and
        lighter ones of others."""
        return weight * max(self.kv_len)


class Call:
    """A batch of the wrapper. is_light[i] has the light keys of request i."""

    def __init__(self, case: Case, xp: ModuleType, workspace: Any, dtype: Any) -> None:
        rng, (heads, heads_kv), (dim, dim_vo) = np.random.default_rng(5), case.heads, case.dims
        self.case, self.xp = case, xp
        rows, keys = sum(case.qo_len), sum(case.kv_len)
        q = np.zeros((rows, heads, dim))
        q[..., 0] = 1.0
        self.k = [np.zeros((n, heads_kv, dim)) for n in case.kv_len]
        self.v = [rng.standard_normal((n, heads_kv, dim_vo)) for n in case.kv_len]
        for k, v in zip(self.k, self.v, strict=True):
            k[: case.heavy, :, 0] = case.gap
            v[: case.heavy] = 500.0
        assert keys >= rows
        self.q = q.astype(dtype)
        self.k, self.v = ([x.astype(dtype) for x in parts] for parts in (self.k, self.v))
        qo_indptr, kv_indptr = (
            np.concatenate([[0], np.cumsum(n)]).astype(np.int32) for n in (case.qo_len, case.kv_len)
        )
        options = {"causal": case.causal, "window_left": case.window_left, "sm_scale": 1.0}
        # A part of a request's keys that are all light has none to leave them out for.
        options |= {"q_data_type": case.dtype, "disable_split_kv": True}
        self.arguments: tuple[Any, ...]
        if not case.page_size:
            self.wrapper = cupyattn.BatchPrefillWithRaggedKVCacheWrapper(workspace)
            self.wrapper.plan(
                qo_indptr, kv_indptr, heads, heads_kv, dim, head_dim_vo=dim_vo, **options
            )
            parts = (np.concatenate(x) for x in (self.k, self.v))
            self.arguments = tuple(upload(x, xp) for x in (self.q, *parts))
            return
        size = case.page_size
        counts = [-(-n // size) for n in case.kv_len]
        ids = rng.permutation(sum(counts)).astype(np.int32)
        pools = [np.zeros((sum(counts) * size, heads_kv, d), dtype) for d in case.dims]
        first = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
        for pool, parts in zip(pools, (self.k, self.v), strict=True):
            for i, x in enumerate(parts):
                at = np.arange(len(x))
                pool[ids[first[i] + at // size] * size + at % size] = x
        last = np.array([n - (c - 1) * size for n, c in zip(case.kv_len, counts, strict=True)])
        self.wrapper = cupyattn.BatchPrefillWithPagedKVCacheWrapper(workspace)
        self.wrapper.plan(
            *(qo_indptr, first, ids, last.astype(np.int32), heads, heads_kv, dim, size),
            head_dim_vo=dim_vo,
            **options,
        )
        pages = tuple(upload(x.reshape(-1, size, *x.shape[1:]), xp) for x in pools)
        self.arguments = upload(self.q, xp), pages

    def run(self, factor: float | None) -> Any:
        """(out, lse)."""
        return self.wrapper.run(*self.arguments, return_lse=True, **{NAME: factor})

    def expected(self, keeps_light: bool) -> tuple[np.ndarray, np.ndarray]:
        """What rows give with their light keys, or without: (out, lse)."""
        case, out, lse = self.case, [], []
        group = case.heads[0] // case.heads[1]
        for rows, v in zip(case.qo_len, self.v, strict=True):
            num_keys = len(v)
            position = np.arange(num_keys - rows, num_keys)
            end = position + 1 if case.causal else np.full(rows, num_keys)
            begin = np.maximum(0, position - case.window_left) * (case.window_left >= 0)
            weights = np.where(np.arange(num_keys) < case.heavy, case.weight * keeps_light, 1.0)
            sums = np.zeros((num_keys + 1, *v.shape[1:])), np.zeros(num_keys + 1)
            np.cumsum(weights[:, None, None] * v.astype(np.float64), axis=0, out=sums[0][1:])
            np.cumsum(weights, out=sums[1][1:])
            total, weight = (x[end] - x[begin] for x in sums)
            out.append(np.repeat(total / weight[:, None, None], group, axis=1))
            lse.append(np.repeat(np.log2(weight)[:, None], case.heads[0], axis=1))
        return np.concatenate(out), np.concatenate(lse)
