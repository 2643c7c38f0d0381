"""What single-request prefill and decode share: check, look up the launcher, launch.

A call is described by its geometry (dtypes, head counts, strides, options) and its lengths. All
checks that need only the geometry are made once, and their result is kept as an
`Entry`. A call without optional arrays is cached as a whole (call_cache.py): one of equal
signature pays for reading its arrays, comparing their lengths, and the launch.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from .. import array, reference
from ..array import ArrayView
from ..array.match import (
    Dims,
    are_rows_aligned,
    match_array,
    match_contiguous,
    match_output,
    require_contiguous_last,
    require_output,
)
from ..core import dtypes, parse
from ..core.problem import MAX_LENGTH, AttentionProblem
from ..core.records import maker
from ..core.spec import AttentionSpec
from ..errors import ArgumentError, UnsupportedError
from ..launch.attention.single import AttentionLauncher
from ..launch.driver import params, scratch
from . import block_scales, cpu, logits, output_gate
from .block_scales import BlockScales, CheckedBlocks
from .call_cache import Argument, CallCache, Found, after_launch
from .kv_cache import dtype_kv, match_keys, require_kv_dtypes
from .spec import RawOptions, make_spec, require_group
from .workspace import clear_of, require_apart


class Arrays(NamedTuple):
    """The arrays of a request by their roles, as given; None where there is none.

    q      [Hq, D] for decode, else [Lq, Hq, D]
    k, v   tokens of the cache, in the layout that the options name
    custom_mask, packed_custom_mask   the packed one holds if both are given
    blocks       scales of blocks of tokens
    """

    q: Any
    k: Any
    v: Any
    out: Any = None
    lse: Any = None
    sinks: Any = None
    custom_mask: Any = None
    packed_custom_mask: Any = None
    scale_q: Any = None
    scale_k: Any = None
    scale_v: Any = None
    output_gate: Any = None
    blocks: BlockScales | None = None


make_arrays, make_options = maker(Arrays), maker(RawOptions)
_OPTIONAL = Arrays._fields[Arrays._fields.index("sinks") : -1]


@dataclass(slots=True)
class Entry:
    """What calls with the same geometry share."""

    spec: AttentionSpec
    problem: AttentionProblem
    kv_strides: tuple[int, int, int, int]
    kv_axis: int
    is_constant: bool
    launcher: AttentionLauncher | None
    zeros_and_ones: list[int]  # places of scalars to which a bool would be equal


@dataclass(slots=True)
class _Call:
    """Views of the arrays of a call, and what its checks give."""

    q: ArrayView
    k: ArrayView
    v: ArrayView
    out: ArrayView | None
    lse: ArrayView | None
    is_decode: bool
    entry: Entry
    qo_len: int
    kv_len: int
    out_shape: tuple[int, ...]


_MAX_ENTRIES = 4096

_entries: dict[tuple[object, ...], Entry] = {}


@dataclass(frozen=True, slots=True)
class _Checked:
    """What calls of one signature launch, and the limits of their lengths.

    row_shape         extents of the output behind its rows; of a step all of them
    are_keys_aligned  rows of k and v are a multiple of 16 bytes apart
    kv_heads          extents of k and v in front of their tokens, where these are free
    """

    launcher: AttentionLauncher
    max_qo_len: int
    strides: bytes
    row_shape: tuple[int, ...]
    allocate: scratch.Allocate
    are_keys_aligned: bool
    kv_heads: tuple[int, ...]


# By what decides about one, with the plans of lengths that it has seen.
_launchers: dict[tuple[AttentionSpec, AttentionProblem, int], AttentionLauncher] = {}


def _call_cache(row_axis: int | None, kv_axis: int | None) -> CallCache[_Checked]:
    """Of keys and values whose tokens are along `kv_axis`; None: that have any strides, maybe
    beside sinks."""
    return CallCache(
        Argument("q", row_axis),
        Argument("k", kv_axis, is_free=kv_axis is None),
        Argument("v", kv_axis, is_free=kv_axis is None),
        Argument("out", row_axis, is_output=True),
        *((Argument("sinks"),) if kv_axis is None else ()),
    )


# By (is_decode, kv_layout).
_CALLS = {
    (is_decode, kv_layout): _call_cache(None if is_decode else 0, kv_axis)
    for is_decode in (False, True)
    for kv_axis, kv_layout in enumerate(("NHD", "HND"))
}
# Decodes of a cache of heads before tokens that is made anew for each step, one token longer: its
# heads are another number of elements apart each time.
_GROWING = _call_cache(None, None)
# The same of several requests, see `find_step`.
_STEPS = _call_cache(None, None)
_HEADS_FIRST = _CALLS[True, "HND"]
_K, _V, _OUT = 1, 2, 3
_OF_SINKS = functools.partial(params.OPTIONAL.pack, 0, 0)  # no LSE, no mask


def run(
    arrays: Arrays,
    options: RawOptions,
    read: tuple[ArrayView, ...] = (),
    *,
    return_lse: bool,
    is_decode: bool,
    workspace: ArrayView | None = None,
) -> Any:
    """Attention of one request: out, or (out, lse) if `return_lse`.

    read: what the expressions of the options read, in their order.
    workspace: of a wrapper that works on after this call, in which no array may lie.
    """
    q, k, v, out, lse, sinks, mask, packed_mask, scale_q, scale_k, scale_v, gate, blocks = arrays
    calls: CallCache[_Checked] | None = None
    known: tuple[Any, ...] = q, k, v, out
    is_plain = lse is mask is packed_mask is scale_q is scale_k is scale_v is gate is blocks is None
    if is_plain and return_lse is False and not read:
        try:
            calls = _CALLS.get((is_decode, options.kv_layout))
        except TypeError:  # no layout: refused below
            pass
        if calls is _HEADS_FIRST and workspace is None and _is_contiguous_tensor(k):
            calls = _GROWING
        if sinks is not None:
            calls = _GROWING if calls is _GROWING else None
            known = q, k, v, out, sinks
    if calls is not None:
        result = _run_cached(calls, known, options, is_decode, workspace)
        if result is not None:
            return result

    # --- 1. Validate ---
    return_lse = parse.flag(return_lse, "return_lse")
    call = _check_call(arrays, options, is_decode)
    views = _view_optional(arrays, read, call)
    if workspace is not None:
        own = {"q": call.q, "k": call.k, "v": call.v, "out": call.out, "lse": call.lse}
        require_apart(workspace, **own, **views)
    counts, kind = (call.qo_len, call.kv_len), call.q.device.kind
    wants = block_scales.wants_logits(call.entry.spec, return_lse or lse is not None, sinks)
    checked = block_scales.check(blocks, call.entry.spec, counts, 1, kind, wants)
    if checked.views:
        array.same_device(q=call.q, **checked.views)

    # --- 2. Compute on the CPU ---
    if call.q.device.kind == "cpu":
        out, lse = _run_reference(call, views, checked)
        return (out, lse) if return_lse else out

    # --- 3. Launch on the caller's stream ---
    entry = call.entry
    if out is None:
        out = array.empty(call.out_shape, entry.spec.dtype_o, call.q)
        call.out = array.view(out, "out")
    if lse is None and return_lse:
        lse = array.empty(call.out_shape[:-1], dtypes.float32, call.q)
        call.lse = array.view(lse, "lse")
    if call.qo_len:
        strides = _launch(call, views, checked)
        if calls is not None and entry.is_constant:
            _insert(calls, known, options, call, strides)
    out = array.deliver(out, call.q)
    return (out, array.deliver(lse, call.q)) if return_lse else out


def _is_contiguous_tensor(x: Any) -> bool:
    """Whether it is torch's and contiguous."""
    ask = getattr(x, "is_contiguous", None)
    if ask is None:
        return False
    try:
        return bool(ask())
    except Exception:  # as in a lookup: the checks say what is wrong
        return False


