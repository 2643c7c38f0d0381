"""When blocks are done that a GPU deals out, and the splits and tiles that follow from it."""

from __future__ import annotations

import heapq
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cupyattn.choose.candidates import Batch, best_of
from cupyattn.schedule.balance import Work
from cupyattn.schedule.batch import BatchRequests, Splitting, TileWork, alike_splits
from cupyattn.schedule.makespan import (
    Slots,
    TileTimes,
    best_split,
    chunk_of_parts,
    launch_time,
    makespan,
)
from cupyattn.schedule.masking import Masking
from cupyattn.schedule.tile_shape import TileShape

TIMES = TileTimes(launch=6.0, item=2.0, key_tile=1.0, merge=4.0, state=0.01)
SLOTS = Slots(132, 132)
CAUSAL = Masking(-1, 0)


def longest_first(sizes: list[float]) -> np.ndarray:
    return np.sort(np.array(sizes, np.float64))[::-1]


def dealt_one_by_one(times: np.ndarray, slots: int) -> float:
    ends = [0.0] * slots
    for time in times:
        heapq.heapreplace(ends, ends[0] + time)
    return max(ends)


@given(st.lists(st.integers(1, 60), min_size=1, max_size=300), st.integers(1, 40))
def test_blocks_end_between_their_mean_and_a_block_later(sizes: list[int], slots: int) -> None:
    times = longest_first([*map(float, sizes)])
    end = makespan(times, slots)
    assert max(times[0], times.sum() / slots) <= end * (1 + 1e-9)
    assert end <= times.sum() / slots + times[0]


@pytest.mark.parametrize("num_items", [100, 132, 133, 176, 264, 350, 500, 1000])
def test_causal_tiles_end_as_if_dealt_one_by_one(num_items: int) -> None:
    times = longest_first([2.0 + n % 22 for n in range(num_items)])
    assert makespan(times, 132) == pytest.approx(dealt_one_by_one(times, 132), rel=0.06)


def test_no_blocks_take_no_time() -> None:
    assert makespan(np.zeros(0), 132) == 0.0
    assert makespan(np.zeros(0), 132, 5.0) == 0.0


def shared_memory(times: np.ndarray, slots: int, reading: float) -> float:
    """The end of blocks that go on at one rate, event by event: that of memory, or their own."""
    asked, now, running = reading / times.sum(), 0.0, []
    rest = [*times]
    while rest or running:
        while rest and len(running) < slots:
            running.append(rest.pop(0))
        step, rate = min(running), max(1.0, asked * len(running))
        now += step * rate
        running = [left - step for left in running if left > step]
    return now


@given(
    st.lists(st.integers(1, 60), min_size=1, max_size=100),
    st.integers(1, 40),
    st.floats(0.0, 4.0),
)
def test_blocks_wait_for_memory_while_they_ask_for_more(
    sizes: list[int], slots: int, share: float
) -> None:
    times = longest_first([*map(float, sizes)])
    reading = share * times.sum() / slots
    end = makespan(times, slots, reading)
    assert end >= max(makespan(times, slots), reading) * (1 - 1e-9)
    if times.size <= slots:
        assert end == pytest.approx(shared_memory(times, slots, reading))


def test_memory_that_keeps_up_takes_no_time() -> None:
    times = longest_first([2.0 + n % 22 for n in range(350)])
    assert makespan(times, 132, times.sum() / 132) == makespan(times, 132)


def test_memory_idles_while_the_last_block_goes_on() -> None:
    """Four blocks that memory serves at half their rate, of which one is twice as long."""
    times, reading = np.array([20.0, 10.0, 10.0, 10.0]), 25.0
    assert makespan(times, 4, reading) == pytest.approx(10.0 * 2 + 10.0)
    assert makespan(np.full(4, 12.5), 4, reading) == pytest.approx(reading)


def test_a_block_alone_on_its_sm_is_faster() -> None:
    times = TileTimes(6.0, 2.0, 1.0, single_block_factor=0.5)
    sizes, slots = np.full(100, 8), Slots(264, 132)
    assert launch_time(sizes, 1, slots, times) == 6.0 + 0.5 * 10.0
    assert launch_time(sizes, 2, slots, times) == 6.0 + 10.0


def even(num_tiles: int, key_tiles: int) -> Work:
    return Work(None, key_tiles, num_tiles * key_tiles, num_tiles)


def test_a_full_wave_is_not_split() -> None:
    assert best_split(even(132, 100), 1, SLOTS, TIMES).chunk == 0


def test_a_few_long_tiles_fill_the_card_in_parts() -> None:
    split = best_split(even(4, 512), 8, SLOTS, TIMES)
    assert split.chunk == 128
    assert split.time == pytest.approx(6.0 + 2.0 + 128 + 4.0 + 1.28)
    assert best_split(even(4, 512), 8, SLOTS, TIMES, may_split=False).chunk == 0


def test_uneven_tiles_fill_a_wave_in_parts() -> None:
    """Parts of the mean fit no wave: 18 parts of 8 heads are 144."""
    sizes = np.array([361, 361, 103, 103])
    split = best_split(Work(sizes, 361, 928, 4), 8, Slots(132, 132), TIMES)
    assert split.chunk == 61
    assert split.time == pytest.approx(6.0 + 2.0 + 361 / 6 + 4.0 + 1.28)


