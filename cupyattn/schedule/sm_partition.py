"""How many blocks a launch of prefill has, if others follow it, and when all are done.

A persistent block keeps an SM to the end of its launch. Where all SMs have one, the launch that
follows begins when they are done: first the matrix units work, then the memory. With fewer, the
other launch streams its keys on SMs of its own meanwhile.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from .balance import BLOCK_OVERHEAD, Work
from .batch import BatchRequests, count_work, make_tiles
from .makespan import Slots, best_split
from .masking import Masking
from .mixed import Kinds
from .tile_shape import TileShape

# What an SM of an H200 does in a microsecond, measured: products by wgmma, and bytes of keys and
# values that blocks of decode stream, while SMs are few enough not to be limited by memory.
_FLOP, _BYTES = 4.6e6, 75e3
# With so large a share of the SMs all that memory gives is streamed.
_MOST = 0.42
# Of SMs: the choice is coarse, so that plans of like batches share what is made for it.
_STEP = 4
# What all SMs stream in a microsecond, and what they do by blocks of prefill.
_ALL_BYTES, _BYTES_BY_PREFILL = 4.0e6, 3.4e6
# In microseconds: a launch that follows another, without its keys; each further one; and what the
# longest request adds, whose parts are as many as the root of its tiles of 64 keys.
_FOLLOWING, _FURTHER, _LONGEST = 6.0, 4.0, 0.35
_KEYS = 64
# What an item of decode takes of an SM, in microseconds, besides its keys.
_ITEM = 0.85
# Products beside streams take so much longer: both need L2.
_BESIDE = 1.14
# Something else than the first form must end within this share of its time; but one launch serves
# all if it is done by the other: no launch then waits for another, and it is closer to estimates.
_WORTHWHILE, _AS_SOON = 0.97, 1.03
# Where the slots are busy for so many of its longest items, only the first shape is looked at.
_LONG = 3


class Streams(NamedTuple):
    """Launches of decode's kernels that follow one of prefill.

    keys       that each request sees
    num_bytes  of keys and values that they read
    num_items  of all KV heads
    num_launches
    """

    keys: np.ndarray
    num_bytes: float
    num_items: int
    num_launches: int = 1

    def busy(self) -> float:
        """For how long one SM would be busy with them."""
        return self.num_bytes / _BYTES + _ITEM * self.num_items

    def time(self) -> float:
        """What they take on all SMs, but for the part of a launch that the one before hides."""
        longest = int(np.maximum.reduce(self.keys, initial=0))
        latency = _FOLLOWING + _FURTHER * (self.num_launches - 1)
        return latency + _LONGEST * math.sqrt(longest / _KEYS) + self.num_bytes / _ALL_BYTES

    def time_by_prefill(self) -> float:
        """What reading the keys takes at least in a launch of prefill."""
        return _FOLLOWING + self.num_bytes / _BYTES_BY_PREFILL


class Partition(NamedTuple):
    """Blocks of prefill that run at a time, and when they and the streams are done."""

    num_slots: int
    time: float


class LaunchChoice(NamedTuple):
    """One of several shapes for a launch of prefill, blocks that run at a time, and when all is
    done, in microseconds. is_alone: it serves requests of few rows too, else launches follow."""

    chosen: int
    num_slots: int
    time: float
    is_alone: bool


def streams_of(
    few: Sequence[BatchRequests], num_kv_heads: int, key_bytes: int, masking: Masking
) -> Streams:
    """What launches of these requests of few rows stream. key_bytes: of a key and its value."""
    keys = np.concatenate([requests.kv_len for requests in few])
    if masking.window_left >= 0:
        rows = np.concatenate([requests.qo_len for requests in few])
        keys = np.minimum(keys, rows + masking.window_left)
    num_bytes = float(np.add.reduce(keys)) * num_kv_heads * key_bytes
    return Streams(keys, num_bytes, keys.size * num_kv_heads, len(few))


def choose_launches(
    many: BatchRequests,
    streams: Streams,
    group_size: int,
    num_kv_heads: int,
    shapes: Sequence[TileShape],
    masking: Masking,
) -> LaunchChoice:
    """The launches by which requests of many rows and those of few are done soonest: one of prefill
    that serves all, or one for the many which leaves SMs to the streams, or all SMs to one after
    the other.

    All shapes have times. The first is that of persistent blocks, which can leave SMs; the others'
    blocks have an item each.
    """
    best = LaunchChoice(0, 0, math.inf, False)
    together, soonest = best, streams.time()
    for index, shape in enumerate(shapes):
        times, limit = shape.times, _WORTHWHILE * best.time
        assert times is not None
        tiles = make_tiles(many, group_size, shape, masking)
        work = count_work(many, tiles, group_size, shape, masking)
        num_slots, time = best_partition(work, num_kv_heads, shape, streams, index == 0, limit)
        if time < limit:
            best = LaunchChoice(index, num_slots, time, False)
        limit = min(_AS_SOON * best.time, _WORTHWHILE * together.time)
        if streams.time_by_prefill() < limit:
            work = _with_streams(work, streams, shape.tile_kv)
            if times.least(work, num_kv_heads, shape.num_slots) < limit:
                slots = Slots(shape.num_slots, shape.num_sms)
                time = best_split(work, num_kv_heads, slots, times).time
                if time < limit:
                    together = LaunchChoice(index, shape.num_slots, time, True)
        is_long = work.total * num_kv_heads > _LONG * work.longest * shape.num_slots
        if is_long or _WORTHWHILE * best.time <= soonest:
            break
    return together if together.time <= _AS_SOON * best.time else best


def _with_streams(work: Work, streams: Streams, tile_kv: int) -> Work:
    """The work of a launch that serves all: few rows are one tile."""
    few = (streams.keys + (tile_kv - 1)) // tile_kv
    key_tiles = np.concatenate((work.array(), few))
    longest = max(work.longest, int(np.maximum.reduce(few, initial=0)))
    return Work(key_tiles, longest, work.total + int(np.add.reduce(few)), key_tiles.size)


def best_partition(
    work: Work,
    num_kv_heads: int,
    shape: TileShape,
    streams: Streams,
    is_persistent: bool,
    limit: float = math.inf,
) -> Partition:
    """How many blocks of prefill run at a time for all to be done soonest: all there is room for,
    unless fewer gain. The time is infinite if it cannot be within the limit.

    Example: 512 items of 374 us on all SMs beside a gigabyte of keys, 264 us on all SMs, take 640
    one after another, and some 540 with the items on 108 SMs.
    """
    times = shape.times
    assert times is not None
    soonest = times.least(work, num_kv_heads, shape.num_slots) + streams.busy() / shape.num_sms
    soonest = max(soonest, streams.time())
    if soonest >= limit:
        return Partition(shape.num_slots, math.inf)
    num_items, busy = work.num_tiles * num_kv_heads, times.busy(work, num_kv_heads)
    best, tried = Partition(shape.num_slots, math.inf), [shape.num_slots]
    for num_slots in tried:
        chunk, end = best_split(work, num_kv_heads, Slots(num_slots, shape.num_sms), times)
        is_full = num_slots == shape.num_slots
        if chunk and not (is_full or is_persistent):
            continue  # parts are more blocks than there are items
        blocks = num_slots if chunk else min(num_slots, num_items)
        used = min(shape.num_sms, -(-blocks * shape.num_sms // shape.num_slots))
        mean = min(end, times.launch + busy / max(1, blocks))
        time = time_beside(end, mean, shape.num_sms, used, streams)
        if time < _WORTHWHILE * best.time:
            best = Partition(num_slots, time)
        if is_full and _WORTHWHILE * time > soonest:
            tried += _slots_to_try(busy, num_items, shape, streams, is_persistent)
    return best


def _slots_to_try(
    busy: float, num_items: int, shape: TileShape, streams: Streams, is_persistent: bool
) -> list[int]:
    """Fewer slots than all: they bind persistent blocks, or leave the keys of few items whole."""
    full, found = shape.num_slots, []
    if num_items * 4 <= full * 3:
        found.append(num_items)
    elif is_persistent:
        share = min(streams.busy() / (busy + streams.busy()), _MOST)
        balanced = full - int(share * full / _STEP) * _STEP
        # Blocks with as many items each as these have, or one less: no wave is nearly empty.
        waves = -(-num_items // balanced)
        counts = [balanced, *(-(-num_items // n) for n in (waves, waves - 1) if 0 < n <= 4)]
        found += [count for count in counts if (1 - _MOST) * full <= count < full]
    return list(dict.fromkeys(found))


def time_beside(end: float, mean: float, num_sms: int, used: int, streams: Streams) -> float:
    """When a launch on `used` SMs that ends then, its blocks at `mean` on average, and the streams
    behind it are done. They stream on SMs without blocks from the beginning, on the others as
    blocks end, and what is left on all."""
    if used < num_sms:
        end, mean = _BESIDE * end, _BESIDE * mean
    idle, busy = (num_sms - used) * end + used * (end - mean), streams.busy()
    left = max(0.0, 1.0 - idle / busy)
    rest = left * max(busy / num_sms, streams.num_bytes / _ALL_BYTES)
    begin = 0.0 if used < num_sms else mean
    return max(end + rest, begin + streams.time())


def persistent_grid_size(
    kernels: Sequence[Kinds], group_size: int, masking: Masking, head_dims: int, itemsize: int
) -> int:
    """Blocks of the first kernel that end when the others do on the SMs that they leave.

    head_dims: of q, k and v, o together. itemsize: of k and v.
    """
    (_, shape), *_ = kernels[0]
    first, *others = (
        [(_key_tiles(kind, group_size, masking), kind[1]) for kind in kinds] for kinds in kernels
    )
    flop = sum(n * of.tile_q * of.tile_kv * 2 * head_dims for n, of in first)
    num_bytes = sum(n * of.tile_kv * head_dims * itemsize for kinds in others for n, of in kinds)
    multiplying, streaming = flop / _FLOP, num_bytes / _BYTES
    if not multiplying or not streaming:
        return shape.num_slots
    share = min(streaming / (multiplying + streaming), _MOST)
    return shape.num_slots - int(share * shape.num_slots / _STEP) * _STEP


def _key_tiles(kind: tuple[BatchRequests, TileShape], group_size: int, masking: Masking) -> float:
    """How many each KV head's blocks visit, or might in the time of their starts and ends."""
    requests, shape = kind
    tiles = make_tiles(requests, group_size, shape, masking)
    work = count_work(requests, tiles, group_size, shape, masking)
    return work.total + BLOCK_OVERHEAD * work.num_tiles
