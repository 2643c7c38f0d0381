"""A run of a batch: check its arrays against the plan, then launch, or answer on the CPU.

A run whose signature an earlier run of the same geometry had is launched from the call cache
(call_cache.py): its lengths are compared with the plan's, and its launches are bound to the
plan once.
"""

from __future__ import annotations

import functools
import operator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from .. import array
from ..array import ArrayView
from ..array.match import (
    are_rows_aligned,
    match_array,
    match_contiguous,
    match_output,
    require_contiguous_last,
)
from ..core import dtypes, parse
from ..core.dtypes import DType
from ..errors import ArgumentError, UnsupportedError
from ..launch.attention.bound_run import BoundRun
from ..launch.driver import params
from . import cpu, logits, output_gate, row_mask
from .batch_logits import check as check_logits
from .batch_reference import requests_of
from .call_cache import Apart, Argument, CachedCall, CallCache, Found
from .geometry import Geometry, Variant
from .kv_cache import Keys, planned, view_paged, view_ragged
from .requests import Batch
from .row_mask import MaskBits
from .workspace import clear_of, refuse_capture, require_apart, same_device
from .wrapper import BatchWrapper, Plan, Prepared


class Scales(NamedTuple):
    """Factors of the logits (q, k) and of the output (v): numbers, or arrays with one a head."""

    q: Any = None
    k: Any = None
    v: Any = None


NO_SCALES = Scales()
_MAX_BOUNDS = 256


@dataclass(frozen=True, slots=True)
class _Checked:
    """What runs of one signature share.

    v_offset   bytes from v, or from the tensor that holds k too, to the first value
    bits       the mask of the run, whose address may change; None: the plan's
    factors    (scale of the logits, scale of the output)
    """

    variant: Variant
    v_offset: int
    strides: bytes
    bits: MaskBits | None
    factors: tuple[float, float]
    row_shape: tuple[int, int]
    gate_strides: tuple[int, ...]  # empty without gates


@dataclass(slots=True)
class _Views:
    """Views of a run's arrays, and what its checks give.

    head_scales  scales with one number a head, by name
    factors      as in _Checked
    """

    q: ArrayView
    keys: Keys
    out: ArrayView | None
    lse: ArrayView | None
    sinks: ArrayView | None
    mask: ArrayView | None
    head_scales: dict[str, ArrayView]
    logits: tuple[ArrayView, ...]
    gate: ArrayView | None
    variant: Variant
    factors: tuple[float, float]


class _Bound(NamedTuple):
    """A plan's launches for arrays of these lengths, and bytes of each array, of the mask too.

    clear  see workspace.clear_of
    """

    found: Found[_Checked]
    workspace: ArrayView
    sizes: list[int]
    run: BoundRun
    clear: tuple[int, ...]
    apart: Apart


def _call_cache(kv_axis: int) -> CallCache[_Checked]:
    return CallCache(
        Argument("q", 0),
        Argument("k", kv_axis),
        Argument("v", kv_axis),
        Argument("out", 0, is_output=True),
        Argument("lse", 0, is_output=True),
        Argument("sinks"),
        Argument("mask", is_planned=True),
        Argument(output_gate.NAME, 0),
    )


# By the axis of a cache along which its size may change.
_CALLS = _call_cache(0), _call_cache(1)
_K, _OUT, _LSE, _MASK = 1, 3, 4, 6


