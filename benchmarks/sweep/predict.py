"""The time that the plan of a drawn case promises: its blocks dealt to the places of an H200.

Tiles of prefill_sm90 have times by which plans choose (schedule/makespan.py); of other kernels a
block costs a start and so much a tile of keys. Blocks of all KV heads take the places that are
free, in the order of the list. Memory and products bound what that says. Plans are made on the
host. The costs were fitted to the 110 shapes of seed 99173: benchmarks/results has their times.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from cupyattn.choose.card import shipped
from cupyattn.schedule.makespan import TileTimes
from cupyattn.schedule.makespan import makespan as prompt_makespan
from cupyattn.schedule.sm_partition import Streams, time_beside

from ..batch.case import BatchCase
from .plans import plan_of

_TILE = 64  # keys
_NUM_SMS = 132
_CARD = next(card for card in shipped() if card.name == "H200")
_MOST_FEW_ROWS = 32  # of a request that a kernel of decode serves
_FEW_KEYS = 8  # of a page whose keys are found one by one


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

    keys      of each item's split, in the order that blocks begin; float64 [items]
    splits    of each item's tile
    rows      of a tile; used_rows: those that have work
    heads     blocks, or clusters of them, of an item
    slots     that run at a time
    times     of a tile of prefill_sm90, where plans know them, and tile_kv its keys
    blocks    of the launch, as many as run at a time where they are persistent
    """

    kernel: str
    keys: np.ndarray
    splits: np.ndarray
    rows: int
    used_rows: int
    heads: int
    slots: int
    is_merged: bool
    tile_kv: int = _TILE
    times: TileTimes | None = None
    blocks: int = 0

    @property
    def num_states(self) -> int:
        """How many parts all heads have of tiles whose keys are split."""
        return int(np.count_nonzero(self.splits > 1)) * self.heads


class Parts(NamedTuple):
    """µs of a launch before its blocks, of the blocks, and of what merges their states."""

    launch: float
    blocks: float
    merge: float


COSTS = {
    "decode_sm80": Cost(4.5, 4.3, 0.78, 0.37),
    "clusters": Cost(3.9, 6.0, 0.5, 0.1),
    "alone": Cost(3.05, 4.8, 0.52, 0.1),
    "prefill_sm80": Cost(4.1, 2.6, 2.4, 0.024),
    "prefill_sm90": Cost(6.8, 6.3, 0.157, 0.0815),
}
# A launch that merges, the last block of a tile that does, and that for each of its splits.
_MERGE_US, _FUSED_US, _FUSED_SPLIT_US = 5.0, 2.2, 0.05
_FUSED_FEW_US = 3.7  # where blocks have an SM each
_BYTES_PER_US, _FLOPS_PER_US = 4.3e6, 0.75e9
_MOST_LATENCY_US = 21.0  # of a case that memory or products bound, before and after it
# Items of prompts take so much longer in a sweep, and nearly all of it where they have an SM alone;
# their merges, and their keys from memory, with the latency before the first.
_PROMPT, _LEAST_ALONE, _PROMPT_MERGE = 1.05, 0.8, 1.56
_PROMPT_BYTES_PER_US, _PROMPT_LATENCY_US = 2.94e6, 10.0


def predict(case: BatchCase, works: Sequence[Work] | None = None) -> float | None:
    """µs of a case on an H200, by its launches; None where nothing is known of its kernels."""
    works = works_of(case) if works is None else works
    if not works or not {work.kernel for work in works} <= COSTS.keys():
        return None
    us = _time_of_all(works, case)
    if len(works) == 1 and works[0].kernel == "prefill_sm90":
        us = max(us, _PROMPT_LATENCY_US + case.bytes / _PROMPT_BYTES_PER_US)
    floor = max(case.bytes / _BYTES_PER_US, case.flops / _FLOPS_PER_US)
    return max(us, floor + min(floor, _MOST_LATENCY_US))


