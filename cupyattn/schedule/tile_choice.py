"""Which of several tiles serves prompts soonest, by the simulated end of their work lists."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from .batch import TileWork
from .makespan import Slots, best_split
from .tile_shape import TileShape

# Where the slots are busy for so many of its longest items, blocks of one item are never faster
# than the first shape unless they are for few keys, and others only if items have no more than a
# few key tiles.
_MANY_ITEMS, _FEW_TILES = 12, 4
# Another shape must end within this share of the time of the best: estimates are no closer.
_WORTHWHILE = 0.98


class TileChoice(NamedTuple):
    """One of several shapes, and when its launch would be done in microseconds."""

    chosen: int
    time: float


def choose_tiles(
    works: TileWork,
    num_kv_heads: int,
    shapes: Sequence[TileShape],
    may_split: bool = True,
) -> TileChoice:
    """The shape whose launch is done soonest; all have times.

    The first shape is the one that is fastest in long launches. Example: 128 tokens of 32 heads, 8
    key heads: 3 tiles of 192 rows are 24 blocks, 8 of 64 rows are 64 that each take half as long.
    """
    best, limit = TileChoice(0, 0.0), 0.0
    is_long = False
    for index, shape in enumerate(shapes):
        if shape.most_keys:
            if works.longest > shape.most_keys:
                continue
        elif index and is_long and not shape.is_persistent:
            continue
        assert shape.times is not None
        slots = Slots(shape.num_slots, shape.num_sms)
        if index and shape.times.least(*works.at_least(shape), num_kv_heads, slots) >= limit:
            continue
        work = works.of(shape)
        # Persistent blocks for few keys win by what they do ahead of their next item.
        is_ahead = shape.most_keys and shape.is_persistent
        if is_ahead and work.num_tiles * num_kv_heads <= shape.num_slots:
            continue
        least = shape.times.least(work.total, work.num_tiles, num_kv_heads, slots)
        if index and least >= limit:
            continue
        most = limit if index else math.inf
        time = best_split(work, num_kv_heads, slots, shape.times, may_split, most).time
        if index == 0 or time < limit:
            best, limit = TileChoice(index, time), _WORTHWHILE * time
        if index == 0:
            is_long = work.total * num_kv_heads > _MANY_ITEMS * work.longest * shape.num_slots
            if is_long and work.longest > _FEW_TILES:
                break
    return best
