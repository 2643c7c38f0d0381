"""Checks of a call without a plan: what its arrays must be, and what follows from them.

Keys have heads of their own, or are latent rows in two parts (Options.dims). A list names the keys
of each token (sparse attention): every token is then a request of its own, whose row of the table
has a slot of the cache for each key, or a negative number for none.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from .. import array
from ..array import ArrayView
from ..array.match import Dims, match_output
from ..core import dtypes, logits, parse
from ..core.key_share import KeyShare
from ..core.logits import LogitsExpression
from ..core.parse import require_int
from ..core.problem import MAX_LENGTH
from ..errors import ArgumentError, UnsupportedError
from ..launch.attention.plan_batch import IndexFormat, Lengths
from . import latent_rows as latent
from . import planless_share, row_mask
from .arrays import Arrays
from .geometry import Geometry, PlanOptions, find_geometry
from .key_lists import KeyLists, view_lists
from .key_share import require_sinks_once
from .kv_cache import Keys, dtype_kv, view_ragged
from .latent_rows import Parts
from .output_gate import view_gate
from .spec import RawOptions, require_group
from .views import (
    Names,
    Scales,
    Tables,
    as_table,
    merge_leading,
    merge_spread,
    view_cache,
    view_index,
    view_rows,
    view_scales,
    view_sinks,
    view_slopes,
    view_tables,
)
from .workspace import int32_on_device, steps

# Beyond that one kernel serves any number of rows.
_MANY_ROWS = 65
_REPEATED = "batch_offsets_o", "batch_offsets_v"
# What expressions call the slopes and the soft cap of a call.
_SLOPES, _CAP = "slopes", "cap"


class Options(NamedTuple):
    """What else decides about a call, as given, where it is hashable.

    q_axes       how many dimensions q may have
    q_len        rows of each request; 0: as the arrays say
    max_q_len    an upper bound of them; None: unknown
    max_kv_len   the same of its keys: it bounds how often keys are worth splitting
    sm_scale     the whole scale of the logits, but for scale_q and scale_k
    kv_scale     of fp8 keys and values, without effect on others (xqa's; with it, scale_k is such
                 a one too, and the logits are divided by the root of head_dim); None for others
    in_elements  offsets count elements, not tokens
    from_host    lengths and offsets may be on the host
    pads_lse     the LSE is [B, max_q_len, num_qo_heads] in natural log, -inf where there is no row;
                 else like q, base 2
    extents      num_kv_heads, page_size and head_dim, where the caller says them again
    scales_by_head  scales may be [num_kv_heads] or [B, num_kv_heads] too
    attention_chunk  keys of a chunk: a row sees those of its own chunk; 0: all
    has_table_offsets  with a page table kv_offsets say where each request's pages begin in it, in
                 entries, for requests that need not be its rows
    kv_len_limit with such offsets, how many keys of a request count: more are cut. None: as many
                 as the table has room for
    shares_pages whether K and V have one page table; else block_tables is [B, 2, max_pages]
    cumulative_kv_lens  the keys of a request are the step from its entry of kv_lens, which has one
                 more, to the next
    sharers      requests, one after another, that are one of the caller's
    key_share    this rank's, where ranks share the keys; None where they do not. Lengths and tables
                 are this rank's, but for `kv_begin`, see Arrays
    counts_rows  whole lengths there include the rows of q; else they are what is ahead of these

    Of latent rows:
    dims         columns of the two parts; None: keys have heads of their own
    is_list      block_tables names keys
    key_scales   of the cache (core.problem.KEY_SCALES): "" or "rows"
    natural_lse  the LSE has natural logarithms
    lse_form     flags of params.LSE_WITHOUT_SINKS, params.LSE_OF_NO_KEYS_IS_INFINITE
    request_tokens  of lists: tokens in turn that are one request of kv_lens
    counts_later a token counts one entry of its list less for each token of its request behind it;
                 kv_lens may be larger than lists

    key_lists    what `lists` of the arrays name, of keys with heads of their own; else None
    skip_softmax  see AttentionSpec
    """

    names: Names
    kv_layout: Any = "NHD"
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
    window_right: Any = -1
    logits_soft_cap: Any = None
    pos_encoding_mode: Any = "NONE"
    scales_by_head: bool = False
    attention_chunk: int = 0
    has_table_offsets: bool = False
    shares_pages: Any = True
    cumulative_kv_lens: bool = False
    kv_len_limit: int | None = None
    sharers: int = 1
    dims: latent.Dims | None = None
    rope_scale: float = 1.0
    is_list: bool = False
    natural_lse: bool = False
    key_scales: str = ""
    lse_form: int = 0
    request_tokens: int = 1
    counts_later: bool = False
    key_share: KeyShare | None = None
    counts_rows: bool = True
    key_lists: KeyLists | None = None
    skip_softmax: Any = None

    def resolve(self, arrays: Arrays) -> Options:
        """Themselves, in calls that are found by them."""
        return self


def options_of(record: Any, **others: Any) -> Options:
    """A function's record of its arguments as Options: what is named as there, and others."""
    named = {name: x for name, x in record._asdict().items() if name in Options._fields}
    return Options(**named | others)


