"""The plan of a batch: a work list of (request, tile of query rows, split of its keys).

Every item is one block for each KV head. Requests are ordered longest first, and the shortest items
of all come last, so that the GPU, which deals blocks to whatever is free, ends with those; keys are
split where even that would leave it waiting for a few long ones. The kernels derive an item's keys
with the arithmetic of `Masking.key_span` and `schedule.masking.tile_span`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from .balance import BLOCK_OVERHEAD, MAX_WAVES, MIN_GAIN, Chunk, Work, best_chunk
from .cuts import MAX_ITEMS as MAX_LINKED_ITEMS
from .cuts import MAX_REQUESTS as MAX_CUT_REQUESTS
from .cuts import SHARES_OF_A_REQUEST, Cuts, Shares, cut, pack, unpack
from .makespan import best_split
from .masking import Masking
from .tile_shape import TileShape

# kernels/cupyattn/params/attention.cuh, struct WorkItem: int32 words of an item.
WORK_FIELDS = (
    "q_start",
    "qo_len",
    "kv_start",
    "kv_len",
    "first_row",
    "split",
    "num_splits",
    "first_state",
    "mask_start_low",
    "mask_start_high",
    "split_tile",
    "key_offset",
)
_FIRST_ROW, _SPLIT, NUM_SPLITS, _FIRST_STATE, _SPLIT_TILE, _KEY_OFFSET = 4, 5, 6, 7, 10, 11
_LISTED = 8  # two words: of parts that are not equal, see cuts.pack
_NO_MERGES = np.zeros(0, np.int32)
# Converted once.
_HIGH_HALF, _LOW_HALF = np.int64(32), np.int64(0xFFFFFFFF)
# Batches of more requests are not worth keeping a table for.
_MAX_REMEMBERED = 4096
_ONES, _INDICES = np.ones(_MAX_REMEMBERED, np.int64), np.arange(_MAX_REMEMBERED)
# Waves of the longest items that the short ones at the end of a list amount to. (A wave leaves
# blocks 1 % further apart where items have few tiles.)
_SHORT_WAVES = 3


# Not frozen, because every plan makes one and a frozen one is slow to make. No field changes.
@dataclass(slots=True)
class BatchRequests:
    """The lengths of a batch's requests and where their parts begin: int64 NumPy arrays [B].

    q_start     first row of q, o and lse
    kv_start    paged: first entry of kv_indices; ragged: first row of k and v
    mask_start  first byte of the packed mask, or None without one
    uniform     the length of all of qo_len, if q_start counts in steps of it; else -1
    key_offset  place of each one's first key where positions of rows count; where ranks share
                keys, how many the others hold; None if all are 0
    is_shared   bool: rows are behind all these keys, which causality hides from none; None if not
    shared_keys  that there are in all, if requests are blocks of rows of masks, which read them
                many times; else 0
    turn        int64: requests come one turn after another, so that the keys of each stay in L2;
                None: all in one
    """

    qo_len: np.ndarray
    kv_len: np.ndarray
    q_start: np.ndarray
    kv_start: np.ndarray
    mask_start: np.ndarray | None = None
    uniform: int = -1
    key_offset: np.ndarray | None = None
    is_shared: np.ndarray | None = None
    shared_keys: int = 0
    turn: np.ndarray | None = None
    _range: tuple[int, int] | None = field(default=None, init=False, repr=False, compare=False)

    def qo_range(self) -> tuple[int, int]:
        """The least and the most of qo_len; (0, 0) for no requests."""
        if self._range is None:
            self._range = self._find_range()
        return self._range

    def _find_range(self) -> tuple[int, int]:
        if self.uniform >= 0:
            return self.uniform, self.uniform
        if not self.qo_len.size:
            return 0, 0
        return min_of(self.qo_len), max_of(self.qo_len)

    def select(self, chosen: np.ndarray) -> BatchRequests:
        """The requests at these indices."""
        mask_start, key_offset, is_shared = self.mask_start, self.key_offset, self.is_shared
        return BatchRequests(
            self.qo_len[chosen],
            self.kv_len[chosen],
            self.q_start[chosen],
            self.kv_start[chosen],
            None if mask_start is None else mask_start[chosen],
            -1,
            None if key_offset is None else key_offset[chosen],
            None if is_shared is None else is_shared[chosen],
            self.shared_keys,
            None if self.turn is None else self.turn[chosen],
        )


class Splitting(NamedTuple):
    """How keys may be split: by balance, not at all, or every so many tokens (tokens > 0).

    waves  of blocks that splits by balance may add: the fewer, the fewer states they leave
    """

    may_split: bool = True
    tokens: int = 0
    waves: float = MAX_WAVES

    @property
    def is_given(self) -> bool:
        """Whether the caller says how keys are split: the order of sums is then the same in every
        batch, so nothing that depends on a batch may choose tiles, or who merges."""
        return self.tokens > 0 or not self.may_split


@dataclass(slots=True)
class BatchPlan:
    """A work list.

    items       int32 [num_items, 12], fields WORK_FIELDS
    merges      int32 [num_split_tiles]: the first item of each tile whose keys are split
    num_states  partial states of one KV head
    max_parts  of a tile
    num_blocks  the items with which blocks begin, the first of the list; 0: all
    tiles       int64 [num_tiles, 4], if every tile leaves states: its request, its first row, its
                first state and how many they are
    """

    items: np.ndarray
    merges: np.ndarray
    num_states: int
    tiles: np.ndarray | None = None
    max_parts: int = 1
    num_blocks: int = 0


def plan_batch(
    requests: BatchRequests,
    group_size: int,
    num_kv_heads: int,
    shape: TileShape,
    masking: Masking,
    splitting: Splitting,
) -> BatchPlan:
    """Plan the requests of a batch that share a kernel. Those without query rows get no work."""
    return plan_tiles(TileWork(requests, group_size, masking), num_kv_heads, shape, splitting)


def plan_tiles(
    works: TileWork, num_kv_heads: int, shape: TileShape, splitting: Splitting
) -> BatchPlan:
    """The same of requests whose tiles may have been counted before, to choose the kernel."""
    requests, tiles = works.requests, works.tiles(shape)
    is_in_order = tiles.first_row is None and not splitting.may_split
    if is_in_order or not len(requests.qo_len):
        return build(requests, tiles, None)
    work = works.of(shape)
    max_rows = works.max_rows
    splits = None
    items_per_wave = max(1, shape.num_slots // num_kv_heads)
    chunk = _chunk(work, num_kv_heads, max_rows, shape, splitting) if splitting.may_split else None
    if chunk is not None:
        if (cuts := _cuts(works, items_per_wave, shape, splitting, chunk)) is not None:
            return build_cuts(requests, works.tiles_in_order(shape), cuts)
        splits = split_after(work, chunk.size)
    tiles, splits = short_last(tiles, work, splits, items_per_wave)
    return build(requests, tiles, splits)


def make_tiles(
    requests: BatchRequests, group_size: int, shape: TileShape, masking: Masking
) -> Tiles:
    """The tiles of query rows of all requests."""
    return _make_tiles(requests, _longest_first(requests, masking), group_size, shape.tile_q)


def _make_tiles(
    requests: BatchRequests, order: np.ndarray | None, group_size: int, tile_q: int
) -> Tiles:
    """Of requests with rows, the last tile, which sees the most keys, comes first."""
    minimum, maximum = requests.qo_range()
    if minimum > 0 and maximum * group_size <= tile_q:
        return Tiles(order, None)
    counts = (requests.qo_len * group_size + (tile_q - 1)) // tile_q
    if order is None:
        order = np.arange(counts.size)
    else:
        counts = counts[order]
    if counts.size == 0:
        return Tiles(order, None)
    if minimum <= 0:
        order, counts = order[counts > 0], counts[counts > 0]
    ends = counts.cumsum()
    total = int(ends[-1]) if ends.size else 0
    if total == counts.size:
        return Tiles(order, None)
    first_row = ends.repeat(counts)
    first_row -= _INDICES[1 : total + 1] if total < _MAX_REMEMBERED else np.arange(1, total + 1)
    first_row *= tile_q
    return Tiles(order.repeat(counts), first_row)


class TileWork:
    """The tiles of some requests and their work, for estimates of several shapes and for the plan.

    What shapes whose tiles have one size share is made once. splits_alike: as Work has it.
    num_keys: of all requests, where several have the same; -1: no two have.
    """

    def __init__(
        self,
        requests: BatchRequests,
        group_size: int,
        masking: Masking,
        splits_alike: bool = False,
        num_keys: int = -1,
    ) -> None:
        self.requests, self._group_size, self._masking = requests, group_size, masking
        self._splits_alike = splits_alike
        self._order: tuple[np.ndarray | None] | None = None
        self._tiles: dict[int, Tiles] = {}
        self._works: dict[tuple[int, int], Work] = {}
        self._pairs = -1.0
        self._rows = -1
        self._num_keys = num_keys

    @property
    def max_rows(self) -> int:
        """The rows of the request that has the most."""
        return self.requests.qo_range()[1] * self._group_size

    @property
    def longest(self) -> int:
        """The keys of the request that has the most."""
        kv_len, order = self.requests.kv_len, self._in_order()
        if not kv_len.size:
            return 0
        if self._masking.window_left >= 0 or self.requests.turn is not None:
            return max_of(kv_len)  # the order is of keys in sight, or of turns
        return int(kv_len[0 if order is None else order[0]])

    @property
    def num_keys(self) -> int:
        """The keys of all requests."""
        if self._num_keys < 0:
            self._num_keys = sum_of(self.requests.kv_len)
        return self._num_keys

    def _in_order(self) -> np.ndarray | None:
        if self._order is None:
            self._order = (_longest_first(self.requests, self._masking),)
        return self._order[0]

    def tiles(self, shape: TileShape) -> Tiles:
        """The tiles of this shape, requests with the longest keys first."""
        cached = self._tiles.get(shape.tile_q)
        if cached is None:
            cached = _make_tiles(self.requests, self._in_order(), self._group_size, shape.tile_q)
            self._tiles[shape.tile_q] = cached
        return cached

    def tiles_in_order(self, shape: TileShape) -> Tiles:
        """The same, requests in the caller's order."""
        return _make_tiles(self.requests, None, self._group_size, shape.tile_q)

    def of(self, shape: TileShape) -> Work:
        """The work of this shape's tiles."""
        size = shape.tile_q, shape.tile_kv
        cached = self._works.get(size)
        if cached is None:
            tiles, group_size = self.tiles(shape), self._group_size
            cached = count_work(
                self.requests, tiles, group_size, shape, self._masking, self.num_keys
            )
            self._works[size] = cached
            cached.num_rows, cached.splits_alike = self._num_rows(), self._splits_alike
        return cached

    def _num_rows(self) -> int:
        """The rows of all requests, for each KV head."""
        if self._rows < 0:
            self._rows = sum_of(self.requests.qo_len) * self._group_size
        return self._rows

    def forget(self) -> None:
        """Let go of the splits that estimates have found (makespan.best_split)."""
        for work in self._works.values():
            work.splits.clear()
            work.unsplit.clear()

    def can_be_cut(self, shape: TileShape) -> bool:
        """Whether all tiles of rows visit the same key tiles of a request, but for the last."""
        if not shape.takes_cuts:
            return False
        requests, masking = self.requests, self._masking
        minimum, maximum = requests.qo_range()
        if minimum != maximum or not 0 < maximum <= shape.tile_kv or masking.window_left >= 0:
            return False
        is_plain = masking.share is None and not masking.has_mask
        return is_plain and requests.key_offset is None and requests.is_shared is None

    def rows_and_pairs(self) -> tuple[int, float]:
        """All rows, and at least how many pairs of a row and a key in its sight there are."""
        if self._pairs < 0:
            requests = self.requests
            pairs = self._masking.min_pairs(requests.qo_len, requests.kv_len)
            self._pairs = max(0.0, pairs * self._group_size)
        return self._num_rows(), self._pairs


