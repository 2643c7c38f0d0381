"""What plans know of the tiles of a kernel."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from .balance import BLOCK_OVERHEAD, Costs


@dataclass(frozen=True, slots=True)
class TileShape:
    """What a plan must know of a kernel.

    num_slots       blocks that run at a time
    state_cost      what writing and merging one partial state costs, in the time of a key tile
    part_cost       what a part adds to a merge that one block does at the end, for as many rows as
                    it merges at a time, in the time that a key tile takes where few blocks run;
                    0: a launch merges
    rows_at_a_time  of such a merge
    least_share     of the time of a key tile with all slots busy, that of one where half are
    cluster         blocks that share the keys of an item; a slot is of them all then
    """

    tile_q: int
    tile_kv: int
    num_slots: int
    state_cost: float = 0.0
    part_cost: float = 0.0
    rows_at_a_time: int = 1
    least_share: float = 1.0
    cluster: int = 1

    def in_clusters(self, cluster: int, num_clusters: int) -> TileShape:
        """The same where `cluster` blocks share an item, as one block with as many more warps;
        num_clusters of them run at a time."""
        return replace(
            self,
            tile_kv=cluster * self.tile_kv,
            num_slots=num_clusters,
            rows_at_a_time=cluster * self.rows_at_a_time,
            cluster=cluster,
        )

    def cost_of_part(self, rows: int) -> float:
        """What a part of so many rows, or of a whole tile, adds to a merge."""
        return self.part_cost * self._passes(rows)

    def least_part(self, key_tiles: int, rows: int) -> int:
        """The fewest of these key tiles that are worth a part: n / size + cost * size, the
        time of a part and of the merge, is least at parts of sqrt(n * cost)."""
        return math.ceil(math.sqrt(key_tiles * self.cost_of_part(rows))) or 1

    def costs(self, rows: int) -> Costs:
        """Of tiles of so many rows, in the time of a key tile with all slots busy."""
        if not self.part_cost:
            return Costs(state=self.state_cost)
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


MOST_BLOCKS_OF_CLUSTER = 16


def cluster_size(num_items: int, key_tiles: int, num_slots: int) -> int:
    """How many blocks share an item: a power of two, as many as there is room for, and as tiles of
    the longest request's keys.

    Example: 8 items of 64 key tiles, 264 slots: 16 blocks an item, 128 in all.
    """
    most = min(num_slots // max(num_items, 1), key_tiles, MOST_BLOCKS_OF_CLUSTER)
    return 1 << most.bit_length() - 1 if most > 1 else 1
