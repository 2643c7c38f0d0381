"""The requests of a batch, read from what plan() is given: lengths on the host, checked."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from .. import array
from ..array import ArrayView
from ..array.match import is_contiguous
from ..core import dtypes
from ..core.problem import MAX_LENGTH
from ..errors import ArgumentError, UnsupportedError
from ..schedule.batch import BatchRequests
from ..schedule.levels import Levels
from .workspace import copy_on_device, int32_on_device

# Half the time of the methods on short arrays.
_min, _max = np.minimum.reduce, np.maximum.reduce
_UNSIGNED = {np.dtype(np.int32): np.uint32, np.dtype(np.int64): np.uint64}
INTEGERS = (np.dtype(np.int32), np.dtype(np.int64))
_TABLE_DTYPES = dtypes.int32, dtypes.int64
# Offsets of more requests are read anew each time.
_MAX_KNOWN = 1025


class PageNames(NamedTuple):
    """What the caller's arguments are called, for messages."""

    indptr: str
    indices: str
    last_page_len: str


@dataclass(slots=True)
class Batch:
    """Lengths and places of a batch's requests, on the host.

    num_rows          rows of q
    num_keys          ragged: rows of k and v that the requests reach; 0 for paged keys
    qo_indptr         int64 [B + 1]
    kv_indptr         int64 [B + 1], in pages or in rows of k
    last_page_len     int64 [B]; None for ragged keys, or if pages hold one token and the array is
                      on a GPU
    last_page_len_device   that array
    page_ids          ids on the host, the caller's own array or a part of it; or None
    page_ids_device   the caller's ids on the GPU, or None
    max_page          the largest id in use, -1 if none is or it is not known
    mask_indptr       int64 [B + 1] in bytes of the packed mask, None without one
    levels, parts     of a cascade: what its requests are, and the batch of each level
    matrix            of a block-sparse mask: the extents that its wrapper was told
    others            int64 [B], keys of each request that other ranks hold, where ranks share them
                      (key_share.py) and the caller says; else None
    """

    requests: BatchRequests
    num_rows: int
    num_keys: int
    qo_indptr: np.ndarray
    kv_indptr: np.ndarray
    last_page_len: np.ndarray | None = None
    last_page_len_device: ArrayView | None = None
    page_ids: np.ndarray | None = None
    page_ids_device: ArrayView | None = None
    max_page: int = -1
    mask_indptr: np.ndarray | None = None
    levels: Levels | None = None
    parts: tuple[Batch, ...] = ()
    matrix: tuple[int, ...] = ()
    others: np.ndarray | None = None

    @property
    def num_requests(self) -> int:
        return self.qo_indptr.size - 1

    @property
    def num_page_ids(self) -> int:
        """The length of the page table, as far as it is used."""
        return int(self.kv_indptr[-1])


def host_integers(x: Any, name: str) -> np.ndarray:
    """int64 [n]: a copy of an int32 or int64 array; one on a GPU is waited for."""
    a = x
    if type(x) is not np.ndarray:
        v = array.view(x, name)
        a = x.numpy() if v.framework == "torch" and v.device.kind == "cpu" else array.to_host(v)
    if a.size > MAX_LENGTH:
        raise UnsupportedError(f"{name}: holds {a.size} numbers; at most {MAX_LENGTH}")
    if a.ndim != 1 or a.dtype not in INTEGERS:
        raise ArgumentError(
            f"{name}: got {a.dtype} {list(a.shape)}; wanted int32 or int64 with one dimension"
        )
    return a.astype(np.int64)


