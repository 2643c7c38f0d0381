"""A run of a planned batch: check its arrays against the plan, then launch, or compute on the CPU.

A run whose signature an earlier run of the same geometry had is launched from the call cache
(call_cache.py): its lengths are compared with the plan's, and its launches are bound to the
plan once. Over latent rows the checks are others (run_latent.py), and all else is the same.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from .. import array
from ..array import ArrayView
from ..array.match import match_array, match_contiguous
from ..core import dtypes, parse
from ..core.dtypes import DType
from ..core.records import maker
from ..core.spec import AttentionSpec
from ..errors import ArgumentError, UnsupportedError
from ..launch.attention.bound_run import BoundRun
from ..launch.driver import params
from . import block_scales, cpu, logits, output_gate, row_mask
from .arrays import RunArrays
from .batch_logits import check as check_logits
from .batch_reference import RequestOptions, requests_of
from .block_scales import BlockScales, CheckedBlocks
from .call_cache import Apart, Argument, CallCache, Found
from .checked_run import CheckedRun, Layout, check_outputs, view_optional
from .geometry import Variant
from .key_share import require_sinks_once
from .kv_cache import Keys, pack_strides, planned, require_k_dtype, view_paged, view_ragged
from .latent_rows import Second
from .requests import Batch
from .row_mask import MaskBits
from .run_latent import LATENT
from .spec import read_skip_softmax
from .workspace import clear_of, refuse_capture
from .wrapper import BatchWrapper, Plan, Prepared

# Masks whose offsets lie where requests would know their place in the batch.
_IN_BITS = "whole", "runs"
_MAX_BOUNDS, _PAIRS = 256, (tuple, list)


class RunOptions(NamedTuple):
    """The options of a run over heads of their own, as given.

    q_scale, k_scale, v_scale  factors of the logits (q, k) and of the output (v): numbers, or
                               arrays with one a head, or for each request and head
    blocks                     scales of blocks of tokens
    skip_softmax               see AttentionSpec
    """

    return_lse: Any = False
    q_scale: Any = None
    k_scale: Any = None
    v_scale: Any = None
    blocks: BlockScales | None = None
    skip_softmax: Any = None


make_options, NO_OPTIONS = maker(RunOptions), RunOptions()


@dataclass(frozen=True, slots=True)
class _Shared:
    """What runs of one signature share.

    factors    scales of the logits, of the output and of the LSE
    v_offset   bytes from v, or from the tensor that holds k too, to the first value
    bits       the mask of the run, whose address may change; None: the plan's
    second     as in CheckedRun
    gate_strides  empty without gates
    """

    variant: Variant
    strides: bytes
    factors: tuple[float, float, float]
    row_shape: tuple[int, int]
    v_offset: int
    bits: MaskBits | None
    second: Second | None
    gate_strides: tuple[int, ...]


class _Bound(NamedTuple):
    """A plan's launches for arrays of these lengths.

    forbidden  (index, low, high): an array may not begin between these addresses, where it would
             have bytes of the workspace, or an output bytes of what expressions read
    outputs  (index, bytes, indices and bytes of other arrays) of those that are passed
    second   of a cache of this size
    shape_o  of the output
    """

    cached: Found[_Shared]
    workspace: ArrayView
    forbidden: tuple[tuple[int, int, int], ...]
    outputs: list[tuple[int, int, list[tuple[int, int]]]]
    run: BoundRun
    v_offset: int
    second: Second | None
    shape_o: tuple[int, int, int]
    apart: Apart


class _CachedArrays(NamedTuple):
    """The arrays of a run as the call cache takes them, which reads all up to the last one that is
    passed. (A tuple in a known run: to make a record would take as long as all the rest.)"""

    q: Any
    k: Any
    v_or_k_rope: Any
    q_rope: Any
    out: Any
    lse: Any
    sinks: Any
    mask: Any
    output_gate: Any


def _call_cache(kv_axis: int) -> CallCache[_Shared]:
    axes = dict.fromkeys(("q", "q_rope", "out", "lse", output_gate.NAME), 0)
    axes |= dict.fromkeys(("k", "v_or_k_rope"), kv_axis)
    return CallCache(
        *(
            Argument(
                name,
                axes.get(name),
                is_output=name in ("out", "lse"),
                is_planned=name == "mask",
            )
            for name in _CachedArrays._fields
        )
    )


# By the axis of a cache along which its size may change.
_CALLS = _call_cache(0), _call_cache(1)
_K, _OUT, _LSE, _MASK = map(_CachedArrays._fields.index, ("k", "out", "lse", "mask"))


def run(
    wrapper: BatchWrapper,
    *,
    q: Any,
    k: Any,
    v: Any = None,
    out: Any = None,
    lse: Any = None,
    sinks: Any = None,
    mask: Any = None,
    q_rope: Any = None,
    k_rope: Any = None,
    output_gate: Any = None,
    options: Any = NO_OPTIONS,
    plan_of: Callable[[], Plan] | None = None,
    logits_params: Any = None,
    rel_logits: Any = None,
) -> Any:
    """The output of a batch: out, or (out, lse).

    q to output_gate: see RunArrays.
    options: RunOptions; of latent attention, LatentOptions.
    plan_of: makes another plan than the wrapper's, which is run while no other thread plans.
    logits_params, rel_logits: arrays in place of those that the plan's expressions read.
    """
    if v is None and type(k) in _PAIRS and len(k) == 2:
        k, v = k
    second = v if k_rope is None else k_rope
    arrays = q, k, second, q_rope, out, lse, sinks, mask, output_gate
    turns = wrapper._turns
    with turns.running:
        plan = (wrapper._current or wrapper._require_plan()) if plan_of is None else plan_of()
        if turns.is_shared:
            turns.check(plan.owner)
        if not (logits_params is rel_logits is None):
            expression = plan.geometry.spec.logits
            read = logits.replaced(expression, plan.logits, logits_params, rel_logits)
            return _run_checked(wrapper, plan, arrays, options, None, read)
        # --- 1. Find the launches of such a run ---
        key: tuple[Any, ...] = (*options, plan.geometry, plan.framework)
        if mask is not None:
            # A mask fits a number of rows, which are not part of a signature otherwise.
            key = (*key, plan.batch.num_rows, plan.batch.requests.uniform)
        known = _CALLS[plan.geometry.kv_axis].lookup(arrays, key) if plan.is_uniform else None
        if known is None:
            return _run_checked(wrapper, plan, arrays, options, key, plan.logits)
        cached, addresses = known
        bound = plan.bound
        if bound is None or bound.cached is not cached or bound.workspace is not wrapper._workspace:
            bound = _bind_cached(plan, wrapper._workspace, cached, arrays)
            if bound is None:
                return _run_checked(wrapper, plan, arrays, options, key, plan.logits)
            plan.bound = bound  # another thread may do the same
        if mask is None:
            addresses[_MASK] = plan.bits.address
        q_ptr, k_ptr, v_ptr, q_rope_ptr, o_ptr, lse_ptr, sinks_ptr, mask_ptr, gate_ptr = addresses
        if bound.apart.get(k_ptr) != addresses and not _are_apart(bound, addresses):
            return _run_checked(wrapper, plan, arrays, options, key, plan.logits)
        # --- 2. Make outputs that are not passed, and launch ---
        call, return_lse = cached.call, options.return_lse
        if out is None:
            out = call.make_out(bound.shape_o) if call.make_like is None else call.make_like(q)
            o_ptr = call.address(out)
        if lse is None and return_lse:
            lse = call.make_lse(bound.shape_o[:-1])
            lse_ptr = call.address(lse)
        optional, packed = params.NO_OPTIONAL, plan.packed_logits
        if gate_ptr:
            packed = params.with_output_gate(packed, gate_ptr, call.checked.gate_strides)
        if lse_ptr or sinks_ptr or mask_ptr or packed:
            optional = params.OPTIONAL.pack(
                lse_ptr, mask_ptr, sinks_ptr, 0, 0, 0, 0, params.NO_STEPS, packed
            )
        latent = b""
        if bound.second is None:
            v_ptr = (v_ptr or k_ptr) + bound.v_offset
        else:
            latent = bound.second.pack(q_ptr, q_rope_ptr, k_ptr, v_ptr)
            v_ptr = k_ptr
        bound.run.launch(q_ptr, k_ptr, v_ptr, o_ptr, optional, call.current_stream(), latent)
        return (out, lse) if return_lse else out


def _are_apart(bound: _Bound, addresses: list[int]) -> bool:
    """Whether no array lies where it may not, and no output has bytes of another array."""
    for index, low, high in bound.forbidden:
        if low < addresses[index] < high:
            return False
    for index, size, others in bound.outputs:
        begin = addresses[index]
        end = begin + size
        for other, length in others:
            address = addresses[other]
            if address < end and begin < address + length:
                return False
    bound.apart.add(addresses[_K], addresses)
    return True


def _forbidden(
    plan: Plan, workspace: ArrayView, sizes: list[int]
) -> tuple[tuple[int, int, int], ...]:
    """`_Bound.forbidden` of arrays of these sizes."""
    end, *lows = clear_of(workspace, sizes)
    ranges = [(index, low, end) for index, low in enumerate(lows) if sizes[index]]
    for low, high in map(array.byte_range, plan.logits):  # which expressions read
        ranges += [(at, low - sizes[at], high) for at in (_OUT, _LSE) if sizes[at]]
    return tuple(ranges)


def _bind_cached(
    plan: Plan, workspace: ArrayView, cached: Found[_Shared], arrays: tuple[Any, ...]
) -> _Bound | None:
    """The launches of a plan for arrays of these lengths, or None if they do not fit it."""
    batch, shared = plan.batch, cached.call.checked
    key = cached.call, workspace.ptr, workspace.shape, *cached.lengths
    known = plan.bounds.get(key)
    if known is not None:
        return known._replace(cached=cached, workspace=workspace)  # type: ignore[no-any-return]
    prepared = plan.prepared.get(shared.variant)
    lengths = _CachedArrays._make(
        None if x is None else length for x, length in zip(arrays, cached.lengths, strict=True)
    )
    of_rows = lengths.q, lengths.q_rope, lengths.out, lengths.lse, lengths.output_gate
    rows = {*of_rows} - {None}
    keys = {lengths.k, lengths.v_or_k_rope} - {None}
    num_keys = lengths.k
    if prepared is None or rows != {batch.num_rows} or keys != {num_keys}:
        return None
    if not batch.num_rows or not num_keys or not batch.max_page < num_keys >= batch.num_keys:
        return None
    bits, sizes = shared.bits or plan.bits, cached.sizes
    if arrays[_MASK] is None:
        sizes = [*sizes]
        sizes[_MASK] = bits.num_bytes
    forbidden = _forbidden(plan, workspace, sizes)
    outputs = [
        (index, sizes[index], [(other, sizes[other]) for other in others if sizes[other]])
        for index, others in cached.call.outputs
    ]
    if len(plan.bounds) >= _MAX_BOUNDS:
        plan.bounds.clear()
    bound = plan.bounds[key] = _Bound(
        cached,
        workspace,
        forbidden,
        outputs,
        _bind(plan, prepared, workspace.ptr, shared, num_keys, bits),
        v_offset=shared.v_offset,
        second=None if shared.second is None else shared.second.of_pages(num_keys),
        shape_o=(batch.num_rows, *shared.row_shape),
        apart=cached.apart_of(forbidden),
    )
    return bound


def _record_of(arrays: _CachedArrays, is_latent: bool) -> RunArrays:
    return RunArrays(
        q=arrays.q,
        k=arrays.k,
        v=None if is_latent else arrays.v_or_k_rope,
        out=arrays.out,
        lse=arrays.lse,
        sinks=arrays.sinks,
        mask=arrays.mask,
        q_rope=arrays.q_rope,
        k_rope=arrays.v_or_k_rope if is_latent else None,
        output_gate=arrays.output_gate,
    )


def _run_checked(
    wrapper: BatchWrapper,
    plan: Plan,
    cached_arrays: tuple[Any, ...],
    options: Any,
    key: tuple[Any, ...] | None,
    logits_arrays: tuple[ArrayView, ...],
) -> Any:
    """The output of a run that is not in the call cache.

    cached_arrays: as _CachedArrays has them. key: of the call cache; None for a run that is not to
    be cached. logits_arrays: what expressions read.
    """
    is_latent = plan.geometry.spec.latent
    arrays = _record_of(_CachedArrays._make(cached_arrays), is_latent)
    if wrapper._host_plan is not None and plan is wrapper._current and wrapper._follow(arrays.q):
        before, plan, key = plan, wrapper._require_plan(), None
        if logits_arrays is before.logits:
            logits_arrays = plan.logits
    # --- 1. Validate ---
    return_lse = parse.flag(options.return_lse, "return_lse")
    layout = LATENT if is_latent else _HEADS
    checked = layout.check(plan, arrays, options, logits_arrays)
    check_outputs(checked, plan, wrapper._workspace, arrays, layout.remedy)

    # --- 2. Compute on the CPU ---
    spec, like = plan.geometry.spec, checked.views.q
    if like.device.kind == "cpu":
        out, lse = _run_on_cpu(wrapper, plan, checked)
        return (out, lse) if return_lse else out

    # --- 3. Launch on the caller's stream ---
    out, lse, variant = arrays.out, arrays.lse, checked.variant
    shape_o = plan.batch.num_rows, spec.num_qo_heads, spec.head_dim_vo
    made_out = made_lse = None
    if out is None:
        out, made_out = array.empty(shape_o, spec.dtype_o, like), shape_o
        checked.views = checked.views._replace(out=array.view(out, "out"))
    if lse is None and return_lse:
        lse, made_lse = array.empty(shape_o[:-1], dtypes.float32, like), shape_o[:-1]
        checked.views = checked.views._replace(lse=array.view(lse, "lse"))
    if plan.batch.num_rows:
        shared = _launch(wrapper, plan, checked, variant)
        if key is not None and _is_known(plan, checked, shared, options):
            calls = _CALLS[plan.geometry.kv_axis]
            calls.insert(cached_arrays, key, shared, like, spec.dtype_o, made_out, made_lse)
    out = array.deliver(out, like)
    return (out, array.deliver(lse, like)) if return_lse else out


def _is_known(plan: Plan, checked: CheckedRun, shared: _Shared, options: Any) -> bool:
    """Whether later runs of such arrays and options need no other checks than the call cache's.
    Bools of a mask are packed at each run, and arrays of scales are read at each run."""
    mask = checked.views.mask
    is_mask_read = mask is None or (shared.bits is not None and shared.bits.address == mask.ptr)
    are_plain = all(x is None or isinstance(x, (int, float, str, np.number)) for x in options)
    is_uniform = plan.is_uniform and plan.framework == checked.views.q.framework
    return is_uniform and is_mask_read and are_plain


def _run_on_cpu(wrapper: BatchWrapper, plan: Plan, checked: CheckedRun) -> tuple[Any, Any]:
    """(out, lse), by the reference."""
    if plan.batch.num_rows:
        with wrapper._turns.planning:
            wrapper._prepare(plan, checked.variant)
    sm_scale, output_scale, lse_scale = checked.factors
    views, (rows, requests) = checked.views, checked.on_cpu()
    spec = replace(plan.geometry.spec, sm_scale=sm_scale, output_scale=output_scale)
    extras = {"sinks": views.sinks, output_gate.NAME: views.output_gate}
    if not checked.key_scales:  # else the keys have them
        extras |= {name: v for name, v in checked.head_scales.items() if len(v.shape) == 1}
    out, lse = cpu.attend(spec, rows, requests, extras, checked.logits)
    lse = cpu.float32_lse(lse * lse_scale)
    return cpu.deliver(out, views.out, views.q), cpu.deliver(lse, views.lse, views.q)


def _launch(wrapper: BatchWrapper, plan: Plan, checked: CheckedRun, variant: Variant) -> _Shared:
    """Enqueue the run; returns what later ones of its signature share with it."""
    prepared, workspace = wrapper._prepare(plan, variant), wrapper._workspace
    views, scales = checked.views, checked.head_scales
    vq, vk, vout, gate = views.q, views.k, views.out, views.output_gate
    stream = array.current_stream(vq)
    own = [x for x in views if x is not None and x is not vq]
    used = (
        *own,
        *scales.values(),
        *checked.blocks.views.values(),
        workspace,
        *plan.views,
        *checked.logits,
    )
    array.acquire(vq, *used)
    bits = _mask_bits(wrapper, plan, views.mask, stream)
    shared = _Shared(
        variant,
        pack_strides(
            vq, checked.key_strides, vout, (0, 0) if views.lse is None else views.lse.strides
        ),
        checked.factors,
        (plan.geometry.spec.num_qo_heads, plan.geometry.spec.head_dim_vo),
        v_offset=views.v.ptr - vk.ptr if checked.is_one_tensor else 0,
        bits=None if views.mask is None else bits,
        second=checked.second,
        gate_strides=() if gate is None else gate.strides,
    )
    addresses = RunArrays._make(0 if x is None else x.ptr for x in views)
    names = "scale_q", "scale_k", "scale_v"
    scale_q, scale_k, scale_v = (0 if name not in scales else scales[name].ptr for name in names)
    steps = params.NO_STEPS
    if variant.scales_requests:
        of_requests = (scales.get(name) for name in names)
        steps = params.STEPS.pack(
            0, *(v.strides[0] if v and len(v.shape) == 2 else 0 for v in of_requests)
        )
    read = plan.packed_logits
    if checked.logits is not plan.logits:
        read = params.pack_logits_arrays((v.ptr, v.shape) for v in checked.logits)
    if checked.blocks.views:
        read = checked.blocks.pack()
    read = output_gate.pack(read, gate)
    optional = params.OPTIONAL.pack(
        addresses.lse,
        bits.address,
        addresses.sinks,
        scale_q,
        scale_k,
        scale_v,
        0,
        steps,
        read,
    )
    q, k, second = addresses.q, addresses.k, checked.second
    latent = b"" if second is None else second.pack(q, addresses.q_rope, k, addresses.k_rope)
    bound = _bind(plan, prepared, workspace.ptr, shared, checked.num_keys, bits)
    bound.launch(q, k, addresses.v or k, addresses.out, optional, stream, latent)
    array.release(vq, vq, *used)
    return shared


def _bind(
    plan: Plan,
    prepared: Prepared,
    workspace: int,
    shared: _Shared,
    num_keys: int,
    bits: MaskBits,
) -> BoundRun:
    """The launches of a plan on k and v of so many rows, or pages."""
    num_rows, capacity = plan.batch.num_rows, plan.capacity
    if shared.second is not None or (capacity is not None and capacity.num_rows > num_rows):
        num_rows = 0  # a graph of these launches may be replayed with more
    sm_scale, output_scale, lse_scale = shared.factors
    return prepared.launcher.bind(
        prepared.schedule,
        prepared.words,
        workspace,
        shared.strides,
        num_keys,
        plan.page_ids,
        bits.num_bytes,
        bits.row_bytes,
        output_scale,
        sm_scale,
        prepared.staged,
        lse_scale,
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


# --- heads of their own ---


class _Scales(NamedTuple):
    """Factors of the logits and of the output, and views of the scales by head."""

    logits: float
    output: float
    by_head: dict[str, ArrayView]

    def by_request(self, blocks: CheckedBlocks) -> RequestOptions:
        """What the reference is told of a request's scales."""
        return functools.partial(_scales_of_request, self.by_head, blocks)


