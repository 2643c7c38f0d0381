"""How much room the work list of a planner on the GPU has."""

from __future__ import annotations

from dataclasses import replace

import pytest

from cupyattn.launch.attention.plan_batch import _room
from cupyattn.schedule.capacity import PlanCapacity
from cupyattn.schedule.tile_shape import TileShape

SHAPE = TileShape(64, 64, 132, state_cost=4.0, num_sms=132, takes_cuts=True)


@pytest.mark.parametrize(("num_tiles", "num_items"), [(1, 132), (16, 132), (131, 132), (132, 660)])
def test_parts_of_few_tiles_fill_one_wave(num_tiles: int, num_items: int) -> None:
    """A block that finds nothing to do has an SM for itself, too."""
    capacity = PlanCapacity(num_tiles, 4 * 132, 132)
    room, limits, num_blocks = _room(capacity, None, SHAPE)
    assert (limits.num_items, num_blocks) == (num_items, 0)
    assert room.num_more == num_items - num_tiles


def test_parts_of_other_kernels_may_come_in_waves() -> None:
    capacity = PlanCapacity(16, 4 * 132, 132)
    assert _room(capacity, None, replace(SHAPE, takes_cuts=False))[0] == capacity