def _time_of_all(works: Sequence[Work], case: BatchCase) -> float:
    """Launches one after another, but those behind prefill_sm90 stream keys beside its blocks."""
    first, *others = works
    parts = [parts_of(work, case) for work in works]
    if first.kernel == "prefill_sm90" and {work.kernel for work in others} == {"decode_sm80"}:
        end = parts[0].launch + parts[0].blocks
        used = min(_NUM_SMS, first.blocks)
        return time_beside(end, end, _NUM_SMS, used, _streams(case, len(others))) + parts[0].merge
    return parts[0].launch + sum(part.blocks + part.merge for part in parts)


def parts_of(work: Work, case: BatchCase) -> Parts:
    """When the last block is done if each takes the first free place, and what comes after it."""
    columns = case.head_dim_qk + case.head_dim_vo
    of_state = 2 * 4 * work.used_rows * case.head_dim_vo / _CARD.state_rate
    if work.times is not None:
        times = work.times
        sizes = np.repeat(np.sort(-(-work.keys // work.tile_kv))[::-1], work.heads)
        share = max(times.alone, _LEAST_ALONE) if sizes.size <= _NUM_SMS else 1.0
        slots = min(work.slots, work.blocks)
        blocks = _PROMPT * share * prompt_makespan(times.item + times.key_tile * sizes, slots)
        merge = _PROMPT_MERGE * (times.merge + times.state * work.num_states)
        return Parts(times.launch, blocks, merge if work.is_merged else 0.0)
    cost = COSTS[work.kernel]
    itemsize = case.groups[0].kv_itemsize
    tile = cost.keys * columns * itemsize / 512 + cost.rows * work.rows / 16 * columns / 256
    durations = cost.block + -(-work.keys // _TILE) * tile
    blocks = makespan(np.repeat(durations, work.heads).tolist(), work.slots)
    merge = 0.0
    if work.is_merged:
        merge = _MERGE_US + of_state * work.num_states
    elif work.num_states:
        merge = _FUSED_US if work.kernel == "decode_sm80" else _FUSED_FEW_US
        merge += _FUSED_SPLIT_US * float(np.maximum.reduce(work.splits))
    return Parts(cost.launch, blocks, merge)


def _streams(case: BatchCase, num_launches: int) -> Streams:
    """The keys of requests of few rows, which launches behind one of prefill read."""
    group = case.num_qo_heads // case.num_kv_heads
    few = [(n, keys) for n, rows, keys in case.requests if rows * group <= _MOST_FEW_ROWS]
    keys = np.array([length for n, length in few for _ in range(n)], np.float64)
    if case.window_left >= 0:
        keys = np.minimum(keys, case.window_left + 1)
    row_bytes = (case.head_dim_qk + case.head_dim_vo) * case.groups[0].kv_itemsize
    num_bytes = float(np.add.reduce(keys)) * case.num_kv_heads * row_bytes
    num_items, is_tiny = keys.size * case.num_kv_heads, case.page_size < _FEW_KEYS
    return Streams(keys, num_bytes, num_items, _CARD.beside, num_launches, is_tiny)


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
        for kind, shape in zip(kernel.kinds, kernel.shapes, strict=True):
            name = kind.name
            if name == "decode_sm80" and kernel.loaded.num_slots < 2 * _NUM_SMS:
                name = "clusters" if launch.cluster > 1 else "alone"
            chosen = items
            if len(kernel.kinds) > 1:
                is_small = items[:, 1] * launcher.group_size <= kernel.kinds[1].tile_q
                chosen = items[is_small == (kind is kernel.kinds[1])]
            works.append(
                Work(
                    name,
                    _keys(chosen, kind.tile_q, launcher) / launch.cluster,
                    chosen[:, 6],
                    kind.tile_q,
                    kind.used_rows(launcher.group_size, launcher.num_kv_heads),
                    launcher.num_kv_heads,
                    max(1, kernel.loaded.num_slots // launch.cluster),
                    part.merge is not None,
                    kind.tile_kv,
                    shape.times,
                    int(np.multiply.reduce(launch.grid)),
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
