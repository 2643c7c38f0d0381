"""What a call without a plan launches, made once for all calls of a signature and lengths."""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Protocol, TypeVar

from .. import array
from ..array import ArrayView
from ..array.match import are_rows_aligned
from ..core import dtypes
from ..launch.attention import find_items, pad_lse, plan_batch
from ..launch.attention.batch import BatchLauncher
from ..launch.attention.bound_run import BoundRun
from ..launch.attention.layout import ANY_BATCH_BYTES, BatchSchedule, round_up
from ..launch.attention.pad_lse import Padding
from ..launch.attention.plan_batch import DevicePlan, Lengths
from ..launch.driver import params, scratch
from . import output_gate, row_mask
from .arrays import ROLES, Arrays
from .check_planless import Call, Extents
from .geometry import Variant
from .index_arrays import progression
from .kv_cache import pack_strides
from .latent_rows import Lists, Second, second_parts
from .row_mask import NO_BITS, MaskBits

SCALE_PLACES = tuple(map(Arrays._fields.index, ("scale_q", "scale_k", "scale_v")))
_MAX_BOUND = 256
_MAX_REQUESTS = 2**31 - 1


class Before(Protocol):
    """What is launched ahead of a call: it writes new keys, and what attention reads of them."""

    @property
    def num_bytes(self) -> int:
        """How many bytes of the workspace it writes."""
        ...

    def of_lengths(self, lengths: Sequence[int], extents: Extents) -> Before | None:
        """The same of a call of other lengths, in the order of ROLES; None if they do not fit."""
        ...

    def launch(self, addresses: list[int], space: int, stream: int) -> None:
        """Enqueue it, and put the addresses of what it writes at `space` among those."""
        ...


@dataclass(slots=True, eq=False, kw_only=True)
class Launches:
    """What calls with equal signature and lengths launch; nobody changes it once it is made.

    num_bytes  of the workspace
    lse_shape  of an LSE that the call makes
    shared     (place, address, owner) of arrays that all such calls read where their callers give
               none
    before     what is launched ahead, whose space is the last of the workspace; or None
    """

    device_index: int
    num_bytes: int
    lse_shape: tuple[int, ...]
    shared: tuple[tuple[int, int, object], ...] = ()
    before: Before | None = None

    def launch(
        self, addresses: Sequence[int], stream: int, allocate: scratch.Allocate, words: int = 0
    ) -> None:
        """Enqueue them, on arrays at these addresses, 0 for none, in the order of ROLES, v's at its
        first page. allocate: memory for zeros; words: see Prepared.launch."""
        raise NotImplementedError


