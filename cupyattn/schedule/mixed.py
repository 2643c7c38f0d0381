"""The plan of a batch whose requests are of two kinds, few query rows and many, for one launch.

Blocks of prefill are bound by the matrix units and those of decode by memory, and a key tile of
either takes about as long: 2 us of a slot on an H200. So both are cut alike, and the list deals
them out in proportion: whatever runs at a time is of both kinds, until the end of both.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from .balance import BLOCK_OVERHEAD, MERGE_OVERHEAD, Work, best_chunk
from .batch import (
    WORK_FIELDS,
    BatchPlan,
    BatchRequests,
    Masking,
    Splitting,
    TileShape,
    build,
    build_states,
    count_work,
    make_tiles,
    split_after,
)

_NUM_SPLITS, _FIRST_STATE = WORK_FIELDS.index("num_splits"), WORK_FIELDS.index("first_state")


class MixedPlan(NamedTuple):
    """parts: a plan of each kind. order: their items, one plan after another, as they are dealt."""

    parts: tuple[BatchPlan, ...]
    order: np.ndarray


def plan_mixed(
    kinds: Sequence[tuple[BatchRequests, TileShape]],
    group_size: int,
    num_kv_heads: int,
    num_slots: int,
    masking: Masking,
    splitting: Splitting,
    leaves_states: bool = False,
) -> MixedPlan:
    """Plan requests of several kinds together. `leaves_states`: tiles leave all results as states
    to be merged."""
    tiles = [make_tiles(x, group_size, shape, masking) for x, shape in kinds]
    works = [
        count_work(x, t, group_size, shape, masking)
        for (x, shape), t in zip(kinds, tiles, strict=True)
    ]
    chunks = _chunks(works, [shape for _, shape in kinds], num_kv_heads, num_slots, splitting)
    make = build_states if leaves_states else build
    parts = tuple(
        make(x, t, None if chunk == 0 else split_after(work, chunk))
        for (x, _), t, work, chunk in zip(kinds, tiles, works, chunks, strict=True)
    )
    return MixedPlan(parts, _deal(parts, works))


def _chunks(
    works: list[Work],
    shapes: list[TileShape],
    num_kv_heads: int,
    num_slots: int,
    splitting: Splitting,
) -> list[int]:
    """Key tiles of a split of each kind, 0 for no splits."""
    if not splitting.may_split:
        return [0] * len(works)
    if splitting.tokens:
        return [max(1, splitting.tokens // shape.tile_kv) for shape in shapes]
    longest = max((work.longest for work in works), default=0)
    total = sum(work.total for work in works)
    if longest <= 1:
        return [0] * len(works)
    union = Work(
        np.concatenate([work.array() for work in works]),
        longest,
        total,
        sum(work.num_tiles for work in works),
    )
    costs = [shape.state_cost * work.total for shape, work in zip(shapes, works, strict=True)]
    chunk = best_chunk(union, max(1, num_slots // num_kv_heads), sum(costs) / total)
    return [chunk] * len(works)


def _deal(parts: Sequence[BatchPlan], works: Sequence[Work]) -> np.ndarray:
    """The order that spreads every kind evenly over the launch, each in its own order."""
    places = []
    for part, work in zip(parts, works, strict=True):
        splits = part.items[:, _NUM_SPLITS]
        is_first = part.items[:, WORK_FIELDS.index("split")] == 0
        size = np.repeat(work.array(), splits[is_first]) / splits if len(splits) else splits
        ends = np.cumsum(np.maximum(size, 1e-3))
        places.append((ends - 0.5 * size) / ends[-1] if len(ends) else ends)
    return np.argsort(np.concatenate(places), kind="stable")


def estimate(
    kinds: Sequence[tuple[BatchRequests, TileShape]],
    group_size: int,
    num_kv_heads: int,
    num_slots: int,
    masking: Masking,
    leaves_states: bool,
) -> float:
    """When such a plan's launches are done, in the time of a key tile."""
    tiles = [make_tiles(x, group_size, shape, masking) for x, shape in kinds]
    works = [
        count_work(x, t, group_size, shape, masking)
        for (x, shape), t in zip(kinds, tiles, strict=True)
    ]
    shapes = [shape for _, shape in kinds]
    chunks = _chunks(works, shapes, num_kv_heads, num_slots, Splitting())
    per_wave = max(1, num_slots // num_kv_heads)
    sizes, merged = [], 0.0
    for work, chunk, shape in zip(works, chunks, shapes, strict=True):
        parts = None if chunk == 0 else split_after(work, chunk)
        if parts is None:
            parts = np.ones(work.num_tiles, np.int64)
        sizes.append(np.repeat(work.array() / parts, parts) + BLOCK_OVERHEAD)
        is_merged = parts > (0 if leaves_states else 1)
        merged += shape.state_cost * int((parts * is_merged).sum())
    longest_first = np.sort(np.concatenate(sizes))[::-1]
    # Waves of blocks that are as long as their longest, or all slots busy to the end.
    waves = float(longest_first[::per_wave].sum())
    busy = float(longest_first.sum()) / per_wave
    launch = MERGE_OVERHEAD if leaves_states or merged else 0.0
    return max(busy, min(waves, busy + float(longest_first[0]))) + launch + merged / per_wave


def state_offsets(parts: Sequence[BatchPlan], tile_rows: Sequence[int]) -> tuple[list[int], int]:
    """Where the states of each kind begin, in its own, and the rows of all of one KV head."""
    offsets, num_rows = [], 0
    for part, rows in zip(parts, tile_rows, strict=True):
        offsets.append(-(-num_rows // rows))
        num_rows = (offsets[-1] + part.num_states) * rows
    return offsets, num_rows


def combine(plan: MixedPlan, tile_rows: Sequence[int]) -> tuple[np.ndarray, list[np.ndarray]]:
    """The items in the order they are dealt, and the merges of each kind among them."""
    offsets, _ = state_offsets(plan.parts, tile_rows)
    items = np.concatenate([part.items for part in plan.parts])
    items[:, _FIRST_STATE] += np.repeat(offsets, [len(part.items) for part in plan.parts])
    place = np.empty(len(plan.order), np.int32)
    place[plan.order] = np.arange(len(plan.order), dtype=np.int32)
    merges, begin = [], 0
    for part in plan.parts:
        merges.append(place[begin + part.merges])
        begin += len(part.items)
    return items[plan.order], merges
