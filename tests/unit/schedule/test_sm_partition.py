"""How many persistent blocks leave room for a launch beside them, and which launches there are."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from helpers import offers
from hypothesis import given
from hypothesis import strategies as st

from cupyattn.choose.candidates import Candidate
from cupyattn.schedule import Masking
from cupyattn.schedule.batch import BatchRequests, TileWork, count_work, make_tiles
from cupyattn.schedule.makespan import TileTimes
from cupyattn.schedule.sm_partition import (
    BesideTimes,
    DecodeLoad,
    best_partition,
    decode_load_of,
    time_beside,
    time_together,
)
from cupyattn.schedule.tile_shape import TileShape

# Fitted to the times of an H200.
TIMES = BesideTimes(
    stream_rate=75e3,
    max_share=0.42,
    memory_rate=4.3e6,
    rate_beside_products=3.2e6,
    rate_of_block=45e3,
    start=4.0,
    latency=9.0,
    further_launch=4.0,
    longest=0.35,
    item=0.85,
    tiny_page_item=5.0,
    tiny_page_rate=50e3,
    capped=1.3,
    slowdown=1.07,
    late_merge=6.0,
    followed=3.0,
)
CAUSAL = Masking(-1, 0)
# Persistent tiles, and others of one item a block, as over pages of 16 at head dim 128.
SHAPES = [
    TileShape(
        128, 128, 132, times=TileTimes(9.9, 3.3, 1.65, 0.90), num_sms=132, is_persistent=True
    ),
    TileShape(128, 128, 132, times=TileTimes(6.8, 3.9, 1.67, 0.90), num_sms=132),
    TileShape(64, 64, 264, times=TileTimes(7.2, 3.1, 1.01, 0.68), num_sms=132),
]
Lengths = list[tuple[int, int]]


def requests_of(lengths: Lengths) -> BatchRequests:
    """Requests of (rows, keys)."""
    rows, keys = np.array(lengths, np.int64).reshape(-1, 2).T
    return BatchRequests(rows, keys, np.cumsum(rows) - rows, np.cumsum(keys) - keys)


def works_of(lengths: Lengths, group_size: int = 4) -> TileWork:
    return TileWork(requests_of(lengths), group_size, CAUSAL)


def streams(decodes: Lengths, heads: int = 8) -> DecodeLoad:
    return decode_load_of([requests_of(decodes)], heads, 512, CAUSAL, TIMES)


def choose(chunks: Lengths, decodes: Lengths, heads: int = 8, group: int = 4) -> Candidate:
    few = streams(decodes, heads)
    return offers.choose(offers.batch_of(works_of(chunks, group), few, heads, group), SHAPES)


def test_streams_are_what_each_request_sees() -> None:
    few = [requests_of([(1, 4096), (1, 10)]), requests_of([(3, 50)])]
    of = decode_load_of(few, 2, 512, CAUSAL, TIMES)
    assert of.keys.tolist() == [4096, 10, 50]
    assert (of.num_bytes, of.num_items, of.num_launches) == (4156 * 1024, 6, 2)
    window = decode_load_of([requests_of([(3, 4096), (1, 10)])], 1, 512, Masking(100, 0), TIMES)
    assert window.keys.tolist() == [103, 10]


def test_keys_of_tiny_pages_stream_slowly_beside_others() -> None:
    streams = DecodeLoad(np.full(63, 4096), 1e9, 63 * 8, TIMES)
    tiny = replace(streams, has_tiny_pages=True)
    assert tiny.time_on_one_sm() > 1.5 * streams.time_on_one_sm()
    # Few requests are as many blocks as run at a time.
    few = replace(tiny, num_items=8)
    assert (
        few.time_on_one_sm() == replace(few, num_items=64).time_on_one_sm() < tiny.time_on_one_sm()
    )
    assert tiny.time() == streams.time()


def test_capped_decodes_take_longer() -> None:
    few = streams([(1, 4096)] * 8)
    capped = decode_load_of([requests_of([(1, 4096)] * 8)], 8, 512, CAUSAL, TIMES, is_capped=True)
    for plain, slow in ((few.latency(), capped.latency()), (few.reading(), capped.reading())):
        assert slow == pytest.approx(1.3 * plain)
    assert capped.time() > 1.2 * few.time()
    assert time_beside(100.0, 90.0, 132, 132, capped) > time_beside(100.0, 90.0, 132, 132, few)


def test_a_chunk_leaves_sms_to_many_decodes() -> None:
    """Measured on an H200: 562 us with 108 of 132 SMs, 630 to 686 with all."""
    found = choose([(2048, 8192)], [(1, 4096)] * 63)
    assert found.name == "persistent + others"
    assert 96 <= found.slots <= 112
    assert found.time == pytest.approx(562, rel=0.08)


def test_a_few_short_decodes_join_the_chunks() -> None:
    """A launch of their own would follow blocks that have no SM to spare."""
    found = choose([(512, 3072), (512, 512), (512, 2560), (512, 1536)], [(1, 470)] * 6, heads=5)
    assert "others" not in found.name


def test_chunks_before_decodes_have_tiles_of_their_own() -> None:
    """Measured on an H200: 90 us with blocks of one item, 93 with persistent ones, 97 in one
    launch."""
    found = choose([(1024, 6144)] * 4, [(1, 3317)] * 20, heads=1)
    assert (found.name, found.slots) == ("1 + others", 0)
    assert found.time == pytest.approx(90, rel=0.1)


def test_a_merge_of_prompts_would_come_late() -> None:
    """Measured: 145 us where 80 blocks take whole items, 169 to 180 where their keys are split."""
    found = choose([(2048, 10_240), (2048, 2048)], [(1, 19_525)] * 43, heads=1, group=3)
    assert "others" in found.name and found.slots <= 88


@pytest.mark.parametrize("heads", [1, 8])
def test_keys_of_many_decodes_take_one_launch_as_long_as_memory_does(heads: int) -> None:
    few, shape = streams([(1, 500)] * 218, heads), SHAPES[2]
    work = count_work(*_tiles(requests_of([(64, 64)]), shape), 4, shape, CAUSAL)
    time = time_together(work, heads, shape, few)
    assert few.num_bytes / 3.3e6 <= time <= 30 + few.num_bytes / 3e6
    assert time_together(work, heads, shape, few, 0.9 * time) == math.inf


def test_keys_that_memory_brings_are_left_to_decode() -> None:
    found = choose([(128, 128)] * 4, [(1, 20_000)] * 70)
    assert "others" in found.name
    assert found.time >= streams([(1, 20_000)] * 70).time()


def test_items_that_fit_leave_the_other_sms() -> None:
    """64 items of a chunk are not split while decodes use the other half of the card."""
    work = count_work(*_tiles(requests_of([(256, 2048)]), SHAPES[0]), 4, SHAPES[0], CAUSAL)
    found = best_partition(work, 8, SHAPES[0], streams([(1, 500)] * 218), True)
    assert found.num_slots == 64


def _tiles(requests: BatchRequests, shape: TileShape) -> tuple[BatchRequests, object]:
    return requests, make_tiles(requests, 4, shape, CAUSAL)


@given(
    st.floats(1, 1000),
    st.floats(0.1, 1),
    st.integers(1, 132),
    st.integers(1, 200),
    st.integers(1, 9000),
)
def test_all_is_done_when_both_are(
    end: float, mean: float, used: int, count: int, keys: int
) -> None:
    few = streams([(1, keys)] * count)
    time = time_beside(end, mean * end, 132, used, few)
    # Behind a launch that leaves no SM nobody waits for one to be free.
    soonest = few.time() - (TIMES.start if used == 132 else 0.0)
    most = 1.15 * end + max(few.time(), few.time_on_one_sm() / 132) + few.time()
    assert max(end, soonest) <= time <= most


@given(st.data())
def test_no_choice_is_estimated_slower_than_one_launch_after_another(data: st.DataObject) -> None:
    rows = st.tuples(st.integers(17, 1500), st.integers(0, 9000)).map(lambda x: (x[0], sum(x)))
    chunks = data.draw(st.lists(rows, min_size=1, max_size=5))
    keys = st.integers(1, 9000).map(lambda n: (1, n))
    decodes = data.draw(st.lists(keys, min_size=1, max_size=80))
    heads = data.draw(st.sampled_from([1, 2, 5, 8]))
    alone = offers.choose(offers.batch_of(works_of(chunks), None, heads, 4), SHAPES).time
    few = streams(decodes, heads)
    apart = alone + max(few.time(), few.time_on_one_sm() / 132)
    assert choose(chunks, decodes, heads).time <= 1.04 * apart