@dataclass(slots=True, eq=False)
class Prepared(Launches):
    """The launches of calls that plan on the device, or whose blocks find their items.

    plan       None for lists of one length, which need none
    partials   where partial states begin, in bytes into the workspace
    padding    turns rows of LSE, `lse_rows` bytes into the workspace, into the caller's; or None
    num_keys   rows that k and v hold, or pages
    num_rows   rows that q holds; 0 where heads are latent
    lse_scale, lse_form  see BatchLauncher.bind
    mask       how bits lie in the caller's memory; if it has bools, `mask.address` bytes into the
               workspace, where they are packed first
    scale_indices  of the arrays that scale q, k and v; 0 for none
    steps      params.STEPS of slopes and scales
    slopes     extents of slopes that an expression reads; empty for others
    gate_strides  empty without gates of the output
    second     how launches are told of the second parts of latent rows
    staged     where queries are widened, in bytes into the workspace, and how many that takes; 0 of
               them: they are not
    stages_apart  the workspace has no room for them: each call takes memory
    may_find   blocks may find their items, because nothing else needs a planner
    bound      what a workspace, a page table and words at these addresses make of the launches
    """

    launcher: BatchLauncher
    plan: DevicePlan | None
    schedule: BatchSchedule
    partials: int
    padding: Padding | None
    lse_rows: int
    strides: bytes
    num_keys: int
    sm_scale: float
    output_scale: float
    has_scales: bool
    num_rows: int = 0
    lse_scale: float = 1.0
    lse_form: int = 0
    mask: MaskBits = NO_BITS
    scale_indices: tuple[int, ...] = SCALE_PLACES
    scales_by_head: tuple[bool, ...] = (False, False, False)
    steps: bytes = params.NO_STEPS
    slopes: tuple[int, ...] = ()
    gate_strides: tuple[int, ...] = ()
    second: Second | None = None
    staged: int = 0
    staged_bytes: int = 0
    stages_apart: bool = False
    may_find: bool = False
    bound: dict[tuple[int, int, int, int], tuple[bytes, BoundRun]] = field(default_factory=dict)

    @property
    def has_planner(self) -> bool:
        """Whether a launch plans the work of the others."""
        return self.plan is not None and self.plan.planner is not None

    def launch(
        self,
        addresses: Sequence[int],
        stream: int,
        allocate: scratch.Allocate,
        words: int = 0,
        is_planned: bool = False,
    ) -> None:
        """Enqueue the planner and all behind it, on arrays at these addresses, 0 for none.

        addresses: in the order of ROLES, v's at its first page. allocate: memory for zeros.
        words: memory of `partials` bytes where the planner writes, if not in the workspace;
        is_planned: it has been there.
        """
        # fmt: off
        (
            q, k, v, workspace, block_tables, kv_lens, out, lse, qo_offsets, kv_offsets, sinks,
            _, _, _, slopes, mask, kv_begin, qo_lens, q_rope, k_rope, max_logits, gate,
            _, _, _, _, _, _, _, _, _, _, _, _,
        ) = addresses
        # fmt: on
        plan, device = self.plan, self.device_index
        words, _zeros = words or workspace, None
        if plan is not None and plan.num_counters:
            words, _zeros = scratch.counters(plan.num_counters, device, stream, allocate)
        staged, _queries = workspace + self.staged, None
        if self.staged_bytes and self.stages_apart:
            staged, _queries = allocate(self.staged_bytes)
        bound = self.bound.get((workspace, block_tables, words, staged))
        planned, attention = bound or self._bind(workspace, block_tables, words, staged)
        if not kv_lens:
            kv_lens = kv_offsets  # lengths are the steps of offsets
        of_q = of_k = of_v = 0
        optional = params.NO_OPTIONAL
        rows = lse if self.padding is None else workspace + self.lse_rows
        read = params.NO_LOGITS_ARRAYS
        if self.slopes:
            read, slopes = params.pack_logits_arrays([(slopes, self.slopes)]), 0
        if gate:
            read = params.with_output_gate(read, gate, self.gate_strides)
        if self.has_scales and plan is not None:
            scales = [index and addresses[index] for index in self.scale_indices]
            # The planner writes a scale that is one number to the workspace, once for each head.
            by_head = self.scales_by_head
            of_q, of_k, of_v = (0 if x else at for at, x in zip(scales, by_head, strict=True))
            used = (
                at if x or not at else words + offset
                for at, x, offset in zip(scales, by_head, plan.scales, strict=True)
            )
            optional = params.OPTIONAL.pack(rows, mask, sinks, *used, slopes, self.steps, read)
        elif rows or sinks or mask or slopes or read:
            optional = params.OPTIONAL.pack(rows, mask, sinks, 0, 0, 0, slopes, self.steps, read)
        lengths = params.NO_LENGTHS
        if plan is not None and plan.planner is None:
            lengths = find_items.pack_lengths(plan, qo_lens, kv_lens, qo_offsets, kv_offsets)
        elif plan is not None and not is_planned:
            indices = qo_lens, kv_lens, qo_offsets, kv_offsets, of_q, of_k, of_v, kv_begin
            plan_batch.launch(plan, planned, indices, device, stream)
        if self.second is None:
            attention.launch(q, k, v, out, optional, stream, b"", lengths)
        else:
            list_lens = kv_lens if plan is None else 0
            second = self.second.pack(q, q_rope, k, k_rope, max_logits, list_lens)
            attention.launch(q, k, k, out, optional, stream, second)
        if self.padding is not None:
            offsets = qo_lens, kv_lens, qo_offsets, kv_offsets, kv_begin
            pad_lse.launch(self.padding, planned, offsets, rows, lse, device, stream)

    def _bind(
        self, workspace: int, block_tables: int, words: int, staged: int
    ) -> tuple[bytes, BoundRun]:
        attention = self.launcher.bind(
            self.schedule,
            words,
            workspace + self.partials,
            self.strides,
            self.num_keys,
            block_tables,
            self.mask.num_bytes,
            self.mask.row_bytes,
            self.output_scale,
            self.sm_scale,
            staged,
            num_rows=self.num_rows,
            lse_scale=self.lse_scale,
            lse_form=self.lse_form,
        )
        if len(self.bound) >= _MAX_BOUND:
            self.bound.clear()
        planned = b""
        if self.plan is not None and self.plan.planner is not None:
            planned = plan_batch.bind(self.plan, words)
        bound = self.bound[workspace, block_tables, words, staged] = planned, attention
        return bound