class Indices(NamedTuple):
    """Views of lengths and offsets, as in Arrays; on a GPU kv_lens may be cumulative. Lists that
    are as long as their table have none."""

    qo_lens: ArrayView | None
    kv_lens: ArrayView | None
    qo_offsets: ArrayView | None
    kv_offsets: ArrayView | None
    o_offsets: ArrayView | None
    v_offsets: ArrayView | None
    kv_begin: ArrayView | None


class Extents(NamedTuple):
    """What changes from step to step of a server.

    num_keys  rows that k and v hold, or pages
    table     rows of the page table, entries of each, and entries from row to row; or None
    """

    num_requests: int
    num_rows: int
    num_keys: int
    table: tuple[int, int, int] | None


class LengthForm(NamedTuple):
    """What calls of one signature share of their Lengths; options as in Options, where they are
    numbers."""

    names: Names
    q_len: int
    max_q_len: int | None
    max_kv_len: int | None
    kv_len_limit: int | None
    has_table_offsets: bool
    page_size: int
    group_size: int
    formats: tuple[IndexFormat, IndexFormat, IndexFormat, IndexFormat, IndexFormat]
    has_kv_begin: bool
    has_qo_lens: bool
    has_qo_offsets: bool
    has_kv_offsets: bool
    sharers: int
    request_tokens: int = 1
    counts_later: bool = False

    def lengths(self, extents: Extents) -> Lengths:
        """Raises ArgumentError and UnsupportedError where extents do not fit each other."""
        names, qo_len = self.names, self.q_len
        count, num_rows, num_keys, table = extents
        has_no_rows = not (num_rows or self.has_qo_offsets or self.has_qo_lens)
        if not self.has_qo_offsets:
            if not qo_len and not self.has_qo_lens and count == 1:
                qo_len = num_rows
            if not qo_len and count > 1 and not has_no_rows:
                raise ArgumentError(
                    f"{names.qo_offsets}: got None for {count} requests; wanted where the rows of "
                    f"each begin in {names.q}"
                )
            if qo_len and num_rows != count * qo_len:
                raise ArgumentError(
                    f"{names.q}: holds {num_rows} rows; wanted {count * qo_len}, {qo_len} for each "
                    f"of the {count} requests"
                )
        max_rows = qo_len or max(1, num_rows)
        if self.max_q_len is not None:
            max_rows = qo_len or min(max_rows, max(1, self.max_q_len))
        max_keys, step = num_keys, 0
        if table is not None:
            # Requests that are no rows of the table may begin at any of its entries.
            rows = table[0] if self.has_table_offsets else 1
            max_keys, step = rows * table[1] * self.page_size, table[2] if count > 1 else 0
        elif not self.has_kv_offsets and count > 1:
            raise ArgumentError(
                f"{names.kv_offsets}: got None for {count} requests without {names.block_tables}; "
                f"wanted where the keys of each begin in {names.k}"
            )
        if max_keys > MAX_LENGTH or num_rows * self.group_size > MAX_LENGTH:
            raise UnsupportedError(
                f"{names.q}, {names.block_tables}: {num_rows} query tokens over up to {max_keys} "
                f"keys; at most {MAX_LENGTH} keys and query rows of one KV head are supported"
            )
        kv_room = max_keys
        if self.kv_len_limit is not None:
            max_keys = min(max_keys, self.kv_len_limit)
        return Lengths(
            num_requests=count,
            num_rows=num_rows,
            qo_len=0 if has_no_rows else qo_len or -1,
            max_qo_len=max_rows,
            kv_step=step,
            max_kv_len=max_keys,
            likely_kv_len=max_keys if self.max_kv_len is None else min(max_keys, self.max_kv_len),
            formats=self.formats,
            is_ragged=self.has_qo_lens
            or self.has_qo_offsets
            or self.has_kv_offsets
            or self.has_kv_begin
            or self.formats[1].unit < 0,
            sharers=self.sharers,
            kv_room=kv_room,
            request_tokens=self.request_tokens,
            counts_later=self.counts_later,
            has_first_keys=self.has_kv_begin,
        )