def run(
    wrapper: BatchWrapper,
    q: Any,
    k: Any,
    v: Any,
    out: Any,
    lse: Any,
    sinks: Any,
    scales: Scales,
    return_lse: bool,
    mask: Any = None,
    plan: Plan | None = None,
    logits_params: Any = None,
    gate: Any = None,
) -> Any:
    """The answer of a batch: out, or (out, lse).

    v: None for pages, where k is the whole cache: one tensor, or a pair.
    mask: over the query tokens of requests that have equally many (row_mask.py).
    plan: default the wrapper's; another one is made, and run, while no other thread plans.
    logits_params: arrays in place of those that the plan's expressions read.
    gate: of the output.
    """
    if v is None and isinstance(k, (tuple, list)) and len(k) == 2:
        k, v = k
    arrays: tuple[Any, ...] = q, k, v, out
    if not (lse is sinks is mask is gate is None):
        arrays += lse, sinks, mask, gate
    turns = wrapper._turns
    with turns.running:
        plan = plan or wrapper._current or wrapper._require_plan()
        if turns.is_shared:
            turns.check(plan.owner)
        if logits_params is not None:
            read = logits.replaced(plan.geometry.spec.logits, plan.logits, logits_params)
            return _run_checked(wrapper, plan, arrays, None, scales, return_lse, read)
        # A mask fits a number of rows, which are not part of a signature otherwise.
        rows = None if mask is None else (plan.batch.num_rows, plan.batch.requests.uniform)
        scalars: tuple[Any, ...] = plan.geometry, plan.framework, return_lse, rows
        if scales is not NO_SCALES:
            scalars += scales
        answer = _run_cached(plan, wrapper._workspace, arrays, scalars, lse, mask, return_lse)
        if answer is not None:
            return answer
        return _run_checked(wrapper, plan, arrays, scalars, scales, return_lse, plan.logits)


def _run_checked(
    wrapper: BatchWrapper,
    plan: Plan,
    arrays: tuple[Any, ...],
    scalars: tuple[Any, ...] | None,
    scales: Scales,
    return_lse: bool,
    logits_arrays: tuple[ArrayView, ...],
) -> Any:
    """The answer of a run that is not in the call cache; arrays as in _run_cached.

    scalars: None for a run that is not to be cached. logits_arrays: what expressions read.
    """
    if wrapper._host_plan is not None and plan is wrapper._current and wrapper._follow(arrays[0]):
        before, plan, scalars = plan, wrapper._require_plan(), None
        if logits_arrays is before.logits:
            logits_arrays = plan.logits
    # --- 1. Validate ---
    return_lse = parse.flag(return_lse, "return_lse")
    views = _check_run(wrapper, plan, arrays, scales, logits_arrays)

    # --- 2. Answer on the CPU ---
    vq, spec, num_rows = views.q, plan.geometry.spec, plan.batch.num_rows
    if vq.device.kind == "cpu":
        out, lse = _answer_on_cpu(wrapper, plan, views)
        return (out, lse) if return_lse else out

    # --- 3. Launch on the caller's stream ---
    out, lse = (*arrays, None)[_OUT : _LSE + 1]
    shape_o = (num_rows, spec.num_qo_heads, spec.head_dim_vo)
    made_out = made_lse = None
    if out is None:
        out, made_out = array.empty(shape_o, spec.dtype_o, vq), shape_o
        views.out = array.view(out, "out")
    if lse is None and return_lse:
        lse, made_lse = array.empty(shape_o[:-1], dtypes.float32, vq), shape_o[:-1]
        views.lse = array.view(lse, "lse")
    if num_rows:
        strides = _pack_strides(views)
        bits = _launch(wrapper, plan, views, strides)
        # Bools are packed at each run, and arrays of scales are read at each run.
        is_mask_read = views.mask is None or bits.address == views.mask.ptr
        are_numbers = all(x is None or isinstance(x, (int, float)) for x in scales)
        is_known = plan.is_uniform and plan.framework == vq.framework and is_mask_read
        if scalars is not None and is_known and are_numbers:
            _, k, v, *_ = arrays
            checked = _Checked(
                views.variant,
                views.keys.v.ptr - array.view(k if v is None else v, "v").ptr,
                strides,
                None if views.mask is None else bits,
                views.factors,
                shape_o[1:],
                () if views.gate is None else views.gate.strides,
            )
            calls = _CALLS[plan.geometry.kv_axis]
            calls.insert(arrays, scalars, checked, vq, spec.dtype_o, made_out, made_lse)
    out = array.deliver(out, vq)
    return (out, array.deliver(lse, vq)) if return_lse else out