def on_host(*tables: Any) -> tuple[Any, ...]:
    """The tables; if several are on a GPU, copies of those, which is then waited for once.

    What is no such table of integers is left as it is, for its reader to refuse.
    """
    indices, views = [], []
    for index, x in enumerate(tables):
        if x is None or isinstance(x, np.ndarray) or getattr(x, "is_cuda", True) is False:
            continue
        try:
            v = array.view(x, "a table")
        except (ArgumentError, UnsupportedError, TypeError):
            continue
        if v.device.kind == "cpu" or len(v.shape) > 2 or v.dtype not in _TABLE_DTYPES:
            continue
        if v.framework in ("torch", "cupy") and is_contiguous(v):
            indices.append(index)
            views.append(v)
    if len(views) < 2:
        return tables
    first = views[0]
    if any(v.device != first.device or v.framework != first.framework for v in views):
        return tables
    tables_on_host = [*tables]
    for index, copy in zip(indices, array.to_host_together(views), strict=True):
        tables_on_host[index] = copy
    return tuple(tables_on_host)


def read_indptr(
    x: Any, name: str, num_requests: int | None = None, unit: int = 1
) -> tuple[np.ndarray, np.ndarray, int]:
    """Offsets int64 [B + 1], checked never to fall, their steps [B], and the smallest of these.

    unit: what the caller's count for one here.
    """
    indptr = host_integers(x, name)
    if unit != 1:
        if (indptr % unit).any():
            raise ArgumentError(
                f"{name}: {indptr.tolist()[:8]} are not all multiples of a token's {unit} elements,"
                " which offsets count with backend='cudnn'; use another backend for those in tokens"
            )
        indptr //= unit
    if indptr.size == 0 or (num_requests is not None and indptr.size != num_requests + 1):
        wanted = "at least 1" if num_requests is None else f"{num_requests + 1}, as in qo_indptr"
        raise ArgumentError(f"{name}: holds {indptr.size} offsets; wanted {wanted} (requests + 1)")
    steps = indptr[1:] - indptr[:-1]
    if indptr[0] < 0:
        raise ArgumentError(f"{name}: the first offset is {indptr[0]}; wanted 0 or more")
    shortest = int(_min(steps)) if steps.size else 0
    if shortest < 0:
        at = int(np.argmax(steps < 0))
        raise ArgumentError(
            f"{name}: falls from {indptr[at]} to {indptr[at + 1]} after request {at}; wanted "
            "offsets that never fall"
        )
    if indptr[-1] < 0:  # so far below that the step is beyond 64 bits
        raise ArgumentError(f"{name}: ends at {indptr[-1]}; wanted offsets that never fall")
    if indptr[-1] > MAX_LENGTH:
        raise UnsupportedError(f"{name}: ends at {indptr[-1]}; at most {MAX_LENGTH} is supported")
    return indptr, steps, shortest


class QueryRows(NamedTuple):
    """Rows of q.

    indptr   int64 [B + 1], qo_indptr
    lengths  int64 [B], qo_len
    uniform  the rows of every request if all have as many; else -1
    """

    indptr: np.ndarray
    lengths: np.ndarray
    uniform: int


@lru_cache(maxsize=256)
def uniform_rows(num_requests: int, qo_len: int) -> QueryRows:
    """The rows of requests that have `qo_len` each; read-only."""
    indptr = np.arange(num_requests + 1, dtype=np.int64) * qo_len
    lengths = np.full(num_requests, qo_len, np.int64)
    indptr.flags.writeable = lengths.flags.writeable = False
    return QueryRows(indptr, lengths, qo_len)


def read_rows(qo_indptr: Any, name: str = "qo_indptr", unit: int = 1) -> QueryRows:
    """The rows that offsets from 0 on deal out; `unit` as in read_indptr."""
    x = qo_indptr
    if type(x) is np.ndarray and x.ndim == 1 and x.size <= _MAX_KNOWN and x.dtype in INTEGERS:
        # Offsets of prompts come once, and would only push out those that come again.
        if x.size > 1 and int(x[1]) * (x.size - 1) == int(x[-1]):
            return _known_rows(x.tobytes(), x.itemsize, name, unit)
    return _read_rows(x, name, unit)