def run_unmasked(q: Any, k: Any, v: Any, kv_layout: str, sm_scale: float) -> tuple[Any, Any]:
    """(out, lse) of rows that see all keys."""
    options = RawOptions(kv_layout=kv_layout, sm_scale=sm_scale)
    return run(Arrays(q, k, v), options, return_lse=True, is_decode=False)


def _run_cached(
    calls: CallCache[_Checked],
    arrays: tuple[Any, ...],
    options: RawOptions,
    is_decode: bool,
    workspace: ArrayView | None,
) -> Any:
    """The output of a call that is in the cache and whose lengths fit, else None."""
    hit = calls.lookup(arrays, options)
    if hit is None:
        return None
    cached, addresses = hit
    call = cached.call
    checked = call.checked
    strides, optional = checked.strides, params.NO_OPTIONAL
    is_growing = calls is _GROWING or calls is _STEPS
    if is_growing:
        if cached.prepared is None:
            cached.prepared = _keys_of(cached)
        kv_len, v_len, strides = cached.prepared
        num_rows = num_out_rows = 0
    else:
        num_rows, kv_len, v_len, num_out_rows = cached.lengths
    qo_len = 1 if is_decode else num_rows
    if v_len != kv_len or not (0 < kv_len <= MAX_LENGTH and 0 < qo_len <= checked.max_qo_len):
        return None
    if call.outputs and (num_out_rows != num_rows or call.overlaps(addresses, cached.sizes)):
        return None
    if workspace is not None and _meets(workspace, cached, addresses):
        return None
    out = arrays[_OUT]
    if out is None:
        if call.make_like is not None:
            out = call.make_like(arrays[0])
        else:
            row_shape = checked.row_shape
            out = call.make_out(row_shape if is_decode else (qo_len, *row_shape))
        addresses[_OUT] = call.address(out)
    if is_growing and (sinks := addresses.pop()):
        optional = _OF_SINKS(sinks, *(0,) * 4, *params.NOTHING_MORE)
    q_ptr, k_ptr, v_ptr, o_ptr = addresses
    checked.launcher.launch(
        q_ptr,
        k_ptr,
        v_ptr,
        o_ptr,
        optional,
        strides,
        0,  # no mask
        qo_len,
        kv_len,
        call.current_stream(),
        checked.allocate,
    )
    return out


