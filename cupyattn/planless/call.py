"""Attention calls without a plan: lengths, offsets and page tables stay in device memory.

A call is checked by what the host can see: shapes, dtypes, strides. A block on the device then
reads the lengths and writes the work list (launch/attention/plan_batch.py) before the kernels,
which are those of the wrappers. The host copies nothing and waits for nothing, so that a graph can
capture a call.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np

from .. import array
from ..array import ArrayView
from ..array.match import are_rows_aligned, require_output
from ..core import dtypes
from ..errors import CupyAttnError, WorkspaceError
from ..inputs import row_mask
from ..inputs.call_cache import Argument, CallCache, Found
from ..inputs.geometry import Variant
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
from .check import Arrays, Call, Extents, LengthForm, Options, check
from .views import Names, merge_leading

_MAX_BOUND = 256
_MAX_LENGTHS = 256


@dataclass(frozen=True, slots=True)
class Prepared:
    """What launches of calls with equal signature and lengths share.

    padding    turns rows of LSE, `lse_rows` bytes into the workspace, into the caller's; or None
    mask       how bits lie in the caller's memory; if it has bools, `mask.address` bytes into the
               workspace, where they are packed first
    num_bytes  of the workspace
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
            _, _, sinks, scale_q, scale_k, scale_v, mask, *_,
        ) = addresses
        # fmt: on
        bound = self.bound.get((workspace, block_tables)) or self._bind(workspace, block_tables)
        planned, attention = bound
        if not kv_lens:
            kv_lens = kv_offsets  # whose steps they are
        plan, device = self.plan, attention.device_index
        scales: tuple[int, ...] = (0, 0, 0)
        optional = params.NO_OPTIONAL
        indices = qo_lens, kv_lens, qo_offsets, kv_offsets
        rows = lse if self.padding is None else workspace + self.lse_rows
        if self.has_scales:
            given = scale_q, scale_k, scale_v
            # The planner repeats what is one number for all heads, in the workspace.
            by_head = self.scales_by_head
            scales = tuple(0 if x else at for at, x in zip(given, by_head, strict=True))
            used = (
                at if x or not at else workspace + place
                for at, x, place in zip(given, by_head, plan.scales, strict=True)
            )
            optional = params.OPTIONAL.pack(rows, mask, sinks, *used)
        elif rows or sinks or mask:
            optional = params.OPTIONAL.pack(rows, mask, sinks, 0, 0, 0)
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
        )
        if len(self.bound) >= _MAX_BOUND:
            self.bound.clear()
        found = self.bound[workspace, block_tables] = (
            plan_batch.bind(plan, workspace),
            attention,
        )
        return found


class Counts(NamedTuple):
    """How many of what there are: `place` of Arrays has `extra` more than there are requests."""

    place: int
    extra: int


@dataclass(frozen=True, slots=True)
class Checked:
    """What calls of one signature share.

    v_offset      bytes from v, or from the tensor that holds k too, to the first value
    scale_places  of the arrays in whose place of scale_q, scale_k and scale_v they have effect
    first         what the call that passed the checks launched
    requests      where the number of requests is to be seen
    per_request   arrays that have one entry for each request, or one more
    fixed         arrays of the first extent that they had in the first call
    tokens        rows of q for each entry of its first axis
    is_derivable  whether calls of other lengths need nothing but what `form` says
    by_lengths    what calls of other lengths launched, see _key_of
    allocate      makes a workspace where the call gives none
    """

    form: LengthForm
    first: Prepared
    v_offset: int
    scale_places: tuple[int | None, ...]
    requests: Counts
    per_request: list[Counts]
    fixed: list[tuple[int, int]]
    tokens: int
    is_derivable: bool
    row_shape: tuple[int, ...]
    pads_lse: bool
    return_lse: bool
    allocate: scratch.Allocate
    by_lengths: dict[tuple[Any, ...], Prepared] = field(default_factory=dict)


# Places of Arrays that belong to requests.
_PER_REQUEST = (
    *("kv_lens", "qo_lens", "qo_offsets", "kv_offsets", "o_offsets", "v_offsets", "kv_begin"),
)
_LENGTH_AXES = {"q": 0, "k": 0, "v": 0, "out": 0} | dict.fromkeys(_PER_REQUEST, 0)
_LENGTH_AXES |= {"scale_q": 0, "scale_k": 0, "scale_v": 0, "alibi_slopes": 0}
_CALLS: CallCache[Checked] = CallCache(
    *(
        Argument(
            name,
            _LENGTH_AXES.get(name),
            is_output=name in ("workspace", "out", "lse"),
            is_free=name in ("block_tables", "lse"),
        )
        for name in Arrays._fields
    )
)
_Q, _K, _V, _WORKSPACE, _TABLE, _OUT, _LSE, _SCALE_Q = map(
    Arrays._fields.index,
    ("q", "k", "v", "workspace", "block_tables", "out", "lse", "scale_q"),
)