@dataclass(slots=True)
class Call:
    """A checked call. Views of q, out and lse have their leading axes merged, but for a padded LSE.

    q, keys    of latent rows their latent parts, which are values too
    form, extents  what lengths are made of
    units      elements of a token in the offsets of o and v
    mask_bits  of each row: the query tokens of every request, or the most of one
    queries, pages  both parts of latent rows, else None
    gaps       elements of q, of q_rope and of block_tables between the requests of the caller,
               beside the strides of their tokens
    spread     those arrays as given, where there are gaps
    lists      [rows of q, groups, entries] of blocks of keys, see Options.key_lists
    """

    options: Options
    q: ArrayView
    keys: Keys
    block_tables: ArrayView | None
    value_tables: ArrayView | None
    indices: Indices
    sinks: ArrayView | None
    mask: ArrayView | None
    scales: Scales
    out: ArrayView | None
    lse: ArrayView | None
    geometry: Geometry
    form: LengthForm
    extents: Extents
    lengths: Lengths
    units: tuple[int, int]
    out_shape: tuple[int, ...]
    lse_shape: tuple[int, ...]
    return_lse: bool
    alibi_slopes: ArrayView | None
    output_gate: ArrayView | None
    max_logits: ArrayView | None = None
    mask_bits: int = 0
    queries: Parts | None = None
    pages: Parts | None = None
    gaps: tuple[int, int, int] = (0, 0, 0)
    spread: tuple[ArrayView, ...] = ()
    lists: ArrayView | None = None

    @property
    def names(self) -> Names:
        return self.options.names

    @property
    def pads_lse(self) -> bool:
        return self.options.pads_lse

    @property
    def inputs(self) -> dict[str, ArrayView | None]:
        """The arrays that the call reads, by what messages call them."""
        names = self.names
        inputs = {
            names.q: self.q,
            names.k: self.keys.k,
            names.v: self.keys.v,
            names.block_tables: self.block_tables,
            "sinks": self.sinks,
            "mask": self.mask,
            "alibi_slopes": self.alibi_slopes,
            "output_gate": self.output_gate,
            "lists": self.lists,
            names.sm_scale: self.scales.views[0],
            names.k_scale: self.scales.views[1],
            names.output_scale: self.scales.views[2],
        }
        if self.queries is not None and self.pages is not None:
            inputs |= {names.q_rope: self.queries.rope, names.k_rope: self.pages.rope}
        inputs |= {f"{names.q} {index}": x for index, x in enumerate(self.spread)}
        labels = names.qo_lens, names.kv_lens, names.qo_offsets, names.kv_offsets
        return inputs | dict(zip((*labels, *_REPEATED, names.kv_begin), self.indices, strict=True))

    @property
    def launches(self) -> bool:
        """Whether there is something to write."""
        has_lse = self.lse is not None and self.pads_lse and self.lse.shape[0] > 0
        return self.q.shape[0] > 0 or has_lse

    def view_lse(self, lse: Any) -> ArrayView:
        """The LSE as kernels write it, heads last: its leading axes merged where they are q's."""
        v = array.view(lse, "lse")
        return v if self.pads_lse else merge_leading(v, "lse", 1)


class Rows(NamedTuple):
    """Queries and keys as kernels read them.

    shape  of q as given, or of its latent part
    table, value_table, value_pages  the page tables, see views.Tables
    queries, pages, gaps  of latent rows, as in Call
    """

    q: ArrayView
    shape: tuple[int, ...]
    keys: Keys
    table: ArrayView | None
    value_table: ArrayView | None
    value_pages: int = 0
    queries: Parts | None = None
    pages: Parts | None = None
    gaps: tuple[int, int, int] = (0, 0, 0)


