"""Latent attention without a plan: lengths, page tables and lists of keys stay on the device.

As run_planless.py, of rows in two parts: a block on the device reads the lengths and writes the
work list before the kernels, so that nothing waits, and a graph can capture a call. A list names
the keys of each token (sparse attention): every token is then a request of its own, whose row of
the table has a slot of the cache for each key, or a negative number for none.
"""

from __future__ import annotations

import functools
import math
import operator
from dataclasses import fields, replace
from typing import Any

from .. import array
from ..array import ArrayView
from ..array.match import (
    are_rows_aligned,
    match_array,
    match_output,
    require_contiguous_last,
)
from ..core import dtypes, parse
from ..core.problem import MAX_LENGTH
from ..errors import ArgumentError, UnsupportedError
from ..launch.attention import pad_lse, plan_batch
from ..launch.attention.batch import BatchLauncher
from ..launch.attention.layout import BatchSchedule
from ..launch.attention.plan_batch import IndexFormat, Lengths
from ..launch.driver.enqueue import cuda
from . import latent_rows as latent
from . import planless_latent_reference as latent_reference
from .arrays import ROLES, Arrays
from .call_cache import Scalars
from .geometry import PlanOptions, Variant, find_geometry
from .index_arrays import progression
from .latent_rows import Dims
from .planless_cache import Asked, Repeat
from .prepared import InParts, Prepared, plan_of, prepare_within
from .run_planless import Layout, serve
from .run_planless import run_cached as run_cached
from .run_planless_latent import NAMES, Call, Names, Options
from .spec import Given
from .views import (
    merge_leading,
    merge_spread,
    view_index,
    view_rows,
    view_sinks,
)
from .workspace import int32_on_device

_KV_LENS = Arrays._fields.index("kv_lens")
# Beyond that one kernel serves any number of rows.
_MANY_ROWS = 65


def decode(arrays: Arrays, *, sm_scale: Any, output_scale: Any = None, return_lse: Any) -> Any:
    """One row of 512 latent and 64 rope columns for each request."""
    options = Options(
        NAMES._replace(q="q", q_rope="q[1]", block_tables="page_table", sm_scale="sm_scale"),
        Dims(512, 64),
        parse.finite(sm_scale, "sm_scale", 1.0),
        output_scale=parse.finite(output_scale, "bmm2_scale", 1.0),
        causal=False,
        return_lse=parse.flag(return_lse, "return_lse"),
    )
    return run(arrays, options)


def run(arrays: Arrays, options: Options, known_as: Scalars = None) -> Any:
    """The answer of a call: out, or (out, lse) if `return_lse`.

    known_as: the options as given, by which `run_cached` is to find the call from now on: with the
    shapes, strides and dtypes of the arrays they decide all of `options`
    """
    if known_as is None:
        answer = run_cached(arrays, options)
        if answer is not None:
            return answer
    asked = Asked(arrays, options if known_as is None else known_as, {})
    return serve(LATENT_ROWS, _check(arrays, options), arrays, asked)


def are_numbers(*scales: Any) -> bool:
    """Whether no scale is an array, whose number may change."""
    return all(type(x) is float or type(x) is int or x is None for x in scales)


# --- Checks ---


def _check(arrays: Arrays, options: Options) -> Call:
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
    o_dtype = options.o_dtype
    if o_dtype is None:
        o_dtype = vq.dtype if vout is None else vout.dtype
    heads, page_size = vq.shape[1], pages.latent.shape[1]
    if not heads or not page_size:
        raise ArgumentError(
            f"{names.q}, {names.k}: {heads} heads and pages of {page_size} tokens; wanted some"
        )
    options_of_plan = PlanOptions(
        vq.device, heads, 1, dims.both, dims.latent, page_size, vq.dtype, pages.latent.dtype, None,
        Given(
            causal=options.causal and not options.is_list,
            sm_scale=options.sm_scale,
            o_dtype=dtypes.parse(o_dtype, "o_dtype"),
            latent=True,
            sparse=options.is_list,
        ),
    )  # fmt: skip
    geometry = find_geometry(options_of_plan)
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
        max_logits=_view_max_logits(arrays.max_logits),
    )
    if call.gaps != (0, 0, 0):
        given = arrays.q, arrays.q_rope, arrays.block_tables
        call.spread = tuple(array.view(x, names.q) for x in given if x is not None)
        _check_gaps(call, shape)
    _check_places(call)
    return call


