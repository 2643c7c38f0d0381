"""Launches the attention kernels of a batch from a work list in device memory.

Requests of few query rows and of many share a launch whose blocks are of two kinds, where there is
such a kernel; else each row class has one of its own. Each launch has a plan of its own, and a
share of the words and of the workspace. The levels of a cascade leave states, which one more
launch merges.
"""

from __future__ import annotations

import math
from dataclasses import replace
from functools import lru_cache

import numpy as np

from ...choose import candidates
from ...choose.candidates import BY_ROW_CLASS, Batch, Candidate, Keys, Offer, full_name
from ...choose.card import card_of
from ...core.device import NO_GPU, device_props, overlaps_launches
from ...core.problem import AttentionProblem
from ...core.spec import AttentionSpec
from ...schedule.balance import Work
from ...schedule.batch import (
    NUM_SPLITS,
    WORK_FIELDS,
    BatchPlan,
    BatchRequests,
    Splitting,
    TileWork,
    alike_splits,
    max_of,
    plan_tiles,
)
from ...schedule.levels import (
    MOST,
    LevelLimits,
    Levels,
    Served,
    check_level_limits,
    level_limits,
    level_tables,
)
from ...schedule.limits import Limits, check_limits, limits
from ...schedule.masking import Masking
from ...schedule.mixed import (
    CASCADE_SPLITTINGS,
    SPLITTINGS,
    Device,
    MixedPlan,
    combine,
    estimate,
    plan_mixed,
    state_offsets,
)
from ...schedule.tile_shape import TileShape
from ...schedule.validate import validate_plan
from ..driver import params
from ..driver.enqueue import MAX_GRID_YZ, cuda
from ..tiles.config import FOUND_PARTS, Target, TileConfig
from ..tiles.forms import ON_ARRIVAL, form_name, forms_within
from ..tiles.row_classes import DECODE, LARGE, MAX_ROWS, SMALL, VERIFY, row_class_of
from . import log_choices, rotate_batch, widen_rows
from .bind_batch import Binder
from .equal_requests import EqualRequests, key_of_equal, without_list
from .kernels import (
    MAX_PARTS,
    UNKNOWN_LENGTH,
    Kernel,
    KernelGroup,
    Kernels,
    Rows,
    group_by_row_class,
)
from .layout import (
    ANY_BATCH_BYTES,
    BatchSchedule,
    Capacity,
    KernelWork,
    Layout,
    Reserved,
    Uniform,
)

_MAX_EQUAL = 64  # each holds a work list
# In the time of a key tile: less than this an estimate of two short launches does not tell apart.
_MIN_GAIN = 5.0
_NUM_SPLITS = WORK_FIELDS.index("num_splits")
_NO_MERGES = np.zeros(0, np.int32)
_NO_STRIDES = bytes(params.STRIDES.size)


@lru_cache(maxsize=256)
def _with_slots(shape: TileShape, num_slots: int) -> TileShape:
    """The shape of a launch that leaves SMs to others."""
    return replace(shape, num_slots=num_slots)


@lru_cache(maxsize=256)
def _without_cuts(shape: TileShape) -> TileShape:
    """The shape of a launch whose blocks take an item each."""
    return replace(shape, takes_cuts=False)


def _with_rows(schedule: BatchSchedule, num_rows: int, room: int) -> BatchSchedule:
    """The schedule of a graph, which says how many rows of q there are, at most `room`."""
    count = np.array([num_rows, 0, 0, 0], np.int32)  # what follows lies on a boundary too
    words = np.concatenate([schedule.words, count])
    return replace(schedule, words=words, row_room=room, row_count=schedule.words.nbytes)


