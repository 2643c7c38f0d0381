"""Selections of blocks of keys on a GPU: from a checked call to what is launched.

Calls that differ in addresses alone are checked once (engine/call_cache.py).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from .. import array
from ..array import ArrayView
from ..core import dtypes
from ..errors import UnsupportedError
from ..launch.attention import log_choices
from ..launch.driver import scratch
from ..launch.driver.scratch import Allocate
from ..launch.ops import select as launch_select
from ..launch.ops.select import PreparedSelection, SelectAddresses, SelectShape
from .call_cache import Argument, CallCache
from .index_arrays import progression

if TYPE_CHECKING:
    from .select import Call, SelectArrays, SelectOptions

_VECTOR = 16


@dataclass(frozen=True, slots=True)
class _Checked:
    """What calls of one signature share.

    prepared      their launches
    fused_scales  bytes from the index's address to the scales of DeepGEMM's pages; 0 for others
    allocate      scratch memory, in the way of the caller's framework
    """

    prepared: PreparedSelection
    list_shape: tuple[int, int, int]
    gives_values: bool
    fused_scales: int
    allocate: Allocate


_NAMES = (
    *("q_index", "index_cache", "table", "lengths", "weights", "indptr", "kv_indptr"),
    *("candidates", "k_scale", "k_scales", "out", "values"),
)
_CALLS: CallCache[_Checked] = CallCache(
    *(Argument(name, is_output=name in ("out", "values")) for name in _NAMES)
)
_INDEX, _OUT, _VALUES = map(_NAMES.index, ("index_cache", "out", "values"))


def run_cached(arrays: SelectArrays, options: SelectOptions) -> tuple[Any, Any] | None:
    """The lists of a call like an earlier one, and their scores or None; None if there was none."""
    hit = _CALLS.lookup(arrays, options)
    if hit is None:
        return None
    cached, addresses = hit
    if not cached.is_apart(addresses, _INDEX):
        return None
    call, checked, out, values = cached.call, cached.call.checked, arrays.out, arrays.values
    if out is None:
        out = call.make_out(checked.list_shape)
        addresses[_OUT] = call.address(out)
    if values is None and checked.gives_values:
        values = call.make_lse(checked.list_shape)
        addresses[_VALUES] = call.address(values)
    q, k, table, lengths, weights, indptr, kv_indptr, candidates, k_scale, k_scales, *own = (
        addresses
    )
    at = SelectAddresses(
        q=q,
        k=k,
        k_scales=k + checked.fused_scales if checked.fused_scales else k_scales,
        k_scale=k_scale,
        weights=weights,
        table=table,
        kv_lens=lengths or kv_indptr,
        qo_offsets=indptr,
        kv_offsets=kv_indptr,
        out=own[0],
        values=own[1],
        candidates=candidates,
    )
    checked.prepared.launch(at, call.current_stream(), checked.allocate)
    return out, values


def run(call: Call, arrays: SelectArrays, options: SelectOptions) -> tuple[Any, Any]:
    """The lists and their scores; these are None where nobody asks. Raises UnsupportedError."""
    refuse(call)
    out, values = arrays.out, arrays.values
    is_full = call.lengths is None and call.kv_indptr is None
    if is_full:
        call.lengths = _full_lengths(call)
    q, gives_values = call.q, call.problem.gives_values
    lists = array.empty(call.list_shape, dtypes.int32, q) if call.out is None else out
    if call.values is None and gives_values:
        values = array.empty(call.list_shape, dtypes.float32, q)
    v_lists = array.view(lists, "out")
    v_values = array.view(values, "values") if gives_values else None
    inputs = (
        call.index.rows,
        call.index.scales,
        call.table,
        call.lengths,
        call.weights,
        call.indptr,
        call.kv_indptr,
        call.k_scale,
        call.candidates,
    )
    array.acquire(q, *[x for x in (*inputs, v_lists, v_values) if x is not None])
    if q.shape[0]:
        launcher = launch_select.launcher(call.problem, q.device.index)
        prepared = launcher.prepare(_shape(call, v_lists, v_values), q.shape[0])
        allocate = scratch.allocator(q)
        prepared.launch(_addresses(call, v_lists, v_values), array.current_stream(q), allocate)
        log = log_choices.log_of_selection(call.problem, q.device.index)
        if log is not None:
            for words, launches in prepared.launches():
                log.selection(q.shape[0], words, launches)
        if not is_full:
            _keep(call, arrays, options, prepared, allocate)
    array.release(q, *[x for x in (q, *inputs, v_lists, v_values) if x is not None])
    if call.out is None:
        lists = array.deliver(lists, q)
    return lists, values if call.values is not None or not gives_values else array.deliver(
        values, q
    )


def _full_lengths(call: Call) -> ArrayView:
    """Lengths of requests that have all rows there is room for, on the device."""
    keys = min(call.index.rows.shape[1] * call.problem.ratio, launch_select.MAX_KEYS)
    return array.view(progression(call.num_requests, keys, 0, call.q), "lengths")


def _keep(
    call: Call,
    arrays: SelectArrays,
    options: SelectOptions,
    prepared: PreparedSelection,
    allocate: Allocate,
) -> None:
    """Let later calls like this one skip the checks; not those whose scale is read on the host."""
    if arrays.k_scale is not None and call.k_scale is None:
        return
    rows, shape = call.index.rows, call.list_shape
    checked = _Checked(
        prepared,
        shape,
        call.problem.gives_values,
        rows.shape[1] * call.problem.head_dim if call.index.is_fused else 0,
        allocate,
    )
    _CALLS.insert(arrays, options, checked, call.q, dtypes.int32, shape, shape)


def refuse(call: Call) -> None:
    """UnsupportedError for what no kernel serves."""
    sentence = (
        launch_select.refusal(call.problem)
        or _refusal_of_arrays(call)
        or _refusal_of_candidates(call)
    )
    if sentence is not None:
        raise UnsupportedError(sentence)


def _refusal_of_arrays(call: Call) -> str | None:
    rows, problem = call.index.rows, call.problem
    is_fused = call.index.is_fused
    head_bytes = problem.head_dim * problem.dtype_k.itemsize
    steps = rows.strides[:1] if is_fused else rows.strides[:-1]
    for name, v, strides in (
        ("q_index", call.q, call.q.strides[:2]),
        ("index_cache", rows, steps),
    ):
        num_bytes = [x * v.dtype.itemsize for x in strides]
        if v.ptr % _VECTOR or any(x % _VECTOR or x < 0 for x in num_bytes):
            return (
                f"{name}: rows begin at other places than multiples of {_VECTOR} bytes (strides "
                f"{num_bytes} in bytes), which have no GPU kernel; pass a contiguous array"
            )
    for name, v in (("q_index", call.q), ("index_cache", rows)):
        low, high = array.byte_range(v)
        if high - low > launch_select.MAX_INDEX_BYTES:
            return f"{name}: spans {high - low} bytes; kernels reach 64 GiB"
    if is_fused and rows.shape[1] * head_bytes % _VECTOR:
        return f"index_cache: pages of {rows.shape[1]} rows have no GPU kernel; wanted 4 or more"
    for name, x in (("lengths", call.lengths), ("table", call.table)):
        if x is not None and x.strides and x.strides[0] < 0:
            return f"{name}: strides {list(x.strides)} are negative; pass a contiguous array"
    if call.q.shape[0] and not call.num_requests:
        return "indptr: has no request for the tokens of q_index; pass one request at least"
    return None


def _refusal_of_candidates(call: Call) -> str | None:
    v = call.candidates
    if v is None:
        return None
    if min(v.strides[:2]) < 0:
        return f"candidates: strides {list(v.strides)} are negative; pass a contiguous array"
    if v.shape[2] * call.problem.candidate_block > launch_select.MAX_KEYS:
        return f"candidates: {v.shape[2]} of {call.problem.candidate_block} keys are too many"
    return None


def _addresses(call: Call, out: ArrayView, values: ArrayView | None) -> SelectAddresses:
    rows, scales = call.index.rows, 0 if call.index.scales is None else call.index.scales.ptr
    if call.index.is_fused:
        scales = rows.ptr + rows.shape[1] * call.problem.head_dim
    kv_offsets = _address(call.kv_indptr)
    return SelectAddresses(
        q=call.q.ptr,
        k=rows.ptr,
        k_scales=scales,
        k_scale=_address(call.k_scale),
        weights=_address(call.weights),
        table=_address(call.table),
        kv_lens=_address(call.lengths) or kv_offsets,
        qo_offsets=_address(call.indptr),
        kv_offsets=kv_offsets,
        out=out.ptr,
        values=_address(values),
        candidates=_address(call.candidates),
    )


def _address(v: ArrayView | None) -> int:
    return 0 if v is None else v.ptr


def _shape(call: Call, out: ArrayView, values: ArrayView | None) -> SelectShape:
    rows, scales, problem = call.index.rows, call.index.scales, call.problem
    max_rows = rows.shape[0]
    if call.kv_indptr is None:
        max_rows = rows.shape[1] * (1 if call.table is None else call.table.shape[1])
    k_strides = (rows.strides[0], rows.strides[-2])
    scale_stride = 0 if scales is None or len(scales.shape) == 1 else scales.strides[0]
    if call.index.is_fused:
        k_strides, scale_stride = (rows.strides[0], problem.head_dim), rows.strides[0] // 4
    q_token, q_head, _ = call.q.strides
    out_token, out_group, _ = out.strides
    candidate_strides = (0, 0, 0) if call.candidates is None else call.candidates.strides
    value_token, value_group, _ = (0, 0, 0) if values is None else values.strides
    return SelectShape(
        num_requests=call.num_requests,
        request_tokens=call.request_tokens if call.indptr is None else 0,
        page_size=0 if call.table is None else rows.shape[1],
        # Keys behind the last whole row have none of their own.
        max_kv_len=min((max_rows + 1) * problem.ratio - 1, launch_select.MAX_KEYS),
        q_strides=(q_token, q_head),
        k_strides=k_strides,
        scale_stride=scale_stride,
        table_stride=0 if call.table is None else call.table.strides[0],
        weight_stride=0 if call.weights is None else call.weights.strides[0],
        out_strides=(out_token, out_group),
        values_strides=(value_token, value_group),
        is_causal=call.is_causal,
        kv_lens_are_steps=call.lengths is None and call.kv_indptr is not None,
        sm_scale=call.sm_scale,
        candidate_stride=candidate_strides[0],
        candidate_stride_group=candidate_strides[1] if problem.group_candidates else 0,
        num_candidates=0 if call.candidates is None else call.candidates.shape[2],
    )
