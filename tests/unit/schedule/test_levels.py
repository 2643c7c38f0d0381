"""Plans of mixed batches and of cascades: rows meet their keys once, states do not overlap."""

from __future__ import annotations

import numpy as np
import pytest
from helpers.level_plans import SHAPES, Cascade, cascades, offsets
from hypothesis import given, settings
from hypothesis import strategies as st

from cupyattn.engine.levels import flatten, read_levels
from cupyattn.errors import ArgumentError, PlanError
from cupyattn.schedule import Masking, tile_span
from cupyattn.schedule.batch import WORK_FIELDS, BatchRequests, Splitting
from cupyattn.schedule.levels import (
    MOST,
    Levels,
    Served,
    check_level_limits,
    level_limits,
    level_tables,
)
from cupyattn.schedule.mixed import Device, combine, estimate, plan_mixed, state_offsets
from cupyattn.schedule.tile_shape import TileShape
from cupyattn.schedule.validate import validate_plan


def fields(items: np.ndarray) -> list[dict[str, int]]:
    return [dict(zip(WORK_FIELDS, row, strict=True)) for row in items.tolist()]


@settings(max_examples=300, deadline=None)
@given(cascades())
def test_the_tables_lead_every_row_to_states_of_all_its_keys(cascade: Cascade) -> None:
    requests, levels = cascade.join()
    group, masking = cascade.group_size, cascade.masking
    kinds = cascade.assign_requests(requests)
    plan = cascade.plan(kinds, Splitting(), leaves_states=True)
    tile_rows = cascade.tile_rows
    offsets_of, state_rows = state_offsets(plan.parts, tile_rows)
    items, merges = combine(plan.parts, offsets_of)
    assert not any(len(x) for x in merges)
    about = [(*k, part, (n, n)) for k, part, n in zip(kinds, plan.parts, tile_rows, strict=True)]
    spare = 3
    words, tiles = level_tables(levels, about, offsets_of, group, levels.num_rows + spare)
    count = 2 * (levels.num_rows + spare) * levels.num_levels
    assert len(words) % 4 == 0 and len(words) - count < 4
    rows = words[:count].reshape(-1, levels.num_levels, 2)
    assert (rows[levels.num_rows :, :, 0] == -2).all()
    # What the blocks write, by the place of a state's first row.
    written: dict[int, tuple[int, int, range]] = {}  # request, first row, keys
    taken = np.zeros(state_rows, int)
    identity = {
        (int(q), int(kv)): i
        for i, (q, kv) in enumerate(zip(requests.q_start, requests.kv_start, strict=True))
    }
    for item in fields(items):
        assert item["split_tile"] == -1
        request = identity[item["q_start"], item["kv_start"]]
        served = cascade.served()[-1]
        is_small = len(tile_rows) > 1 and item["qo_len"] * group <= served.max_rows
        shape = cascade.shapes[int(is_small)]
        place = (item["first_state"] + item["split"]) * shape.tile_q
        taken[place : place + shape.tile_q] += 1
        last_row = min(item["first_row"] + shape.tile_q, item["qo_len"] * group) - 1
        seen = [limits_of(requests, levels, masking, request, token)
                for token in range(item["first_row"] // group, last_row // group + 1)]  # fmt: skip
        begin, end = min(x.start for x in seen), max(x.stop for x in seen)
        first, last = tile_span(
            begin, max(begin, end), shape.tile_kv, item["split"], item["num_splits"]
        )
        keys = range(begin + first * shape.tile_kv, min(begin + last * shape.tile_kv, end))
        written[place] = request, item["first_row"], keys
    assert taken.max(initial=0) <= 1
    # What the merge reads for each row.
    for index in range(len(requests.qo_len)):
        for token in range(int(requests.qo_len[index])):
            place = rows[int(requests.q_start[index]) + token, levels.level[index]]
            wanted = limits_of(requests, levels, masking, index, token)
            for head in range(group):
                check_row(place, head, token * group + head, index, wanted, tiles, written)
    # Rows that a level has no keys for.
    has_keys = np.zeros(rows.shape[:2], bool)
    for begin, qo_len, level in zip(requests.q_start, requests.qo_len, levels.level, strict=True):
        has_keys[begin : begin + qo_len, level] = True
    assert (rows[: levels.num_rows, :, 0] == -1).tolist() == (~has_keys[: levels.num_rows]).tolist()


def limits_of(
    requests: BatchRequests, levels: Levels, masking: Masking, index: int, token: int
) -> range:
    """The keys of a request that a token sees, as the kernels find them (mask.cuh)."""
    qo_len, kv_len = int(requests.qo_len[index]), int(requests.kv_len[index])
    position = token + kv_len - qo_len
    if levels.positions is not None:
        assert requests.key_offset is not None
        place = levels.positions[int(requests.q_start[index]) + token]
        position = int(place) - int(requests.key_offset[index])
    end = min(kv_len, position + 1) if masking.window_right == 0 else kv_len
    begin = max(0, position - masking.window_left) if masking.window_left >= 0 else 0
    return range(begin, end)


def check_row(
    place: np.ndarray,
    head: int,
    packed: int,
    request: int,
    wanted: range,
    tiles: np.ndarray,
    written: dict[int, tuple[int, int, range]],
) -> None:
    """As levels.cuh reads: the states of one row hold its keys once each."""
    tile, row = int(place[0]), int(place[1]) + head
    first_state, splits, tile_rows, _ = tiles[tile].tolist()
    if row >= tile_rows:
        first_state, splits, tile_rows, _ = tiles[tile + row // tile_rows].tolist()
        row %= tile_rows
    count = np.zeros(max(0, wanted.stop), int)
    for split in range(splits):
        owner, first_row, keys = written[(first_state + split) * tile_rows]
        assert owner == request and first_row + row == packed
        count[keys.start : keys.stop] += 1
    assert (count[wanted.start : wanted.stop] == 1).all()


@settings(max_examples=200, deadline=None)
@given(cascades())
def test_positions_count_through_all_levels(cascade: Cascade) -> None:
    """What a row sees is what it would see of its keys as one sequence."""
    requests, levels = cascade.join()
    masking = cascade.masking
    cuts = [offsets(np.array([rows for rows, _ in level], int)) for level in cascade.levels]
    for row in range(levels.num_rows):
        places = [int(np.searchsorted(x, row, side="right")) - 1 for x in cuts]
        keys = [level[place][1] for level, place in zip(cascade.levels, places, strict=True)]
        own_rows, own = cascade.levels[-1][places[-1]][0], keys[-1]
        total, token = sum(keys), row - int(cuts[-1][places[-1]])
        position = total - own_rows + token
        end = total
        if masking.window_right == 0:
            position = max(position, total - own - 1)
            end = min(total, position + 1)
        begin = max(0, position - masking.window_left) if masking.window_left >= 0 else 0
        for level, place in enumerate(places):
            before = sum(keys[:level])
            wanted = range(max(begin - before, 0), max(0, min(end - before, keys[level])))
            mine = np.flatnonzero(
                (levels.level == level) & (requests.q_start == cuts[level][place])
            )
            if keys[level] == 0:
                assert not len(mine)
                continue
            (index,) = mine.tolist()
            seen = limits_of(requests, levels, masking, index, row - int(cuts[level][place]))
            assert list(seen) == list(wanted)


@settings(max_examples=300, deadline=None)
@given(cascades(most=12, longest_q=80, longest_kv=20_000), st.data())
def test_plans_that_fit_a_graph_have_room(cascade: Cascade, data: st.DataObject) -> None:
    """The limits are those of the first plan, whatever the lengths of the later ones."""
    requests, levels = cascade.join()
    capacity = [
        (
            len(level) + data.draw(st.integers(0, 3)),
            max((rows for rows, _ in level), default=0) + data.draw(st.sampled_from((0, 1, 50))),
        )
        for level in cascade.levels
    ]
    num_rows = levels.num_rows + data.draw(st.sampled_from((0, 1, 100)))
    tile_rows, kernel = cascade.tile_rows, (cascade.device.items, cascade.served())
    most = level_limits(capacity, num_rows, cascade.group_size, [kernel])
    kinds = cascade.assign_requests(requests)
    plan = cascade.plan(kinds, Splitting(), leaves_states=True)
    offsets_of, state_rows = state_offsets(plan.parts, tile_rows)
    items, _ = combine(plan.parts, offsets_of)
    about = [(*k, part, (n, n)) for k, part, n in zip(kinds, plan.parts, tile_rows, strict=True)]
    tables = level_tables(levels, about, offsets_of, cascade.group_size, num_rows)
    check_level_limits((len(items), sum(x.size for x in tables), state_rows), most)


def test_too_large_a_plan_is_said() -> None:
    kinds = [Served(128, 16, MOST), Served(16, 0, 16)]
    most = level_limits([(1, 4), (4, 1)], 4, 4, [(10, kinds)])
    with pytest.raises(PlanError, match="blocks, but the captured graph has room for"):
        check_level_limits((10_000, 1, 1), most)
    with pytest.raises(PlanError, match="words of merge tables"):
        check_level_limits((1, 10_000_000, 1), most)


@settings(max_examples=300, deadline=None)
@given(
    cascades(longest_kv=3000),
    st.sampled_from((Splitting(), Splitting(False), Splitting(True, 100))),
    st.booleans(),
)
def test_mixed_plans(cascade: Cascade, splitting: Splitting, leaves_states: bool) -> None:
    """Both kinds are covered; states and merges survive that they share a list."""
    rows, keys = np.array(cascade.levels[-1], np.int64).reshape(-1, 2).T
    requests = BatchRequests(rows, keys, offsets(rows)[:-1], offsets(keys)[:-1])
    kinds = cascade.assign_requests(requests)
    plan = cascade.plan(kinds, splitting, leaves_states)
    tile_rows = cascade.tile_rows
    for part, (_, own), count in zip(plan.parts, kinds, tile_rows, strict=True):
        validate_plan(part, own, cascade.group_size, count)
    offsets_of, state_rows = state_offsets(plan.parts, tile_rows)
    items, merges = combine(plan.parts, offsets_of)
    sizes = [len(part.items) for part in plan.parts]
    kind_of = np.repeat(np.arange(len(sizes)), sizes)
    taken = np.zeros(state_rows, int)
    for item, kind in zip(fields(items), kind_of, strict=True):
        if item["num_splits"] > 1 or leaves_states:
            begin = (item["first_state"] + item["split"]) * tile_rows[kind]
            taken[begin : begin + tile_rows[kind]] += 1
    assert taken.max(initial=0) <= 1
    for kind, firsts in enumerate(merges):
        for tile, first in enumerate(firsts.tolist()):
            item = fields(items[first : first + 1])[0]
            assert (item["split"], item["split_tile"]) == (0, tile)
            assert kind_of[first] == kind and item["num_splits"] > 1
    if splitting == Splitting():
        assert plan.time <= cascade.plan(kinds, Splitting(False), leaves_states).time


@settings(max_examples=200, deadline=None)
@given(cascades(longest_kv=20_000), st.booleans())
def test_estimates_are_finite(cascade: Cascade, leaves_states: bool) -> None:
    requests, _ = cascade.join()
    kinds = [
        (x, s) for (_, x), s in zip(cascade.assign_requests(requests), cascade.shapes, strict=True)
    ]
    device = cascade.device
    time = estimate(kinds, cascade.group_size, device, cascade.masking, leaves_states)
    dealt = cascade.assign_requests(requests)
    assert time == cascade.plan(dealt, Splitting(), leaves_states).time
    assert np.isfinite(time) and time >= 0 and (time > 0) == bool(len(requests.qo_len))


def test_causality_hides_no_shared_keys_from_the_estimate() -> None:
    """More rows than shared keys: bottom-right they would see none, and cost nothing."""
    shapes = SHAPES[0][:1]
    own = tuple((512, 512) for _ in range(16))
    plain, causal = (
        Cascade((((8192, 2048),), own), 4, 8, shapes, Masking(-1, right)) for right in (-1, 0)
    )
    times = []
    for cascade in (plain, causal):
        requests, _ = cascade.join()
        times.append(estimate([(requests, shapes[0])], 4, Device(264, 8), cascade.masking, True))
    assert times[1] >= 0.9 * times[0]


# --- the flat batch ---


@settings(max_examples=200, deadline=None)
@given(cascades(), st.sampled_from((1, 4, 16)))
def test_a_flat_batch_has_the_pages_of_all_levels(cascade: Cascade, page_size: int) -> None:
    lists: list[list[np.ndarray]] = [[], [], [], []]
    ids, chains = 0, []
    for level in cascade.levels:
        rows, keys = np.array(level, np.int64).reshape(-1, 2).T
        counts = -(-keys // page_size)
        own = np.arange(ids, ids + counts.sum())
        ids += int(counts.sum())
        chains.append(np.split(own, np.cumsum(counts)[:-1]) if len(counts) else [])
        last = np.where(keys > 0, (keys - 1) % page_size + 1, 0)
        for kind, x in zip(lists, (offsets(rows), offsets(counts), own, last), strict=True):
            kind.append(x)
    parts = read_levels(lists, len(cascade.levels), page_size, False)
    if not parts[0].num_rows:
        return
    flat = flatten(parts, page_size, cascade.masking.window_right == 0)
    cuts = lists[0]
    is_nested = all(np.isin(x, cuts[-1]).all() for x in cuts)
    is_whole = all(
        keys % page_size == 0 for level in cascade.levels[:-1] for rows, keys in level if rows
    )
    sees_all = cascade.masking.window_right < 0 or all(
        rows <= keys for rows, keys in cascade.levels[-1]
    )
    assert (flat is not None) == (is_nested and is_whole and sees_all)
    if flat is None:
        return
    requests, pages = flat
    for request, (rows, keys) in enumerate(cascade.levels[-1]):
        begin = int(requests.kv_start[request])
        if not rows:
            assert requests.kv_len[request] == 0
            continue
        row = cuts[-1][request]
        places = [int(np.searchsorted(x, row, side="right")) - 1 for x in cuts[:-1]]
        shared = sum(level[p][1] for level, p in zip(cascade.levels, places, strict=False))
        assert requests.kv_len[request] == shared + keys
        own = [chain[p] for chain, p in zip(chains, [*places, request], strict=True)]
        wanted = np.concatenate(own)
        assert pages[begin : begin + len(wanted)].tolist() == wanted.tolist()


def test_levels_must_refine_only_where_positions_count() -> None:
    levels = (((2, 8), (3, 4)), ((3, 5), (2, 6)))
    shapes = SHAPES[0]
    Cascade(levels, 2, 1, shapes, Masking(-1, 0)).join()
    with pytest.raises(ArgumentError, match=r"qo_indptr_arr\[1\]: rows of one request"):
        Cascade(levels, 2, 1, shapes, Masking(5, 0)).join()


def test_parts_of_few_tiles_run_at_a_time() -> None:
    """Two tiles on 13 blocks: parts of a thirteenth of all keys would be 14, and a wave more."""
    rows, keys, zero = np.array([256]), np.array([11_280]), np.zeros(1, np.int64)
    kinds = [(BatchRequests(rows, keys, zero, zero), TileShape(128, 128, 13, 4.0))]
    plan = plan_mixed(kinds, 1, Device(13, 1), Masking(), Splitting(), leaves_states=True)
    assert [len(part.items) for part in plan.parts] == [12]
