"""Launches the attention kernels of one request: kernel, plan, Params struct, scratch, launch."""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from ...choose import candidates
from ...choose.candidates import Batch
from ...choose.card import card_of
from ...core.device import device_props
from ...core.problem import AttentionProblem
from ...core.spec import AttentionSpec
from ...schedule import Masking
from ...schedule.batch import BatchRequests, Splitting, TileWork, alike_splits
from ...schedule.tile_shape import TileShape
from ..driver import params, scratch
from ..driver.enqueue import MAX_GRID_YZ, Launch, enqueue
from ..driver.scratch import Allocate
from ..tiles.config import Target, TileConfig
from ..tiles.forms import ON_ARRIVAL, form_name, forms_within
from ..tiles.row_classes import MAX_ROWS, SMALL, row_class_of
from . import log_choices, merge_splits, rotate_keys, scan_mask, tma_sm90, widen_rows
from .kernels import Kernels
from .swizzle import ONE_HEAD, L2Swizzle, swizzle_of

# k's pair in params.STRIDES, after q's.
_K_STRIDES = struct.Struct("<2q")
_ZERO = np.zeros(1, np.int64)
_NO_STRIDES = bytes(params.STRIDES.size)


class _Chosen(NamedTuple):
    """The kernel of a request, by its row class or tile, and how the request is cut."""

    row_class: str
    shape: TileShape
    num_q_tiles: int
    num_splits: int


@dataclass(frozen=True, slots=True)
class PreparedPlan:
    """What all calls of one launcher that have the same plan share.

    parts           launches, each with its share of the Params struct
    rotates_keys    keys are to be rotated before
    partial_bytes   scratch memory for partial O and, after `partial_o_bytes` of it, partial LSE;
                    0 if the keys of no tile are split
    mask_bytes      scratch memory for what a launch ahead leaves
    num_counters    arrival counters, by which the last block of a tile knows to merge its splits,
                    or persistent blocks share out their work
    merge           the launch that does it instead
    """

    parts: tuple[tuple[Launch, bytes], ...]
    tiles: TileConfig
    rotates_keys: bool
    partial_o_bytes: int = 0
    partial_bytes: int = 0
    mask_bytes: int = 0
    num_counters: int = 0
    swizzle: L2Swizzle = ONE_HEAD
    merge: Launch | None = None


