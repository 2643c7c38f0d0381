"""What the copy engine, or warps that gather rows, take for pages where keys are of unions."""

from __future__ import annotations

from typing import NamedTuple

from ..driver import params
from .key_list_arrays import Lists

UNIT = 4
"""Keys of the least chunk."""

# Keys of half a tile: those of a chunk where chunks begin at any row.
_HALF = 64
# Places of strides of a row and a page of k, and of v, among params.STRIDES.
_ROWS_AND_PAGES = (2, 10), (4, 11)


class Chunks(NamedTuple):
    """Keys that the copy engine takes for pages.

    size      keys of a chunk
    strides   params.STRIDES of such pages
    step      chunks, or rows, from a page to the next one
    num_chunks  how many there are
    num_rows  of keys, where a chunk may begin at any; else 0
    """

    size: int
    strides: bytes
    step: int
    num_chunks: int
    num_rows: int = 0


def chunks_of(page_size: int, lists: Lists, strides: bytes) -> Chunks | None:
    """What the copy engine takes for pages: blocks, or their parts in pages, or rows from any on;
    None where it takes nothing."""
    if page_size:
        chunks = chunks_of_pages(page_size, lists, strides)
        if chunks is not None or page_size < lists.max_kv_len:
            return chunks
    return _chunks_of_rows(page_size, lists.num_pages, strides)


def chunks_of_pages(page_size: int, lists: Lists, strides: bytes) -> Chunks | None:
    """Chunks where pages begin whole chunks apart."""
    granularity, num_pages = lists.granularity, lists.num_pages
    if page_size % granularity == 0:
        chunk = granularity
    elif granularity % page_size == 0 and page_size % UNIT == 0:
        chunk = page_size
    else:
        return None
    if chunk == page_size:
        return Chunks(chunk, strides, 1, num_pages)
    unpacked = [*params.STRIDES.unpack(strides)]
    steps = []
    for row, page in _ROWS_AND_PAGES:
        of_chunk = chunk * unpacked[row]
        of_page = unpacked[page] if num_pages > 1 else page_size * unpacked[row]
        if of_chunk <= 0 or of_page % of_chunk or of_page <= 0:
            return None
        steps.append(of_page // of_chunk)
        unpacked[page] = of_chunk
    if steps[0] != steps[1]:
        return None
    count = (num_pages - 1) * steps[0] + page_size // chunk
    return Chunks(chunk, params.STRIDES.pack(*unpacked), steps[0], count)


def _chunks_of_rows(page_size: int, num_pages: int, strides: bytes) -> Chunks | None:
    """Chunks that begin at any row: of keys in no pages (page_size 0), whose rows num_pages
    counts, or of requests that have a page each, whole rows apart."""
    unpacked = [*params.STRIDES.unpack(strides)]
    steps = []
    for row, page in _ROWS_AND_PAGES:
        of_row, of_page = unpacked[row], unpacked[page] if num_pages > 1 else 0
        if of_row <= 0 or (page_size and of_page % of_row):
            return None
        steps.append(of_page // of_row)
        unpacked[page] = of_row
    num_rows = num_pages
    if page_size:
        if steps[0] != steps[1]:
            return None
        num_rows = (num_pages - 1) * steps[0] + page_size
    if num_rows < _HALF:
        return None
    count = num_rows - _HALF + 1
    return Chunks(_HALF, params.STRIDES.pack(*unpacked), steps[0], count, num_rows)
