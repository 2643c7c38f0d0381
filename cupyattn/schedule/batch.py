"""The plan of a batch: a work list of (request, tile of query rows, split of its keys).

Every item is one block for each KV head. Items are ordered longest first, so that the GPU, which
deals blocks to whatever is free, ends with the short ones; keys are split where even that would
leave it waiting for a few long ones. The kernels derive an item's keys with the arithmetic of
`schedule.single.key_span` and `tile_span`.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ..errors import PlanError

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
    "padding",
)
_SPLIT, _NUM_SPLITS, _FIRST_STATE, _SPLIT_TILE = 5, 6, 7, 10

# In the time of a key tile: what a block pays besides its tiles, and what a merge costs at all.
_BLOCK_OVERHEAD = 2.0
_MERGE_OVERHEAD = 3.0
# Splits make at most this many waves of blocks more: it bounds the list of a captured graph.
_MAX_WAVES = 4
# A split that gains less than this is not worth its merge.
_WORTHWHILE = 0.95
# Tiles whose longest is at most this many times their mean are planned as if all were as long.
_EVEN = 1.15


@dataclass(frozen=True, slots=True)
class BatchRequests:
    """The lengths of a batch's requests and where their parts begin: int64 NumPy arrays [B].

    q_start     first row of q, o and lse
    kv_start    paged: first entry of kv_indices; ragged: first row of k and v
    mask_start  first byte of the packed mask, or None without one
    """

    qo_len: np.ndarray
    kv_len: np.ndarray
    q_start: np.ndarray
    kv_start: np.ndarray
    mask_start: np.ndarray | None = None

    def select(self, chosen: np.ndarray) -> BatchRequests:
        """The requests at these indices."""
        mask_start = None if self.mask_start is None else self.mask_start[chosen]
        return BatchRequests(
            self.qo_len[chosen],
            self.kv_len[chosen],
            self.q_start[chosen],
            self.kv_start[chosen],
            mask_start,
        )


@dataclass(frozen=True, slots=True)
class TileShape:
    """What a plan must know of a kernel.

    num_slots   blocks that run at a time
    state_cost  what writing and merging one partial state costs, in the time of a key tile
    """

    tile_q: int
    tile_kv: int
    num_slots: int
    state_cost: float = 0.0


@dataclass(frozen=True, slots=True)
class Masking:
    """Which keys rows see, as far as a plan cares."""

    causal: bool
    window_left: int
    has_mask: bool = False


@dataclass(frozen=True, slots=True)
class Splitting:
    """How keys may be split: by balance, not at all, or every so many tokens (tokens > 0)."""

    may_split: bool = True
    tokens: int = 0


@dataclass(frozen=True, slots=True)
class BatchPlan:
    """A work list.

    items       int32 [num_items, 12], fields WORK_FIELDS
    merges      int32 [num_split_tiles]: the first item of each tile whose keys are split
    num_states  partial states of one KV head
    """

    items: np.ndarray
    merges: np.ndarray
    num_states: int


@dataclass(frozen=True, slots=True)
class Limits:
    """The most that any plan for a captured graph may have."""

    num_items: int
    num_split_tiles: int
    num_states: int


def plan_batch(
    requests: BatchRequests,
    group_size: int,
    num_kv_heads: int,
    shape: TileShape,
    masking: Masking,
    splitting: Splitting,
) -> BatchPlan:
    """Plan the requests of a batch that share a kernel. Those without query rows get no work."""
    rows = requests.qo_len * group_size
    num_tiles = -(-rows // shape.tile_q)
    order = _longest_first(requests, num_tiles, masking)
    tiles = _tiles(num_tiles, order, shape.tile_q)
    key_tiles = _key_tiles(requests, tiles, group_size, shape, masking)
    splits = _splits(key_tiles, num_kv_heads, shape, splitting)
    return _build(requests, tiles, splits)


def limits(
    num_requests: int,
    num_rows: int,
    num_tokens: int,
    group_size: int,
    num_kv_heads: int,
    shape: TileShape,
    splitting: Splitting,
) -> Limits:
    """Limits of any plan of so many requests, query rows (tokens) and keys.

    num_tokens matters only where the size of splits is fixed.
    """
    num_tiles = num_requests + num_rows * group_size // shape.tile_q
    if not splitting.may_split:
        return Limits(num_tiles, 0, 0)
    if splitting.tokens:
        more = num_tokens * -(-num_tiles // max(1, num_requests)) // splitting.tokens
    else:
        more = _MAX_WAVES * shape.num_slots // num_kv_heads
    return Limits(num_tiles + more, min(num_tiles, more), min(num_tiles, more) + more)


@dataclass(frozen=True, slots=True)
class _Tiles:
    """Tiles of query rows, in the order of the list: the request and first row of each."""

    request: np.ndarray
    first_row: np.ndarray


def _longest_first(requests: BatchRequests, num_tiles: np.ndarray, masking: Masking) -> np.ndarray:
    """Requests with rows, those with the most keys in sight first.

    Tiles of a request stay together, because they share keys in L2.
    """
    keys = requests.kv_len
    if masking.window_left >= 0:
        keys = np.minimum(keys, requests.qo_len + masking.window_left)
    if len(keys) and keys.min() == keys.max():
        order = np.arange(len(keys))
    else:
        order = np.argsort(-keys, kind="stable")
    return order if num_tiles.all() else order[num_tiles[order] > 0]


def _tiles(num_tiles: np.ndarray, order: np.ndarray, tile_q: int) -> _Tiles:
    """The last tile of each request, which sees the most keys, comes first."""
    counts = num_tiles[order]
    if len(counts) == 0 or counts.max() == 1:
        return _Tiles(order, np.zeros(len(order), np.int64))
    ends = np.cumsum(counts)
    index = np.repeat(ends, counts) - 1 - np.arange(ends[-1])
    return _Tiles(np.repeat(order, counts), index * tile_q)


def _key_tiles(
    requests: BatchRequests,
    tiles: _Tiles,
    group_size: int,
    shape: TileShape,
    masking: Masking,
) -> np.ndarray:
    """How many key tiles each tile of rows visits (under a custom mask: at most)."""
    qo_len, kv_len = requests.qo_len[tiles.request], requests.kv_len[tiles.request]
    begin: np.ndarray | int = 0
    end = kv_len
    if masking.causal:
        last_row = tiles.first_row + (shape.tile_q - 1)
        last = np.minimum(last_row // group_size, qo_len - 1)
        end = np.minimum(kv_len, last + (kv_len - qo_len + 1))
    if masking.window_left >= 0:
        first = tiles.first_row // group_size
        begin = np.maximum(first + (kv_len - qo_len - masking.window_left), 0)
        if masking.has_mask:
            begin = begin // shape.tile_kv * shape.tile_kv
    return -(-np.maximum(end - begin, 0) // shape.tile_kv)


def _splits(
    key_tiles: np.ndarray, num_kv_heads: int, shape: TileShape, splitting: Splitting
) -> np.ndarray | None:
    """In how many parts each tile's keys are split; None: none is."""
    if not splitting.may_split or len(key_tiles) == 0:
        return None
    longest = int(key_tiles.max())
    if longest <= 1:
        return None
    if splitting.tokens:
        chunk = max(1, splitting.tokens // shape.tile_kv)
    else:
        chunk = _best_chunk(key_tiles, longest, num_kv_heads, shape)
    if chunk >= longest:
        return None
    return np.maximum(-(-key_tiles // chunk), 1)


def _best_chunk(key_tiles: np.ndarray, longest: int, num_kv_heads: int, shape: TileShape) -> int:
    """The most key tiles of one block, by an estimate of when the last block is done.

    Example: 64 requests, one of 1,024 key tiles and the others of 4, 8 heads, 264 slots: unsplit
    the long one takes 1,024 tiles' time, in parts of 39 all slots are busy to the end.
    """
    items_per_wave = max(1, shape.num_slots // num_kv_heads)
    total, num_tiles = int(key_tiles.sum()), len(key_tiles)
    is_even = longest * num_tiles <= _EVEN * total

    def time(chunk: int) -> float:
        if is_even:
            parts = -(-longest // chunk)
            num_items = num_tiles * parts
            done = -(-num_items // items_per_wave) * (longest / parts + _BLOCK_OVERHEAD)
        else:
            num_items = int(_ceil(key_tiles, chunk).sum()) if chunk < longest else num_tiles
            work = (total + num_items * _BLOCK_OVERHEAD) / items_per_wave
            # Longest first, the short ones fill the end, if there are any to come.
            last = key_tiles.min() if num_items >= 2 * items_per_wave else chunk
            done = max(work + 0.5 * min(chunk, last), chunk + _BLOCK_OVERHEAD)
        if chunk >= longest:
            return done
        return done + _MERGE_OVERHEAD + shape.state_cost * num_items / items_per_wave

    best, best_time = longest, time(longest) * _WORTHWHILE
    if best_time <= total / items_per_wave + _BLOCK_OVERHEAD:
        return longest
    for chunk in _candidates(total, num_tiles, longest, items_per_wave, is_even):
        estimate = time(chunk)
        if estimate < best_time:
            best, best_time = chunk, estimate
    return best


def _ceil(key_tiles: np.ndarray, chunk: int) -> np.ndarray:
    """How many parts of at most `chunk` tiles each has; float, for integers divide slowly."""
    return np.maximum(np.ceil(key_tiles * (1.0 / chunk)), 1.0)


def _candidates(
    total: int, num_tiles: int, longest: int, items_per_wave: int, is_even: bool
) -> list[int]:
    """Sizes of parts worth a look. None makes more than _MAX_WAVES more waves of blocks."""
    if is_even:
        parts = {waves * items_per_wave // num_tiles for waves in range(1, _MAX_WAVES + 1)}
        chunks = {-(-longest // part) for part in parts if part > 1}
    else:
        chunks = {-(-total // (items_per_wave * waves)) for waves in range(1, _MAX_WAVES + 1)}
    least = -(-total // (items_per_wave * _MAX_WAVES))
    return sorted(chunk for chunk in chunks if least <= chunk < longest)


def _build(requests: BatchRequests, tiles: _Tiles, splits: np.ndarray | None) -> BatchPlan:
    table = np.zeros((len(tiles.request), len(WORK_FIELDS)), np.int32)
    fields = requests.q_start, requests.qo_len, requests.kv_start, requests.kv_len
    for column, values in enumerate(fields):
        table[:, column] = values[tiles.request]
    table[:, 4] = tiles.first_row
    table[:, _NUM_SPLITS] = 1
    if requests.mask_start is not None:
        starts = requests.mask_start[tiles.request].astype(np.int64, copy=False)
        table[:, 8:10] = starts.view(np.int32).reshape(-1, 2)
    if splits is None:
        return BatchPlan(table, np.zeros(0, np.int32), 0)
    is_split = splits > 1
    table[:, _NUM_SPLITS] = splits
    states = np.where(is_split, splits, 0)
    state_ends = np.cumsum(states)
    table[:, _FIRST_STATE] = state_ends - states
    split_tiles = np.cumsum(is_split)
    table[:, _SPLIT_TILE] = split_tiles - is_split
    ends = np.cumsum(splits)
    items = np.repeat(table, splits, axis=0)
    items[:, _SPLIT] = np.arange(ends[-1]) - np.repeat(ends - splits, splits)
    merges = (ends - splits)[is_split].astype(np.int32)
    return BatchPlan(items, merges, int(state_ends[-1]))


def check_limits(plan: BatchPlan, limits: Limits) -> None:
    """Raise PlanError if a plan is larger than a captured graph has room for."""
    for name, have, most in (
        ("blocks", len(plan.items), limits.num_items),
        ("split tiles", len(plan.merges), limits.num_split_tiles),
        ("partial states", plan.num_states, limits.num_states),
    ):
        if have > most:
            raise PlanError(
                f"plan: {have} {name}, but the captured graph has room for {most}; plan at first "
                "with the largest batch, or capture again"
            )
