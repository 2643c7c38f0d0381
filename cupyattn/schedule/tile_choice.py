"""Which of several tiles serves prompts soonest, by the simulated end of their work lists."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from .balance import Work
from .batch import BatchRequests, count_work, make_tiles
from .makespan import Slots, TileTimes, best_split
from .masking import Masking
from .tile_shape import TileShape

# Where the slots are busy for so many of its longest items, the first shape is the fastest.
_MANY_ITEMS = 12
# Another shape must end within this share of the time of the best: estimates are no closer.
_WORTHWHILE = 0.97


class TileChoice(NamedTuple):
    """One of several shapes, and when its launch would be done in microseconds."""

    chosen: int
    time: float


def choose_tiles(
    requests: BatchRequests,
    group_size: int,
    num_kv_heads: int,
    shapes: Sequence[TileShape],
    masking: Masking,
    may_split: bool,
    limit: float = math.inf,
) -> TileChoice:
    """The shape whose launch is done soonest; all have times. Those that cannot be done within the
    limit are not looked at; if none is, the time is infinite.

    The first shape is the one that is fastest in long launches. Example: 128 tokens of 32 heads, 8
    key heads: 3 tiles of 192 rows are 24 blocks, 8 of 64 rows are 64 that each take half as long.
    """
    best, num_keys = TileChoice(0, math.inf), 0
    if limit < math.inf and masking.window_left < 0 and not masking.has_mask:
        num_keys = int(np.add.reduce(requests.kv_len)) * num_kv_heads
    for index, shape in enumerate(shapes):
        assert shape.times is not None
        if num_keys and _least_time(num_keys, shape, shape.times) >= limit:
            continue
        tiles = make_tiles(requests, group_size, shape, masking)
        work = count_work(requests, tiles, group_size, shape, masking)
        slots = Slots(shape.num_slots, shape.num_sms)
        time = best_split(work, num_kv_heads, slots, shape.times, may_split).time
        if math.isinf(best.time) or time < _WORTHWHILE * best.time:
            best = TileChoice(index, time)
        if index == 0 and fills_many_waves(work, num_kv_heads, shape):
            break
    return best


def fills_many_waves(work: Work, num_kv_heads: int, shape: TileShape) -> bool:
    """Whether a launch is so long that the tiles that multiply fastest are the best."""
    return work.total * num_kv_heads > _MANY_ITEMS * work.longest * shape.num_slots


def _least_time(num_keys: int, shape: TileShape, times: TileTimes) -> float:
    """What a launch takes at least that visits so many keys once."""
    return times.launch + times.alone * times.key_tile * num_keys / (
        shape.tile_kv * shape.num_slots
    )
