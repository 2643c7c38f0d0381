"""A run of a batch of latent attention: as run_batch.py, of rows in two parts.

The two differ in what arrays they take, so each has checks and a call cache of its own; plans,
schedules and launches are the same.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from .. import array
from ..array import ArrayView
from ..array.match import (
    are_rows_aligned,
    match_array,
    match_output,
    require_contiguous_last,
)
from ..core import dtypes, parse
from ..errors import ArgumentError, UnsupportedError
from ..launch.attention.bound_run import BoundRun
from ..launch.driver import params
from . import cpu
from . import latent_rows as latent
from .call_cache import Apart, Argument, CallCache, Found
from .geometry import Geometry, Variant
from .latent_rows import Dims, Parts, Second
from .workspace import clear_of, require_apart, same_device
from .wrapper import BatchWrapper, Plan, Prepared

_MAX_BOUNDS = 256
# What the caller calls the two parts of q, and of the pages.
Names = tuple[tuple[str, str], tuple[str, str]]


class LatentScales(NamedTuple):
    """Factors, all numbers but token_scales.

    latent, rope  of the two parts of a cache of fp8: a value is the latent part times its factor
    token_scales  float32 [num_pages, page_size] of the latent parts of a cache of fp8, or None
    output        of the output
    logits        the whole scale of the logits, in place of the plan's; or None
    lse           of the LSE, which is in base 2
    """

    latent: float = 1.0
    rope: float = 1.0
    token_scales: Any = None
    output: float = 1.0
    logits: float | None = None
    lse: float = 1.0

    def in_base_e(self) -> LatentScales:
        return self._replace(lse=math.log(2.0))


NO_SCALES = LatentScales()
NATURAL = NO_SCALES.in_base_e()


@dataclass(frozen=True, slots=True)
class _Checked:
    """What runs of one signature share; factors are scales of the logits, the output, the LSE."""

    variant: Variant
    strides: bytes
    second: Second
    factors: tuple[float, float, float]
    row_shape: tuple[int, int]


@dataclass(slots=True)
class _Run:
    """A checked run: views of its arrays, None for none. An output that is made is put here."""

    variant: Variant
    queries: Parts
    pages: Parts
    out: ArrayView | None
    lse: ArrayView | None
    sinks: ArrayView | None
    token_scales: ArrayView | None
    factors: tuple[float, float, float]
    rope_scale: float
    shape_o: tuple[int, int, int]


class _Bound(NamedTuple):
    """A plan's launches for arrays of these lengths.

    return_lse, names, scales   of the run that it was made for
    sizes    bytes of each array
    second   of a cache of this size
    shape_o  of the output
    clear    see workspace.clear_of
    apart    by the address of ckv_cache
    """

    found: Found[_Checked]
    workspace: ArrayView
    return_lse: bool
    names: Names
    scales: LatentScales
    sizes: list[int]
    run: BoundRun
    second: Second
    shape_o: tuple[int, int, int]
    clear: tuple[int, ...]
    apart: Apart


_CALLS: CallCache[_Checked] = CallCache(
    Argument("q_nope", 0),
    Argument("q_pe", 0),
    Argument("ckv_cache", 0),
    Argument("kpe_cache", 0),
    Argument("out", 0, is_output=True),
    Argument("lse", 0, is_output=True),
    Argument("sinks"),
)
_K, _OUT, _LSE = 2, 4, 5
_NO_ADDRESSES = [0] * 7


def run(
    wrapper: BatchWrapper,
    arrays: tuple[Any, ...],
    names: Names,
    scales: LatentScales,
    return_lse: bool,
) -> Any:
    """The answer of a batch: out [rows, heads, latent columns], or (out, lse [rows, heads]).

    arrays  the two parts of q and of the pages, of which the second is None where the first holds
            both; out, lse and sinks, each may be None
    names   what the caller calls the parts
    """
    turns = wrapper._turns
    with turns.running:
        plan = wrapper._current or wrapper._require_plan()
        if turns.is_shared:
            turns.check(plan.owner)
        workspace, last = wrapper._workspace, plan.bound
        # By objects: a bool differs from a number, and scales that are given are made anew.
        if last is not None and last.workspace is workspace and last.names is names:
            if last.return_lse is return_lse and last.scales is scales:
                answer = _run_last(last, arrays, return_lse)
                if answer is not None:
                    return answer
        scalars: tuple[Any, ...] = plan.geometry, plan.framework, return_lse, names
        if scales is not NO_SCALES:
            scalars += scales
        found = _CALLS.lookup(arrays, scalars) if plan.is_uniform else None
        if found is not None:
            bound = _bind_cached(plan, workspace, found[0], arrays, (return_lse, names, scales))
            answer = bound and _launch_bound(bound, found[1], arrays, return_lse)
            if answer is not None:
                plan.bound = bound  # another thread may do the same
                return answer
        return _run_checked(wrapper, plan, arrays, names, scalars, scales, return_lse)


def dims_of(geometry: Geometry) -> Dims:
    """The columns of the two parts of a plan's rows."""
    spec = geometry.spec
    return Dims(spec.head_dim_vo, spec.head_dim_qk - spec.head_dim_vo)


