"""How many blocks a launch of prefill has, if others follow it, and when all are done.

A persistent block keeps an SM to the end of its launch. Where all SMs have one, the launch that
follows begins when they are done: first the matrix units work, then the memory. With fewer, the
other launch streams its keys on SMs of its own meanwhile.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np

from .balance import Work
from .batch import BatchRequests, max_of, sum_of
from .makespan import Slots, best_split
from .masking import Masking
from .tile_shape import TileShape

# Partitions are multiples of so many SMs, so that plans of like batches share their launchers.
_STEP = 4
# Keys of a part, by which the root of the longest request's parts is taken.
_KEYS = 64
# Where each key is looked up by itself, decode has at least as many items as run at a time.
_MIN_ITEMS = 264
# Choose another number of SMs only if it is predicted 3 % faster.
_MIN_GAIN = 0.97


class BesideTimes(NamedTuple):
    """What launches of decode take behind and beside one of prefill: of a card (choose/card.py), in
    microseconds and bytes a microsecond.

    stream_rate     bytes of keys and values that blocks of decode stream on one SM, while SMs are
                    few enough not to be limited by memory
    max_share       of the SMs, with which decode streams all that memory gives
    memory_rate     bytes that all SMs stream
    rate_beside_products  the same by blocks of prefill
    rate_of_block   bytes that one such block streams
    start           until a launch of decode runs on SMs that are free
    latency         what it takes without its keys
    further_launch  what each further launch adds
    longest         what the longest request adds, times the root of its parts
    item            what an item of decode takes of an SM besides its keys
    tiny_page_item, tiny_page_rate  `item` and `stream_rate` where each key is looked up by itself
    capped          times as long decode takes under a soft cap
    slowdown        times as long products and streams take beside each other: both need L2
    late_merge      what a merge of prompts takes more if it comes after the streams
    followed        what persistent blocks take more if launches follow them
    """

    stream_rate: float
    max_share: float
    memory_rate: float
    rate_beside_products: float
    rate_of_block: float
    start: float
    latency: float
    further_launch: float
    longest: float
    item: float
    tiny_page_item: float
    tiny_page_rate: float
    capped: float
    slowdown: float
    late_merge: float
    followed: float


# Not frozen, because every plan makes one and a frozen one is slow to make. No field changes.
@dataclass(slots=True)
class DecodeLoad:
    """Launches of decode's kernels that follow one of prefill.

    keys       that each request sees; the longest has `longest`, and all have `num_keys`
    num_bytes  of keys and values that they read
    num_items  of all KV heads
    times      of the card
    num_launches
    has_tiny_pages  each of their keys is looked up by itself
    is_capped       their logits are under a soft cap
    """

    keys: np.ndarray
    num_bytes: float
    num_items: int
    times: BesideTimes
    num_launches: int = 1
    has_tiny_pages: bool = False
    is_capped: bool = False
    longest: int = field(init=False)
    num_keys: int = field(init=False)
    _latency: float = field(init=False, repr=False)
    _reading: float = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self.longest = max_of(self.keys) if self.keys.size else 0
        self.num_keys = sum_of(self.keys)
        # All candidates ask for these.
        times = self.times
        further = times.further_launch * (self.num_launches - 1)
        latency = times.latency + further + times.longest * math.sqrt(self.longest / _KEYS)
        reading = self.num_bytes / times.memory_rate
        slow = times.capped if self.is_capped else 1.0
        self._latency, self._reading = slow * latency, slow * reading

    def time_on_one_sm(self) -> float:
        """For how long one SM would be busy with them."""
        if self.has_tiny_pages:
            num_items = max(self.num_items, _MIN_ITEMS)
            items = self.times.tiny_page_item * num_items
            return self.num_bytes / self.times.tiny_page_rate + items
        return self.num_bytes / self.times.stream_rate + self.times.item * self.num_items

    def latency(self) -> float:
        """What they take as soon as SMs are free, but for memory's rate."""
        return self._latency

    def reading(self) -> float:
        """What all SMs take for their keys."""
        return self._reading

    def lower_bound_together(self, shape: TileShape) -> float:
        """What one launch that serves them too takes at least for their keys."""
        assert shape.times is not None
        return shape.times.launch + self.num_bytes / self.times.rate_beside_products

    def time(self) -> float:
        """What they take on all SMs."""
        return self.times.start + self._latency + self._reading