@dataclass(slots=True, eq=False)
class InParts(Prepared):
    """A call with more requests than a block plans is one launch after the other, in the same
    workspace.

    parts  for each of them bytes to add to the addresses of all arrays, and what it launches
    """

    parts: tuple[tuple[tuple[int, ...], Prepared], ...] = ()

    def launch(
        self,
        addresses: Sequence[int],
        stream: int,
        allocate: scratch.Allocate,
        words: int = 0,
        is_planned: bool = False,
    ) -> None:
        for shifts, part in self.parts:
            of_part = [x and x + shift for x, shift in zip(addresses, shifts, strict=True)]
            part.launch(of_part, stream, allocate)


_FACTS = tuple(f.name for f in fields(Prepared) if f.name != "bound")
_Prepared = TypeVar("_Prepared", bound=Prepared)


def _like(first: Prepared, kind: type[_Prepared]) -> _Prepared:
    """A copy that is bound to nothing yet; dataclasses.replace takes five times as long."""
    copy = kind.__new__(kind)
    for name in _FACTS:
        setattr(copy, name, getattr(first, name))
    copy.bound = {}
    return copy


def served_by(first: Prepared, launcher: BatchLauncher) -> Prepared:
    """The same of another launcher of its problem."""
    if launcher is first.launcher:
        return first
    result = _like(first, Prepared)
    result.launcher = launcher
    return result


def prepare(call: Call, have: int | None = None) -> Prepared:
    """What a call launches. have: bytes of its workspace, which a plan of fewer parts may need."""
    prepared = _prepare(call, ANY_BATCH_BYTES)
    if have is None or prepared.num_bytes <= have:
        return prepared
    is_apart = prepared.staged_bytes > 0
    if is_apart:
        prepared = _prepare(call, ANY_BATCH_BYTES, is_apart)
        if prepared.num_bytes <= have:
            return prepared
    # Besides the plan a workspace holds what is packed or padded.
    besides = prepared.num_bytes - _plan_bytes(prepared)
    fewer = _prepare(call, max(0, have - besides), is_apart)
    return fewer if fewer.num_bytes <= have else prepared


def _plan_bytes(prepared: Prepared) -> int:
    plan = prepared.plan
    return prepared.schedule.workspace_bytes if plan is None else plan.num_bytes


def _finds_scales(call: Call, launcher: BatchLauncher) -> bool:
    """Whether blocks that find their items know whose scales are theirs, as products of 8 bits do.
    None but the planner repeats a scale for each head."""
    views = zip(call.scales.views, call.scales.by_head, strict=True)
    return launcher.problem.is_8bit and all(v is None or is_by_head for v, is_by_head in views)


