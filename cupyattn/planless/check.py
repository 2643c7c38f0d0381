"""Checks of a call without a plan: what its arrays must be, and what follows from them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from numbers import Integral
from typing import Any, NamedTuple

from .. import array
from ..array import ArrayView
from ..array.match import Dims, require_output
from ..core import dtypes
from ..errors import ArgumentError, UnsupportedError
from ..inputs import parse, row_mask
from ..inputs.geometry import Geometry, PlanOptions, find_geometry
from ..inputs.kv_cache import Keys
from ..inputs.limits import MAX_LENGTH
from ..launch.attention.plan_batch import IndexFormat, Lengths
from .scales import Scales, view_scales
from .views import (
    Names,
    merge_leading,
    view_cache,
    view_index,
    view_ragged_keys,
    view_rows,
    view_sinks,
    view_table,
)


class Arrays(NamedTuple):
    """The arrays of a call as given; None where there is none.

    k, v         pages; for one tensor of both v is None. Without block_tables rows of all requests
    qo_lens, qo_offsets, kv_offsets  see plan_batch.Lengths; offsets of q alone are cumulative
    o_offsets, v_offsets  must say the same as those of q and k, which are read in their place
    scale_q, scale_k, scale_v  one number each in memory: the first two multiply the logits, the
                 last the output
    mask         over the query tokens of requests that have equally many (_row_mask.py)
    """

    q: Any
    k: Any
    v: Any
    workspace: Any
    block_tables: Any
    kv_lens: Any
    out: Any
    lse: Any
    qo_lens: Any = None
    qo_offsets: Any = None
    kv_offsets: Any = None
    o_offsets: Any = None
    v_offsets: Any = None
    sinks: Any = None
    scale_q: Any = None
    scale_k: Any = None
    scale_v: Any = None
    mask: Any = None


_DOUBLES = "batch_offsets_o", "batch_offsets_v"


class Options(NamedTuple):
    """What else decides about a call, as given, where it is hashable.

    q_axes       how many dimensions q may have
    q_len        rows of each request; 0: as the arrays say
    max_q_len    the most of one request; None: unknown
    max_kv_len   the same of its keys: it bounds how often keys are worth splitting
    sm_scale     the whole scale of the logits, but for scale_q and scale_k
    kv_scale     of fp8 keys and values, without effect on others (xqa's; with it, scale_k is such
                 a one too, and the logits are divided by the root of head_dim); None for others
    in_elements  offsets count elements, not tokens
    from_host    lengths and offsets may be on the host
    pads_lse     the LSE is [B, max_q_len, num_qo_heads] in natural log, -inf where there is no row;
                 else like q, base 2
    extents      num_kv_heads, page_size and head_dim, where the caller says them again
    """

    names: Names
    kv_layout: Any
    q_axes: tuple[int, ...] = (3,)
    q_len: Any = 1
    max_q_len: Any = None
    max_kv_len: Any = None
    sm_scale: Any = 1.0
    kv_scale: Any = None
    output_scale: Any = 1.0
    window_left: Any = -1
    causal: Any = True
    o_dtype: Any = None
    in_elements: bool = False
    from_host: bool = False
    pads_lse: bool = False
    return_lse: Any = False
    extents: tuple[Any, Any, Any] = (None, None, None)


class Indices(NamedTuple):
    """Views of lengths and offsets, as in Arrays."""

    qo_lens: ArrayView | None
    kv_lens: ArrayView
    qo_offsets: ArrayView | None
    kv_offsets: ArrayView | None
    o_offsets: ArrayView | None
    v_offsets: ArrayView | None


@dataclass(slots=True)
class Call:
    """A checked call. Views of q, out and lse have their leading axes merged.

    units  elements of a token in the offsets of o and v
    """

    q: ArrayView
    keys: Keys
    block_tables: ArrayView | None
    indices: Indices
    sinks: ArrayView | None
    mask: ArrayView | None
    scales: Scales
    out: ArrayView | None
    lse: ArrayView | None
    geometry: Geometry
    lengths: Lengths
    units: tuple[int, int]
    out_shape: tuple[int, ...]
    lse_shape: tuple[int, ...]
    pads_lse: bool
    return_lse: bool


def check(arrays: Arrays, options: Options) -> Call:
    """The call, with all that the host can know of it. Raises ArgumentError, UnsupportedError."""
    names, dims = options.names, Dims()
    layout = parse.kv_layout(options.kv_layout)
    given_q = view_rows(arrays.q, names.q, options.q_axes)
    vq = merge_leading(given_q, names.q, 2)
    dims["Dqk"] = vq.shape[2]
    dims.source["Dqk"] = names.q
    table = None
    if arrays.block_tables is None:
        keys = view_ragged_keys(arrays.k, arrays.v, names, dims)
    else:
        keys = view_cache(arrays.k, arrays.v, layout, names, dims)
        table = view_table(arrays.block_tables, names.block_tables)
    _check_extents(options, dims)
    indices = _indices(arrays, options, table, vq)
    scales = view_scales(
        (arrays.scale_q, arrays.scale_k, arrays.scale_v),
        (options.sm_scale, options.kv_scale, options.output_scale),
        (names.sm_scale, names.k_scale, names.output_scale),
        vq.shape[2],
        keys.k.dtype.is_fp8,
    )
    vout = None if arrays.out is None else view_rows(arrays.out, names.out, (len(given_q.shape),))
    geometry = _geometry(options, layout, vq, keys, vout, dims, scales.logits)
    call = Call(
        q=vq,
        keys=keys,
        block_tables=table,
        indices=indices,
        sinks=None if arrays.sinks is None else view_sinks(arrays.sinks, vq.shape[1]),
        mask=None,
        scales=scales,
        out=vout,
        lse=None if arrays.lse is None else array.view(arrays.lse, "lse"),
        geometry=geometry,
        lengths=_lengths(options, geometry, vq, keys, table, indices),
        units=(vq.shape[1] * dims["Dvo"], dims["Hkv"] * dims["Dvo"])
        if options.in_elements
        else (1, 1),
        out_shape=(*given_q.shape[:-1], dims["Dvo"]),
        lse_shape=tuple(given_q.shape[:-1]),
        pads_lse=options.pads_lse,
        return_lse=parse.flag(options.return_lse, "return_lse"),
    )
    if arrays.mask is not None:
        call.mask = _view_mask(arrays.mask, call.lengths, names)
    if options.pads_lse:
        most = whole(options.max_q_len, names.max_q_len)
        call.lse_shape = call.lengths.num_requests, most, vq.shape[1]
    _check_places(call, names)
    if call.out is not None:
        call.out = merge_leading(call.out, names.out, 2)
    if call.lse is not None and not options.pads_lse:
        call.lse = merge_leading(call.lse, "lse", 1)
    return call


def _check_extents(options: Options, dims: Dims) -> None:
    said = zip(("num_kv_heads", "page_size", "head_dim"), options.extents, strict=True)
    for (name, extent), symbol in zip(said, ("Hkv", "page_size", "Dqk"), strict=True):
        have = dims.get(symbol, 0)
        if extent is not None and extent != have:
            raise ArgumentError(f"{name}: got {extent!r}, but the arrays have {have}")


def _indices(arrays: Arrays, options: Options, table: ArrayView | None, vq: ArrayView) -> Indices:
    names = options.names
    if arrays.kv_lens is None:
        raise ArgumentError(f"{names.kv_lens}: got None; wanted the keys of each request, [B]")
    if table is None:
        count = math.prod(array.view(arrays.kv_lens, names.kv_lens).shape)
    else:
        count = table.shape[0]
    for double, given, name, wanted in (
        (arrays.o_offsets, arrays.qo_offsets, _DOUBLES[0], names.qo_offsets),
        (arrays.v_offsets, arrays.kv_offsets, _DOUBLES[1], names.kv_offsets),
    ):
        if double is not None and given is None:
            raise ArgumentError(f"{name}: given without {wanted}; pass both, or none")
    are_cumulative = arrays.qo_lens is None and not options.q_len
    either = (count, count + 1)
    return Indices(
        *(
            None if x is None else view_index(x, name, counts, vq, options.from_host)
            for x, name, counts in (
                (arrays.qo_lens, names.qo_lens, (count,)),
                (arrays.kv_lens, names.kv_lens, (count,)),
                (arrays.qo_offsets, names.qo_offsets, (count + 1,) if are_cumulative else either),
                (arrays.kv_offsets, names.kv_offsets, either),
                (arrays.o_offsets, _DOUBLES[0], either),
                (arrays.v_offsets, _DOUBLES[1], either),
            )
        )  # type: ignore[arg-type]
    )


def _geometry(
    options: Options,
    layout: str,
    vq: ArrayView,
    keys: Keys,
    vout: ArrayView | None,
    dims: Dims,
    sm_scale: float,
) -> Geometry:
    o_dtype = options.o_dtype
    if o_dtype is None:
        o_dtype = vq.dtype if vout is None else vout.dtype
    return find_geometry(
        PlanOptions(
            layout,
            vq.device,
            vq.shape[1],
            dims["Hkv"],
            dims["Dqk"],
            dims["Dvo"],
            dims.get("page_size", 0),
            vq.dtype,
            keys.k.dtype,
            dtypes.parse(o_dtype, options.names.o_dtype),
            False,
            parse.flag(options.causal, "causal"),
            "NONE",
            parse.window_left(options.window_left),
            None,
            sm_scale,
            None,
            None,
        )
    )


def whole(value: Any, name: str, least: int = 1) -> int:
    """An integer of the host's: an array of the device would have to be waited for."""
    if not isinstance(value, Integral) or isinstance(value, bool) or value < least:
        # Nor may the message wait for it.
        got = f"an array, {type(value).__name__}" if hasattr(value, "shape") else repr(value)
        raise ArgumentError(f"{name}: got {got}; wanted an integer, {least} or more")
    return int(value)