def run(
    given: tuple[Any, ...],
    options_of: Callable[..., Options],
    scalars: tuple[Any, ...],
    append: Callable[[], None] | None = None,
) -> Any:
    """The answer of a call: out, or (out, lse) if `return_lse`.

    given: the fields of Arrays, which may end after the LSE; options_of makes Options of Arrays and
    `scalars`, all other arguments. append: what writes new keys and values to k and v, once
    everything is checked.
    """
    signature = options_of, *scalars
    answer = _run_cached(given, signature, append)
    if answer is not None:
        return answer

    # --- 1. Validate ---
    arrays = Arrays(*given)
    options = options_of(arrays, *scalars)
    call = check(arrays, options)
    vq = call.q
    vworkspace = _view_workspace(arrays.workspace, call, options.names)

    # --- 2. Answer on the CPU ---
    if vq.device.kind == "cpu":
        if vworkspace is not None and vq.shape[0]:
            _require_size(vworkspace, _prepare(_with_outputs(call)).num_bytes)
        return reference.answer(call, arrays, options.names, append)

    # --- 3. Launch on the caller's stream ---
    if append is not None:
        append()
    out, lse = arrays.out, arrays.lse
    if out is None:
        out = array.empty(call.out_shape, call.geometry.spec.dtype_o, vq)
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
            _insert(given, signature, call, prepared)
    out = array.deliver(out, vq)
    return (out, array.deliver(lse, vq)) if call.return_lse else out


def run_cached(
    given: tuple[Any, ...], options_of: Callable[..., Options], scalars: tuple[Any, ...]
) -> Any:
    """The answer of `run` if the call is in the cache, else None."""
    return _run_cached(given, (options_of, *scalars), None)


def _run_cached(
    given: tuple[Any, ...], scalars: tuple[Any, ...], append: Callable[[], None] | None
) -> Any:
    """The answer of a call that is in the cache, else None."""
    answer = _CALLS.lookup(given, scalars)
    if answer is None:
        return None
    found, addresses = answer
    call = found.call
    if call.overlaps(addresses, found.sizes):
        return None
    checked = call.checked
    prepared = found.prepared
    if prepared is None:
        prepared = found.prepared = _prepared_for(found)
        if prepared is None:
            return None
    out, lse = given[_OUT], given[_LSE]
    if out is None:
        out = call.make_out((found.lengths[_Q], *checked.row_shape))
        addresses[_OUT] = call.address(out)
    if lse is None and checked.return_lse:
        lse = call.make_lse(prepared.lse_shape)
        addresses[_LSE] = call.address(lse)
    addresses[_V] = (addresses[_V] or addresses[_K]) + checked.v_offset
    if prepared.has_scales:
        places = checked.scale_places
        scales = [0 if place is None else addresses[place] for place in places]
        addresses[_SCALE_Q : _SCALE_Q + len(scales)] = scales
    owner: object = None
    if not addresses[_WORKSPACE]:
        addresses[_WORKSPACE], owner = checked.allocate(prepared.num_bytes)
    if append is not None:
        append()
    prepared.launch(addresses, call.current_stream())
    del owner  # memory for one call may go once everything is enqueued
    return (out, lse) if checked.return_lse else out


def _key_of(found: Found[Checked]) -> tuple[Any, ...]:
    """Lengths, and shapes and strides of the page table and the LSE."""
    free = [
        None
        if place >= len(found.shapes) or found.shapes[place] is None
        else (tuple(found.shapes[place]), found.strides(place))
        for place in (_TABLE, _LSE)
    ]
    return (*found.lengths, *free)