def _run_checked(
    wrapper: BatchWrapper,
    plan: Plan,
    arrays: tuple[Any, ...],
    names: Names,
    scalars: tuple[Any, ...],
    scales: LatentScales,
    return_lse: bool,
) -> Any:
    """The answer of a run that is not in the call cache."""
    is_new = wrapper._host_plan is not None and wrapper._follow(arrays[0])
    if is_new:
        plan = wrapper._require_plan()
    # --- 1. Validate ---
    return_lse = parse.flag(return_lse, "return_lse")
    run = _check(wrapper, plan, arrays, names, scales)
    like, spec = run.queries.latent, plan.geometry.spec

    # --- 2. Answer on the CPU ---
    if like.device.kind == "cpu":
        return _answer_on_cpu(wrapper, plan, run, return_lse)

    # --- 3. Launch on the caller's stream ---
    if run.token_scales is not None:
        _check_token_scales(run.token_scales, run.pages)
    *_, out, lse, _ = arrays
    shape_o, made_out, made_lse = run.shape_o, None, None
    if out is None:
        out, made_out = array.empty(shape_o, spec.dtype_o, like), shape_o
        run.out = array.view(out, "out")
    if lse is None and return_lse:
        lse, made_lse = array.empty(shape_o[:-1], dtypes.float32, like), shape_o[:-1]
        run.lse = array.view(lse, "lse")
    if plan.batch.num_rows:
        checked = _launch(wrapper, plan, run)
        is_known = run.token_scales is None and plan.is_uniform and not is_new
        if is_known and plan.framework == like.framework:
            _CALLS.insert(arrays, scalars, checked, like, spec.dtype_o, made_out, made_lse)
    out = array.deliver(out, like)
    return (out, array.deliver(lse, like)) if return_lse else out