def _meets(workspace: ArrayView, cached: Found[_Checked], addresses: list[int]) -> bool:
    """Whether an array may have bytes in the workspace."""
    memory = workspace.ptr, workspace.shape, workspace.dtype
    bounds = cached.prepared
    if bounds is None or bounds[0] != memory:
        bounds = cached.prepared = memory, clear_of(workspace, cached.sizes)
    q_ptr, k_ptr, v_ptr, o_ptr = addresses
    end, q_low, k_low, v_low, o_low = bounds[1]
    return (q_low < q_ptr < end or k_low < k_ptr < end) or (
        v_low < v_ptr < end or o_low < o_ptr < end
    )


def _keys_of(cached: Found[_Checked]) -> tuple[int, int, bytes]:
    """(tokens of k, of v, strides for the kernels) of keys with any strides; no tokens where they
    are not like those of the call that passed the checks."""
    checked = cached.call.checked
    spec = checked.launcher.spec
    k_strides, v_strides = cached.strides(_K), cached.strides(_V)
    lengths: list[int] = []
    pairs: list[int] = []
    for index, own, head_dim in (
        (_K, k_strides, spec.head_dim_qk),
        (_V, v_strides, spec.head_dim_vo),
    ):
        *heads, length, columns = cached.shapes[index]
        step = _step_of_heads(heads, own)
        fits = (*heads,) == checked.kv_heads and columns == head_dim and step is not None
        lengths.append(length if fits else 0)
        pairs += own[-2], step or 0
    rows = [(k_strides[:-1], spec.dtype_k), (v_strides[:-1], spec.dtype_kv)]
    steps = *k_strides, *v_strides
    if (
        min(steps) < 0
        or k_strides[-1] != 1
        or v_strides[-1] != 1
        or are_rows_aligned(0, rows) != checked.are_keys_aligned
    ):
        return 0, 0, b""
    strides = [*params.STRIDES.unpack(checked.strides)]
    strides[2:6] = pairs
    return lengths[0], lengths[1], params.STRIDES.pack(*strides)


