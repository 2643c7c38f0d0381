"""The work list of a decode batch, and the game in which a GPU plays it."""

from __future__ import annotations

import heapq
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from ...schedule import Masking, tile_span
from ...schedule.batch import BatchPlan, BatchRequests, Splitting, plan_batch
from ...schedule.tile_shape import TileShape

KV_TILE = 128  # keys
_ROWS, _BLOCKS_OF_SM = 16, 2
_START = 2  # what a block takes besides its keys, in the time of one tile of them


class Block(NamedTuple):
    """One block of threads as the game played it: times are those of tiles of keys."""

    slot: int
    begin: float
    time: float
    request: int


@dataclass(frozen=True)
class WorkList:
    """What `plan()` writes for a decode of `lengths` keys: parts of requests, one after another."""

    plan: BatchPlan
    num_kv_heads: int
    num_slots: int

    @property
    def num_items(self) -> int:
        return len(self.plan.items)

    @property
    def num_split_requests(self) -> int:
        return len(self.plan.merges)

    def play(self) -> list[Block]:
        """Deal the blocks to whatever slot is free: an item is one block for each key head."""
        free = [(0.0, slot) for slot in range(self.num_slots)]
        played = []
        for item in self.plan.items:
            request, kv_len, split, num_splits = (int(item[i]) for i in (0, 3, 5, 6))
            first, last = tile_span(0, kv_len, KV_TILE, split, num_splits)
            time = _START + (last - first)
            for _ in range(self.num_kv_heads):
                begin, slot = heapq.heappop(free)
                heapq.heappush(free, (begin + time, slot))
                played.append(Block(slot, begin, time, request))
        return played


def work_list(
    lengths: np.ndarray,
    heads: tuple[int, int] = (32, 8),
    num_sms: int = 132,
    may_split: bool = True,
) -> WorkList:
    """The work list of a decode batch on a GPU of so many SMs, which need not be there.

    lengths: keys of each request. heads: of queries and of keys. may_split: whether the keys of a
    request may be dealt to several blocks.
    """
    num_slots, count = _BLOCKS_OF_SM * num_sms, len(lengths)
    tile = TileShape(_ROWS, KV_TILE, num_slots, 0.25, 0.03, 4, 0.52)
    rows, order = np.ones(count, np.int64), np.arange(count)
    requests = BatchRequests(rows, lengths, order, np.cumsum(lengths) - lengths, uniform=1)
    group, splitting = heads[0] // heads[1], Splitting(may_split=may_split)
    plan = plan_batch(requests, group, heads[1], tile, Masking(), splitting)
    return WorkList(plan, heads[1], num_slots)