def check(arrays: Arrays, options: Options) -> Call:
    """The call, checked as far as the host can. Raises ArgumentError, UnsupportedError."""
    dims = Dims()
    # --- 1. Queries, keys and their tables ---
    layout = parse.kv_layout(options.kv_layout)
    if options.dims is None:
        rows = _view_heads(arrays, options, layout, dims)
    else:
        options = _of_latent_rows(options, arrays)
        rows = _view_latent_rows(arrays, options, dims)
    vq, keys, table, names = rows.q, rows.keys, rows.table, options.names
    # --- 2. Lengths, scales and slopes of each request ---
    if options.key_share is not None:
        arrays, options = planless_share.settle(arrays, options)
    indices, count = _indices(arrays, options, table, vq, keys)
    owners = count // options.sharers
    scales = _scales(arrays, options, dims, keys, owners)
    slopes = None
    if arrays.alibi_slopes is not None:
        slopes = view_slopes(arrays.alibi_slopes, owners, vq.shape[1])
    # --- 3. What serves such heads, and lengths as it takes them ---
    vout = None if arrays.out is None else view_rows(arrays.out, names.out, (len(rows.shape),))
    raw_options = _raw_options(options, layout, vq, vout, scales.logits, rows.value_pages, slopes)
    geometry = _geometry(vq, keys, dims, raw_options)
    require_sinks_once(geometry.spec, arrays.sinks)
    form = _length_form(options, geometry, vq, indices)
    rows_of_table = None if table is None else (table.shape[0], table.shape[1], table.strides[0])
    extents = Extents(count, vq.shape[0], keys.size, rows_of_table)
    per_token = dims["head_dim_vo"] if options.in_elements else 0
    call = Call(
        options=options,
        q=vq,
        keys=keys,
        block_tables=table,
        value_tables=rows.value_table,
        indices=indices,
        sinks=None if arrays.sinks is None else view_sinks(arrays.sinks, vq.shape[1]),
        mask=None,
        scales=scales,
        out=vout,
        lse=None if arrays.lse is None else array.view(arrays.lse, "lse"),
        geometry=geometry,
        form=form,
        extents=extents,
        lengths=form.lengths(extents),
        units=(vq.shape[1] * per_token or 1, dims["num_kv_heads"] * per_token or 1),
        out_shape=(*rows.shape[:-1], dims["head_dim_vo"]),
        lse_shape=rows.shape[:-1],
        return_lse=parse.flag(options.return_lse, "return_lse"),
        alibi_slopes=slopes,
        output_gate=view_gate(arrays.output_gate, rows.shape[:-2], geometry.spec),
        queries=rows.queries,
        pages=rows.pages,
        gaps=rows.gaps,
        lists=None if options.key_lists is None else view_lists(arrays.lists, vq, dims),
    )
    _check_rest(call, arrays)
    return call


def _check_rest(call: Call, arrays: Arrays) -> None:
    """What depends on all of a call: kernels for it, its mask, and where its arrays are."""
    options = call.options
    if call.q.device.kind == "cuda":
        _refuse_on_gpu(call, options.names)
    if arrays.mask is not None:
        call.mask, call.mask_bits = _view_mask(arrays.mask, options, call.lengths)
    if arrays.max_logits is not None:
        call.max_logits = array.view(arrays.max_logits, "max_logits")
    if options.pads_lse:
        call.lse_shape = _padded_lse_shape(call, options)
    if any(call.gaps):
        _check_gaps(call, arrays)
    _check_places(call, options.names)


def _view_heads(arrays: Arrays, options: Options, layout: str, dims: Dims) -> Rows:
    """Queries, and keys with heads of their own."""
    names = options.names
    given_q = view_rows(arrays.q, names.q, options.q_axes)
    vq = merge_leading(given_q, names.q, 2)
    dims["head_dim_qk"] = vq.shape[2]
    dims.source["head_dim_qk"] = names.q
    keys, tables = _view_keys(arrays, options, layout, dims)
    table, value_table, value_pages = tables or (None, None, 0)
    _check_extents(options, dims, layout)
    other_heads = dims["page_size"] if names.has_layout and table is not None else 0
    require_group(vq.shape[1], dims["num_kv_heads"], f"{names.q}, {names.k}", layout, other_heads)
    return Rows(vq, tuple(given_q.shape), keys, table, value_table, value_pages)


