"""Equal shares of all key tiles: each key tile once, few parts, blocks that end together."""

from __future__ import annotations

import re
from dataclasses import replace

import numpy as np
import pytest

from cupyattn.jit import kernels_dir
from cupyattn.schedule import cuts
from cupyattn.schedule.batch import (
    NUM_SPLITS,
    WORK_FIELDS,
    BatchPlan,
    BatchRequests,
    Splitting,
    listed_parts,
    plan_batch,
)
from cupyattn.schedule.cuts import MIN_TILES, Shares, cut
from cupyattn.schedule.masking import Masking
from cupyattn.schedule.tile_shape import TileShape
from cupyattn.schedule.validate import validate_plan

SHAPE = TileShape(64, 64, 132, state_cost=4.0, num_sms=132, takes_cuts=True)
_SPLIT = WORK_FIELDS.index("split")


def test_constants_of_the_device() -> None:
    text = (kernels_dir() / "cupyattn/plan/cuts.cuh").read_text(encoding="utf-8")
    numbers = dict(re.findall(r"(k\w+) = ([0-9.]+)f?[,;]", text))
    wanted = {"kMinCutTiles": MIN_TILES, "kCutState": cuts.STATE}
    assert {name: float(numbers[name]) for name in wanted} == wanted


def lengths(rng: np.random.Generator, kind: str, count: int, mean: int) -> np.ndarray:
    if kind == "equal":
        return np.full(count, mean)
    if kind == "uniform":
        return rng.integers(mean // 4, 2 * mean, count)
    drawn = np.exp(rng.normal(np.log(mean), 0.8, count))
    return np.clip(drawn, 1, 32768).astype(np.int64)


def requests(kv_len: np.ndarray, q_len: int) -> BatchRequests:
    starts = np.arange(kv_len.size)
    return BatchRequests(
        np.full(kv_len.size, q_len), kv_len, starts * q_len, starts * 512, uniform=q_len
    )


def plan(kv_len: np.ndarray, heads: int, q_len: int, shape: TileShape = SHAPE) -> BatchPlan:
    given = requests(kv_len, q_len)
    planned = plan_batch(given, heads, 1, shape, Masking(-1, 0), Splitting())
    validate_plan(planned, given, heads, shape.tile_q)
    return planned


def done_at(planned: BatchPlan, num_slots: int, overhead: int) -> int:
    """When the last block is done, each in the slot that is free first."""
    sizes = sizes_of(planned) + overhead
    if planned.num_blocks:
        _, _, following = listed_parts(planned.items)
        for place in range(len(sizes) - 1, -1, -1):  # what follows lies behind
            if following[place]:
                sizes[place] += sizes[following[place]]
        sizes = sizes[: planned.num_blocks]
    ends = np.zeros(num_slots, np.int64)
    for size in sizes:
        ends[ends.argmin()] += size
    return int(ends.max())


@pytest.mark.parametrize("seed", range(200))
def test_shares(seed: int) -> None:
    rng = np.random.default_rng(seed)
    num_shares, overhead = int(rng.integers(2, 140)), int(rng.integers(0, 6))
    sizes = rng.integers(0, rng.integers(1, 300), rng.integers(1, 200), endpoint=True)
    shares = Shares(num_shares, overhead)
    found = cut(sizes, shares)
    if found is None:
        return
    # Each key tile once, and no short parts.
    seen = [np.zeros(n, np.int64) for n in sizes]
    for request, begin, end in zip(found.request, found.begin, found.end, strict=True):
        seen[request][begin:end] += 1
    assert all((x == 1).all() for x in seen)
    parts = found.num_splits[found.request] > 1
    assert ((found.end - found.begin)[parts] >= MIN_TILES).all()
    # A cut is where a share ends, so parts are few, and shares are as long as any other.
    assert found.size == shares.size_of(int((sizes + overhead).sum()))
    assert found.request.size < sizes.size + num_shares
    assert (found.num_splits <= sizes // found.size + 2).all()
    # Parts of a request follow one another.
    ranks = np.lexsort((found.split, found.request))
    assert (found.split[ranks] == np.concatenate([np.arange(n) for n in found.num_splits])).all()
    # A share is one head and what follows it, in the line's order, and no longer than that.
    assert found.num_heads <= num_shares
    follower = np.where(found.follower < 0, -1, found.num_heads + found.follower)
    took = found.end - found.begin + overhead
    visited = []
    for part in range(found.num_heads):
        time = 0
        while part >= 0:
            visited.append(part)
            time += int(took[part])
            part = int(follower[part])
        assert time <= found.size + 2 * overhead + 2 * MIN_TILES
    assert sorted(visited) == list(range(found.request.size))
    line = np.lexsort((found.split, found.request))
    assert visited == line.tolist()


@pytest.mark.parametrize("kind", ["equal", "uniform", "uneven"])
@pytest.mark.parametrize(("count", "heads", "q_len"), [
    (24, 128, 1), (96, 128, 1), (32, 128, 2), (150, 64, 1), (50, 64, 2), (7, 64, 3), (20, 128, 4),
])  # fmt: skip
def test_plans(kind: str, count: int, heads: int, q_len: int) -> None:
    """Plans that are cut are done no later than those that are not."""
    for seed in range(10):
        rng = np.random.default_rng(seed)
        kv_len = lengths(rng, kind, count, int(np.exp(rng.uniform(np.log(900), np.log(12000)))))
        with_cuts = plan(kv_len, heads, q_len)
        without = plan(kv_len, heads, q_len, replace(SHAPE, takes_cuts=False))
        times = [done_at(x, 132, 2) for x in (with_cuts, without)]
        assert times[0] <= 1.1 * times[1] + 2
        assert with_cuts.num_states <= len(with_cuts.items)


def sizes_of(planned: BatchPlan) -> np.ndarray:
    """The key tiles of each item."""
    items = planned.items.astype(np.int64)
    total = -(-items[:, 3] // 64)
    each, rest = np.divmod(total, items[:, NUM_SPLITS])
    begin, end, _ = listed_parts(planned.items)
    return np.where(end > 0, np.minimum(end, total) - begin, each + (items[:, _SPLIT] < rest))


def test_last_wave() -> None:
    """192 tiles of 30 key tiles on 132 slots: two whole waves of 32 are 64 in the time of a key
    tile; shares are 48 and a part more."""
    planned = plan(np.full(96, 1900), 128, 1)
    assert planned.num_blocks == 132
    assert done_at(planned, 132, 2) <= 54
    assert planned.max_parts == 2


def test_tiles_of_a_request_stay_together() -> None:
    planned = plan(np.full(40, 4000), 128, 1)
    assert planned.num_blocks
    assert (planned.items[::2, [0, 2, 5]] == planned.items[1::2, [0, 2, 5]]).all()
    begin, end, following = listed_parts(planned.items)
    assert (begin[::2] == begin[1::2]).all() and (end[::2] == end[1::2]).all()
    assert (following[1::2] - following[::2] == (following[::2] > 0)).all()


@pytest.mark.parametrize("masking", [Masking(100, 0), Masking(-1, 0, has_mask=True)])
def test_what_is_not_cut(masking: Masking) -> None:
    """Windows, and rows that see other key tiles than the next, have equal parts."""
    kv_len = np.full(96, 1900)
    of_window = plan_batch(requests(kv_len, 1), 128, 1, SHAPE, masking, Splitting())
    assert not of_window.num_blocks
    rows = plan_batch(requests(kv_len, 65), 128, 1, SHAPE, Masking(-1, 0), Splitting())
    assert not rows.num_blocks
    given = plan_batch(requests(kv_len, 1), 128, 1, SHAPE, Masking(-1, 0), Splitting(False))
    assert not given.num_blocks