def _lengths(
    options: Options,
    geometry: Geometry,
    vq: ArrayView,
    keys: Keys,
    table: ArrayView | None,
    indices: Indices,
) -> Lengths:
    names = options.names
    count, num_rows = indices.kv_lens.shape[0], vq.shape[0]
    qo_len = whole(options.q_len, names.q_len, 0)
    if indices.qo_offsets is None:
        if not qo_len and indices.qo_lens is None and count == 1:
            qo_len = num_rows
        if not qo_len and count > 1:
            raise ArgumentError(
                f"{names.qo_offsets}: got None for {count} requests; wanted where the rows of each "
                f"begin in {names.q}"
            )
        if qo_len and num_rows != count * qo_len:
            raise ArgumentError(
                f"{names.q}: holds {num_rows} rows; wanted {count * qo_len}, {qo_len} for each of "
                f"the {count} requests"
            )
    most = qo_len or max(1, num_rows)
    if options.max_q_len is not None and not qo_len:
        most = min(most, whole(options.max_q_len, names.max_q_len))
    room, step = keys.size, 0
    if table is not None:
        room, step = table.shape[1] * geometry.page_size, table.strides[0] if count > 1 else 0
    elif indices.kv_offsets is None and count > 1:
        raise ArgumentError(
            f"{names.kv_offsets}: got None for {count} requests without {names.block_tables}; "
            f"wanted where the keys of each begin in {names.k}"
        )
    if room > MAX_LENGTH or num_rows * geometry.group_size > MAX_LENGTH:
        raise UnsupportedError(
            f"{names.q}, {names.block_tables}: {num_rows} query tokens over up to {room} keys; at "
            f"most {MAX_LENGTH} keys and query rows of one KV head are supported"
        )
    likely = room
    if options.max_kv_len is not None:
        likely = min(room, whole(options.max_kv_len, names.max_kv_len, 0))
    dim = geometry.problem.head_dim_qk if options.in_elements else 0
    units = 1, 1, geometry.num_qo_heads * dim or 1, geometry.num_kv_heads * dim or 1
    formats = [
        IndexFormat() if v is None else IndexFormat(v.strides[0], v.dtype, unit)
        for v, unit in zip(indices[:4], units, strict=True)
    ]
    return Lengths(
        num_requests=count,
        num_rows=num_rows,
        qo_len=qo_len or -1,
        max_qo_len=most,
        kv_step=step,
        max_kv_len=room,
        likely_kv_len=likely,
        formats=tuple(formats),  # type: ignore[arg-type]
        is_ragged=not (indices.qo_lens is indices.qo_offsets is indices.kv_offsets is None),
    )