def _of_latent_rows(options: Options, arrays: Arrays) -> Options:
    """Offsets of q say how many rows each request has, and those of keys where its pages are."""
    if options.is_list and parse.window(options.window_left, "window_left") != -1:
        raise ArgumentError(
            f"window_left: got {options.window_left} with {options.names.block_tables} that name "
            "all keys of a token; pass -1, and lists of the keys in its window"
        )
    max_q_len = options.max_q_len
    return options._replace(
        q_len=options.q_len if arrays.qo_offsets is None else 0,
        max_q_len=None if max_q_len is None else min(max_q_len, _MANY_ROWS),
        has_table_offsets=arrays.kv_offsets is not None,
    )


def _view_latent_rows(arrays: Arrays, options: Options, dims: Dims) -> Rows:
    """Queries and pages of latent rows."""
    names, columns = options.names, options.dims
    assert columns is not None
    latent.require_columns(columns)
    queries, shape, of_q = _view_parts_of_q(arrays, options, columns)
    if options.key_scales:
        keys = latent.view_scaled_rows(arrays.k, columns, names.k)
    else:
        keys = latent.view_parts(arrays.k, arrays.k_rope, columns, (names.k, names.k_rope))
    pages = latent.as_pages(keys, None)
    heads, (num_pages, page_size, _) = queries.latent.shape[1], pages.latent.shape
    if not heads or not page_size:
        raise ArgumentError(
            f"{names.q}, {names.k}: {heads} heads and pages of {page_size} tokens; wanted some"
        )
    dims |= {"num_kv_heads": 1, "page_size": page_size}
    dims |= {"head_dim_qk": columns.both, "head_dim_vo": columns.latent}
    table, of_lists = _view_table(arrays.block_tables, options)
    return Rows(
        queries.latent,
        shape,
        Keys(pages.latent, pages.latent, latent.key_strides(pages), num_pages, (names.k, names.k)),
        table,
        table,
        queries=queries,
        pages=pages,
        gaps=(*of_q, of_lists),
    )


def _view_parts_of_q(
    arrays: Arrays, options: Options, dims: latent.Dims
) -> tuple[Parts, tuple[int, ...], tuple[int, int]]:
    """The queries with their leading axes merged, the shape of their latent part as given, and the
    gaps between requests of both parts."""
    q_names = options.names.q, options.names.q_rope
    queries = latent.view_parts(arrays.q, arrays.q_rope, dims, q_names)
    shape, rope = tuple(queries.latent.shape), queries.rope
    view_rows(arrays.q, options.names.q, options.q_axes)
    first, gap = merge_spread(queries.latent, options.names.q, 2)
    second, rope_gap = None, 0
    if rope is not None:
        second, rope_gap = merge_spread(rope, q_names[queries.offset < 0], 2)
    return queries._replace(latent=first, rope=second), shape, (gap, rope_gap)


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


def _check_gaps(call: Call, arrays: Arrays) -> None:
    """Gaps of q and of lists lie between the same tokens."""
    options, names, of_lists = call.options, call.names, call.gaps[2]
    arrays_apart = arrays.q, arrays.q_rope, arrays.block_tables
    call.spread = tuple(array.view(x, names.q) for x in arrays_apart if x is not None)
    tokens = options.request_tokens if options.is_list else options.q_len
    if len(call.out_shape) == 4:
        tokens = call.out_shape[1]
    call.options = options._replace(request_tokens=tokens)
    if abs(of_lists) > 2**31 - 1:
        raise UnsupportedError(
            f"{names.block_tables}: requests are {of_lists} entries apart; they must lie within "
            "2^31 entries, pass a contiguous table"
        )


def _scales(arrays: Arrays, options: Options, dims: Dims, keys: Keys, owners: int) -> Scales:
    names = options.names
    return view_scales(
        (arrays.scale_q, arrays.scale_k, arrays.scale_v),
        (options.sm_scale, options.kv_scale, options.output_scale),
        (names.sm_scale, names.k_scale, names.output_scale),
        dims["head_dim_qk"],
        keys.v.dtype.is_fp8,
        (owners, dims["num_kv_heads"]) if options.scales_by_head else None,
    )


