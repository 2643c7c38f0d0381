"""What single-request prefill and decode share: check, look up the launcher, launch.

A call is described by its geometry (dtypes, head counts, strides, options) and its lengths. All
checks that need only the geometry are made once; the result, an `_Entry`, is remembered, so that a
call in a decoding loop pays for reading its arrays, checking their lengths, and the launch.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from . import _options, array, dtypes, reference
from .array import ArrayView
from .dtypes import DType
from .errors import ArgumentError, UnsupportedError
from .launch.attention import AttentionLauncher, AttentionOptions
from .match import Dims, match, require_contiguous_last, require_dtype, require_output
from .problem import AttentionProblem

_MAX_LENGTH = 2**31 - 1 - 64
_MAX_ENTRIES = 4096


class Options(NamedTuple):
    """The scalar arguments of a call, as given: the key of the launcher cache."""

    kv_layout: str
    causal: bool
    pos_encoding_mode: str
    window_left: int
    logits_soft_cap: float | None
    sm_scale: float | None
    rope_scale: float | None
    rope_theta: float | None
    q_scale: float | None
    k_scale: float | None
    v_scale: float | None
    o_dtype: object


class Extras(NamedTuple):
    """The optional arrays of a call, as given."""

    custom_mask: Any = None
    packed_custom_mask: Any = None
    sinks: Any = None
    scale_q: Any = None
    scale_k: Any = None
    scale_v: Any = None


NO_EXTRAS = Extras()


@dataclass(slots=True)
class _Entry:
    """What is known of every call with the same geometry."""

    problem: AttentionProblem
    options: AttentionOptions
    num_qo_heads: int
    num_kv_heads: int
    kv_strides: tuple[int, int, int, int]
    kv_axis: int
    dtype_o: DType
    checked: Options
    launcher: AttentionLauncher | None


_entries: dict[tuple[object, ...], _Entry] = {}


def run(
    q: Any,
    k: Any,
    v: Any,
    options: Options,
    extras: Extras,
    out: Any,
    lse: Any,
    return_lse: bool,
    is_decode: bool,
) -> Any:
    """Attention of one request; q is [Hq, D] for decode, else [Lq, Hq, D].

    Returns out, or (out, lse) if `return_lse`.
    """
    # --- 1. Validate ---
    view = array.view
    vq, vk, vv = view(q, "q"), view(k, "k"), view(v, "v")
    vout = None if out is None else view(out, "out")
    vlse = None if lse is None else view(lse, "lse")
    pointers = vq.ptr | vk.ptr | vv.ptr | (0 if vout is None else vout.ptr)
    has_mask = extras.custom_mask is not None or extras.packed_custom_mask is not None
    has_scales = not (extras.scale_q is extras.scale_k is None)
    # Everything of k and v but the length, which changes from call to call.
    kept = slice(None, None, 2) if options.kv_layout == "HND" else slice(1, None)
    qo_len = 1 if is_decode else vq.shape[0]
    key = (
        is_decode,
        vq.shape[-2:],
        vq.strides,
        vq.dtype,
        vq.device,
        vk.shape[kept],
        vk.strides,
        vk.dtype,
        vv.shape[kept],
        vv.strides,
        vv.dtype,
        None if vout is None else (vout.strides, vout.dtype),
        pointers & 15,
        has_mask,
        has_scales,
        options,
    )
    try:
        entry = _entries.get(key)
    except TypeError:
        entry, key = None, ()
    if entry is None:
        entry = _make_entry(vq, vk, vv, vout, options, pointers, has_mask, has_scales, is_decode)
        if key:
            if len(_entries) >= _MAX_ENTRIES:
                _entries.clear()
            _entries[key] = entry
    kv_len = vk.shape[entry.kv_axis]
    others = (vk, vv, vout, vlse)
    _check_call(vq, others, entry, qo_len, kv_len, is_decode)
    views = _view_extras(extras, vq, entry, qo_len, kv_len)

    # --- 2. Answer on the CPU ---
    if vq.device.kind == "cpu":
        return _run_reference(vq, vk, vv, vout, vlse, entry, views, is_decode, return_lse)

    # --- 3. Launch on the caller's stream ---
    shape_o = (*vq.shape[:-1], entry.problem.head_dim_vo)
    if vout is None:
        out = array.empty(shape_o, entry.dtype_o, vq)
        vout = view(out, "out")
    if vlse is None and return_lse:
        lse = array.empty(shape_o[:-1], dtypes.float32, vq)
        vlse = view(lse, "lse")
    if qo_len:
        _launch(vq, vk, vv, vout, vlse, entry, views, qo_len, kv_len, is_decode)
    out = array.deliver(out, vq)
    return (out, array.deliver(lse, vq)) if return_lse else out


def _make_entry(
    vq: ArrayView,
    vk: ArrayView,
    vv: ArrayView,
    vout: ArrayView | None,
    given: Options,
    pointers: int,
    has_mask: bool,
    has_scales: bool,
    is_decode: bool,
) -> _Entry:
    layout = _options.kv_layout(given.kv_layout)
    dims = Dims()
    match(vq, "Hq Dqk" if is_decode else "Lq Hq Dqk", dims, "q")
    match(vk, "Lkv Hkv Dqk" if layout == "NHD" else "Hkv Lkv Dqk", dims, "k")
    match(vv, "Lkv Hkv Dvo" if layout == "NHD" else "Hkv Lkv Dvo", dims, "v")
    for v, name in ((vq, "q"), (vk, "k"), (vv, "v")):
        require_contiguous_last(v, name)
    heads, kv_heads = dims["Hq"], dims["Hkv"]
    if heads == 0 or kv_heads == 0 or heads % kv_heads:
        raise ArgumentError(
            f"q, k: {heads} query heads over {kv_heads} KV heads; wanted a positive multiple"
        )
    if vk.dtype is not vv.dtype:
        raise ArgumentError(f"v: dtype is {vv.dtype} but k is {vk.dtype}; wanted the same")
    dtype_o = vq.dtype if given.o_dtype is None else dtypes.parse(given.o_dtype, "o_dtype")
    mode = _options.pos_encoding_mode(given.pos_encoding_mode)
    options = _normalise(given, dims["Dqk"])
    axis = 0 if layout == "NHD" else 1
    kv_strides = (vk.strides[axis], vk.strides[1 - axis], vv.strides[axis], vv.strides[1 - axis])
    problem = AttentionProblem(
        dtype_q=vq.dtype,
        dtype_kv=vk.dtype,
        dtype_o=dtype_o,
        head_dim_qk=dims["Dqk"],
        head_dim_vo=dims["Dvo"],
        pos_encoding=mode,
        soft_cap=options.logits_soft_cap > 0.0,
        custom_mask=has_mask,
        scale_first=has_scales or options.sm_scale <= 0.0,
        aligned=_is_aligned(vq, vk, vv, vout, pointers, dims["Dvo"], dtype_o),
    )
    launcher = None
    if vq.device.kind == "cuda":
        problem.check_supported()
        launcher = AttentionLauncher(problem, options, heads, kv_heads, vq.device.index)
    return _Entry(
        problem, options, heads, kv_heads, kv_strides, axis, dtype_o, given, launcher
    )


def _normalise(given: Options, head_dim: int) -> AttentionOptions:
    default = 1.0 / math.sqrt(head_dim) if head_dim else 1.0
    scale = _options.finite(given.sm_scale, "sm_scale", default)
    scale *= _options.finite(given.q_scale, "q_scale", 1.0)
    scale *= _options.finite(given.k_scale, "k_scale", 1.0)
    return AttentionOptions(
        causal=_options.flag(given.causal, "causal"),
        window_left=_options.window_left(given.window_left),
        sm_scale=scale,
        output_scale=_options.finite(given.v_scale, "v_scale", 1.0),
        logits_soft_cap=_options.soft_cap(given.logits_soft_cap),
        rope_scale=_options.positive(given.rope_scale, "rope_scale", 1.0),
        rope_theta=_options.positive(given.rope_theta, "rope_theta", 1e4),
    )


def _is_aligned(
    vq: ArrayView,
    vk: ArrayView,
    vv: ArrayView,
    vout: ArrayView | None,
    pointers: int,
    head_dim_vo: int,
    dtype_o: DType,
) -> bool:
    """True if every row of q, k, v and o starts on a 16-byte boundary."""
    offsets = pointers
    for v in (vq, vk, vv, vout):
        if v is not None:
            for stride, extent in zip(v.strides[:-1], v.shape[:-1], strict=True):
                if extent > 1:
                    offsets |= stride * v.dtype.itemsize
    if vout is None:
        offsets |= head_dim_vo * dtype_o.itemsize
    return offsets & 15 == 0


def _check_call(
    vq: ArrayView,
    others: tuple[ArrayView | None, ...],
    entry: _Entry,
    qo_len: int,
    kv_len: int,
    is_decode: bool,
) -> None:
    """The checks that depend on lengths and addresses."""
    vk, vv, vout, vlse = others
    if vk is None or vv is None:
        return
    device = vq.device
    if vk.device != device or vv.device != device:
        array.same_device(q=vq, k=vk, v=vv)
    if vv.shape[entry.kv_axis] != kv_len:
        raise ArgumentError(
            f"v: holds {vv.shape[entry.kv_axis]} tokens but k holds {kv_len}; wanted the same"
        )
    if kv_len > _MAX_LENGTH or qo_len * (entry.num_qo_heads // entry.num_kv_heads) > _MAX_LENGTH:
        raise UnsupportedError(
            f"q, k: {qo_len} query tokens over {kv_len} keys; at most {_MAX_LENGTH} keys and query "
            "rows of one KV head are supported"
        )
    if vout is None and vlse is None:
        return
    shape = (*vq.shape[:-1], entry.problem.head_dim_vo)
    for v, name, wanted, dtype in (
        (vout, "out", shape, entry.dtype_o),
        (vlse, "lse", shape[:-1], dtypes.float32),
    ):
        if v is None:
            continue
        if v.shape != wanted:
            raise ArgumentError(f"{name}: shape is {list(v.shape)}; wanted {list(wanted)}")
        if v.dtype is not dtype:
            raise ArgumentError(f"{name}: dtype is {v.dtype}; wanted {dtype}")
        if v.device != device:
            array.same_device(q=vq, **{name: v})
        if name == "out":
            require_contiguous_last(v, name)
        require_output(v, name, q=vq, k=vk, v=vv, lse=vlse if name == "out" else None)


def _view_extras(
    extras: Extras, vq: ArrayView, entry: _Entry, qo_len: int, kv_len: int
) -> dict[str, ArrayView]:
    """Views of the optional arrays, checked; absent ones are left out."""
    if extras is NO_EXTRAS:
        return {}
    views = {name: array.view(x, name) for name, x in extras._asdict().items() if x is not None}
    array.same_device(q=vq, **views)
    heads = {"sinks": entry.num_qo_heads, "scale_q": entry.num_qo_heads}
    for name, v in views.items():
        if name == "custom_mask":
            match(v, "Lq Lkv", Dims(Lq=qo_len, Lkv=kv_len), name)
            require_dtype(v, dtypes.bool_, name)
            require_contiguous_last(v, name)
        elif name == "packed_custom_mask":
            match(v, "n", Dims(), name)
            require_dtype(v, dtypes.uint8, name)
            require_contiguous_last(v, name)
            needed = -(-qo_len * kv_len // 8)
            if v.shape[0] < needed:
                raise ArgumentError(
                    f"packed_custom_mask: holds {v.shape[0]} bytes; wanted {needed} for {qo_len} x "
                    f"{kv_len} bits, packed with packbits(mask.flatten(), bitorder='little')"
                )
        else:
            match(v, "H", Dims(H=heads.get(name, entry.num_kv_heads)), name)
            require_dtype(v, dtypes.float32, name)
            require_contiguous_last(v, name)
    return views


def _launch(
    vq: ArrayView,
    vk: ArrayView,
    vv: ArrayView,
    vout: ArrayView,
    vlse: ArrayView | None,
    entry: _Entry,
    views: dict[str, ArrayView],
    qo_len: int,
    kv_len: int,
    is_decode: bool,
) -> None:
    stream = array.current_stream(vq)
    inputs = (vk, vv, *views.values())
    array.acquire(vq, *inputs)
    mask = views.get("packed_custom_mask")
    if entry.problem.custom_mask and mask is None:
        mask = _pack_mask(views["custom_mask"], vq, stream)
    k_n, k_h, v_n, v_h = entry.kv_strides
    token = 0 if is_decode else 1
    strides = (
        vq.strides[0] * token,
        vq.strides[-2],
        k_n,
        k_h,
        v_n,
        v_h,
        vout.strides[0] * token,
        vout.strides[-2],
        0 if vlse is None else vlse.strides[0] * token,
        0 if vlse is None else vlse.strides[-1],
    )
    launcher = entry.launcher
    assert launcher is not None
    launcher.launch(
        vq,
        vk,
        vv,
        vout,
        vlse,
        mask,
        views.get("sinks"),
        (views.get("scale_q"), views.get("scale_k"), views.get("scale_v")),
        strides,
        qo_len,
        kv_len,
        stream,
    )
    array.release(vq, vq, vout, *inputs)


def _pack_mask(mask: ArrayView, like: ArrayView, stream: int) -> ArrayView:
    from .launch import packbits

    num_bytes = -(-mask.shape[0] * mask.shape[1] // 8)
    packed = array.view(array.empty((num_bytes,), dtypes.uint8, like), "scratch")
    packbits.launch(mask, packed, None, None, True, stream)
    return packed


def _run_reference(
    vq: ArrayView,
    vk: ArrayView,
    vv: ArrayView,
    vout: ArrayView | None,
    vlse: ArrayView | None,
    entry: _Entry,
    views: dict[str, ArrayView],
    is_decode: bool,
    return_lse: bool,
) -> Any:
    extras = {name: array.as_numpy(v) for name, v in views.items()}
    q = array.as_numpy(vq)
    q = q[None] if is_decode else q
    options = entry.options
    k, v = array.as_numpy(vk), array.as_numpy(vv)
    kv_len = k.shape[entry.kv_axis]
    mask = extras.get("custom_mask")
    if "packed_custom_mask" in extras:
        mask = reference.unpack_mask(extras["packed_custom_mask"], q.shape[0], kv_len)
    o, lse = reference.attention(
        q,
        k,
        v,
        causal=options.causal,
        window_left=options.window_left,
        mask=mask,
        logits_soft_cap=options.logits_soft_cap,
        sm_scale=options.sm_scale,
        pos_encoding_mode=entry.problem.pos_encoding,
        rope_scale=options.rope_scale,
        rope_theta=options.rope_theta,
        sinks=extras.get("sinks"),
        scale_q=extras.get("scale_q"),
        scale_k=extras.get("scale_k"),
        scale_v=extras.get("scale_v"),
        kv_layout=entry.checked.kv_layout,
    )
    with np.errstate(over="ignore", invalid="ignore"):
        answer = (o * options.output_scale).astype(entry.dtype_o.numpy)
    answers = [answer[0], lse[0]] if is_decode else [answer, lse]
    answers[1] = answers[1].astype(np.float32)
    results = []
    for target, value in zip((vout, vlse), answers, strict=True):
        if target is None:
            results.append(array.from_numpy(np.ascontiguousarray(value), vq))
        else:
            array.as_numpy(target)[...] = value
            results.append(target.owner)
    return tuple(results) if return_lse else results[0]