def _view_max_logits(x: Any) -> ArrayView | None:
    return None if x is None else array.view(x, "max_logits")


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
    match_array(v, "B entries", (dtypes.int32, dtypes.int64), name)
    if v.device.kind == "cuda" and v.dtype is dtypes.int64:
        v = int32_on_device(v, name)
    if min(v.strides) < 0 or v.strides[0] * v.shape[0] > 2**31 - 1:
        raise UnsupportedError(
            f"{name}: rows are {v.strides[0]} entries apart; {v.shape[0]} of them must lie within "
            "2^31 entries, pass a contiguous table"
        )
    return v, gap


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


# --- Launches ---


def _prepare(call: Call, have: int | None) -> Prepared:
    """What a call launches. have: bytes of its workspace, which a plan of fewer parts may need."""
    return prepare_within(functools.partial(_prepare_within, call), have)


def _prepare_within(call: Call, most_bytes: int) -> tuple[Prepared, int]:
    """The launches of a plan that takes up to most_bytes, if there is one, and what the workspace
    holds besides."""
    options, queries, pages, vout = call.options, call.queries, call.pages, call.out
    assert vout is not None
    vlse, vq = call.lse, queries.latent
    rows = [x for x in (queries.latent, queries.rope, vout) if x is not None]
    keys = [x for x in (pages.latent, pages.rope) if x is not None]
    pointers = functools.reduce(operator.or_, (x.ptr for x in (*rows, *keys)))
    steps = [(x.strides[:2], x.dtype) for x in (*rows, *keys)]
    is_aligned = are_rows_aligned(pointers, [*steps, (call.gaps[:2], vq.dtype)])
    prescale_logits = call.scales[0] is not None or options.sm_scale <= 0.0
    variant = Variant(is_aligned, prescale_logits, key_scales=options.key_scales)
    launcher = call.geometry.launcher(variant)
    plan, schedule, partials = None, _schedule_lists(call, launcher, most_bytes), 0
    if schedule is None:
        if call.kv_lens is None:
            count, entries = call.table.shape
            call.kv_lens = array.view(progression(count, entries, 0, vq), options.names.kv_lens)
        if _has_parts(call, launcher):
            return _in_parts(call, launcher, most_bytes), 0
        lengths = call.lengths._replace(list_gap=call.gaps[2])
        plan = plan_of(launcher, lengths, most_bytes)
        schedule, partials = plan.schedule, plan.partials
    size = of_plan = partials + schedule.workspace_bytes
    padding, lse_rows = None, 0
    lens_stride = 0
    if plan is None and call.kv_lens is not None:
        lens_stride = call.kv_lens.strides[0] * call.kv_lens.dtype.itemsize // 4
    lists = latent.Lists(call.lengths.kv_step, call.gaps, call.options.request_tokens, lens_stride)
    lse_strides = (0, 0) if vlse is None else tuple(vlse.strides[-2:])
    lse_scale = math.log(2.0) if options.natural_lse else 1.0
    if vlse is not None and len(vlse.shape) == 3:
        lse_scale = 1.0  # the launch that pads takes base 2
        padding = pad_lse.prepare(vlse.shape, vlse.strides, launcher.device_index)
        lse_rows, lse_strides = size, (vq.shape[1], 1)
        size += 4 * vq.shape[0] * vq.shape[1]
    prepared = Prepared(
        launcher,
        plan,
        schedule,
        partials,
        padding,
        lse_rows,
        num_bytes=size,
        strides=latent.pack_strides(queries, pages, vout, lse_strides),  # type: ignore[arg-type]
        num_keys=pages.latent.shape[0],
        sm_scale=options.sm_scale,
        output_scale=options.output_scale,
        has_scales=call.scales != (None, None),
        lse_shape=call.lse_shape,
        lse_scale=lse_scale,
        lse_form=options.lse_form,
        second=latent.second_parts(queries, pages, options.rope_scale, lists),
    )
    return prepared, size - of_plan


