"""Latent attention without a plan: lengths, page tables and lists of keys stay on the device.

As planless/call.py, of rows in two parts: a block on the device reads the lengths and writes the
work list before the kernels, so that nothing waits, and a graph can capture a call. A list names
the keys of each token (sparse attention): every token is then a request of its own, whose row of
the table has a slot of the cache for each key, or a negative number for none.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

import numpy as np

from .. import array
from ..array import ArrayView
from ..array.match import (
    are_rows_aligned,
    match_array,
    match_output,
    require_contiguous_last,
    require_output,
)
from ..core import dtypes, parse
from ..core.problem import MAX_LENGTH
from ..errors import ArgumentError, UnsupportedError, WorkspaceError
from ..inputs import latent
from ..inputs.call_cache import Argument, CallCache, Found, Scalars, after_launch
from ..inputs.geometry import PlanOptions, Variant, find_geometry
from ..inputs.index_arrays import progression
from ..inputs.latent import Dims, Second
from ..inputs.spec import Given
from ..inputs.workspace import int32_on_device, num_bytes, view_workspace
from ..launch.attention import pad_lse, plan_batch
from ..launch.attention.batch import BatchLauncher
from ..launch.attention.bound_run import BoundRun
from ..launch.attention.layout import ANY_BATCH_BYTES, BatchSchedule
from ..launch.attention.pad_lse import Padding
from ..launch.attention.plan_batch import DevicePlan, IndexFormat, Lengths
from ..launch.driver import params, scratch
from ..launch.driver.enqueue import cuda
from . import latent_reference
from .latent_call import NAMES, Arrays, Call, Names, Options
from .views import (
    merge_leading,
    merge_spread,
    view_index,
    view_rows,
    view_sinks,
)

_MAX_BOUND = 256
# Beyond that one kernel serves any number of rows.
_MANY_ROWS = 65


@dataclass(frozen=True, slots=True)
class _Prepared:
    """What launches of calls with equal signature share; see planless.call.Prepared.

    plan      None for lists of one length, which need none
    partials  where partial states begin, in bytes into the workspace
    factors   of the logits, of the output, and of the LSE in base 2, and its form
    """

    launcher: BatchLauncher
    plan: DevicePlan | None
    schedule: BatchSchedule
    partials: int
    padding: Padding | None
    lse_rows: int
    num_bytes: int
    strides: bytes
    second: Second
    num_pages: int
    factors: tuple[float, float, float, int]
    bound: dict[tuple[int, int], tuple[bytes, BoundRun]] = field(default_factory=dict)

    def launch(self, addresses: Sequence[int], stream: int) -> None:
        """Enqueue the planner and all behind it, on `Arrays` at these addresses, 0 for none."""
        # fmt: off
        (
            q, q_rope, k, k_rope, workspace, block_tables, kv_lens, out, lse, qo_offsets, sinks,
            scale_q, scale_v, kv_offsets, max_logits,
        ) = addresses
        # fmt: on
        found = self.bound.get((workspace, block_tables)) or self._bind(workspace, block_tables)
        planned, attention = found
        plan, device = self.plan, attention.device_index
        indices = 0, kv_lens, qo_offsets, kv_offsets, 0
        rows = lse if self.padding is None else workspace + self.lse_rows
        optional = params.NO_OPTIONAL
        if rows or sinks or scale_q or scale_v:
            # The planner repeats scales for all heads, in the workspace.
            of_q, _, of_v = (0, 0, 0) if plan is None else plan.scales
            optional = params.OPTIONAL.pack(
                *(rows, 0, sinks, scale_q and workspace + of_q, 0, scale_v and workspace + of_v),
                *(0, params.NO_STEPS, params.NO_LOGITS_ARRAYS),
            )
        if plan is not None:
            plan_batch.launch(plan, planned, indices, (scale_q, 0, scale_v), device, stream)
        list_lens = kv_lens if plan is None else 0
        second = self.second.pack(q, q_rope, k, k_rope, max_logits, list_lens)
        attention.launch(q, k, k, out, optional, stream, second)
        if self.padding is not None:
            pad_lse.launch(self.padding, planned, indices, rows, lse, device, stream)

    def _bind(self, workspace: int, block_tables: int) -> tuple[bytes, BoundRun]:
        attention = self.launcher.bind(
            self.schedule,
            workspace,
            workspace + self.partials,
            self.strides,
            self.num_pages,
            block_tables,
            0,
            0,
            self.factors[1],
            self.factors[0],
            lse_scale=self.factors[2],
            lse_form=self.factors[3],
        )
        if len(self.bound) >= _MAX_BOUND:
            self.bound.clear()
        planned = b"" if self.plan is None else plan_batch.bind(self.plan, workspace)
        found = planned, attention
        self.bound[workspace, block_tables] = found
        return found


@dataclass(frozen=True, slots=True)
class _InParts(_Prepared):
    """Of more requests than a block plans; see planless.prepared."""

    parts: tuple[tuple[tuple[int, ...], _Prepared], ...] = ()

    def launch(self, addresses: Sequence[int], stream: int) -> None:
        for shifts, part in self.parts:
            of_part = [x and x + shift for x, shift in zip(addresses, shifts, strict=True)]
            part.launch(of_part, stream)


@dataclass(frozen=True, slots=True)
class _Checked:
    """What calls of one signature share. kv_lens: of lists that have no lengths of their own."""

    prepared: _Prepared
    kv_lens: Any
    kv_lens_address: int
    out_shape: tuple[int, ...]
    lse_shape: tuple[int, ...]
    return_lse: bool
    allocate: scratch.Allocate


_OUTPUTS = "workspace", "out", "lse", "max_logits"
_CALLS: CallCache[_Checked] = CallCache(
    *(Argument(name, is_output=name in _OUTPUTS) for name in Arrays._fields)
)
_K, _WORKSPACE, _KV_LENS, _OUT, _LSE = map(
    Arrays._fields.index, ("k", "workspace", "kv_lens", "out", "lse")
)


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

    # --- 1. Validate ---
    call = _check(arrays, options)
    vq = call.queries.latent
    vworkspace = _view_workspace(arrays.workspace, call)

    # --- 2. Answer on the CPU ---
    if vq.device.kind == "cpu":
        if vworkspace is not None and vq.shape[0]:
            have = num_bytes(vworkspace)
            _require_size(have, _prepare(_with_outputs(call), have).num_bytes)
        return latent_reference.answer(call, arrays)

    # --- 3. Launch on the caller's stream ---
    out, lse = arrays.out, arrays.lse
    if out is None:
        out = array.empty(call.out_shape, call.geometry.spec.dtype_o, vq)
        call.out = merge_leading(array.view(out, "out"), "out", 2)
    if lse is None and options.return_lse:
        lse = array.empty(call.lse_shape, dtypes.float32, vq)
        call.lse = _rows_of_lse(array.view(lse, "lse"), options)
    if vq.shape[0]:
        if cuda().is_debugging:
            list(latent_reference.requests_of(call, array.to_host))
        prepared = _prepare(call, None if vworkspace is None else num_bytes(vworkspace))
        _launch(call, prepared, vworkspace)
        if not cuda().is_debugging:
            _insert(arrays, options if known_as is None else known_as, call, prepared)
    out = array.deliver(out, vq)
    return (out, array.deliver(lse, vq)) if options.return_lse else out


def run_cached(arrays: Arrays, given: Scalars) -> Any:
    """The answer of a call that is in the cache, else None.

    given: its options as its caller gave them, hashable
    """
    answer = _CALLS.lookup(arrays, given)
    return None if answer is None else _launch_cached(*answer, arrays)


def are_numbers(*scales: Any) -> bool:
    """Whether no scale is an array, whose number may change."""
    return all(type(x) is float or type(x) is int or x is None for x in scales)


def _launch_cached(found: Found[_Checked], addresses: list[int], arrays: Arrays) -> Any:
    """The answer of a call that was found; None if an output may share memory with another."""
    call = found.call
    if call.outputs and not found.is_apart(addresses, _K):
        return None
    checked, out, lse = call.checked, arrays.out, arrays.lse
    prepared, stream = checked.prepared, call.current_stream()
    if out is None:
        out = call.make_out(checked.out_shape)
        addresses[_OUT] = call.address(out)
    if lse is None and checked.return_lse:
        lse = call.make_lse(checked.lse_shape)
        addresses[_LSE] = call.address(lse)
    if not addresses[_KV_LENS]:
        addresses[_KV_LENS] = checked.kv_lens_address
    owner: object = None
    if not addresses[_WORKSPACE]:
        addresses[_WORKSPACE], owner = scratch.workspace(
            prepared.num_bytes, prepared.launcher.device_index, stream, checked.allocate
        )
    prepared.launch(addresses, stream)
    del owner  # memory for one call may go once everything is enqueued
    return (out, lse) if checked.return_lse else out


@after_launch
def _insert(arrays: Arrays, key: Scalars, call: Call, prepared: _Prepared) -> None:
    """Cache a call that was launched; what was made for one call has no address to keep."""
    options = call.options
    if call.table.ptr != array.view(arrays.block_tables, options.names.block_tables).ptr:
        return
    made = arrays.kv_lens is None and call.kv_lens is not None
    if made and cuda().is_capturing(array.current_stream(call.queries.latent)):
        return  # only the graph writes those lengths
    checked = _Checked(
        prepared,
        call.kv_lens.owner if made and call.kv_lens else None,
        call.kv_lens.ptr if made and call.kv_lens else 0,
        call.out_shape,
        call.lse_shape,
        options.return_lse,
        scratch.allocator(call.queries.latent),
    )
    dtype_o, vq = call.geometry.spec.dtype_o, call.queries.latent
    _CALLS.insert(arrays, key, checked, vq, dtype_o, call.out_shape, call.lse_shape)


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


def _inputs(call: Call) -> dict[str, ArrayView | None]:
    names = call.options.names
    return {
        **call.queries.views,
        **call.pages.views,
        names.block_tables: call.table,
        names.kv_lens: call.kv_lens,
        names.qo_offsets: call.qo_offsets,
        names.kv_offsets: call.kv_offsets,
        "sinks": call.sinks,
        names.sm_scale: call.scales[0],
        names.output_scale: call.scales[1],
        **{f"{names.q} {place}": x for place, x in enumerate(call.spread)},
    }


def _check_places(call: Call) -> None:
    """Where arrays are, and whether the answers may be written."""
    names, inputs = call.options.names, _inputs(call)
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
        call.lse = _rows_of_lse(call.lse, call.options)


def _rows_of_lse(v: ArrayView, options: Options) -> ArrayView:
    """An LSE with the heads last, and leading axes merged where they are those of q: [rows, heads],
    else [B, rows of each, heads]."""
    if not options.pads_lse:
        return merge_leading(v, "lse", 1)
    (count, heads, rows), (step, of_head, of_row) = v.shape, v.strides
    if rows == 1 == options.q_len:
        return array.as_strided(v, (count, heads), (step, of_head))
    return array.as_strided(v, (count, rows, heads), (step, of_row, of_head))


def _view_workspace(x: Any, call: Call) -> ArrayView | None:
    """The workspace, checked. A JAX array, which cannot be written, counts as none."""
    if x is None or array.view(x, "workspace_buffer").framework == "jax":
        return None
    v = view_workspace(x, "workspace_buffer")
    inputs = _inputs(call)
    array.same_device(**inputs, workspace_buffer=v)
    names = call.options.names
    require_output(v, "workspace_buffer", **inputs, **{names.out: call.out, "lse": call.lse})
    return v


# --- Launches ---


def _require_size(have: int, need: int) -> None:
    if have < need:
        raise WorkspaceError(
            f"workspace_buffer: this call needs {need} bytes and it has {have}; pass a larger one"
        )


def _with_outputs(call: Call) -> Call:
    """On the CPU: the call as it would be launched, with memory for outputs that are not given."""
    out, lse = call.out, call.lse
    if out is None:
        shape = *call.queries.latent.shape[:2], call.out_shape[-1]
        out = array.view(np.empty(shape, call.geometry.spec.dtype_o.numpy), "out")
    if lse is None and call.options.return_lse:
        made = array.view(np.empty(call.lse_shape, np.float32), "lse")
        lse = _rows_of_lse(made, call.options)
    return replace(call, out=out, lse=lse)


def _prepare(call: Call, have: int | None) -> _Prepared:
    """What a call launches. have: bytes of its workspace, which a plan of fewer parts may need."""
    prepared, besides = _prepare_within(call, ANY_BATCH_BYTES)
    if have is None or prepared.num_bytes <= have:
        return prepared
    fewer, _ = _prepare_within(call, max(0, have - besides))
    return fewer if fewer.num_bytes <= have else prepared


def _prepare_within(call: Call, most_bytes: int) -> tuple[_Prepared, int]:
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
        plan = _plan(launcher, lengths, most_bytes)
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
    prepared = _Prepared(
        launcher,
        plan,
        schedule,
        partials,
        padding,
        lse_rows,
        size,
        latent.pack_strides(queries, pages, vout, lse_strides),  # type: ignore[arg-type]
        latent.second_parts(queries, pages, options.rope_scale, lists),
        pages.latent.shape[0],
        (options.sm_scale, options.output_scale, lse_scale, options.lse_form),
    )
    return prepared, size - of_plan


def _has_parts(call: Call, launcher: BatchLauncher) -> bool:
    """Whether there are more requests than a block plans, which can be taken apart."""
    are_apart = call.options.request_tokens > 1 or any(call.gaps) or call.kv_offsets is not None
    most = plan_batch.most_requests(launcher.device_index)
    return call.lengths.num_requests > most and not are_apart


def _in_parts(call: Call, launcher: BatchLauncher, most_bytes: int) -> _Prepared:
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
    return _InParts(**known, parts=tuple(parts))


def _steps(call: Call, tokens: int) -> tuple[int, ...]:
    """Bytes from a request of so many rows to the next one, in the order of Arrays; 0 for what all
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
    assert at.keys() <= set(Arrays._fields)
    return tuple(at.get(name, 0) for name in Arrays._fields)