def _check(
    plan: Plan, arrays: RunArrays, options: RunOptions, logits_arrays: tuple[ArrayView, ...]
) -> CheckedRun:
    geometry, batch, spec = plan.geometry, plan.batch, plan.geometry.spec
    vq = array.view(arrays.q, "q")
    if spec.page_size:
        cache = arrays.k if arrays.v is None else (arrays.k, arrays.v)
        keys = view_paged(cache, spec.kv_layout, planned(geometry))
    else:
        keys = view_ragged(arrays.k, arrays.v, spec.kv_layout, planned(geometry))
    _check_extents(plan, vq, keys)
    sinks, mask = view_optional(arrays.sinks, "sinks"), None
    if arrays.mask is not None:
        mask = row_mask.view_row_mask(arrays.mask, batch.num_rows, batch.requests.uniform)
    require_sinks_once(spec, sinks)
    scales = _read_scales(options, spec)
    _check_by_head(plan, {"sinks": sinks, **scales.by_head})
    k_name, v_name = keys.names
    inputs = {"q": vq, k_name: keys.k, v_name: keys.v, "sinks": sinks, "mask": mask}
    gate = output_gate.view_gate(arrays.output_gate, (batch.num_rows,), spec)
    inputs |= {**scales.by_head, output_gate.NAME: gate}
    counts, kind = (batch.num_rows, keys.size), vq.device.kind
    has_lse = options.return_lse is not False or arrays.lse is not None
    wants = block_scales.wants_logits(spec, has_lse, sinks)
    blocks = block_scales.check(options.blocks, spec, counts, batch.num_requests, kind, wants)
    if blocks.views and batch.parts:
        raise UnsupportedError("q_block_scales: are not supported in a cascade; pass None")
    if blocks.views and spec.mask_form in _IN_BITS and kind != "cpu":
        raise UnsupportedError(
            "q_block_scales: are not supported beside a mask of whole requests; pass None"
        )
    inputs |= blocks.views
    if spec.logits is not None:
        if mask is not None and spec.mask_form == "expression":
            raise UnsupportedError(
                "mask: is not supported beside the mask_fn of the plan; pass it as an array in "
                "logits_params and write mask_fn='... && seen[batch, q_row, kv_idx]'"
            )
        inputs |= check_logits(spec, batch, logits_arrays)
    return CheckedRun(
        views=RunArrays(q=vq, k=keys.k, v=keys.v, sinks=sinks, mask=mask, output_gate=gate),
        inputs=inputs,
        factors=(scales.logits, scales.output, 1.0),
        num_keys=keys.size,
        key_strides=keys.strides,
        on_cpu=functools.partial(_on_cpu, plan, vq, keys, mask, scales.by_request(blocks)),
        # Kernels whose rows have scales know those of requests' values too.
        prescale_logits=bool(scales.by_head.keys() & {"scale_q", "scale_k"})
        or any(len(v.shape) == 2 for v in scales.by_head.values())
        or scales.logits <= 0.0,
        is_one_tensor=arrays.v is None,
        head_scales=scales.by_head,
        logits=logits_arrays,
        blocks=blocks,
        skip_softmax=read_skip_softmax(options.skip_softmax),
    )