def test_uneven_tiles_are_split_though_memory_decides() -> None:
    """Measured: 36 requests of up to 21k keys, 185 us in parts of 60 and 181 in parts of 42."""
    sizes = np.array([168, *range(20, 90, 2)])
    work = Work(sizes, 168, int(sizes.sum()), sizes.size, int(sizes.sum()))
    times = TIMES._replace(read=1.5 * 5 * TIMES.key_tile / 132)
    whole = best_split(work, 4, SLOTS, times, may_split=False)
    split = best_split(work, 4, SLOTS, times)
    reading = times.read * work.num_read * 4
    assert 0 < split.chunk < 90
    assert times.launch + reading < split.time < 0.95 * whole.time


@given(st.lists(st.integers(1, 3000), min_size=1, max_size=30), st.integers(0, 100))
def test_parts_are_as_many_as_they_may_be_or_not_many_fewer(sizes: list[int], more: int) -> None:
    most = len(sizes) + more
    chunk = chunk_of_parts(np.array(sizes), most)
    num_parts = sum(-(-size // chunk) for size in sizes)
    assert len(sizes) <= num_parts <= most
    least = next(c for c in range(1, max(sizes) + 1) if sum(-(-x // c) for x in sizes) <= most)
    assert least <= chunk <= 1.5 * least + 1


def test_states_that_cost_more_than_key_tiles_are_fewer() -> None:
    """Parts for all 264 places are blocks of one key tile, which leave twice the states."""
    times, slots = (
        TileTimes(7.0, 3.0, 1.0, single_block_factor=0.7, merge=3.5, state=0.02),
        Slots(264, 132),
    )
    assert best_split(even(1, 256), 1, slots, times).chunk == 2
    assert best_split(even(1, 256), 1, slots, times._replace(state=0.001)).chunk == 2
    assert best_split(even(1, 256), 1, slots, times._replace(state=0.1)).chunk == 4


@given(st.integers(1, 40), st.integers(1, 8), st.integers(2, 300), st.integers(0, 2**31))
def test_the_time_of_a_split_is_that_of_its_launch(
    tiles: int, heads: int, most: int, seed: int
) -> None:
    sizes = np.random.default_rng(seed).integers(1, most + 1, tiles)
    work = Work(sizes, int(sizes.max()), int(sizes.sum()), tiles)
    split = best_split(work, heads, SLOTS, TIMES)
    if split.chunk:
        parts = -(-sizes // split.chunk)
        time = launch_time(np.repeat(sizes / parts, parts), heads, SLOTS, TIMES) + TIMES.merge
        time += TIMES.state * int(parts[parts > 1].sum()) * heads
        assert split.time == pytest.approx(time)


def test_a_short_prompt_is_not_split() -> None:
    """A merge takes longer than its few key tiles."""
    assert best_split(even(3, 2), 8, SLOTS, TIMES).chunk == 0


@given(st.integers(1, 40), st.integers(1, 8), st.integers(1, 300), st.integers(0, 2**31))
def test_a_split_is_never_estimated_slower(tiles: int, heads: int, most: int, seed: int) -> None:
    sizes = np.random.default_rng(seed).integers(1, most + 1, tiles)
    work = Work(sizes, int(sizes.max()), int(sizes.sum()), tiles)
    whole = best_split(work, heads, SLOTS, TIMES, may_split=False)
    split = best_split(work, heads, SLOTS, TIMES)
    assert split.time <= whole.time
    assert 0 <= split.chunk < max(2, work.longest)


def prompts(count: int, length: int) -> BatchRequests:
    lengths, starts = np.full(count, length), np.arange(count) * length
    return BatchRequests(lengths, lengths, starts, starts)


def best_tiles(requests: BatchRequests, shapes: dict[str, TileShape]) -> str:
    works = TileWork(requests, 4, CAUSAL)
    return best_of(Batch([("large", works)], works, 8, 4, 0, 0, None, None), shapes).name


# Tiles of 192 rows multiply a little faster than those of 64, of which two share an SM.
TALL = TileShape(192, 80, 132, times=TileTimes(7.0, 2.2, 1.04), num_sms=132)
SHORT = TileShape(64, 64, 264, times=TileTimes(6.0, 2.2, 0.68, 0.6), num_sms=132)


@pytest.mark.parametrize(
    ("count", "length", "chosen"),
    [(1, 128, 1), (1, 256, 1), (1, 16_384, 0), (64, 1024, 0), (256, 512, 0)],
)
def test_short_tiles_are_for_work_that_does_not_fill_the_card(
    count: int, length: int, chosen: int
) -> None:
    assert best_tiles(prompts(count, length), {"0": TALL, "1": SHORT}) == str(chosen)


def test_the_first_shape_stays_if_another_gains_nothing() -> None:
    assert best_tiles(prompts(1, 2048), {"0": TALL, "1": TALL}) == "0"


@pytest.mark.parametrize("length", [300, 1000, 3000])
def test_splits_of_a_launch_without_a_list_are_estimated_as_they_are(length: int) -> None:
    works = TileWork(prompts(1, length), 4, CAUSAL, splits_alike=True)
    work, slots = works.of(SHORT), Slots(SHORT.num_slots, SHORT.num_sms)
    times = SHORT.times._replace(merge=0.5)
    splits = alike_splits(work, 2, 4 * length, replace(SHORT, times=times), Splitting())
    parts = np.repeat(work.array() / splits, splits)
    merge = (splits > 1) * (times.merge + times.state * parts.size * 2)
    assert best_split(work, 2, slots, times).time == pytest.approx(
        launch_time(parts, 2, slots, times) + merge
    )
    assert splits > 1 or length > 300
