"""The levels of a cascade as one batch: read, checked, and laid end to end."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from .. import array
from ..array import ArrayView
from ..core import dtypes
from ..core.problem import MAX_LENGTH
from ..errors import ArgumentError, UnsupportedError
from ..schedule.batch import BatchRequests
from ..schedule.levels import Levels
from .requests import Batch, PageNames, read_paged, read_rows
from .workspace import copy_on_device, int32_on_device


def read_levels(
    arrays: Sequence[Sequence[Any]], num_levels: int, page_size: int, is_bounded: bool
) -> tuple[Batch, ...]:
    """A batch for each level of qo_indptr_arr, paged_kv_indptr_arr, paged_kv_indices_arr and
    paged_kv_last_page_len."""
    names = ("qo_indptr_arr", "paged_kv_indptr_arr", "paged_kv_indices_arr")
    for levels, name in zip(arrays, (*names, "paged_kv_last_page_len"), strict=True):
        if not isinstance(levels, (list, tuple)) or len(levels) != num_levels:
            have = len(levels) if isinstance(levels, (list, tuple)) else type(levels).__name__
            raise ArgumentError(f"{name}: got {have}; wanted a list of {num_levels}, one a level")
    parts = []
    for level, (qo_indptr, *pages) in enumerate(zip(*arrays, strict=True)):
        at = f"[{level}]"
        page_names = PageNames(names[1] + at, names[2] + at, f"paged_kv_last_page_len{at}")
        rows = read_rows(qo_indptr, names[0] + at)
        indptr, indices, last = pages
        parts.append(read_paged(rows, indptr, indices, last, page_size, page_names, is_bounded))
        if parts[-1].num_rows != parts[0].num_rows:
            raise ArgumentError(
                f"{names[0]}{at}: ends at row {parts[-1].num_rows} of q, and that of level 0 at "
                f"{parts[0].num_rows}; every level deals out all rows"
            )
    return tuple(parts)


def join_levels(parts: tuple[Batch, ...], causal: bool, is_relative: bool) -> Batch:
    """One batch of the requests of all levels that have rows and keys; page ids are the caller's.

    is_relative: more than causality depends on where among its keys a row is, and so every level
    has to be a refinement of the one before.
    """
    has_positions = causal or is_relative
    last = parts[-1]
    ids_before = np.cumsum([0, *(part.num_page_ids for part in parts)])
    if ids_before[-1] > MAX_LENGTH:
        raise UnsupportedError(
            f"paged_kv_indptr_arr: {ids_before[-1]} pages in all; at most {MAX_LENGTH} are "
            "supported"
        )
    offsets = None
    if has_positions:
        offsets = _key_offsets(parts) if is_relative else _offsets_behind(parts)
    fields: list[list[np.ndarray]] = [[], [], [], [], [], []]
    for level, (part, before) in enumerate(zip(parts, ids_before[:-1], strict=True)):
        own = part.requests
        keep = (own.qo_len > 0) & (own.kv_len > 0)
        values = [own.qo_len, own.kv_len, own.q_start, own.kv_start + before]
        values.append(np.full(keep.size, level))
        values.append(values[-1] if offsets is None else offsets[level])
        for field, value in zip(fields, values, strict=True):
            field.append(value[keep])
    qo_len, kv_len, q_start, kv_start, level_of, key_offset = map(np.concatenate, fields)
    requests = BatchRequests(qo_len, kv_len, q_start, kv_start)
    if offsets is not None:
        requests.key_offset, requests.is_shared = key_offset, level_of < len(parts) - 1
    positions = None if offsets is None else _positions(last, offsets[-1], causal)
    return Batch(
        requests,
        num_rows=last.num_rows,
        num_keys=0,
        qo_indptr=last.qo_indptr,
        kv_indptr=ids_before[[0, -1]].astype(np.int64),
        max_page=max(part.max_page for part in parts),
        levels=Levels(level_of, len(parts), last.num_rows, positions),
        parts=parts,
    )


def _key_offsets(parts: tuple[Batch, ...]) -> list[np.ndarray]:
    """For each level's requests, how many keys their rows have in the levels before."""
    keys = np.zeros(parts[0].num_rows, np.int64)
    offsets = []
    for level, part in enumerate(parts):
        own = part.requests
        has_rows = own.qo_len > 0
        offset = np.zeros(own.qo_len.size, np.int64)
        offset[has_rows] = keys[own.q_start[has_rows]]
        if (np.repeat(offset, own.qo_len) != keys).any():
            raise ArgumentError(
                f"qo_indptr_arr[{level}]: rows of one request have different numbers of keys in "
                "the levels before it, so the positions of its keys are not the same for all; "
                "make every level a refinement of the one before"
            )
        offsets.append(offset)
        keys += np.repeat(own.kv_len, own.qo_len)
    if keys.size and keys.max() > MAX_LENGTH:
        raise UnsupportedError(
            f"paged_kv_indptr_arr: a row has {keys.max()} keys; at most {MAX_LENGTH} are supported"
        )
    return offsets