_HEADS = Layout(_check, remedy="pass such an array, or none")


def _check_extents(plan: Plan, vq: ArrayView, keys: Keys) -> None:
    geometry, batch, spec = plan.geometry, plan.batch, plan.geometry.spec
    match_contiguous(vq, "_ num_qo_heads head_dim_qk", planned(geometry), "q")
    if vq.shape[0] != batch.num_rows:
        raise ArgumentError(
            f"q: holds {vq.shape[0]} rows; the plan has {batch.num_rows} (the last offset of "
            "qo_indptr, or requests times q_len_per_req)"
        )
    _planned_dtype(vq, spec.dtype_q, "q", "q_data_type")
    require_k_dtype(keys.k, spec.dtype_k, spec.dtype_q, keys.names[0])
    for x, name, dtype in zip(
        (keys.k, keys.v), keys.names, (spec.dtype_k, spec.dtype_kv), strict=True
    ):
        _planned_dtype(x, dtype, name, "kv_data_type")
    if spec.page_size:
        if batch.max_page >= keys.size:
            raise ArgumentError(
                f"paged_kv_cache: holds {keys.size} pages, but kv_indices of the plan name page "
                f"{batch.max_page}"
            )
        return
    for x, name in ((keys.k, "k"), (keys.v, "v")):
        rows = x.shape[geometry.kv_axis]
        if rows < batch.num_keys:
            raise ArgumentError(
                f"{name}: holds {rows} rows; the plan has {batch.num_keys}, the last offset of "
                "kv_indptr"
            )