class Tiles(NamedTuple):
    """Tiles of query rows, in the order of the list: the request and first row of each.

    Without `request` every request is a tile, and without `first_row` all begin at row 0.
    """

    request: np.ndarray | None
    first_row: np.ndarray | None


def _longest_first(requests: BatchRequests, masking: Masking) -> np.ndarray | None:
    """Requests by the keys in sight, those with the most first; None if all see as many.

    Tiles of a request stay together, because they share keys in L2.
    """
    keys = requests.kv_len
    if masking.window_left >= 0:
        keys = np.minimum(keys, masking.keys_among(requests.qo_len + masking.window_left))
    if not keys.size or are_equal(keys):
        return None
    if requests.turn is not None:
        return np.lexsort((-keys, requests.turn))
    # A sort of numbers is faster than one of indices: keys in the high half, downwards, and the
    # index in the low one.
    indices = _INDICES[: keys.size] if keys.size <= _INDICES.size else np.arange(keys.size)
    packed = indices - (keys << _HIGH_HALF)
    packed.sort()
    packed &= _LOW_HALF
    return packed


def max_of(numbers: np.ndarray) -> int:
    """The largest integer. A reduction of a short array takes four times as long."""
    return int(numbers[numbers.argmax()])


def min_of(numbers: np.ndarray) -> int:
    """The smallest integer."""
    return int(numbers[numbers.argmin()])


