"""How long the keys of one block of a batch may be: an estimate of when the last block is done."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np

# In the time of a key tile, all slots busy: what a block pays besides its tiles, and what a merge
# costs at all.
BLOCK_OVERHEAD = 2.0
MERGE_OVERHEAD = 3.0
# Splits make at most this many waves of blocks more: it bounds the list of a captured graph.
MAX_WAVES = 4
# A split that gains less than this is not worth its merge.
MIN_GAIN = 0.95
# Tiles whose longest is at most this many times their mean are planned as if all were as long.
_EVEN = 1.15
_WAVES = range(1, MAX_WAVES + 1)
_ONE = np.float64(1.0)  # converted once
# A bound is lowered by this factor: estimates are sums, whose last digits depend on the order.
ROUNDED = 1.0 - 1e-9
_ONES = np.ones(4096)


# In the order of kernels/cupyattn/params/plan_batch.cuh.
class Costs(NamedTuple):
    """What a kernel pays besides key tiles, in their time when all slots are busy.

    block        each block
    merge        any merge
    state        writing and merging a partial state, shared by all blocks
    part         what a part adds to the merge of a tile, which nothing is beside
    min_share  of the time of tiles and blocks, where half of the slots are busy
    """

    block: float = BLOCK_OVERHEAD
    merge: float = MERGE_OVERHEAD
    state: float = 0.0
    part: float = 0.0
    min_share: float = 1.0


class Work:
    """Key tiles that each tile of rows visits: None if all visit `longest`.

    num_read     those that all requests have, each once; 0 where nobody asks
    shares_keys  several tiles of rows visit the same
    splits_alike  keys of all tiles are split in as many parts, by kernels without a work list
    num_rows     of Q, for each KV head; 0 until somebody says
    splits, unsplit, parts  what estimates have found for this work (makespan.best_split)
    """

    __slots__ = (
        "_sorted",
        "key_tiles",
        "longest",
        "num_read",
        "num_rows",
        "num_tiles",
        "parts",
        "shares_keys",
        "splits",
        "splits_alike",
        "total",
        "unsplit",
    )

    def __init__(
        self,
        key_tiles: np.ndarray | None,
        longest: int,
        total: int,
        num_tiles: int,
        num_read: int = 0,
        shares_keys: bool = False,
    ) -> None:
        self.key_tiles, self.longest, self.total = key_tiles, longest, total
        self.num_tiles, self.num_read, self.shares_keys = num_tiles, num_read, shares_keys
        self.num_rows, self.splits_alike = 0, False
        self.splits: dict[object, Split] = {}
        self.unsplit: dict[object, float] = {}
        self.parts: dict[object, Any] = {}
        self._sorted: np.ndarray | None = None

    @classmethod
    def of_equal(cls, num_tiles: int, key_tiles: int) -> Work:
        """The work of tiles that visit so many key tiles each."""
        return cls(None, key_tiles, key_tiles * num_tiles, num_tiles)

    def array(self) -> np.ndarray:
        return np.full(self.num_tiles, self.longest) if self.key_tiles is None else self.key_tiles

    @property
    def shortest(self) -> int:
        """The key tiles of the tile that visits the fewest."""
        sizes = self.key_tiles
        return self.longest if sizes is None or not sizes.size else int(sizes[sizes.argmin()])

    def descending(self) -> np.ndarray:
        """The same as float64, the most first; sorted once for all estimates."""
        result = self._sorted
        if result is None:
            result = self.array().astype(np.float64)
            if self.key_tiles is not None:
                result.sort()
            result = self._sorted = result[::-1]
        return result


class Chunk(NamedTuple):
    """Keys are split after so many key tiles, and when the last block is done then."""

    size: int
    time: float


class Split(NamedTuple):
    """Keys are split after so many key tiles (0: they are not), and when all is done then, in
    microseconds."""

    chunk: int
    time: float


def best_chunk(work: Work, items_per_wave: int, costs: Costs, minimum: int = 1) -> Chunk:
    """The most key tiles of one block, `least` or more, by an estimate of when the last is done.

    Example: 64 requests, one of 1,024 key tiles and the others of 4, 8 heads, 264 slots: unsplit
    the long one takes 1,024 tiles' time, in parts of 39 all slots are busy to the end.
    """
    longest, total, num_tiles = work.longest, work.total, work.num_tiles
    is_even = are_even(longest, total, num_tiles)
    chunks = _candidates(work, items_per_wave, is_even, minimum, costs.min_share)
    if not chunks or is_even:
        whole = _time_of_even(work, longest, items_per_wave, costs)[0]
    else:
        uneven = _Uneven(work, items_per_wave, costs.block)
        whole = max(uneven.done(longest, float(num_tiles)), longest + costs.block)
    best, best_time = longest, whole * MIN_GAIN
    soonest = total / items_per_wave
    if best_time <= soonest + costs.min_share * costs.block:
        return Chunk(longest, whole)
    if not is_even:
        bounds = [_lower_bound_of_uneven(work, chunk, items_per_wave, costs) for chunk in chunks]
        forms = sorted(zip(bounds, chunks, strict=True))
    else:
        forms = [(0.0, chunk) for chunk in chunks]
    for bound, chunk in forms:
        if bound > best_time:
            break
        if is_even:
            done, num_items = _time_of_even(work, chunk, items_per_wave, costs)
        else:
            done, num_items = uneven.split(chunk)
        estimate = done + costs.merge + costs.state * num_items / items_per_wave
        estimate += costs.part * -(-longest // chunk)
        # The shortest parts win among equal times.
        if estimate < best_time or (estimate == best_time and chunk < best < longest):
            best, best_time = chunk, estimate
    return Chunk(best, whole if best == longest else best_time)


def _lower_bound_of_uneven(work: Work, chunk: int, items_per_wave: int, costs: Costs) -> float:
    """When all is done at least if keys are split after `chunk` tiles."""
    longest = work.longest
    waves = max(work.num_tiles, work.total / chunk) / items_per_wave
    busy = work.total / items_per_wave + waves * costs.block
    done = max(
        busy, longest / math.ceil(longest * (1.0 / chunk)) + costs.block
    )  # as `split` has it
    minimum = ROUNDED * (done + waves * costs.state)
    return minimum + costs.merge + costs.part * -(-longest // chunk)


def are_even(longest: int, total: int, num_tiles: int) -> bool:
    """Whether tiles are planned as if all had as many keys."""
    return longest * num_tiles <= _EVEN * total


def _time_of_even(work: Work, chunk: int, items_per_wave: int, costs: Costs) -> tuple[float, float]:
    """When all blocks are done if keys are split after `chunk` tiles, and how many they are."""
    parts = -(-work.longest // chunk)
    num_items = work.num_tiles * parts
    waves = float(-(-num_items // items_per_wave))
    if waves == 1:  # the fewer blocks, the faster each
        waves = max(costs.min_share, num_items / items_per_wave)
    done = waves * (work.longest / parts + costs.block)
    return done, num_items


class _Uneven:
    """When tiles of several lengths are done. Float, for integers divide slowly."""

    __slots__ = ("_block", "_per_wave", "_row", "_total", "_up_to")

    def __init__(self, work: Work, items_per_wave: int, block: float) -> None:
        self._total, self._per_wave, self._block = work.total, items_per_wave, block
        self._row = work.descending()[::-1]
        self._up_to = np.add.accumulate(self._row)

    def split(self, chunk: int) -> tuple[float, float]:
        """When all is done if keys are split after `chunk` tiles, and how many blocks that are."""
        row = self._row
        parts = row * (1.0 / chunk)
        np.ceil(parts, out=parts)
        if row[0] < 1.0:  # of no keys, too
            np.maximum(parts, _ONE, out=parts)
        num_items = float(parts.dot(ones(parts.size)))
        done = self.done(chunk, num_items)
        if done < chunk + self._block:  # no part is longer than that
            np.divide(row, parts, out=parts)
            done = max(done, float(parts[parts.argmax()]) + self._block)
        return done, num_items

    def done(self, chunk: int, num_items: float) -> float:
        """When all but the longest part is done: the short tiles, of a part each, fill gaps, but
        long ones come in whole waves."""
        num_short = int(self._row.searchsorted(0.5 * chunk, "right"))
        num_long = num_items - num_short
        of_short = float(self._up_to[num_short - 1]) if num_short else 0.0
        mean = (self._total - of_short) / num_long
        busy = (self._total + num_items * self._block) / self._per_wave
        return max(busy, -(-num_long // self._per_wave) * (mean + self._block))


def ones(count: int) -> np.ndarray:
    return _ONES[:count] if count <= _ONES.size else np.ones(count)


def _candidates(
    work: Work, items_per_wave: int, is_even: bool, minimum: int, min_share: float
) -> list[int]:
    """Sizes of parts worth a look. None makes more than MAX_WAVES more waves of blocks."""
    longest, total, num_tiles = work.longest, work.total, work.num_tiles
    fewest = -(-total // (items_per_wave * MAX_WAVES))
    if max(fewest, minimum) >= longest:
        return []
    if is_even:
        items = [items_per_wave * n for n in _WAVES]
        if min_share < 1:  # keys that memory brings come as fast to half of the blocks
            items.append(items_per_wave // 2)
        parts = {n // num_tiles for n in items}
        chunks = {-(-longest // part) for part in parts if part > 1}
    else:
        # The last part of a tile is not full, and a few blocks too many take a wave more. Therefore
        # one and two waves are also tried with room for half a part, or a whole one, at each end.
        rooms = [items_per_wave * n for n in _WAVES]
        rooms += [n - num_tiles * half // 2 for n in rooms[:2] for half in (1, 2)]
        chunks = {-(-total // room) for room in rooms if room > 0}
    result = {max(chunk, minimum) for chunk in chunks if chunk >= fewest}
    return sorted(chunk for chunk in result if chunk < longest)