def _prepare(call: Call, max_bytes: int, stages_apart: bool = False) -> Prepared:
    """The launches of a plan that takes up to max_bytes, if there is one; stages_apart: of which
    queries that are widened take none."""
    vq, keys, vout, gate, scales = call.q, call.keys, call.out, call.output_gate, call.scales
    assert vout is not None
    is_scaled = not (scales.views[0] is scales.views[1] is None)
    # --- 1. Plan the requests, or as many as are planned at once ---
    launcher = call.geometry.launcher(_variant(call, is_scaled))
    count = call.lengths.num_requests
    size, num_rows = _requests_of_a_part(call, launcher), vq.shape[0]
    plan, schedule = None, _schedule_lists(call, launcher, max_bytes)
    shape, lse_strides, pads_lse = _lse_form(call)
    has_scales = is_scaled or scales.views[2] is not None
    # The planner repeats scales, and tells what pads an LSE where rows are.
    needs_plan = has_scales and not _finds_scales(call, launcher)
    may_find = not (needs_plan or (pads_lse and lse_strides is not None) or call.queries)
    if schedule is None:
        _give_lens(call)
        lengths = call.lengths._replace(list_gap=call.gaps[2])
        if size < count:
            lengths, shape, num_rows = _part(call, size)
        launcher = find_items.serving(launcher, lengths)
        plan = plan_of(launcher, lengths, max_bytes, may_find)
        schedule = plan.schedule
    # --- 2. What launches read besides ---
    prepared = Prepared(
        launcher,
        plan,
        schedule,
        partials=0,
        padding=None,
        lse_rows=0,
        device_index=launcher.device_index,
        num_bytes=0,
        strides=pack_strides(vq, keys.strides, vout, (0, 0)),
        num_keys=keys.size,
        sm_scale=scales.logits,
        output_scale=scales.output,
        has_scales=has_scales,
        lse_shape=shape,
        lse_scale=math.log(2.0) if call.options.natural_lse and not pads_lse else 1.0,
        lse_form=call.options.lse_form,
        mask=_mask_bits(call, num_rows),
        scale_indices=tuple((name and Arrays._fields.index(name)) or 0 for name in scales.names),
        scales_by_head=scales.by_head,
        steps=params.STEPS.pack(_slope_step(call), *scales.steps),
        slopes=_slope_extents(call),
        gate_strides=() if gate is None else gate.strides,
        second=_second(call, has_plan=plan is not None),
        stages_apart=stages_apart,
        may_find=may_find,
    )
    # --- 3. For so many rows, or part by part ---
    prepared = of_lengths(prepared, plan, num_rows, keys.size, shape, lse_strides, pads_lse)
    if plan is not None and size < count:
        prepared = _in_parts(call, prepared, size, max_bytes)
    if call.queries is not None:
        prepared = replace(prepared, num_rows=0, lse_shape=call.lse_shape)
    if not is_bool_mask(call):
        return prepared
    # Bits of all rows lie behind what launches share.
    mask = _mask_bits(call, vq.shape[0])._replace(address=prepared.num_bytes)
    return replace(prepared, mask=mask, num_bytes=prepared.num_bytes + mask.num_bytes)


def _variant(call: Call, is_scaled: bool) -> Variant:
    # Kernels whose rows have scales know requests' scales of values too.
    return Variant(
        is_aligned(call),
        is_scaled or call.scales.logits <= 0.0 or any(call.scales.steps),
        call.mask is not None,
        call.options.key_scales,
        output_gate.kind_of(call.output_gate),
    )


def is_aligned(call: Call) -> bool:
    """Whether all rows start on 16-byte boundaries."""
    vq, keys, queries, pages = call.q, call.keys, call.queries, call.pages
    rows = [x for x in (vq, call.out, queries and queries.rope, pages and pages.rope) if x]
    strides = [(x.strides[:2], x.dtype) for x in rows]
    strides += [(keys.strides, keys.k.dtype), (call.gaps[:2], vq.dtype)]
    pointers = functools.reduce(operator.or_, (x.ptr for x in (*rows, keys.k, keys.v)))
    return are_rows_aligned(pointers, strides) and output_gate.is_aligned(call.output_gate)


def _schedule_lists(call: Call, launcher: BatchLauncher, max_bytes: int) -> BatchSchedule | None:
    """The launches of lists that are all as long as the table, but for what tokens do not see yet;
    None for other calls."""
    knows_length = call.indices.kv_lens is None or call.options.counts_later
    if not call.options.is_list or not knows_length or any(call.scales.views):
        return None
    assert call.block_tables is not None
    count, entries = call.block_tables.shape
    return launcher.schedule_lists(count, entries, max_bytes)


def _give_lens(call: Call) -> None:
    """Lengths of lists that are as long as their table, for what plans on the device."""
    if call.indices.kv_lens is None and call.block_tables is not None:
        count, entries = call.block_tables.shape
        lens = array.view(progression(count, entries, 0, call.q), call.names.kv_lens)
        call.indices = call.indices._replace(kv_lens=lens)


