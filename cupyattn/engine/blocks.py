"""Block-sparse patterns as batches: a block of rows is a request, its blocks of keys are pages.

Blocks that no row sees are in no request, so they cost nothing. The keys of a request are gathered:
their order does not matter to attention without positions.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from ..schedule.batch import BatchRequests
from .requests import Batch, PageNames, QueryRows, read_paged


@dataclass(frozen=True, slots=True)
class Blocks:
    """The blocks of columns that blocks of rows see, in int64 arrays.

    row_begin, row_end   [B]: the rows of each block of rows, in its matrix
    request              [n]: which block of rows sees each block of columns, rising
    begin, length        [n]: its columns
    """

    row_begin: np.ndarray
    row_end: np.ndarray
    request: np.ndarray
    begin: np.ndarray
    length: np.ndarray

    def select(self, chosen: np.ndarray) -> Blocks:
        """The blocks that `chosen` names: indices, or one bool for each block."""
        own = (x[chosen] for x in (self.request, self.begin, self.length))
        return Blocks(self.row_begin, self.row_end, *own)


class Causality(NamedTuple):
    """blocks without those that no row sees, and what hides keys of the rest: causality over the
    keys of each request, a packed mask, or nothing."""

    blocks: Blocks
    is_causal: bool
    mask: np.ndarray | None


def of_map(shown: np.ndarray, row_size: np.ndarray, column_size: np.ndarray) -> Blocks:
    """The blocks of matrices with blocks of any sizes, row by row of each matrix after another.

    shown [matrices, rows, columns], row_size [matrices, rows], column_size [matrices, columns].
    """
    row_end, column_end = np.cumsum(row_size, 1), np.cumsum(column_size, 1)
    matrix, row, column = np.nonzero(shown & (column_size > 0)[:, None])
    request = matrix * shown.shape[1] + row
    length = column_size[matrix, column]
    begin = column_end[matrix, column] - length
    return Blocks((row_end - row_size).ravel(), row_end.ravel(), request, begin, length)


def with_causality(blocks: Blocks, offset: int) -> Causality:
    """Hide the columns beyond row + offset from each row.

    Kernels align causality to the last key of a request. So they can do it where each request's
    last block ends with what its last row sees, and holds all that its first row does not see.
    """
    last_row = blocks.row_end[blocks.request] - 1
    blocks = blocks.select(blocks.begin <= last_row + offset)
    first_seen = blocks.row_begin[blocks.request] + offset
    is_whole = blocks.begin + blocks.length - 1 <= first_seen
    if is_whole.all():
        return Causality(blocks, False, None)
    order = np.lexsort((blocks.begin, blocks.request))
    blocks, is_whole = blocks.select(order), is_whole[order]
    is_last = np.append(np.diff(blocks.request) > 0, True)
    own = blocks.request[is_last]
    ends_well = (blocks.begin + blocks.length)[is_last] == blocks.row_end[own] + offset
    is_long = blocks.length[is_last] >= (blocks.row_end - blocks.row_begin)[own]
    if is_whole[~is_last].all() and ends_well.all() and is_long.all():
        return Causality(blocks, True, None)
    packed = []
    for rows, columns in _rows_and_columns(blocks):
        packed.append(pack_rows(columns <= rows[:, None] + offset))
    return Causality(blocks, False, np.concatenate(packed))


def _rows_and_columns(blocks: Blocks) -> Any:
    """For each request its rows, and the columns of its keys."""
    counts = np.bincount(blocks.request, minlength=blocks.row_begin.size)
    ends = np.cumsum(counts)
    for index, end in enumerate(ends.tolist()):
        own = slice(end - int(counts[index]), end)
        rows = np.arange(blocks.row_begin[index], blocks.row_end[index])
        yield rows, ranges(blocks.begin[own], blocks.length[own])


def pack_rows(mask: np.ndarray) -> np.ndarray:
    """The bits of one request's mask, bool [rows, keys], from a byte on."""
    return np.packbits(mask, bitorder="little")


def ranges(begin: np.ndarray, length: np.ndarray) -> np.ndarray:
    """begin[0], begin[0] + 1, ... of each, one after another."""
    before = np.cumsum(length) - length
    return np.repeat(begin - before, length) + np.arange(int(length.sum()))


def to_batch(blocks: Blocks, page_size: int, first_page: np.ndarray | int) -> Batch:
    """The requests of blocks whose columns are whole pages of so many keys.

    first_page: where the pages of each request's matrix begin. Rows of all requests follow one
    another. Raises UnsupportedError for more rows or keys than kernels count.
    """
    count = blocks.row_begin.size
    qo_len = blocks.row_end - blocks.row_begin
    qo_indptr = np.append(0, np.cumsum(qo_len))
    pages = blocks.length // page_size
    base = np.broadcast_to(first_page, (count,))[blocks.request]
    ids = ranges(base + blocks.begin // page_size, pages)
    num_pages = np.bincount(blocks.request, pages, count).astype(np.int64)
    kv_indptr = np.append(0, np.cumsum(num_pages))
    names = PageNames("blocks", "blocks", "blocks")
    rows, last = QueryRows(qo_indptr, qo_len, -1), np.full(count, page_size)
    return read_paged(rows, kv_indptr, ids, last, page_size, names, False)


def repeat_heads(batch: Batch, num_kv_heads: int, group: int) -> Batch:
    """The batch of all query heads, out of that of one query head for each KV head: heads that
    share keys share a page table, and rows are heads first."""
    own = batch.requests
    num_rows, count = batch.num_rows // num_kv_heads, own.qo_len.size // num_kv_heads

    def repeated(x: np.ndarray) -> np.ndarray:
        return np.repeat(x.reshape(num_kv_heads, count), group, axis=0).ravel()

    qo_len, kv_len, kv_start = map(repeated, (own.qo_len, own.kv_len, own.kv_start))
    qo_indptr = np.append(0, np.cumsum(qo_len))
    requests = BatchRequests(qo_len, kv_len, qo_indptr[:-1], kv_start)
    return replace(
        batch,
        requests=requests,
        num_rows=num_rows * num_kv_heads * group,
        qo_indptr=qo_indptr,
        kv_indptr=np.append(kv_start, batch.num_page_ids),
        last_page_len=None,
    )
