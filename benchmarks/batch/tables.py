"""Page tables in NumPy: scattered pages in a pool that is a little larger than needed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

_SPARE_FRACTION = 32  # one page in so many belongs to nobody
_LEAST_SPARE = 8


@dataclass(frozen=True)
class PageTables:
    """FlashInfer's CSR form, int32: request b owns pages indices[indptr[b] : indptr[b + 1]] of a
    pool of `num_pages`, the last of them filled to last_page_len[b]. `unowned` are the others.
    """

    page_size: int
    kv_lens: Any  # [batch]
    indptr: Any  # [batch + 1]
    indices: Any  # [indptr[-1]]
    last_page_len: Any  # [batch]
    num_pages: int
    unowned: Any  # [num_pages - indptr[-1]], more where requests list the same pages

    def pages(self, b: int) -> Any:
        """The pages of one request, in the order of its keys."""
        return self.indices[self.indptr[b] : self.indptr[b + 1]]

    def block_table(self) -> Any:
        """[batch, most pages]: the padded form. Padding repeats the request's own first page."""
        widest = int(np.diff(self.indptr).max())
        table = np.empty((len(self.kv_lens), widest), np.int32)
        for b, row in enumerate(table):
            pages = self.pages(b)
            row[: len(pages)] = pages
            row[len(pages) :] = pages[0]
        return table


def page_tables(
    kv_lens: Sequence[int], page_size: int, seed: int, shared: int = 0, pool: int = 0
) -> PageTables:
    """Tables for requests of these lengths, each at least 1. No page follows its predecessor.

    The first `shared` keys of all requests, whole pages, are the same ones. With `pool`, each
    request lists pages of a pool of so many, none of them twice.
    """
    lengths = np.asarray(kv_lens, np.int64)
    counts = -(-lengths // page_size)
    indptr = np.concatenate(([0], np.cumsum(counts)))
    last_page_len = (lengths - (counts - 1) * page_size).astype(np.int32)
    if pool:
        random = np.random.default_rng(seed)
        ids = np.concatenate([random.choice(pool, count, replace=False) for count in counts])
        unlisted = np.setdiff1d(np.arange(pool), ids)
        fixed = lengths.astype(np.int32), indptr.astype(np.int32), ids.astype(np.int32)
        return PageTables(page_size, *fixed, last_page_len, pool, unlisted)
    same = shared // page_size
    owned = int(indptr[-1]) - (len(counts) - 1) * same
    num_pages = owned + max(_LEAST_SPARE, owned // _SPARE_FRACTION)
    order = _scattered(num_pages, np.random.default_rng(seed))
    ids = order[:owned]
    if same:
        own = np.split(ids[same:], np.cumsum(counts - same)[:-1])
        ids = np.concatenate([part for pages in own for part in (order[:same], pages)])
    return PageTables(
        page_size,
        lengths.astype(np.int32),
        indptr.astype(np.int32),
        ids.astype(np.int32),
        last_page_len,
        num_pages,
        np.sort(order[owned:]),
    )


def _scattered(count: int, random: np.random.Generator) -> Any:
    """A random permutation of 0 … count - 1 in which no number is followed by its successor."""
    order = random.permutation(count)
    while (places := np.flatnonzero(np.diff(order) == 1)).size:
        for place, other in zip(places, random.integers(count, size=places.size), strict=True):
            order[place], order[other] = order[other], order[place]
    return order