class Partition(NamedTuple):
    """Blocks of prefill that run at a time, and when they and the streams are done."""

    num_slots: int
    time: float


def decode_load_of(
    decodes: Sequence[BatchRequests],
    num_kv_heads: int,
    key_bytes: float,
    masking: Masking,
    times: BesideTimes,
    has_tiny_pages: bool = False,
    is_capped: bool = False,
) -> DecodeLoad:
    """What launches of these requests of few rows stream. key_bytes: of a key and its value, or
    so many more as take as long."""
    keys = decodes[0].kv_len
    if len(decodes) > 1:
        keys = np.concatenate([requests.kv_len for requests in decodes])
    if masking.window_left >= 0:
        rows = np.concatenate([requests.qo_len for requests in decodes])
        keys = np.minimum(keys, masking.keys_among(rows + masking.window_left))
    num_bytes = float(sum_of(keys)) * num_kv_heads * key_bytes
    num_items = keys.size * num_kv_heads
    return DecodeLoad(keys, num_bytes, num_items, times, len(decodes), has_tiny_pages, is_capped)


@functools.lru_cache(maxsize=256)
def followed(shape: TileShape, beside: BesideTimes) -> TileShape:
    """Persistent blocks that launches follow."""
    times = shape.times
    assert times is not None
    return replace(shape, times=times._replace(launch=times.launch + beside.followed))


def lower_bound_on_all(
    minimum: float, num_blocks: int, shape: TileShape, load: DecodeLoad
) -> float:
    """When blocks on all SMs that there is room for, which are not done before `minimum`, and the
    streams behind them are done at least."""
    if num_blocks >= shape.num_sms:
        # No SM is left to the load.
        minimum += load.latency() + load.reading()
    return max(minimum, load.time())