def _run_cached(
    plan: Plan,
    workspace: ArrayView,
    arrays: tuple[Any, ...],
    scalars: tuple[Any, ...],
    lse: Any,
    mask: Any,
    return_lse: bool,
) -> Any:
    """The answer of a run that is in the cache and fits the plan, else None.

    arrays: q, k, v and out, and then lse, sinks, mask and gate if one of them is given.
    """
    if not plan.is_uniform:
        return None
    answer = _CALLS[plan.geometry.kv_axis].lookup(arrays, scalars)
    if answer is None:
        return None
    found, addresses = answer
    bound = plan.bound
    if bound is None or bound.found is not found or bound.workspace is not workspace:
        bound = _bind_cached(plan, workspace, found, arrays, lse, mask)
        if bound is None:
            return None
        plan.bound = bound  # another thread may do the same
    if mask is None:
        addresses[_MASK] = plan.bits.address
    call = found.call
    if bound.apart.get(addresses[_K]) != addresses:
        if not _are_apart(call, bound, addresses):
            return None
    if plan.logits and call.outputs and _overlaps_logits(plan, addresses, bound.sizes):
        return None
    checked, out = call.checked, arrays[_OUT]
    q_ptr, k_ptr, v_ptr, o_ptr, lse_ptr, sinks_ptr, mask_ptr, gate_ptr = addresses
    if out is None:
        if call.make_like is None:
            out = call.make_out((plan.batch.num_rows, *checked.row_shape))
        else:
            out = call.make_like(arrays[0])
        o_ptr = call.address(out)
    if lse is None and return_lse:
        lse = call.make_lse((plan.batch.num_rows, checked.row_shape[0]))
        lse_ptr = call.address(lse)
    optional = params.NO_OPTIONAL
    packed = plan.packed_logits
    if gate_ptr:
        packed = params.with_output_gate(packed, gate_ptr, checked.gate_strides)
    if lse_ptr or sinks_ptr or mask_ptr or packed:
        optional = params.OPTIONAL.pack(
            lse_ptr, mask_ptr, sinks_ptr, 0, 0, 0, 0, params.NO_STEPS, packed
        )
    v_ptr = (v_ptr or k_ptr) + checked.v_offset
    bound.run.launch(q_ptr, k_ptr, v_ptr, o_ptr, optional, call.current_stream())
    return (out, lse) if return_lse else out


def _are_apart(call: CachedCall[_Checked], bound: _Bound, addresses: list[int]) -> bool:
    """Whether no output that is given has bytes of another array, and no array some of the
    workspace's."""
    if call.outputs and call.overlaps(addresses, bound.sizes):
        return False
    # Loops over these would take as long as all the rest.
    q, k, v, o, lse, sinks, mask, gate = addresses
    end, q_low, k_low, v_low, o_low, lse_low, sinks_low, mask_low, gate_low = bound.clear
    if q_low < q < end or k_low < k < end or v_low < v < end or o_low < o < end:
        return False
    if lse or sinks or mask or gate:
        if lse_low < lse < end or sinks_low < sinks < end or mask_low < mask < end:
            return False
        if gate_low < gate < end:
            return False
    bound.apart.add(k, addresses)
    return True


def _overlaps_logits(plan: Plan, addresses: list[int], sizes: list[int]) -> bool:
    """Whether an output lies in an array that expressions read."""
    for low, high in map(array.byte_range, plan.logits):
        for place in (_OUT, _LSE):
            if (
                addresses[place]
                and low < addresses[place] + sizes[place]
                and addresses[place] < high
            ):
                return True
    return False


def _bind_cached(
    plan: Plan,
    workspace: ArrayView,
    found: Found[_Checked],
    arrays: tuple[Any, ...],
    lse: Any,
    mask: Any,
) -> _Bound | None:
    """The launches of a plan for arrays of these lengths, or None if they do not fit it."""
    batch, checked = plan.batch, found.call.checked
    key = found.call, workspace.ptr, workspace.shape, *found.lengths
    known = plan.bounds.get(key)
    if known is not None:
        return known._replace(found=found, workspace=workspace)
    prepared = plan.prepared.get(checked.variant)
    _, _, v, out, *_ = arrays
    num_rows, num_keys, v_keys, out_rows, lse_rows, _, _, gate_rows = found.lengths
    if (
        prepared is None
        or num_rows != batch.num_rows
        or (v is not None and v_keys != num_keys)
        or (out is not None and out_rows != num_rows)
        or (lse is not None and lse_rows != num_rows)
        or gate_rows not in (0, num_rows)
        or not num_rows
        or not num_keys
        or num_keys <= batch.max_page
        or num_keys < batch.num_keys
    ):
        return None
    bits = checked.bits or plan.bits
    run = _bind(plan, prepared, workspace.ptr, checked.strides, num_keys, checked.factors, bits)
    sizes = found.sizes
    if mask is None:
        sizes = [*sizes[:_MASK], bits.num_bytes, *sizes[_MASK + 1 :]]
    if len(plan.bounds) >= _MAX_BOUNDS:
        plan.bounds.clear()
    clear = clear_of(workspace, sizes)
    bound = _Bound(found, workspace, sizes, run, clear, found.apart_of(clear))
    plan.bounds[key] = bound
    return bound