class AttentionLauncher:
    """Serves every call of one problem, device and geometry; only lengths and pointers vary.

    form  in which it serves arrays of 8 bits (launch/tiles/forms.py); launchers of the other
          forms serve lengths that they are done with sooner
    """

    def __init__(self, spec: AttentionSpec, problem: AttentionProblem, device_index: int) -> None:
        props = device_props(device_index)
        forms = forms_within(spec, problem, Target(props.arch, props.max_smem_per_block))
        self.spec = spec
        self.problem = problem = forms[0].problem
        self._others = [AttentionLauncher(spec, form.problem, device_index) for form in forms[1:]]
        self._serving: dict[tuple[int, int], AttentionLauncher] = {}
        self._widened = widen_rows.widened_of(spec, problem)
        self.form = form_name(spec, problem)
        self.num_kv_heads = spec.num_kv_heads
        self.group_size = spec.group_size
        self.device_index = device_index
        num_kv_heads, group_size = spec.num_kv_heads, spec.group_size
        self._kernels = Kernels(
            problem, num_kv_heads, group_size, 0, device_index, is_batch=False, form=self.form
        )
        self._masking = Masking(spec.window_left, spec.right_limit, problem.custom_mask)
        self._keys = rotate_keys.Keys(
            spec.dtype_kv,
            spec.num_kv_heads,
            spec.head_dim_qk,
            0,
            params.rope_table(spec),
            device_index,
        )
        self._behind = params.more_rope_steps(spec)
        self._plans: dict[tuple[int, int], PreparedPlan] = {}
        self._heads = tma_sm90.Heads(
            problem, num_kv_heads, group_size, page_size=0, device_index=device_index
        )
        self._maps: dict[tuple[int, int, int, bytes, int], tma_sm90.Maps] = {}
        self._log = log_choices.log_of(spec, problem)

    def serving(self, qo_len: int, kv_len: int) -> AttentionLauncher:
        """The launcher of the form by which a request of these lengths is served soonest."""
        if not self._others:
            return self
        key = qo_len, _rounded(kv_len)
        cached, form = self._serving.get(key), candidates.forced_form()
        if cached is not None and form is None:
            return cached
        rounded, offered = key[1], [self, *self._others]
        offered = [x for x in offered if form in (None, x.form)] or offered
        result = min(offered, key=lambda x: x._time_of(qo_len, rounded))
        if form is None:
            if len(self._serving) > 4096:
                self._serving.clear()
            self._serving[key] = result
        return result

    def _time_of(self, qo_len: int, kv_len: int) -> float:
        """When such a request is served, with what is launched ahead."""
        batch = self._batch_of(qo_len, kv_len)
        if self.form == ON_ARRIVAL and batch.max_rows > MAX_ROWS[SMALL]:
            return math.inf  # Hopper's own tiles read no such rows
        time = candidates.best(self._kernels, batch).time
        if not any(self._widened):
            return time
        widening = card_of(device_props(self.device_index)).widening
        return time + widening.time(
            sum(x.num_elements for x in self._widened_rows(_NO_STRIDES, qo_len, kv_len))
        )

    def _widened_rows(self, strides: bytes, qo_len: int, kv_len: int) -> list[widen_rows.Rows]:
        """What is widened ahead of such a call."""
        return widen_rows.rows_of(self.spec, strides, qo_len, kv_len, self._widened)

    def plan(self, qo_len: int, kv_len: int) -> PreparedPlan:
        """The plan for these lengths, of which many have the same."""
        key = qo_len, -(-kv_len // 16)
        cached = self._plans.get(key)
        if cached is None:
            if len(self._plans) > 4096:
                self._plans.clear()
            rounded = qo_len, -(-_rounded(kv_len) // 16)
            cached = self._plans.get(rounded)
            if cached is None:
                cached = self._plans[rounded] = self._prepare(qo_len, kv_len)
            self._plans[key] = cached
        return cached

    def _prepare(self, qo_len: int, kv_len: int) -> PreparedPlan:
        name, chosen = self._choose(qo_len, _rounded(kv_len))
        row_class, shape, num_q_tiles, num_splits = chosen
        tiles = self._kernels.get(row_class).kinds[0]
        if self._log is not None:
            num_blocks = num_q_tiles * num_splits * self.num_kv_heads * shape.cluster
            self._log.single((qo_len, kv_len), name, tiles.name, num_blocks)
        swizzle = ONE_HEAD
        if tiles.is_sm90:
            swizzle = swizzle_of(self.spec, self.problem, _rounded(kv_len), self.device_index)
        starts = range(0, num_q_tiles, num_q_tiles if tiles.is_sm90 else MAX_GRID_YZ)
        parts = tuple(self._part(chosen, first_q_tile) for first_q_tile in starts)
        prologue = any(launch.prologue for launch, _ in parts)
        mask_bytes = scan_mask.MAP_BYTES * parts[0][0].num_items if prologue else 0
        num_counters, merge, state_rows = tiles.num_counters, None, 0
        if num_splits > 1:
            state_rows = num_q_tiles * num_splits * self.num_kv_heads * tiles.tile_q
            if tiles.fused_merge and shape.is_fused:
                num_counters = num_q_tiles * self.num_kv_heads * shape.cluster
            else:
                merge = merge_splits.prepare(
                    self.problem,
                    tiles,
                    num_q_tiles * tiles.tile_q,
                    self.num_kv_heads,
                    self.device_index,
                )
        o_bytes = 4 * state_rows * self.problem.head_dim_vo
        return PreparedPlan(
            parts,
            tiles,
            tiles.wants_rotated_keys,
            o_bytes,
            o_bytes + 4 * state_rows,
            mask_bytes,
            num_counters,
            swizzle,
            merge,
        )

    def _choose(self, qo_len: int, kv_len: int) -> tuple[str, _Chosen]:
        """What serves a batch of this request alone soonest, without a list, and its name."""
        batch = self._batch_of(qo_len, kv_len)
        works, candidate = batch.works, candidates.best(self._kernels, batch)
        ((row_class, _),) = candidate.parts
        shape = candidate.shape or self._kernels.shape(row_class)
        num_q_tiles = -(-works.max_rows // shape.tile_q)
        num_splits = alike_splits(
            works.of(shape), self.num_kv_heads, works.max_rows, shape, Splitting()
        )
        shape = self._kernels.merged_by(shape, num_splits)
        name = candidates.full_name(candidate.name, self.form)
        return name, _Chosen(row_class, shape, num_q_tiles, num_splits)

    def _batch_of(self, qo_len: int, kv_len: int) -> Batch:
        """A batch of one such request."""
        requests = BatchRequests(_ZERO + qo_len, _ZERO + kv_len, _ZERO, _ZERO, uniform=qo_len)
        works = TileWork(requests, self.group_size, self._masking, splits_alike=True)
        return Batch(
            [(row_class_of(works.max_rows, self.problem), works)],
            works,
            num_kv_heads=self.num_kv_heads,
            group_size=self.group_size,
            max_qo_len=qo_len,
            key_bytes=self._kernels.key_bytes,
            decode_load=None,
            prompts=None,
        )

    def _part(self, chosen: _Chosen, first_q_tile: int) -> tuple[Launch, bytes]:
        row_class, shape, num_q_tiles, num_splits = chosen
        constants = params.pack_constants(
            self.spec,
            sm_scale=self.spec.sm_scale,
            output_scale=self.spec.output_scale,
            first=first_q_tile,
            num_q_tiles=num_q_tiles,
            num_splits=num_splits,
        )
        kernel = self._kernels.get(row_class).loaded
        tiles, num_items, prologue = kernel.tiles, 0, None
        num_tiles = num_q_tiles - first_q_tile
        if tiles.is_sm90:
            num_items = num_tiles * num_splits
            grid = tiles.grid(num_items, self.num_kv_heads, kernel.num_slots)
            prologue = scan_mask.prologue(tiles, num_items, self.device_index)
        else:
            blocks = self.num_kv_heads * shape.cluster
            grid = blocks, min(num_tiles, MAX_GRID_YZ), num_splits
        launch = Launch(
            kernel.function,
            grid,
            tiles.threads,
            tiles.shared_bytes,
            num_items=num_items,
            prologue=prologue,
            cluster=shape.cluster,
        )
        return launch, constants

    def launch(
        self,
        q: int,
        k: int,
        v: int,
        o: int,
        optional: bytes,
        strides: bytes,
        mask_bytes: int,
        qo_len: int,
        kv_len: int,
        stream: int,
        allocate: Allocate,
    ) -> None:
        """Enqueue one call on arrays at these addresses.

        `optional` and `strides` are params.OPTIONAL and params.STRIDES, packed. Scratch memory
        comes from `allocate`.
        """
        if self._others and (serving := self.serving(qo_len, kv_len)) is not self:
            serving.launch(
                q, k, v, o, optional, strides, mask_bytes, qo_len, kv_len, stream, allocate
            )
            return
        plan = self.plan(qo_len, kv_len)
        partial_o = partial_lse = counters = mask_maps = 0
        # Owners of scratch memory (names that start with _) may go once everything is enqueued.
        if any(self._widened):
            rows = self._widened_rows(strides, qo_len, kv_len)
            (q, k, v), _wide = self._widen((q, k, v), rows, stream, allocate)
            strides = widen_rows.widened_strides(self.spec, strides, self._widened)
        if plan.rotates_keys and kv_len:
            k, strides, _rotated = self._rotate_keys(k, strides, kv_len, stream, allocate)
        if plan.partial_bytes:
            partial_o, _partials = scratch.workspace(
                plan.partial_bytes, self.device_index, stream, allocate
            )
            partial_lse = partial_o + plan.partial_o_bytes
        if plan.mask_bytes:
            mask_maps, _mask_maps = allocate(plan.mask_bytes)
        if plan.num_counters:
            counters, _zeros = scratch.counters(
                plan.num_counters, self.device_index, stream, allocate
            )
        arguments = params.this_thread.launch_buffer
        if self._behind:
            begin = arguments.offset + params.ATTENTION.size
            arguments.buffer[begin : begin + len(self._behind)] = self._behind
        for launch, constants in plan.parts:
            params.ATTENTION.pack_into(
                arguments.buffer,
                arguments.offset,
                q,
                k,
                v,
                o,
                optional,
                partial_o,
                partial_lse,
                counters,
                0,
                0,
                0,
                0,
                strides,
                mask_bytes,
                0,
                qo_len,
                kv_len,
                constants,
            )
            if launch.num_items:
                maps = self._maps_of(plan, launch, strides, qo_len, kv_len, mask_maps)
                maps.pack(arguments, q, k, v, o)
            enqueue(launch, arguments, self.device_index, stream)
        if plan.merge is not None:
            enqueue(plan.merge, arguments, self.device_index, stream)

    def _widen(
        self,
        arrays: tuple[int, int, int],
        rows: list[widen_rows.Rows],
        stream: int,
        allocate: Allocate,
    ) -> tuple[tuple[int, int, int], object]:
        """Rows of q, or of k and v too, widened into scratch memory: the addresses of all three,
        and the owner of that."""
        to, owner = allocate(sum(x.num_bytes for x in rows))
        index, is_aligned = self.device_index, self.problem.aligned
        widening = widen_rows.prepare(self.spec, is_aligned, rows, to, index)
        q, k, v = arrays
        return widening.launch(q, k, v, index, stream), owner

    def _maps_of(
        self,
        plan: PreparedPlan,
        launch: Launch,
        strides: bytes,
        qo_len: int,
        kv_len: int,
        mask_maps: int,
    ) -> tma_sm90.Maps:
        key = launch.num_items, qo_len, kv_len, strides, mask_maps
        cached = self._maps.get(key)
        if cached is None:
            if len(self._maps) > 256:
                self._maps.clear()
            cached = self._maps[key] = tma_sm90.Maps(
                self._heads,
                plan.tiles,
                launch.num_items,
                plan.swizzle,
                strides,
                num_rows=qo_len,
                size=kv_len,
                mask_maps=mask_maps,
            )
        return cached

    def _rotate_keys(
        self, k: int, strides: bytes, kv_len: int, stream: int, allocate: Allocate
    ) -> tuple[int, bytes, object]:
        """Keys rotated into scratch memory: their address, the strides with theirs, their owner."""
        start, end = _K_STRIDES.size, 2 * _K_STRIDES.size
        k_strides = _K_STRIDES.unpack_from(strides, start)
        rotated, owner = rotate_keys.launch(self._keys, k, k_strides, kv_len, stream, allocate)
        contiguous = _K_STRIDES.pack(*self._keys.strides[:2])
        return rotated, strides[:start] + contiguous + strides[end:], owner


def _rounded(length: int) -> int:
    """The keys that a plan is made for: no more key tiles than there are, or a sixteenth more of
    many. A key tile is a multiple of 16."""
    step = max(16, 1 << max(0, length.bit_length() - 5))
    return -(-length // step) * step
