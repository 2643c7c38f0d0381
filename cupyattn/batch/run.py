"""A run of a batch: check its arrays against the plan, then launch, or answer on the CPU."""

from __future__ import annotations

from typing import Any, NamedTuple, TypeAlias

import numpy as np

from .. import array, reference
from ..array import ArrayView
from ..array.match import Dims, match, require_contiguous_last, require_dtype, require_output
from ..core import dtypes
from ..core.dtypes import DType
from ..errors import ArgumentError
from ..inputs import parse, row_mask
from ..inputs.geometry import Geometry, Variant
from ..inputs.kv_cache import Keys, planned, view_paged, view_ragged
from ..inputs.limits import are_rows_aligned
from ..inputs.row_mask import MaskBits
from ..inputs.workspace import refuse_capture, same_device
from ..launch.driver import params
from .plan import Plan
from .reference import attend_levels
from .repeat import bind, remember, repeat
from .requests import Batch
from .wrapper import BatchWrapper

_Maybe: TypeAlias = "ArrayView | None"


class Scales(NamedTuple):
    """Factors of the logits (q, k) and of the output (v): numbers, or arrays with one a head."""

    q: Any = None
    k: Any = None
    v: Any = None


NO_SCALES = Scales()


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
) -> Any:
    """The answer of a batch: out, or (out, lse). For one tensor of pages v is None.

    mask: over the query tokens of requests that have equally many (_row_mask.py).
    """
    plan = wrapper._current or wrapper._require_plan()
    answer = repeat(
        plan, wrapper._workspace.ptr, q, k, v, out, lse, sinks, mask, scales, return_lse
    )
    if answer is not None:
        return answer

    # --- 1. Validate ---
    geometry, batch = plan.geometry, plan.batch
    vq = array.view(q, "q")
    if geometry.page_size:
        keys = view_paged(k if v is None else (k, v), geometry)
    else:
        keys = view_ragged(k, v, geometry)
    _check_arrays(plan, vq, keys)
    vout = None if out is None else array.view(out, "out")
    vlse = None if lse is None else array.view(lse, "lse")
    vsinks = None if sinks is None else array.view(sinks, "sinks")
    vmask = None
    if mask is not None:
        vmask = row_mask.view_row_mask(mask, batch.num_rows, batch.requests.uniform)
    sm_scale, output_scale, arrays = _read_scales(scales, geometry)
    _check_extras(geometry, {"sinks": vsinks, **arrays})
    k_name, v_name = keys.names
    inputs = {"q": vq, k_name: keys.k, v_name: keys.v, "sinks": vsinks, "mask": vmask, **arrays}
    same_device(wrapper._workspace, **inputs, out=vout, lse=vlse)
    _check_outputs(plan, vout, vlse, inputs)

    # --- 2. Answer on the CPU ---
    if vq.device.kind == "cpu":
        given = vq, keys, vout, vlse, vsinks, vmask
        return _run_reference(plan, given, sm_scale, output_scale, arrays, return_lse)

    # --- 3. Launch on the caller's stream ---
    shape_o = (batch.num_rows, geometry.num_qo_heads, geometry.problem.head_dim_vo)
    given_out, given_lse = out, lse
    if vout is None:
        out = array.empty(shape_o, geometry.problem.dtype_o, vq)
        vout = array.view(out, "out")
    if vlse is None and return_lse:
        lse = array.empty(shape_o[:-1], dtypes.float32, vq)
        vlse = array.view(lse, "lse")
    if batch.num_rows:
        prescale_logits = bool(arrays.keys() & {"scale_q", "scale_k"}) or sm_scale <= 0.0
        variant = Variant(_is_aligned(vq, keys, vout), prescale_logits, vmask is not None)
        strides = params.STRIDES.pack(
            *(vq.strides[0], vq.strides[1]),
            *keys.strides[:4],
            *(vout.strides[0], vout.strides[1]),
            *((0, 0) if vlse is None else vlse.strides),
            *keys.strides[4:],
        )
        extras = {"lse": vlse, "sinks": vsinks, "mask": vmask, **arrays}
        factors = sm_scale, output_scale
        bits = _launch(wrapper, plan, variant, vq, keys, vout, extras, strides, factors)
        if not arrays and plan.is_uniform and (vmask is None or bits.address == vmask.ptr):
            remember(
                plan,
                (q, k, v, given_out, given_lse, sinks, mask),
                (vq, keys, vout, vlse, vsinks, vmask),
                bits,
                scales,
                return_lse,
                variant,
                strides,
                factors,
            )
    out = array.deliver(out, vq)
    return (out, array.deliver(lse, vq)) if return_lse else out