def _planned_dtype(v: ArrayView, wanted: DType, name: str, argument: str) -> None:
    if v.dtype is not wanted:
        raise ArgumentError(
            f"{name}: dtype is {v.dtype}, but the plan says {wanted}; cast it, or plan with "
            f"{argument}='{v.dtype}'"
        )


def _read_scales(options: RunOptions, spec: AttentionSpec) -> _Scales:
    numbers, arrays = {"q": 1.0, "k": 1.0, "v": 1.0}, {}
    for name, scale, heads in (
        ("q", options.q_scale, spec.num_qo_heads),
        ("k", options.k_scale, spec.num_kv_heads),
        ("v", options.v_scale, spec.num_kv_heads),
    ):
        shape: Any = getattr(scale, "shape", ())
        has_axis = isinstance(shape, tuple) and len(shape) in (1, 2)
        if has_axis and shape != (1, 1) and (shape[0] != 1 or shape[-1] == heads):
            arrays[f"scale_{name}"] = array.view(scale, f"{name}_scale")
        else:
            numbers[name] = parse.finite(scale, f"{name}_scale", 1.0)
    sm_scale = parse.finite(spec.sm_scale * numbers["q"] * numbers["k"], "sm_scale", 1.0)
    return _Scales(sm_scale, numbers["v"], arrays)