def _step_of_heads(shape: list[int], strides: tuple[int, ...]) -> int | None:
    """Elements between heads that one axis has, or two of [requests, heads]; None where they are
    not equally far apart."""
    if len(shape) == 1 or shape[1] == 1:
        return strides[0]
    is_even = shape[0] == 1 or strides[0] == shape[1] * strides[1]
    return strides[1] if is_even else None


# --- steps of several requests ---


def step_options(window_left: int, scale: float | None, soft_cap: float | None) -> RawOptions:
    """The options of a step, which is a decode whose keys have heads before tokens."""
    return make_options(
        kv_layout="HND", window_left=window_left, sm_scale=scale, logits_soft_cap=soft_cap
    )


def find_step(q: Any, k: Any, v: Any, options: RawOptions) -> Any:
    """A row of each of several requests over equally many keys, of heads that are equally far
    apart, is one row of all these heads.

    q [b, heads, 1, head_dim], k and v [b, kv_heads, kv_len, head_dim]. Returns out [b, 1, heads,
    head_dim of v], None for a call that `keep_step` did not get.
    """
    return _run_cached(_STEPS, (q, k, v, None), options, is_decode=True, workspace=None)


@after_launch
def keep_step(
    arrays: tuple[Any, Any, Any], rows: tuple[Any, Any, Any], options: RawOptions
) -> None:
    """Let `find_step` find a call that `run` took as one row: of `rows`, which are views of q, k
    and v of `arrays`."""
    hit = _GROWING.lookup((*rows, None), options)
    if hit is None:
        return
    q, k, _ = arrays
    checked = hit[0].call.checked
    spec = checked.launcher.spec
    shape = q.shape[0], 1, q.shape[1], spec.head_dim_vo
    checked = replace(checked, row_shape=shape, kv_heads=(*k.shape[:2],))
    like = array.view(q, "q")
    _STEPS.insert((*arrays, None), options, checked, like, spec.dtype_o, shape, None)


@after_launch
def _insert(
    calls: CallCache[_Checked],
    arrays: tuple[Any, ...],
    options: RawOptions,
    call: _Call,
    strides: bytes,
) -> None:
    """Cache a call that was launched; arrays as the caller passed them, None for a new output."""
    entry, out_shape = call.entry, call.out_shape
    assert entry.launcher is not None
    max_qo_len = MAX_LENGTH // entry.spec.group_size
    allocate = scratch.allocator(call.q)
    rows = [(v.strides[:-1], v.dtype) for v in (call.k, call.v)]
    are_aligned = are_rows_aligned(0, rows)
    kv_heads = (entry.spec.num_kv_heads,)
    checked = _Checked(
        entry.launcher, max_qo_len, strides, out_shape[-2:], allocate, are_aligned, kv_heads
    )
    own_shape = out_shape if arrays[_OUT] is None else None
    cached = calls.insert(arrays, options, checked, call.q, entry.spec.dtype_o, own_shape, None)
    if cached is not None and calls is _GROWING:
        cached.prepared = call.kv_len, call.kv_len, strides


