"""The plan of a batch whose requests are of two kinds, many query rows and few, for one launch.

Blocks of prefill are bound by the matrix units and those of decode by memory, and a key tile of
either takes about as long: 2 us of a slot on an H200. Those of prefill are the longer ones and come
first; those of decode fill what they leave. (Dealing both out evenly was slower: what runs beside
decode loses its keys from L2.)
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from .balance import BLOCK_OVERHEAD, MAX_WAVES, MERGE_OVERHEAD, Work
from .batch import (
    WORK_FIELDS,
    BatchPlan,
    BatchRequests,
    Splitting,
    Tiles,
    build,
    build_states,
    count_work,
    make_tiles,
    short_last,
    split_after,
)
from .makespan import chunk_of_parts, makespan
from .masking import Masking
from .tile_shape import TileShape

_FIRST_STATE = WORK_FIELDS.index("first_state")
# Parts of keys that are tried: as many as fill so many waves of blocks.
_WAVES = (1.0, 1.4, 2.0, 3.0, MAX_WAVES)
# Ways to split keys, each of which leaves fewer states than the one before. Those of a cascade end
# with none, which leaves a state of every tile all the same.
SPLITTINGS = tuple(Splitting(waves=n) for n in (MAX_WAVES, 3.0, 2.0, 1.0))
CASCADE_SPLITTINGS = (*SPLITTINGS, Splitting(False))
# Waves after which a launch is as long as all slots are busy.
_MANY_WAVES = 16

Kinds = Sequence[tuple[BatchRequests, TileShape]]


class MixedPlan(NamedTuple):
    """A plan of each kind, in the order that their items are dealt, and when all are done in the
    time of a key tile, merges included."""

    parts: tuple[BatchPlan, ...]
    time: float


class Device(NamedTuple):
    """slots: blocks that run at a time. items: how many items these are, a block a KV head."""

    slots: int
    num_kv_heads: int

    @property
    def items(self) -> int:
        return max(1, self.slots // self.num_kv_heads)


def plan_mixed(
    kinds: Kinds,
    group_size: int,
    device: Device,
    masking: Masking,
    splitting: Splitting,
    leaves_states: bool = False,
) -> MixedPlan:
    """Plan requests of several kinds together. `leaves_states`: tiles leave all results as states
    to be merged."""
    tiles, works = _count(kinds, group_size, masking)
    time, splits = _choose(kinds, works, group_size, device, splitting, leaves_states)
    make = build_states if leaves_states else build
    parts = []
    for (requests, _), of, work, split in zip(kinds, tiles, works, splits, strict=True):
        ordered, of_tiles = short_last(of, work, split, device.items)
        parts.append(make(requests, ordered, of_tiles))
    return MixedPlan(tuple(parts), time)


def estimate(
    kinds: Kinds, group_size: int, device: Device, masking: Masking, leaves_states: bool
) -> float:
    """`time` of such a plan."""
    _, works = _count(kinds, group_size, masking)
    return _choose(kinds, works, group_size, device, Splitting(), leaves_states)[0]


def _count(kinds: Kinds, group_size: int, masking: Masking) -> tuple[list[Tiles], list[Work]]:
    tiles = [make_tiles(x, group_size, shape, masking) for x, shape in kinds]
    works = [
        count_work(x, t, group_size, shape, masking)
        for (x, shape), t in zip(kinds, tiles, strict=True)
    ]
    return tiles, works


def _choose(
    kinds: Kinds,
    works: list[Work],
    group_size: int,
    device: Device,
    splitting: Splitting,
    leaves_states: bool,
) -> tuple[float, list[np.ndarray | None]]:
    """The soonest end, and in how many parts the keys of each kind's tiles are split for it."""
    shapes = [shape for _, shape in kinds]
    min_parts = [
        shape.min_part(work.longest, requests.qo_range()[1] * group_size)
        for (requests, shape), work in zip(kinds, works, strict=True)
    ]
    best: tuple[float, list[np.ndarray | None]] = (np.inf, [None] * len(works))
    for chunks in _chunks_to_try(shapes, works, device, splitting):
        if not splitting.tokens:
            chunks = [max(both) for both in zip(chunks, min_parts, strict=True)]
        splits = [split_after(work, chunk) for work, chunk in zip(works, chunks, strict=True)]
        time = _time(works, shapes, device, splits, leaves_states)
        if time < best[0]:
            best = time, splits
    return best


def _chunks_to_try(
    shapes: list[TileShape], works: list[Work], device: Device, splitting: Splitting
) -> list[list[int]]:
    """Key tiles of a part, for each kind of tiles."""
    if splitting.may_split and splitting.tokens:
        return [[max(1, splitting.tokens // shape.tile_kv) for shape in shapes]]
    longest = max((work.longest for work in works), default=0)
    result = [[longest] * len(works)]
    if not splitting.may_split:
        return result
    total = sum(work.total for work in works)
    minimum = -(-total // (device.items * MAX_WAVES))
    tried = [waves for waves in _WAVES if waves <= splitting.waves]
    sizes = {-(-total // int(device.items * waves)) for waves in tried}
    tiles = np.concatenate([work.array() for work in works])
    if tiles.size < device.items and total:
        # The last part of a tile is not full: so many parts that all run at a time.
        sizes.add(chunk_of_parts(tiles, device.items))
    for size in sorted(sizes, reverse=True):
        if max(1, minimum) <= size < longest:
            # Decode with what is best for prefill, or as it is.
            result += [[size] * len(works), [size, *(longest for _ in works[1:])]]
    return result


def _time(
    works: list[Work],
    shapes: list[TileShape],
    device: Device,
    splits: list[np.ndarray | None],
    leaves_states: bool,
) -> float:
    sizes, num_states, state_cost = [], 0, 0.0
    for work, shape, parts in zip(works, shapes, splits, strict=True):
        tiles = work.array()
        if parts is None:
            sizes.append(tiles + BLOCK_OVERHEAD)
            states = work.num_tiles if leaves_states else 0
        else:
            sizes.append(np.repeat(tiles / parts + BLOCK_OVERHEAD, parts))
            states = int(np.add.reduce(parts if leaves_states else parts * (parts > 1)))
        num_states += states
        state_cost += states * shape.state_cost
    longest_first = np.sort(np.concatenate(sizes))[::-1]
    if not longest_first.size:
        return 0.0
    done = makespan(longest_first, device.items, many_waves=_MANY_WAVES) + state_cost / device.items
    return done + (MERGE_OVERHEAD if leaves_states or num_states else 0.0)


def state_offsets(parts: Sequence[BatchPlan], tile_rows: Sequence[int]) -> tuple[list[int], int]:
    """Where the states of each kind begin, in its own, and the rows of all of one KV head."""
    offsets, num_rows = [], 0
    for part, rows in zip(parts, tile_rows, strict=True):
        offsets.append(-(-num_rows // rows))
        num_rows = (offsets[-1] + part.num_states) * rows
    return offsets, num_rows


def combine(
    parts: Sequence[BatchPlan], offsets: Sequence[int]
) -> tuple[np.ndarray, list[np.ndarray]]:
    """The items of all kinds, one after another, and the merges of each among them.

    offsets: where the states of each begin (state_offsets).
    """
    counts = [len(part.items) for part in parts]
    items = np.concatenate([part.items for part in parts])
    items[:, _FIRST_STATE] += np.repeat(offsets, counts)
    begins = np.cumsum([0, *counts])
    return items, [part.merges + begin for part, begin in zip(parts, begins[:-1], strict=True)]
