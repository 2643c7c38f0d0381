"""Bounds by which candidates are dropped before anything is counted: they change no choice."""

from __future__ import annotations

import numpy as np
from helpers.offers import batch_of, choose
from hypothesis import example, given
from hypothesis import strategies as st

from cupyattn.choose.candidates import Batch, alone, with_others
from cupyattn.choose.candidates import _forms_of_tiles as forms_of_tiles
from cupyattn.choose.card import card_of
from cupyattn.core.device import NO_GPU
from cupyattn.schedule import Masking, balance
from cupyattn.schedule.balance import Costs, Work
from cupyattn.schedule.batch import BatchRequests, TileWork
from cupyattn.schedule.makespan import Slots, TileTimes, best_split
from cupyattn.schedule.sm_partition import decode_load_of
from cupyattn.schedule.tile_shape import TileShape

BESIDE = card_of(NO_GPU).beside
# Persistent tiles first, then others of one item a block, and those for few keys.
SHAPES = [
    TileShape(
        128, 128, 132, times=TileTimes(12.9, 3.3, 1.65, 0.90), num_sms=132, is_persistent=True
    ),
    TileShape(128, 128, 132, times=TileTimes(6.8, 3.9, 1.67, 0.90), num_sms=132),
    TileShape(64, 64, 264, times=TileTimes(7.2, 3.1, 1.01, 0.68), num_sms=132),
    TileShape(64, 32, 528, times=TileTimes(5.2, 3.4, 0.9, 0.71), num_sms=132, max_keys=512),
]
MASKS = st.sampled_from([Masking(-1, 0), Masking(), Masking(100, 0), Masking(-1, 7)])


@st.composite
def prompts(draw: st.DrawFn) -> BatchRequests:
    """Requests with fewer rows than keys, or more."""
    lengths = st.tuples(st.integers(1, 900), st.sampled_from([0, 0, 30, 400, 5000]))
    drawn = draw(st.lists(lengths, min_size=1, max_size=12))
    rows = np.array([n for n, _ in drawn])
    keys = np.maximum(rows + [more - draw(st.sampled_from([0, 0, 20])) for _, more in drawn], 1)
    return BatchRequests(rows, keys, rows.cumsum() - rows, keys.cumsum() - keys)


@given(prompts(), MASKS, st.sampled_from([1, 3, 4, 7]), st.sampled_from([1, 2, 8]))
def test_bounds_are_below_counts_and_estimates(
    requests: BatchRequests, masking: Masking, group_size: int, heads: int
) -> None:
    works = TileWork(requests, group_size, masking)
    for shape in SHAPES:
        assert shape.times is not None
        work, slots = works.of(shape), shape.slots
        counted = shape.times.lower_bound(work.total, work.num_tiles, heads, slots)
        for form in forms_of_tiles(batch_of(works, None, heads, group_size), {"": shape}):
            assert form.bound <= counted * (1.0 + 1e-12)
        assert counted <= best_split(work, heads, slots, shape.times).time


@given(prompts(), st.sampled_from([1, 2, 8]), st.floats(0.5, 1.5))
def test_a_limit_ends_an_estimate_that_cannot_be_within_it(
    requests: BatchRequests, heads: int, share: float
) -> None:
    for shape in SHAPES:
        slots, times = Slots(shape.num_slots, shape.num_sms), shape.times
        assert times is not None
        found = best_split(TileWork(requests, 4, Masking(-1, 0)).of(shape), heads, slots, times)
        work = TileWork(requests, 4, Masking(-1, 0)).of(shape)
        limited = best_split(work, heads, slots, times, limit=share * found.time)
        assert limited == found or limited.time >= share * found.time
        assert best_split(work, heads, slots, times) == found


# A bound that is so close leaves nothing to gain (candidates._NEAR).
MOST = 1.1 + 1e-9


def soonest_of_all(batch: Batch) -> float:
    """Without bounds: every candidate is estimated."""
    shapes = [x for x in SHAPES if not x.max_keys or batch.longest <= x.max_keys]
    found = [alone(batch, "", shape) for shape in shapes]
    if batch.prompts is not None:
        found += [with_others(batch, "", x) for x in shapes if x is SHAPES[0] or not x.max_keys]
    return min(candidate.time for candidate in found)


@given(prompts(), MASKS, st.sampled_from([1, 4, 7]), st.sampled_from([1, 2, 8]))
def test_tiles_of_prompts_are_hardly_later_than_the_best(
    requests: BatchRequests, masking: Masking, group_size: int, heads: int
) -> None:
    found = choose(batch_of(TileWork(requests, group_size, masking), None, heads, 1), SHAPES)
    fresh = batch_of(TileWork(requests, group_size, masking), None, heads, 1)
    assert found.time <= MOST * soonest_of_all(fresh)


@given(
    prompts(),
    st.lists(st.integers(0, 9000), min_size=1, max_size=60),
    st.sampled_from([1, 4, 7]),
    st.sampled_from([1, 2, 8]),
    st.booleans(),
)
def test_launches_beside_decodes_are_hardly_later_than_the_best(
    requests: BatchRequests, keys: list[int], group_size: int, heads: int, has_tiny_pages: bool
) -> None:
    ones, masking = np.ones(len(keys), np.int64), Masking(-1, 0)
    few = BatchRequests(ones, np.array(keys), ones, ones)
    streams = decode_load_of([few], heads, 512, masking, BESIDE, has_tiny_pages)
    batches = [
        batch_of(TileWork(requests, group_size, masking), streams, heads, group_size)
        for _ in range(2)
    ]
    assert choose(batches[0], SHAPES).time <= MOST * soonest_of_all(batches[1])


def chunk_of_all(work: Work, per_wave: int, costs: Costs, least: int) -> int:
    """Without bounds: every split is looked at, the shortest parts first."""
    longest = work.longest
    uneven = balance._Uneven(work, per_wave, costs.block)
    whole = max(uneven.done(longest, float(work.num_tiles)), longest + costs.block)
    best, best_time = longest, 0.95 * whole
    if best_time <= work.total / per_wave + costs.min_share * costs.block:
        return longest
    for chunk in balance._candidates(work, per_wave, False, least, costs.min_share):
        done, num_items = uneven.split(chunk)
        time = done + costs.merge + costs.state * num_items / per_wave
        time += costs.part * -(-longest // chunk)
        if time < best_time:
            best, best_time = chunk, time
    return best


@given(
    st.lists(st.integers(1, 400), min_size=1, max_size=40),
    st.sampled_from([400, 9300, 20_000]),
    st.integers(1, 300),
    st.sampled_from([0.0, 0.25, 4.0]),
    st.sampled_from([0.0, 0.009, 1.0]),
    st.sampled_from([1, 9]),
)
@example([1, 1], 9300, 101, 4.0, 1.0, 9)
def test_no_bound_changes_the_splits_of_decodes(
    tiles: list[int], longest: int, per_wave: int, state: float, part: float, least: int
) -> None:
    sizes = np.array([longest, *sorted(tiles, reverse=True)])
    work = Work(sizes, longest, int(sizes.sum()), sizes.size)
    if balance.are_even(longest, work.total, work.num_tiles):
        return
    costs = Costs(3.0, 2.0, state, part, 1.0)
    found = balance.best_chunk(work, per_wave, costs, least)
    assert found.size == chunk_of_all(work, per_wave, costs, least)
