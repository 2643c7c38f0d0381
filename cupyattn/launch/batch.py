"""Launches the attention kernels of a batch from a work list in device memory.

Requests whose rows fill a tile of another height are another launch: at most three, and for most
batches one. Each has a plan of its own, and a share of the words and of the workspace.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

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
from . import merge_splits, params
from .attention import LOG2_E, SLACK, AttentionOptions, LoadedKernel, load_kernel
from .enqueue import Launch, cuda, enqueue
from .tiles import MOST_ROWS, ROW_CLASSES, row_class

_WORDS = 12
_ITEM_BYTES = 4 * _WORDS
_MAX_KNOWN = 1024


@dataclass(frozen=True, slots=True)
class Capacity:
    """What a captured graph freezes.

    num_requests, num_rows  the most requests and query tokens of any later plan
    max_qo_len              query tokens of one request, as the first plan has them: they choose the
                            tile, and later plans may have more (but not under a fixed split)
    num_tokens              the most keys; matters only where the size of splits is fixed
    """

    num_requests: int
    num_rows: int
    max_qo_len: int
    num_tokens: int = 0


@dataclass(frozen=True, slots=True)
class _Part:
    """One row class of a schedule. Positions are bytes into the words and the workspace."""

    launches: tuple[tuple[Launch, int], ...]  # and the first item of each
    merge: Launch | None
    items: int
    merges: int
    counters: int
    partial_o: int
    partial_lse: int


@dataclass(slots=True)
class BatchSchedule:
    """One plan, ready for launches; nobody changes it.

    words            int32 [n]: work lists, merge lists and zeroed counters, to be copied to device
                     memory as they are, on a 16-byte boundary
    workspace_bytes  scratch for partial states (16-byte aligned), 0 if no keys are split
    """

    words: np.ndarray
    workspace_bytes: int
    parts: tuple[_Part, ...]


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
        self._masking = Masking(
            options.causal and not problem.custom_mask, options.window_left, problem.custom_mask
        )
        self._page_divisor = params.divisor(max(1, page_size))
        self._rope_table = (
            params.rope_steps(problem.head_dim_qk, options.rope_scale, options.rope_theta)
            if problem.pos_encoding == "ROPE_LLAMA"
            else b""
        )
        # What is the same for many plans: kernels with what a plan must know of them, by row class,
        # and parts by what decides them.
        self._kernels: dict[str, tuple[LoadedKernel, TileShape]] = {}
        self._parts: dict[tuple[object, ...], tuple[_Part, int, int]] = {}
        self._packed: dict[tuple[int, float, float], bytes] = {}

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
            most = self._limits(self._kernel(rows)[1], splitting, capacity)
            plan = self._plan(requests, rows, splitting)
            check_limits(plan, most)
            return self._lay_out([(rows, plan, most)])
        laid = []
        for rows, chosen in _classes(requests, self.group_size):
            plan = self._plan(chosen, rows, splitting)
            if len(plan.items):
                exact = Limits(len(plan.items), len(plan.merges), plan.num_states)
                laid.append((rows, plan, exact))
        return self._lay_out(laid)

    def _kernel(self, rows: str) -> tuple[LoadedKernel, TileShape]:
        found = self._kernels.get(rows)
        if found is None:
            kernel = load_kernel(self.problem, rows, self.device_index, True)
            tiles = kernel.tiles
            # A state of decode has few rows of its tile and is merged by the block that is last.
            # One of prefill has 64 KB, and a launch merges them (measured).
            cost = 0.25 if tiles.name == "decode_sm80" else 4.0
            shape = TileShape(tiles.tile_q, tiles.tile_kv, kernel.num_slots, cost)
            found = self._kernels[rows] = kernel, shape
        return found

    def _plan(self, requests: BatchRequests, rows: str, splitting: Splitting) -> BatchPlan:
        shape = self._kernel(rows)[1]
        plan = plan_batch(
            requests, self.group_size, self.num_kv_heads, shape, self._masking, splitting
        )
        if cuda().is_debugging:
            check_cover(plan, requests, self.group_size, shape.tile_q)
        return plan

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

    def _lay_out(self, laid: list[tuple[str, BatchPlan, Limits]]) -> BatchSchedule:
        parts, words_bytes, workspace_bytes = [], 0, 0
        for rows, _, room in laid:
            part, words_bytes, workspace_bytes = self._part(
                rows, room, words_bytes, workspace_bytes
            )
            parts.append(part)
        if len(laid) == 1 and words_bytes == laid[0][1].items.nbytes:
            return BatchSchedule(laid[0][1].items.reshape(-1), workspace_bytes, tuple(parts))
        words = np.zeros(words_bytes // 4, np.int32)
        for part, (_, plan, room) in zip(parts, laid, strict=True):
            items = words[part.items // 4 :][: plan.items.size]
            items.reshape(-1, _WORDS)[...] = plan.items
            merges = words[part.merges // 4 :][: room.num_split_tiles]
            merges[: len(plan.merges)] = plan.merges
            merges[len(plan.merges) :] = -1
        return BatchSchedule(words, workspace_bytes, tuple(parts))

    def _part(
        self, rows: str, room: Limits, words_bytes: int, workspace_bytes: int
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
        self, rows: str, room: Limits, words_bytes: int, workspace_bytes: int
    ) -> tuple[_Part, int, int]:
        kernel, _ = self._kernel(rows)
        tiles, heads = kernel.tiles, self.num_kv_heads
        launches = tuple(
            (
                Launch(
                    kernel.function,
                    (heads, min(room.num_items - first, MAX_GRID_YZ), 1),
                    tiles.threads,
                    tiles.shared_bytes,
                ),
                first,
            )
            for first in range(0, room.num_items, MAX_GRID_YZ)
        )
        merge, num_counters = None, room.num_split_tiles * heads
        if tiles.name == "prefill_sm80":
            num_counters = 0
            if room.num_split_tiles:
                num_rows = room.num_split_tiles * tiles.tile_q
                merge = merge_splits.prepare(
                    self.problem, tiles.tile_q, num_rows, heads, self.device_index
                )
        merges = words_bytes + room.num_items * _ITEM_BYTES
        counters = merges + 4 * room.num_split_tiles
        lse_bytes = 4 * room.num_states * heads * tiles.tile_q
        partial_lse = workspace_bytes + lse_bytes * self.problem.head_dim_vo
        part = _Part(launches, merge, words_bytes, merges, counters, workspace_bytes, partial_lse)
        return part, _round_up(counters + 4 * num_counters), _round_up(partial_lse + lse_bytes)

    def launch(
        self,
        schedule: BatchSchedule,
        words: int,
        workspace: int,
        q: int,
        k: int,
        v: int,
        o: int,
        optional: bytes,
        strides: bytes,
        kv_indices: int,
        mask_bytes: int,
        output_scale: float,
        sm_scale: float,
        stream: int,
    ) -> None:
        """Enqueue one run on arrays at these addresses.

        `optional` and `strides` are params.OPTIONAL and params.STRIDES, packed. The scales are
        those of the options times what the run adds to them.
        """
        arguments = params.this_thread.launch_buffer
        for part in schedule.parts:
            for launch, first_item in part.launches:
                key = first_item, sm_scale, output_scale
                params.ATTENTION.pack_into(
                    arguments.buffer,
                    arguments.offset,
                    q,
                    k,
                    v,
                    o,
                    optional,
                    workspace + part.partial_o,
                    workspace + part.partial_lse,
                    words + part.counters,
                    words + part.items,
                    words + part.merges,
                    kv_indices,
                    strides,
                    mask_bytes,
                    0,
                    0,
                    self._packed.get(key) or self._constants(*key),
                )
                enqueue(launch, arguments, self.device_index, stream)
            if part.merge is not None:
                enqueue(part.merge, arguments, self.device_index, stream)

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


def _round_up(num_bytes: int) -> int:
    return -(-num_bytes // 16) * 16
