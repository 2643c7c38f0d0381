"""Chunks of keys on a GPU: each chunk that a request's rows lie in becomes a request of its own.

A row sees keys of its own chunk alone. So the rows of a request that lie in one chunk are the last
rows of that chunk's keys, up to the end of the request: what causality and windows are aligned to.
"""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

from .. import array
from ..array import ArrayView
from .index_arrays import compute, progression, steps_of
from .rows import Batch

# Larger ones than any cache; positions must fit 32 bits.
_MAX_CHUNK = 2**28


def split_by_chunks(batch: Batch, vq: ArrayView, chunk: int, page_size: int | None = None) -> Batch:
    """The same rows as requests that see all their keys.

    vq: [b, s, h, d], or [rows, h, d] with offsets. With a table, offsets of keys are its entries.
    page_size: default that of pages [n, page_size, heads, dim].
    """
    names, chunk = batch.names, min(chunk, _MAX_CHUNK)
    kv_lens = array.view(
        batch.kv_offsets if batch.kv_lens is None else batch.kv_lens, names.kv_lens
    )
    if batch.kv_lens is None or batch.has_kv_steps:
        batch.has_kv_steps = False
        kv_lens = array.view(compute(steps_of, kv_lens), names.kv_lens)
    count, room = kv_lens.shape[0], 0
    if batch.table is not None:
        batch.table = _with_even_rows(batch.table)
        if page_size is None:
            page_size = array.view(batch.k, names.k).shape[1]
        room = batch.table.shape[-1] * page_size
        key_starts = progression(count, 0, batch.table.shape[-1], vq)
    elif batch.kv_offsets is None:
        key_starts = progression(count, 0, 0, vq)
    else:
        key_starts = batch.kv_offsets[:count]
    if batch.qo_offsets is None:
        rows = vq.shape[1]
        row_starts = progression(count, 0, rows, vq)
        row_counts = progression(count, rows, 0, vq)
    else:
        rows = batch.max_seqlen_q if batch.max_seqlen_q is not None else vq.shape[0]
        row_starts, row_counts = batch.qo_offsets[:count], batch.qo_lens
        if row_counts is None:
            offsets = array.view(batch.qo_offsets, names.qo_offsets)
            row_counts = compute(lambda x: x[1:] - x[:-1], offsets)
    page_size = page_size or 1
    most = -(-max(rows - 1, 0) // chunk) + 1

    split = functools.partial(_split, chunk, page_size, room)
    given = (
        (row_starts, names.qo_offsets),
        (row_counts, names.qo_lens),
        (key_starts, names.kv_offsets),
        (kv_lens, names.kv_lens),
        (
            progression(count, 0, 0, vq) if batch.kv_begin is None else batch.kv_begin,
            names.kv_begin,
        ),
        (progression(most, 0, 1, vq), "chunks"),
    )
    views = [array.view(x, name) for x, name in given]
    qo_lens, qo_offsets, new_lens, kv_offsets, kv_begin = compute(split, *views)
    return replace(
        batch,
        qo_lens=qo_lens,
        qo_offsets=qo_offsets,
        kv_lens=new_lens,
        kv_offsets=kv_offsets,
        kv_begin=None if batch.kv_begin is None and chunk % page_size == 0 else kv_begin,
        max_seqlen_q=min(rows, chunk),
        max_seqlen_k=chunk if batch.max_seqlen_k is None else min(batch.max_seqlen_k, chunk),
        sharers=most,
    )


def _with_even_rows(table: Any) -> Any:
    """A table [b, n] whose rows follow each other, or one [b, 2, n] of such, which lie apart."""
    if len(table.shape) == 2:
        return table.reshape(-1).reshape(table.shape)
    both = table.swapaxes(0, 1)
    return both.reshape(-1).reshape(both.shape).swapaxes(0, 1)


def _split(
    chunk: int,
    page_size: int,
    room: int,
    starts: Any,
    counts: Any,
    keys_from: Any,
    lengths: Any,
    pad: Any,
    index: Any,
) -> list[Any]:
    """The requests' arrays in the order of Batch: rows and where they begin, keys, pages, padding.

    room: keys that a row of the table holds; 0 without a table. index: numbers of the chunks that
    the rows of one request may lie in. All other arrays have a number for each request.
    """
    if room:
        lengths = lengths.clip(0, room)
    lengths = (lengths - pad).clip(0, None)  # chunks begin behind what is padded
    first = (lengths - counts)[:, None]
    begin = (first // chunk + index[None, :]) * chunk
    low = first + (begin - first).clip(0, None)  # the later of the two
    lengths = lengths[:, None]
    high = lengths - (lengths - begin - chunk).clip(0, None)  # the earlier
    key = begin.clip(0, None)
    # A chunk may begin within a page.
    page = (key + pad[:, None]) // page_size
    behind = pad[:, None] - page * page_size  # from the chunk's pages to its positions
    found = (
        (high - low).clip(0, None),
        starts[:, None] + low - first,
        (high + behind) * (high > key),
        keys_from[:, None] + page,
        key + behind,
    )
    return [x.reshape(-1) for x in found]