@lru_cache(maxsize=64)
def _known_rows(raw: bytes, itemsize: int, name: str, unit: int) -> QueryRows:
    """The rows of offsets in these bytes; read-only. Steps of a decoding loop have the same, of
    equally many rows each."""
    x = np.frombuffer(raw, np.int32 if itemsize == 4 else np.int64)
    rows = _read_rows(x, name, unit)
    rows.indptr.flags.writeable = rows.lengths.flags.writeable = False
    return rows


def _read_rows(x: Any, name: str, unit: int) -> QueryRows:
    indptr, lengths, shortest = read_indptr(x, name, unit=unit)
    if indptr[0]:
        raise ArgumentError(f"{name}: the first offset is {indptr[0]}; wanted 0")
    is_uniform = shortest > 0 and shortest * lengths.size == indptr[-1]
    return QueryRows(indptr, lengths, shortest if is_uniform else -1)


def read_paged(
    rows: QueryRows | int,
    kv_indptr: Any,
    kv_indices: Any,
    last_page_len: Any,
    page_size: int,
    names: PageNames,
    is_bounded: bool,
    has_lengths: bool = False,
) -> Batch:
    """A batch over pages. `rows` are read_rows', or how many every request has.

    has_lengths: last_page_len holds the number of keys of each request, which may leave pages
    unused. Ids of pages on the GPU stay there, unread unless `is_bounded`; with pages of one token
    the lengths of last pages are not read either.
    """
    expected = None if isinstance(rows, int) else rows.lengths.size
    if page_size > 1 or has_lengths:
        kv_indptr, last_page_len = on_host(kv_indptr, last_page_len)
    kv_indptr, num_pages, fewest = read_indptr(kv_indptr, names.indptr, expected)
    count = num_pages.size
    if isinstance(rows, int):
        rows = uniform_rows(count, rows)
    qo_indptr, qo_len, uniform = rows
    last, last_device, kv_len, label = None, None, num_pages, names.last_page_len
    if has_lengths:
        kv_len = _read_lengths(last_page_len, num_pages, page_size, label)
    elif page_size == 1 and type(last_page_len) is not np.ndarray:
        last_device = array.view(last_page_len, label)
        if tuple(last_device.shape) != (count,):
            raise _wrong_count(label, last_device.shape, count)
        if last_device.device.kind == "cpu":
            last_device = None
    if last_device is None and not has_lengths:
        last = host_integers(last_page_len, label)
        kv_len = _page_lengths(num_pages, fewest, last, page_size, label)
    total = int(kv_indptr[-1]) * page_size
    if total > MAX_LENGTH and kv_len.max(initial=0) > MAX_LENGTH:
        raise UnsupportedError(
            f"{label if has_lengths else names.indptr}: a request has {kv_len.max()} keys; at most "
            f"{MAX_LENGTH} are supported"
        )
    requests = BatchRequests(qo_len, kv_len, qo_indptr[:-1], kv_indptr[:-1], None, uniform)
    batch = Batch(requests, int(qo_indptr[-1]), 0, qo_indptr, kv_indptr, last, last_device)
    read_page_ids(batch, kv_indices, names, is_bounded)
    return batch


def _read_lengths(kv_len: Any, num_pages: np.ndarray, page_size: int, name: str) -> np.ndarray:
    """The keys of each request, checked to fit its pages."""
    lengths = host_integers(kv_len, name)
    if lengths.size != num_pages.size:
        raise _wrong_count(name, lengths.shape, num_pages.size)
    # As unsigned numbers, so that one pass finds negative lengths too.
    is_wrong = lengths.view(np.uint64) > (num_pages * page_size).view(np.uint64)
    if np.count_nonzero(is_wrong):
        at = int(np.argmax(is_wrong))
        raise ArgumentError(
            f"{name}: request {at} has {lengths[at]} keys in {num_pages[at]} pages of {page_size}; "
            f"wanted 0 to {num_pages[at] * page_size}"
        )
    return lengths


