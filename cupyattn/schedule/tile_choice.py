"""Which of several tiles serves prompts soonest, by the simulated end of their work lists."""

from __future__ import annotations

from collections.abc import Sequence

from .batch import BatchRequests, count_work, make_tiles
from .makespan import Slots, best_split
from .masking import Masking
from .tile_shape import TileShape

# Where the slots are busy for so many of its longest items, the first shape is the fastest.
_MANY_ITEMS = 12
# Another shape must gain this share: estimates are no closer.
_WORTHWHILE = 0.97


def choose_tiles(
    requests: BatchRequests,
    group_size: int,
    num_kv_heads: int,
    shapes: Sequence[TileShape],
    masking: Masking,
    may_split: bool,
) -> int:
    """The index of the shape whose launch is done soonest; all have times.

    The first shape is the one that is fastest in long launches. Example: 1,024 tokens, 32 heads, 8
    key heads: 22 tiles of 192 rows are 176 items on 132 SMs, 32 of 128 rows are shorter.
    """
    best, soonest = 0, 0.0
    for index, shape in enumerate(shapes):
        tiles = make_tiles(requests, group_size, shape, masking)
        work = count_work(requests, tiles, group_size, shape, masking)
        if index == 0 and work.total * num_kv_heads > _MANY_ITEMS * work.longest * shape.num_slots:
            break
        assert shape.times is not None
        slots = Slots(shape.num_slots, shape.num_sms)
        time = best_split(work, num_kv_heads, slots, shape.times, may_split).time
        if index == 0 or time < _WORTHWHILE * soonest:
            best, soonest = index, time
    return best
