"""The time that the plan of a drawn case promises: its blocks dealt to the places of an H200.

A block costs a start and so much a tile of keys; blocks of all KV heads take the places that are
free, in the order of the list. What that says of memory and products is bounded by their rates.
The costs were fitted to one sweep (docs/ladder.md); plans are made on the host, for any machine.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from ..batch.case import BatchCase
from .plans import plan_of


@dataclass(frozen=True)
class Cost:
    """µs of a kernel's blocks.

    launch  before the first block, and after the last
    block   what a block takes besides its tiles
    row     of a tile of 64 keys for each 16 rows, by products
    key     of a tile of 64 keys, whatever the rows
    """

    launch: float
    block: float
    row: float
    key: float


class Work(NamedTuple):
    """A launch: what its blocks see of the keys, in the order that they begin."""

    kernel: str
    keys: np.ndarray
    rows: int
    heads: int
    slots: int
    cluster: int
    is_merged: bool


# Fitted to the sweep of seed 2511 on an H200.
COSTS = {
    "decode_sm80": Cost(3.6, 4.6, 0.1, 0.45),
    "prefill_sm80": Cost(3.6, 4.0, 0.1, 0.5),
    "prefill_sm90": Cost(4.0, 3.0, 0.05, 0.1),
}
_MERGE_US = 2.6
_BYTES_PER_US, _FLOPS_PER_US = 4.1e6, 0.70e9


def predict(case: BatchCase) -> float:
    """µs of a case on an H200."""
    works = works_of(case)
    us = 0.0
    for at, work in enumerate(works):
        us += _time(work, COSTS[work.kernel]) + (_MERGE_US if work.is_merged else 0.0)
        if at:  # launches begin beside those before them
            us -= COSTS[work.kernel].launch
    floor = max(case.bytes / _BYTES_PER_US, case.flops / _FLOPS_PER_US)
    return max(us, floor + COSTS[works[0].kernel].launch + 2.0)


def _time(work: Work, cost: Cost) -> float:
    """When the last block is done, if each takes the first free place."""
    tiles = -(-work.keys // 64)
    durations = cost.block + tiles * (cost.key + cost.row * work.rows / 16)
    return cost.launch + makespan(np.repeat(durations, work.heads).tolist(), work.slots)


def makespan(durations: list[float], places: int) -> float:
    """When all are done that take the first free of so many places, in this order."""
    if len(durations) <= places:
        return max(durations, default=0.0)
    free = durations[:places]
    heapq.heapify(free)
    for duration in durations[places:]:
        heapq.heapreplace(free, free[0] + duration)
    return max(free)


def works_of(case: BatchCase) -> list[Work]:
    """The launches of a case's plan, merges aside."""
    planned = plan_of(case)
    if planned is None:
        return []
    launcher, schedule = planned
    kernels = {(k.loaded.tiles.threads, k.loaded.tiles.shared_bytes): k for k in launcher.kernels()}
    works = []
    for part in schedule.parts:
        launch = part.launches[0][0]
        kernel = kernels[launch.threads, launch.shared_bytes]
        items = schedule.words[part.items // 4 : part.merges // 4].reshape(-1, 12)
        for kind in kernel.kinds:
            chosen = items
            if len(kernel.kinds) > 1:
                is_small = items[:, 1] * launcher.group_size <= kernel.kinds[1].tile_q
                chosen = items[is_small == (kind is kernel.kinds[1])]
            works.append(
                Work(
                    kind.name,
                    _keys(chosen, kind.tile_q, launcher) / launch.cluster,
                    kind.tile_q,
                    launcher.num_kv_heads,
                    kernel.loaded.num_slots // launch.cluster,
                    launch.cluster,
                    part.merge is not None,
                )
            )
    return works


def _keys(items: np.ndarray, tile_q: int, launcher: Any) -> np.ndarray:
    """The keys of each item's split."""
    qo_len, kv_len, first_row, splits = (items[:, i] for i in (1, 3, 4, 6))
    first = first_row // launcher.group_size
    last = np.minimum((first_row + tile_q - 1) // launcher.group_size, qo_len - 1)
    masking = launcher.masking
    end = kv_len
    if masking.window_right >= 0:
        end = np.clip(kv_len - qo_len + last + 1 + masking.window_right, 0, kv_len)
    begin = 0
    if masking.window_left >= 0:
        begin = np.clip(kv_len - qo_len + first - masking.window_left, 0, None)
    return np.maximum(end - begin, 0) / splits