def _check_run(
    wrapper: BatchWrapper,
    plan: Plan,
    arrays: tuple[Any, ...],
    scales: Scales,
    logits_arrays: tuple[ArrayView, ...],
) -> _Views:
    """The run, checked. Raises ArgumentError, UnsupportedError."""
    q, k, v, out, lse, sinks, mask, gate = (*arrays, *[None] * 4)[:8]
    geometry, batch = plan.geometry, plan.batch
    vq = array.view(q, "q")
    dims, layout = planned(geometry), geometry.spec.kv_layout
    if geometry.spec.page_size:
        keys = view_paged(k if v is None else (k, v), layout, dims)
    else:
        keys = view_ragged(k, v, layout, dims)
    _check_arrays(plan, vq, keys)
    vout = None if out is None else array.view(out, "out")
    vlse = None if lse is None else array.view(lse, "lse")
    vsinks = None if sinks is None else array.view(sinks, "sinks")
    vmask = None
    if mask is not None:
        vmask = row_mask.view_row_mask(mask, batch.num_rows, batch.requests.uniform)
    sm_scale, output_scale, head_scales = _read_scales(scales, geometry)
    _check_extras(geometry, {"sinks": vsinks, **head_scales})
    k_name, v_name = keys.names
    vgate = output_gate.view_gate(gate, (batch.num_rows,), geometry.spec)
    inputs = {"q": vq, k_name: keys.k, v_name: keys.v, "sinks": vsinks, "mask": vmask}
    inputs |= {**head_scales, output_gate.NAME: vgate}
    if geometry.spec.logits is not None:
        inputs |= _check_logits(geometry, batch, logits_arrays, vmask)
    same_device(wrapper._workspace, **inputs, out=vout, lse=vlse)
    require_apart(wrapper._workspace, **inputs, out=vout, lse=vlse)
    _check_outputs(plan, vout, vlse, inputs)
    prescale_logits = bool(head_scales.keys() & {"scale_q", "scale_k"}) or sm_scale <= 0.0
    is_aligned = _is_aligned(vq, keys, vout) and output_gate.is_aligned(vgate)
    kind = output_gate.kind_of(vgate)
    return _Views(
        vq,
        keys,
        vout,
        vlse,
        vsinks,
        vmask,
        head_scales,
        logits_arrays,
        vgate,
        Variant(is_aligned, prescale_logits, vmask is not None, output_gate=kind),
        (sm_scale, output_scale),
    )


def _check_arrays(plan: Plan, vq: ArrayView, keys: Keys) -> None:
    geometry, batch = plan.geometry, plan.batch
    spec = geometry.spec
    match_contiguous(vq, "_ num_qo_heads head_dim_qk", planned(geometry), "q")
    if vq.shape[0] != batch.num_rows:
        raise ArgumentError(
            f"q: holds {vq.shape[0]} rows; the plan has {batch.num_rows} (the last offset of "
            "qo_indptr, or requests times q_len_per_req)"
        )
    _planned_dtype(vq, spec.dtype_q, "q", "q_data_type")
    for x, name in zip((keys.k, keys.v), keys.names, strict=True):
        _planned_dtype(x, spec.dtype_kv, name, "kv_data_type")
    if geometry.spec.page_size:
        if batch.max_page >= keys.size:
            raise ArgumentError(
                f"paged_kv_cache: holds {keys.size} pages, but kv_indices of the plan name page "
                f"{batch.max_page}"
            )
        return
    for x, name in ((keys.k, "k"), (keys.v, "v")):
        rows = x.shape[0 if geometry.spec.kv_layout == "NHD" else 1]
        if rows < batch.num_keys:
            raise ArgumentError(
                f"{name}: holds {rows} rows; the plan has {batch.num_keys}, the last offset of "
                "kv_indptr"
            )


