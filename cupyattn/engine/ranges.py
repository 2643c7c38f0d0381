"""Masks of ranges: each row sees what causality and a window let it, and a range of keys besides.

Most rows are in their own range, so what they see is one interval of keys, and takes no bits: keys
from its end on are hidden, and a window hides those before it. Other rows take a packed mask.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from .mask import Mask, of_bits
from .requests import Batch

_ALL = np.iinfo(np.int32).max


class RangeMask(NamedTuple):
    """mask, the left window that holds besides it (-1: none), and how far ahead of itself a row
    sees at most, rounded up."""

    mask: Mask
    window_left: int
    reach: int


def read_ranges(
    batch: Batch, ranges: np.ndarray, causal_window: int, range_window: int
) -> RangeMask:
    """The mask of rows whose ranges are [rows of q, 2], first and last key, (-1, -1) for none.

    A row at `position` sees keys up to it, from position - causal_window on (-1: from 0 on), and
    those of its range less than range_window before it (0: all).
    """
    lengths = batch.requests
    request = np.repeat(np.arange(batch.num_requests), lengths.qo_len)
    keys = lengths.kv_len[request]
    token = np.arange(batch.num_rows) - lengths.q_start[request]
    position = token + keys - lengths.qo_len[request]
    # Keys [begin, end) that causality lets a row see, and [first, stop) of its range.
    begin = (
        np.zeros_like(position) if causal_window < 0 else np.maximum(position - causal_window, 0)
    )
    end = np.maximum(position + 1, 0)
    first, stop = np.maximum(ranges[:, 0], 0), np.minimum(ranges[:, 1] + 1, keys)
    if range_window > 0:
        first = np.maximum(first, position - range_window + 1)
    # A row without a range has the one that it sees anyway.
    is_empty = first >= stop
    first, stop = np.where(is_empty, begin, first), np.where(is_empty, end, stop)
    reach = int(np.where(is_empty, 0, stop - position - 1).max(initial=0))
    # Plans and launchers are kept by their windows, so these are few.
    reach = (1 << (reach - 1).bit_length()) if reach > 0 else 0
    # What lies between causality's keys and a range is hidden too, if nothing is behind the range.
    is_apart = first > end
    if ((first >= begin) & (~is_apart | (stop == keys))).all():
        hidden = np.stack([np.maximum(end, stop), np.full_like(end, _ALL)], axis=1)
        hidden[is_apart] = np.stack([end, first], axis=1)[is_apart]
        intervals = np.ascontiguousarray(hidden, np.int32)
        mask = Mask(intervals=intervals, is_causal=False)
        return RangeMask(mask, causal_window, reach)
    bits = [np.zeros(0, np.uint8)]
    bounds = np.stack([begin, end, first, stop])[..., None]
    for index in range(batch.num_requests):
        rows = slice(int(batch.qo_indptr[index]), int(batch.qo_indptr[index + 1]))
        begin, end, first, stop = bounds[:, rows]
        own = np.arange(int(lengths.kv_len[index]))
        seen = ((own >= begin) & (own < end)) | ((own >= first) & (own < stop))
        bits.append(np.packbits(seen, bitorder="little"))
    return RangeMask(of_bits(np.concatenate(bits)), -1, reach)