def _prepared_for(found: Found[Checked]) -> Prepared | None:
    """What calls of these lengths launch; None if they need the full checks."""
    checked = found.call.checked
    key = *_, table, lse = _key_of(found)
    prepared = checked.by_lengths.get(key)
    if prepared is not None or not checked.is_derivable:
        return prepared
    extents = _extents_of(checked, found.lengths, table)
    if extents is None:
        return None
    first = checked.first
    count = extents.num_requests if checked.pads_lse else found.lengths[_Q]
    lse_shape, lse_strides = (count, *first.lse_shape[1:]), None
    if lse is not None:
        shape, lse_strides = lse
        if shape != lse_shape or not _is_apart(shape, lse_strides):
            return None
    elif checked.return_lse:
        lse_strides = tuple(math.prod(lse_shape[axis + 1 :]) for axis in range(len(lse_shape)))
    try:
        plan = _plan(first.launcher, checked.form.lengths(extents))
    except CupyAttnError:  # which the full checks raise
        return None
    prepared = _of_lengths(
        first, plan, extents.num_rows, extents.num_keys, lse_shape, lse_strides, checked.pads_lse
    )
    if 0 < found.sizes[_WORKSPACE] < prepared.num_bytes:
        return None
    if len(checked.by_lengths) >= _MAX_LENGTHS:
        checked.by_lengths.clear()
    checked.by_lengths[key] = prepared
    return prepared


def _of_lengths(
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
        num_keys,
        first.sm_scale,
        first.output_scale,
        first.has_scales,
        first.scales_by_head,
        lse_shape,
    )


def _extents_of(
    checked: Checked, lengths: Sequence[int], table: tuple[Any, Any] | None
) -> Extents | None:
    """The extents of a call whose arrays fit each other, else None."""
    place, extra = checked.requests
    count, num_rows = lengths[place] - extra, lengths[_Q]
    num_keys = lengths[_K]
    if count <= 0 or num_rows <= 0 or num_keys <= 0:
        return None
    if any(lengths[place] != count + extra for place, extra in checked.per_request):
        return None
    if any(lengths[place] != length for place, length in checked.fixed):
        return None
    if lengths[_V] not in (0, num_keys) or lengths[_OUT] not in (0, num_rows):
        return None
    num_rows *= checked.tokens
    if table is None:
        return Extents(count, num_rows, num_keys, None)
    (rows, width), (step, entry) = table
    if width <= 0 or entry != 1 or step < 0 or step * rows > 2**31 - 1:
        return None
    return Extents(count, num_rows, num_keys, (rows, width, step))