def _is_aligned(vq: ArrayView, keys: Keys, vout: ArrayView | None) -> bool:
    """Whether all rows start on 16-byte boundaries, as those of an output of our own do."""
    given = [vq] if vout is None else [vq, vout]
    row_strides = [(x.strides[:2], x.dtype) for x in given]
    row_strides.append((keys.strides, keys.k.dtype))
    return are_rows_aligned(
        functools.reduce(operator.or_, (x.ptr for x in (*given, keys.k, keys.v))), row_strides
    )


def _planned_dtype(v: ArrayView, wanted: DType, name: str, argument: str) -> None:
    if v.dtype is not wanted:
        raise ArgumentError(
            f"{name}: dtype is {v.dtype}, but the plan says {wanted}; cast it, or plan with "
            f"{argument}='{v.dtype}'"
        )


def _read_scales(scales: Scales, geometry: Geometry) -> tuple[float, float, dict[str, ArrayView]]:
    """(logit scale, output scale, views of the scales by head)."""
    if scales is NO_SCALES:
        return geometry.spec.sm_scale, 1.0, {}
    numbers, arrays = [], {}
    heads = (geometry.spec.num_qo_heads, geometry.spec.num_kv_heads, geometry.spec.num_kv_heads)
    for scale, name, count in zip(scales, ("q", "k", "v"), heads, strict=True):
        shape: Any = getattr(scale, "shape", ())
        has_axis = isinstance(shape, tuple) and len(shape) == 1
        if has_axis and (shape[0] == count or shape[0] != 1):
            arrays[f"scale_{name}"] = array.view(scale, f"{name}_scale")
            numbers.append(1.0)
        else:
            numbers.append(parse.finite(scale, f"{name}_scale", 1.0))
    sm_scale = geometry.spec.sm_scale * numbers[0] * numbers[1]
    return parse.finite(sm_scale, "sm_scale", 1.0), numbers[2], arrays


def _check_extras(geometry: Geometry, views: dict[str, ArrayView | None]) -> None:
    """Arrays of one float32 a head."""
    for name, v in views.items():
        if v is None:
            continue
        heads = "num_qo_heads" if name in ("sinks", "scale_q") else "num_kv_heads"
        label = name if name == "sinks" else f"{name[-1]}_scale"
        match_array(v, heads, dtypes.float32, label, planned(geometry))


def _check_logits(
    geometry: Geometry, batch: Batch, arrays: tuple[ArrayView, ...], vmask: ArrayView | None
) -> dict[str, ArrayView]:
    """The arrays that expressions read, checked, by what messages call them."""
    if vmask is not None and geometry.spec.mask_form == "expression":
        raise UnsupportedError(
            "mask: is not supported beside the mask_fn of the plan; pass it as an array in "
            "logits_params and write mask_fn='... && seen[batch, q_row, kv_idx]'"
        )
    return check_logits(geometry.spec, batch, arrays)


def _check_outputs(
    plan: Plan,
    vout: ArrayView | None,
    vlse: ArrayView | None,
    inputs: dict[str, ArrayView | None],
) -> None:
    spec = plan.geometry.spec
    shape = (plan.batch.num_rows, spec.num_qo_heads, spec.head_dim_vo)
    others = {**inputs, "mask": inputs["mask"] or plan.mask.view}
    if vout is not None:
        require_contiguous_last(vout, "out")
    match_output(vout, shape, spec.dtype_o, "out", **others, lse=vlse)
    match_output(vlse, shape[:-1], dtypes.float32, "lse", **others)