def _offsets_behind(parts: tuple[Batch, ...]) -> list[np.ndarray]:
    """Offsets that put all rows behind the keys they share, whichever the levels are.

    Enough for causality alone: the keys of the last level begin at 0.
    """
    *shared, last = (part.requests.kv_len for part in parts)
    longest = last.max(initial=0) + max((x.max(initial=0) for x in shared), default=0)
    if longest > MAX_LENGTH:
        raise UnsupportedError(
            f"paged_kv_indptr_arr: requests of two levels have {longest} keys; a causal cascade "
            f"supports at most {MAX_LENGTH}"
        )
    return [*(-x for x in shared), np.zeros_like(last)]


def _positions(last: Batch, key_offset: np.ndarray, causal: bool) -> np.ndarray:
    """The place of every row among its keys: the rows of a request are the last of its keys.

    If causal, all rows stay behind the keys that they share, of which they see all.
    """
    own = last.requests
    token = np.arange(last.num_rows) - np.repeat(own.q_start, own.qo_len)
    first = np.repeat(key_offset + own.kv_len - own.qo_len, own.qo_len)
    positions = first + token
    if causal:
        positions = np.maximum(positions, np.repeat(key_offset, own.qo_len) - 1)
    return positions.astype(np.int32)


def join_ids_on_host(parts: tuple[Batch, ...]) -> np.ndarray:
    """The page ids of all levels, one level after another; those on a device are waited for."""
    ids = []
    for part in parts:
        own, on_device = part.page_ids, part.page_ids_device
        if own is None:
            assert on_device is not None
            own = array.to_host(on_device)
        ids.append(own[: part.num_page_ids])
    return np.concatenate(ids)


def join_ids_on_device(parts: tuple[Batch, ...], workspace: ArrayView, stream: int) -> ArrayView:
    """The same in new memory on the device, for levels whose ids are all there."""
    total = sum(part.num_page_ids for part in parts)
    joined = array.view(array.empty((max(1, total),), dtypes.int32, workspace), "page ids")
    address = joined.ptr
    for part in parts:
        ids = part.page_ids_device
        assert ids is not None
        held = int32_on_device(ids, "paged_kv_indices_arr")
        array.acquire(workspace, held)
        size = 4 * part.num_page_ids
        copy_on_device(address, held.ptr, size, held.device.index, stream)
        array.release(workspace, held)
        address += size
    return joined


def flatten(
    parts: tuple[Batch, ...], page_size: int, causal: bool
) -> tuple[BatchRequests, np.ndarray] | None:
    """The last level's requests over the pages of all levels, and where in the joined ids each of
    these pages is.

    None if that is another question: the levels do not nest, a shared part ends within a page,
    causality would reach into shared keys, or a row has more keys than a request may have.
    """
    last = parts[-1].requests
    has_rows = last.qo_len > 0
    if causal and (last.qo_len > last.kv_len).any():
        return None
    first_row = np.where(has_rows, last.q_start, 0)
    begins, counts, before = [], [], 0
    for part in parts:
        own = part.requests
        pages = np.diff(part.kv_indptr)
        if part is not parts[-1]:
            if (own.kv_len[own.qo_len > 0] % page_size).any():
                return None
            if not np.isin(part.qo_indptr, parts[-1].qo_indptr).all():
                return None
        request = np.searchsorted(part.qo_indptr, first_row, side="right") - 1
        if part is parts[-1]:
            request = np.arange(last.qo_len.size)
        elif pages.size == 0:
            return None
        begins.append(part.kv_indptr[request] + before)
        counts.append(np.where(has_rows, pages[request], 0))
        before += part.num_page_ids
    lengths = np.stack(counts, axis=1).reshape(-1)
    ends = np.cumsum(lengths)
    starts = np.stack(begins, axis=1).reshape(-1)
    within = np.arange(int(ends[-1]) if ends.size else 0) - np.repeat(ends - lengths, lengths)
    shared_pages = np.sum(counts[:-1], axis=0) if len(counts) > 1 else 0
    own_first = np.concatenate([[0], ends])[:: len(parts)][: last.qo_len.size]
    kv_len = np.where(has_rows, last.kv_len + shared_pages * page_size, 0)
    if kv_len.max(initial=0) > MAX_LENGTH:
        return None
    requests = BatchRequests(last.qo_len, kv_len, last.q_start, own_first)
    return requests, np.repeat(starts, lengths) + within