def _geometry(vq: ArrayView, keys: Keys, dims: Dims, raw_options: RawOptions) -> Geometry:
    return find_geometry(
        PlanOptions(
            vq.device,
            vq.shape[1],
            dims["num_kv_heads"],
            dims["head_dim_qk"],
            dims["head_dim_vo"],
            dims.get("page_size", 0),
            vq.dtype,
            dtype_kv(vq, keys.k, keys.v, keys.names[0]),
            None,
            raw_options,
        )
    )


def _view_keys(
    arrays: Arrays, options: Options, kv_layout: str, dims: Dims
) -> tuple[Keys, Tables | None]:
    """Keys and values in pages, with their tables, or in rows of all requests."""
    names = options.names
    if arrays.block_tables is None:
        return view_ragged(arrays.k, arrays.v, "NHD", dims, (names.k, names.v)), None
    keys = view_cache(arrays.k, arrays.v, kv_layout, names, dims)
    are_shared = parse.flag(options.shares_pages, "uses_shared_paged_kv_idx")
    return keys, view_tables(arrays.block_tables, names.block_tables, are_shared)


def _raw_options(
    options: Options,
    kv_layout: str,
    vq: ArrayView,
    vout: ArrayView | None,
    sm_scale: float,
    value_pages: int,
    slopes: ArrayView | None,
) -> RawOptions:
    o_dtype, soft_cap = options.o_dtype, options.logits_soft_cap
    if o_dtype is None:
        o_dtype = vq.dtype.of_output if vout is None else vout.dtype
    encoding, expression = options.pos_encoding_mode, None
    # The reference takes slopes as they are given.
    if slopes is not None and vq.device.kind == "cuda":
        expression = _slope_logits(options, slopes)
        encoding, soft_cap = ("ALIBI", soft_cap) if expression is None else ("NONE", None)
    return RawOptions(
        kv_layout=kv_layout,
        causal=False if options.is_list or options.key_lists is not None else options.causal,
        pos_encoding_mode=encoding,
        window_left=options.window_left,
        logits_soft_cap=soft_cap,
        sm_scale=sm_scale,
        o_dtype=dtypes.parse(o_dtype, options.names.o_dtype),
        value_pages=value_pages,
        window_right=options.window_right,
        latent=options.dims is not None,
        sparse=options.is_list,
        logits=expression,
        key_share=options.key_share,
        skip_softmax=options.skip_softmax,
    )


def _slope_logits(options: Options, slopes: ArrayView) -> LogitsExpression | None:
    """Slopes as an expression, where they are not what kernels know as ALiBi: a bias that grows
    with the key, ahead of the soft cap. None where they are."""
    cap = parse.soft_cap(options.logits_soft_cap)
    right = parse.window(options.window_right, "window_right")
    if not cap and (parse.flag(options.causal, "causal") or right == 0):
        return None
    is_one_row = slopes.strides[0] == 0
    if slopes.strides[0] not in (0, slopes.shape[1]):
        raise UnsupportedError(
            "alibi_slopes: has rows that are apart, which no kernel takes where rows see keys to "
            "their right, or behind a soft cap; pass a contiguous array"
        )
    logit = f"{_CAP} * tanh(logit / {_CAP})" if cap else "logit"
    index = "head" if is_one_row else "batch, head"
    transform = f"{logit} - {_SLOPES}[{index}] * abs(kv_idx - q_idx)"
    arrays = ((_SLOPES, dtypes.float32, 1 if is_one_row else 2),)
    return logits.make(transform, None, arrays, ((_CAP, dtypes.float32, cap),) if cap else ())


def _view_mask(mask: Any, options: Options, lengths: Lengths) -> tuple[ArrayView, int]:
    """The mask, and the bits of each of its rows."""
    is_ragged = lengths.qo_len < 1
    num_bits = lengths.qo_len
    if is_ragged:
        num_bits = require_int(options.max_q_len, options.names.max_q_len)
    return row_mask.view_row_mask(mask, lengths.num_rows, num_bits, is_ragged=is_ragged), num_bits


