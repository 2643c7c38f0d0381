"""The calls behind cascade.py's merge functions: checks, then a launch, or the reference."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from .. import array, reference
from ..array import ArrayView
from ..array.match import (
    Dims,
    match,
    match_array,
    match_output,
    require_contiguous_last,
    require_dtype,
    require_output,
    require_same_dtype,
)
from ..core import dtypes, parse
from ..core.records import maker
from ..errors import ArgumentError, UnsupportedError
from ..launch.driver.enqueue import cuda
from ..launch.ops.merge_states import MAX_COUNT, Merge, States, prepare
from .call_cache import Argument, CallCache, Found
from .workspace import int32_on_device

_FLOATS = (dtypes.float32, dtypes.float16, dtypes.bfloat16)
_OUT_DTYPES = (*_FLOATS, dtypes.float8_e4m3fn, dtypes.float8_e5m2)


class Arrays(NamedTuple):
    """The arrays of a call, in the order that the kernel has their addresses."""

    v_a: Any
    v_b: Any = None
    s_a: Any = None
    s_b: Any = None
    out: Any = None
    lse: Any = None
    indptr: Any = None
    mask: Any = None
    out_scale: Any = None


make_arrays = maker(Arrays)


class Options(NamedTuple):
    """All else that calls differ by, as given; dims of Form."""

    dims: str
    lse_base_on_e: Any
    output_scale: Any


@dataclass(frozen=True, slots=True)
class _Checked:
    """What calls of one signature share: the launch of the first of them, the heads and head dim of
    its output, and how many states of a row are beside each other in one array."""

    merge: Merge
    row_shape: tuple[int, int]
    num_states: int


class _Sized(NamedTuple):
    """The launch of calls of some lengths, and shapes of its outputs."""

    merge: Merge
    out_shape: tuple[int, int, int]
    lse_shape: tuple[int, int]


def _call_cache(*outputs: str) -> CallCache[_Checked]:
    return CallCache(
        *(
            Argument(name, None if name == "out_scale" else 0, is_output=name in outputs)
            for name in Arrays._fields
        )
    )


# By whether the call is in place.
_CALLS = _call_cache("out", "lse"), _call_cache("v_a", "s_a")
# Indices of outputs among addresses, in place and else.
_V_A, _S_A, _OUT, _LSE, _INDPTR = map(Arrays._fields.index, ("v_a", "s_a", "out", "lse", "indptr"))


class Form(NamedTuple):
    """A function: its arguments' names, and their dimensions before those of a head.

    An fp8 `out` holds the output divided by output_scale: `out_scale`, or a number.
    """

    names: Arrays
    dims: str
    is_in_place: bool = False


_SCALE = "output_scale"
_OUTPUTS = Arrays(v_a="v", s_a="s", out="out", lse="lse", out_scale=_SCALE)
PAIR = Form(_OUTPUTS._replace(v_a="v_a", v_b="v_b", s_a="s_a", s_b="s_b"), "n")
IN_PLACE = Form(Arrays("v", "v_other", "s", "s_other", mask="mask"), "n", is_in_place=True)
STATES = Form(_OUTPUTS, "n m")
SEGMENTS = Form(_OUTPUTS._replace(indptr="indptr"), "num_states")


def run(form: Form, arrays: Arrays, lse_base_on_e: Any, output_scale: Any = None) -> Any:
    """(v, s) of a call; in place two Nones, but for JAX arrays (v, s) again, since they cannot be
    written. output_scale: see Form."""
    if hasattr(output_scale, "shape"):
        arrays, output_scale = arrays._replace(out_scale=output_scale), None
    options = _make_options(form.dims, lse_base_on_e, output_scale)
    result = _run_cached(form, arrays, options)
    if result is not None:
        return result

    # --- 1. Validate ---
    if form.is_in_place:
        v, s = array.view(arrays.v_a, form.names.v_a), array.view(arrays.s_a, form.names.s_a)
        if "jax" in (v.framework, s.framework):
            return _run_on_copies(form, arrays, v, s, lse_base_on_e)
    options = options._replace(lse_base_on_e=parse.flag(lse_base_on_e, "lse_base_on_e"))
    views = Arrays._make(
        None if x is None and name not in _REQUIRED else array.view(x, name)
        for x, name in zip(arrays, form.names, strict=True)
    )
    n, dims = _check_inputs(form, views)
    scale = _check_scale(views, output_scale)
    _check_outputs(form, views, (n, dims["H"], dims["D"]))
    _check_size(form, views, (n, dims["H"], dims["D"]))

    # --- 2. Compute on the CPU ---
    if views.v_a.device.kind == "cpu":
        return _run_reference(form, views, options.lse_base_on_e, scale)

    # --- 3. Launch on the caller's stream ---
    return _run_on_gpu(form, arrays, views, (n, dims["H"], dims["D"]), options, scale)


def _run_on_copies(
    form: Form, arrays: Arrays, v: ArrayView, s: ArrayView, lse_base_on_e: Any
) -> tuple[Any, ...]:
    """What a call in place makes of v and s whose JAX arrays are copied first."""
    copies = [array.writable_copy(x) if x.framework == "jax" else x.owner for x in (v, s)]
    run(form, arrays._replace(v_a=copies[0], s_a=copies[1]), lse_base_on_e)
    return array.deliver(copies[0], v), array.deliver(copies[1], s)


def _run_cached(form: Form, arrays: Arrays, options: Options) -> Any:
    """(v, s) of a call that is in the cache, in place two Nones; else None."""
    hit = _CALLS[form.is_in_place].lookup(arrays, options)
    if hit is None:
        return None
    cached, addresses = hit
    call = cached.call
    if call.outputs and call.overlaps(addresses, cached.sizes):
        return None
    sized, out, lse = cached.prepared or _sized(cached), arrays.out, arrays.lse
    if sized is None:
        return None
    if form.is_in_place:
        addresses[_OUT], addresses[_LSE] = addresses[_V_A], addresses[_S_A]
    else:
        if out is None:
            out = call.make_out(sized.out_shape)
            addresses[_OUT] = call.address(out)
        if lse is None:
            lse = call.make_lse(sized.lse_shape)
            addresses[_LSE] = call.address(lse)
    sized.merge.enqueue(call.current_stream(), addresses)
    return out, lse


def _sized(cached: Found[_Checked]) -> _Sized | None:
    """What calls of these lengths launch; None if they do not fit each other."""
    checked, lengths = cached.call.checked, cached.lengths
    num_heads, head_dim = checked.row_shape
    n, num_states = lengths[_V_A], checked.num_states
    wanted = dict.fromkeys(range(len(lengths)), n)
    if _INDPTR < len(cached.shapes) and cached.shapes[_INDPTR] is not None:
        n, num_states = lengths[_INDPTR] - 1, lengths[_V_A]
        wanted = dict.fromkeys(wanted, n) | {_INDPTR: n + 1, _V_A: num_states, _S_A: num_states}
    if min(n, num_states) <= 0 or n * num_heads > MAX_COUNT:
        return None
    if any(lengths[index] != wanted[index] for index, _ in cached.call.axes):
        return None
    merge = checked.merge.of_lengths(n * num_heads, num_states)
    cached.prepared = _Sized(merge, (n, num_heads, head_dim), (n, num_heads))
    return cached.prepared


_make_options = maker(Options)
_REQUIRED = (
    *("v_a", "v_b", "s_a", "s_b", "v", "s", "v_other", "s_other", "indptr"),
    *("prefix_output", "suffix_output"),
)


def _check_inputs(form: Form, views: Arrays) -> tuple[int, Dims]:
    """The number of rows n, and the other extents."""
    names, dims = form.names, Dims()
    for v, name in ((views.v_a, names.v_a), (views.v_b, names.v_b)):
        if v is not None:
            match_array(v, f"{form.dims} H D", _FLOATS, name, dims)
    for s, name in ((views.s_a, names.s_a), (views.s_b, names.s_b)):
        if s is not None:
            match(s, f"{form.dims} H", dims, name)
            # In place a cast s would be updated in place of the caller's.
            require_dtype(s, dtypes.float32 if form.is_in_place else _FLOATS, name)
    for a, b in (("v_a", "v_b"), ("s_a", "s_b")):
        first, second = getattr(views, a), getattr(views, b)
        if second is not None:
            require_same_dtype(second, getattr(names, b), first, getattr(names, a))
    if dims["D"] == 0:
        raise ArgumentError(f"{names.v_a}: the head dim is 0; wanted 1 or more")
    inputs = {x: v for x, v in zip(names, views, strict=True) if x is not None}
    device = array.same_device(**inputs)
    if views.mask is not None:
        match_array(views.mask, "n", (dtypes.bool_, dtypes.uint8), "mask", dims)
    if views.indptr is None:
        return dims["n"], dims
    match_array(views.indptr, "offsets", (dtypes.int32, dtypes.int64), "indptr", dims)
    if dims["offsets"] > MAX_COUNT:
        raise UnsupportedError(f"indptr: holds {dims['offsets']} offsets; at most {MAX_COUNT}")
    if device.kind == "cpu" or cuda().is_debugging:
        offsets = array.to_host(views.indptr).astype(np.int64)
        if (np.diff(offsets, prepend=0, append=dims["num_states"]) < 0).any():
            raise ArgumentError(
                "indptr: wanted offsets that never fall, within the "
                f"{dims['num_states']} states of v"
            )
    if dims["offsets"] == 0:
        raise ArgumentError("indptr: has no offsets; wanted n + 1 of them for n rows")
    return dims["offsets"] - 1, dims


def _check_outputs(form: Form, views: Arrays, shape: tuple[int, int, int]) -> None:
    names = form.names
    others = {x: v for x, v in zip(names, views, strict=True) if x is not None}
    if form.is_in_place:
        for name in (names.v_a, names.s_a):
            require_output(others.pop(name), name, **others)
        return
    out, lse = others.pop(names.out), others.pop(names.lse)
    match_output(lse, shape[:2], dtypes.float32, names.lse, **others)
    if out is not None:
        require_contiguous_last(out, names.out)
        match_output(out, shape, _OUT_DTYPES, names.out, **others, **{names.lse: lse})


def _check_scale(views: Arrays, output_scale: Any) -> float:
    """The number that an fp8 `out` is divided by, besides the one in an array."""
    if output_scale is None and views.out_scale is None:
        return 1.0
    if views.out is None or not views.out.dtype.is_fp8:
        raise ArgumentError(
            f"{_SCALE}: belongs to an fp8 out, and out is "
            f"{'None' if views.out is None else views.out.dtype}; leave it out, or pass such an out"
        )
    if views.out_scale is None:
        return parse.positive(output_scale, _SCALE, 1.0)
    require_dtype(views.out_scale, dtypes.float32, _SCALE)
    if math.prod(views.out_scale.shape) != 1:
        raise ArgumentError(
            f"{_SCALE}: shape is {list(views.out_scale.shape)}; wanted a number, or an array of "
            "one element"
        )
    return 1.0


def _check_size(form: Form, views: Arrays, shape: tuple[int, int, int]) -> None:
    per_row = 0 if views.v_b is not None or views.indptr is not None else views.v_a.shape[1]
    if max(shape[0] * shape[1], per_row, shape[2]) > MAX_COUNT:
        raise UnsupportedError(
            f"{form.names.v_a}: {shape[0]} x {shape[1]} rows of {shape[2]} elements and {per_row} "
            f"states; a call takes up to {MAX_COUNT} of each; merge parts of the rows"
        )


def _run_on_gpu(
    form: Form,
    arrays: Arrays,
    views: Arrays,
    shape: tuple[int, int, int],
    options: Options,
    scale: float,
) -> Any:
    v_a, v_b, indptr = views.v_a, views.v_b, views.indptr
    vout, vlse = (v_a, views.s_a) if form.is_in_place else (views.out, views.lse)
    num_states = 2 if v_b is not None else v_a.shape[1 if indptr is None else 0]
    if indptr is not None:
        indptr = int32_on_device(indptr, "indptr")
    out = array.empty(shape, v_a.dtype, v_a) if vout is None else vout.owner
    lse = array.empty(shape[:2], dtypes.float32, v_a) if vlse is None else vlse.owner
    if 0 not in shape:
        vout = array.view(out, "out") if vout is None else vout
        vlse = array.view(lse, "lse") if vlse is None else vlse
        merge = prepare(
            _states(form, v_a, views.s_a),
            None if v_b is None else _states(form, v_b, views.s_b),
            vout,
            vlse,
            num_states,
            has_offsets=indptr is not None,
            base_on_e=options.lse_base_on_e,
            out_factor=1.0 / scale,
        )
        read = views._replace(out=vout, lse=vlse, indptr=indptr)
        used = [x for x in read if x is not None]
        array.acquire(v_a, *used)
        merge.enqueue(array.current_stream(v_a), [0 if x is None else x.ptr for x in read])
        array.release(v_a, *used)
        if indptr is views.indptr and (indptr is None or not cuda().is_debugging):
            checked = _Checked(merge, shape[1:], num_states)
            calls = _CALLS[form.is_in_place]
            cached = calls.insert(arrays, options, checked, v_a, vout.dtype, shape, shape[:2])
            if cached is not None:
                cached.prepared = _Sized(merge, shape, shape[:2])
    if form.is_in_place:
        return None, None
    return tuple(
        x if view is not None else array.deliver(x, v_a)
        for x, view in ((out, views.out), (lse, views.lse))
    )


def _states(form: Form, v: ArrayView, s: ArrayView) -> States:
    """The arrays of one or many states, with strides of (row, state, head)."""

    def three(x: ArrayView) -> tuple[int, int, int]:
        if form is STATES:
            return x.strides[0], x.strides[1], x.strides[2]
        if form is SEGMENTS:
            return 0, x.strides[0], x.strides[1]
        return x.strides[0], 0, x.strides[1]

    return States(v, s, three(v), three(s))


def _run_reference(form: Form, views: Arrays, base_on_e: bool, scale: float) -> Any:
    unit = math.log2(math.e) if base_on_e else 1.0
    read = Arrays._make(None if x is None else array.as_numpy(x) for x in views)
    if read.out_scale is not None:
        scale = float(read.out_scale.reshape(-1)[0])
    s_a = read.s_a.astype(np.float64) * unit
    if read.v_b is not None:
        v, s = reference.merge_state(read.v_a, s_a, read.v_b, read.s_b.astype(np.float64) * unit)
    elif read.indptr is None:
        v, s = reference.merge_states(read.v_a, s_a)
    else:
        v, s = reference.variable_length_merge_states(read.v_a, s_a, read.indptr)
    results = []
    targets = (views.v_a, views.s_a) if form.is_in_place else (views.out, views.lse)
    for value, target, dtype in (
        (v, targets[0], read.v_a.dtype),
        (s / unit, targets[1], np.float32),
    ):
        if target is not None and target.dtype.is_fp8:
            rounded = reference.to_fp8(value, scale, target.dtype.numpy)
        else:
            with np.errstate(over="ignore", invalid="ignore"):
                rounded = value.astype(dtype if target is None else target.dtype.numpy)
        if target is None:
            results.append(array.from_numpy(rounded, views.v_a))
        else:
            written = array.as_numpy(target)
            rows = slice(None) if read.mask is None else read.mask.astype(bool)
            written[rows] = rounded[rows]
            results.append(target.owner)
    return (None, None) if form.is_in_place else tuple(results)
