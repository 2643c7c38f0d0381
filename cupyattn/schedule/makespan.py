"""When the last block of a launch is done: a simulation of blocks that a GPU deals out, the longest
first, in microseconds. By it prompts get their tiles, and splits of their keys.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from .balance import MIN_GAIN, ROUNDED, Split, Work, ones

# A launch of this many waves takes as long as its slots are busy, and half its shortest block.
_MANY_WAVES = 4
# Launches whose tiles share keys take so many times what memory takes for them, at least.
_SHARED_READING = 1.125
# Splits are tried where the last block ends later than this many times the mean of all.
_UNEVEN = 1.1
# Waves of blocks that splits are tried for.
_SPLIT_WAVES = (1, 2, 3)
# Waves that parts fill with room for half a part, or a whole one, of each tile.
_FULL_WAVES = (1, 2)
# Splits of few tiles are tried for all slots, for half and for a quarter of them.
_SPLIT_SHARES = (1, 2, 4)


class TileTimes(NamedTuple):
    """What a kernel takes in microseconds, of a card (choose/card.py).

    launch    from the launch to the first item, and from the last to the end
    item      an item besides its key tiles
    key_tile  with all slots busy
    single_block_factor  the share of key_tile and item where no other block is on the SM
    merge     the launch that merges states
    state     writing and reading one of them
    read      what memory takes at least for the keys and values of a key tile
    row       the same for a row of Q and of the output
    mha_factor  times as long item and key_tile take where each query head has a KV head of its
              own, whose keys few blocks share
    """

    launch: float
    item: float
    key_tile: float
    single_block_factor: float = 1.0
    merge: float = 3.5
    state: float = 0.0
    read: float = 0.0
    row: float = 0.0
    mha_factor: float = 1.0

    def of_group(self, group_size: int) -> TileTimes:
        """The times where so many query heads share a KV head."""
        if group_size > 1 or self.mha_factor == 1.0:
            return self
        item, key_tile = self.mha_factor * self.item, self.mha_factor * self.key_tile
        return self._replace(item=item, key_tile=key_tile, mha_factor=1.0)

    def total_time(self, work: Work, num_kv_heads: int) -> float:
        """What all items take, one after another."""
        return (work.total * self.key_tile + work.num_tiles * self.item) * num_kv_heads

    def lower_bound(self, total: float, num_tiles: int, num_kv_heads: int, slots: Slots) -> float:
        """What a launch of so many tiles, or more, takes at least that visit so many key tiles.

        Splits make more items than tiles, so that where tiles are more than SMs no block is alone.
        """
        busy = (total * self.key_tile + num_tiles * self.item) * num_kv_heads / slots.blocks
        if num_tiles * num_kv_heads <= slots.num_sms:
            busy *= self.single_block_factor
        return ROUNDED * (self.launch + busy)


class Slots(NamedTuple):
    """How many blocks run at a time, and on how many SMs."""

    blocks: int
    num_sms: int


def makespan(
    times: np.ndarray, slots: int, reading: float = 0.0, many_waves: int = _MANY_WAVES
) -> float:
    """When blocks that take so long are done, the longest first, each in the first free slot.

    They are dealt a wave at a time, which is the same unless a wave's blocks differ by more than
    the shortest of the wave before. Example: 176 blocks of 13 to 1 tiles on 132 slots are done
    when the longest is.

    reading: what memory takes for the keys of all. Blocks wait for it while they ask together for
    more than it brings. The last ones ask for less: memory that then idles has to be added.
    many_waves: launches of more are not simulated.
    """
    if not times.size:
        return 0.0
    if times.size > many_waves * slots:
        busy = max(float(np.add.reduce(times)) / slots, reading)
        return max(float(times[0]), busy + 0.5 * float(times[-1]))
    if times.size <= slots:
        ends = times
    else:
        ends = times[slots - 1 :: -1].copy()
        for begin in range(slots, times.size, slots):
            wave = times[begin : begin + slots]
            if begin > slots:  # the first wave ends in order
                ends.sort()
            ends[: wave.size] += wave
    return _end_with_memory(ends, reading) if reading else float(np.maximum.reduce(ends))


def _end_with_memory(ends: np.ndarray, reading: float) -> float:
    """When the last block is done whose ends these would be if none waited for memory."""
    # What each block asks for of all that memory brings.
    asked = reading / float(np.add.reduce(ends))
    if asked * ends.size <= 1.0:
        return float(np.maximum.reduce(ends))
    ends = np.sort(ends)
    running = np.arange(ends.size, 0, -1)
    rates = np.maximum(1.0, asked * running)
    return float(np.add.reduce(np.diff(ends, prepend=0.0) * rates))


def launch_time(
    sizes: np.ndarray, num_kv_heads: int, slots: Slots, times: TileTimes, reading: float = 0.0
) -> float:
    """When a launch is done whose items visit so many key tiles, each for all key heads."""
    sizes = sizes.copy()
    sizes.sort()
    return times.launch + _items_time(sizes[::-1], num_kv_heads, slots, times, reading)


def _items_time(
    sizes: np.ndarray, num_kv_heads: int, slots: Slots, times: TileTimes, reading: float
) -> float:
    """launch_time without the launch itself, of sizes that are sorted, the largest first."""
    num_items = sizes.size * num_kv_heads
    share = times.single_block_factor if num_items <= slots.num_sms else 1.0
    if 0 < num_items <= slots.blocks and (not reading or sizes[0] == sizes[-1]):
        # One wave, whose longest ends last. Blocks that are alike wait alike for memory.
        return max(share * (times.key_tile * float(sizes[0]) + times.item), reading)
    items = times.key_tile * sizes
    items += times.item
    if num_kv_heads > 1:
        items = items.repeat(num_kv_heads)
    return share * makespan(items, slots.blocks, reading / share)


def best_split(
    work: Work,
    num_kv_heads: int,
    slots: Slots,
    times: TileTimes,
    may_split: bool = True,
    limit: float = math.inf,
) -> Split:
    """The split of keys after which a launch, and the merge that a split needs, end soonest. The
    time is no less than the limit, but nothing else is said of it, if they cannot end within that.

    It is remembered with the work, for a plan asks again what the choice of its tiles has asked.
    """
    key = num_kv_heads, slots, times, may_split
    cached = work.splits.get(key)
    if cached is None:
        cached = _best_split(work, num_kv_heads, slots, times, may_split, limit)
        if cached.time < limit:
            work.splits[key] = cached
    return cached


def _best_split(
    work: Work,
    num_kv_heads: int,
    slots: Slots,
    times: TileTimes,
    may_split: bool,
    maximum: float,
) -> Split:
    """best_split; `most` is the limit."""
    soonest = times.lower_bound(work.total, work.num_tiles, num_kv_heads, slots)
    # Whole tiles take as long as the longest, and parts a merge.
    share = times.single_block_factor if work.num_tiles * num_kv_heads <= slots.num_sms else 1.0
    longest = times.launch + share * (times.item + times.key_tile * work.longest)
    if min(max(soonest, longest), soonest + times.merge) >= maximum:
        return Split(0, math.inf)
    reading = (times.read * work.num_read + times.row * work.num_rows) * num_kv_heads
    minimum = 0.0
    if work.shares_keys:  # blocks do not ask memory for all that they read
        minimum, reading = times.launch + _SHARED_READING * reading, 0.0
    unsplit = _unsplit_time(work, num_kv_heads, slots, times, reading)
    whole = Split(0, max(minimum, times.launch + unsplit))
    if not may_split or work.longest <= 1:
        return whole
    if whole.time - times.launch <= _UNEVEN * times.total_time(work, num_kv_heads) / slots.blocks:
        return whole
    best, limit = whole, min(MIN_GAIN * whole.time, maximum)
    if soonest + times.merge >= limit:
        return whole
    for split in _parts(work, num_kv_heads, slots.blocks):
        merge = times.merge + times.state * (split.num_parts - split.num_whole) * num_kv_heads
        of_parts = _parts_time(split, work, num_kv_heads, slots, times, reading, limit - merge)
        time = max(of_parts, minimum) + merge
        if time < limit:
            best, limit = Split(split.chunk, time), time
    return best


def _unsplit_time(
    work: Work, num_kv_heads: int, slots: Slots, times: TileTimes, reading: float
) -> float:
    """What whole tiles take besides the launch: the same with launches behind it and without."""
    if work.num_tiles * num_kv_heads > _MANY_WAVES * slots.blocks:  # as makespan has it
        busy = max(times.total_time(work, num_kv_heads) / slots.blocks, reading)
        longest, shortest = (times.item + times.key_tile * x for x in (work.longest, work.shortest))
        return max(longest, busy + 0.5 * shortest)
    key = num_kv_heads, slots, times.item, times.key_tile, times.single_block_factor, reading
    cached = work.unsplit.get(key)
    if cached is None:
        sizes = work.descending()
        cached = work.unsplit[key] = _items_time(sizes, num_kv_heads, slots, times, reading)
    return cached


def _parts_time(
    split: _Parts,
    work: Work,
    num_kv_heads: int,
    slots: Slots,
    times: TileTimes,
    reading: float,
    limit: float,
) -> float:
    """When a launch of these parts is done; infinite if that cannot be within the limit."""
    num_items = split.num_parts * num_kv_heads
    longest = times.item + times.key_tile * split.longest
    busy = work.total * num_kv_heads * times.key_tile + num_items * times.item
    share = times.single_block_factor if num_items <= slots.num_sms else 1.0
    is_one_wave = num_items <= slots.blocks
    if is_one_wave and (split.lengths.size == 1 or reading * num_items <= share * busy):
        return times.launch + max(share * longest, reading)  # the longest ends last
    soonest = times.launch + max(busy / slots.blocks, longest, reading)
    if not is_one_wave and soonest >= limit:
        return math.inf
    items = split.lengths.repeat(split.parts.astype(np.int64))
    items.sort()
    return times.launch + _items_time(items[::-1], num_kv_heads, slots, times, reading)


class _Parts(NamedTuple):
    """Keys split after `chunk` key tiles: the parts of each tile and how long they are (of all
    tiles at once where these are equal), how many they are, how many of them are a whole tile, and
    the longest."""

    chunk: int
    parts: np.ndarray
    lengths: np.ndarray
    num_parts: int
    num_whole: int
    longest: float


def _parts(work: Work, num_kv_heads: int, num_slots: int) -> list[_Parts]:
    """Each split that is tried; shapes of tiles of one size and as many slots share them."""
    key = num_kv_heads, num_slots
    cached = work.parts.get(key)
    if cached is None:
        chunks = _chunks(work, num_kv_heads, num_slots)
        cached = work.parts[key] = _make_parts(work, chunks) if chunks else []
    return cached


def _make_parts(work: Work, chunks: list[int]) -> list[_Parts]:
    if work.key_tiles is None:
        return [_parts_of_equal(work, chunk) for chunk in chunks]
    sizes = work.descending()
    parts = sizes / np.array(chunks, np.float64)[:, None]
    np.ceil(parts, out=parts)
    np.maximum(parts, 1.0, out=parts)
    if work.splits_alike:
        parts[:] = parts[:, :1]
    lengths = sizes / parts
    num_parts = map(int, parts.dot(ones(sizes.size)).tolist())
    num_whole = np.count_nonzero(parts == 1.0, axis=1).tolist()
    longest = np.maximum.reduce(lengths, axis=1).tolist()
    return [
        _Parts._make(row)
        for row in zip(chunks, parts, lengths, num_parts, num_whole, longest, strict=True)
    ]


def _parts_of_equal(work: Work, chunk: int) -> _Parts:
    parts = -(-work.longest // chunk)
    num_parts, length = parts * work.num_tiles, work.longest / parts
    num_whole = work.num_tiles if parts == 1 else 0
    return _Parts(chunk, np.array([num_parts]), np.array([length]), num_parts, num_whole, length)


def _chunks(work: Work, num_kv_heads: int, slots: int) -> list[int]:
    """Key tiles of a part by which all parts are some whole waves of blocks."""
    total, num_items = work.total * num_kv_heads, max(1, work.num_tiles * num_kv_heads)
    result = {-(-total // (slots * waves)) for waves in _SPLIT_WAVES}
    if work.key_tiles is not None:
        # The last part of a tile is not full, and a few blocks too many take a wave more.
        rooms = [slots * waves - num_items * half // 2 for waves in _FULL_WAVES for half in (1, 2)]
        result |= {-(-total // room) for room in rooms if room > num_items}
    # As many parts of each tile as fill the slots, or a share of them, which leaves fewer states:
    # parts of equal tiles end together.
    for share in _SPLIT_SHARES:
        parts, maximum = slots // (share * num_items), slots // (share * num_kv_heads)
        if parts > 1:
            result.add(-(-work.longest // parts))
        if work.key_tiles is not None and maximum > work.num_tiles:
            result.add(chunk_of_parts(work.key_tiles, maximum))
    return sorted(chunk for chunk in result if chunk < work.longest)


def chunk_of_parts(sizes: np.ndarray, maximum: int) -> int:
    """Key tiles of a part so that uneven tiles have at most so many parts, and not many fewer.

    Example: tiles of 361, 361, 103 and 103 key tiles have 18 parts of 58, and 16 of 61.
    """
    sizes, all_ones = sizes.astype(np.float64), ones(sizes.size)
    chunk = -(-int(sizes.dot(all_ones)) // maximum)
    while True:
        num_parts = int(np.ceil(sizes / chunk).dot(all_ones))
        if num_parts <= maximum:
            return chunk
        chunk += max(1, chunk * (num_parts - maximum) // (num_parts + maximum))
