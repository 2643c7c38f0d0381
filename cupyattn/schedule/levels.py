"""The levels of a cascade: rows of q whose keys lie in several places, shared by few rows or many.

Every level deals the rows into requests of its own, and all of them are one batch, whose tiles
leave states. These tables tell the launch that merges them where the states of a row are
(kernels/cupyattn/merge/levels.cuh).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from ..errors import PlanError
from .balance import MAX_WAVES
from .batch import BatchPlan, BatchRequests

_NO_KEYS, _NO_TOKEN = -1, -2
# The lanes of a warp: each looks up one level (levels.cuh).
MAX_LEVELS = 32
# Rows without a bound.
MOST = 2**62


@dataclass(slots=True)
class Levels:
    """What a batch of all levels' requests is, besides its lengths.

    level       int64 [requests]: which level each is of
    num_levels, num_rows   of q
    positions   int32 [num_rows]: the place of each row among its keys, level after level; None if
                nothing depends on it
    """

    level: np.ndarray
    num_levels: int
    num_rows: int
    positions: np.ndarray | None = None


def level_tables(
    levels: Levels,
    kinds: Sequence[tuple[np.ndarray, BatchRequests, BatchPlan, tuple[int, int]]],
    offsets: Sequence[int],
    group_size: int,
    max_rows: int,
) -> tuple[np.ndarray, np.ndarray]:
    """(words of rows [max_rows, num_levels, 2] and padding, tiles [num_tiles, 4]), int32.

    kinds: of each kind of tiles the indices of its requests in the batch, the requests, their plan
    and the rows of a tile and of its states. offsets: where its states begin (mixed.state_offsets).
    """
    # Tiles begin on a 16-byte boundary.
    num_words = 2 * max_rows * levels.num_levels
    words = np.empty(num_words + num_words % 4, np.int32)
    words[num_words:] = 0
    rows = words[:num_words].reshape(max_rows, levels.num_levels, 2)
    rows[: levels.num_rows] = _NO_KEYS, 0
    rows[levels.num_rows :] = _NO_TOKEN, 0
    tables, num_tiles = [], 0
    for (chosen, requests, plan, (tile_rows, state_rows)), offset in zip(
        kinds, offsets, strict=True
    ):
        counts = -(-requests.qo_len * group_size // tile_rows)
        begins = np.cumsum(counts) - counts
        assert plan.tiles is not None
        request, row, first_state, splits = plan.tiles.T
        table = np.zeros((len(plan.tiles), 4), np.int32)
        at = begins[request] + row // tile_rows
        table[at, 0], table[at, 1], table[at, 2] = first_state + offset, splits, state_rows
        tables.append(table)
        begins += num_tiles
        _place_rows(rows, levels.level[chosen], requests, begins, group_size, tile_rows)
        num_tiles += len(table)
    return words, np.concatenate(tables) if tables else np.zeros((0, 4), np.int32)


class LevelLimits(NamedTuple):
    """The most that any plan for a captured graph may have."""

    items: int
    merges: int
    state_rows: int


class Served(NamedTuple):
    """Tiles of so many rows are for requests of more rows than `above`, and of `max_rows` at most.

    padding: rows of their states beyond those.
    """

    tile_rows: int
    above: int
    max_rows: int
    padding: int = 0

    @property
    def state_rows(self) -> int:
        return self.tile_rows + self.padding


def level_limits(
    levels: Sequence[tuple[int, int]],
    num_rows: int,
    group_size: int,
    kernels: Sequence[tuple[int, Sequence[Served]]],
    waves: float = MAX_WAVES,
) -> LevelLimits:
    """Limits of any plan of these levels, (requests, query tokens of the longest) each.

    kernels  of each the items that run at a time and its kinds of tiles; every number of rows is
             served by one kind
    waves    of items that splits may add
    """
    kinds = [kind for _, of_kernel in kernels for kind in of_kernel]
    num_tiles, state_rows = 0, max(kind.state_rows for kind in kinds)
    for num_requests, longest in levels:
        rows = longest * group_size
        usable = [kind for kind in kinds if kind.above < rows] or kinds[-1:]
        tiles = num_requests
        for tile_rows, _, maximum, _ in usable:
            # Those past the first of each request.
            each = -(-min(maximum, rows) // tile_rows) - 1
            tiles += max(0, min(num_requests * each, num_rows * group_size // tile_rows))
        num_tiles += tiles
        state_rows += tiles * max(kind.state_rows for kind in usable)
    # Splits add at most this many rows, to all levels together.
    for items, of_kernel in kernels:
        state_rows += int(waves * items) * max(kind.state_rows for kind in of_kernel)
    more = int(waves * max(items for items, _ in kernels))
    merges = 2 * num_rows * len(levels)
    return LevelLimits(num_tiles + more, merges + merges % 4 + 4 * num_tiles, state_rows)


def check_level_limits(needed: tuple[int, int, int], limits: LevelLimits) -> None:
    """Raise PlanError if a plan is larger than a captured graph has room for."""
    names = "blocks", "words of merge tables", "rows of partial states"
    for name, have, room in zip(names, needed, limits, strict=True):
        if have > room:
            raise PlanError(
                f"plan: {have} {name}, but the captured graph has room for {room}; plan at first "
                "with the largest batch of every level, or capture again"
            )


def _place_rows(
    rows: np.ndarray,
    level: np.ndarray,
    requests: BatchRequests,
    begins: np.ndarray,
    group_size: int,
    tile_rows: int,
) -> None:
    lengths = requests.qo_len
    ends = np.cumsum(lengths)
    token = np.arange(int(ends[-1]) if ends.size else 0) - np.repeat(ends - lengths, lengths)
    at = np.repeat(requests.q_start, lengths) + token, np.repeat(level, lengths)
    packed = token * group_size
    rows[(*at, 0)] = np.repeat(begins, lengths) + packed // tile_rows
    rows[(*at, 1)] = packed % tile_rows
