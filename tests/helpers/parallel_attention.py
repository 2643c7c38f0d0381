"""Batches whose keys ranks share: one rank's answers, and what every rank of a group answers."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import numpy as np

from cupyattn.core.key_share import KeyShare
from cupyattn.distributed import Group


@dataclass(frozen=True)
class Batch:
    """Requests of `q_len` rows each over paged caches, and what each rank holds of them.

    kv_lens   whole lengths, the rows' own tokens among them
    """

    size: int = 2
    kv_lens: tuple[int, ...] = (37, 5, 64)
    q_len: int = 1
    own_heads: int = 2
    kv_heads: int = 2
    head_dim: int = 64
    page_size: int = 4
    run: int = 1
    latent: bool = False
    seed: int = 0

    @property
    def heads(self) -> int:
        return self.size * self.own_heads

    @property
    def columns(self) -> int:
        """Of a row of q and of k."""
        return 576 if self.latent else self.head_dim

    @property
    def whole(self) -> KeyShare:
        return KeyShare(1, 0, 1)

    def share(self, rank: int) -> KeyShare:
        return KeyShare(self.size, rank, self.run)

    def draw(self) -> tuple[np.ndarray, list[np.ndarray], list[np.ndarray]]:
        """q [B, q_len, heads, columns], and keys and values [kv_len, kv_heads, columns]."""
        rng = np.random.default_rng(self.seed)

        def normal(*shape: int) -> np.ndarray:
            return rng.standard_normal(shape).astype(np.float16)

        q = normal(len(self.kv_lens), self.q_len, self.heads, self.columns)
        kv_heads = 1 if self.latent else self.kv_heads
        keys = [normal(n, kv_heads, self.columns) for n in self.kv_lens]
        if self.latent:
            return q, keys, [k[..., :512] for k in keys]
        return q, keys, [normal(n, kv_heads, self.head_dim) for n in self.kv_lens]

    def cache(self, rows: list[np.ndarray], share: KeyShare) -> np.ndarray:
        """The pages of a rank [pages, page_size, kv_heads, columns]; a table is their order."""
        pages = []
        for x in rows:
            own = x[share.holds(np.arange(len(x)))]
            count = -(-len(own) // self.page_size)
            padded = np.full((count * self.page_size, *x.shape[1:]), np.nan, x.dtype)
            padded[: len(own)] = own
            pages.append(padded.reshape(count, self.page_size, *x.shape[1:]))
        pages.append(np.full((1, self.page_size, *rows[0].shape[1:]), np.nan, rows[0].dtype))
        return np.concatenate(pages)

    def lengths(self, share: KeyShare) -> np.ndarray:
        return share.count(np.array(self.kv_lens)).astype(np.int32)

    def indptr(self, share: KeyShare) -> np.ndarray:
        counts = -(-self.lengths(share) // self.page_size)
        return np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)

    def tables(self, share: KeyShare) -> np.ndarray:
        """int32 [B, most pages]."""
        indptr = self.indptr(share)
        most = max(1, int(np.diff(indptr).max()))
        table = np.zeros((len(self.kv_lens), most), np.int32)
        for row, (begin, end) in enumerate(itertools.pairwise(indptr)):
            table[row, : end - begin] = np.arange(begin, end)
        return table

    def last_page_len(self, share: KeyShare) -> np.ndarray:
        lengths = self.lengths(share)
        return np.where(lengths > 0, (lengths - 1) % self.page_size + 1, 1).astype(np.int32)


Work = Callable[[Batch, KeyShare, Any, ModuleType], Any]


def own_part(x: np.ndarray, group: Group) -> np.ndarray:
    """The heads of a rank, of an array [..., heads, columns]."""
    own = x.shape[-2] // group.size
    return np.ascontiguousarray(x[..., group.rank * own : (group.rank + 1) * own, :])
