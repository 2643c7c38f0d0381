"""Latent attention without a plan: lengths, page tables and lists of keys stay on the device.

As run_planless.py, of rows in two parts: a block on the device reads the lengths and writes the
work list before the kernels, so that nothing waits, and a graph can capture a call. A list names
the keys of each token (sparse attention): every token is then a request of its own, whose row of
the table has a slot of the cache for each key, or a negative number for none.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

from .. import array
from ..array import ArrayView
from ..array.match import (
    match_output,
    require_contiguous_last,
)
from ..core import dtypes, parse
from ..core.parse import require_int
from ..core.problem import MAX_LENGTH
from ..errors import ArgumentError, UnsupportedError
from ..launch.attention.plan_batch import IndexFormat, Lengths
from . import latent_rows as latent
from .arrays import Arrays
from .geometry import Geometry, PlanOptions, find_geometry
from .latent_rows import Dims, Parts
from .run_planless import run_cached as run_cached
from .spec import RawOptions
from .views import (
    Names,
    as_table,
    merge_leading,
    merge_spread,
    next_power_of_two,
    number_or_array,
    view_index,
    view_rows,
    view_sinks,
)
from .workspace import int32_on_device

_KV_LENS = Arrays._fields.index("kv_lens")
# Beyond that one kernel serves any number of rows.
_MANY_ROWS = 65


NAMES = Names("query", "kv_cache", "kv_cache", kv_offsets="kv_offsets")


class Options(NamedTuple):
    """What else decides about a call, as given, where it is hashable.

    dims         columns of the two parts
    q_axes       how many dimensions q may have
    q_len        rows of each request; 0: qo_offsets say
    max_q_len    the most of one request; None: unknown
    max_kv_len   the same of its keys: it bounds how often keys are worth splitting
    most_kv_len  with kv_offsets, the most keys of a request: more are cut. None: as many as the
                 table has room for
    is_list      block_tables names keys
    key_scales   of the cache (core.problem.KEY_SCALES): "" or "rows"
    pads_lse     the LSE is [B, heads, q_len]; else like q
    natural_lse  it has natural logarithms; else base 2. One that is padded must
    lse_form     flags of params.LSE_WITHOUT_SINKS, params.LSE_OF_NO_KEYS_IS_INFINITE
    request_tokens  of lists: tokens in turn that are one request of kv_lens
    counts_later a token counts one entry of its list less for each token of its request behind it;
                 kv_lens may be larger than lists
    """

    names: Names
    dims: Dims
    sm_scale: float
    q_axes: tuple[int, ...] = (3,)
    q_len: int = 1
    max_q_len: int | None = None
    max_kv_len: int | None = None
    output_scale: float = 1.0
    rope_scale: float = 1.0
    causal: bool = True
    is_list: bool = False
    pads_lse: bool = False
    natural_lse: bool = False
    return_lse: bool = False
    o_dtype: Any = None
    key_scales: str = ""
    most_kv_len: int | None = None
    lse_form: int = 0
    request_tokens: int = 1
    counts_later: bool = False

    def resolve(self, arrays: Arrays) -> Options:
        return self


@dataclass(slots=True)
class Call:
    """A checked call. Views of q, out and lse have their leading axes merged; a padded LSE is
    viewed as [B, q_len, heads], or [B, heads] of one row each.

    kv_lens  None where block_tables names keys, and all of them count
    gaps     elements of q, of q_rope and of block_tables between the requests of the caller, beside
             the strides of their tokens
    """

    options: Options
    queries: Parts
    pages: Parts
    table: ArrayView
    kv_lens: ArrayView | None
    qo_offsets: ArrayView | None
    kv_offsets: ArrayView | None
    out: ArrayView | None
    lse: ArrayView | None
    sinks: ArrayView | None
    scales: tuple[ArrayView | None, ArrayView | None]
    geometry: Geometry
    lengths: Lengths
    out_shape: tuple[int, ...]
    lse_shape: tuple[int, ...]
    gaps: tuple[int, int, int] = (0, 0, 0)
    max_logits: ArrayView | None = None
    spread: tuple[ArrayView, ...] = ()
    mask: ArrayView | None = None
    mask_bits: int = 0

    @property
    def rows(self) -> ArrayView:
        """The queries."""
        return self.queries.latent

    @property
    def names(self) -> Names:
        return self.options.names

    @property
    def inputs(self) -> dict[str, ArrayView | None]:
        """The arrays that the call reads, by what messages call them."""
        names = self.options.names
        return {
            **self.queries.views,
            **self.pages.views,
            names.block_tables: self.table,
            names.kv_lens: self.kv_lens,
            names.qo_offsets: self.qo_offsets,
            names.kv_offsets: self.kv_offsets,
            "sinks": self.sinks,
            names.sm_scale: self.scales[0],
            names.output_scale: self.scales[1],
            **{f"{names.q} {place}": x for place, x in enumerate(self.spread)},
        }

    @property
    def launches(self) -> bool:
        """Whether there is something to write."""
        return self.queries.latent.shape[0] > 0

    @property
    def return_lse(self) -> bool:
        return self.options.return_lse

    def view_lse(self, lse: Any) -> ArrayView:
        """An LSE with the heads last, and leading axes merged where they are those of q: [rows,
        heads], else [B, rows of each, heads]."""
        v = array.view(lse, "lse")
        if not self.options.pads_lse:
            return merge_leading(v, "lse", 1)
        (count, heads, rows), (step, of_head, of_row) = v.shape, v.strides
        if rows == 1 == self.options.q_len:
            return array.as_strided(v, (count, heads), (step, of_head))
        return array.as_strided(v, (count, rows, heads), (step, of_row, of_head))


def are_numbers(*scales: Any) -> bool:
    """Whether no scale is an array, whose number may change."""
    return all(type(x) is float or type(x) is int or x is None for x in scales)


def read_scale(scale: Any, name: str) -> tuple[float, Any]:
    """(number, array of one element or None) of a scale; one on the host is read."""
    number, held = number_or_array(scale)
    if held is None:
        return parse.finite(number, name, 1.0), None
    v = array.view(held, name)
    if math.prod(v.shape) != 1 or v.dtype is not dtypes.float32:
        raise ArgumentError(
            f"{name}: got {v.dtype} {list(v.shape)}; wanted a number, or a float32 array of one"
        )
    if v.device.kind == "cpu":
        return parse.finite(float(array.as_numpy(v).ravel()[0]), name, 1.0), None
    return 1.0, held


def bounded(max_kv_len: Any, name: str) -> int | None:
    """A bound of lengths, rounded up, so that calls of growing requests have equal signatures."""
    if max_kv_len is None:
        return None
    return int(next_power_of_two(require_int(max_kv_len, name, 0, 2**32)))


def check(arrays: Arrays, options: Options) -> Call:
    """The call, checked as far as the host can. Raises ArgumentError, UnsupportedError."""
    names, dims = options.names, options.dims
    latent.require_columns(dims)
    queries, shape, of_q = _view_queries(arrays, options)
    if options.key_scales:
        keys = latent.view_scaled_rows(arrays.k, dims, names.k)
    else:
        keys = latent.view_parts(arrays.k, arrays.k_rope, dims, (names.k, names.k_rope))
    pages = latent.as_pages(keys, None)
    vq = queries.latent
    table, of_lists, kv_lens, kv_starts, offsets = _view_indices(arrays, options, vq)
    count = table.shape[0] if options.is_list or kv_lens is None else kv_lens.shape[0]
    vout = None if arrays.out is None else view_rows(arrays.out, names.out, (len(shape),))
    geometry = _geometry(options, vq, pages.latent, vout)
    heads, page_size = vq.shape[1], pages.latent.shape[1]
    out_shape = (*shape[:-1], dims.latent)
    lse_shape = (count, heads, options.q_len) if options.pads_lse else shape[:-1]
    call = Call(
        options=options,
        queries=queries,
        pages=pages,
        table=table,
        kv_lens=kv_lens,
        qo_offsets=offsets,
        kv_offsets=kv_starts,
        out=vout,
        lse=None if arrays.lse is None else array.view(arrays.lse, "lse"),
        sinks=None if arrays.sinks is None else view_sinks(arrays.sinks, heads),
        scales=(_view_scale(arrays.scale_q, names), _view_scale(arrays.scale_v, names)),
        geometry=geometry,
        lengths=_lengths(options, vq, table, page_size, heads, kv_lens, offsets, kv_starts),
        out_shape=out_shape,
        lse_shape=lse_shape,
        gaps=(*of_q, of_lists),
        max_logits=None
        if arrays.max_logits is None
        else array.view(arrays.max_logits, "max_logits"),
    )
    if call.gaps != (0, 0, 0):
        given = arrays.q, arrays.q_rope, arrays.block_tables
        call.spread = tuple(array.view(x, names.q) for x in given if x is not None)
        _check_gaps(call, shape)
    _check_places(call)
    return call


def _geometry(options: Options, vq: ArrayView, vk: ArrayView, vout: ArrayView | None) -> Geometry:
    """What serves such heads. vk: pages of keys."""
    names, dims, o_dtype = options.names, options.dims, options.o_dtype
    if o_dtype is None:
        o_dtype = vq.dtype if vout is None else vout.dtype
    heads, page_size = vq.shape[1], vk.shape[1]
    if not heads or not page_size:
        raise ArgumentError(
            f"{names.q}, {names.k}: {heads} heads and pages of {page_size} tokens; wanted some"
        )
    given = RawOptions(
        causal=options.causal and not options.is_list,
        sm_scale=options.sm_scale,
        o_dtype=dtypes.parse(o_dtype, "o_dtype"),
        latent=True,
        sparse=options.is_list,
    )
    return find_geometry(
        PlanOptions(
            vq.device,
            heads,
            1,
            dims.both,
            dims.latent,
            page_size,
            vq.dtype,
            vk.dtype,
            None,
            given,
        )
    )


def _check_gaps(call: Call, shape: tuple[int, ...]) -> None:
    """Gaps of q and of lists lie between the same tokens."""
    options, of_lists = call.options, call.gaps[2]
    tokens = options.request_tokens if options.is_list else options.q_len
    if len(shape) == 4:
        tokens = shape[1]
    call.options = options._replace(request_tokens=tokens)
    if abs(of_lists) > 2**31 - 1:
        raise UnsupportedError(
            f"{options.names.block_tables}: requests are {of_lists} entries apart; they must lie "
            "within 2^31 entries, pass a contiguous table"
        )


def _view_queries(
    arrays: Arrays, options: Options
) -> tuple[latent.Parts, tuple[int, ...], tuple[int, int]]:
    """The queries with their leading axes merged, the shape of their latent part as given, and the
    gaps between requests of both parts."""
    q_names = options.names.q, options.names.q_rope
    queries = latent.view_parts(arrays.q, arrays.q_rope, options.dims, q_names)
    shape, rope = tuple(queries.latent.shape), queries.rope
    view_rows(arrays.q, options.names.q, options.q_axes)
    first, gap = merge_spread(queries.latent, options.names.q, 2)
    second, rope_gap = None, 0
    if rope is not None:
        second, rope_gap = merge_spread(rope, q_names[queries.offset < 0], 2)
    return queries._replace(latent=first, rope=second), shape, (gap, rope_gap)


def _view_indices(
    arrays: Arrays, options: Options, vq: ArrayView
) -> tuple[ArrayView, int, ArrayView | None, ArrayView | None, ArrayView | None]:
    """(table, gap between requests, kv_lens, kv_offsets, qo_offsets); no kv_lens where lists are as
    long as the table."""
    names = options.names
    table, gap = _view_table(arrays.block_tables, options)
    kv_lens, kv_starts, offsets = arrays.kv_lens, arrays.kv_offsets, arrays.qo_offsets
    count = table.shape[0]
    if kv_starts is not None and kv_lens is not None:
        count = math.prod(array.view(kv_lens, names.kv_lens).shape)
    if options.is_list and count != vq.shape[0]:
        raise ArgumentError(
            f"{names.block_tables}: has lists for {count} tokens; wanted {vq.shape[0]}, the rows "
            f"of {names.q}"
        )
    if kv_lens is not None:
        tokens = options.request_tokens if options.is_list else 1
        kv_lens = view_index(kv_lens, names.kv_lens, (count // max(1, tokens),), vq, False)
    elif not options.is_list or kv_starts is not None:
        raise ArgumentError(f"{names.kv_lens}: got None; wanted the keys of each request, [B]")
    if offsets is not None:
        offsets = view_index(offsets, names.qo_offsets, (count + 1,), vq, False)
    if kv_starts is not None:
        kv_starts = view_index(kv_starts, names.kv_offsets, (count,), vq, False)
    return table, gap, kv_lens, kv_starts, offsets


def _view_scale(x: Any, names: Names) -> ArrayView | None:
    if x is None:
        return None
    v = array.view(x, names.sm_scale)
    return array.as_strided(v, (1,), (1,))


def _view_table(x: Any, options: Options) -> tuple[ArrayView, int]:
    """[B, entries] of int32, and the gap between the lists of requests; int64 is converted at each
    call."""
    name, gap = options.names.block_tables, 0
    v = array.view(x, name)
    if options.is_list and v.device.kind == "cuda" and v.dtype is dtypes.int64:
        v = int32_on_device(v, name)
    if options.is_list and len(v.shape) > 1:
        v, gap = merge_spread(v, name, 1)
    return as_table(v, name, "B entries"), gap


def _lengths(
    options: Options,
    vq: ArrayView,
    table: ArrayView,
    page_size: int,
    heads: int,
    kv_lens: ArrayView | None,
    offsets: ArrayView | None,
    kv_offsets: ArrayView | None,
) -> Lengths:
    names, (count, entries), num_rows = options.names, table.shape, vq.shape[0]
    step = table.strides[0] if count > 1 else 0
    if kv_offsets is not None and kv_lens is not None:
        # Requests may begin at any entry of the table.
        count, entries, step = kv_lens.shape[0], count * entries, 0
    q_len = 0 if offsets is not None else options.q_len
    if offsets is None and num_rows != count * q_len:
        raise ArgumentError(
            f"{names.q}: holds {num_rows} rows; wanted {count * q_len}, {q_len} for each of the "
            f"{count} requests of {names.block_tables}"
        )
    most = q_len or max(1, num_rows)
    if options.max_q_len is not None:
        most = q_len or max(1, min(most, options.max_q_len, _MANY_ROWS))
    max_keys = entries if options.is_list else entries * page_size
    if max_keys > MAX_LENGTH or num_rows * heads > MAX_LENGTH:
        raise UnsupportedError(
            f"{names.q}, {names.block_tables}: {num_rows} query tokens over up to {max_keys} keys; "
            f"at most {MAX_LENGTH} keys and query rows are supported"
        )
    room = max_keys
    if options.most_kv_len is not None:
        max_keys = min(max_keys, options.most_kv_len)
    likely = max_keys if options.max_kv_len is None else min(max_keys, options.max_kv_len)
    formats = [
        IndexFormat() if v is None else IndexFormat(v.strides[0], v.dtype)
        for v in (None, kv_lens, offsets, kv_offsets, None)
    ]
    return Lengths(
        num_requests=count,
        num_rows=num_rows,
        qo_len=q_len or -1,
        max_qo_len=most,
        kv_step=step,
        max_kv_len=max_keys,
        likely_kv_len=likely,
        formats=tuple(formats),  # type: ignore[arg-type]
        is_ragged=not (offsets is kv_offsets is None),
        kv_room=room,
        request_tokens=options.request_tokens if options.is_list and kv_lens is not None else 1,
        counts_later=options.counts_later,
    )


def _check_places(call: Call) -> None:
    """Where arrays are, and whether the answers may be written."""
    names, inputs = call.options.names, call.inputs
    array.same_device(**inputs, **{names.out: call.out, "lse": call.lse})
    dtype_o = call.geometry.spec.dtype_o
    if call.out is not None:
        require_contiguous_last(call.out, names.out)
    match_output(call.out, call.out_shape, dtype_o, names.out, **inputs, lse=call.lse)
    lse_shape = call.lse_shape
    if call.lse is not None and len(call.lse.shape) == 2 and not call.options.pads_lse:
        lse_shape = math.prod(lse_shape[:-1]), lse_shape[-1]  # rows of all requests
    match_output(call.lse, lse_shape, dtypes.float32, "lse", **inputs)
    rows_and_heads = call.queries.latent.shape[:2]
    match_output(call.max_logits, rows_and_heads, dtypes.float32, "max_logits", **inputs)
    if call.out is not None:
        call.out = merge_leading(call.out, names.out, 2)
    if call.lse is not None:
        call.lse = call.view_lse(call.lse)