def _check_call(arrays: Arrays, options: RawOptions, is_decode: bool) -> _Call:
    """The call, checked but for its optional arrays. Raises ArgumentError, UnsupportedError."""
    view, out, lse = array.view, arrays.out, arrays.lse
    vq, vk, vv = view(arrays.q, "q"), view(arrays.k, "k"), view(arrays.v, "v")
    vout = None if out is None else view(out, "out")
    vlse = None if lse is None else view(lse, "lse")
    has_mask = not (arrays.custom_mask is arrays.packed_custom_mask is None)
    has_scales = not (arrays.scale_q is arrays.scale_k is None)
    entry = _find_entry(vq, vk, vv, vout, options, has_mask, has_scales, is_decode)
    qo_len = 1 if is_decode else vq.shape[0]
    kv_len, out_shape = vk.shape[entry.kv_axis], (*vq.shape[:-1], entry.spec.head_dim_vo)
    call = _Call(vq, vk, vv, vout, vlse, is_decode, entry, qo_len, kv_len, out_shape)
    _check_lengths(call)
    return call


def _find_entry(
    vq: ArrayView,
    vk: ArrayView,
    vv: ArrayView,
    vout: ArrayView | None,
    options: RawOptions,
    has_mask: bool,
    has_scales: bool,
    is_decode: bool,
) -> Entry:
    """What an earlier call of equal geometry was checked to be, or a new entry."""
    pointers = vq.ptr | vk.ptr | vv.ptr | (0 if vout is None else vout.ptr)
    # Everything of k and v but the length, which changes from call to call.
    layout = parse.kv_layout(options.kv_layout)
    kept = slice(None, None, 2) if layout == "HND" else slice(1, None)
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
    except TypeError:  # an option that cannot be hashed
        entry, key = None, ()
    if entry is not None and any(type(options[i]) in parse.BOOLS for i in entry.zeros_and_ones):
        entry = None
    if entry is None:
        entry = _make_entry(vq, vk, vv, vout, options, pointers, has_mask, has_scales, is_decode)
        if key and entry.is_constant:
            if len(_entries) >= _MAX_ENTRIES:
                _entries.clear()
            _entries[key] = entry
    return entry


def _make_entry(
    vq: ArrayView,
    vk: ArrayView,
    vv: ArrayView,
    vout: ArrayView | None,
    options: RawOptions,
    pointers: int,
    has_mask: bool,
    has_scales: bool,
    is_decode: bool,
) -> Entry:
    layout, dims = options.kv_layout, Dims()
    rows = "num_qo_heads head_dim_qk"
    match_contiguous(vq, rows if is_decode else f"qo_len {rows}", dims, "q")
    match_keys(vk, "kv_len", "head_dim_qk", layout, dims, "k")
    match_keys(vv, "kv_len", "head_dim_vo", layout, dims, "v")
    require_kv_dtypes(vk, vv, ("k", "v"))
    heads = dims["num_qo_heads"], dims["num_kv_heads"]
    require_group(*heads, "q, k", layout, dims["kv_len"])
    spec = make_spec(
        options,
        (*heads, dims["head_dim_qk"], dims["head_dim_vo"]),
        vq.dtype,
        dtype_kv(vq, vk, vv),
        mask_form="whole" if has_mask else None,
        o_name="o_dtype",
    )
    axis = 0 if layout == "NHD" else 1
    kv_strides = (vk.strides[axis], vk.strides[1 - axis], vv.strides[axis], vv.strides[1 - axis])
    # Rows start on 16-byte boundaries, however many there are.
    rows_o = (
        ((spec.head_dim_vo,), spec.dtype_o) if vout is None else (vout.strides[:-1], vout.dtype)
    )
    strides = [(v.strides[:-1], v.dtype) for v in (vq, vk, vv)]
    aligned = are_rows_aligned(pointers, [*strides, rows_o])
    problem = spec.problem(aligned=aligned, prescale_logits=has_scales)
    is_cpu, launcher = vq.device.kind == "cpu", None
    problem.check_supported(is_cpu)
    if not is_cpu:
        launcher = _launcher_of(spec, problem, vq.device.index)
    # An empty array may have any strides.
    is_constant = options.is_constant and not any(0 in v.shape for v in (vq, vk, vv))
    zeros_and_ones = parse.zeros_and_ones(options) if is_constant else []
    return Entry(spec, problem, kv_strides, axis, is_constant, launcher, zeros_and_ones)


