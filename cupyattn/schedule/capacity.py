"""The capacity of plans that the device makes, whose lengths the host cannot see."""

from __future__ import annotations

from typing import NamedTuple

from .balance import MAX_WAVES
from .limits import Limits
from .masking import Masking
from .tile_shape import TileShape

# The planner sums key tiles in 32 bits.
_MAX_KEY_TILES = 2**30


class PlanCapacity(NamedTuple):
    """The most that a plan may have.

    num_tiles       tiles of query rows
    num_more        items that splitting may add to those; 0: nothing is split
    items_per_wave  items that run at a time
    """

    num_tiles: int
    num_more: int
    items_per_wave: int

    def limits(self) -> Limits:
        # Parts are no shorter than all key tiles by num_more, so a split tile has at least one
        # num_more-th of them, and one part that is not full.
        num_split = min(self.num_tiles, self.num_more)
        return Limits(self.num_tiles + self.num_more, num_split, num_split + self.num_more)


def plan_capacity(
    num_requests: int,
    num_rows: int,
    qo_len: int,
    max_kv_len: int,
    likely_kv_len: int,
    group_size: int,
    num_kv_heads: int,
    shape: TileShape,
    masking: Masking,
    *,
    last_block_merges: bool,
    waves: float = MAX_WAVES,
) -> PlanCapacity:
    """The capacity for any plan of so many requests and query rows.

    qo_len         of every request, or -1 where they differ
    max_kv_len     keys that a request has room for; `likely_kv_len`, up to that, bounds how often
                   keys are worth splitting, but not what a plan may be of
    last_block_merges    a launch of its own merges partial states, whether or not there are any
    waves          of items that splitting may add
    """
    if qo_len >= 0:
        num_tiles = num_requests * -(-qo_len * group_size // shape.tile_q)
    else:
        num_tiles = num_requests + num_rows * group_size // shape.tile_q
    per_wave = max(1, shape.num_slots // num_kv_heads)
    keys = min(likely_kv_len, max_kv_len)
    if masking.window_left >= 0:
        longest_q = qo_len if qo_len >= 0 else num_rows
        keys = min(keys, int(masking.keys_among(masking.window_left + longest_q)))
    key_tiles = -(-keys // shape.tile_kv)
    num_more = min(int(waves * per_wave), num_tiles * max(key_tiles - 1, 0))
    # Many tiles balance by themselves, and then a merge is not worth its launch.
    if last_block_merges and num_tiles >= MAX_WAVES * per_wave:
        num_more = 0
    if num_tiles * -(-max_kv_len // shape.tile_kv) >= _MAX_KEY_TILES:
        num_more = 0
    return PlanCapacity(num_tiles, num_more, per_wave)
