"""Launches whose blocks find their items by lengths in device memory: no plan, and no list.

The host knows how many tiles there may be, and what lengths are likely. Where whole keys serve
those as soon as splits would, of which only a plan of the device knows, prefill_sm90 is launched
alone (kernels/cupyattn/plan/item_finder.cuh). Blocks of decode that all run at a time split keys
too: each makes the same plan (split_finder.cuh).
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import numpy as np

from ...choose import candidates
from ...choose.candidates import Keys
from ...core import dtypes
from ...core.problem import AttentionProblem
from ...schedule.balance import Costs
from ...schedule.batch import BatchRequests
from ...schedule.tile_shape import TileShape
from ..driver import params
from ..driver.enqueue import MAX_GRID_YZ
from ..tiles.config import FOUND_ITEMS, FOUND_PARTS
from ..tiles.row_classes import DECODE, ONE_AN_SM, row_class_of
from .batch import BatchLauncher, BatchSchedule
from .kernels import UNKNOWN_LENGTH
from .plan_batch import DevicePlan, Lengths, capacity_of

# What a plan on the device takes before attention, in microseconds. What it may save is whole waves
# of tiles by splits of their keys.
_PLAN_US = 4.0
# Levels of tiles are sums of lengths.
_MAX_LENGTH = 2**29
# Requests that a warp looks at together, two a lane: tiles of more have places by their offsets.
_TOGETHER = 64
# Where requests are more than lanes, keys are split only if each tile may have two parts: the
# longest of many is not worth a merge.
_A_LANE_EACH = 32
# Requests are taken for equal if their mean is more than this of an upper bound.
_EQUAL = 0.5
_LINE = 128


def prepare(launcher: BatchLauncher, lengths: Lengths) -> DevicePlan | None:
    """The launch of a batch whose blocks find their items; None where a plan is needed, or worth
    its time."""
    if not _are_read(launcher, lengths):
        return None
    row_class = row_class_of(lengths.max_qo_len * launcher.group_size)
    finds_parts = lengths.num_requests <= _TOGETHER
    is_decode = row_class in ONE_AN_SM and finds_parts
    plan = None
    if row_class != DECODE:
        plan = _prepare_prefill(launcher, lengths, 0.0 if is_decode else _PLAN_US)
    if plan is None and is_decode:
        plan = _prepare_decode(launcher, lengths)
        if plan is None and row_class != DECODE:
            plan = _prepare_prefill(launcher, lengths, _PLAN_US)  # what is left is planned
    return plan


def serving(launcher: BatchLauncher, lengths: Lengths) -> BatchLauncher:
    """The launcher of the form of 8-bit queries in which such lengths are served soonest."""
    if len(launcher.launchers) == 1 or lengths.num_requests <= 0:
        return launcher
    return _serving(launcher.launchers[0], candidates.forced_form(), _likely(lengths))


@lru_cache(maxsize=1024)
def _serving(first: BatchLauncher, form: str | None, likely: _Likely) -> BatchLauncher:
    """form: that is forced, or None."""
    return first.serving(_requests_of(likely))


def _prepare_prefill(
    launcher: BatchLauncher, lengths: Lengths, plan_us: float
) -> DevicePlan | None:
    """The launch of prefill_sm90, and a merge if keys are split. plan_us: what others take to be
    planned."""
    # A merge goes by a list of equally many tiles of each request.
    may_split = lengths.num_requests <= _TOGETHER and lengths.qo_len > 0
    chosen = _choose(launcher, plan_us, may_split, _likely(lengths))
    if chosen is not None and chosen[2] and not _splits_all(launcher, lengths, chosen[1]):
        chosen = _choose(launcher, plan_us, False, _likely(lengths))
    if chosen is None:
        return None
    name, shape, is_split = chosen
    slots = shape.num_slots // launcher.num_kv_heads
    num_tiles = num_items = _max_tiles(lengths, launcher.group_size, shape.tile_q)
    if is_split:
        num_items = slots
    if num_items > MAX_GRID_YZ and not shape.is_persistent:
        return None
    what, parts_of = (FOUND_PARTS, num_tiles) if is_split else (FOUND_ITEMS, 0)
    if not launcher.finding(what).kernels.get(name).kinds[0].finds_items:
        return None
    longest = lengths.likely_kv_len
    reserved = launcher.reserve_found(what, name, num_items, longest, parts_of=parts_of)
    constants = _pack(launcher, lengths, shape.tile_q)
    if is_split:
        constants += _pack_splits(shape, slots, 0.0, _costs(shape))
    return _launched_alone(reserved, constants, int(shape.is_persistent))


def _splits_all(launcher: BatchLauncher, lengths: Lengths, shape: TileShape) -> bool:
    """Whether there are slots for two parts of each tile, of requests that are many."""
    if lengths.num_requests <= _A_LANE_EACH:
        return True
    num_tiles = _max_tiles(lengths, launcher.group_size, shape.tile_q)
    return 2 * num_tiles * launcher.num_kv_heads <= shape.num_slots


def _costs(shape: TileShape) -> Costs:
    """What splits are chosen by, in the time of a key tile."""
    times = shape.times
    assert times is not None
    item, merge, state = (x / times.key_tile for x in (times.item, times.merge, times.state))
    return Costs(item, merge, state, 0.0, times.single_block_factor)


def _prepare_decode(launcher: BatchLauncher, lengths: Lengths) -> DevicePlan | None:
    """The launch of decode, whose blocks all fit one wave."""
    keys = Keys.equal(lengths.num_requests, lengths.likely_kv_len)
    row_class, shape = launcher.choose_found(keys, lengths.max_qo_len)
    tiles = launcher.finding(FOUND_PARTS).kernels.get(row_class).kinds[0]
    if not tiles.finds_items:
        return None
    capacity = capacity_of(launcher, lengths, shape, 1.0, last_block_merges=not shape.is_fused)
    num_items, slots = capacity.num_tiles, capacity.items_per_wave
    if num_items > slots or (not shape.is_fused and lengths.qo_len <= 0):
        return None
    if capacity.num_more:
        num_items = slots
    parts_of = capacity.num_tiles if capacity.num_more else 0
    longest = lengths.likely_kv_len
    reserved = launcher.reserve_found(
        FOUND_PARTS, row_class, num_items, longest, parts_of=parts_of, shape=shape
    )
    max_rows = lengths.max_qo_len * launcher.group_size
    costs, part_cost = shape.costs(max_rows), shape.cost_of_part(max_rows)
    constants = _pack(launcher, lengths, tiles.tile_q)
    is_listed = not shape.is_fused
    constants += _pack_splits(shape, slots, part_cost, costs, parts_of > 0, is_listed)
    num_counters = 0
    if parts_of and shape.is_fused:
        num_counters = num_items * launcher.num_kv_heads * shape.cluster
    return _launched_alone(reserved, constants, num_counters)


def _pack_splits(
    shape: TileShape,
    slots: int,
    part_cost: float,
    costs: Costs,
    may_split: bool = True,
    is_listed: bool = True,
) -> bytes:
    magic, shift = params.divisor(shape.tile_kv)
    return params.SPLIT_FINDER.pack(
        shape.tile_kv,
        shift,
        magic,
        slots,
        may_split,
        may_split and is_listed,
        part_cost,
        costs.block,
        costs.merge,
        costs.state,
        costs.part,
        costs.min_share,
        1.0 / slots,
    )


def _launched_alone(
    reserved: tuple[BatchSchedule, int], constants: bytes, num_counters: int
) -> DevicePlan:
    schedule, words_bytes = reserved
    # Rows of states begin where lines do.
    partials = -(-words_bytes // _LINE) * _LINE
    return DevicePlan(
        planner=None,
        schedule=schedule,
        items=0,
        merges=0,
        counters=0,
        scales=(0, 0, 0),
        partials=partials,
        num_bytes=partials + schedule.workspace_bytes,
        constants=constants,
        num_counters=num_counters,
    )


def may_find(problem: AttentionProblem) -> bool:
    """Whether any of a problem's calls may find their items. Those of rarer options are planned, so
    that there are no two kernels of each."""
    return (
        not problem.custom_mask
        and not problem.transforms_logits
        and not problem.soft_cap
        and (problem.is_8bit or not problem.dtype_kv.is_fp8)
        and not problem.key_share
        and not problem.is_wide
        and not problem.sparse
        and problem.pos_encoding == "NONE"
    )


def _are_read(launcher: BatchLauncher, lengths: Lengths) -> bool:
    """Whether kernels read lengths of this form."""
    return (
        may_find(launcher.problem)
        and lengths.num_requests > 0
        and lengths.num_rows > 0
        and not lengths.has_first_keys
        and lengths.sharers == lengths.request_tokens == 1
        and not lengths.list_gap
        and max(lengths.num_rows, lengths.max_kv_len) * launcher.group_size <= _MAX_LENGTH
        and all(
            x.dtype is dtypes.int32 and x.stride == 1 and x.unit in (1, -1) for x in lengths.formats
        )
    )


def _max_tiles(lengths: Lengths, group_size: int, tile_q: int) -> int:
    """The most tiles of rows, whatever the lengths are."""
    if lengths.qo_len >= 0:
        tiles = lengths.num_requests * -(-lengths.qo_len * group_size // tile_q)
        if lengths.num_requests <= _TOGETHER:  # else places follow from offsets
            return tiles
    rows = lengths.num_rows * group_size
    if lengths.num_requests <= _TOGETHER:
        used = min(lengths.num_requests, lengths.num_rows)
        return used + (rows - used) // tile_q
    return lengths.num_requests + rows // tile_q


class _Likely(NamedTuple):
    """Requests, rows and keys of the longest, and of each other, as far as shapes say it."""

    num_requests: int
    longest_rows: int
    longest_keys: int
    rows: int
    keys: int


def _likely(lengths: Lengths) -> _Likely:
    count, longest_kv = lengths.num_requests, lengths.likely_kv_len
    rows = lengths.qo_len if lengths.qo_len > 0 else -(-lengths.num_rows // count)
    if lengths.kv_step or lengths.max_kv_len < lengths.kv_room:  # a table has room for more
        keys = longest_kv * 3 // 4
        if longest_kv >= lengths.max_kv_len:
            keys = min(keys, UNKNOWN_LENGTH)
        # Requests of a server differ, so that the longest are worth splitting.
        keys = max(rows, keys)
        return _Likely(count, rows, keys, rows, max(rows, keys // 2))
    keys = -(-lengths.kv_room // count)
    if count == 1 or keys >= _EQUAL * longest_kv:
        return _Likely(count, rows, keys, rows, keys)
    longest_keys = min(lengths.kv_room, longest_kv * 3 // 4)
    other_keys = (lengths.kv_room - longest_keys) // (count - 1)
    if lengths.qo_len > 0 or lengths.num_rows != lengths.kv_room:
        return _Likely(count, rows, longest_keys, rows, other_keys)
    return _Likely(count, longest_keys, longest_keys, other_keys, other_keys)


@lru_cache(maxsize=4096)
def _choose(
    launcher: BatchLauncher, plan_us: float, may_split: bool, likely: _Likely
) -> tuple[str, TileShape, bool] | None:
    """The tiles that serve such requests, and whether keys are split; or None."""
    return launcher.choose_unplanned(_requests_of(likely), plan_us, may_split)


def _requests_of(likely: _Likely) -> BatchRequests:
    """Requests as shapes say that they are."""
    count, longest_rows, longest_keys, rows, keys = likely
    qo_len, kv_len = np.full(count, rows, np.int64), np.full(count, keys, np.int64)
    qo_len[0], kv_len[0] = longest_rows, longest_keys
    zeros = np.zeros(count, np.int64)
    uniform = rows if longest_rows == rows else -1
    return BatchRequests(qo_len, kv_len, zeros, zeros, uniform=uniform)


def _pack(launcher: BatchLauncher, lengths: Lengths, tile_q: int) -> bytes:
    masking, group_size = launcher.masking, launcher.group_size
    magic, shift = params.divisor(tile_q)
    is_causal = masking.hides_future and masking.window_left < 0
    # Rows under a window see alike, whatever keys their requests have.
    tiles_a_key = min(1.0, group_size / tile_q) if masking.window_left < 0 else 0.0
    # All tiles of a request have levels of their own. Longer requests than are likely come first.
    max_tiles = (lengths.qo_len if lengths.qo_len > 0 else lengths.num_rows) * group_size // tile_q
    max_levels = max_tiles + int(lengths.likely_kv_len * tiles_a_key) + 1
    return params.FINDER.pack(
        lengths.num_requests,
        lengths.qo_len,
        lengths.num_rows,
        lengths.kv_step,
        lengths.max_kv_len,
        lengths.kv_room or lengths.max_kv_len,
        lengths.formats[1].unit < 0,
        shift,
        magic,
        is_causal,
        tiles_a_key,
        1 << (max_levels.bit_length() - 1),
    )


def pack_lengths(
    plan: DevicePlan, qo_lens: int, kv_lens: int, qo_offsets: int, kv_offsets: int
) -> bytes:
    """What launches read of arrays at these addresses, 0 for none."""
    return params.DEVICE_LENGTHS.pack(qo_offsets, qo_lens, kv_offsets, kv_lens) + plan.constants