def _launcher_of(
    spec: AttentionSpec, problem: AttentionProblem, device_index: int
) -> AttentionLauncher:
    """One for all geometries of a problem: strides are no part of a plan."""
    key = spec, problem, device_index
    try:
        launcher = _launchers.get(key)
    except TypeError:  # an option that cannot be hashed
        return AttentionLauncher(spec, problem, device_index)
    if launcher is None:
        if len(_launchers) >= _MAX_ENTRIES:
            _launchers.clear()
        launcher = _launchers[key] = AttentionLauncher(spec, problem, device_index)
    return launcher


def _check_lengths(call: _Call) -> None:
    """The checks that depend on lengths and addresses."""
    vq, vk, vv, spec = call.q, call.k, call.v, call.entry.spec
    if vk.device != vq.device or vv.device != vq.device:
        array.same_device(q=vq, k=vk, v=vv)
    v_len = vv.shape[call.entry.kv_axis]
    if v_len != call.kv_len:
        raise ArgumentError(f"v: holds {v_len} tokens but k holds {call.kv_len}; wanted the same")
    if call.kv_len > MAX_LENGTH or call.qo_len * spec.group_size > MAX_LENGTH:
        raise UnsupportedError(
            f"q, k: {call.qo_len} query tokens over {call.kv_len} keys; at most {MAX_LENGTH} keys "
            "and query rows of one KV head are supported"
        )
    if call.out is None and call.lse is None:
        return
    array.same_device(q=vq, out=call.out, lse=call.lse)
    if call.out is not None:
        require_contiguous_last(call.out, "out")
    inputs = {"q": vq, "k": vk, "v": vv}
    match_output(call.out, call.out_shape, spec.dtype_o, "out", **inputs, lse=call.lse)
    match_output(call.lse, call.out_shape[:-1], dtypes.float32, "lse", **inputs)


