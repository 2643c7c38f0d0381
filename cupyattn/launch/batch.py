"""Launches the attention kernels of a batch from a work list in device memory.

Requests of few query rows and of many share a launch whose blocks are of two kinds, where there is
such a kernel; else each row class has one of its own. Each launch has a plan of its own, and a
share of the words and of the workspace. The levels of a cascade leave states, which one more
launch merges.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from ..device import device_props
from ..problem import AttentionProblem
from ..schedule import MAX_GRID_YZ
from ..schedule.batch import (
    BatchPlan,
    BatchRequests,
    Limits,
    Masking,
    Splitting,
    TileShape,
    check_limits,
    limits,
    plan_batch,
)
from ..schedule.cover import check_cover
from ..schedule.levels import Levels, level_limits, level_tables, require_room
from ..schedule.mixed import Device, MixedPlan, combine, estimate, plan_mixed, state_offsets
from . import maps_sm90, merge_levels, merge_splits, params, tiles_sm90
from .attention import LOG2_E, SLACK, AttentionOptions, LoadedKernel, load_kernel, load_mixed
from .bound import BoundRun
from .enqueue import Launch, cuda
from .tile_config import TileConfig
from .tiles import DECODE, LARGE, MOST_ROWS, ROW_CLASSES, SMALL, VERIFY, row_class

_WORDS = 12
_ITEM_BYTES = 4 * _WORDS
_MAX_KNOWN = 1024
_NO_MERGES = np.zeros(0, np.int32)
# A cascade without keys is nothing but its merge.
_NO_LAUNCHES: tuple[tuple[Launch | None, int], ...] = ((None, 0),)


@dataclass(frozen=True, slots=True)
class Capacity:
    """What a captured graph freezes.

    num_requests, num_rows  the most requests and query tokens of any later plan
    max_qo_len              query tokens of one request, as the first plan has them: they choose the
                            tile, and later plans may have more (but not under a fixed split)
    num_tokens              the most keys; matters only where the size of splits is fixed
    levels                  of a cascade: the requests and the query tokens of the longest of each
    """

    num_requests: int
    num_rows: int
    max_qo_len: int
    num_tokens: int = 0
    levels: tuple[tuple[int, int], ...] = ()


# A row class, or the two of a mixed kernel: prefill's, then decode's.
_Rows = str | tuple[str, str]


class _Kernel(NamedTuple):
    """A kernel, and what a plan must know of each kind of its tiles."""

    loaded: LoadedKernel[Any]
    kinds: tuple[TileConfig, ...]
    shapes: tuple[TileShape, ...]


class _Group(NamedTuple):
    """A kernel and the requests of each kind of its tiles: which they are, and they."""

    rows: _Rows
    kernel: _Kernel
    dealt: list[tuple[np.ndarray, BatchRequests]]

    @property
    def kinds(self) -> list[tuple[BatchRequests, TileShape]]:
        return [(x, s) for (_, x), s in zip(self.dealt, self.kernel.shapes, strict=True)]


class _Room(NamedTuple):
    """What a kernel's share of a schedule takes.

    merges       int32 words
    split_tiles  of prefill, which merge_splits merges
    counters     split tiles of decode, for each KV head, or one by which blocks share out work
    state_rows   rows of the states of one KV head
    levels       (tokens, levels) for merge_levels, or (0, 0)
    """

    items: int
    merges: int = 0
    split_tiles: int = 0
    counters: int = 0
    state_rows: int = 0
    levels: tuple[int, int] = (0, 0)


class _Share(NamedTuple):
    """What one kernel has to do; arrays as long as its room, or shorter."""

    rows: _Rows
    room: _Room
    items: np.ndarray
    merges: np.ndarray


@dataclass(frozen=True, slots=True)
class _Part:
    """One kernel of a schedule. Positions are bytes into the words and the workspace.

    launches  each with its first item
    tiles     of the kernel, where its blocks are persistent
    merge     what merges states afterwards: the splits of a prefill, or the levels of a cascade
    merges    what it reads: an item of each split tile, or the tables of (tokens, levels)
    """

    launches: tuple[tuple[Launch, int], ...]
    merge: Launch | None
    items: int
    merges: int
    counters: int
    partial_o: int
    partial_lse: int
    levels: tuple[int, int] = (0, 0)
    tiles: TileConfig | None = None


@dataclass(slots=True)
class BatchSchedule:
    """One plan, ready for launches; nobody changes it.

    words            int32 [n]: work lists, merge lists and zeroed counters, to be copied to device
                     memory as they are, on a 16-byte boundary
    workspace_bytes  scratch for partial states (16-byte aligned), 0 if no keys are split
    positions        bytes into the words, where the positions of rows are; -1 without any
    longest          the most keys of a request
    """

    words: np.ndarray
    workspace_bytes: int
    parts: tuple[_Part, ...]
    positions: int = -1
    longest: int = 0


class BatchLauncher:
    """Serves every plan and run of one problem, device and geometry."""

    def __init__(
        self,
        problem: AttentionProblem,
        options: AttentionOptions,
        num_qo_heads: int,
        num_kv_heads: int,
        page_size: int,
        device_index: int,
    ) -> None:
        """page_size: tokens of a page, or 0 for ragged keys."""
        self.problem = problem
        self.options = options
        self.num_kv_heads = num_kv_heads
        self.group_size = num_qo_heads // num_kv_heads
        self.page_size = page_size
        self.device_index = device_index
        self.masking = Masking(options.causal, options.window_left, problem.custom_mask)
        self._page_divisor = params.divisor(max(1, page_size))
        self._rope_table = (
            params.rope_steps(problem.head_dim_qk, options.rope_scale, options.rope_theta)
            if problem.pos_encoding == "ROPE_LLAMA"
            else b""
        )
        # What is the same for many plans: kernels, and parts by what decides them.
        self._kernels: dict[_Rows, _Kernel | None] = {}
        self._parts: dict[tuple[object, ...], tuple[_Part, int, int]] = {}
        self._packed: dict[tuple[int, float, float], bytes] = {}
        self._heads = maps_sm90.Heads(problem, num_kv_heads, self.group_size, page_size)

    def schedule(
        self,
        requests: BatchRequests,
        *,
        split_tokens: int = 0,
        may_split: bool = True,
        capacity: Capacity | None = None,
    ) -> BatchSchedule:
        """Plan on the host. split_tokens > 0: every request is split into parts of this many keys.

        With a capacity, `words` and `workspace_bytes` have the same size for every plan that fits;
        a plan that does not is a PlanError.
        """
        splitting = Splitting(may_split, split_tokens)
        if capacity is not None:
            rows = row_class(capacity.max_qo_len * self.group_size)
            plan = self._plan(requests, rows, splitting)
            most = self._limits(self._kernel(rows).shapes[0], splitting, capacity)
            check_limits(plan, most)
            return self._of_requests([self._share(rows, plan, most)], requests)
        classes = _classes(requests, self.group_size)
        mixed = self._mixed_rows(requests.qo_len) if len(classes) > 1 else None
        if mixed is not None:
            return self._lay_out([self._share_mixed(mixed, requests, splitting)])
        shares = []
        for rows, chosen in classes:
            plan = self._plan(chosen, rows, splitting)
            if len(plan.items):
                exact = Limits(len(plan.items), len(plan.merges), plan.num_states)
                shares.append(self._share(rows, plan, exact))
        return self._of_requests(shares, requests)

    def _of_requests(self, shares: list[_Share], requests: BatchRequests) -> BatchSchedule:
        schedule = self._lay_out(shares)
        if any(part.tiles is not None for part in schedule.parts):
            schedule.longest = int(requests.kv_len.max(initial=0))
        return schedule

    def tiles(self, rows: str) -> tuple[TileConfig, TileShape]:
        """The tiles of a row class, and what a plan must know of them."""
        kernel = self._kernel(rows)
        return kernel.kinds[0], kernel.shapes[0]

    def reserve(self, rows: str, most: Limits, longest: int) -> tuple[BatchSchedule, int]:
        """A schedule whose words the device will write, and how many bytes they take."""
        part, words_bytes, workspace_bytes = self._part(rows, self._room(rows, most), 0, 0)
        schedule = BatchSchedule(_NO_MERGES, workspace_bytes, (part,), longest=longest)
        return schedule, words_bytes

    def schedule_levels(
        self, requests: BatchRequests, levels: Levels, capacity: Capacity | None = None
    ) -> BatchSchedule:
        """Plan the requests of all levels of a cascade, each of which has rows and keys.

        With a capacity as in schedule().
        """
        groups = self._level_groups(requests, capacity)
        plans = [self._plan_group(group, Splitting(), leaves_states=True) for group in groups]
        parts = [part for plan in plans for part in plan.parts]
        dealt = [kind for group in groups for kind in group.dealt]
        tile_rows = [tiles.tile_q for group in groups for tiles in group.kernel.kinds]
        offsets, state_rows = state_offsets(parts, tile_rows)
        num_rows = levels.num_rows if capacity is None else capacity.num_rows
        about = [(*x, part, n) for x, part, n in zip(dealt, parts, tile_rows, strict=True)]
        tables = level_tables(levels, about, offsets, self.group_size, num_rows)
        lists, begin = [], 0
        for plan in plans:
            end = begin + len(plan.parts)
            lists.append(combine(plan.parts, offsets[begin:end])[0])
            begin = end
        rooms = [_Room(len(items)) for items in lists]
        words = sum(table.size for table in tables)
        if capacity is not None:
            slots = max(group.kernel.loaded.num_slots for group in groups)
            per_wave = max(1, slots // self.num_kv_heads)
            most = level_limits(capacity.levels, num_rows, self.group_size, tile_rows, per_wave)
            require_room((max(map(len, lists)), words, state_rows), most)
            rooms = [_Room(most.items) for _ in lists]
            words, state_rows = most.merges, most.state_rows
        sizes = num_rows, levels.num_levels
        rooms[-1] = rooms[-1]._replace(merges=words, state_rows=state_rows, levels=sizes)
        shares = [
            _Share(group.rows, room, items, _NO_MERGES)
            for group, room, items in zip(groups, rooms, lists, strict=True)
        ]
        merges = np.concatenate([table.reshape(-1) for table in tables])
        shares[-1] = shares[-1]._replace(merges=merges)
        return self._lay_out(shares, levels.positions)

    def gains_by_levels(self, requests: BatchRequests, flat: BatchRequests) -> bool:
        """Whether a cascade of `requests` is done sooner than its rows one by one, as `flat`."""
        shared, alone = (
            sum(
                estimate(
                    group.kinds,
                    self.group_size,
                    Device(group.kernel.loaded.num_slots, self.num_kv_heads),
                    self.masking,
                    is_shared,
                )
                for group in self._level_groups(x, None)
            )
            for x, is_shared in ((requests, True), (flat, False))
        )
        return shared < alone

    def _level_groups(self, requests: BatchRequests, capacity: Capacity | None) -> list[_Group]:
        """What a cascade launches: a kernel of both kinds of tiles, or of the only kind it has."""
        lengths = requests.qo_len
        if capacity is not None:
            lengths = np.array([longest for _, longest in capacity.levels])
        rows, chosen = lengths * self.group_size, np.arange(len(requests.qo_len))
        is_large, groups = rows > MOST_ROWS[SMALL], []
        if is_large.any() and self._kernel(LARGE).kinds[0].is_sm90:
            # Its blocks are like those of no other kernel, which serves the rest.
            of_large = requests.qo_len * self.group_size > MOST_ROWS[SMALL]
            groups = [self._group(LARGE, requests, np.flatnonzero(of_large))]
            if is_large.all():
                return groups
            rows, chosen = rows[~is_large], np.flatnonzero(~of_large)
        # Tiles of prefill serve requests of few rows too.
        name = self._mixed_rows(rows // self.group_size) or row_class(int(rows.max(initial=1)))
        return [*groups, self._group(name, requests, chosen)]

    def _group(self, rows: _Rows, requests: BatchRequests, chosen: np.ndarray) -> _Group:
        """The requests at these indices."""
        kernel = self._kernel(rows)
        dealt = self._deal_out(requests.select(chosen), kernel)
        return _Group(rows, kernel, [(chosen[x], own) for x, own in dealt])

    def _kernel(self, rows: _Rows) -> _Kernel:
        found = self._find_kernel(rows)
        assert found is not None, rows
        return found

    def _find_kernel(self, rows: _Rows) -> _Kernel | None:
        """None if there is no kernel of these two kinds."""
        if rows in self._kernels:
            return self._kernels[rows]
        found = None
        if isinstance(rows, str):
            single = load_kernel(self.problem, rows, self.device_index, True, self.page_size)
            found = _kernel_of(single, (single.tiles,))
        elif (mixed := load_mixed(self.problem, *rows, self.device_index)) is not None:
            found = _kernel_of(mixed, (mixed.tiles.prefill, mixed.tiles.decode))
        self._kernels[rows] = found
        return found

    def _mixed_rows(self, lengths: np.ndarray) -> tuple[str, str] | None:
        """The row classes of a mixed kernel for requests of so many query tokens.

        None if all are of one kind, or there is no such kernel.
        """
        rows = lengths * self.group_size
        small = rows[rows <= MOST_ROWS[VERIFY]]
        if len(small) in (0, len(rows)):
            return None
        large = row_class(int(rows.max()))
        if self._kernel(large).kinds[0].is_sm90:
            return None
        for name in dict.fromkeys((row_class(int(small.max())), DECODE)):
            if self._find_kernel((large, name)) is not None:
                return large, name
        return None

    def _plan(self, requests: BatchRequests, rows: str, splitting: Splitting) -> BatchPlan:
        shape = self._kernel(rows).shapes[0]
        plan = plan_batch(
            requests, self.group_size, self.num_kv_heads, shape, self.masking, splitting
        )
        if cuda().is_debugging:
            check_cover(plan, requests, self.group_size, shape.tile_q)
        return plan

    def _deal_out(
        self, requests: BatchRequests, kernel: _Kernel
    ) -> list[tuple[np.ndarray, BatchRequests]]:
        """The requests of each kind of a kernel, and which they are."""
        if len(kernel.kinds) == 1:
            return [(np.arange(len(requests.qo_len)), requests)]
        is_small = requests.qo_len * self.group_size <= kernel.kinds[1].tile_q
        chosen = [np.flatnonzero(~is_small), np.flatnonzero(is_small)]
        return [(x, requests.select(x)) for x in chosen]

    def _plan_group(
        self, group: _Group, splitting: Splitting, leaves_states: bool = False
    ) -> MixedPlan:
        slots = group.kernel.loaded.num_slots
        device = Device(slots, self.num_kv_heads)
        plan = plan_mixed(
            group.kinds, self.group_size, device, self.masking, splitting, leaves_states
        )
        if cuda().is_debugging:
            for part, (requests, shape) in zip(plan.parts, group.kinds, strict=True):
                check_cover(part, requests, self.group_size, shape.tile_q)
        return plan

    def _share_mixed(
        self, rows: tuple[str, str], requests: BatchRequests, splitting: Splitting
    ) -> _Share:
        kernel = self._kernel(rows)
        plan = self._plan_group(_Group(rows, kernel, self._deal_out(requests, kernel)), splitting)
        tile_rows = [tiles.tile_q for tiles in kernel.kinds]
        offsets, state_rows = state_offsets(plan.parts, tile_rows)
        items, (of_prefill, of_decode) = combine(plan.parts, offsets)
        split_tiles = len(of_prefill)
        room = _Room(len(items), split_tiles, split_tiles, len(of_decode), state_rows)
        return _Share(rows, room, items, of_prefill)

    def _share(self, rows: str, plan: BatchPlan, most: Limits) -> _Share:
        """With room for the most that may come."""
        room = self._room(rows, most)
        merges = _NO_MERGES
        if room.merges:
            merges = np.full(room.merges, -1, np.int32)
            merges[: len(plan.merges)] = plan.merges
        return _Share(rows, room, plan.items, merges)

    def _room(self, rows: str, most: Limits) -> _Room:
        tiles = self._kernel(rows).kinds[0]
        split_tiles, counters = most.num_split_tiles, 0
        if tiles.merges_itself:
            split_tiles, counters = 0, split_tiles
        state_rows = most.num_states * tiles.tile_q
        return _Room(most.num_items, split_tiles, split_tiles, counters, state_rows)

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

    def _lay_out(self, shares: list[_Share], positions: np.ndarray | None = None) -> BatchSchedule:
        parts, words_bytes, workspace_bytes = [], 0, 0
        for share in shares:
            part, words_bytes, workspace_bytes = self._part(
                share.rows, share.room, words_bytes, workspace_bytes
            )
            parts.append(part)
        if shares and shares[-1].room.levels[0]:
            # Kernels of a cascade leave their states in one place.
            last = parts[-1]
            parts = [
                replace(part, partial_o=last.partial_o, partial_lse=last.partial_lse)
                for part in parts
            ]
        if len(shares) == 1 and words_bytes == shares[0].items.nbytes and positions is None:
            return BatchSchedule(shares[0].items.reshape(-1), workspace_bytes, tuple(parts))
        num_positions = 0 if positions is None else shares[-1].room.levels[0]
        words = np.zeros(words_bytes // 4 + num_positions, np.int32)
        for part, share in zip(parts, shares, strict=True):
            for begin, values in ((part.items, share.items), (part.merges, share.merges)):
                words[begin // 4 :][: values.size] = values.reshape(-1)
        if positions is None:
            return BatchSchedule(words, workspace_bytes, tuple(parts))
        words[words_bytes // 4 :][: positions.size] = positions
        return BatchSchedule(words, workspace_bytes, tuple(parts), words_bytes)

    def _part(
        self, rows: _Rows, room: _Room, words_bytes: int, workspace_bytes: int
    ) -> tuple[_Part, int, int]:
        """The part, and where the next one begins in the words and in the workspace."""
        key = rows, room, words_bytes, workspace_bytes
        found = self._parts.get(key)
        if found is None:
            if len(self._parts) >= _MAX_KNOWN:
                self._parts.clear()
            found = self._parts[key] = self._make_part(*key)
        return found

    def _make_part(
        self, rows: _Rows, room: _Room, words_bytes: int, workspace_bytes: int
    ) -> tuple[_Part, int, int]:
        kernel, heads = self._kernel(rows), self.num_kv_heads
        tiles = kernel.loaded.tiles
        persistent = kernel.kinds[0] if kernel.kinds[0].is_sm90 else None
        function, size = kernel.loaded.function, (tiles.threads, tiles.shared_bytes)
        launches: tuple[tuple[Launch, int], ...]
        if persistent is not None:
            blocks = min(room.items * heads, kernel.loaded.num_slots)
            launches = ((Launch(function, (blocks, 1, 1), *size, room.items), 0),)
            launches = launches if blocks else ()
        else:
            launches = tuple(
                (Launch(function, (heads, min(room.items - first, MAX_GRID_YZ), 1), *size), first)
                for first in range(0, room.items, MAX_GRID_YZ)
            )
        merge = None
        if room.split_tiles:
            tile_q = kernel.kinds[0].tile_q
            num_rows = room.split_tiles * tile_q
            merge = merge_splits.prepare(self.problem, tile_q, num_rows, heads, self.device_index)
        elif room.levels[0]:
            num_heads = heads * self.group_size
            merge = merge_levels.prepare(self.problem, room.levels[0], num_heads, self.device_index)
        merges = words_bytes + room.items * _ITEM_BYTES
        counters = merges + 4 * room.merges
        lse_bytes = 4 * room.state_rows * heads
        partial_lse = workspace_bytes + lse_bytes * self.problem.head_dim_vo
        part = _Part(
            launches,
            merge,
            words_bytes,
            merges,
            counters,
            workspace_bytes,
            partial_lse,
            room.levels,
            persistent,
        )
        num_counters = room.counters * heads if persistent is None else 1
        end = counters + 4 * num_counters
        return part, _round_up(end), _round_up(partial_lse + lse_bytes)

    def bind(
        self,
        schedule: BatchSchedule,
        words: int,
        workspace: int,
        strides: bytes,
        num_keys: int,
        kv_indices: int,
        mask_bytes: int,
        mask_row_bytes: int,
        output_scale: float,
        sm_scale: float,
    ) -> BoundRun:
        """What runs on arrays of these strides enqueue, as long as nothing else moves either.

        `strides` are params.STRIDES, packed. num_keys: rows that k and v hold, or pages. The mask
        has mask_bytes bytes, in rows of mask_row_bytes (mask.cuh). The scales are those of the
        options times what the run adds to them.
        """
        steps: list[tuple[Launch, bytes, maps_sm90.Maps | None]] = []
        positions = 0 if schedule.positions < 0 else words + schedule.positions
        for part in schedule.parts:
            for launch, first_item in part.launches or _NO_LAUNCHES:
                key = first_item, sm_scale, output_scale
                planned = params.PLANNED.pack(
                    workspace + part.partial_o,
                    workspace + part.partial_lse,
                    words + part.counters,
                    words + part.items,
                    words + part.merges,
                    kv_indices,
                    positions,
                    strides,
                    mask_bytes,
                    mask_row_bytes,
                    *part.levels,
                    self._packed.get(key) or self._constants(*key),
                )
                if launch is not None:
                    maps = None
                    if part.tiles is not None:
                        section = self._heads_per_section(schedule.longest)
                        maps = maps_sm90.Maps(
                            self._heads, part.tiles, launch.num_items, section, strides, num_keys
                        )
                    steps.append((launch, planned, maps))
            if part.merge is not None:
                steps.append((part.merge, planned, None))
        return BoundRun(tuple(steps), self.device_index)

    def _heads_per_section(self, longest: int) -> int:
        l2_bytes = device_props(self.device_index).l2_bytes
        return tiles_sm90.heads_per_section(self.problem, self.num_kv_heads, longest, l2_bytes)

    def _constants(self, first_item: int, sm_scale: float, output_scale: float) -> bytes:
        """What is the same for all runs with these scales."""
        options = self.options
        softmax_scale = sm_scale * LOG2_E
        packed = (
            params.CONSTANTS.pack(
                self.num_kv_heads,
                self.group_size,
                0,
                1,
                options.causal,
                options.window_left,
                sm_scale,
                options.logits_soft_cap,
                output_scale,
                softmax_scale,
                SLACK / softmax_scale if softmax_scale else 0.0,
                first_item,
                self.page_size,
                *self._page_divisor,
                *params.divisor(self.group_size),
            )
            + self._rope_table
        )
        if len(self._packed) >= _MAX_KNOWN:
            self._packed.clear()
        self._packed[first_item, sm_scale, output_scale] = packed
        return packed


def _classes(requests: BatchRequests, group_size: int) -> list[tuple[str, BatchRequests]]:
    """The requests of each row class, the largest tiles first."""
    if len(requests.qo_len) == 0:
        return []
    least, most = requests.qo_range()
    name = row_class(most * group_size)
    if least == most or row_class(least * group_size) == name:
        return [(name, requests)]
    rows = requests.qo_len * group_size
    found, up_to = [], rows.max()
    for name, above in zip(reversed(ROW_CLASSES), (*reversed(MOST_ROWS.values()), 0), strict=True):
        chosen = np.flatnonzero((rows > above) & (rows <= up_to))
        if len(chosen):
            found.append((name, requests.select(chosen)))
        up_to = above
    return found


def _kernel_of(loaded: LoadedKernel[Any], kinds: tuple[TileConfig, ...]) -> _Kernel:
    # A state of decode has few rows of its tile and is merged by the block that is last. One of
    # prefill has 64 KB, and a launch merges them (measured).
    costs = (0.25 if tiles.merges_itself else 4.0 for tiles in kinds)
    shapes = tuple(
        TileShape(tiles.tile_q, tiles.tile_kv, loaded.num_slots, cost)
        for tiles, cost in zip(kinds, costs, strict=True)
    )
    return _Kernel(loaded, kinds, shapes)


def _round_up(num_bytes: int) -> int:
    return -(-num_bytes // 16) * 16