def sum_of(numbers: np.ndarray) -> int:
    """The sum of integers. A product with ones takes a third of the time of a short sum."""
    if numbers.size > _MAX_REMEMBERED:
        return int(np.add.reduce(numbers))
    return int(numbers.dot(_ONES[: numbers.size]))


def are_equal(numbers: np.ndarray) -> bool:
    """Whether these are one number, some times."""
    return bool(numbers[0] == numbers[-1]) and min_of(numbers) == max_of(numbers)


def count_work(
    requests: BatchRequests,
    tiles: Tiles,
    group_size: int,
    shape: TileShape,
    masking: Masking,
    num_keys: int = -1,
) -> Work:
    """How many key tiles each tile of rows visits (under a custom mask: at most).

    num_keys: of all requests, if they were counted.
    """
    request, first_row = tiles
    kv_len = requests.kv_len if request is None else requests.kv_len[request]
    if first_row is None and masking.window_left < 0:
        # The last row of a request sees all its keys.
        if request is None and are_equal(kv_len):
            longest = -(-int(kv_len[0]) // shape.tile_kv)
            total = longest * kv_len.size
            return Work(None, longest, total, kv_len.size, total)
        spans = kv_len
    else:
        spans = _spans(requests, tiles, kv_len, group_size, shape, masking)
    key_tiles = (spans + (shape.tile_kv - 1)) // shape.tile_kv
    longest = num_read = 0
    if masking.window_left < 0:
        # The first tile is the last one of the longest request.
        if kv_len.size:
            maximum = int(kv_len[0]) if requests.turn is None else max_of(kv_len)
            longest = -(-maximum // shape.tile_kv)
        num_keys = sum_of(requests.kv_len) if num_keys < 0 else num_keys
        num_read = num_keys // shape.tile_kv
    elif key_tiles.size:
        longest = max_of(key_tiles)
    shares_keys = first_row is not None
    return Work(key_tiles, longest, sum_of(key_tiles), key_tiles.size, num_read, shares_keys)


def _spans(
    requests: BatchRequests,
    tiles: Tiles,
    kv_len: np.ndarray,
    group_size: int,
    shape: TileShape,
    masking: Masking,
) -> np.ndarray:
    """The keys from the first to the last that any row of a tile sees; of shared ones at most."""
    is_shared, is_plain = requests.is_shared, masking.window_left < 0 and masking.share is None
    if tiles.first_row is not None and is_plain and is_shared is None:
        assert tiles.request is not None
        last = tiles.first_row + (shape.tile_q - 1)
        last //= group_size
        hidden = requests.kv_len - requests.qo_len
        return masking.ends(last, hidden, tiles.request, kv_len)
    qo_len = requests.qo_len if tiles.request is None else requests.qo_len[tiles.request]
    first_row = 0 if tiles.first_row is None else tiles.first_row
    if is_shared is not None and tiles.request is not None:
        is_shared = is_shared[tiles.request]
    # Only a window asks for the first one.
    first = first_row // group_size if masking.window_left >= 0 else 0
    last_of_all = (first_row + (shape.tile_q - 1)) // group_size
    others = None
    if masking.share is not None and requests.key_offset is not None:
        others = requests.key_offset
        others = others if tiles.request is None else others[tiles.request]
    return masking.span_lengths(
        first, last_of_all, qo_len, kv_len, is_shared, shape.tile_kv, others
    )


def _splits(
    work: Work, num_kv_heads: int, max_rows: int, shape: TileShape, splitting: Splitting
) -> np.ndarray | None:
    """In how many parts each tile's keys are split; None: none is."""
    chunk = _chunk(work, num_kv_heads, max_rows, shape, splitting)
    return None if chunk is None else split_after(work, chunk.size)


def _chunk(
    work: Work, num_kv_heads: int, max_rows: int, shape: TileShape, splitting: Splitting
) -> Chunk | None:
    """After how many key tiles keys are split, and when all is done then, if that was asked."""
    if work.longest <= 1:
        return None
    if splitting.tokens:
        return Chunk(max(1, splitting.tokens // shape.tile_kv), math.inf)
    per_wave = max(1, shape.num_slots // num_kv_heads)
    # Parts no shorter than this add no more blocks than these waves have.
    minimum = -(-work.total // max(1, int(splitting.waves * per_wave)))
    if shape.times is not None:
        size = best_split(work, num_kv_heads, shape.slots, shape.times).chunk or work.longest
        return Chunk(max(size, minimum), math.inf)
    minimum = max(minimum, shape.min_part(work.longest, max_rows))
    return best_chunk(work, per_wave, shape.costs(max_rows), minimum)


def _cuts(
    works: TileWork, per_wave: int, shape: TileShape, splitting: Splitting, chunk: Chunk
) -> Cuts | None:
    """Equal shares of all keys, if those are done sooner than equal parts of each tile's."""
    if splitting.is_given or not works.can_be_cut(shape):
        return None
    requests, costs = works.requests, shape.costs(works.max_rows)
    count = requests.kv_len.size
    num_tiles = -(-works.max_rows // shape.tile_q)
    shares = shares_of(count, num_tiles, per_wave, splitting.waves)
    if shares is None:
        return None
    key_tiles = -(-requests.kv_len // shape.tile_kv)
    size = shares.size_of(sum_of(key_tiles) + shares.overhead * count)
    limit = chunk.time if chunk.size < works.of(shape).longest else MIN_GAIN * chunk.time
    return cut(key_tiles, shares) if shares.time(size, count, costs) < limit else None


def shares_of(num_requests: int, num_tiles: int, per_wave: int, waves: float) -> Shares | None:
    """The shares of requests of so many tiles of rows, which lie beside each other; None if there
    is one, or more than a few for each request, the parts that cuts add are more than these waves
    have, or lists would be too long."""
    count = per_wave // num_tiles
    if not 2 <= count <= SHARES_OF_A_REQUEST * num_requests:
        return None
    if num_requests > MAX_CUT_REQUESTS or (count - 1) * num_tiles > waves * per_wave:
        return None
    if 2 * num_requests * num_tiles + per_wave > MAX_LINKED_ITEMS:
        return None
    return Shares(count)


def alike_splits(
    work: Work, num_kv_heads: int, max_rows: int, shape: TileShape, splitting: Splitting
) -> int:
    """In how many parts the keys of every tile of rows are split, by kernels without a work
    list."""
    if not work.num_tiles or not splitting.may_split:
        return 1
    splits = _splits(work, num_kv_heads, max_rows, shape, splitting)
    return 1 if splits is None else max_of(splits)


def split_after(work: Work, chunk: int) -> np.ndarray | None:
    """In how many parts each tile's keys are split, if after `chunk` key tiles; None: none is."""
    if chunk >= work.longest:
        return None
    return np.maximum(-(-work.array() // chunk), 1)


def short_last(
    tiles: Tiles, work: Work, splits: np.ndarray | None, items_per_wave: int
) -> tuple[Tiles, np.ndarray | None]:
    """The tiles and their splits with the shortest at the end, longest first.

    They are as many as keep all blocks busy for some times the longest, whose ends are as far
    apart. Before them the tiles of a request stay together, because they share keys in L2.
    """
    if work.key_tiles is None or tiles.first_row is None:
        return tiles, splits
    sizes = work.key_tiles if splits is None else -(-work.key_tiles // splits)
    if not np.count_nonzero(sizes[1:] > sizes[:-1]):
        return tiles, splits
    order = -sizes
    maximum = _SHORT_WAVES * items_per_wave
    if sizes.size > maximum or splits is not None:  # else all are short
        costs = sizes + BLOCK_OVERHEAD
        work_up_to = np.bincount(sizes, costs if splits is None else costs * splits).cumsum()
        longest = work_up_to.size - 1 + BLOCK_OVERHEAD
        # All that are no short ones are alike here, so that they stay in order.
        np.maximum(order, -int(work_up_to.searchsorted(maximum * longest)), out=order)
    order = order.argsort(kind="stable")
    request = None if tiles.request is None else tiles.request[order]
    return Tiles(request, tiles.first_row[order]), None if splits is None else splits[order]


@lru_cache(maxsize=64)
def _uniform_rows(num_requests: int, qo_len: int) -> np.ndarray:
    """Items of requests with equally many rows: all but what their keys decide."""
    table = np.zeros((num_requests, len(WORK_FIELDS)), np.int32)
    table[:, 0] = np.arange(num_requests) * qo_len
    table[:, 1] = qo_len
    table[:, NUM_SPLITS] = 1
    return table


def _table(requests: BatchRequests, tiles: Tiles) -> np.ndarray:
    """Items whose keys are not split."""
    table = _rows_of(requests)
    if tiles.request is not None:
        table = table.take(tiles.request, axis=0)
    if tiles.first_row is not None:
        table[:, _FIRST_ROW] = tiles.first_row
    return table


def _rows_of(requests: BatchRequests) -> np.ndarray:
    """An item of each request, of its first tile."""
    count = requests.qo_len.size
    if requests.uniform >= 0 and count <= _MAX_REMEMBERED:
        table = _uniform_rows(count, requests.uniform).copy()
    else:
        table = np.zeros((count, len(WORK_FIELDS)), np.int32)
        table[:, 0] = requests.q_start
        table[:, 1] = requests.qo_len
        table[:, NUM_SPLITS] = 1
    table[:, 2] = requests.kv_start
    table[:, 3] = requests.kv_len
    if requests.mask_start is not None:
        starts = np.ascontiguousarray(requests.mask_start, np.int64)
        table[:, 8:10] = starts.view(np.int32).reshape(-1, 2)
    if requests.key_offset is not None:
        table[:, _KEY_OFFSET] = requests.key_offset
    return table


def build(requests: BatchRequests, tiles: Tiles, splits: np.ndarray | None) -> BatchPlan:
    """The work list of tiles whose keys are split in so many parts."""
    table = _table(requests, tiles)
    if splits is None:
        return BatchPlan(table, _NO_MERGES, 0)
    starts = splits.cumsum()
    starts -= splits
    num_split = np.count_nonzero(splits > 1)
    if num_split and np.count_nonzero(splits[:num_split] > 1) == num_split:
        # The tiles with the most keys come first, and so do those that are split.
        merges = starts[:num_split]
        num_states = int(merges[-1] + splits[num_split - 1])
        np.minimum(starts, num_states, out=table[:, _FIRST_STATE])
        np.minimum(np.arange(splits.size), num_split, out=table[:, _SPLIT_TILE])
    else:
        is_split = splits > 1
        states = splits * is_split
        state_ends = states.cumsum()
        table[:, _FIRST_STATE] = state_ends - states
        table[:, _SPLIT_TILE] = is_split.cumsum() - is_split
        merges, num_states = starts[is_split], int(state_ends[-1])
    table[:, NUM_SPLITS] = splits
    table[:, _SPLIT] = starts
    items = table.repeat(splits, axis=0)
    split = items[:, _SPLIT]
    np.subtract(np.arange(len(items), dtype=np.int32), split, out=split)
    return BatchPlan(items, merges.astype(np.int32), num_states, max_parts=max_of(splits))


def build_cuts(requests: BatchRequests, tiles: Tiles, cuts: Cuts) -> BatchPlan:
    """The work list of requests that are cut: all tiles of rows of a request alike. Blocks begin
    with the items of the first parts of shares, and go on by links."""
    table = _table(requests, tiles)
    each = len(table) // cuts.num_splits.size  # tiles of rows of a request
    splits = cuts.num_splits.repeat(each)
    is_split = splits > 1
    states = splits * is_split
    table[:, NUM_SPLITS] = splits
    table[:, _FIRST_STATE] = states.cumsum() - states
    table[:, _SPLIT_TILE] = is_split.cumsum() - is_split
    tile, num_blocks = np.arange(each), cuts.num_heads * each
    chosen = ((cuts.request * each)[:, None] + tile).reshape(-1)
    items = table.take(chosen, axis=0)
    items[:, _SPLIT] = cuts.split.repeat(each)
    following = num_blocks + (cuts.follower * each)[:, None] + tile
    following *= (cuts.follower >= 0)[:, None]
    parts = pack(cuts.begin.repeat(each), cuts.end.repeat(each), following.reshape(-1))
    items[:, _LISTED : _LISTED + 2] = parts.view(np.int32).reshape(-1, 2)
    (firsts,) = (is_split[chosen] & (items[:, _SPLIT] == 0)).nonzero()
    merges = np.empty(firsts.size, np.int32)
    merges[items[firsts, _SPLIT_TILE]] = firsts
    num_states, max_parts = int(states.sum()), max_of(cuts.num_splits)
    return BatchPlan(items, merges, num_states, max_parts=max_parts, num_blocks=num_blocks)


def listed_parts(items: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """cuts.unpack of the items of a kernel that takes cuts."""
    words = np.ascontiguousarray(items[:, _LISTED : _LISTED + 2], np.int32)
    return unpack(words.view(np.int64).reshape(-1))


def build_states(requests: BatchRequests, tiles: Tiles, splits: np.ndarray | None) -> BatchPlan:
    """The same, but every tile leaves states, and none is merged with only its own."""
    table = _table(requests, tiles)
    count = len(table)
    if splits is None:
        splits = np.ones(count, np.int64)
    ends = splits.cumsum()
    starts = ends - splits
    table[:, NUM_SPLITS] = splits
    table[:, _FIRST_STATE] = starts
    table[:, _SPLIT_TILE] = -1
    items = table.repeat(splits, axis=0)
    items[:, _SPLIT] = np.arange(len(items)) - starts.repeat(splits)
    about = np.zeros((count, 4), np.int64)
    about[:, 0] = np.arange(count) if tiles.request is None else tiles.request
    about[:, 1] = 0 if tiles.first_row is None else tiles.first_row
    about[:, 2], about[:, 3] = starts, splits
    return BatchPlan(items, _NO_MERGES, int(ends[-1]) if count else 0, about)
