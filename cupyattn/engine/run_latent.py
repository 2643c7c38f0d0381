"""Runs of latent attention: rows in two parts, of which the first of a key is its value too."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from .. import array
from ..array import ArrayView
from ..array.match import match_array
from ..core import dtypes, parse
from ..core.records import maker
from ..core.spec import AttentionSpec
from ..errors import ArgumentError, UnsupportedError
from . import latent_rows as latent
from .arrays import RunArrays
from .checked_run import CheckedRun, Layout, view_optional
from .cpu import Request
from .key_share import reference_places, require_sinks_once
from .latent_rows import Dims, Parts
from .wrapper import Plan


class LatentOptions(NamedTuple):
    """The options of a run as given.

    names              what the caller calls the two parts of q, and of the pages; separated by "/"
    natural_lse        the LSE has natural logarithms; else base 2
    ckv_scale, kpe_scale  of the two parts of a cache of fp8: a value is its latent part times the
                       first
    ckv_scale_arr      float32 [num_pages, page_size], of latent parts, in place of ckv_scale
    bmm1_scale         the whole scale of the logits, in place of the plan's
    bmm2_scale         of the output
    """

    names: str
    return_lse: Any = False
    natural_lse: bool = False
    ckv_scale: Any = None
    ckv_scale_arr: Any = None
    kpe_scale: Any = None
    bmm1_scale: Any = None
    bmm2_scale: Any = None


make_latent_options = maker(LatentOptions)


class _Scales(NamedTuple):
    """Factors of the logits, of the output, and what the rope part's is to the latent part's."""

    logits: float
    output: float
    rope: float


def _check(
    plan: Plan, arrays: RunArrays, options: LatentOptions, _: tuple[ArrayView, ...]
) -> CheckedRun:
    spec = plan.geometry.spec
    # --- 1. The two parts of rows ---
    dims = Dims(spec.head_dim_vo, spec.head_dim_qk - spec.head_dim_vo)
    q_name, q_rope_name, k_name, k_rope_name = options.names.split("/")
    of_q, of_k = (spec.dtype_q, "q_data_type"), (spec.dtype_kv, "kv_data_type")
    queries = latent.view_parts(arrays.q, arrays.q_rope, dims, (q_name, q_rope_name), of_q)
    keys = latent.view_parts(arrays.k, arrays.k_rope, dims, (k_name, k_rope_name), of_k)
    pages = latent.as_pages(keys, spec.page_size)
    _check_extents(plan, queries, pages)
    # --- 2. Sinks and scales ---
    sinks = view_optional(arrays.sinks, "sinks")
    require_sinks_once(spec, sinks)
    if sinks is not None:
        known = {"num_qo_heads": spec.num_qo_heads}
        match_array(sinks, "num_qo_heads", dtypes.float32, "sinks", known)
    scales = _read_scales(options, spec)
    token_scales = _view_token_scales(options.ckv_scale_arr, pages)
    return CheckedRun(
        views=RunArrays(
            q=queries.latent,
            k=pages.latent,
            sinks=sinks,
            q_rope=queries.rope,
            k_rope=pages.rope,
        ),
        inputs={**queries.views, **pages.views, "sinks": sinks, "ckv_scale_arr": token_scales},
        factors=(scales.logits, scales.output, math.log(2.0) if options.natural_lse else 1.0),
        num_keys=pages.latent.shape[0],
        key_strides=latent.key_strides(pages),
        on_cpu=functools.partial(_on_cpu, plan, queries, pages, scales.rope, token_scales),
        prescale_logits=scales.logits <= 0.0,
        key_scales="" if token_scales is None else "tokens",
        head_scales={} if token_scales is None else {"scale_k": token_scales},
        second=latent.second_parts(queries, pages, scales.rope),
    )


LATENT = Layout(_check, remedy="pass such an array, or plan with output_dtype=out.dtype")


def _check_extents(plan: Plan, queries: Parts, pages: Parts) -> None:
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


def _read_scales(options: LatentOptions, spec: AttentionSpec) -> _Scales:
    """A cache of fp8 has scales, others have none."""
    of_cache = options.ckv_scale, options.ckv_scale_arr, options.kpe_scale
    if any(x is not None for x in of_cache) and not spec.dtype_kv.is_fp8:
        raise ArgumentError(
            f"ckv_scale, kpe_scale: given for a cache of {spec.dtype_kv}; only one of fp8 has "
            "scales, pass None"
        )
    if options.ckv_scale is not None and options.ckv_scale_arr is not None:
        raise ArgumentError("ckv_scale, ckv_scale_arr: got both; wanted one of them")
    ckv = parse.positive(options.ckv_scale, "ckv_scale", 1.0)
    kpe = parse.positive(options.kpe_scale, "kpe_scale", 1.0)
    logits = parse.finite(options.bmm1_scale, "bmm1_scale", spec.sm_scale)
    output = parse.finite(options.bmm2_scale, "bmm2_scale", 1.0)
    return _Scales(
        parse.finite(logits * ckv, "sm_scale", 1.0),
        parse.finite(output * ckv, "ckv_scale", 1.0),
        kpe / ckv,
    )


def _view_token_scales(x: Any, pages: Parts) -> ArrayView | None:
    """Checked: [num_pages, page_size], as a kernel can read them where they are on a GPU."""
    if x is None:
        return None
    v, keys = array.view(x, "ckv_scale_arr"), pages.latent
    if len(v.shape) == 3 and v.shape[:2] == keys.shape[:2]:
        raise UnsupportedError(
            f"ckv_scale_arr: shape {list(v.shape)} has scales of groups of columns; only one scale "
            "of each token is supported, [num_pages, page_size], or FlashMLA's rows of 656 bytes "
            "(cupyattn.flash_mla), which hold four"
        )
    extents = dict(zip(("num_pages", "page_size"), keys.shape, strict=False))
    match_array(v, "num_pages page_size", dtypes.float32, "ckv_scale_arr", extents)
    if v.device.kind == "cpu":
        return v
    if keys.dtype is not dtypes.float8_e4m3fn:
        raise UnsupportedError(
            f"ckv_scale_arr: scales of tokens of dtype {keys.dtype} have no GPU kernel; "
            "pass a cache of float8_e4m3fn, or CPU arrays"
        )
    if v.strides != (v.shape[1], 1) and v.shape[0] > 1:
        raise UnsupportedError(
            f"ckv_scale_arr: strides are {list(v.strides)}; wanted a contiguous array on the GPU"
        )
    return v


def _on_cpu(
    plan: Plan, queries: Parts, pages: Parts, rope_scale: float, token_scales: ArrayView | None
) -> tuple[np.ndarray, Iterator[Request]]:
    tokens = None if token_scales is None else array.as_numpy(token_scales)
    return latent.as_rows(queries, rope_scale), _requests_of(plan, pages, tokens)


def _requests_of(plan: Plan, pages: Parts, token_scales: np.ndarray | None) -> Iterator[Request]:
    batch, lengths = plan.batch, plan.batch.requests
    assert batch.page_ids is not None
    for index in range(batch.num_requests):
        begin, kv_len = int(lengths.q_start[index]), int(lengths.kv_len[index])
        rows = slice(begin, begin + int(lengths.qo_len[index]))
        start = int(lengths.kv_start[index])
        ids = batch.page_ids[start : start - (-kv_len // plan.geometry.spec.page_size)]
        keys, values = latent.gather(pages, ids, kv_len, token_scales)
        options = reference_places(batch, plan.geometry.spec, index)
        yield Request(rows, keys, values, options=options)