def _check(
    wrapper: BatchWrapper,
    plan: Plan,
    arrays: tuple[Any, ...],
    names: Names,
    scales: LatentScales,
) -> _Run:
    """The run, its arrays checked against the plan and each other."""
    q, q_rope, k, k_rope, out, lse, sinks = arrays
    spec, dims = plan.geometry.spec, dims_of(plan.geometry)
    queries = latent.view_parts(q, q_rope, dims, names[0], (spec.dtype_q, "q_data_type"))
    keys = latent.view_parts(k, k_rope, dims, names[1], (spec.dtype_kv, "kv_data_type"))
    pages = latent.as_pages(keys, spec.page_size)
    _check_arrays(plan, queries, pages)
    vout, vlse, vsinks = (
        None if x is None else array.view(x, name)
        for x, name in ((out, "out"), (lse, "lse"), (sinks, "sinks"))
    )
    if vsinks is not None:
        known = {"num_qo_heads": spec.num_qo_heads}
        match_array(vsinks, "num_qo_heads", dtypes.float32, "sinks", known)
    token_scales = _view_token_scales(scales.token_scales, pages)
    inputs = {**queries.views, **pages.views, "sinks": vsinks, "ckv_scale_arr": token_scales}
    same_device(wrapper._workspace, **inputs, out=vout, lse=vlse)
    require_apart(wrapper._workspace, **inputs, out=vout, lse=vlse)
    shape_o = plan.batch.num_rows, spec.num_qo_heads, spec.head_dim_vo
    if vout is not None:
        require_contiguous_last(vout, "out")
    remedy = "pass such an array, or plan with output_dtype=out.dtype"
    match_output(vout, shape_o, spec.dtype_o, "out", remedy, **inputs, lse=vlse)
    match_output(vlse, shape_o[:-1], dtypes.float32, "lse", **inputs)
    sm_scale, output_scale, rope_scale = _read_scales(scales, plan.geometry)
    variant = Variant(
        _are_aligned(queries, pages, vout),
        sm_scale <= 0.0,
        key_scales="" if token_scales is None else "tokens",
    )
    factors = sm_scale, output_scale, scales.lse
    return _Run(
        variant, queries, pages, vout, vlse, vsinks, token_scales, factors, rope_scale, shape_o
    )


def _answer_on_cpu(wrapper: BatchWrapper, plan: Plan, run: _Run, return_lse: bool) -> Any:
    if plan.batch.num_rows:
        with wrapper._turns.planning:
            wrapper._prepare(plan, run.variant)
    sm_scale, output_scale, lse_scale = run.factors
    spec = replace(plan.geometry.spec, sm_scale=sm_scale, output_scale=output_scale)
    tokens = None if run.token_scales is None else array.as_numpy(run.token_scales)
    found = cpu.attend(
        spec,
        latent.as_rows(run.queries, run.rope_scale),
        _requests_of(plan, run.pages, tokens),
        {"sinks": run.sinks},
    )
    out = cpu.deliver(found[0], run.out, run.queries.latent)
    lse = cpu.deliver((found[1] * lse_scale).astype(np.float32), run.lse, run.queries.latent)
    return (out, lse) if return_lse else out


def _run_last(last: _Bound, arrays: tuple[Any, ...], return_lse: bool) -> Any:
    """The answer of a run whose arrays differ from the last one's in nothing but addresses; None
    for others, or where that is not known."""
    compare = last.found.compare
    try:
        addresses = None if compare is None else compare(arrays)
    except Exception:  # as in CallCache.lookup
        return None
    if addresses is None:
        return None
    addresses += _NO_ADDRESSES[len(addresses) :]
    return _launch_bound(last, addresses, arrays, return_lse)


def _launch_bound(
    bound: _Bound, addresses: list[int], arrays: tuple[Any, ...], return_lse: bool
) -> Any:
    """The answer of a run that passes all checks, or None where an output may share memory."""
    call = bound.found.call
    if bound.apart.get(addresses[_K]) != addresses and not _are_apart(bound, addresses):
        return None
    out, lse = arrays[_OUT], arrays[_LSE]
    q, q_rope, k, k_rope, o, lse_ptr, sinks = addresses
    if out is None:
        out = call.make_out(bound.shape_o)
        o = call.address(out)
    if lse is None and return_lse:
        lse = call.make_lse(bound.shape_o[:-1])
        lse_ptr = call.address(lse)
    optional = params.NO_OPTIONAL
    if lse_ptr or sinks:
        optional = params.OPTIONAL.pack(lse_ptr, 0, sinks, 0, 0, 0, 0, *params.NOTHING_MORE)
    second = bound.second.pack(q, q_rope, k, k_rope)
    bound.run.launch(q, k, k, o, optional, call.current_stream(), second)
    return (out, lse) if return_lse else out