def _second(call: Call, has_plan: bool) -> Second | None:
    """How launches are told of the second parts of latent rows, and of lists."""
    queries, pages, kv_lens, lens_stride = call.queries, call.pages, call.indices.kv_lens, 0
    if queries is None or pages is None:
        return None
    if not has_plan and kv_lens is not None:
        lens_stride = kv_lens.strides[0] * kv_lens.dtype.itemsize // 4
    lists = Lists(call.lengths.kv_step, call.gaps, call.options.request_tokens, lens_stride)
    return second_parts(queries, pages, call.options.rope_scale, lists)


def _lse_form(call: Call) -> tuple[tuple[int, ...], tuple[int, ...] | None, bool]:
    """(shape, strides, whether a launch of its own pads it) of an LSE as kernels write it; no
    strides where there is none."""
    vlse = call.lse
    if vlse is None:
        return call.lse_shape, None, call.pads_lse
    shape = call.lse_shape if call.queries is None else vlse.shape
    return shape, vlse.strides, call.pads_lse


def _mask_bits(call: Call, num_rows: int) -> MaskBits:
    """How bits of so many rows of q lie, from the first on."""
    if call.mask is None:
        return NO_BITS
    row_bytes = row_mask.num_packed_bytes(1, call.mask_bits)
    if not is_bool_mask(call):
        row_bytes = row_mask.bits_of(call.mask, call.q.shape[0]).row_bytes
    return MaskBits(0, row_bytes, num_rows * row_bytes)


