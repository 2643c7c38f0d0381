"""What plans know of the tiles of a kernel."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import NamedTuple

from .balance import BLOCK_OVERHEAD, Costs, are_even
from .cuts import OVERHEAD as CUT_OVERHEAD
from .makespan import Slots, TileTimes

# Keys and values of a tile of each of two blocks an SM, which DecodeTimes.key_tile is of.
_TILE_BYTES = 64 * 512


class DecodeTimes(NamedTuple):
    """What a launch of decode takes in microseconds, of a card (choose/card.py).

    start        before its blocks and after them
    row          each row of a tile
    block        each block besides its key tiles
    min_share  of a key tile's time, that of a block whose keys memory brings at once
    merge        what a split adds at all
    part         what each part of a tile adds, for as many rows as are merged at a time
    key_tile     what memory takes for a key tile of each slot, of 32 KB for two slots an SM
    """

    start: float
    row: float
    block: float
    min_share: float
    merge: float
    part: float
    key_tile: float

    def costs(self, passes: int) -> Costs:
        """These in the time of a key tile, as splits are chosen by."""
        part = self.part * passes / self.key_tile
        block, merge = self.block / self.key_tile, self.merge / self.key_tile
        return Costs(block, merge, 0.0, part, self.min_share)


class DecodeKinds(NamedTuple):
    """The times of the blocks of decode that a plan may choose: clusters, blocks that have an SM
    each, two an SM, and those whose parts a launch merges."""

    cluster: DecodeTimes
    one_an_sm: DecodeTimes
    two_an_sm: DecodeTimes
    merged_apart: DecodeTimes

    def of(self, shape: TileShape) -> DecodeTimes:
        """The times of these blocks."""
        result: DecodeTimes = getattr(self, self.kind_of(shape))
        return result

    def of_keys(self, factor: float) -> DecodeKinds:
        """The times over keys that take so many times as long."""
        return DecodeKinds._make(x._replace(key_tile=factor * x.key_tile) for x in self)

    @staticmethod
    def kind_of(shape: TileShape) -> str:
        """The field that has them."""
        if shape.cluster > 1:
            return "cluster"
        if not shape.is_fused:
            return "merged_apart"
        return "one_an_sm" if shape.num_slots < 2 * shape.num_sms else "two_an_sm"


# The Costs of splits that a launch merges, also fitted.
_MERGED_APART = Costs(block=3.0, merge=1.4, state=0.3, part=0.0)


# Compared as objects, for caches by shape: there is one for each kernel of a launcher.
@dataclass(frozen=True, slots=True, eq=False)
class TileShape:
    """What a plan must know of a kernel.

    tile_q, tile_kv  rows and keys of a tile
    num_slots       blocks that run at a time
    state_cost      what writing and merging one partial state costs, in the time of a key tile
    part_cost       what a part adds to a merge that one block does at the end, for as many rows as
                    it merges at a time, in the time that a key tile takes where few blocks run;
                    0: a launch merges
    rows_at_a_time  rows that such a merge takes at a time
    min_share     of the time of a key tile with all slots busy, that of one where half are
    times           where the kernel has been timed, what a plan goes by instead of these costs
    num_sms         SMs that these slots are on
    is_persistent   timed blocks take items until none is left; else each has one
    cluster         blocks that share the keys of an item; a slot then has all of them
    is_fused        the last block of a tile merges its parts
    takes_cuts      its items may say which key tiles they have (schedule/cuts.py)
    max_keys       of a request, up to which plans of timed blocks look at this shape; 0: any
    decode          of blocks of decode that were timed for few requests, what plans go by
    part_of_launch  what a part adds to a merge that a launch does, as part_cost
    slots           num_slots and num_sms
    """

    tile_q: int
    tile_kv: int
    num_slots: int
    state_cost: float = 0.0
    part_cost: float = 0.0
    rows_at_a_time: int = 1
    min_share: float = 1.0
    times: TileTimes | None = None
    num_sms: int = 1
    is_persistent: bool = False
    cluster: int = 1
    is_fused: bool = True
    takes_cuts: bool = False
    max_keys: int = 0
    decode: DecodeTimes | None = None
    part_of_launch: float = 0.0
    slots: Slots = field(init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "slots", Slots(self.num_slots, self.num_sms))

    def in_clusters(self, cluster: int, num_clusters: int, times: DecodeTimes) -> TileShape:
        """The shape of clusters of `cluster` blocks, each of which shares an item as one wide block
        would; num_clusters of them run at a time."""
        wide = replace(
            self,
            tile_kv=cluster * self.tile_kv,
            num_slots=num_clusters,
            rows_at_a_time=cluster * self.rows_at_a_time,
            cluster=cluster,
        )
        return wide.timed(times)

    def timed(self, times: DecodeTimes) -> TileShape:
        """The shape of blocks of decode that take so long."""
        part_cost = times.part / (times.min_share * times.key_tile)
        return replace(self, part_cost=part_cost, min_share=times.min_share, decode=times)

    def of_scaled_lists(self) -> TileShape:
        """The shape of tiles of 64 rows over lists of keys with scales, fitted to an H200: 3 us a
        key tile, 5 us for as many states as blocks run (docs/ladder.md)."""
        return replace(self, state_cost=1.8, part_of_launch=0.2)

    def merged_apart(self) -> TileShape:
        """The shape of blocks whose parts are merged by a launch."""
        return replace(self, part_cost=0.0, is_fused=False)

    def cost_of_part(self, rows: int) -> float:
        """What a part of so many rows, or of a whole tile, adds to a merge."""
        return self.part_cost * self._passes(rows)

    def min_part(self, key_tiles: int, rows: int) -> int:
        """The fewest of these key tiles that are worth a part: n / size + cost * size, the
        time of a part and of the merge, is least at parts of sqrt(n * cost)."""
        cost = self.cost_of_part(rows) or self.part_of_launch
        return math.ceil(math.sqrt(key_tiles * cost)) or 1

    @lru_cache(maxsize=1024)  # noqa: B019 (shapes live as long as launchers)
    def costs(self, rows: int) -> Costs:
        """The costs of tiles of so many rows, in the time of a key tile with all slots busy."""
        if self.decode is not None:
            return self.decode.costs(self._passes(rows))
        if not self.is_fused:
            return _MERGED_APART._replace(min_share=self.min_share)
        if not self.part_cost:
            block = float(CUT_OVERHEAD) if self.takes_cuts else BLOCK_OVERHEAD
            part = self.part_of_launch
            return Costs(block, state=self.state_cost, part=part, min_share=self.min_share)
        # In units of 2.1 us, which a key tile takes by memory's rate with all slots busy. The
        # first pass of a merge costs what was fitted to times of an H200, each further one two
        # round trips to L2, 0.4 us. A key tile is 0.6 us where few blocks run (docs/ladder.md).
        passes = self._passes(rows)
        block = BLOCK_OVERHEAD + 1.0 + 0.5 * passes
        merge = 1.8 + 0.2 * passes
        part = 0.3 * self.cost_of_part(rows)
        return Costs(block, merge, self.state_cost, part, self.min_share)

    def _passes(self, rows: int) -> int:
        return -(-min(rows, self.tile_q) // self.rows_at_a_time)


# Sizes of clusters, which every chip that has clusters runs.
CLUSTERS = (8, 4)


class DecodeWork(NamedTuple):
    """What a launch of decode serves.

    num_tiles  of so many rows, each for all KV heads
    longest    keys of one of them; `total`: of all
    key_bytes  of a key and its value
    """

    num_tiles: int
    longest: int
    total: int
    num_kv_heads: int
    rows: int
    key_bytes: int = 512


def decode_time(shape: TileShape, times: DecodeTimes, work: DecodeWork) -> float:
    """When a launch of decode is done, in microseconds, whose keys are split as suits it best.

    A block waits for its keys, or memory decides: the longest tile's keys, or all keys over all
    slots. Parts divide the former, and cost a merge.
    """
    num_tiles, longest, total, num_kv_heads, rows, key_bytes = work
    key_tiles = math.ceil(longest / shape.tile_kv)
    waits = times.key_tile * times.min_share * key_tiles
    all_tiles = max(total / shape.tile_kv, 1.0)
    # Clusters leave SMs idle, but memory is as fast without them.
    num_bytes = max(total, shape.tile_kv) * key_bytes * num_kv_heads
    busy = times.key_tile * num_bytes / (2 * shape.num_sms * _TILE_BYTES)
    waves = max(1.0, num_tiles * num_kv_heads / shape.num_slots)
    first = times.start + times.row * rows + times.block * waves
    whole = first + max(waits, busy)
    if not rows:
        return whole
    # As many parts in all as run at a time, but for the end of each tile. Where tiles alone take
    # more of the slots, parts of uneven ones come in waves, and nothing is beside the start of
    # clusters.
    room = shape.num_slots / num_kv_heads - 0.5 * num_tiles
    part = times.part * -(-min(rows, shape.tile_q) // shape.rows_at_a_time)
    parts = min(key_tiles, key_tiles * room / all_tiles, math.sqrt(waits / part))
    if room < num_tiles:
        comes_in_waves = shape.cluster > 1 and not are_even(longest, total, num_tiles)
        return whole + comes_in_waves * (times.block + times.merge)
    if parts < 2.0:
        return whole
    parts = min(parts, max(2.0, waits / busy))
    return min(whole, first + max(waits / parts, busy) + times.merge + part * parts)