def _has_parts(call: Call, launcher: BatchLauncher) -> bool:
    """Whether there are more requests than a block plans, which can be taken apart."""
    are_apart = call.options.request_tokens > 1 or any(call.gaps) or call.kv_offsets is not None
    most = plan_batch.most_requests(launcher.device_index)
    return call.lengths.num_requests > most and not are_apart


def _in_parts(call: Call, launcher: BatchLauncher, most_bytes: int) -> Prepared:
    """What a call of more requests than a block plans launches: one part after the other."""
    count, tokens = call.lengths.num_requests, 0
    if call.qo_offsets is None:
        tokens = call.lengths.qo_len
    size = -(-count // -(-count // plan_batch.most_requests(launcher.device_index)))
    parts, vlse = [], call.lse
    for begin in range(0, count, size):
        number = min(size, count - begin)
        if call.lse is not None and len(call.lse.shape) == 3:  # by request
            shape = number, *call.lse.shape[1:]
            vlse = array.as_strided(call.lse, shape, call.lse.strides)
        lengths = call.lengths._replace(num_requests=number)
        if tokens:
            lengths = lengths._replace(num_rows=number * tokens)
        part, _ = _prepare_within(replace(call, lengths=lengths, lse=vlse), most_bytes)
        parts.append((tuple(begin * step for step in _steps(call, tokens)), part))
    _, first = parts[0]
    known = {f.name: getattr(first, f.name) for f in fields(first) if f.name != "bound"}
    known["num_bytes"] = max(part.num_bytes for _, part in parts)
    return InParts(**known, parts=tuple(parts))


def _steps(call: Call, tokens: int) -> tuple[int, ...]:
    """Bytes from a request of so many rows to the next one, in the order of ROLES; 0 for what all
    share."""

    def step(v: ArrayView | None, count: int = 1) -> int:
        return 0 if v is None else count * v.strides[0] * v.dtype.itemsize

    rows = {
        "q": call.queries.latent,
        "q_rope": call.queries.rope,
        "out": call.out,
        "lse": call.lse,
        "max_logits": call.max_logits,
    }
    at = {name: step(v, tokens) for name, v in rows.items()}
    if call.lse is not None and len(call.lse.shape) == 3:
        at["lse"] = step(call.lse)
    at["block_tables"] = step(call.table)
    at["kv_lens"], at["qo_offsets"] = step(call.kv_lens), step(call.qo_offsets)
    assert at.keys() <= set(ROLES)
    return tuple(at.get(name, 0) for name in ROLES)


def _schedule_lists(call: Call, launcher: BatchLauncher, most_bytes: int) -> BatchSchedule | None:
    """The launches of lists that are all as long as the table, but for what tokens do not see yet;
    None for other calls."""
    knows_length = call.kv_lens is None or call.options.counts_later
    if not call.options.is_list or not knows_length or call.scales != (None, None):
        return None
    count, entries = call.table.shape
    return launcher.schedule_lists(count, entries, most_bytes)


def _views(call: Call) -> Arrays:
    scale_q, scale_v = call.scales
    return Arrays(
        q=call.queries.latent,
        k=call.pages.latent,
        block_tables=call.table,
        kv_lens=call.kv_lens,
        out=call.out,
        lse=call.lse,
        qo_offsets=call.qo_offsets,
        kv_offsets=call.kv_offsets,
        sinks=call.sinks,
        scale_q=scale_q,
        scale_v=scale_v,
        q_rope=call.queries.rope,
        k_rope=call.pages.rope,
        max_logits=call.max_logits,
    )


def _repeat_of(call: Call, arrays: Arrays, prepared: Prepared) -> Repeat | None:
    """How such a call is launched again; None if what was made for it has no address to keep."""
    table = array.view(arrays.block_tables, call.names.block_tables)
    if call.table.ptr != table.ptr:
        return None
    if arrays.kv_lens is not None or call.kv_lens is None:
        return Repeat(prepared)
    if cuda().is_capturing(array.current_stream(call.rows)):
        return None  # only the graph writes those lengths
    shared = ((_KV_LENS, call.kv_lens.ptr, call.kv_lens.owner),)
    return Repeat(replace(prepared, shared=shared))


LATENT_ROWS = Layout(
    prepare=_prepare,
    views=_views,
    repeat=_repeat_of,
    answer_on_cpu=latent_reference.answer,
    check_values=latent_reference.check_values,
)