def _requests_of_a_part(call: Call, launcher: BatchLauncher) -> int:
    """How many requests are planned at once: all where they are few, or cannot be taken apart."""
    count, form = call.lengths.num_requests, call.form
    if not form.has_qo_offsets and call.lengths.qo_len <= 0:
        return count
    if call.options.request_tokens > 1 or any(call.gaps):
        return count
    if call.queries is not None and form.has_kv_offsets:
        return count
    num_parts = -(-count // plan_batch.max_requests(launcher.device_index))
    sharers = call.lengths.sharers
    size = -(-count // num_parts) if count else 0
    return size if size == count else max(size // sharers, 1) * sharers


def _part(call: Call, count: int) -> tuple[Lengths, tuple[int, ...], int]:
    """The lengths of so many of the requests, the shape of their LSE, and the rows of q that they
    are among."""
    num_rows = call.q.shape[0]
    if not call.form.has_qo_offsets:
        num_rows = count * call.lengths.qo_len
    lengths = call.lengths._replace(num_requests=count, num_rows=num_rows)
    shape, _, pads_lse = _lse_form(call)
    return lengths, (count if pads_lse else num_rows, *shape[1:]), num_rows


def _in_parts(
    call: Call,
    first: Prepared,
    size: int,
    max_bytes: int,
) -> Prepared:
    """What a call launches whose first `size` requests launch `first`."""
    count, steps = call.lengths.num_requests, _steps(call)
    _, lse_strides, pads_lse = _lse_form(call)
    if call.queries is not None:
        first.num_rows = 0
    parts = []
    for begin in range(0, count, size):
        lengths, lse_shape, num_rows = _part(call, min(size, count - begin))
        part = first
        if lengths.num_requests < size:
            launcher = find_items.serving(first.launcher, lengths)
            plan = plan_of(launcher, lengths, max_bytes, first.may_find)
            part = replace(served_by(first, launcher), mask=_mask_bits(call, num_rows))
            part = of_lengths(
                part, plan, num_rows, first.num_keys, lse_shape, lse_strides, pads_lse
            )
            if call.queries is not None:
                part.num_rows = 0
        parts.append((tuple(begin // sharers * step for step, sharers in steps), part))
    num_bytes = max(part.num_bytes for _, part in parts)
    whole = _like(first, InParts)
    whole.parts, whole.num_bytes, whole.lse_shape = tuple(parts), num_bytes, call.lse_shape
    whole.num_rows = call.q.shape[0]
    return whole


def _steps(call: Call) -> tuple[tuple[int, int], ...]:
    """(bytes, requests that they are for) of each of ROLES; 0 bytes for what all share."""
    lengths, queries = call.lengths, call.queries
    tokens, (_, _, pads_lse) = 0 if call.form.has_qo_offsets else lengths.qo_len, _lse_form(call)

    def step(v: ArrayView | None, count: int = 1) -> int:
        return 0 if v is None else count * v.strides[0] * v.dtype.itemsize

    table = call.block_tables if not call.form.has_table_offsets else None
    at = {
        "q": step(call.q, tokens),
        "q_rope": step(None if queries is None else queries.rope, tokens),
        "block_tables": step(table),
        "out": step(call.out, tokens),
        "lse": step(call.lse, 1 if pads_lse else tokens),
        "max_logits": step(call.max_logits, tokens),
        "mask": _mask_bits(call, tokens).num_bytes,
        "output_gate": step(call.output_gate, tokens),
    }
    for name in ("kv_lens", "qo_lens", "qo_offsets", "kv_offsets", "kv_begin"):
        at[name] = step(getattr(call.indices, name))
    owned = {"alibi_slopes": 4 * _slope_step(call)}
    owned |= zip(("scale_q", "scale_k", "scale_v"), (4 * x for x in call.scales.steps), strict=True)
    steps = {name: (x, 1) for name, x in at.items()}
    steps |= {name: (x, lengths.sharers) for name, x in owned.items()}
    return tuple(steps.get(name, (0, 1)) for name in ROLES)


@functools.lru_cache(maxsize=1024)
def plan_of(
    launcher: BatchLauncher,
    lengths: Lengths,
    max_bytes: int = ANY_BATCH_BYTES,
    may_find: bool = True,
) -> DevicePlan:
    """may_find: blocks may find their items, as nothing else needs a planner. A planner splits less
    where the workspace is smaller."""
    unplanned = find_items.prepare(launcher, lengths) if may_find else None
    if unplanned is not None and unplanned.num_bytes <= max_bytes:
        return unplanned
    return plan_batch.prepare(launcher, lengths, max_bytes)


def of_lengths(
    first: Prepared,
    plan: DevicePlan | None,
    num_rows: int,
    num_keys: int,
    lse_shape: tuple[int, ...],
    lse_strides: Sequence[int] | None,
    pads_lse: bool,
) -> Prepared:
    """What calls like `first` launch over so many rows and keys, with an LSE of these strides, or
    without one if None."""
    launcher, strides, schedule, partials = first.launcher, first.strides, first.schedule, 0
    padding, lse_rows, num_bytes = None, 0, schedule.workspace_bytes
    if plan is not None:
        schedule, partials, num_bytes = plan.schedule, plan.partials, plan.num_bytes
    if lse_strides is not None:
        of_rows = lse_strides[-2], lse_strides[-1]
        if pads_lse:
            num_heads = launcher.spec.num_qo_heads
            padding = pad_lse.prepare(lse_shape, lse_strides, launcher.device_index)
            of_rows, lse_rows = (num_heads, 1), num_bytes
            num_bytes += 4 * num_rows * num_heads
        *tokens_and_heads, _, _, k_page, v_page = params.STRIDES.unpack(strides)
        strides = params.STRIDES.pack(*tokens_and_heads, *of_rows, k_page, v_page)
    staged, staged_bytes = 0, launcher.staged_bytes(schedule, num_rows, num_keys)
    if staged_bytes and not first.stages_apart:
        staged = num_bytes = round_up(num_bytes, 16)
        num_bytes += staged_bytes
    prepared = _like(first, Prepared)
    prepared.staged, prepared.staged_bytes = staged, staged_bytes
    prepared.plan, prepared.schedule, prepared.partials = plan, schedule, partials
    prepared.padding, prepared.lse_rows, prepared.lse_shape = padding, lse_rows, lse_shape
    prepared.strides, prepared.num_bytes = strides, num_bytes
    prepared.num_keys, prepared.num_rows = num_keys, num_rows
    return prepared


def _slope_step(call: Call) -> int:
    return 0 if call.alibi_slopes is None else call.alibi_slopes.strides[0]


def _slope_extents(call: Call) -> tuple[int, ...]:
    """Of slopes as an expression reads them: the plan counts requests, so any number will do."""
    if call.alibi_slopes is None or call.geometry.spec.logits is None:
        return ()
    num_heads = call.alibi_slopes.shape[1]
    return (_MAX_REQUESTS, num_heads) if _slope_step(call) else (num_heads,)


def is_bool_mask(call: Call) -> bool:
    return call.mask is not None and call.mask.dtype is dtypes.bool_