def _padded_lse_shape(call: Call, options: Options) -> tuple[int, ...]:
    num_rows, num_heads, _ = call.q.shape
    name = options.names.max_q_len
    max_rows = require_int(options.max_q_len, name, min(1, num_rows))
    shape = call.lengths.num_requests, max_rows, num_heads
    if call.return_lse and math.prod(shape) > MAX_LENGTH:
        raise UnsupportedError(
            f"{name}: got {max_rows}, so that the LSE has shape {list(shape)}; at most "
            f"{MAX_LENGTH} elements are supported"
        )
    return shape


def _refuse_on_gpu(call: Call, names: Names) -> None:
    """UnsupportedError for what only the reference serves."""
    spec = call.geometry.spec
    if any(call.scales.steps) and spec.problem().is_wide:
        raise UnsupportedError(
            f"{names.k_scale}, {names.output_scale}: scales that differ between requests have no "
            f"GPU kernel with head dims {spec.head_dim_qk} and {spec.head_dim_vo}; pass one for "
            "each KV head"
        )
    has_begin = call.indices.kv_begin is not None and spec.key_share is None
    for name, is_given in (
        (names.kv_begin, has_begin and call.mask is not None),
        ("attention_chunk", call.options.attention_chunk > 0),
        ("pos_encoding_mode", call.geometry.spec.pos_encoding == "ROPE_LLAMA"),
    ):
        if is_given:
            raise UnsupportedError(
                f"{name}: has no GPU kernel in this call; leave it out, or pass CPU arrays"
            )


def _check_extents(options: Options, dims: Dims, kv_layout: str) -> None:
    symbols = {"num_kv_heads": "num_kv_heads", "page_size": "page_size", "head_dim": "head_dim_qk"}
    for (name, symbol), extent in zip(symbols.items(), options.extents, strict=True):
        have = dims.get(symbol, 0)
        if extent is not None and require_int(extent, name, 0) != have:
            others = {"num_kv_heads": "page_size", "page_size": "num_kv_heads"}
            is_other = extent == dims.get(others.get(name, ""))
            hint = f"; kv_layout={parse.other_layout(kv_layout)!r} would fit" if is_other else ""
            raise ArgumentError(f"{name}: got {extent}, but the arrays have {have}{hint}")


def _indices(
    arrays: Arrays, options: Options, table: ArrayView | None, vq: ArrayView, keys: Keys
) -> tuple[Indices, int]:
    """The views, and the number of requests."""
    names, kv_lens = options.names, arrays.kv_lens
    are_all = kv_lens is None and options.is_list and arrays.kv_offsets is None
    are_derived = kv_lens is None and not are_all
    if are_derived and (table is not None or arrays.kv_offsets is None):
        raise ArgumentError(f"{names.kv_lens}: got None; wanted the keys of each request, [B]")
    if table is not None and not options.has_table_offsets:
        count = table.shape[0]
    elif are_derived:
        count = max(0, math.prod(array.view(arrays.kv_offsets, names.kv_offsets).shape) - 1)
    else:
        count = math.prod(array.view(kv_lens, names.kv_lens).shape)
        count -= options.cumulative_kv_lens
    if options.is_list and count != vq.shape[0]:
        raise ArgumentError(
            f"{names.block_tables}: has lists for {count} tokens; wanted {vq.shape[0]}, the rows "
            f"of {names.q}"
        )
    num_lens = count + options.cumulative_kv_lens
    if options.is_list:
        num_lens = count // max(1, options.request_tokens)
    for repeated, original, name, wanted in (
        (arrays.o_offsets, arrays.qo_offsets, _REPEATED[0], names.qo_offsets),
        (arrays.v_offsets, arrays.kv_offsets, _REPEATED[1], names.kv_offsets),
    ):
        if repeated is not None and original is None:
            raise ArgumentError(f"{name}: given without {wanted}; pass both, or none")
    are_cumulative = arrays.qo_lens is None and not options.q_len
    either = (count, count + 1)
    indices = Indices(
        *(
            None if x is None else view_index(x, name, counts, vq, options.from_host)
            for x, name, counts in (
                (arrays.qo_lens, names.qo_lens, (count,)),
                (kv_lens, names.kv_lens, (num_lens,)),
                (arrays.qo_offsets, names.qo_offsets, (count + 1,) if are_cumulative else either),
                (arrays.kv_offsets, names.kv_offsets, either),
                (arrays.o_offsets, _REPEATED[0], either),
                (arrays.v_offsets, _REPEATED[1], either),
                (arrays.kv_begin, names.kv_begin, (count,)),
            )
        )
    )
    if are_derived:
        indices = indices._replace(kv_lens=indices.kv_offsets)
    is_cumulative = are_derived or options.cumulative_kv_lens
    if is_cumulative and indices.kv_lens is not None and vq.device.kind == "cpu":
        unit = keys.k.shape[1] * keys.k.shape[2] if are_derived and options.in_elements else 1
        name = names.kv_offsets if are_derived else names.kv_lens
        require_from_zero(array.as_numpy(indices.kv_lens).reshape(-1), name)
        indices = indices._replace(kv_lens=steps(indices.kv_lens, unit, names.kv_lens))
    return indices, count