def time_together(
    work: Work, num_kv_heads: int, shape: TileShape, load: DecodeLoad, limit: float = math.inf
) -> float:
    """When one launch that serves all is done; infinite if that cannot be within the limit."""
    times, slots = shape.times, shape.slots
    assert times is not None
    if load.lower_bound_together(shape) >= limit:
        return math.inf
    # Few rows are one tile.
    decode_tiles = (load.keys + (shape.tile_kv - 1)) // shape.tile_kv
    sizes = np.concatenate((decode_tiles, work.array()))
    longest = int(np.maximum.reduce(decode_tiles))
    both = Work(
        sizes, max(work.longest, longest), work.total + int(np.add.reduce(decode_tiles)), sizes.size
    )
    if times.lower_bound(both.total, both.num_tiles, num_kv_heads, slots) >= limit:
        return math.inf
    chunk, time = best_split(both, num_kv_heads, slots, times, limit=limit)
    if time >= limit:
        return math.inf
    merge, is_decode = 0.0, np.arange(sizes.size) < decode_tiles.size
    if chunk:
        parts = np.maximum(-(-sizes // chunk), 1)  # of no keys, too
        merge, longest = times.merge, min(longest, chunk)
        sizes, is_decode = (sizes / parts).repeat(parts), is_decode.repeat(parts)
    # The longest items come first. A wave in which many are of few rows is as long as their keys
    # take, though its products were done sooner.
    order = (-sizes).argsort(kind="stable")
    sizes, is_decode = sizes[order], is_decode[order]
    waves = np.arange(0, sizes.size, max(1, shape.num_slots // num_kv_heads))
    tile_bytes = load.num_bytes / max(1.0, float(load.num_keys)) * shape.tile_kv
    rate = load.times.rate_beside_products
    reading = np.add.reduceat(sizes * is_decode, waves) * (tile_bytes / rate)
    busy = np.add.reduceat(times.item + times.key_tile * sizes, waves) * num_kv_heads
    all_waves = float(np.add.reduce(np.maximum(reading, busy / shape.num_slots)))
    of_longest = longest * tile_bytes / num_kv_heads / load.times.rate_of_block
    return max(time, times.launch + max(all_waves, of_longest) + merge)


def best_partition(
    work: Work,
    num_kv_heads: int,
    shape: TileShape,
    load: DecodeLoad,
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
    minimum = times.lower_bound(work.total, work.num_tiles, num_kv_heads, shape.slots)
    soonest = max(minimum, load.time())
    on_all = lower_bound_on_all(minimum, work.num_tiles * num_kv_heads, shape, load)
    if soonest >= limit or (not is_persistent and on_all >= limit):
        return Partition(shape.num_slots, math.inf)
    # Tiny pages change whether a launch of their own is worth it, but not which SMs it should have.
    usual = replace(load, has_tiny_pages=False) if load.has_tiny_pages else load
    estimate = functools.partial(_partition_time, work, num_kv_heads, shape, usual)
    full = shape.num_slots
    # All SMs need no estimate where less than all are done sooner than the bound.
    best, is_bound = Partition(full, on_all), True
    if _MIN_GAIN * on_all <= soonest:
        best, is_bound = Partition(full, estimate(full)[0]), False
    if _MIN_GAIN * best.time > soonest:
        busy, num_items = times.total_time(work, num_kv_heads), work.num_tiles * num_kv_heads
        for num_slots in _slots_to_try(busy, num_items, shape, usual, is_persistent):
            time, is_split = estimate(num_slots)
            if is_split and not is_persistent:
                continue  # parts are more blocks than there are items
            if is_bound and time >= _MIN_GAIN * on_all:
                best, is_bound = Partition(full, estimate(full)[0]), False
            if time < _MIN_GAIN * best.time:
                best, is_bound = Partition(num_slots, time), False
    if is_bound:
        best = Partition(full, estimate(full)[0])
    if load.has_tiny_pages:
        time, _ = _partition_time(work, num_kv_heads, shape, load, best.num_slots)
        best = best._replace(time=time)
    return best


def _partition_time(
    work: Work, num_kv_heads: int, shape: TileShape, load: DecodeLoad, num_slots: int
) -> tuple[float, bool]:
    """When prefill, with so many blocks at a time, and the streams are done, and whether keys of
    prefill are split."""
    times = shape.times
    assert times is not None
    chunk, end = best_split(work, num_kv_heads, Slots(num_slots, shape.num_sms), times)
    if chunk:  # parts end together
        used = min(num_slots, shape.num_sms)
        end -= times.merge
        time = time_beside(end, end, shape.num_sms, used, load) + times.merge
        time += load.times.late_merge
    else:  # blocks go to free SMs first
        blocks = min(num_slots, work.num_tiles * num_kv_heads)
        mean = min(end, times.launch + times.total_time(work, num_kv_heads) / max(1, blocks))
        time = time_beside(end, mean, shape.num_sms, min(blocks, shape.num_sms), load)
    return time, bool(chunk)


def _slots_to_try(
    busy: float, num_items: int, shape: TileShape, load: DecodeLoad, is_persistent: bool
) -> list[int]:
    """Fewer slots than all: they bind persistent blocks, or leave the keys of few items whole."""
    full, result = shape.num_slots, []
    if num_items * 4 <= full * 3:
        result.append(num_items)
    if is_persistent:
        maximum = load.times.max_share
        share = min(load.time_on_one_sm() / (busy + load.time_on_one_sm()), maximum)
        balanced = full - int(share * full / _STEP) * _STEP
        if (1 - maximum) * full <= balanced < full:
            result.append(balanced)
    return list(dict.fromkeys(result))


def time_beside(end: float, mean: float, num_sms: int, used: int, load: DecodeLoad) -> float:
    """When a launch on `used` SMs that ends then, its blocks at `mean` on average, and the streams
    behind it are done. They stream on SMs without blocks from the beginning, and what is left at
    `mean` on all."""
    done, streamed, free = 0.0, 0.0, num_sms - used
    if free:
        slowdown = load.times.slowdown
        streamed = slowdown * load.time()
        more = 1.0 + (slowdown - 1.0) * min(1.0, streamed / end)
        end, mean = more * end, more * mean
        done = free * max(0.0, mean - load.times.start) / load.time_on_one_sm()
    if done < 1.0:
        left = (1.0 - done) * load.reading()
        streamed = max(streamed, mean + load.latency() + left)
    return max(end, streamed)