def _likely_requests(capacity: Capacity) -> BatchRequests:
    """Requests that a graph may be replayed with: one of the most rows, and others as long."""
    count, longest = max(capacity.num_requests, 1), max(capacity.max_qo_len, 1)
    qo_len = np.full(count, longest, np.int64)
    if count > 1:
        qo_len[1:] = min(longest, max(1, (capacity.num_rows - longest) // (count - 1)))
    zeros = np.zeros(count, np.int64)
    uniform = longest if (qo_len == longest).all() else -1
    kv_len = np.maximum(qo_len, UNKNOWN_LENGTH)
    return BatchRequests(qo_len, kv_len, zeros, zeros, uniform=uniform)


class BatchLauncher(Binder):
    """Serves every plan and run of one problem, device and geometry.

    form       in which it serves arrays of 8 bits (launch/tiles/forms.py)
    launchers  of all forms of the problem, the first the one that was asked for; see `serving`
    """

    def __init__(self, spec: AttentionSpec, problem: AttentionProblem, device_index: int) -> None:
        super().__init__(spec, problem, device_index)
        self.launchers: tuple[BatchLauncher, ...] = (self,)
        self.form = form_name(spec, self.problem)
        props = device_props(device_index)
        target = Target(props.arch, props.max_smem_per_block, spec.page_size)
        forms = forms_within(spec, problem, target)
        self._join([BatchLauncher(spec, form.problem, device_index) for form in forms[1:]])
        problem = self.problem
        num_kv_heads, group_size = spec.num_kv_heads, spec.group_size
        self.num_kv_heads = num_kv_heads
        share = spec.key_share if problem.key_share else None
        self.masking = Masking(spec.window_left, spec.right_limit, problem.custom_mask, share)
        self._kernels = Kernels(
            problem, num_kv_heads, group_size, spec.page_size, device_index, form=self.form
        )
        self._layout = Layout(self._kernels, problem, num_kv_heads, group_size, device_index)
        self._finding: dict[str, Layout] = {}
        self._equal: dict[tuple[object, ...], BatchSchedule | EqualRequests] = {}
        self._log = log_choices.log_of(spec, problem)

    def _join(self, others: list[BatchLauncher]) -> None:
        """Make these and it the launchers of one problem."""
        launchers = self, *others
        for launcher in others:
            launcher.launchers = launchers
        self.launchers = launchers

    def serving(
        self,
        requests: BatchRequests,
        *,
        split_tokens: int = 0,
        may_split: bool = True,
        capacity: Capacity | None = None,
    ) -> BatchLauncher:
        """The launcher of the form by which these requests are served soonest; the arguments are
        those of `schedule`. Where the caller says how keys are split it is the first, so that a
        row's bits do not depend on the batch; and a graph keeps one whatever the lengths are."""
        if len(self.launchers) == 1:
            return self
        offered = list(self.launchers)
        if Splitting(may_split, split_tokens).is_given:
            offered = offered[:1]
        elif capacity is not None:
            offered = [x for x in offered if not x.widens_keys]  # it has no room for them
            requests = _likely_requests(capacity)
        form = candidates.forced_form()
        if form is not None:
            offered = [x for x in offered if x.form == form] or offered
        return offered[0] if len(offered) == 1 else min(offered, key=lambda x: x.time_of(requests))

    def time_of(self, requests: BatchRequests) -> float:
        """When requests are served that are served soonest in this form; infinite where nothing is
        known of it."""
        batch = self.batch_of(requests)
        if not batch.parts:
            return 0.0
        if self.form == ON_ARRIVAL and batch.max_rows > MAX_ROWS[SMALL]:
            return math.inf  # Hopper's own tiles read no such rows
        return candidates.best(self._kernels, batch).time + self.ahead_time(requests)

    def ahead_time(self, requests: BatchRequests) -> float:
        """What a launch ahead takes that widens the rows of requests."""
        if not any(self.widened):
            return 0.0
        num_rows, num_keys = int(requests.qo_len.sum()), int(requests.kv_len.sum())
        rows = widen_rows.rows_of(self.spec, _NO_STRIDES, num_rows, num_keys, self.widened)
        widening = card_of(device_props(self.device_index)).widening
        return widening.time(sum(x.num_elements for x in rows))

    def schedule(
        self,
        requests: BatchRequests,
        *,
        split_tokens: int = 0,
        may_split: bool = True,
        capacity: Capacity | None = None,
        max_bytes: int | None = None,
    ) -> BatchSchedule:
        """Plan on the host. split_tokens > 0: every request is split into parts of this many keys.

        With a capacity, `words` and `workspace_bytes` have the same size for every plan that fits;
        a plan that does not is a PlanError. Keys are split in fewer parts where the workspace would
        else take more than `max_bytes`; if it still does, this is the best plan without a limit.
        """
        if requests.turn is not None and not self._takes_turns(requests):
            requests = replace(requests, turn=None)
        schedule = self._within(requests, Splitting(may_split, split_tokens), capacity, max_bytes)
        if capacity is not None and self.widens_queries:
            num_rows = int((requests.q_start + requests.qo_len).max(initial=0))
            schedule = _with_rows(schedule, num_rows, capacity.num_rows)
        schedule.requests = requests
        if self.widens_keys:
            schedule.key_rows = int((requests.kv_start + requests.kv_len).max(initial=0))
        if self._log is not None:
            self._log.batch(self, schedule, requests)
        return schedule

    def _within(
        self,
        requests: BatchRequests,
        splitting: Splitting,
        capacity: Capacity | None,
        max_bytes: int | None,
    ) -> BatchSchedule:
        """The schedule within so many bytes, if one is."""
        best = self._schedule_known(requests, splitting, capacity)
        if max_bytes is None or best.workspace_bytes <= max_bytes or splitting.is_given:
            return best
        fewer = SPLITTINGS[1:]
        if max_bytes >= ANY_BATCH_BYTES:
            fewer = (*fewer, Splitting(False))
        for splitting in fewer:
            schedule = self._schedule_known(requests, splitting, capacity)
            if schedule.workspace_bytes <= max_bytes:
                return schedule
        return best

    def _schedule_known(
        self, requests: BatchRequests, splitting: Splitting, capacity: Capacity | None
    ) -> BatchSchedule:
        """Plans of equal requests are made once."""
        key = None
        if not (self._is_debugging() or candidates.forced()):
            has_table = bool(self._keys.rope_table)
            key = key_of_equal(
                requests, self.group_size, self.masking, has_table, splitting, capacity
            )
        if key is None:
            return self._schedule(requests, splitting, capacity)
        cached = self._equal.get(key)
        if cached is None:
            if len(self._equal) >= _MAX_EQUAL:
                self._equal.clear()
            # Most lengths of prompts do not come again: what a repeat needs is found when it does.
            schedule = self._equal[key] = self._schedule(requests, splitting, capacity)
            return schedule
        if isinstance(cached, BatchSchedule):
            cached = self._equal[key] = EqualRequests(cached, requests.uniform)
        return cached.schedule(requests)

    def choose_for_any_length(self, num_requests: int, qo_len: int) -> tuple[str, TileShape] | None:
        """`choose` for decode of so many requests, whatever their lengths; None if those decide, or
        it is no decode."""
        max_rows = qo_len * self.group_size
        if row_class_of(max_rows, self.problem) != DECODE or self._is_debugging():
            return None
        return self._kernels.only_blocks(num_requests, max_rows)

    def schedule_planned(
        self, row_class: str, shape: TileShape, built: Limits, max_parts: int
    ) -> BatchSchedule:
        """The launches of a list that the device has made, whose words it has written.
        max_parts: of a tile."""
        if max_parts > MAX_PARTS:
            shape = self._kernels.merged_if_many(shape)
        if self._log is not None:
            self._log.any_lengths(row_class, self.kernel(row_class).loaded.tiles.name)
        reserved = self._exactly(row_class, self._reserved(row_class, shape, built), max_parts)
        part, _, workspace_bytes = self._layout.part(row_class, reserved, 0, 0)
        return BatchSchedule(_NO_MERGES, workspace_bytes, (part,))

    def _schedule(
        self, requests: BatchRequests, splitting: Splitting, capacity: Capacity | None
    ) -> BatchSchedule:
        if capacity is not None:
            return self._schedule_for_graphs(requests, splitting, capacity)
        candidate = self._choose(requests, splitting)
        parts, slots = candidate.parts, candidate.slots
        mixed = None
        if slots < 0 and len(parts) > 1:
            mixed = self._kernels.mixed_rows(requests.qo_len)
        if mixed is not None:
            schedule = self._layout.lay_out([self._mixed_work(mixed, requests, splitting)])
            schedule.candidate = full_name(candidate.name, self.form)
            return schedule
        if splitting.is_given:
            (row_class, first), *others = parts
            slots = self._blocks_of_first(row_class, first, [x.requests for _, x in others])
        works: list[KernelWork] = []
        for row_class, chosen in parts:
            shape = candidate.shape or self._kernels.shape(row_class)
            if slots > 0:
                shape = _with_slots(shape, slots)
            plan = self._plan(chosen, shape, splitting)
            if len(plan.items):
                is_free = not splitting.is_given and len(parts) == 1
                if is_free and plan.num_states > MAX_PARTS:
                    shape = self._kernels.merged_by(shape, plan.max_parts)
                exact = Limits(len(plan.items), len(plan.merges), plan.num_states)
                work = self._kernel_work(
                    row_class, shape, plan, exact, splitting, max(slots, 0), is_exact=True
                )
                works.append(work)
            slots = 0
        schedule = self._of_requests(works, requests)
        if len(works) == 1:
            schedule = without_list(requests, schedule, self._parts_of_only_tile(works[0]))
        schedule.candidate = full_name(candidate.name, self.form)
        return schedule

    def _parts_of_only_tile(self, work: KernelWork) -> int:
        """In how many parts a portable kernel has the keys of its only tile of rows; 0: it has
        more tiles, or reads a list for other reasons."""
        kernel, items = self._kernels.get(work.row_class), work.items
        if len(kernel.kinds) > 1 or kernel.kinds[0].is_sm90 or self.problem.is_wide:
            return 0
        return len(items) if len(items) == items[0, _NUM_SPLITS] else 0

    def _schedule_for_graphs(
        self, requests: BatchRequests, splitting: Splitting, capacity: Capacity
    ) -> BatchSchedule:
        """With room for all that the capacity allows, by a kernel that lengths do not choose."""
        keys = Keys.equal(capacity.num_requests, UNKNOWN_LENGTH)
        row_class, shape = self.choose(keys, capacity.max_qo_len, splitting)
        if shape.takes_cuts:  # each item has a block
            shape = _without_cuts(shape)
        plan = self._plan(self._works(requests), shape, splitting)
        maximum = self._limits(shape, splitting, capacity)
        check_limits(plan, maximum)
        work = self._kernel_work(row_class, shape, plan, maximum, splitting)
        return self._of_requests([work], requests, capacity)

    def _choose(self, requests: BatchRequests, splitting: Splitting) -> Candidate:
        """What serves these requests: the soonest, unless the caller says how keys are split."""
        if not splitting.is_given and (only := self._only_choice(requests)) is not None:
            return only
        batch = self.batch_of(requests)
        if splitting.is_given or not batch.parts:
            return Candidate(BY_ROW_CLASS, batch.parts)
        return candidates.best(self._kernels, batch)

    def _only_choice(self, requests: BatchRequests) -> Candidate | None:
        """Blocks of decode where no others are offered, which need no estimate."""
        minimum, maximum = requests.qo_range()
        if (
            minimum <= 0
            or row_class_of(maximum * self.group_size, self.problem) != DECODE
            or not self._kernels.is_paged
        ):
            return None
        only = self._kernels.only_blocks(requests.qo_len.size, maximum * self.group_size)
        if only is None:
            return None
        row_class, shape = only
        name = candidates.name_of_blocks(DECODE, row_class, shape)
        return Candidate(name, [(row_class, self._works(requests))], -1, shape)

    def candidates(self, requests: BatchRequests) -> list[Candidate]:
        """Every way to serve these requests in any form, and when each would be done."""
        return [x for launcher in self.launchers for x in launcher.candidates_of_form(requests)]

    def candidates_of_form(self, requests: BatchRequests) -> list[Candidate]:
        """The same in its own form."""
        result, ahead = [], self.ahead_time(requests)
        for candidate in candidates.candidates(self._kernels, self.batch_of(requests)):
            name, time = full_name(candidate.name, self.form), candidate.time + ahead
            result.append(replace(candidate, name=name, time=time))
        return result

    def batch_of(self, requests: BatchRequests) -> Batch:
        """What candidates are made for."""
        classes = group_by_row_class(requests, self.group_size, self.problem)
        parts = [(row_class, self._works(x)) for row_class, x in classes]
        prompts, load = None, None
        decodes = [x for row_class, x in classes if row_class not in (SMALL, LARGE)]
        if decodes and len(parts) > 1:
            load = self._kernels.decode_load_of(decodes, self.masking)
            first, *others = [x for row_class, x in parts if row_class in (SMALL, LARGE)] or (None,)
            prompts = first
            if others:
                rows = requests.qo_len * self.group_size
                prompts = self._works(requests.select((rows > MAX_ROWS[VERIFY]).nonzero()[0]))
        works = parts[0][1] if len(parts) == 1 else self._works(requests)
        return Batch(
            parts,
            works,
            num_kv_heads=self.num_kv_heads,
            group_size=self.group_size,
            max_qo_len=requests.qo_range()[1],
            key_bytes=self._kernels.key_bytes,
            decode_load=load,
            prompts=prompts,
            in_turns=self._in_turns(requests) if self._takes_turns(requests) else None,
        )

    def _in_turns(self, requests: BatchRequests) -> TileWork:
        """Batch.in_turns."""
        num_keys = requests.shared_keys
        return TileWork(requests, self.group_size, self.masking, num_keys=num_keys)

    def _takes_turns(self, requests: BatchRequests) -> bool:
        """Whether requests are blocks of rows of a mask, whose keys L2 does not hold for all heads
        (docs/ladder.md, "Blocks of rows")."""
        num_keys = requests.shared_keys
        if not 0 < 2 * num_keys <= int(requests.kv_len.sum()):
            return False
        key_bytes = num_keys * self.num_kv_heads * self._kernels.key_bytes
        return key_bytes > device_props(self.device_index).l2_bytes

    @property
    def offer(self) -> Offer:
        """The kernels that may serve requests."""
        return self._kernels

    def _works(self, requests: BatchRequests) -> TileWork:
        return TileWork(requests, self.group_size, self.masking)

    def _of_requests(
        self, works: list[KernelWork], requests: BatchRequests, capacity: Capacity | None = None
    ) -> BatchSchedule:
        schedule = self._layout.lay_out(works)
        for tiles in (part.tiles for part in schedule.parts if part.tiles is not None):
            shared, used = requests.kv_len, self._used_rows(tiles) // self.group_size
            minimum, maximum = requests.qo_range()
            if minimum <= used:
                shared = shared * (requests.qo_len > used)
            if maximum > used:
                schedule.longest = max(schedule.longest, max_of(shared))
        schedule.all_keys = int(requests.kv_len.sum())
        return rotate_batch.reserve_rotated(schedule, requests, self._keys, capacity)

    def kernels(self) -> list[Kernel]:
        """The kernels that plans have asked for so far."""
        return self._kernels.known()

    def kernel(self, row_class: str | tuple[str, str]) -> Kernel:
        """The kernel of a part of a schedule (LaunchPart.row_class)."""
        return self._kernels.get(row_class)

    def tiles(self, row_class: str) -> TileConfig:
        """The tiles of a row class."""
        return self._kernels.get(row_class).kinds[0]

    def choose(self, keys: Keys, max_qo_len: int, splitting: Splitting) -> tuple[str, TileShape]:
        """The kernel of a plan of such requests, and what the plan must know of its tiles."""
        row_class = row_class_of(max_qo_len * self.group_size, self.problem)
        if splitting.is_given:
            return row_class, self._kernels.get(row_class).shapes[0]
        return self._choose_of(self._kernels, keys, max_qo_len)

    def _choose_of(self, kernels: Kernels, keys: Keys, max_qo_len: int) -> tuple[str, TileShape]:
        max_rows = max_qo_len * self.group_size
        if self.masking.window_left >= 0:
            keys = keys.within(int(self.masking.keys_among(self.masking.window_left + max_qo_len)))
        return kernels.choose(row_class_of(max_rows, self.problem), keys, max_rows)

    def reserve(
        self,
        row_class: str,
        shape: TileShape,
        maximum: Limits,
        longest: int,
        begins_early: bool = False,
        num_blocks: int = 0,
    ) -> tuple[BatchSchedule, int]:
        """A schedule whose words the device will write, and how many bytes they take.

        begins_early: its kernels begin beside the launch that writes the words, if they wait for it
        num_blocks    that begin with the first items; 0: each has one
        """
        reserved = self._reserved(row_class, shape, maximum)._replace(blocks=num_blocks)
        part, words_bytes, workspace_bytes = self._layout.part(row_class, reserved, 0, 0)
        begins_early = begins_early and self.problem.is_wide
        if begins_early and overlaps_launches(device_props(self.device_index).arch):
            early = tuple((launch._replace(is_dependent=True), x) for launch, x in part.launches)
            part = replace(part, launches=early)
        if self._log is not None:
            self._log.any_lengths(row_class, self.kernel(row_class).loaded.tiles.name)
        schedule = BatchSchedule(_NO_MERGES, workspace_bytes, (part,), longest=longest)
        return schedule, words_bytes

    def finding(self, what: str) -> Layout:
        """Schedules of kernels whose blocks find their items, or parts of them (TileConfig)."""
        if what not in self._finding:
            heads, group_size, device = self.num_kv_heads, self.group_size, self.device_index
            page_size = self.spec.page_size
            kernels = Kernels(
                self.problem, heads, group_size, page_size, device, finds=what, form=self.form
            )
            self._finding[what] = Layout(kernels, self.problem, heads, group_size, device)
        return self._finding[what]

    def choose_unplanned(
        self, requests: BatchRequests, plan_us: float, may_split: bool
    ) -> tuple[str, TileShape, bool] | None:
        """The tiles of prefill_sm90 that serve such requests soonest, and whether keys are split;
        None where another plan, which takes so many microseconds to make, is still done sooner."""
        works = self._works(requests)
        batch = Batch(
            [(row_class_of(works.max_rows, self.problem), works)],
            works,
            num_kv_heads=self.num_kv_heads,
            group_size=self.group_size,
            max_qo_len=requests.qo_range()[1],
            key_bytes=self._kernels.key_bytes,
            decode_load=None,
            prompts=None,
        )
        kernels = self.finding(FOUND_PARTS).kernels
        return candidates.best_unplanned(kernels, batch, plan_us, may_split)

    def choose_found(self, keys: Keys, max_qo_len: int) -> tuple[str, TileShape]:
        """As `choose`, of kernels whose blocks find parts of items."""
        return self._choose_of(self.finding(FOUND_PARTS).kernels, keys, max_qo_len)

    def reserve_found(
        self,
        what: str,
        row_class: str,
        num_items: int,
        longest: int,
        *,
        parts_of: int = 0,
        shape: TileShape | None = None,
    ) -> tuple[BatchSchedule, int]:
        """The schedule of up to so many items that blocks find themselves, and how many bytes of
        words it has: where a launch merges, blocks list their items for that, else there are
        nothing but counters. parts_of: so many tiles, of which all may be parts. shape: of decode.
        """
        layout = self.finding(what)
        tiles = layout.kernels.get(row_class).kinds[0]
        reserved = Reserved(num_items, cluster=1 if shape is None else shape.cluster)
        is_fused = shape is not None and shape.is_fused
        if parts_of:
            reserved = reserved._replace(
                state_rows=num_items * tiles.tile_q,
                counters=num_items if is_fused else 0,
                split_tiles=0 if is_fused else parts_of,
                merges=0 if is_fused else parts_of,
            )
        part, words_bytes, workspace_bytes = layout.part(row_class, reserved, 0, 0)
        if part.merge is None:
            part, words_bytes = replace(part, items=0, merges=0, counters=0), 0
        if self._log is not None:
            self._log.any_lengths(row_class, tiles.name)
        schedule = BatchSchedule(_NO_MERGES, workspace_bytes, (part,), longest=longest)
        return schedule, words_bytes

    def schedule_lists(
        self, count: int, kv_len: int, max_bytes: int = ANY_BATCH_BYTES
    ) -> BatchSchedule | None:
        """The schedule of `count` tokens with lists of so many keys each, which has no words; None
        where kernels need a work list. Lists are split in fewer parts as in `schedule`."""
        best = self._schedule_lists(count, kv_len, SPLITTINGS[0])
        if best is None or best.workspace_bytes <= max_bytes:
            return best
        fewer = SPLITTINGS[1:]
        if max_bytes >= ANY_BATCH_BYTES:
            fewer = (*fewer, Splitting(False))
        for splitting in fewer:
            schedule = self._schedule_lists(count, kv_len, splitting)
            if schedule is not None and schedule.workspace_bytes <= max_bytes:
                return schedule
        return best

    def _schedule_lists(
        self, count: int, kv_len: int, splitting: Splitting
    ) -> BatchSchedule | None:
        row_class, shape = self.choose(Keys.equal(count, kv_len), 1, Splitting())
        tiles = self._kernels.get(row_class).kinds[0]
        num_tiles = count * -(-self.group_size // shape.tile_q)
        if not tiles.reads_uniform:
            return None
        if self.problem.key_scales and shape.tile_q > MAX_ROWS[VERIFY]:
            shape = shape.of_scaled_lists()
        work = Work.of_equal(num_tiles, -(-kv_len // shape.tile_kv))
        splits = alike_splits(work, self.num_kv_heads, self.group_size, shape, splitting)
        is_split = splits > 1
        state_rows = num_tiles * splits * tiles.tile_q if is_split else 0
        reserved = Reserved(num_tiles * splits, 0, num_tiles * is_split, 0, state_rows)
        part, _, workspace_bytes = self._layout.part(row_class, reserved, 0, 0)
        (launch, _), *_ = part.launches
        if tiles.walks_lists and splits == 1:
            # Blocks take tiles in turn: as many as run at a time are launched.
            launches = [(launch._replace(grid=(1, min(num_tiles, shape.num_slots), 1)), 0)]
        else:
            launches = []
            for first in range(0, num_tiles, MAX_GRID_YZ):
                grid = self.num_kv_heads, min(num_tiles - first, MAX_GRID_YZ), splits
                launches.append((launch._replace(grid=grid), first))
        part = replace(part, launches=tuple(launches))
        uniform = Uniform(1, kv_len, num_tiles, splits)
        return BatchSchedule(_NO_MERGES, workspace_bytes, (part,), longest=kv_len, uniform=uniform)

    def schedule_levels(
        self,
        requests: BatchRequests,
        levels: Levels,
        capacity: Capacity | None = None,
        splitting: Splitting = CASCADE_SPLITTINGS[0],
    ) -> BatchSchedule:
        """Plan the requests of all levels of a cascade, each of which has rows and keys.

        With a capacity as in schedule(); splitting must then be that of the first plan.
        """
        groups = self._level_groups(requests, capacity)
        slots = [0] * len(groups)
        if capacity is None:
            slots[0] = self._blocks_of_first_group(groups)
        plans = [
            self._plan_group(group, splitting, True, blocks)
            for group, blocks in zip(groups, slots, strict=True)
        ]
        parts = [part for plan in plans for part in plan.parts]
        dealt = [kind for group in groups for kind in group.dealt]
        kinds = [tiles for group in groups for tiles in group.kernel.kinds]
        tile_rows = [(self._used_rows(tiles), tiles.tile_q) for tiles in kinds]
        offsets, state_rows = state_offsets(parts, [rows for _, rows in tile_rows])
        num_rows = levels.num_rows if capacity is None else capacity.num_rows
        about = [(*x, part, n) for x, part, n in zip(dealt, parts, tile_rows, strict=True)]
        tables = level_tables(levels, about, offsets, self.group_size, num_rows)
        lists, begin = [], 0
        for plan in plans:
            end = begin + len(plan.parts)
            lists.append(combine(plan.parts, offsets[begin:end])[0])
            begin = end
        reserved = [Reserved(len(x), slots=blocks) for x, blocks in zip(lists, slots, strict=True)]
        words = sum(table.size for table in tables)
        if capacity is not None:
            maximum = self._level_limits(groups, capacity, splitting)
            check_level_limits((max(map(len, lists)), words, state_rows), maximum)
            reserved = [Reserved(maximum.items) for _ in lists]
            words, state_rows = maximum.merges, maximum.state_rows
        sizes = num_rows, levels.num_levels
        reserved[-1] = reserved[-1]._replace(merges=words, state_rows=state_rows, levels=sizes)
        works = [
            KernelWork(group.row_class, reserved, items, _NO_MERGES)
            for group, reserved, items in zip(groups, reserved, lists, strict=True)
        ]
        merges = np.concatenate([table.reshape(-1) for table in tables])
        works[-1] = works[-1]._replace(merges=merges)
        built = self._layout.lay_out(works, levels.positions)
        if self._log is not None:
            self._log.batch(self, built, requests)
        if capacity is not None and self.widens_queries:
            built = _with_rows(built, levels.num_rows, capacity.num_rows)
        return rotate_batch.reserve_rotated(built, requests, self._keys, capacity)

    def _blocks_of_first_group(self, groups: list[KernelGroup]) -> int:
        """As _blocks_of_first, where the launches of the other groups follow."""
        first, *rest = groups
        others = [requests for group in rest for requests, _ in group.kinds]
        prompts = self._works(first.kinds[0][0])
        return self._blocks_of_first(first.row_class, prompts, others, leaves_states=True)

    def _level_limits(
        self, groups: list[KernelGroup], capacity: Capacity, splitting: Splitting
    ) -> LevelLimits:
        """The most that plans for the capacity have."""
        served = zip((self._device(x).items for x in groups), self._served(groups), strict=True)
        waves = splitting.waves if splitting.may_split else 0.0
        return level_limits(capacity.levels, capacity.num_rows, self.group_size, [*served], waves)

    def gains_by_levels(self, requests: BatchRequests, without_levels: BatchRequests) -> bool:
        """Whether a cascade of `requests` is done sooner than its rows one by one, as `flat`."""
        shared, alone = (
            sum(
                estimate(x.kinds, self.group_size, self._device(x), self.masking, is_shared)
                for x in self._level_groups(of, None)
            )
            for of, is_shared in ((requests, True), (without_levels, False))
        )
        return shared + _MIN_GAIN < alone

    def _level_groups(
        self, requests: BatchRequests, capacity: Capacity | None
    ) -> list[KernelGroup]:
        """What a cascade launches: a kernel of both kinds of tiles, or of the only kind it has."""
        lengths = requests.qo_len
        if capacity is not None:
            lengths = np.array([longest for _, longest in capacity.levels])
        rows, chosen = lengths * self.group_size, np.arange(len(requests.qo_len))
        serves_all = self.problem.has_tiles_of_prompts  # tiles of prefill_sm90, whatever the rows
        is_large, groups = (rows > MAX_ROWS[SMALL]) | serves_all, []
        if is_large.any() and self._kernels.get(LARGE).kinds[0].is_sm90:
            # Its blocks are like those of no other kernel, which serves the rest.
            of_large = (requests.qo_len * self.group_size > MAX_ROWS[SMALL]) | serves_all
            groups = [self._kernels.group(LARGE, requests, np.flatnonzero(of_large))]
            if is_large.all():
                if capacity is None or serves_all:
                    return groups
                rows = np.array([MAX_ROWS[SMALL]])  # of a later plan
            else:
                rows = rows[~is_large]
            chosen = np.flatnonzero(~of_large)
        # Tiles of prefill serve requests of few rows too.
        name = self._kernels.mixed_rows(rows // self.group_size) or row_class_of(
            int(rows.max(initial=1))
        )
        return [*groups, self._kernels.group(name, requests, chosen)]

    def _served(self, groups: list[KernelGroup]) -> list[list[Served]]:
        """What each kind of tiles of each kernel of a cascade serves, whatever comes."""
        *large, rest = groups
        if not large:
            return [rest.served(MOST)]
        (tiles,) = large[0].kernel.kinds
        edge, rows = MAX_ROWS[SMALL], self._used_rows(tiles)
        return [[Served(rows, edge, MOST, tiles.tile_q - rows)], rest.served(edge)]

    def _used_rows(self, tiles: TileConfig) -> int:
        return tiles.used_rows(self.group_size, self.num_kv_heads)

    def _device(self, group: KernelGroup, slots: int = 0) -> Device:
        """slots: blocks that run at a time; 0: as many as the kernel has."""
        return Device(slots or group.kernel.loaded.num_slots, self.num_kv_heads)

    def _blocks_of_first(
        self,
        row_class: Rows,
        first: TileWork,
        others: list[BatchRequests],
        leaves_states: bool = False,
    ) -> int:
        """The number of persistent blocks that launches for others follow; 0: as many as there can
        be."""
        shape = self._kernels.get(row_class).shapes[0]
        if not others or shape.times is None:
            return 0
        if leaves_states:  # a merge comes anyway
            shape = replace(shape, times=shape.times._replace(merge=0.0))
        load = self._kernels.decode_load_of(others, self.masking)
        return candidates.partition_beside(first, self.num_kv_heads, shape, load).num_slots

    def _plan(self, works: TileWork, shape: TileShape, splitting: Splitting) -> BatchPlan:
        plan = plan_tiles(works, self.num_kv_heads, shape, splitting)
        if self._is_debugging():
            validate_plan(plan, works.requests, self.group_size, shape.tile_q)
        return plan

    def _plan_group(
        self, group: KernelGroup, splitting: Splitting, leaves_states: bool = False, slots: int = 0
    ) -> MixedPlan:
        device = self._device(group, slots)
        plan = plan_mixed(
            group.kinds, self.group_size, device, self.masking, splitting, leaves_states
        )
        if self._is_debugging():
            for part, (requests, shape) in zip(plan.parts, group.kinds, strict=True):
                validate_plan(part, requests, self.group_size, shape.tile_q)
        return plan

    def _is_debugging(self) -> bool:
        return self.device_index > NO_GPU.index and cuda().is_debugging

    def _mixed_work(
        self, row_class: tuple[str, str], requests: BatchRequests, splitting: Splitting
    ) -> KernelWork:
        kernel = self._kernels.get(row_class)
        plan = self._plan_group(
            KernelGroup(row_class, kernel, self._kernels.assign_requests(requests, kernel)),
            splitting,
        )
        tile_rows = [tiles.tile_q for tiles in kernel.kinds]
        offsets, state_rows = state_offsets(plan.parts, tile_rows)
        items, (of_prefill, of_decode) = combine(plan.parts, offsets)
        split_tiles = len(of_prefill)
        reserved = Reserved(len(items), split_tiles, split_tiles, len(of_decode), state_rows)
        reserved = reserved._replace(keeps_order=splitting.is_given)
        return KernelWork(row_class, reserved, items, of_prefill)

    def _kernel_work(
        self,
        row_class: str,
        shape: TileShape,
        plan: BatchPlan,
        maximum: Limits,
        splitting: Splitting,
        slots: int = 0,
        is_exact: bool = False,
    ) -> KernelWork:
        """The work of one kernel. With `is_exact` its buffers are sized for this plan, else for the
        largest plan of the graph."""
        reserved = self._reserved(row_class, shape, maximum, splitting.is_given, slots)
        if is_exact and plan.num_blocks:
            plan, reserved = self._of_cuts(row_class, plan, reserved)
        elif is_exact:
            reserved = self._exactly(row_class, reserved, plan.max_parts)
        merges = _NO_MERGES
        if reserved.merges:
            merges = np.full(reserved.merges, -1, np.int32)
            merges[: len(plan.merges)] = plan.merges
        return KernelWork(row_class, reserved, plan.items, merges)

    def _of_cuts(
        self, row_class: str, plan: BatchPlan, reserved: Reserved
    ) -> tuple[BatchPlan, Reserved]:
        """A plan of cuts, where a launch merges no more than the tiles of many parts, and its
        memory."""
        fused_splits = self._kernels.get(row_class).kinds[0].fused_splits
        merges = plan.merges[plan.items[plan.merges, NUM_SPLITS] > fused_splits]
        count = len(merges)
        reserved = reserved._replace(merges=count, split_tiles=count, blocks=plan.num_blocks)
        return replace(plan, merges=merges), reserved

    def _exactly(self, row_class: str, reserved: Reserved, max_parts: int) -> Reserved:
        """The memory of a launch by who merges its tiles, which have at most so many parts."""
        fused_splits = self._kernels.get(row_class).kinds[0].fused_splits
        if not fused_splits or not reserved.merges:
            return reserved
        if max_parts <= fused_splits and not reserved.keeps_order:
            return reserved._replace(merges=0, split_tiles=0)
        # The launch waits for every block, so it merges all tiles; or it keeps the order.
        return reserved._replace(counters=0)

    def _reserved(
        self,
        row_class: str,
        shape: TileShape,
        maximum: Limits,
        keeps_order: bool = False,
        slots: int = 0,
    ) -> Reserved:
        split_tiles, counters = maximum.num_split_tiles, 0
        tiles = self._kernels.get(row_class).kinds[0]
        if tiles.fused_merge and shape.is_fused:
            split_tiles, counters = 0, split_tiles
        elif tiles.fused_splits:
            counters = split_tiles
        state_rows = maximum.num_states * tiles.tile_q
        return Reserved(
            maximum.num_items,
            merges=split_tiles,
            split_tiles=split_tiles,
            counters=counters,
            state_rows=state_rows,
            slots=slots if tiles.is_persistent else 0,
            cluster=shape.cluster,
            keeps_order=keeps_order,
        )

    def _limits(self, shape: TileShape, splitting: Splitting, capacity: Capacity) -> Limits:
        return limits(
            capacity.num_requests,
            capacity.num_rows,
            capacity.max_qo_len,
            capacity.num_tokens,
            self.group_size,
            self.num_kv_heads,
            shape,
            splitting,
        )