def require_from_zero(offsets: np.ndarray, name: str) -> None:
    """ArgumentError unless offsets that say lengths too begin at 0."""
    if offsets.size and offsets[0]:
        raise ArgumentError(
            f"{name}: begins at {offsets[0]}; wanted offsets from 0 on, which the first request has"
        )


def _length_form(
    options: Options,
    geometry: Geometry,
    vq: ArrayView,
    indices: Indices,
) -> LengthForm:
    names = options.names
    max_q_len, max_kv_len = options.max_q_len, options.max_kv_len
    if max_q_len is not None:
        max_q_len = require_int(max_q_len, names.max_q_len, min(1, vq.shape[0]))
    if max_kv_len is not None:
        # Bounds are rounded up, beyond 32 bits too.
        max_kv_len = require_int(max_kv_len, names.max_kv_len, 0, 2**32)
    spec = geometry.spec
    dim = spec.head_dim_qk if options.in_elements else 0
    of_q, of_keys = spec.num_qo_heads * dim or 1, spec.num_kv_heads * dim or 1
    # Only those of the device are cumulative.
    are_derived, of_lens = indices.kv_lens is indices.kv_offsets, 1
    if (are_derived or options.cumulative_kv_lens) and vq.device.kind == "cuda":
        of_lens = -of_keys if are_derived else -1
    formats = [
        IndexFormat() if v is None else IndexFormat(v.strides[0], v.dtype, unit)
        for v, unit in zip(
            (*indices[:4], indices.kv_begin),
            (1, of_lens, of_q, of_keys, 1 if options.counts_rows else -1),
            strict=True,
        )
    ]
    return LengthForm(
        names=names,
        q_len=require_int(options.q_len, names.q_len, 0),
        max_q_len=max_q_len,
        max_kv_len=max_kv_len,
        kv_len_limit=options.kv_len_limit,
        has_table_offsets=options.has_table_offsets,
        page_size=1 if options.is_list else spec.page_size,
        group_size=spec.group_size,
        formats=tuple(formats),  # type: ignore[arg-type]
        has_kv_begin=indices.kv_begin is not None,
        has_qo_lens=indices.qo_lens is not None,
        has_qo_offsets=indices.qo_offsets is not None,
        has_kv_offsets=indices.kv_offsets is not None,
        sharers=options.sharers,
        request_tokens=options.request_tokens if indices.kv_lens is not None else 1,
        counts_later=options.counts_later,
    )


def _check_places(call: Call, names: Names) -> None:
    """Where arrays are, and whether the outputs may be written, whose leading axes it merges."""
    inputs, lse_shape = call.inputs, call.lse_shape
    array.same_device(**inputs, **{names.out: call.out, "lse": call.lse})
    dtype_o = call.geometry.spec.dtype_o
    match_output(call.out, call.out_shape, dtype_o, names.out, **inputs, lse=call.lse)
    if call.queries is not None and call.lse is not None and len(call.lse.shape) == 2:
        lse_shape = math.prod(lse_shape[:-1]), lse_shape[-1]  # rows of all requests
    match_output(call.lse, lse_shape, dtypes.float32, "lse", **inputs)
    match_output(call.max_logits, call.q.shape[:2], dtypes.float32, "max_logits", **inputs)
    if call.out is not None:
        call.out = merge_leading(call.out, names.out, 2)
    if call.lse is not None:
        call.lse = call.view_lse(call.lse)