def _check_arrays(plan: Plan, vq: ArrayView, keys: Keys) -> None:
    geometry, batch = plan.geometry, plan.batch
    problem = geometry.problem
    match(vq, "_ num_qo_heads head_dim_qk", planned(geometry), "q")
    require_contiguous_last(vq, "q")
    if vq.shape[0] != batch.num_rows:
        raise ArgumentError(
            f"q: holds {vq.shape[0]} rows; the plan has {batch.num_rows} (the last offset of "
            "qo_indptr, or requests times q_len_per_req)"
        )
    _planned_dtype(vq, problem.dtype_q, "q", "q_data_type")
    for x, name in zip((keys.k, keys.v), keys.names, strict=True):
        _planned_dtype(x, problem.dtype_kv, name, "kv_data_type")
    if geometry.page_size:
        if batch.max_page >= keys.size:
            raise ArgumentError(
                f"paged_kv_cache: holds {keys.size} pages, but kv_indices of the plan name page "
                f"{batch.max_page}"
            )
        return
    for x, name in ((keys.k, "k"), (keys.v, "v")):
        rows = x.shape[0 if geometry.given.kv_layout == "NHD" else 1]
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


def _read_scales(scales: Scales, geometry: Geometry) -> tuple[float, float, dict[str, ArrayView]]:
    """(logit scale, output scale, views of the scales by head)."""
    if scales is NO_SCALES:
        return geometry.options.sm_scale, 1.0, {}
    numbers, arrays = [], {}
    heads = (geometry.num_qo_heads, geometry.num_kv_heads, geometry.num_kv_heads)
    for scale, name, count in zip(scales, ("q", "k", "v"), heads, strict=True):
        shape: Any = getattr(scale, "shape", ())
        if len(shape) == 1 and (shape[0] == count or shape[0] != 1):
            arrays[f"scale_{name}"] = array.view(scale, f"{name}_scale")
            numbers.append(1.0)
        else:
            numbers.append(parse.finite(scale, f"{name}_scale", 1.0))
    sm_scale = geometry.options.sm_scale * numbers[0] * numbers[1]
    return parse.finite(sm_scale, "sm_scale", 1.0), numbers[2], arrays


def _check_extras(geometry: Geometry, views: dict[str, ArrayView | None]) -> None:
    """Arrays of one float32 a head."""
    for name, v in views.items():
        if v is None:
            continue
        of_queries = name in ("sinks", "scale_q")
        heads = geometry.num_qo_heads if of_queries else geometry.num_kv_heads
        label = name if name == "sinks" else f"{name[-1]}_scale"
        match(v, "H", Dims(H=heads), label)
        require_dtype(v, dtypes.float32, label)
        require_contiguous_last(v, label)


def _check_outputs(
    plan: Plan,
    vout: ArrayView | None,
    vlse: ArrayView | None,
    inputs: dict[str, ArrayView | None],
) -> None:
    geometry = plan.geometry
    shape = (plan.batch.num_rows, geometry.num_qo_heads, geometry.problem.head_dim_vo)
    for v, name, wanted, dtype in (
        (vout, "out", shape, geometry.problem.dtype_o),
        (vlse, "lse", shape[:-1], dtypes.float32),
    ):
        if v is None:
            continue
        if tuple(v.shape) != wanted:
            raise ArgumentError(f"{name}: shape is {list(v.shape)}; wanted {list(wanted)}")
        if v.dtype is not dtype:
            raise ArgumentError(f"{name}: dtype is {v.dtype}; wanted {dtype}")
        if name == "out":
            require_contiguous_last(v, name)
        others = {**inputs, "mask": inputs["mask"] or plan.mask.view}
        require_output(v, name, **others, lse=vlse if name == "out" else None)


def _is_aligned(vq: ArrayView, keys: Keys, vout: ArrayView) -> bool:
    """True if every row of q, k, v and o starts on a 16-byte boundary."""
    k, v = keys.k, keys.v
    strides = [(x.strides[:2], x.dtype) for x in (vq, vout)]
    strides.append((keys.strides, k.dtype))
    return are_rows_aligned(vq.ptr | k.ptr | v.ptr | vout.ptr, strides)


