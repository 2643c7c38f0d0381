"""The planner of batches: work is covered once, balanced, and within what graphs freeze."""

from __future__ import annotations

import heapq
from dataclasses import dataclass, replace
from itertools import groupby

import numpy as np
import pytest
from helpers.level_plans import maskings
from hypothesis import given, settings
from hypothesis import strategies as st

from cupyattn.errors import PlanError
from cupyattn.reference import Visibility
from cupyattn.schedule import Masking, tile_span
from cupyattn.schedule.balance import Work
from cupyattn.schedule.batch import (
    WORK_FIELDS,
    BatchPlan,
    BatchRequests,
    Splitting,
    TileWork,
    alike_splits,
    plan_batch,
)
from cupyattn.schedule.limits import check_limits, limits
from cupyattn.schedule.tile_shape import TileShape
from cupyattn.schedule.validate import validate_plan


@dataclass(frozen=True)
class Batch:
    lengths: tuple[tuple[int, int], ...]  # (qo_len, kv_len) of each request
    group_size: int
    num_kv_heads: int
    shape: TileShape
    masking: Masking
    splitting: Splitting

    def requests(self) -> BatchRequests:
        pairs = np.array(self.lengths, np.int64).reshape(-1, 2)
        qo_len, kv_len = pairs[:, 0].copy(), pairs[:, 1].copy()
        return BatchRequests(
            qo_len, kv_len, np.cumsum(qo_len) - qo_len, np.cumsum(kv_len) - kv_len, kv_len * 3
        )

    def plan(self) -> BatchPlan:
        return plan_batch(
            self.requests(),
            self.group_size,
            self.num_kv_heads,
            self.shape,
            self.masking,
            self.splitting,
        )


def batches(longest_q: int = 40, longest_kv: int = 300, most: int = 9) -> st.SearchStrategy[Batch]:
    length = st.tuples(st.integers(0, longest_q), st.integers(0, longest_kv))
    splitting = st.one_of(
        st.just(Splitting()),
        st.just(Splitting(may_split=False)),
        st.builds(Splitting, st.just(True), st.integers(1, 200)),
    )
    return st.builds(
        Batch,
        st.lists(length, max_size=most).map(tuple),
        st.integers(1, 9),
        st.integers(1, 8),
        st.builds(
            TileShape,
            st.sampled_from((16, 32, 64, 128)),
            st.sampled_from((16, 48, 64)),
            st.integers(1, 300),
            st.sampled_from((0.0, 0.25, 4.0)),
        ),
        maskings(350),
        splitting,
    )


def column(plan: BatchPlan, name: str) -> np.ndarray:
    return plan.items[:, WORK_FIELDS.index(name)]


def covered(batch: Batch, plan: BatchPlan) -> list[np.ndarray]:
    """How often each (token, head of a group, key) of each request is somebody's work."""
    shape, group = batch.shape, batch.group_size
    counts = [np.zeros((qo * group, kv), int) for qo, kv in batch.lengths]
    starts = {int(s): b for b, s in enumerate(batch.requests().q_start) if batch.lengths[b][0]}
    for item in plan.items:
        field = dict(zip(WORK_FIELDS, map(int, item), strict=True))
        qo_len, kv_len = field["qo_len"], field["kv_len"]
        request = starts[field["q_start"]]
        assert (qo_len, kv_len) == batch.lengths[request]
        first, end = field["first_row"], min(field["first_row"] + shape.tile_q, qo_len * group)
        tokens = first // group, (end - 1) // group
        begin, stop = batch.masking.key_span(*tokens, qo_len, kv_len)
        tiles = tile_span(begin, stop, shape.tile_kv, field["split"], field["num_splits"])
        from_key = begin + tiles[0] * shape.tile_kv
        to_key = min(begin + tiles[1] * shape.tile_kv, stop)
        counts[request][first:end, from_key:to_key] += 1
    return counts


@settings(max_examples=300)
@given(batches())
def test_every_visible_key_of_every_row_is_covered_once(batch: Batch) -> None:
    plan = batch.plan()
    validate_plan(plan, batch.requests(), batch.group_size, batch.shape.tile_q)
    masking = batch.masking
    for (qo, kv), count in zip(batch.lengths, covered(batch, plan), strict=True):
        seen = Visibility(qo, kv, False, masking.window_left, masking.window_right).dense()
        rows = np.repeat(seen, batch.group_size, axis=0)
        assert (count[rows] == 1).all() and count.max(initial=0) <= 1


