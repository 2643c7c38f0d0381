"""The requests of a batch, read from what plan() is given: lengths on the host, checked."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from .. import array
from ..array import ArrayView
from ..array.match import require_contiguous_last
from ..core import dtypes
from ..errors import ArgumentError, UnsupportedError
from ..inputs.limits import MAX_LENGTH
from ..schedule.batch import BatchRequests
from ..schedule.levels import Levels

# Half the time of the methods on short arrays.
_least, _most = np.minimum.reduce, np.maximum.reduce
_UNSIGNED = {np.dtype(np.int32): np.uint32, np.dtype(np.int64): np.uint64}
_INTEGERS = (np.dtype(np.int32), np.dtype(np.int64))


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
    if a.ndim != 1 or a.dtype not in _INTEGERS:
        raise ArgumentError(
            f"{name}: got {a.dtype} {list(a.shape)}; wanted int32 or int64 with one dimension"
        )
    return a.astype(np.int64)


def read_indptr(
    x: Any, name: str, num_requests: int | None = None
) -> tuple[np.ndarray, np.ndarray, int]:
    """Offsets int64 [B + 1], checked never to fall, their steps [B], and the smallest of these."""
    indptr = host_integers(x, name)
    if indptr.size == 0 or (num_requests is not None and indptr.size != num_requests + 1):
        wanted = "at least 1" if num_requests is None else f"{num_requests + 1}, as in qo_indptr"
        raise ArgumentError(f"{name}: holds {indptr.size} offsets; wanted {wanted} (requests + 1)")
    steps = indptr[1:] - indptr[:-1]
    if indptr[0] < 0:
        raise ArgumentError(f"{name}: the first offset is {indptr[0]}; wanted 0 or more")
    least = int(_least(steps)) if steps.size else 0
    if least < 0:
        at = int(np.argmax(steps < 0))
        raise ArgumentError(
            f"{name}: falls from {indptr[at]} to {indptr[at + 1]} after request {at}; wanted "
            "offsets that never fall"
        )
    if indptr[-1] > MAX_LENGTH:
        raise UnsupportedError(f"{name}: ends at {indptr[-1]}; at most {MAX_LENGTH} is supported")
    return indptr, steps, least


@lru_cache(maxsize=256)
def uniform_rows(num_requests: int, qo_len: int) -> tuple[np.ndarray, np.ndarray]:
    """(qo_indptr [B + 1], qo_len [B]) of requests with equally many rows; read-only."""
    indptr = np.arange(num_requests + 1, dtype=np.int64) * qo_len
    lengths = np.full(num_requests, qo_len, np.int64)
    indptr.flags.writeable = lengths.flags.writeable = False
    return indptr, lengths


def read_rows(qo_indptr: Any, name: str = "qo_indptr") -> tuple[np.ndarray, np.ndarray]:
    """(qo_indptr [B + 1], qo_len [B])."""
    indptr, lengths, _ = read_indptr(qo_indptr, name)
    if indptr[0]:
        raise ArgumentError(f"{name}: the first offset is {indptr[0]}; wanted 0")
    return indptr, lengths


def read_paged(
    rows: tuple[np.ndarray, np.ndarray] | int,
    kv_indptr: Any,
    kv_indices: Any,
    last_page_len: Any,
    page_size: int,
    names: PageNames,
    is_bounded: bool,
) -> Batch:
    """A batch over pages. `rows` are read_rows', or how many every request has.

    Ids of pages on the GPU stay there, unread unless `is_bounded`; with pages of one token the
    lengths of last pages are not read either.
    """
    known = None if isinstance(rows, int) else rows[1].size
    kv_indptr, num_pages, fewest = read_indptr(kv_indptr, names.indptr, known)
    count, uniform = num_pages.size, -1
    if isinstance(rows, int):
        uniform = rows
        rows = uniform_rows(count, rows)
    qo_indptr, qo_len = rows
    last, last_device, kv_len = None, None, num_pages
    if page_size == 1 and type(last_page_len) is not np.ndarray:
        last_device = array.view(last_page_len, names.last_page_len)
        if tuple(last_device.shape) != (count,):
            raise _wrong_count(names.last_page_len, last_device.shape, count)
        if last_device.device.kind == "cpu":
            last_device = None
    if last_device is None:
        last = host_integers(last_page_len, names.last_page_len)
        kv_len = _page_lengths(num_pages, fewest, last, page_size, names.last_page_len)
    total = int(kv_indptr[-1]) * page_size
    if total > MAX_LENGTH and kv_len.max() > MAX_LENGTH:
        raise _too_many_keys(names.indptr, kv_len)
    requests = BatchRequests(qo_len, kv_len, qo_indptr[:-1], kv_indptr[:-1], None, uniform)
    batch = Batch(requests, int(qo_indptr[-1]), 0, qo_indptr, kv_indptr, last, last_device)
    _read_page_ids(batch, kv_indices, names, is_bounded)
    return batch


def read_paged_lengths(
    rows: tuple[np.ndarray, np.ndarray],
    kv_indptr: Any,
    kv_indices: Any,
    kv_len: Any,
    page_size: int,
    names: PageNames,
    is_bounded: bool,
) -> Batch:
    """The same from the number of keys of each request, which may leave pages unused."""
    qo_indptr, qo_len = rows
    kv_indptr, num_pages, _ = read_indptr(kv_indptr, names.indptr, qo_len.size)
    lengths = host_integers(kv_len, names.last_page_len)
    if lengths.size != qo_len.size:
        raise _wrong_count(names.last_page_len, lengths.shape, qo_len.size)
    is_wrong = (lengths < 0) | (lengths > num_pages * page_size)
    if is_wrong.any():
        at = int(np.argmax(is_wrong))
        raise ArgumentError(
            f"{names.last_page_len}: request {at} has {lengths[at]} keys in {num_pages[at]} pages "
            f"of {page_size}; wanted 0 to {num_pages[at] * page_size}"
        )
    if lengths.size and lengths.max() > MAX_LENGTH:
        raise _too_many_keys(names.last_page_len, lengths)
    requests = BatchRequests(qo_len, lengths, qo_indptr[:-1], kv_indptr[:-1])
    batch = Batch(requests, int(qo_indptr[-1]), 0, qo_indptr, kv_indptr)
    _read_page_ids(batch, kv_indices, names, is_bounded)
    return batch


def _too_many_keys(name: str, kv_len: np.ndarray) -> UnsupportedError:
    return UnsupportedError(
        f"{name}: a request has {kv_len.max()} keys; at most {MAX_LENGTH} are supported"
    )


def _page_lengths(
    num_pages: np.ndarray, fewest: int, last: np.ndarray, page_size: int, name: str
) -> np.ndarray:
    """Keys of each request: none without a page, whatever its last page is said to hold."""
    if last.size != num_pages.size:
        raise _wrong_count(name, last.shape, num_pages.size)
    if not last.size:
        return last
    missing = page_size - last
    if not fewest:
        missing[num_pages == 0] = 0
    # As unsigned numbers, so that one pass finds lengths beyond either end.
    if _most(missing.view(np.uint64)) >= page_size:
        at = int(np.argmax(missing.view(np.uint64) >= page_size))
        raise ArgumentError(
            f"{name}: request {at} has {last[at]} tokens in its last page; wanted 1 to "
            f"{page_size}, the page size"
        )
    return num_pages * page_size - missing


def _wrong_count(name: str, shape: Any, wanted: int) -> ArgumentError:
    return ArgumentError(f"{name}: shape is {list(shape)}; wanted [{wanted}], one for each request")


def _read_page_ids(batch: Batch, kv_indices: Any, names: PageNames, is_bounded: bool) -> None:
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
        require_contiguous_last(v, name)
        batch.page_ids_device = v
        if not is_bounded:
            return
        ids = array.to_host(v)
    elif v is not None:
        ids = kv_indices.numpy() if v.framework == "torch" else array.as_numpy(v)
    else:
        ids = kv_indices
    if ids.dtype not in _INTEGERS:
        raise ArgumentError(f"{name}: dtype is {ids.dtype}; wanted int32 or int64")
    begin = int(batch.kv_indptr[0])
    used = ids[begin:needed]
    if used.size:
        # As unsigned numbers, so that one pass finds negative ids too.
        largest = int(_most(np.ascontiguousarray(used).view(_UNSIGNED[used.dtype])))
        if largest >= 1 << 31:
            at = int(np.argmax((used < 0) | (used >= 1 << 31)))
            raise ArgumentError(
                f"{name}: entry {begin + at} is page {used[at]}; wanted ids of pages, from 0 on"
            )
        batch.max_page = largest
    if batch.page_ids_device is None:
        batch.page_ids = ids[:needed]


def read_ragged(rows: tuple[np.ndarray, np.ndarray], kv_indptr: Any) -> Batch:
    """A batch whose keys are rows of one array."""
    qo_indptr, qo_len = rows
    kv_indptr, kv_len, _ = read_indptr(kv_indptr, "kv_indptr", qo_len.size)
    requests = BatchRequests(qo_len, kv_len, qo_indptr[:-1], kv_indptr[:-1])
    return Batch(requests, int(qo_indptr[-1]), int(kv_indptr[-1]), qo_indptr, kv_indptr)


def require_row_limit(batch: Batch, group_size: int) -> None:
    """UnsupportedError if the packed rows of a request do not fit 32 bits."""
    if batch.num_rows * group_size > MAX_LENGTH:
        rows = int(batch.requests.qo_len.max())
        if rows * group_size > MAX_LENGTH:
            raise UnsupportedError(
                f"qo_indptr: a request has {rows} query tokens for each of {group_size} heads; at "
                f"most {MAX_LENGTH} query rows of one KV head are supported"
            )


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
