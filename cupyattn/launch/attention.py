"""Launches the attention kernels of one request: kernel, plan, Params struct, scratch, launch."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

from .. import dtypes, jit
from ..array import ArrayView, empty, view
from ..device import device_props
from ..problem import AttentionProblem
from ..schedule import MAX_GRID_YZ, SinglePlan, plan_single
from . import merge_splits, params, rotate_keys, scratch
from .enqueue import enqueue
from .tiles import TileConfig, row_class, tile_config


_LOG2_E = math.log2(math.e)
# kSlack of kernels/cupyattn/attention/softmax.cuh.
_SLACK = 8.0


class LoadedKernel:
    """A kernel on a device, with the number of its blocks that run at a time."""

    __slots__ = ("function", "num_slots", "tiles")

    def __init__(self, tiles: TileConfig, device_index: int) -> None:
        from cupy.cuda import Device, driver

        props = device_props(device_index)
        kernel = jit.load(tiles.name, tiles.config, device_index, props.arch)
        kernel.set_shared_memory(tiles.shared_bytes)
        with Device(device_index):
            blocks = driver.occupancyMaxActiveBlocksPerMultiprocessor(
                kernel.function, tiles.threads, tiles.shared_bytes
            )
        self.function = kernel.function
        self.num_slots = max(1, blocks) * props.num_sms
        self.tiles = tiles


@lru_cache(maxsize=4096)
def load_kernel(problem: AttentionProblem, rows: str, device_index: int) -> LoadedKernel:
    """The kernel for a problem and a row class on a device, compiled on first use."""
    max_shared = device_props(device_index).max_smem_per_block
    return LoadedKernel(tile_config(problem, rows, max_shared), device_index)


@dataclass(frozen=True, slots=True)
class AttentionOptions:
    """The run-time facts of a call that are numbers. Scales are positive or negative, finite."""

    causal: bool
    window_left: int
    sm_scale: float
    output_scale: float
    logits_soft_cap: float
    rope_scale: float
    rope_theta: float


class AttentionLauncher:
    """Serves every call of one problem, device and geometry; only lengths and pointers vary."""

    def __init__(
        self,
        problem: AttentionProblem,
        options: AttentionOptions,
        num_qo_heads: int,
        num_kv_heads: int,
        device_index: int,
    ) -> None:
        self.problem = problem
        self.options = options
        self.num_kv_heads = num_kv_heads
        self.group_size = num_qo_heads // num_kv_heads
        self.device_index = device_index
        # Read by the kernels only if the scale is positive and shared by all heads.
        self.softmax_scale = options.sm_scale * _LOG2_E
        self.softmax_slack = _SLACK / self.softmax_scale if self.softmax_scale else 0.0
        self.rope_table = (
            params.rope_steps(problem.head_dim_qk, options.rope_scale, options.rope_theta)
            if problem.pos_encoding == "ROPE_LLAMA"
            else b""
        )
        self._plans: dict[tuple[int, int], tuple[LoadedKernel, SinglePlan]] = {}

    def plan(self, qo_len: int, kv_len: int) -> tuple[LoadedKernel, SinglePlan]:
        """The kernel and plan for these lengths; plans are remembered by the number of key tiles."""
        # 16 divides every key tile, so lengths that round up alike have the same tiles, but for
        # where a window begins.
        key = (qo_len, kv_len if self.options.window_left >= 0 else -(-kv_len // 16))
        found = self._plans.get(key)
        if found is None:
            kernel = load_kernel(
                self.problem, row_class(qo_len * self.group_size), self.device_index
            )
            plan = plan_single(
                qo_len,
                kv_len,
                self.group_size,
                self.num_kv_heads,
                kernel.tiles.tile_q,
                kernel.tiles.tile_kv,
                kernel.num_slots,
                self.options.causal and not self.problem.custom_mask,
                self.options.window_left,
            )
            if len(self._plans) > 4096:
                self._plans.clear()
            found = self._plans[key] = kernel, plan
        return found

    def launch(
        self,
        q: ArrayView,
        k: ArrayView,
        v: ArrayView,
        o: ArrayView,
        lse: ArrayView | None,
        mask: ArrayView | None,
        sinks: ArrayView | None,
        scales: tuple[ArrayView | None, ArrayView | None, ArrayView | None],
        strides: tuple[int, int, int, int, int, int, int, int, int, int],
        qo_len: int,
        kv_len: int,
        stream: int,
    ) -> None:
        """Enqueue one call. `strides` are (token, head) pairs of q, k, v, o, lse in elements."""
        kernel, plan = self.plan(qo_len, kv_len)
        if kernel.tiles.wants_rotated_keys and kv_len:
            dim = self.problem.head_dim_qk
            k = rotate_keys.launch(
                k, strides[2:4], kv_len, self.num_kv_heads, dim, self.rope_table, q, stream
            )
            strides = (*strides[:2], self.num_kv_heads * dim, dim, *strides[4:])
        partial_o = partial_lse = counters = 0
        if plan.num_splits > 1:
            rows = plan.num_blocks * kernel.tiles.tile_q
            dim = self.problem.head_dim_vo
            partials = empty((rows * (dim + 1),), dtypes.float32, q)
            partial_o = view(partials, "scratch").ptr
            partial_lse = partial_o + rows * dim * 4
            counters, _owner = scratch.counters(q, plan.num_q_tiles * self.num_kv_heads)
        options = self.options
        arguments = params.launch_buffer
        if self.rope_table:
            start = arguments.rope_offset
            arguments.buffer[start : start + len(self.rope_table)] = self.rope_table
        for first_q_tile in range(0, plan.num_q_tiles, MAX_GRID_YZ):
            params.ATTENTION.pack_into(
                arguments.buffer,
                arguments.offset,
                q.ptr,
                k.ptr,
                v.ptr,
                o.ptr,
                0 if lse is None else lse.ptr,
                0 if mask is None else mask.ptr,
                0 if sinks is None else sinks.ptr,
                0 if scales[0] is None else scales[0].ptr,
                0 if scales[1] is None else scales[1].ptr,
                0 if scales[2] is None else scales[2].ptr,
                partial_o,
                partial_lse,
                counters,
                *strides,
                0 if mask is None else mask.shape[0],
                qo_len,
                kv_len,
                self.num_kv_heads,
                self.group_size,
                plan.num_q_tiles,
                plan.num_splits,
                options.causal,
                options.window_left,
                options.sm_scale,
                options.logits_soft_cap,
                options.output_scale,
                self.softmax_scale,
                self.softmax_slack,
                first_q_tile,
            )
            q_tiles = min(plan.num_q_tiles - first_q_tile, MAX_GRID_YZ)
            enqueue(
                kernel.function,
                (self.num_kv_heads, q_tiles, plan.num_splits),
                kernel.tiles.threads,
                kernel.tiles.shared_bytes,
                arguments,
                self.device_index,
                stream,
            )
        if plan.num_splits > 1 and kernel.tiles.name == "prefill_sm80":
            merge_splits.launch(
                self.problem,
                kernel.tiles.tile_q,
                qo_len * self.group_size,
                self.num_kv_heads,
                arguments,
                self.device_index,
                stream,
            )