def _check_by_head(plan: Plan, views: dict[str, ArrayView | None]) -> None:
    """Arrays of one float32 a head."""
    for name, v in views.items():
        if v is not None:
            heads = "num_qo_heads" if name in ("sinks", "scale_q") else "num_kv_heads"
            label = name if name == "sinks" else f"{name[-1]}_scale"
            dims = planned(plan.geometry)
            if len(v.shape) == 2 and name != "sinks":
                dims["batch"] = plan.batch.num_requests
                heads = f"batch {heads}"
            match_array(v, heads, dtypes.float32, label, dims)
            if len(v.shape) == 2 and (plan.batch.parts or plan.geometry.spec.mask_form in _IN_BITS):
                what = "in a cascade" if plan.batch.parts else "beside a mask of whole requests"
                raise UnsupportedError(
                    f"{label}: a scale for each request and head is not supported {what}; pass one "
                    "for each head"
                )


def _scales_of_request(
    by_head: dict[str, ArrayView], blocks: CheckedBlocks, batch: Batch, index: int
) -> dict[str, Any]:
    """The scales of one request of a batch: of its heads, and of its blocks."""
    result: dict[str, Any] = {
        name: array.as_numpy(v)[index] for name, v in by_head.items() if len(v.shape) == 2
    }
    if not blocks.views:
        return result
    lengths, page_ids = batch.requests, None
    (q_start, qo_len, kv_start, kv_len) = (
        int(x[index]) for x in (lengths.q_start, lengths.qo_len, lengths.kv_start, lengths.kv_len)
    )
    if batch.page_ids is not None:
        page_ids = batch.page_ids[int(batch.kv_indptr[index]) : int(batch.kv_indptr[index + 1])]
    return result | blocks.of_request(index, (q_start, qo_len), (kv_start, kv_len), page_ids)


def _on_cpu(
    plan: Plan, vq: ArrayView, keys: Keys, mask: ArrayView | None, scales: RequestOptions
) -> tuple[np.ndarray, Iterator[cpu.Request]]:
    return array.as_numpy(vq), requests_of(plan, keys, mask, scales)
