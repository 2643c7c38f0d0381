"""What plans know of the tiles of a kernel."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from .balance import BLOCK_OVERHEAD, Costs
from .makespan import TileTimes

# block, merge, state and part of Costs, fitted to times of an H200 (docs/ladder.md). Clusters are
# one wave whatever the splits, so what a block pays at all does not matter.
_OF_CLUSTERS = 0.0, 0.86, 0.0, 0.12
_MERGED_APART = 3.0, 1.4, 0.3, 0.0
# Where each block has an SM, latency decides, not memory's rate, unless most have one.
_LEAST_SHARE_OF_CLUSTERS = 0.5
# Tiles of keys for each SM from which on two smaller blocks an SM are as fast.
_MOST_TILES = 12


@dataclass(frozen=True, slots=True)
class TileShape:
    """What a plan must know of a kernel.

    tile_q, tile_kv  rows and keys of a tile
    num_slots       blocks that run at a time
    state_cost      what writing and merging one partial state costs, in the time of a key tile
    part_cost       what a part adds to a merge that one block does at the end, for as many rows as
                    it merges at a time, in the time that a key tile takes where few blocks run;
                    0: a launch merges
    rows_at_a_time  rows that such a merge takes at a time
    least_share     of the time of a key tile with all slots busy, that of one where half are
    times           where the kernel has been timed, what a plan goes by instead of these costs
    num_sms         SMs that these slots are on
    is_persistent   timed blocks take items until none is left; else each has one
    cluster         blocks that share the keys of an item; a slot then has all of them
    is_fused        the last block of a tile merges its parts
    most_keys       of a request, up to which plans of timed blocks look at this shape; 0: any
    """

    tile_q: int
    tile_kv: int
    num_slots: int
    state_cost: float = 0.0
    part_cost: float = 0.0
    rows_at_a_time: int = 1
    least_share: float = 1.0
    times: TileTimes | None = None
    num_sms: int = 1
    is_persistent: bool = False
    cluster: int = 1
    is_fused: bool = True
    most_keys: int = 0

    def in_clusters(self, cluster: int, num_clusters: int) -> TileShape:
        """The shape of clusters of `cluster` blocks, each of which shares an item as one wide block
        would; num_clusters of them run at a time."""
        return replace(
            self,
            tile_kv=cluster * self.tile_kv,
            num_slots=num_clusters,
            rows_at_a_time=cluster * self.rows_at_a_time,
            least_share=_LEAST_SHARE_OF_CLUSTERS,
            cluster=cluster,
        )

    def merged_apart(self) -> TileShape:
        """The shape of blocks whose parts are merged by a launch."""
        return replace(self, part_cost=0.0, is_fused=False)

    def cost_of_part(self, rows: int) -> float:
        """What a part of so many rows, or of a whole tile, adds to a merge."""
        return self.part_cost * self._passes(rows)

    def least_part(self, key_tiles: int, rows: int) -> int:
        """The fewest of these key tiles that are worth a part: n / size + cost * size, the
        time of a part and of the merge, is least at parts of sqrt(n * cost)."""
        return math.ceil(math.sqrt(key_tiles * self.cost_of_part(rows))) or 1

    def costs(self, rows: int) -> Costs:
        """The costs of tiles of so many rows, in the time of a key tile with all slots busy."""
        if self.cluster > 1:
            return Costs(*_OF_CLUSTERS, self.least_share)
        if not self.is_fused:
            return Costs(*_MERGED_APART, self.least_share)
        if not self.part_cost:
            return Costs(state=self.state_cost, least_share=self.least_share)
        # In units of 2.1 us, which a key tile takes by memory's rate with all slots busy. The
        # first pass of a merge costs what was fitted to times of an H200, each further one two
        # round trips to L2, 0.4 us. A key tile is 0.6 us where few blocks run (docs/ladder.md).
        passes = self._passes(rows)
        block = BLOCK_OVERHEAD + 1.0 + 0.5 * passes
        merge = 1.8 + 0.2 * passes
        part = 0.3 * self.cost_of_part(rows)
        return Costs(block, merge, self.state_cost, part, self.least_share)

    def _passes(self, rows: int) -> int:
        return -(-min(rows, self.tile_q) // self.rows_at_a_time)


# The most blocks of a cluster that every chip with clusters has.
MOST_BLOCKS_OF_CLUSTER = 8


def cluster_size(num_items: int, key_tiles: int, num_sms: int) -> int:
    """How many blocks share an item where each has an SM of its own: a power of two.

    1 where there is no room for eight blocks an item, where an item has but one tile of keys, or
    where the keys of all items keep the memory busy anyway.

    Example: 8 items of 32 key tiles, 132 SMs: 8 blocks an item, 64 in all.
    """
    if (
        not may_cluster(num_items, num_sms)
        or key_tiles <= 1
        or num_items * key_tiles > _MOST_TILES * num_sms
    ):
        return 1
    return min(MOST_BLOCKS_OF_CLUSTER, 1 << (key_tiles - 1).bit_length())


def may_cluster(num_items: int, num_sms: int) -> bool:
    """Whether there is room for eight blocks an item."""
    return MOST_BLOCKS_OF_CLUSTER * num_items <= num_sms