def _is_apart(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Whether no two elements share memory, as far as that is plain to see."""
    reach = 1
    for stride, extent in sorted(zip(strides, shape, strict=True)):
        if extent > 1:
            if stride < reach:
                return False
            reach = stride * extent
    return 0 not in shape


def _insert(
    given: tuple[Any, ...], scalars: tuple[Any, ...], call: Call, prepared: Prepared
) -> None:
    """Cache a call that was launched; what was made for one call has no address to keep."""
    arrays = Arrays(*given)
    table = call.block_tables
    if table is not None and table.ptr != array.view(arrays.block_tables, "block_tables").ptr:
        return
    per_request, fixed = _places_of_requests(call, arrays)
    requests = Counts(_TABLE, 0)
    if table is None or call.form.has_table_offsets:
        name = "kv_offsets" if arrays.kv_lens is None else "kv_lens"
        requests = next(x for x in per_request if x.place == Arrays._fields.index(name))
    checked = Checked(
        call.form,
        prepared,
        call.keys.v.ptr - array.view(arrays.k if arrays.v is None else arrays.v, "v").ptr,
        tuple(None if name is None else Arrays._fields.index(name) for name in call.scales.names),
        requests,
        per_request,
        fixed,
        math.prod(arrays.q.shape[1:-2]),
        _is_derivable(call, arrays),
        call.out_shape[1:],
        call.pads_lse,
        call.return_lse,
        scratch.allocator(call.q),
    )
    known = _CALLS.lookup(given, scalars)
    if known is not None:
        checked.by_lengths.update(known[0].call.checked.by_lengths)
    dtype_o = call.geometry.spec.dtype_o
    found = _CALLS.insert(given, scalars, checked, call.q, dtype_o, call.out_shape, call.lse_shape)
    if found is not None:
        found.prepared = checked.by_lengths[_key_of(found)] = prepared


def _places_of_requests(call: Call, arrays: Arrays) -> tuple[list[Counts], list[tuple[int, int]]]:
    """Places whose first extents follow from the number of requests, and such that do not."""
    count = call.extents.num_requests
    per_request: list[Counts] = []
    fixed: list[tuple[int, int]] = []
    for place, (name, x) in enumerate(zip(Arrays._fields, arrays, strict=True)):
        if x is None or name not in _LENGTH_AXES or name in ("q", "k", "v", "out"):
            continue
        v = array.view(x, name)
        if name in _PER_REQUEST:
            per_request.append(Counts(place, math.prod(v.shape) - count))
        elif len(v.shape) == 2 and v.shape[0] == count and (count > 1 or not v.strides[0]):
            per_request.append(Counts(place, 0))
        elif v.shape:
            fixed.append((place, v.shape[0]))
    return per_request, fixed


def _is_derivable(call: Call, arrays: Arrays) -> bool:
    """Whether arrays of other lengths and equal signature are used as these are."""
    if call.mask is not None or call.value_tables is not call.block_tables:
        return False
    for x, used in ((arrays.q, call.q), (arrays.out, call.out)):
        if x is not None and used is not None:
            v = array.view(x, "q")
            inner = math.prod(v.shape[1:-2])
            if v.strides[0] != used.strides[0] * inner:
                return False
    if arrays.lse is not None and len(arrays.lse.shape) != (3 if call.pads_lse else 2):
        return False
    for name in _PER_REQUEST:
        x, used = getattr(arrays, name), getattr(call.indices, name)
        if x is None:
            continue
        v = array.view(x, name)
        if math.prod(v.shape) != v.shape[0] or v.strides[0] != used.strides[0]:
            return False
    return True


def _view_workspace(x: Any, call: Call, names: Names) -> ArrayView | None:
    """The workspace, checked. A JAX array, which cannot be written, counts as none."""
    if x is None or array.view(x, "workspace_buffer").framework == "jax":
        return None
    v = view_workspace(x, "workspace_buffer")
    inputs = {names.q: call.q, names.k: call.keys.k, names.v: call.keys.v, "mask": call.mask}
    array.same_device(**inputs, workspace_buffer=v)
    others = inputs | {names.block_tables: call.block_tables, names.out: call.out, "lse": call.lse}
    require_output(v, "workspace_buffer", **others)
    return v


def _require_size(v: ArrayView, need: int) -> None:
    have = math.prod(v.shape) * v.dtype.itemsize
    if have < need:
        raise WorkspaceError(
            f"workspace_buffer: this call needs {need} bytes and it has {have}; pass a larger one"
        )


def _with_outputs(call: Call) -> Call:
    """On the CPU: the call as it would be launched, with memory for outputs that are not given."""
    out, lse = call.out, call.lse
    if out is None:
        shape = (call.q.shape[0], *call.out_shape[-2:])
        out = array.view(np.empty(shape, call.geometry.spec.dtype_o.numpy), "out")
    if lse is None and call.return_lse:
        shape = call.lse_shape if call.pads_lse else call.q.shape[:2]
        lse = array.view(np.empty(shape, np.float32), "lse")
    return replace(call, out=out, lse=lse)


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
        keys.size,
        scales.logits,
        scales.output,
        has_scales=is_scaled or scales.views[2] is not None,
        scales_by_head=scales.by_head,
        lse_shape=call.lse_shape,
    )
    prepared = _of_lengths(
        prepared, plan, vq.shape[0], keys.size, call.lse_shape, lse_strides, call.pads_lse
    )
    if call.mask is None:
        return prepared
    mask, num_bytes = row_mask.bits_of(call.mask, vq.shape[0]), prepared.num_bytes
    if _is_bool_mask(call):
        packed_bytes = row_mask.num_packed_bytes(vq.shape[0], call.mask_bits)
        mask = MaskBits(num_bytes, packed_bytes // vq.shape[0], packed_bytes)
        num_bytes += packed_bytes
    return replace(prepared, mask=mask, num_bytes=num_bytes)


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
        _require_size(vworkspace, prepared.num_bytes)
    inputs = (call.keys.k, call.keys.v, call.block_tables, call.sinks, call.mask, vworkspace)
    used = [v for v in (*inputs, call.lse, *indices, *call.scales.views) if v is not None]
    array.acquire(vq, vout, *used)
    mask = 0 if call.mask is None else call.mask.ptr
    if call.mask is not None and _is_bool_mask(call):
        mask = workspace + prepared.mask.address
        row_mask.pack(call.mask, vq.shape[0], call.mask_bits, mask, stream)
    views = Arrays(
        vq,
        call.keys.k,
        call.keys.v,
        None,
        call.block_tables,
        indices.kv_lens,
        vout,
        call.lse,
        *(indices.qo_lens, indices.qo_offsets, indices.kv_offsets, None, None),
        call.sinks,
        *call.scales.views,
    )
    addresses = Arrays(*(0 if x is None else x.ptr for x in views))
    addresses = addresses._replace(workspace=workspace, mask=mask)
    prepared.launch(addresses, stream)
    array.release(vq, vq, vout, *used)
    del owner  # memory for one call may go once everything is enqueued


def _is_bool_mask(call: Call) -> bool:
    return call.mask is not None and call.mask.dtype is dtypes.bool_