def _launch(
    wrapper: BatchWrapper,
    plan: Plan,
    variant: Variant,
    vq: ArrayView,
    keys: Keys,
    vout: ArrayView,
    extras: dict[str, ArrayView | None],
    strides: bytes,
    factors: tuple[float, float],
) -> MaskBits:
    """Enqueue the run; returns where the bits of its mask are."""
    prepared = wrapper._prepare(plan, variant)
    stream = array.current_stream(vq)
    inputs = [v for v in extras.values() if v is not None]
    used = (keys.k, keys.v, vout, wrapper._workspace, *plan.views, *inputs)
    array.acquire(vq, *used)
    bits = _mask_bits(wrapper, plan, extras.get("mask"), stream)
    lse, *others = (extras.get(n) for n in ("lse", "sinks", "scale_q", "scale_k", "scale_v"))
    optional = [0 if v is None else v.ptr for v in others]
    addresses = params.OPTIONAL.pack(0 if lse is None else lse.ptr, bits.address, *optional)
    bound = bind(plan, prepared, wrapper._workspace.ptr, strides, keys.size, factors, bits)
    bound.launch(vq.ptr, keys.k.ptr, keys.v.ptr, vout.ptr, addresses, stream)
    array.release(vq, vq, *used)
    return bits


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


def _run_reference(
    plan: Plan,
    given: tuple[ArrayView, Keys, _Maybe, _Maybe, _Maybe, _Maybe],
    sm_scale: float,
    output_scale: float,
    arrays: dict[str, ArrayView],
    return_lse: bool,
) -> Any:
    vq, keys, vout, vlse, vsinks, vmask = given
    geometry, batch = plan.geometry, plan.batch
    problem, options, lengths = geometry.problem, geometry.options, batch.requests
    q, k, v = (array.as_numpy(x) for x in (vq, keys.k, keys.v))
    if geometry.given.kv_layout == "HND":
        k, v = k.swapaxes(-3, -2), v.swapaxes(-3, -2)
    o = np.zeros((batch.num_rows, geometry.num_qo_heads, problem.head_dim_vo))
    lse = np.full(o.shape[:-1], -np.inf)
    scales: dict[str, Any] = {name: array.as_numpy(x) for name, x in arrays.items()}
    seen = None
    if vmask is not None:
        seen = row_mask.visible(vmask, batch.num_rows, batch.requests.uniform)
    for index in range(0 if batch.parts else batch.num_requests):
        begin, kv_len = int(lengths.q_start[index]), int(lengths.kv_len[index])
        rows = slice(begin, begin + int(lengths.qo_len[index]))
        k_own, v_own = (_keys_of(x, batch, index, kv_len) for x in (k, v))
        mask = plan.mask.of_request(batch, index)
        if seen is not None:
            mask = row_mask.with_earlier_keys(seen[rows], kv_len)
        o[rows], lse[rows] = reference.attention(
            q[rows],
            k_own,
            v_own,
            causal=options.causal,
            window_left=options.window_left,
            mask=mask,
            logits_soft_cap=options.logits_soft_cap,
            sm_scale=sm_scale,
            pos_encoding_mode=problem.pos_encoding,
            rope_scale=options.rope_scale,
            rope_theta=options.rope_theta,
            sinks=None if vsinks is None else array.as_numpy(vsinks),
            **scales,
        )
    if batch.parts:
        sinks = None if vsinks is None else array.as_numpy(vsinks)
        o, lse = attend_levels(plan.geometry, batch, (q, k, v), sm_scale, sinks, scales)
    with np.errstate(over="ignore", invalid="ignore"):
        answers = (o * output_scale).astype(problem.dtype_o.numpy), lse.astype(np.float32)
    results = []
    for target, value in zip((vout, vlse), answers, strict=True):
        if target is None:
            results.append(array.from_numpy(value, vq))
        else:
            array.as_numpy(target)[...] = value
            results.append(target.owner)
    return tuple(results) if return_lse else results[0]


def _keys_of(x: np.ndarray, batch: Batch, index: int, kv_len: int) -> np.ndarray:
    """[kv_len, num_kv_heads, head_dim] of one request, gathered from its pages or rows."""
    begin = int(batch.kv_indptr[index])
    if x.ndim == 3:
        return x[begin : begin + kv_len]
    assert batch.page_ids is not None
    pages = batch.page_ids[begin : int(batch.kv_indptr[index + 1])]
    return x[pages].reshape(-1, *x.shape[2:])[:kv_len]
