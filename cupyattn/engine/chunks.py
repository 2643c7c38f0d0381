"""Chunks of keys on a GPU: each chunk that a request's rows lie in becomes a request of its own.

A row sees keys of its own chunk alone. So the rows of a request that lie in one chunk are the last
rows of that chunk's keys, up to the end of the request: what causality and windows are aligned to.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

from .. import array
from ..array import ArrayView
from .arrays import Arrays
from .index_arrays import compute, progression, steps_of
from .views import Names

# Larger ones than any cache; positions must fit 32 bits.
_MAX_CHUNK = 2**28


class Split(NamedTuple):
    """Requests that see all their keys.

    max_q_len  the most rows of one
    sharers    requests, one after another, that are one of the caller's
    """

    arrays: Arrays
    max_q_len: int
    sharers: int


def split_by_chunks(
    arrays: Arrays,
    names: Names,
    vq: ArrayView,
    chunk: int,
    max_q_len: int | None,
    *,
    page_size: int | None = None,
    has_kv_steps: bool = False,
) -> Split:
    """The same rows as requests that see all their keys.

    vq: [b, s, h, d], or [rows, h, d] with offsets. With a table, offsets of keys are its entries.
    page_size: default that of pages [n, page_size, heads, dim]. has_kv_steps: kv_lens are offsets.
    """
    chunk, kv_lens, table = min(chunk, _MAX_CHUNK), arrays.kv_lens, arrays.block_tables
    lens = array.view(arrays.kv_offsets if kv_lens is None else kv_lens, names.kv_lens)
    if kv_lens is None or has_kv_steps:
        lens = array.view(compute(steps_of, lens), names.kv_lens)
    count, room = lens.shape[0], 0
    if table is not None:
        table = _with_even_rows(table)
        if page_size is None:
            page_size = array.view(arrays.k, names.k).shape[1]
        room = table.shape[-1] * page_size
        key_starts = progression(count, 0, table.shape[-1], vq)
    elif arrays.kv_offsets is None:
        key_starts = progression(count, 0, 0, vq)
    else:
        key_starts = arrays.kv_offsets[:count]
    if arrays.qo_offsets is None:
        rows = vq.shape[1]
        row_starts = progression(count, 0, rows, vq)
        row_counts = progression(count, rows, 0, vq)
    else:
        rows = max_q_len if max_q_len is not None else vq.shape[0]
        row_starts, row_counts = arrays.qo_offsets[:count], arrays.qo_lens
        if row_counts is None:
            row_counts = compute(steps_of, array.view(arrays.qo_offsets, names.qo_offsets))
    page_size = page_size or 1
    num_chunks = -(-max(rows - 1, 0) // chunk) + 1
    begin = progression(count, 0, 0, vq) if arrays.kv_begin is None else arrays.kv_begin

    split = functools.partial(_split, chunk, page_size, room)
    named = (
        (row_starts, names.qo_offsets),
        (row_counts, names.qo_lens),
        (key_starts, names.kv_offsets),
        (lens, names.kv_lens),
        (begin, names.kv_begin),
        (progression(num_chunks, 0, 1, vq), "chunks"),
    )
    views = [x if isinstance(x, ArrayView) else array.view(x, name) for x, name in named]
    qo_lens, qo_offsets, kv_lens, kv_offsets, kv_begin = compute(split, *views)
    chunked = arrays._replace(
        block_tables=table,
        qo_lens=qo_lens,
        qo_offsets=qo_offsets,
        kv_lens=kv_lens,
        kv_offsets=kv_offsets,
        kv_begin=None if arrays.kv_begin is None and chunk % page_size == 0 else kv_begin,
    )
    return Split(chunked, min(rows, chunk), num_chunks)


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
    """The requests' arrays: rows and where they begin, keys, pages, padding.

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
    results = (
        (high - low).clip(0, None),
        starts[:, None] + low - first,
        (high + behind) * (high > key),
        keys_from[:, None] + page,
        key + behind,
    )
    return [x.reshape(-1) for x in results]
