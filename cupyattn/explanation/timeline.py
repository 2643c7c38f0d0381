"""When each block of a plan's launches would run, and on which SM."""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

# A launch from its begin to its first block, what a block takes besides its key tiles, and a launch
# that merges; in microseconds.
_LAUNCH, BLOCK, _MERGE = 3.0, 1.0, 2.5


class Rates(NamedTuple):
    """What a card does in a microsecond at most: bytes of its memory, and operations of the matrix
    units of one SM."""

    memory: float
    products: float


class LaunchBlocks(NamedTuple):
    """The blocks of a launch, in the order that they are dealt out.

    times        microseconds of each, by the card's rates
    per_sm       that run on an SM at a time
    max_blocks  persistent ones, which take what is dealt; 0: each block has one
    is_beside    it begins as soon as SMs are free; else when the launch before it is done
    has_merge    a launch behind it merges its partial results
    """

    name: str
    times: np.ndarray
    per_sm: int
    max_blocks: int = 0
    is_beside: bool = False
    has_merge: bool = False


class Bars(NamedTuple):
    """The blocks of a launch, dealt out: the SM, where on it (a share, from 0 on) and how much of
    it, the begin and the end of each."""

    name: str
    sm: np.ndarray
    at: np.ndarray
    share: float
    begin: np.ndarray
    end: np.ndarray


class Dealt(NamedTuple):
    """All launches, and when a merge that follows begins and all is done."""

    bars: list[Bars]
    merge: float | None
    end: float


def deal(launches: Sequence[LaunchBlocks], num_sms: int, time: float | None = None) -> Dealt:
    """Give each block in turn to the SM that is free first.

    time: what the whole is estimated to take; all times are in proportion to it. None: by rates.
    """
    lanes = math.lcm(*(launch.per_sm for launch in launches))
    free = np.zeros((num_sms, lanes))
    bars, end = [], _LAUNCH
    free[:] = _LAUNCH
    for launch in launches:
        if not launch.is_beside:
            np.maximum(free, end, out=free)
        bars.append(_deal(launch, free))
        end = max(end, float(free.max()))
    merge = end if any(launch.has_merge for launch in launches) else None
    if merge is not None:
        end += _MERGE
    if time is None:
        return Dealt(bars, merge, end)
    factor = time / end
    scaled = [x._replace(begin=factor * x.begin, end=factor * x.end) for x in bars]
    return Dealt(scaled, None if merge is None else factor * merge, time)


def _deal(launch: LaunchBlocks, free: np.ndarray) -> Bars:
    """Deal one launch; `free` says until when each lane of each SM is taken."""
    num_sms, lanes = free.shape
    width = lanes // launch.per_sm
    groups = free.reshape(num_sms, launch.per_sm, width).max(axis=2)
    # The first block of each SM comes before the second one of any.
    waiting = [(float(groups[g % num_sms, g // num_sms]), g) for g in range(groups.size)]
    heapq.heapify(waiting)
    if launch.max_blocks:
        waiting = heapq.nsmallest(launch.max_blocks, waiting)
    at = np.zeros(launch.times.size, np.int64)
    begin = np.zeros(launch.times.size)
    for index, time in enumerate(launch.times.tolist()):
        start, group = waiting[0]
        at[index], begin[index] = group, start
        heapq.heapreplace(waiting, (start + time, group))
    for until, group in waiting:
        sm, slot = group % num_sms, group // num_sms
        own = free[sm, slot * width : (slot + 1) * width]
        np.maximum(own, until, out=own)
    end = begin + launch.times
    share = width / lanes
    return Bars(launch.name, at % num_sms, at // num_sms * share, share, begin, end)