def _are_apart(bound: _Bound, addresses: list[int]) -> bool:
    """Whether no output that is given has bytes of another array, and no array some of the
    workspace's."""
    call = bound.found.call
    if call.outputs and call.overlaps(addresses, bound.sizes):
        return False
    end, *lows = bound.clear
    for address, low in zip(addresses, lows, strict=True):
        if low < address < end:
            return False
    bound.apart.add(addresses[_K], addresses)
    return True


def _bind_cached(
    plan: Plan,
    workspace: ArrayView,
    found: Found[_Checked],
    arrays: tuple[Any, ...],
    asked: tuple[bool, Names, LatentScales],
) -> _Bound | None:
    """The launches of a plan for arrays of these lengths, or None if they do not fit it."""
    batch, checked = plan.batch, found.call.checked
    key = found.call, workspace.ptr, workspace.shape, *found.lengths
    known = plan.bounds.get(key)
    if known is not None:
        is_same = known.found is found and known.workspace is workspace
        return known if is_same else known._replace(found=found, workspace=workspace)
    prepared = plan.prepared.get(checked.variant)
    given = zip(arrays, found.lengths, strict=True)
    q, q_rope, k, k_rope, out, lse, _ = (None if x is None else n for x, n in given)
    fits = {n for n in (q, q_rope, out, lse) if n is not None} == {batch.num_rows}
    if prepared is None or not fits or not batch.num_rows or k_rope not in (None, k):
        return None
    if not k or k <= batch.max_page:
        return None
    run = _bind(plan, prepared, workspace.ptr, checked, k)
    if len(plan.bounds) >= _MAX_BOUNDS:
        plan.bounds.clear()
    shape_o = batch.num_rows, *checked.row_shape
    second = checked.second.of_pages(k)
    clear = clear_of(workspace, found.sizes)
    apart = found.apart_of(clear)
    bound = _Bound(found, workspace, *asked, found.sizes, run, second, shape_o, clear, apart)
    plan.bounds[key] = bound
    return bound


def _launch(wrapper: BatchWrapper, plan: Plan, run: _Run) -> _Checked:
    """Enqueue a run; returns what later ones of its signature share with it."""
    queries, pages, vout, vlse = run.queries, run.pages, run.out, run.lse
    assert vout is not None
    checked = _Checked(
        run.variant,
        latent.pack_strides(queries, pages, vout, (0, 0) if vlse is None else vlse.strides),
        latent.second_parts(queries, pages, run.rope_scale),
        run.factors,
        run.shape_o[1:],
    )
    prepared = wrapper._prepare(plan, run.variant)
    vq, vk = queries.latent, pages.latent
    stream = array.current_stream(vq)
    given = queries.rope, pages.rope, vlse, run.sinks, run.token_scales
    used = (vk, vout, wrapper._workspace, *plan.views, *(x for x in given if x is not None))
    array.acquire(vq, *used)
    q_rope, k_rope, lse, sinks, scales = (0 if x is None else x.ptr for x in given)
    bound = _bind(plan, prepared, wrapper._workspace.ptr, checked, vk.shape[0])
    addresses = params.OPTIONAL.pack(lse, 0, sinks, 0, scales, 0, 0, *params.NOTHING_MORE)
    second = checked.second.pack(vq.ptr, q_rope, vk.ptr, k_rope)
    bound.launch(vq.ptr, vk.ptr, vk.ptr, vout.ptr, addresses, stream, second)
    array.release(vq, vq, *used)
    return checked


def _bind(
    plan: Plan, prepared: Prepared, workspace: int, checked: _Checked, num_pages: int
) -> BoundRun:
    sm_scale, output_scale, lse_scale = checked.factors
    return prepared.launcher.bind(
        prepared.schedule,
        prepared.words,
        workspace,
        checked.strides,
        num_pages,
        plan.page_ids,
        0,
        0,
        output_scale,
        sm_scale,
        prepared.rotated,
        lse_scale,
    )