def _answer_on_cpu(wrapper: BatchWrapper, plan: Plan, views: _Views) -> tuple[Any, Any]:
    """(out, lse), by the reference."""
    if plan.batch.num_rows:
        with wrapper._turns.planning:
            wrapper._prepare(plan, views.variant)
    sm_scale, output_scale = views.factors
    spec = replace(plan.geometry.spec, sm_scale=sm_scale, output_scale=output_scale)
    requests = requests_of(plan, views.keys, views.mask)
    extras = {"sinks": views.sinks, output_gate.NAME: views.gate, **views.head_scales}
    out, lse = cpu.attend(spec, array.as_numpy(views.q), requests, extras, views.logits)
    lse = cpu.float32_lse(lse)
    return cpu.deliver(out, views.out, views.q), cpu.deliver(lse, views.lse, views.q)


def _pack_strides(views: _Views) -> bytes:
    vq, vout, key_strides = views.q, views.out, views.keys.strides
    assert vout is not None
    return params.STRIDES.pack(
        *(vq.strides[0], vq.strides[1]),
        *key_strides[:4],
        *(vout.strides[0], vout.strides[1]),
        *((0, 0) if views.lse is None else views.lse.strides),
        *key_strides[4:],
    )


def _launch(wrapper: BatchWrapper, plan: Plan, views: _Views, strides: bytes) -> MaskBits:
    """Enqueue the run; returns where the bits of its mask are."""
    prepared = wrapper._prepare(plan, views.variant)
    vq, keys, vout = views.q, views.keys, views.out
    assert vout is not None
    stream = array.current_stream(vq)
    optional = {"lse": views.lse, "sinks": views.sinks, **views.head_scales}
    inputs = [v for v in (*optional.values(), views.mask, views.gate) if v is not None]
    used = (keys.k, keys.v, vout, wrapper._workspace, *plan.views, *views.logits, *inputs)
    array.acquire(vq, *used)
    bits = _mask_bits(wrapper, plan, views.mask, stream)
    lse, *others = (
        0 if (v := optional.get(name)) is None else v.ptr
        for name in ("lse", "sinks", "scale_q", "scale_k", "scale_v")
    )
    read = plan.packed_logits
    if views.logits is not plan.logits:
        read = params.pack_logits_arrays((v.ptr, v.shape) for v in views.logits)
    read = output_gate.pack(read, views.gate)
    addresses = params.OPTIONAL.pack(lse, bits.address, *others, 0, params.NO_STEPS, read)
    workspace = wrapper._workspace.ptr
    bound = _bind(plan, prepared, workspace, strides, keys.size, views.factors, bits)
    bound.launch(vq.ptr, keys.k.ptr, keys.v.ptr, vout.ptr, addresses, stream)
    array.release(vq, vq, *used)
    return bits


def _bind(
    plan: Plan,
    prepared: Prepared,
    workspace: int,
    strides: bytes,
    num_keys: int,
    factors: tuple[float, float],
    bits: MaskBits,
) -> BoundRun:
    """The launches of a plan on k and v of so many rows, or pages; factors as in _Checked."""
    num_rows, capacity = plan.batch.num_rows, plan.capacity
    if capacity is not None and capacity.num_rows > num_rows:
        num_rows = 0  # a graph of these launches may be replayed with more
    return prepared.launcher.bind(
        prepared.schedule,
        prepared.words,
        workspace,
        strides,
        num_keys,
        plan.page_ids,
        bits.num_bytes,
        bits.row_bytes,
        factors[1],
        factors[0],
        prepared.rotated,
        num_rows=num_rows,
    )


def _mask_bits(wrapper: BatchWrapper, plan: Plan, vmask: ArrayView | None, stream: int) -> MaskBits:
    """The bits of the run's mask, or of the plan's. Bools are packed into the wrapper's memory."""
    if vmask is None:
        return plan.bits
    num_rows, q_len = plan.batch.num_rows, plan.batch.requests.uniform
    if vmask.dtype is not dtypes.bool_:
        return row_mask.bits_of(vmask, num_rows)
    num_words = -(-row_mask.num_packed_bytes(num_rows, q_len) // 4)
    if num_words > wrapper._mask_words.size:
        refuse_capture(stream, "the first run with a mask of bools", "make one before the capture")
    address = wrapper._mask_words.reserve(num_words)
    return row_mask.pack(vmask, num_rows, q_len, address, stream)
