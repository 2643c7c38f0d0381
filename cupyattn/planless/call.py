"""Attention calls without a plan: lengths, offsets and page tables stay in device memory.

A call is checked by what the host can see: shapes, dtypes, strides. A block on the device then
reads the lengths and writes the work list (launch/plan_batch.py), ahead of the kernels that the
wrappers launch too. Nothing is copied to the host and nothing waits, so that a graph can capture a
call.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass, field
from typing import Any

from .. import array
from ..array import ArrayView
from ..array.match import require_output
from ..core import dtypes
from ..errors import WorkspaceError
from ..inputs import row_mask
from ..inputs.geometry import Variant
from ..inputs.limits import are_rows_aligned
from ..inputs.row_mask import NO_BITS, MaskBits
from ..inputs.workspace import view_workspace
from ..launch.attention import pad_lse, plan_batch
from ..launch.attention.batch import BatchLauncher
from ..launch.attention.bound_run import BoundRun
from ..launch.attention.pad_lse import Padding
from ..launch.attention.plan_batch import DevicePlan, Lengths
from ..launch.driver import params, scratch
from ..launch.driver.enqueue import cuda
from . import reference
from .check import Arrays, Call, Options, check
from .repeat import remember
from .views import merge_leading

_MAX_BOUND = 256


@dataclass(frozen=True, slots=True)
class Prepared:
    """What launches of calls that look alike share.

    padding    turns rows of LSE, `lse_rows` bytes into the workspace, into the caller's; or None
    mask       how bits lie in the caller's memory; if it has bools, `mask.address` bytes into the
               workspace, where they are packed first
    num_bytes  of the workspace
    num_keys   rows that k and v hold, or pages
    bound      what a workspace and a page table at these addresses make of the launches
    """

    launcher: BatchLauncher
    plan: DevicePlan
    padding: Padding | None
    lse_rows: int
    mask: MaskBits
    num_bytes: int
    strides: bytes
    num_keys: int
    sm_scale: float
    output_scale: float
    has_scales: bool
    bound: dict[tuple[int, int], tuple[bytes, BoundRun]] = field(default_factory=dict)

    def launch(
        self,
        workspace: int,
        q: int,
        k: int,
        v: int,
        o: int,
        lse: int,
        block_tables: int,
        kv_lens: int,
        others: tuple[int, ...],
        scale_places: tuple[int, int, int],
        stream: int,
    ) -> None:
        """Enqueue the planner and all behind it, on arrays at these addresses, 0 for none.

        others: from qo_lens on as in Arrays; scale_places: of the scales of q, k and v among them.
        """
        bound = self.bound.get((workspace, block_tables)) or self._bind(workspace, block_tables)
        planned, attention = bound
        plan, device = self.plan, attention.device_index
        scales, sinks, mask, optional = (0, 0, 0), others[5], others[9], params.NO_OPTIONAL
        indices = others[0], kv_lens, others[1], others[2]
        rows = lse if self.padding is None else workspace + self.lse_rows
        if self.has_scales:
            scale_q, scale_k, scale_v = scale_places
            scales = others[scale_q], others[scale_k], others[scale_v]
            at_q, at_k, at_v = plan.scales
            optional = params.OPTIONAL.pack(
                rows,
                mask,
                sinks,
                workspace + at_q if scales[0] else 0,
                workspace + at_k if scales[1] else 0,
                workspace + at_v if scales[2] else 0,
            )
        elif rows or sinks or mask:
            optional = params.OPTIONAL.pack(rows, mask, sinks, 0, 0, 0)
        plan_batch.launch(plan, planned, indices, scales, device, stream)
        attention.launch(q, k, v, o, optional, stream)
        if self.padding is not None:
            pad_lse.launch(self.padding, planned, indices, rows, lse, device, stream)

    def _bind(self, workspace: int, block_tables: int) -> tuple[bytes, BoundRun]:
        plan = self.plan
        attention = self.launcher.bind(
            plan.schedule,
            workspace,
            workspace + plan.partials,
            self.strides,
            self.num_keys,
            block_tables,
            self.mask.num_bytes,
            self.mask.row_bytes,
            self.output_scale,
            self.sm_scale,
        )
        if len(self.bound) >= _MAX_BOUND:
            self.bound.clear()
        found = self.bound[workspace, block_tables] = (
            plan_batch.bind(plan, workspace),
            attention,
        )
        return found


def run(
    usual: tuple[Any, ...], more: tuple[Any, ...] | None, rest: tuple[Any, ...], options: Options
) -> Any:
    """The answer of a call that goes the general way: out, or (out, lse) if `return_lse`.

    usual, more, rest: as in repeat.py; options: what rest comes to.
    """
    # --- 1. Validate ---
    arrays = Arrays(*usual, *(more or ()))
    call = check(arrays, options)
    vq = call.q
    vworkspace = _view_workspace(arrays.workspace, call)

    # --- 2. Answer on the CPU ---
    if vq.device.kind == "cpu":
        return reference.answer(call, arrays, options.names)

    # --- 3. Launch on the caller's stream ---
    out, lse = arrays.out, arrays.lse
    if out is None:
        out = array.empty(call.out_shape, call.geometry.problem.dtype_o, vq)
        call.out = merge_leading(array.view(out, "out"), "out", 2)
    if lse is None and call.return_lse:
        lse = array.empty(call.lse_shape, dtypes.float32, vq)
        call.lse = array.view(lse, "lse")
        if not call.pads_lse:
            call.lse = merge_leading(call.lse, "lse", 1)
    if vq.shape[0] or (call.lse is not None and call.pads_lse and call.lse.shape[0]):
        if cuda().is_debugging:
            reference.check_values(call, options.names)
        prepared = _prepare(call)
        _launch(call, prepared, vworkspace)
        if call.scales.is_constant and not _is_bool_mask(call) and not cuda().is_debugging:
            remember(usual, more, rest, arrays, call, prepared)
    out = array.deliver(out, vq)
    return (out, array.deliver(lse, vq)) if call.return_lse else out


def _view_workspace(x: Any, call: Call) -> ArrayView | None:
    """The workspace, checked. The CPU needs none, and on a GPU there may be none."""
    if x is None:
        return None
    v = view_workspace(x, "workspace_buffer")
    if call.q.device.kind == "cuda":
        array.same_device(q=call.q, workspace_buffer=v)
        others = {
            "q": call.q,
            "k": call.keys.k,
            "v": call.keys.v,
            "block_tables": call.block_tables,
            "mask": call.mask,
        }
        require_output(v, "workspace_buffer", **others, out=call.out, lse=call.lse)
    return v


def _prepare(call: Call) -> Prepared:
    vq, keys, vout, vlse = call.q, call.keys, call.out, call.lse
    assert vout is not None
    strides = [(x.strides[:2], x.dtype) for x in (vq, vout)]
    strides.append((keys.strides, keys.k.dtype))
    is_aligned = are_rows_aligned(vq.ptr | keys.k.ptr | keys.v.ptr | vout.ptr, strides)
    scales = call.scales
    is_scaled = not (scales.views[0] is scales.views[1] is None)
    prescale_logits = is_scaled or scales.logits <= 0.0
    variant = Variant(is_aligned, prescale_logits, call.mask is not None)
    launcher = call.geometry.launcher(variant)
    plan = _plan(launcher, call.lengths)
    padding, lse_rows, num_bytes = None, 0, plan.num_bytes
    lse_strides = (0, 0) if vlse is None else vlse.strides[-2:]
    if call.pads_lse and vlse is not None:
        padding = pad_lse.prepare(vlse, launcher.device_index)
        lse_rows, lse_strides = num_bytes, (vq.shape[1], 1)
        num_bytes += 4 * vq.shape[0] * vq.shape[1]
    mask = NO_BITS
    if call.mask is not None:
        mask = row_mask.bits_of(call.mask, vq.shape[0])
        if _is_bool_mask(call):
            packed_bytes = row_mask.num_packed_bytes(vq.shape[0], call.lengths.qo_len)
            mask = MaskBits(num_bytes, packed_bytes // vq.shape[0], packed_bytes)
            num_bytes += packed_bytes
    packed = params.STRIDES.pack(
        *vq.strides[:2], *keys.strides[:4], *vout.strides[:2], *lse_strides, *keys.strides[4:]
    )
    return Prepared(
        launcher,
        plan,
        padding,
        lse_rows,
        mask,
        num_bytes,
        packed,
        keys.size,
        scales.logits,
        scales.output,
        has_scales=is_scaled or scales.views[2] is not None,
    )


@functools.lru_cache(maxsize=1024)
def _plan(launcher: BatchLauncher, lengths: Lengths) -> DevicePlan:
    return plan_batch.prepare(launcher, lengths)


def _launch(call: Call, prepared: Prepared, vworkspace: ArrayView | None) -> None:
    vq, vout, indices = call.q, call.out, call.indices
    assert vout is not None
    stream = array.current_stream(vq)
    owner: object = None
    if vworkspace is None:
        workspace, owner = scratch.allocator(vq)(prepared.num_bytes)
    else:
        workspace = vworkspace.ptr
        have = math.prod(vworkspace.shape) * vworkspace.dtype.itemsize
        if have < prepared.num_bytes:
            raise WorkspaceError(
                f"workspace_buffer: this call needs {prepared.num_bytes} bytes and it has {have}; "
                "pass a larger one"
            )
    inputs = (call.keys.k, call.keys.v, call.block_tables, call.sinks, call.mask, vworkspace)
    used = [v for v in (*inputs, call.lse, *indices, *call.scales.views) if v is not None]
    array.acquire(vq, vout, *used)
    mask = _address(call.mask)
    if _is_bool_mask(call):
        assert call.mask is not None
        mask = workspace + prepared.mask.address
        row_mask.pack(call.mask, vq.shape[0], call.lengths.qo_len, mask, stream)
    others = (indices.qo_lens, indices.qo_offsets, indices.kv_offsets, None, None, call.sinks)
    prepared.launch(
        workspace,
        vq.ptr,
        call.keys.k.ptr,
        call.keys.v.ptr,
        vout.ptr,
        _address(call.lse),
        _address(call.block_tables),
        indices.kv_lens.ptr,
        (*map(_address, (*others, *call.scales.views)), mask, 0),
        (6, 7, 8),
        stream,
    )
    array.release(vq, vq, vout, *used)
    del owner  # memory for one call may go once everything is enqueued


def _is_bool_mask(call: Call) -> bool:
    return call.mask is not None and call.mask.dtype is dtypes.bool_


def _address(v: ArrayView | None) -> int:
    return 0 if v is None else v.ptr