def _page_lengths(
    num_pages: np.ndarray, fewest: int, last: np.ndarray, page_size: int, name: str
) -> np.ndarray:
    """Keys of each request; a request without pages has none, whatever its last page length is."""
    if last.size != num_pages.size:
        raise _wrong_count(name, last.shape, num_pages.size)
    if not last.size:
        return last
    missing = page_size - last
    if not fewest:
        missing[num_pages == 0] = 0
    # As unsigned numbers, so that one pass finds lengths beyond either end.
    if _max(missing.view(np.uint64)) >= page_size:
        at = int(np.argmax(missing.view(np.uint64) >= page_size))
        raise ArgumentError(
            f"{name}: request {at} has {last[at]} tokens in its last page; wanted 1 to "
            f"{page_size}, the page size"
        )
    return num_pages * page_size - missing


def _wrong_count(name: str, shape: Any, wanted: int) -> ArgumentError:
    return ArgumentError(f"{name}: shape is {list(shape)}; wanted [{wanted}], one for each request")


def read_page_ids(batch: Batch, kv_indices: Any, names: PageNames, is_bounded: bool) -> None:
    needed, name = batch.num_page_ids, names.indices
    is_numpy = type(kv_indices) is np.ndarray
    v = None if is_numpy else array.view(kv_indices, name)
    shape = kv_indices.shape if v is None else v.shape
    if len(shape) != 1 or shape[0] < needed:
        raise ArgumentError(
            f"{name}: shape is {list(shape)}; wanted one dimension of at least {needed}, the "
            f"last offset of {names.indptr}"
        )
    if v is not None and v.device.kind == "cuda":
        if v.dtype not in (dtypes.int32, dtypes.int64):
            raise ArgumentError(f"{name}: dtype is {v.dtype}; wanted int32 or int64")
        batch.page_ids_device = v
        if not is_bounded:
            return
        ids = array.to_host(v)
    elif v is not None:
        ids = kv_indices.numpy() if v.framework == "torch" else array.as_numpy(v)
    else:
        ids = kv_indices
    if ids.dtype not in INTEGERS:
        raise ArgumentError(f"{name}: dtype is {ids.dtype}; wanted int32 or int64")
    begin = int(batch.kv_indptr[0])
    used = ids[begin:needed]
    if used.size:
        # As unsigned numbers, so that one pass finds negative ids too.
        unsigned = np.ascontiguousarray(used).view(_UNSIGNED[used.dtype])
        largest = int(unsigned[unsigned.argmax()])
        if largest >= 1 << 31:
            at = int(np.argmax((used < 0) | (used >= 1 << 31)))
            raise ArgumentError(
                f"{name}: entry {begin + at} is page {used[at]}; wanted ids of pages, from 0 on"
            )
        batch.max_page = largest
    if batch.page_ids_device is None:
        batch.page_ids = ids[:needed]


def concatenate(first: Batch, second: Batch) -> Batch:
    """The requests of both batches, whose rows and pages follow one another. `join_page_ids` makes
    the page table."""
    a, b = first.requests, second.requests
    pages = first.num_page_ids
    requests = BatchRequests(
        np.concatenate([a.qo_len, b.qo_len]),
        np.concatenate([a.kv_len, b.kv_len]),
        np.concatenate([a.q_start, b.q_start + first.num_rows]),
        np.concatenate([a.kv_start, b.kv_start + pages]),
    )
    return Batch(
        requests,
        first.num_rows + second.num_rows,
        0,
        np.concatenate([first.qo_indptr, second.qo_indptr[1:] + first.num_rows]),
        np.concatenate([first.kv_indptr, second.kv_indptr[1:] + pages]),
        max_page=max(first.max_page, second.max_page),
    )


