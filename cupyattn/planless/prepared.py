"""What a call without a plan launches, made once for all calls of a signature and lengths."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from ..array.match import are_rows_aligned
from ..core import dtypes
from ..inputs import row_mask
from ..inputs.geometry import Variant
from ..inputs.row_mask import NO_BITS, MaskBits
from ..launch.attention import pad_lse, plan_batch
from ..launch.attention.batch import BatchLauncher
from ..launch.attention.bound_run import BoundRun
from ..launch.attention.layout import ANY_BATCH_BYTES
from ..launch.attention.pad_lse import Padding
from ..launch.attention.plan_batch import DevicePlan, Lengths
from ..launch.driver import params
from .check import Call

_MAX_BOUND = 256


@dataclass(slots=True, eq=False)
class Prepared:
    """What launches of calls with equal signature and lengths share; nobody changes it.

    padding    turns rows of LSE, `lse_rows` bytes into the workspace, into the caller's; or None
    mask       how bits lie in the caller's memory; if it has bools, `mask.address` bytes into the
               workspace, where they are packed first
    num_bytes  of the workspace
    num_rows   rows that q holds
    num_keys   rows that k and v hold, or pages
    lse_shape  of an LSE that the call makes
    bound      what a workspace and a page table at these addresses make of the launches
    """

    launcher: BatchLauncher
    plan: DevicePlan
    padding: Padding | None
    lse_rows: int
    mask: MaskBits
    num_bytes: int
    strides: bytes
    num_rows: int
    num_keys: int
    sm_scale: float
    output_scale: float
    has_scales: bool
    scales_by_head: tuple[bool, ...]
    lse_shape: tuple[int, ...]
    bound: dict[tuple[int, int], tuple[bytes, BoundRun]] = field(default_factory=dict)

    def launch(self, addresses: Sequence[int], stream: int) -> None:
        """Enqueue the planner and all behind it, on arrays at these addresses, 0 for none.

        addresses: in the order of Arrays, v's at its first page.
        """
        # fmt: off
        (
            q, k, v, workspace, block_tables, kv_lens, out, lse, qo_lens, qo_offsets, kv_offsets,
            _, _, sinks, scale_q, scale_k, scale_v, mask, kv_begin, slopes,
        ) = addresses
        # fmt: on
        bound = self.bound.get((workspace, block_tables)) or self._bind(workspace, block_tables)
        planned, attention = bound
        if not kv_lens:
            kv_lens = kv_offsets  # lengths are the steps of offsets
        plan, device = self.plan, attention.device_index
        scales: tuple[int, ...] = (0, 0, 0)
        optional = params.NO_OPTIONAL
        indices = qo_lens, kv_lens, qo_offsets, kv_offsets, kv_begin
        rows = lse if self.padding is None else workspace + self.lse_rows
        if self.has_scales:
            given = scale_q, scale_k, scale_v
            # The planner writes a scale that is one number to the workspace, once for each head.
            by_head = self.scales_by_head
            scales = tuple(0 if x else at for at, x in zip(given, by_head, strict=True))
            used = (
                at if x or not at else workspace + place
                for at, x, place in zip(given, by_head, plan.scales, strict=True)
            )
            optional = params.OPTIONAL.pack(
                rows, mask, sinks, *used, slopes, params.NO_LOGITS_ARRAYS
            )
        elif rows or sinks or mask or slopes:
            optional = params.OPTIONAL.pack(
                rows, mask, sinks, 0, 0, 0, slopes, params.NO_LOGITS_ARRAYS
            )
        plan_batch.launch(plan, planned, indices, scales, device, stream)
        attention.launch(q, k, v, out, optional, stream)
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
            num_rows=self.num_rows,
        )
        if len(self.bound) >= _MAX_BOUND:
            self.bound.clear()
        found = self.bound[workspace, block_tables] = (
            plan_batch.bind(plan, workspace),
            attention,
        )
        return found


def prepare(call: Call, have: int | None = None) -> Prepared:
    """What a call launches. have: bytes of its workspace, which a plan of fewer parts may need."""
    prepared = _prepare(call, ANY_BATCH_BYTES)
    if have is None or prepared.num_bytes <= have:
        return prepared
    # Besides the plan a workspace holds what is packed or padded.
    besides = prepared.num_bytes - prepared.plan.num_bytes
    fewer = _prepare(call, max(0, have - besides))
    return fewer if fewer.num_bytes <= have else prepared


def _prepare(call: Call, most_bytes: int) -> Prepared:
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
    plan = plan_of(launcher, call.lengths, most_bytes)
    lse_strides = None if vlse is None else vlse.strides
    packed = params.STRIDES.pack(
        *vq.strides[:2], *keys.strides[:4], *vout.strides[:2], 0, 0, *keys.strides[4:]
    )
    prepared = Prepared(
        launcher,
        plan,
        None,
        0,
        NO_BITS,
        plan.num_bytes,
        packed,
        vq.shape[0],
        keys.size,
        scales.logits,
        scales.output,
        has_scales=is_scaled or scales.views[2] is not None,
        scales_by_head=scales.by_head,
        lse_shape=call.lse_shape,
    )
    prepared = of_lengths(
        prepared, plan, vq.shape[0], keys.size, call.lse_shape, lse_strides, call.pads_lse
    )
    if call.mask is None:
        return prepared
    mask, num_bytes = row_mask.bits_of(call.mask, vq.shape[0]), prepared.num_bytes
    if is_bool_mask(call):
        packed_bytes = row_mask.num_packed_bytes(vq.shape[0], call.mask_bits)
        mask = MaskBits(num_bytes, packed_bytes // vq.shape[0], packed_bytes)
        num_bytes += packed_bytes
    return replace(prepared, mask=mask, num_bytes=num_bytes)


@functools.lru_cache(maxsize=1024)
def plan_of(
    launcher: BatchLauncher, lengths: Lengths, most_bytes: int = ANY_BATCH_BYTES
) -> DevicePlan:
    return plan_batch.prepare(launcher, lengths, most_bytes)


def of_lengths(
    first: Prepared,
    plan: DevicePlan,
    num_rows: int,
    num_keys: int,
    lse_shape: tuple[int, ...],
    lse_strides: Sequence[int] | None,
    pads_lse: bool,
) -> Prepared:
    """What calls like `first` launch over so many rows and keys, with an LSE of these strides, or
    without one if None."""
    launcher, strides, num_bytes = first.launcher, first.strides, plan.num_bytes
    padding, lse_rows = None, 0
    if lse_strides is not None:
        of_rows = lse_strides[-2], lse_strides[-1]
        if pads_lse:
            num_heads = launcher.spec.num_qo_heads
            padding = pad_lse.prepare(lse_shape, lse_strides, launcher.device_index)
            of_rows, lse_rows = (num_heads, 1), num_bytes
            num_bytes += 4 * num_rows * num_heads
        *tokens_and_heads, _, _, k_page, v_page = params.STRIDES.unpack(strides)
        strides = params.STRIDES.pack(*tokens_and_heads, *of_rows, k_page, v_page)
    return Prepared(
        launcher,
        plan,
        padding,
        lse_rows,
        first.mask,
        num_bytes,
        strides,
        num_rows,
        num_keys,
        first.sm_scale,
        first.output_scale,
        first.has_scales,
        first.scales_by_head,
        lse_shape,
    )


def is_bool_mask(call: Call) -> bool:
    return call.mask is not None and call.mask.dtype is dtypes.bool_
