"""The plan of one request: tiles of query rows, and how often the keys of a tile are split.

The kernels derive their tile and key range from the block index with the arithmetic of
`Masking.key_span` and `tile_span` (kernels/cupyattn/attention/mask.cuh). A change to either needs
the other: the emulator and the GPU tests find out by results, no test compares the two arithmetics
alone.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from .makespan import WORTHWHILE, Slots, TileTimes, launch_time
from .masking import Masking

# In the time of a key tile: what a block pays besides its tiles (filling the pipeline, writing),
# what a merge costs at all, and for each partial state.
_BLOCK_OVERHEAD = 2.0
_MERGE_OVERHEAD = 3.0
_SPLIT_OVERHEAD = 1 / 16
_MAX_WAVES = 4


@dataclass(frozen=True, slots=True)
class SinglePlan:
    """How one request is cut: num_blocks = num_q_tiles * num_kv_heads * num_splits."""

    num_q_tiles: int
    num_splits: int
    num_blocks: int


# The limit of a grid's second and third dimension.
MAX_GRID_YZ = 65_535


def tile_span(begin: int, end: int, tile_kv: int, split: int, num_splits: int) -> tuple[int, int]:
    """Key tiles [first, last) of one split of the keys [begin, end), counted from `begin`.

    Tile t is the keys from begin + t * tile_kv on. (Under a custom mask tiles start at multiples of
    tile_kv instead: round `begin` down to one.)
    """
    count = -(-max(0, end - begin) // tile_kv)
    return count * split // num_splits, count * (split + 1) // num_splits


def plan_single(
    qo_len: int,
    kv_len: int,
    group_size: int,
    num_kv_heads: int,
    tile_q: int,
    tile_kv: int,
    num_slots: int,
    masking: Masking,
    times: TileTimes | None = None,
    num_sms: int = 1,
) -> SinglePlan:
    """Plan one request for a GPU that runs `num_slots` blocks at a time, on `num_sms` SMs.

    times: of the kernel, where it has been timed: splits are then chosen by a simulated launch.

    With fewer tiles than slots, keys are split so that the blocks fill one wave, or a few when that
    divides better. Example: 8 KV heads, 264 slots, 2,048 key tiles: 33 splits make 264 blocks of
    62 or 63 tiles each.
    """
    num_q_tiles = -(-qo_len * group_size // tile_q)
    blocks = num_q_tiles * num_kv_heads
    if blocks >= num_slots or kv_len <= tile_kv:
        return SinglePlan(num_q_tiles, 1, blocks)
    # The tile with the longest span bounds the time; without a window that is the last one.
    last = qo_len - 1
    first = max(0, (num_q_tiles - 1) * tile_q // group_size)
    begin, end = masking.key_span(first, last, qo_len, kv_len)
    tiles = -(-max(0, end - begin) // tile_kv)
    candidates = _candidates(tiles, blocks, num_slots)
    if times is not None:
        spans = _spans(num_q_tiles, tile_q, tile_kv, qo_len, kv_len, group_size, masking)
        slots = Slots(num_slots, num_sms)
        splits = _soonest(spans, num_kv_heads, candidates, slots, times)
        return SinglePlan(num_q_tiles, splits, blocks * splits)
    best, best_cost = 1, tiles + _BLOCK_OVERHEAD
    for splits in candidates:
        waves = -(-blocks * splits // num_slots)
        cost = waves * (-(-tiles // splits) + _BLOCK_OVERHEAD) + _MERGE_OVERHEAD
        cost += splits * _SPLIT_OVERHEAD
        if cost < best_cost:
            best, best_cost = splits, cost
    return SinglePlan(num_q_tiles, best, blocks * best)


def _candidates(tiles: int, blocks: int, num_slots: int) -> list[int]:
    """Numbers of splits worth a look: whole waves of blocks, and one to four tiles a block."""
    whole_waves = [waves * num_slots // blocks for waves in range(1, _MAX_WAVES + 1)]
    few_tiles = [-(-tiles // count) for count in range(1, 5)]
    return [min(splits, tiles, MAX_GRID_YZ) for splits in whole_waves + few_tiles]


def _spans(
    num_q_tiles: int,
    tile_q: int,
    tile_kv: int,
    qo_len: int,
    kv_len: int,
    group_size: int,
    masking: Masking,
) -> np.ndarray:
    """Key tiles of each tile of rows."""
    first = np.arange(num_q_tiles) * tile_q
    tokens = first // group_size, (first + (tile_q - 1)) // group_size
    lengths = np.array([qo_len]), np.array([kv_len])
    return -(-masking.span_lengths(*tokens, *lengths, None, tile_kv) // tile_kv)


def _soonest(
    sizes: np.ndarray, num_kv_heads: int, candidates: list[int], slots: Slots, times: TileTimes
) -> int:
    """The number of splits of every tile after which all is done soonest, with the merge."""
    best, limit = 1, WORTHWHILE * launch_time(sizes, num_kv_heads, slots, times)
    for splits in candidates:
        if splits <= 1:
            continue
        parts = np.repeat(sizes / splits, splits)
        time = launch_time(parts, num_kv_heads, slots, times)
        time += times.merge + times.state * parts.size * num_kv_heads
        if time < limit:
            best, limit = splits, time
    return best