def join_page_ids(
    both: Batch, first: Batch, second: Batch, workspace: ArrayView, stream: int
) -> None:
    """Give `both` the page tables of two batches. Tables that are all on the GPU stay there."""
    ids = first.page_ids_device, second.page_ids_device
    counts = first.num_page_ids, second.num_page_ids
    if ids[0] is None or ids[1] is None:
        parts = [
            batch.page_ids if v is None else array.to_host(v)
            for batch, v in zip((first, second), ids, strict=True)
        ]
        both.page_ids = np.concatenate(
            [np.asarray(x)[:count] for x, count in zip(parts, counts, strict=True)]
        )
        return
    table = array.view(array.empty((sum(counts),), dtypes.int32, workspace), "kv_indices")
    address = table.ptr
    for v, count in zip(ids, counts, strict=True):
        assert v is not None
        held = int32_on_device(v, "kv_indices")
        array.acquire(workspace, held)
        copy_on_device(address, held.ptr, 4 * count, table.device.index, stream)
        array.release(workspace, held)
        address += 4 * count
    both.page_ids_device = table


def with_q_len(batch: Batch, q_len: int) -> Batch:
    """The batch with so many rows of q for every request."""
    qo_indptr, qo_len, _ = uniform_rows(batch.num_requests, q_len)
    own = batch.requests
    requests = BatchRequests(qo_len, own.kv_len, qo_indptr[:-1], own.kv_start, None, q_len)
    return replace(batch, requests=requests, num_rows=int(qo_indptr[-1]), qo_indptr=qo_indptr)


def read_ragged(rows: QueryRows, kv_indptr: Any, unit: int = 1) -> Batch:
    """A batch whose keys are rows of one array; `unit` as in read_indptr."""
    qo_indptr, qo_len, uniform = rows
    kv_indptr, kv_len, _ = read_indptr(kv_indptr, "kv_indptr", qo_len.size, unit)
    requests = BatchRequests(qo_len, kv_len, qo_indptr[:-1], kv_indptr[:-1], None, uniform)
    return Batch(requests, int(qo_indptr[-1]), int(kv_indptr[-1]), qo_indptr, kv_indptr)


def require_same_offsets(x: Any, name: str, wanted: np.ndarray, unit: int = 1) -> None:
    """ArgumentError unless offsets, if they are given, name the rows that others do."""
    if x is not None and (read_indptr(x, name, wanted.size - 1, unit)[0] != wanted).any():
        raise ArgumentError(
            f"{name}: names other rows than {'qo' if name == 'o_indptr' else 'kv'}_indptr; values "
            "and answers are where keys and queries are, pass offsets of the same rows, or None"
        )


def require_same_lengths(x: Any, name: str, wanted: np.ndarray) -> None:
    """ArgumentError unless lengths [B] or [B, 1, ...], if they are given, are what offsets say."""
    if x is not None and array.to_host(array.view(x, name)).ravel().tolist() != wanted.tolist():
        raise ArgumentError(
            f"{name}: differs from {wanted.tolist()[:8]}, the lengths that offsets and pages say; "
            "pass those, or None"
        )


def require_row_limit(batch: Batch, group_size: int) -> None:
    """UnsupportedError if the packed rows of a request do not fit 32 bits."""
    if batch.num_rows * group_size > MAX_LENGTH:
        rows = int(batch.requests.qo_len.max())
        if rows * group_size > MAX_LENGTH:
            raise UnsupportedError(
                f"qo_indptr: a request has {rows} query tokens for each of {group_size} heads; at "
                f"most {MAX_LENGTH} query rows of one KV head are supported"
            )


def with_indices(batch: Batch) -> Batch:
    """The batch whose requests know their place in it, where the offset of a mask would be."""
    indices = np.arange(batch.num_requests, dtype=np.int64)
    return replace(batch, requests=replace(batch.requests, mask_start=indices))


def with_mask(batch: Batch) -> Batch:
    """The batch with the offsets of its requests' bits in a packed mask, each from a byte on."""
    lengths = batch.requests
    indptr = np.zeros(batch.num_requests + 1, np.int64)
    np.cumsum((lengths.qo_len * lengths.kv_len + 7) >> 3, out=indptr[1:])
    batch.mask_indptr = indptr
    batch.requests = BatchRequests(
        lengths.qo_len, lengths.kv_len, lengths.q_start, lengths.kv_start, indptr[:-1]
    )
    return batch