def _view_optional(
    arrays: Arrays, read: tuple[ArrayView, ...], call: _Call
) -> dict[str, ArrayView]:
    """Views of the optional arrays, checked, and of what expressions read; absent ones are left
    out."""
    optional = {name: x for name in _OPTIONAL if (x := getattr(arrays, name)) is not None}
    if not optional and not read:
        return {}
    gates = optional.pop(output_gate.NAME, None)
    if arrays.packed_custom_mask is not None:
        optional.pop("custom_mask", None)
    views = {name: array.view(x, name) for name, x in optional.items()}
    qo_len, kv_len, spec = call.qo_len, call.kv_len, call.entry.spec
    expressed = {}
    if spec.logits is not None:
        expressed = logits.check_arrays(spec.logits, read, spec, 1, qo_len, kv_len, qo_len)
    array.same_device(q=call.q, **views, **expressed)
    dims = {
        "qo_len": qo_len,
        "kv_len": kv_len,
        "num_qo_heads": spec.num_qo_heads,
        "num_kv_heads": spec.num_kv_heads,
    }
    for name, v in views.items():
        if name == "custom_mask":
            if v.shape == (qo_len * kv_len,):  # flattened, row by row
                (step,) = v.strides
                v = array.as_strided(v, (qo_len, kv_len), (kv_len * step, step))
                views[name] = v
            match_array(v, "qo_len kv_len", dtypes.bool_, name, dims)
        elif name == "packed_custom_mask":
            match_array(v, "n", dtypes.uint8, name)
            needed = -(-qo_len * kv_len // 8)
            if v.shape[0] < needed:
                raise ArgumentError(
                    f"packed_custom_mask: holds {v.shape[0]} bytes; wanted {needed} for {qo_len} x "
                    f"{kv_len} bits, packed with packbits(mask.flatten(), bitorder='little')"
                )
        else:
            heads = "num_qo_heads" if name in ("sinks", "scale_q") else "num_kv_heads"
            match_array(v, heads, dtypes.float32, name, dims)
    gate = output_gate.view_gate(gates, call.out_shape[:-2], spec)
    if gate is not None:
        array.same_device(q=call.q, output_gate=gate)
        views[output_gate.NAME] = gate
    for target, name in ((call.out, "out"), (call.lse, "lse")):
        if target is not None:
            require_output(target, name, **views, **expressed)
    return views | expressed


def _launch(call: _Call, extras: dict[str, ArrayView], blocks: CheckedBlocks) -> bytes:
    """Enqueue the call; returns its strides as the kernels take them."""
    vq, vk, vv, vout, vlse, entry = call.q, call.k, call.v, call.out, call.lse, call.entry
    assert vout is not None and entry.launcher is not None
    launcher, gate = entry.launcher, extras.get(output_gate.NAME)
    read = logits.pack(entry.spec, extras)
    if gate is not None or blocks.views:
        problem = output_gate.gated(entry.problem, gate)
        if blocks.views:
            problem, read = block_scales.scaled(problem), blocks.pack()
        launcher = _launcher_of(entry.spec, problem, vq.device.index)
    stream = array.current_stream(vq)
    inputs = (vk, vv, *extras.values(), *blocks.views.values())
    array.acquire(vq, *inputs)
    mask = extras.get("packed_custom_mask")
    if entry.spec.mask_form == "whole" and mask is None:
        mask = _pack_mask(extras["custom_mask"], vq, stream)
    optional = (vlse, mask, *(extras.get(n) for n in ("sinks", "scale_q", "scale_k", "scale_v")))
    token = 0 if call.is_decode else 1
    strides = params.STRIDES.pack(
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
    launcher.launch(
        vq.ptr,
        vk.ptr,
        vv.ptr,
        vout.ptr,
        params.OPTIONAL.pack(
            *(0 if v is None else v.ptr for v in optional),
            *(0, params.NO_STEPS, output_gate.pack(read, gate)),
        ),
        strides,
        0 if mask is None else mask.shape[0],
        call.qo_len,
        call.kv_len,
        stream,
        scratch.allocator(vq),
    )
    array.release(vq, vq, vout, *inputs)
    return strides


def _pack_mask(mask: ArrayView, like: ArrayView, stream: int) -> ArrayView:
    from ..launch.ops import packbits

    num_bytes = -(-mask.shape[0] * mask.shape[1] // 8)
    packed = array.view(array.empty((num_bytes,), dtypes.uint8, like), "scratch")
    packbits.launch(mask, packed, None, None, True, stream)
    return packed


def _run_reference(
    call: _Call, views: dict[str, ArrayView], blocks: CheckedBlocks
) -> tuple[Any, Any]:
    spec, q = call.entry.spec, array.as_numpy(call.q)
    q = q[None] if call.is_decode else q
    k, v = (cpu.tokens_first(x, spec.kv_layout) for x in (call.k, call.v))
    extras = dict(views)
    bools, bits = extras.pop("custom_mask", None), extras.pop("packed_custom_mask", None)
    mask = None if bools is None else array.as_numpy(bools)
    if bits is not None:
        mask = reference.unpack_mask(array.as_numpy(bits), len(q), len(k))
    arrays = logits.pop_arrays(spec, extras)
    options = blocks.of_request(0, (0, len(q)), (0, len(k)))
    request = cpu.Request(slice(len(q)), k, v, mask, options=options)
    o, lse = cpu.attend(spec, q, [request], extras, arrays)
    if call.is_decode:
        o, lse = o[0], lse[0]
    lse = cpu.float32_lse(lse)
    return cpu.deliver(o, call.out, call.q), cpu.deliver(lse, call.lse, call.q)
