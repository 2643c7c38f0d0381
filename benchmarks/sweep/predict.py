"""The time that the plan of a drawn case promises: its blocks dealt to the places of an H200.

A block costs a start and so much a tile of keys. Blocks of all KV heads take the places that are
free, in the order of the list. Memory and products bound what that says. The costs were fitted to
150 shapes on an H200, of which half are within 6 %; plans are made on the host.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from ..batch.case import BatchCase
from .plans import plan_of

_TILE = 64  # keys


@dataclass(frozen=True)
class Cost:
    """µs: a launch; a block; a tile of keys for its bytes, and for the products of 16 rows. The
    last two are of 64 keys of 16 bits and 256 columns of K and V."""

    launch: float
    block: float
    keys: float
    rows: float


class Work(NamedTuple):
    """A launch.

    keys     of each item's split, in the order that blocks begin; float64 [items]
    rows     of a tile
    heads    blocks, or clusters of them, of an item
    slots    that run at a time
    """

    kernel: str
    keys: np.ndarray
    rows: int
    heads: int
    slots: int
    is_merged: bool


COSTS = {
    "decode_sm80": Cost(3.6, 1.6, 1.06, 0.38),
    "clusters": Cost(6.3, 4.4, 0.46, 0.18),
    "prefill_sm80": Cost(4.1, 2.6, 2.4, 0.024),
    "prefill_sm90": Cost(6.8, 6.3, 0.157, 0.0815),
}
_MERGE_US = 6.9
_BYTES_PER_US, _FLOPS_PER_US = 3.83e6, 0.75e9
_MOST_LATENCY_US = 12.4  # of a case that memory or products bound, before and after it


def predict(case: BatchCase) -> float | None:
    """µs of a case on an H200; None where nothing is known of its kernels."""
    works = works_of(case)
    if not works or not {work.kernel for work in works} <= COSTS.keys():
        return None
    columns = case.head_dim_qk + case.head_dim_vo
    us = COSTS[works[0].kernel].launch
    for work in works:
        us += time_of(work, columns, case.groups[0].kv_itemsize)
    floor = max(case.bytes / _BYTES_PER_US, case.flops / _FLOPS_PER_US)
    return max(us, floor + min(floor, _MOST_LATENCY_US))


def time_of(work: Work, columns: int, itemsize: int) -> float:
    """When the last block is done, and merged, if each takes the first free place."""
    cost = COSTS[work.kernel]
    tile = cost.keys * columns * itemsize / 512 + cost.rows * work.rows / 16 * columns / 256
    durations = cost.block + -(-work.keys // _TILE) * tile
    done = makespan(np.repeat(durations, work.heads).tolist(), work.slots)
    return done + (_MERGE_US if work.is_merged else 0.0)


def makespan(durations: Sequence[float], places: int) -> float:
    """When all are done that take the first free of so many places, in this order."""
    free = list(durations[:places])
    heapq.heapify(free)
    for duration in durations[places:]:
        heapq.heapreplace(free, free[0] + duration)
    return max(free, default=0.0)


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
                    "clusters" if launch.cluster > 1 else kind.name,
                    _keys(chosen, kind.tile_q, launcher) / launch.cluster,
                    kind.tile_q,
                    launcher.num_kv_heads,
                    max(1, kernel.loaded.num_slots // launch.cluster),
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
    begin, end = np.zeros_like(kv_len), kv_len
    if masking.window_right >= 0:
        end = np.clip(kv_len - qo_len + last + 1 + masking.window_right, 0, kv_len)
    if masking.window_left >= 0:
        begin = np.clip(kv_len - qo_len + first - masking.window_left, 0, None)
    return np.maximum(end - begin, 0) / splits
