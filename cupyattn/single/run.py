"""What single-request prefill and decode share: check, look up the launcher, launch.

A call is described by its geometry (dtypes, head counts, strides, options) and its lengths. All
checks that need only the geometry are made once (_geometry.py); the result, an `Entry`, is
remembered, so that a call in a decoding loop pays for reading its arrays, checking their lengths,
and the launch.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from .. import array, reference
from ..array import ArrayView
from ..array.match import Dims, match, require_contiguous_last, require_dtype, require_output
from ..core import dtypes
from ..errors import ArgumentError, UnsupportedError
from ..inputs.limits import MAX_LENGTH
from ..launch.driver import params, scratch
from .geometry import NO_EXTRAS, Entry, Extras, Options, is_reusable, make_entry
from .repeat import remember, repeat

_MAX_ENTRIES = 4096

_entries: dict[tuple[object, ...], Entry] = {}


def run(
    q: Any,
    k: Any,
    v: Any,
    scalars: tuple[Any, ...],
    extras: Extras,
    out: Any,
    lse: Any,
    return_lse: bool,
    is_decode: bool,
) -> Any:
    """Attention of one request; q is [Hq, D] for decode, else [Lq, Hq, D].

    `scalars` are the fields of Options. Returns out, or (out, lse) if `return_lse`.
    """
    is_plain = extras is NO_EXTRAS and lse is None and not return_lse
    if is_plain:
        answer = repeat(q, k, v, out, scalars, is_decode)
        if answer is not None:
            return answer

    # --- 1. Validate ---
    options = Options(*scalars)
    view = array.view
    vq, vk, vv = view(q, "q"), view(k, "k"), view(v, "v")
    vout = None if out is None else view(out, "out")
    vlse = None if lse is None else view(lse, "lse")
    pointers = vq.ptr | vk.ptr | vv.ptr | (0 if vout is None else vout.ptr)
    has_mask = extras.custom_mask is not None or extras.packed_custom_mask is not None
    has_scales = not (extras.scale_q is extras.scale_k is None)
    # Everything of k and v but the length, which changes from call to call.
    kept = slice(None, None, 2) if options.kv_layout == "HND" else slice(1, None)
    key: tuple[object, ...] = (
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
        entry = make_entry(vq, vk, vv, vout, options, pointers, has_mask, has_scales, is_decode)
        if key and is_reusable(options, vq, vk, vv):
            if len(_entries) >= _MAX_ENTRIES:
                _entries.clear()
            _entries[key] = entry
    qo_len = 1 if is_decode else vq.shape[0]
    kv_len = vk.shape[entry.kv_axis]
    others = (vk, vv, vout, vlse)
    _check_call(vq, others, entry, qo_len, kv_len, is_decode)
    views = _view_extras(extras, vq, vout, vlse, entry, qo_len, kv_len)

    # --- 2. Answer on the CPU ---
    if vq.device.kind == "cpu":
        return _run_reference(vq, vk, vv, vout, vlse, entry, views, is_decode, return_lse)

    # --- 3. Launch on the caller's stream ---
    shape_o = (*vq.shape[:-1], entry.problem.head_dim_vo)
    given_out = out
    if vout is None:
        out = array.empty(shape_o, entry.dtype_o, vq)
        vout = view(out, "out")
    if vlse is None and return_lse:
        lse = array.empty(shape_o[:-1], dtypes.float32, vq)
        vlse = view(lse, "lse")
    if qo_len:
        strides = _pack_strides(vq, vout, vlse, entry, is_decode)
        _launch(vq, vk, vv, vout, vlse, entry, views, strides, qo_len, kv_len)
        if is_plain:
            given = (vq, vk, vv, vout)
            remember(q, k, v, given_out, scalars, is_decode, entry, given, strides)
    out = array.deliver(out, vq)
    return (out, array.deliver(lse, vq)) if return_lse else out


def run_unmasked(q: Any, k: Any, v: Any, kv_layout: str, sm_scale: float) -> tuple[Any, Any]:
    """(out, lse) of rows that see all keys."""
    scalars = (kv_layout, False, "NONE", -1, None, sm_scale, *[None] * 6)
    return run(q, k, v, scalars, NO_EXTRAS, None, None, return_lse=True, is_decode=False)


def _check_call(
    vq: ArrayView,
    others: tuple[ArrayView | None, ...],
    entry: Entry,
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
    if kv_len > MAX_LENGTH or qo_len * (entry.num_qo_heads // entry.num_kv_heads) > MAX_LENGTH:
        raise UnsupportedError(
            f"q, k: {qo_len} query tokens over {kv_len} keys; at most {MAX_LENGTH} keys and query "
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
    extras: Extras,
    vq: ArrayView,
    vout: ArrayView | None,
    vlse: ArrayView | None,
    entry: Entry,
    qo_len: int,
    kv_len: int,
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
    for target, name in ((vout, "out"), (vlse, "lse")):
        if target is not None:
            require_output(target, name, **views)
    return views


def _launch(
    vq: ArrayView,
    vk: ArrayView,
    vv: ArrayView,
    vout: ArrayView,
    vlse: ArrayView | None,
    entry: Entry,
    views: dict[str, ArrayView],
    strides: bytes,
    qo_len: int,
    kv_len: int,
) -> None:
    stream = array.current_stream(vq)
    inputs = (vk, vv, *views.values())
    array.acquire(vq, *inputs)
    mask = views.get("packed_custom_mask")
    if entry.problem.custom_mask and mask is None:
        mask = _pack_mask(views["custom_mask"], vq, stream)
    optional = (vlse, mask, *(views.get(n) for n in ("sinks", "scale_q", "scale_k", "scale_v")))
    assert entry.launcher is not None
    entry.launcher.launch(
        vq.ptr,
        vk.ptr,
        vv.ptr,
        vout.ptr,
        params.OPTIONAL.pack(*(0 if v is None else v.ptr for v in optional)),
        strides,
        0 if mask is None else mask.shape[0],
        qo_len,
        kv_len,
        stream,
        scratch.allocator(vq),
    )
    array.release(vq, vq, vout, *inputs)


def _pack_strides(
    vq: ArrayView, vout: ArrayView, vlse: ArrayView | None, entry: Entry, is_decode: bool
) -> bytes:
    token = 0 if is_decode else 1
    return params.STRIDES.pack(
        vq.strides[0] * token,
        vq.strides[-2],
        *entry.kv_strides,
        vout.strides[0] * token,
        vout.strides[-2],
        0 if vlse is None else vlse.strides[0] * token,
        0 if vlse is None else vlse.strides[-1],
        0,
        0,
    )


def _pack_mask(mask: ArrayView, like: ArrayView, stream: int) -> ArrayView:
    from ..launch.ops import packbits

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
    entry: Entry,
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
