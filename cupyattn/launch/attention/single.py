"""Launches the attention kernels of one request: kernel, plan, Params struct, scratch, launch."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from functools import lru_cache
from typing import Generic, TypeVar

import numpy as np

from ...choose.candidates import best_tiles
from ...choose.card import card_of
from ...choose.tile_times import large_tiles, shape_of, times_of
from ...core.device import DeviceProps, device_props, is_here, overlaps_launches
from ...core.problem import AttentionProblem
from ...core.spec import AttentionSpec
from ...schedule import MAX_GRID_YZ, Masking, SinglePlan, plan_single
from ...schedule.batch import BatchRequests, TileWork
from ...schedule.makespan import TileTimes
from ..driver import params, scratch
from ..driver.enqueue import Launch, enqueue, load_function
from ..driver.pdl import most_clusters
from ..driver.scratch import Allocate
from ..tiles.config import TileConfig, min_blocks
from ..tiles.mixed_sm80 import MixedConfig, mixed_config
from ..tiles.row_classes import LARGE, row_class
from ..tiles.select import tile_config
from . import log_choices, merge_splits, rotate_keys, scan_mask, tma_sm90
from .swizzle import ONE_HEAD, L2Swizzle, l2_swizzle

# k's pair in params.STRIDES, after q's.
_K_STRIDES = struct.Struct("<2q")
# Shared memory of a block that is not the kernel's.
_RESERVED_BYTES = 1 << 10


_Tiles = TypeVar("_Tiles", TileConfig, MixedConfig)


class LoadedKernel(Generic[_Tiles]):
    """A kernel on a device of so many SMs, with the number of its blocks that run at a time, and
    whether these can form clusters."""

    __slots__ = (
        "_device_index",
        "_most",
        "function",
        "has_clusters",
        "num_slots",
        "num_sms",
        "tiles",
    )

    def __init__(self, tiles: _Tiles, device_index: int) -> None:
        props = device_props(device_index)
        self.function = load_function(tiles.name, tiles.config, device_index, tiles.shared_bytes)
        blocks = _blocks_per_sm(self.function, tiles, props)
        self.num_slots = max(1, blocks) * props.num_sms
        self.num_sms = props.num_sms
        self.tiles: _Tiles = tiles
        self.has_clusters = tiles.name == "decode_sm80" and overlaps_launches(props.arch)
        self._device_index = device_index
        self._most: dict[int, int] = {}

    def most_clusters(self, cluster: int) -> int:
        """How many clusters of so many blocks run at a time."""
        if cluster not in self._most:
            found = self.num_slots // cluster
            if is_here(self._device_index):
                from cupy.cuda import Device

                with Device(self._device_index):
                    size = self.tiles.threads, self.tiles.shared_bytes
                    found = most_clusters(self.function, *size, cluster)
            self._most[cluster] = found
        return self._most[cluster]


def _blocks_per_sm(function: int, tiles: TileConfig | MixedConfig, props: DeviceProps) -> int:
    """How many blocks run on an SM at a time; without a GPU as many as fit its shared memory, or as
    the registers of prefill_sm90 are dealt out for."""
    if not is_here(props.index):
        fitting = props.smem_per_sm // (tiles.shared_bytes + _RESERVED_BYTES)
        return min(fitting, min_blocks(tiles.config)) if tiles.name == "prefill_sm90" else fitting
    from cupy.cuda import Device, driver

    with Device(props.index):
        blocks: int = driver.occupancyMaxActiveBlocksPerMultiprocessor(
            function, tiles.threads, tiles.shared_bytes
        )
    return blocks


@lru_cache(maxsize=4096)
def load_kernel(
    problem: AttentionProblem,
    rows: str,
    device_index: int,
    is_batch: bool = False,
    page_size: int = 0,
) -> LoadedKernel[TileConfig]:
    """The kernel for a problem and a row class on a device, compiled on first use."""
    props = device_props(device_index)
    tiles = tile_config(problem, rows, props.max_smem_per_block, is_batch, props.arch, page_size)
    return LoadedKernel(tiles, device_index)


@lru_cache(maxsize=1024)
def load_mixed(
    problem: AttentionProblem, large: str, small: str, device_index: int
) -> LoadedKernel[MixedConfig] | None:
    """The kernel for two row classes at once, compiled on first use; None if there is none."""
    props = device_props(device_index)
    tiles = mixed_config(problem, large, small, props.max_smem_per_block, props.arch)
    return None if tiles is None else LoadedKernel(tiles, device_index)


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
    """Serves every call of one problem, device and geometry; only lengths and pointers vary."""

    def __init__(self, spec: AttentionSpec, problem: AttentionProblem, device_index: int) -> None:
        self.spec = spec
        self.problem = problem
        self.num_kv_heads = spec.num_kv_heads
        self.group_size = spec.group_size
        self.device_index = device_index
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
        self._heads = tma_sm90.Heads(problem, spec.num_kv_heads, spec.group_size, 0)
        self._maps: dict[tuple[int, int, int, bytes, int], tma_sm90.Maps] = {}
        self._log = log_choices.log_of(spec, problem)

    def plan(self, qo_len: int, kv_len: int) -> PreparedPlan:
        """The plan for these lengths; plans are remembered by the number of key tiles."""
        # 16 divides every key tile, so lengths that round up alike have the same tiles, but for
        # where a window begins.
        key = (qo_len, kv_len if self.spec.window_left >= 0 else -(-kv_len // 16))
        found = self._plans.get(key)
        if found is None:
            if len(self._plans) > 4096:
                self._plans.clear()
            found = self._plans[key] = self._prepare(qo_len, kv_len)
        return found

    def _prepare(self, qo_len: int, kv_len: int) -> PreparedPlan:
        masking = Masking(self.spec.window_left, self.spec.right_limit)
        name = row_class(qo_len * self.group_size)
        if name == LARGE:
            name = self._large_tiles(qo_len, kv_len, masking)
        kernel = load_kernel(self.problem, name, self.device_index)
        plan = plan_single(
            qo_len,
            kv_len,
            self.group_size,
            self.num_kv_heads,
            kernel.tiles.used_rows(self.group_size, self.num_kv_heads),
            kernel.tiles.tile_kv,
            kernel.num_slots,
            masking,
            self._times(kernel.tiles, name),
            kernel.num_sms,
        )
        tiles = kernel.tiles
        if self._log is not None:
            self._log.single((qo_len, kv_len), name, tiles.name, plan)
        swizzle = ONE_HEAD
        if tiles.is_sm90:
            l2_bytes = device_props(self.device_index).l2_bytes
            swizzle = l2_swizzle(
                self.problem, self.num_kv_heads, kv_len, self.spec.right_limit >= 0, l2_bytes
            )
        starts = range(0, plan.num_q_tiles, plan.num_q_tiles if tiles.is_sm90 else MAX_GRID_YZ)
        parts = tuple(self._part(kernel, plan, first_q_tile) for first_q_tile in starts)
        prologue = any(launch.prologue for launch, _ in parts)
        mask_bytes = scan_mask.MAP_BYTES * parts[0][0].num_items if prologue else 0
        if plan.num_splits == 1:
            return PreparedPlan(
                parts,
                tiles,
                tiles.wants_rotated_keys,
                mask_bytes=mask_bytes,
                num_counters=tiles.num_counters,
                swizzle=swizzle,
            )
        num_counters, merge = plan.num_q_tiles * self.num_kv_heads, None
        if not tiles.fused_merge:
            rows, heads = plan.num_q_tiles * tiles.tile_q, self.num_kv_heads
            merge = merge_splits.prepare(self.problem, tiles, rows, heads, self.device_index)
            num_counters = tiles.num_counters
        lse_bytes = 4 * plan.num_blocks * tiles.tile_q
        o_bytes = lse_bytes * self.problem.head_dim_vo
        return PreparedPlan(
            parts,
            tiles,
            tiles.wants_rotated_keys,
            o_bytes,
            o_bytes + lse_bytes,
            mask_bytes,
            num_counters,
            swizzle,
            merge,
        )

    def _times(self, tiles: TileConfig, name: str) -> TileTimes | None:
        """The times of a kernel; None if it was not timed."""
        if not tiles.is_sm90:
            return None
        times = times_of(card_of(device_props(self.device_index)), self.problem, 0, name)
        return times and times.of_group(self.group_size)

    def _large_tiles(self, qo_len: int, kv_len: int, masking: Masking) -> str:
        """The tiles by which a request of many rows is served soonest."""
        props = device_props(self.device_index)
        made = large_tiles(self.problem, props, 0)
        if not made:
            return LARGE
        zero = np.zeros(1, np.int64)
        requests = BatchRequests(zero + qo_len, zero + kv_len, zero, zero)
        works = TileWork(requests, self.group_size, masking)
        facts = self.group_size, self.num_kv_heads, props.num_sms
        shapes = {name: shape_of(*timed, *facts) for name, timed in made.items()}
        return best_tiles(works, self.num_kv_heads, shapes)

    def _part(
        self, kernel: LoadedKernel[TileConfig], plan: SinglePlan, first_q_tile: int
    ) -> tuple[Launch, bytes]:
        constants = params.pack_constants(
            self.spec,
            sm_scale=self.spec.sm_scale,
            output_scale=self.spec.output_scale,
            first=first_q_tile,
            num_q_tiles=plan.num_q_tiles,
            num_splits=plan.num_splits,
        )
        tiles, num_items, prologue = kernel.tiles, 0, None
        grid = self.num_kv_heads, plan.num_q_tiles - first_q_tile, plan.num_splits
        if tiles.is_sm90:
            num_items = grid[1] * grid[2]
            grid = tiles.grid(num_items, self.num_kv_heads, kernel.num_slots)
            prologue = scan_mask.prologue(tiles, num_items, self.device_index)
        else:
            grid = grid[0], min(grid[1], MAX_GRID_YZ), grid[2]
        size = tiles.threads, tiles.shared_bytes
        launch = Launch(kernel.function, grid, *size, num_items, False, prologue)
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
        plan = self.plan(qo_len, kv_len)
        partial_o = partial_lse = counters = mask_maps = 0
        # Owners of scratch memory (names that start with _) may go once everything is enqueued.
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
                lengths = qo_len, kv_len
                maps = self._maps_of(plan, launch, strides, lengths, mask_maps)
                maps.pack(arguments, q, k, v, o)
            enqueue(launch, arguments, self.device_index, stream)
        if plan.merge is not None:
            enqueue(plan.merge, arguments, self.device_index, stream)

    def _maps_of(
        self,
        plan: PreparedPlan,
        launch: Launch,
        strides: bytes,
        lengths: tuple[int, int],
        mask_maps: int,
    ) -> tma_sm90.Maps:
        key = launch.num_items, *lengths, strides, mask_maps
        found = self._maps.get(key)
        if found is None:
            if len(self._maps) > 256:
                self._maps.clear()
            found = self._maps[key] = tma_sm90.Maps(
                self._heads, plan.tiles, launch.num_items, plan.swizzle, strides, *lengths,
                mask_maps=mask_maps,
            )  # fmt: skip
        return found

    def _rotate_keys(
        self, k: int, strides: bytes, kv_len: int, stream: int, allocate: Allocate
    ) -> tuple[int, bytes, object]:
        """Keys rotated into scratch memory: their address, the strides with theirs, their owner."""
        start, end = _K_STRIDES.size, 2 * _K_STRIDES.size
        k_strides = _K_STRIDES.unpack_from(strides, start)
        rotated, owner = rotate_keys.launch(self._keys, k, k_strides, kv_len, stream, allocate)
        contiguous = _K_STRIDES.pack(*self._keys.strides[:2])
        return rotated, strides[:start] + contiguous + strides[end:], owner