def _check_arrays(plan: Plan, queries: Parts, pages: Parts) -> None:
    spec, batch, (name, _) = plan.geometry.spec, plan.batch, queries.names
    vq, vk = queries.latent, pages.latent
    if len(vq.shape) != 3 or vq.shape[1] != spec.num_qo_heads or vq.shape[0] != batch.num_rows:
        raise ArgumentError(
            f"{name}: shape is {list(vq.shape)}; wanted [{batch.num_rows}, {spec.num_qo_heads}, "
            "columns], the rows and heads of the plan"
        )
    if batch.max_page >= vk.shape[0]:
        raise ArgumentError(
            f"{pages.names[0]}: holds {vk.shape[0]} pages, but kv_indices of the plan name page "
            f"{batch.max_page}"
        )


def _are_aligned(queries: Parts, pages: Parts, vout: ArrayView | None) -> bool:
    """Whether all rows start on 16-byte boundaries, as those of an output of our own do."""
    rows = [x for x in (queries.latent, queries.rope, vout) if x is not None]
    keys = [x for x in (pages.latent, pages.rope) if x is not None]
    pointers = functools.reduce(operator.or_, (x.ptr for x in (*rows, *keys)))
    return are_rows_aligned(pointers, [(x.strides[:2], x.dtype) for x in (*rows, *keys)])


def _read_scales(scales: LatentScales, geometry: Geometry) -> tuple[float, float, float]:
    """(scale of the logits, scale of the output, what the rope part's is to the latent part's)."""
    base = geometry.spec.sm_scale if scales.logits is None else scales.logits
    sm_scale = parse.finite(base * scales.latent, "sm_scale", 1.0)
    output = parse.finite(scales.output * scales.latent, "ckv_scale", 1.0)
    return sm_scale, output, scales.rope / scales.latent


def _view_token_scales(x: Any, pages: Parts) -> ArrayView | None:
    if x is None:
        return None
    v = array.view(x, "ckv_scale_arr")
    if len(v.shape) == 3 and v.shape[:2] == pages.latent.shape[:2]:
        raise UnsupportedError(
            f"ckv_scale_arr: shape {list(v.shape)} has scales of groups of columns; only one scale "
            "of each token is supported, [num_pages, page_size], or FlashMLA's rows of 656 bytes "
            "(cupyattn.flash_mla), which hold four"
        )
    extents = dict(zip(("num_pages", "page_size"), pages.latent.shape, strict=False))
    match_array(v, "num_pages page_size", dtypes.float32, "ckv_scale_arr", extents)
    return v


def _check_token_scales(v: ArrayView, pages: Parts) -> None:
    """UnsupportedError unless a kernel can read scales of tokens, [num_pages, page_size]."""
    if pages.latent.dtype is not dtypes.float8_e4m3fn:
        raise UnsupportedError(
            f"ckv_scale_arr: scales of tokens of dtype {pages.latent.dtype} have no GPU kernel; "
            "pass a cache of float8_e4m3fn, or CPU arrays"
        )
    if v.strides != (v.shape[1], 1) and v.shape[0] > 1:
        raise UnsupportedError(
            f"ckv_scale_arr: strides are {list(v.strides)}; wanted a contiguous array on the GPU"
        )


def _requests_of(
    plan: Plan, pages: Parts, token_scales: np.ndarray | None
) -> Iterator[cpu.Request]:
    batch, lengths = plan.batch, plan.batch.requests
    assert batch.page_ids is not None
    for index in range(batch.num_requests):
        begin, kv_len = int(lengths.q_start[index]), int(lengths.kv_len[index])
        rows = slice(begin, begin + int(lengths.qo_len[index]))
        start = int(lengths.kv_start[index])
        ids = batch.page_ids[start : start - (-kv_len // plan.geometry.spec.page_size)]
        yield cpu.Request(rows, *latent.gather(pages, ids, kv_len, token_scales))