@settings(max_examples=300)
@given(batches(longest_q=300, longest_kv=20_000, most=40))
def test_limits_hold_whatever_the_lengths(batch: Batch) -> None:
    plan = batch.plan()
    most = limits(
        len(batch.lengths),
        sum(qo for qo, _ in batch.lengths),
        max((qo for qo, _ in batch.lengths), default=0),
        sum(kv for _, kv in batch.lengths),
        batch.group_size,
        batch.num_kv_heads,
        batch.shape,
        batch.splitting,
    )
    check_limits(plan, most)
    assert column(plan, "num_splits").max(initial=1) == 1 or batch.splitting.may_split


def finish(plan: BatchPlan, batch: Batch) -> tuple[float, float]:
    """When the last block is done, blocks being dealt in order to what is free; and the ideal."""
    tiles = -(-column(plan, "kv_len").astype(np.int64) // batch.shape.tile_kv)
    parts = -(-tiles // column(plan, "num_splits"))
    slots = [0.0] * batch.shape.num_slots
    for cost in np.repeat(parts, batch.num_kv_heads):
        heapq.heapreplace(slots, slots[0] + float(cost) + 2.0)
    whole = {(int(q), int(t)) for q, t in zip(column(plan, "q_start"), tiles, strict=True)}
    total = sum(t for _, t in whole) * batch.num_kv_heads
    return max(slots), total / batch.shape.num_slots


@settings(max_examples=200)
@given(
    st.lists(st.one_of(st.integers(1, 4_000), st.just(131_072)), min_size=1, max_size=80),
    st.sampled_from((1, 2, 8, 32)),
)
def test_one_long_request_does_not_set_the_time_of_a_decode(lengths: list[int], heads: int) -> None:
    shape = TileShape(16, 64, 264, 0.25)
    batch = Batch(tuple((1, kv) for kv in lengths), 4, heads, shape, Masking(), Splitting())
    last, ideal = finish(batch.plan(), batch)
    assert last <= 1.5 * ideal + 30


def test_what_one_block_merges_has_few_parts() -> None:
    """One KV head: as many parts as fill the GPU would take longer to merge than to make."""
    shape = TileShape(16, 64, 264, 0.25)
    batch = Batch(((1, 8192),), 8, 1, shape, Masking(), Splitting())
    assert len(batch.plan().items) == 128
    merged = replace(shape, part_cost=0.5, rows_at_a_time=8)
    assert len(replace(batch, shape=merged).plan().items) == 16


def _decode_parts(requests: int, kv_len: int, qo_len: int = 1, tile_q: int = 16) -> int:
    """In how many parts a decode's kernel takes each request of eight heads, two blocks an SM."""
    return _parts_of_heads(requests, kv_len, qo_len, tile_q, 4, 8)


def _parts_of_heads(
    requests: int, kv_len: int, qo_len: int, tile_q: int, group: int, kv_heads: int
) -> int:
    # As launch/attention/kernels.py makes the shape of decode_sm80 over pages.
    shape = TileShape(tile_q, 64, 264, 0.25, 0.03, rows_at_a_time=4, min_share=0.52)
    lengths = ((qo_len, kv_len),) * requests
    plan = Batch(lengths, group, kv_heads, shape, Masking(), Splitting()).plan()
    assert len(plan.items) % requests == 0
    return len(plan.items) // requests


def test_a_block_an_sm_is_enough_for_a_decode() -> None:
    """132 SMs: nearly as fast as 264 blocks, and half as many parts to merge."""
    assert _decode_parts(1, 32_768) == 16
    assert _decode_parts(1, 131_072, qo_len=8, tile_q=32) == 16
    # Five parts of three requests fill fewer SMs than eleven.
    assert _decode_parts(3, 32_768) == 11
    # Whole, 16 requests keep 128 SMs busy, and no merge is cheaper than half of so few keys.
    assert _decode_parts(16, 512) == 1


def test_parts_of_many_rows_cost_more_to_merge() -> None:
    assert _decode_parts(1, 2048, qo_len=8, tile_q=32) < _decode_parts(1, 2048)
    assert _decode_parts(3, 16_384, qo_len=8, tile_q=32) < _decode_parts(3, 16_384)


def test_few_key_heads_are_split_until_blocks_stream_two_key_tiles() -> None:
    """A part adds little to a merge, so blocks are many where few would stream most of the time."""
    assert _parts_of_heads(1, 1024, 1, 16, 8, 1) == 16
    assert _parts_of_heads(1, 4096, 1, 16, 8, 1) == 32
    assert _parts_of_heads(4, 8192, 1, 16, 8, 1) == 32  # a block an SM
    assert _parts_of_heads(16, 4096, 1, 16, 8, 1) == 8
    # Verification: 8 tokens of groups of 4.
    assert _decode_parts(1, 1024, qo_len=8, tile_q=32) == 8
    assert _decode_parts(1, 4096, qo_len=8, tile_q=32) == 16


@pytest.mark.parametrize(
    ("requests", "kv_len", "parts"),
    [
        *((64, kv_len, 1) for kv_len in (512, 1024, 8192, 16_384)),
        *((48, kv_len, parts) for kv_len, parts in ((1024, 1), (2048, 2), (8192, 2))),
        *((40, kv_len, parts) for kv_len, parts in ((1024, 1), (4096, 3))),
        *((32, kv_len, 1) for kv_len in (512, 4096, 16_384)),
        *((16, kv_len, parts) for kv_len, parts in ((1024, 1), (8192, 1), (32_768, 2))),
        *((8, kv_len, parts) for kv_len, parts in ((512, 1), (1024, 2), (8192, 4))),
        *((4, kv_len, 4) for kv_len in (512, 1024, 8192)),
    ],
)
def test_batches_that_fill_the_card_are_split_as_measured(
    requests: int, kv_len: int, parts: int
) -> None:
    """What the rows of 2026-11-22 were measured with, whatever a merge costs since."""
    assert _decode_parts(requests, kv_len) == parts


@pytest.mark.parametrize(("count", "median", "seed"), [(64, 2048, 1), (64, 8192, 2), (16, 8192, 3)])
def test_unequal_decodes_of_one_key_head_end_together(count: int, median: int, seed: int) -> None:
    """Parts leave room for ends of requests that are not full: 311 blocks on 264 places would take
    two waves."""
    lengths = median * np.random.default_rng(seed).lognormal(0.0, 0.7, count)
    shape = TileShape(16, 64, 264, 0.25, 0.03, rows_at_a_time=4, min_share=0.52)
    requests = tuple((1, 1 + int(length)) for length in lengths)
    batch = Batch(requests, 8, 1, shape, Masking(), Splitting())
    last, ideal = finish(batch.plan(), batch)
    assert last <= 1.15 * ideal + 7


@given(num_tiles=st.integers(0, 700), kv_len=st.integers(0, 40_000), num_slots=st.integers(1, 300))
def test_equal_tiles_are_split_as_a_batch_of_them(
    num_tiles: int, kv_len: int, num_slots: int
) -> None:
    shape = TileShape(16, 64, num_slots, 4.0)
    batch = Batch(((1, kv_len),) * num_tiles, 16, 1, shape, Masking(), Splitting())
    work = Work.of_equal(num_tiles, -(-kv_len // shape.tile_kv))
    splits = alike_splits(work, 1, 16, shape, Splitting())
    assert len(batch.plan().items) == splits * num_tiles


def test_unequal_requests_of_a_decode_come_longest_first() -> None:
    shape = TileShape(16, 64, 264)
    batch = Batch(((1, 5), (1, 900), (1, 70)), 1, 1, shape, Masking(), Splitting(False))
    assert column(batch.plan(), "kv_len").tolist() == [900, 70, 5]


def part_sizes(batch: Batch, plan: BatchPlan) -> tuple[list[tuple[int, int]], np.ndarray]:
    """Of each tile of rows, in the order of the list: its request's and its own first row, and how
    many key tiles its parts have."""
    shape, masking, group = batch.shape, batch.masking, batch.group_size
    names, sizes = [], []
    for item in plan.items:
        field = dict(zip(WORK_FIELDS, map(int, item), strict=True))
        if field["split"] > 0:
            continue
        first, qo_len, kv_len = field["first_row"], field["qo_len"], field["kv_len"]
        last = min(first + shape.tile_q, qo_len * group) - 1
        rows = first // group, last // group
        begin, end = masking.key_span(*rows, qo_len, kv_len)
        tiles = -(-max(end - begin, 0) // shape.tile_kv)
        names.append((field["q_start"], first))
        sizes.append(-(-tiles // field["num_splits"]))
    return names, np.array(sizes, int)


@settings(max_examples=300)
@given(batches(longest_q=300, longest_kv=2_000, most=12))
def test_tiles_of_a_request_stay_together_but_the_shortest(batch: Batch) -> None:
    batch = replace(batch, masking=replace(batch.masking, window_right=0))
    plan = batch.plan()
    names, sizes = part_sizes(batch, plan)
    requests = [name[0] for name in names]
    ends = [i for i in range(len(sizes) + 1) if (np.diff(sizes[i:]) <= 0).all()]
    least = [sizes[:i].min(initial=1 << 30) for i in ends]
    first_short = next(i for i, n in zip(ends, least, strict=True) if sizes[i:].max(initial=-1) < n)
    head = [request for request, _ in groupby(requests[:first_short])]
    assert len(head) == len(set(head))


@pytest.mark.parametrize(
    ("lengths", "window_left"),
    [([1024] * 16, -1), ([512] * 32, -1), ([4096] * 4, 1023), ([3000, 1500, 1000, 750, 600], -1)],
    ids=str,
)
def test_blocks_of_prefill_end_together(lengths: list[int], window_left: int) -> None:
    """Also where each takes an item ahead of time."""
    shape = TileShape(192, 80, 132)
    masking = Masking(window_left, 0)
    batch = Batch(tuple((n, n) for n in lengths), 4, 8, shape, masking, Splitting())
    costs = np.repeat(part_sizes(batch, batch.plan())[1] + 2.0, batch.num_kv_heads)
    slots = [(0.0, float(costs[slot])) for slot in range(shape.num_slots)]
    heapq.heapify(slots)
    for cost in costs[shape.num_slots :]:
        now, ahead = slots[0]
        heapq.heapreplace(slots, (now + ahead, float(cost)))
    assert max(map(sum, slots)) <= 1.02 * costs.sum() / shape.num_slots


def test_a_window_shortens_the_work() -> None:
    shape = TileShape(16, 64, 264)
    plain = Batch(((1, 32_768),) * 64, 4, 8, shape, Masking(1023), Splitting())
    short = replace(plain, lengths=((1, 1024),) * 64)
    assert len(plain.plan().items) == len(short.plan().items)


def test_a_fixed_split_depends_on_the_request_alone() -> None:
    shape = TileShape(64, 64, 264)
    lone = Batch(((3, 1000),), 4, 2, shape, Masking(-1, 0), Splitting(True, 128))
    among = replace(lone, lengths=((3, 1000), (3, 17), (3, 130_000)))
    splits = {int(kv): int(n) for *_, kv, n in among.plan().items[:, [0, 3, 6]]}
    assert splits[1000] == int(column(lone.plan(), "num_splits")[0]) == 8
    assert splits[17] == 1


def test_mask_starts_keep_64_bits() -> None:
    requests = BatchRequests(*(np.array([x]) for x in (1, 5, 0, 0)), np.array([2**40 + 3]))
    plan = plan_batch(requests, 1, 1, TileShape(16, 64, 4), Masking(), Splitting())
    assert plan.items[0, 8:10].view(np.int64)[0] == 2**40 + 3


def broken(plan: BatchPlan, name: str) -> BatchPlan:
    items = plan.items.copy()
    items[0, WORK_FIELDS.index(name)] += 1
    return replace(plan, items=items)


@pytest.mark.parametrize("name", ["q_start", "first_row", "split", "num_splits", "first_state"])
def test_the_cover_check_finds_what_is_wrong(name: str) -> None:
    shape = TileShape(16, 64, 264)
    batch = Batch(((20, 500), (4, 3000)), 2, 1, shape, Masking(), Splitting(True, 256))
    plan = batch.plan()
    validate_plan(plan, batch.requests(), 2, 16)
    with pytest.raises(PlanError):
        validate_plan(broken(plan, name), batch.requests(), 2, 16)
    with pytest.raises(PlanError):
        validate_plan(replace(plan, items=plan.items[1:]), batch.requests(), 2, 16)


def test_requests_come_one_turn_after_another() -> None:
    lengths, starts = np.array([10, 300, 20, 40, 500, 5]), np.arange(6) * 64
    turn = np.array([0, 0, 0, 1, 1, 1])
    requests = BatchRequests(np.full(6, 64), lengths, starts, starts, turn=turn)
    shape = TileShape(64, 64, 8)
    works = TileWork(requests, 1, Masking())
    assert works.longest == 500 and works.of(shape).longest == 8
    plan = plan_batch(requests, 1, 1, shape, Masking(), Splitting(may_split=False))
    assert plan.items[:, WORK_FIELDS.index("kv_len")].tolist() == [300, 20, 10, 500, 40, 5]
    assert requests.select(np.array([4, 0])).turn.tolist() == [1, 0]  # type: ignore[union-attr]