def _schedule_lists(call: Call, launcher: BatchLauncher, most_bytes: int) -> BatchSchedule | None:
    """The launches of lists that are all as long as the table, but for what tokens do not see yet;
    None for other calls."""
    knows_length = call.kv_lens is None or call.options.counts_later
    if not call.options.is_list or not knows_length or call.scales != (None, None):
        return None
    count, entries = call.table.shape
    return launcher.schedule_lists(count, entries, most_bytes)


@functools.lru_cache(maxsize=1024)
def _plan(launcher: BatchLauncher, lengths: Lengths, most_bytes: int) -> DevicePlan:
    return plan_batch.prepare(launcher, lengths, most_bytes)


def _launch(call: Call, prepared: _Prepared, vworkspace: ArrayView | None) -> None:
    vq, vout = call.queries.latent, call.out
    assert vout is not None
    stream = array.current_stream(vq)
    owner: object = None
    if vworkspace is None:
        workspace, owner = scratch.allocator(vq)(prepared.num_bytes)
    else:
        workspace = vworkspace.ptr
        _require_size(num_bytes(vworkspace), prepared.num_bytes)
    views = Arrays(
        vq,
        call.queries.rope,
        call.pages.latent,
        call.pages.rope,
        None,
        call.table,
        call.kv_lens,
        vout,
        call.lse,
        call.qo_offsets,
        call.sinks,
        *call.scales,
        call.kv_offsets,
        call.max_logits,
    )
    used = [v for v in (*views[1:], vworkspace) if v is not None]
    array.acquire(vq, *used)
    addresses = [0 if x is None else x.ptr for x in views]
    addresses[_WORKSPACE] = workspace
    prepared.launch(addresses, stream)
    array.release(vq, vq, *used)
    del owner  # memory for one call may go once everything is enqueued
