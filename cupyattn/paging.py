"""Page arithmetic in NumPy: lengths, page tables, and the slots that positions have.

A request's keys fill pages of `page_size` slots in order; all but its last page are full. Three
ways to say what a batch has:

lengths
    seq_lens [B], keys of each request
CSR
    kv_indptr [B + 1], kv_indices [n], kv_last_page_len [B]: request b has the pages
    kv_indices[kv_indptr[b]:kv_indptr[b + 1]], the last with kv_last_page_len[b] keys
block table
    [B, max_pages], row b begins with the pages of request b

Arguments are NumPy arrays of any integers; answers are int64, which no product of sizes overflows.
All functions raise ArgumentError for arrays of other kinds and shapes, and for lengths, offsets and
pages that do not fit each other.
"""

from __future__ import annotations

from numbers import Integral

import numpy as np

from .errors import ArgumentError

NO_REQUEST = -1
_INT64_MAX = 2**63 - 1


def num_pages(seq_lens: np.ndarray, page_size: int) -> np.ndarray:
    """Pages that hold each of `seq_lens` [B] keys."""
    return -(-_integers(seq_lens, "seq_lens") // _positive(page_size))


def lengths_to_pages(seq_lens: np.ndarray, page_size: int) -> tuple[np.ndarray, np.ndarray]:
    """(kv_indptr [B + 1], kv_last_page_len [B]) of requests of `seq_lens` [B] keys.

    A request without keys has no pages and a last length of 0, so that `pages_to_lengths` gives 0.
    """
    lengths = _lengths(seq_lens, "seq_lens")
    last = lengths - np.maximum(num_pages(lengths, page_size) - 1, 0) * page_size
    return _offsets(num_pages(lengths, page_size)), last


def pages_to_lengths(
    kv_indptr: np.ndarray, kv_last_page_len: np.ndarray, page_size: int
) -> np.ndarray:
    """Keys [B] of each request: max(pages - 1, 0) * page_size + last page's length.

    So a request without pages gets its last length, which a caller keeps at 0.
    """
    last = _lengths(kv_last_page_len, "kv_last_page_len")
    pages = np.diff(_check_indptr(kv_indptr, "kv_indptr", last.size))
    longest = int(pages.max(initial=0))
    beyond = np.flatnonzero(last > _positive(page_size))
    if beyond.size:
        at = int(beyond[0])
        raise ArgumentError(
            f"kv_last_page_len: request {at} has {last[at]} keys in its last page, which holds "
            f"{page_size}"
        )
    if longest * _positive(page_size) > _INT64_MAX - int(last.max(initial=0)):
        raise ArgumentError(
            f"kv_indptr: a request has {longest} pages of {page_size} keys, which 64 bits do not "
            "count"
        )
    return np.maximum(pages - 1, 0) * page_size + last


def table_to_csr(table: np.ndarray, counts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(kv_indptr [B + 1], kv_indices) of a block table [B, max_pages], `counts` [B] pages a row."""
    counts = _integers(counts, "counts")
    if table.ndim != 2 or counts.shape != table.shape[:1]:
        raise ArgumentError(
            f"table: shape {list(table.shape)} with counts {list(counts.shape)}; wanted "
            "[B, max_pages] with [B]"
        )
    if ((counts < 0) | (counts > table.shape[1])).any():
        raise ArgumentError(f"counts: wanted 0 to the {table.shape[1]} pages of a row of the table")
    is_page = np.arange(table.shape[1]) < counts[:, None]
    return _offsets(counts), table[is_page].astype(np.int64)


def csr_to_table(
    kv_indptr: np.ndarray,
    kv_indices: np.ndarray,
    max_pages: int | None = None,
    fill: int = -1,
) -> np.ndarray:
    """The block table [B, max_pages] of a CSR page table; `fill` stands where a row has no page.

    max_pages None: as many as the longest request has.
    """
    indptr = _check_indptr(kv_indptr, "kv_indptr")
    _check_indices(indptr, kv_indices)
    counts = np.diff(indptr)
    longest = int(counts.max(initial=0))
    width = longest if max_pages is None else max_pages
    if longest > width:
        raise ArgumentError(f"max_pages: got {width}, but a request has {longest} pages")
    is_page = np.arange(width) < counts[:, None]
    table = np.full(is_page.shape, fill, np.int64)
    table[is_page] = kv_indices[indptr[0] : indptr[-1]]
    return table


def positions_of(
    append_indptr: np.ndarray, seq_lens: np.ndarray, nnz: int
) -> tuple[np.ndarray, np.ndarray]:
    """(batch_indices [nnz], positions [nnz]) of new tokens, which are the last of their requests.

    Parameters
    ----------
    append_indptr [B + 1]
        Offsets of each request's new tokens; seq_lens [B] lengths that include them. Rows of `nnz`
        that belong to no request get -1 and 0.
    """
    lengths = _lengths(seq_lens, "seq_lens")
    indptr = _check_indptr(append_indptr, "append_indptr", lengths.size)
    appended = np.diff(indptr)
    if (appended > lengths).any():
        raise ArgumentError(
            "seq_lens: a request has fewer keys than are appended to it; wanted lengths after the "
            "append"
        )
    if nnz < indptr[-1]:
        raise ArgumentError(f"nnz: got {nnz}, but append_indptr ends at {indptr[-1]}")
    batch_indices = np.full(nnz, NO_REQUEST, np.int64)
    positions = np.zeros(nnz, np.int64)
    rows = slice(int(indptr[0]), int(indptr[-1]))
    batch_indices[rows] = np.repeat(np.arange(lengths.size), appended)
    positions[rows] = np.arange(rows.start, rows.stop) + np.repeat(lengths - indptr[1:], appended)
    return batch_indices, positions


def slots(
    batch_indices: np.ndarray,
    positions: np.ndarray,
    kv_indptr: np.ndarray,
    kv_indices: np.ndarray,
    page_size: int,
    pool_size: int | None = None,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(rows, page, offset): where in a pool of pages each row of `positions` [nnz] is.

    `rows` are those that belong to a request: a negative batch index means none.

    Raises
    ------
    CupyAttnError
        ArgumentError for a batch index or position beyond the page table, or, given pool_size, a
        page beyond the pool.
    """
    indptr = _check_indptr(kv_indptr, "kv_indptr")
    _check_indices(indptr, kv_indices)
    batch = _integers(batch_indices, "batch_indices")
    rows = np.flatnonzero(batch >= 0)
    batch, position = batch[rows], _integers(positions, "positions")[rows]
    if (batch >= indptr.size - 1).any():
        raise ArgumentError(
            f"batch_indices: {batch.max()} is not one of the {indptr.size - 1} requests of "
            "kv_indptr; wanted less, or -1 to skip a row"
        )
    entry = indptr[batch] + position // _positive(page_size)
    bad = np.flatnonzero((position < 0) | (entry < 0) | (entry >= indptr[batch + 1]))
    if bad.size:
        first = bad[0]
        pages = indptr[batch[first] + 1] - indptr[batch[first]]
        raise ArgumentError(
            f"positions: row {rows[first]} is at {position[first]}, outside the {pages} pages of "
            f"{page_size} that request {batch[first]} has; wanted pages for all keys, the new ones "
            "included"
        )
    page = kv_indices[entry].astype(np.int64)
    if pool_size is not None and ((page < 0) | (page >= pool_size)).any():
        outside = page[(page < 0) | (page >= pool_size)][0]
        raise ArgumentError(
            f"kv_indices: page {outside} is not one of the {pool_size} of the cache"
        )
    return rows, page, position % page_size


def _offsets(counts: np.ndarray) -> np.ndarray:
    indptr = np.zeros(counts.size + 1, np.int64)
    np.cumsum(counts, out=indptr[1:])
    return indptr


def _positive(page_size: int) -> int:
    if not isinstance(page_size, Integral) or not 1 <= page_size <= _INT64_MAX:
        raise ArgumentError(f"page_size: got {page_size!r}; wanted 1 or more")
    return int(page_size)


def _integers(x: np.ndarray, name: str) -> np.ndarray:
    return _require_integers(x, name).astype(np.int64)


def _require_integers(x: np.ndarray, name: str) -> np.ndarray:
    x = np.asarray(x)
    if x.ndim != 1 or x.dtype.kind not in "iu":
        raise ArgumentError(f"{name}: got {x.dtype} {list(x.shape)}; wanted integers [n]")
    return x


def _lengths(x: np.ndarray, name: str) -> np.ndarray:
    lengths = _integers(x, name)
    if (lengths < 0).any():
        raise ArgumentError(f"{name}: {lengths.min()} is negative; wanted lengths from 0 up")
    return lengths


def _check_indptr(x: np.ndarray, name: str, count: int | None = None) -> np.ndarray:
    indptr = _integers(x, name)
    if indptr.size == 0 or indptr[0] < 0 or (indptr[1:] < indptr[:-1]).any():
        raise ArgumentError(f"{name}: wanted [B + 1] offsets from 0 up that never fall")
    if count is not None and indptr.size != count + 1:
        raise ArgumentError(f"{name}: has {indptr.size} offsets; wanted {count + 1}, for {count}")
    return indptr


def _check_indices(indptr: np.ndarray, indices: np.ndarray) -> None:
    if _require_integers(indices, "kv_indices").size < indptr[-1]:
        raise ArgumentError(
            f"kv_indices: has {indices.size} pages, but kv_indptr ends at {indptr[-1]}"
        )