def _view_mask(mask: Any, lengths: Lengths, names: Names) -> ArrayView:
    if lengths.qo_len < 1:
        raise UnsupportedError(
            f"mask: together with {names.qo_offsets} is not supported; pass {names.q_len}, as many "
            "rows of each request"
        )
    return row_mask.view_row_mask(mask, lengths.num_rows, lengths.qo_len)


def _check_places(call: Call, names: Names) -> None:
    """Where arrays are, and whether the answers may be written."""
    inputs = {
        names.q: call.q,
        names.k: call.keys.k,
        names.v: call.keys.v,
        names.block_tables: call.block_tables,
        "sinks": call.sinks,
        "mask": call.mask,
        names.sm_scale: call.scales.views[0],
        names.k_scale: call.scales.views[1],
        names.output_scale: call.scales.views[2],
    }
    labels = names.qo_lens, names.kv_lens, names.qo_offsets, names.kv_offsets
    inputs |= dict(zip((*labels, *_DOUBLES), call.indices, strict=True))
    array.same_device(**inputs, **{names.out: call.out, "lse": call.lse})
    for v, name, wanted, dtype in (
        (call.out, names.out, call.out_shape, call.geometry.problem.dtype_o),
        (call.lse, "lse", call.lse_shape, dtypes.float32),
    ):
        if v is None:
            continue
        if tuple(v.shape) != wanted:
            raise ArgumentError(f"{name}: shape is {list(v.shape)}; wanted {list(wanted)}")
        if v.dtype is not dtype:
            raise ArgumentError(f"{name}: dtype is {v.dtype}; wanted {dtype}")
        require_output(v, name, **inputs, lse=call.lse if name == names.out else None)
