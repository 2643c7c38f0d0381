"""The geometry of a single-request call: what is checked and derived once for all lengths."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from ..array import ArrayView
from ..array.match import Dims, match, require_contiguous_last
from ..core import dtypes
from ..core.dtypes import DType
from ..core.problem import AttentionProblem
from ..errors import ArgumentError
from ..inputs import parse
from ..inputs.limits import are_rows_aligned
from ..launch.attention.single import AttentionLauncher, AttentionOptions


class Options(NamedTuple):
    """The scalar arguments of a call, as given: the key of the launcher cache."""

    kv_layout: str
    causal: bool
    pos_encoding_mode: str
    window_left: int
    logits_soft_cap: float | None
    sm_scale: float | None
    rope_scale: float | None
    rope_theta: float | None
    q_scale: float | None
    k_scale: float | None
    v_scale: float | None
    o_dtype: object


class Extras(NamedTuple):
    """The optional arrays of a call, as given."""

    custom_mask: Any = None
    packed_custom_mask: Any = None
    sinks: Any = None
    scale_q: Any = None
    scale_k: Any = None
    scale_v: Any = None


NO_EXTRAS = Extras()


@dataclass(slots=True)
class Entry:
    """What is known of every call with the same geometry."""

    problem: AttentionProblem
    options: AttentionOptions
    num_qo_heads: int
    num_kv_heads: int
    kv_strides: tuple[int, int, int, int]
    kv_axis: int
    dtype_o: DType
    checked: Options
    launcher: AttentionLauncher | None


def is_reusable(options: Options, *views: ArrayView) -> bool:
    """True if an entry made from these serves every later call that looks the same.

    A tensor given for a scale may change its value, and an empty array may have any strides.
    """
    kinds = (str, int, float, np.generic)
    is_constant = all(x is None or isinstance(x, kinds) for x in options[:-1])
    return is_constant and not any(0 in v.shape for v in views)


def make_entry(
    vq: ArrayView,
    vk: ArrayView,
    vv: ArrayView,
    vout: ArrayView | None,
    given: Options,
    pointers: int,
    has_mask: bool,
    has_scales: bool,
    is_decode: bool,
) -> Entry:
    layout = parse.kv_layout(given.kv_layout)
    dims = Dims()
    match(vq, "Hq Dqk" if is_decode else "Lq Hq Dqk", dims, "q")
    match(vk, "Lkv Hkv Dqk" if layout == "NHD" else "Hkv Lkv Dqk", dims, "k")
    match(vv, "Lkv Hkv Dvo" if layout == "NHD" else "Hkv Lkv Dvo", dims, "v")
    for v, name in ((vq, "q"), (vk, "k"), (vv, "v")):
        require_contiguous_last(v, name)
    heads, kv_heads = dims["Hq"], dims["Hkv"]
    if heads == 0 or kv_heads == 0 or heads % kv_heads:
        raise ArgumentError(
            f"q, k: {heads} query heads over {kv_heads} KV heads; wanted a positive multiple"
        )
    if vk.dtype is not vv.dtype:
        raise ArgumentError(f"v: dtype is {vv.dtype} but k is {vk.dtype}; wanted the same")
    dtype_o = vq.dtype if given.o_dtype is None else dtypes.parse(given.o_dtype, "o_dtype")
    mode = parse.pos_encoding_mode(given.pos_encoding_mode)
    options = _normalise(given, dims["Dqk"], has_mask)
    axis = 0 if layout == "NHD" else 1
    kv_strides = (vk.strides[axis], vk.strides[1 - axis], vv.strides[axis], vv.strides[1 - axis])
    problem = AttentionProblem(
        dtype_q=vq.dtype,
        dtype_kv=vk.dtype,
        dtype_o=dtype_o,
        head_dim_qk=dims["Dqk"],
        head_dim_vo=dims["Dvo"],
        pos_encoding=mode,
        soft_cap=options.logits_soft_cap > 0.0,
        custom_mask=has_mask,
        prescale_logits=has_scales or options.sm_scale <= 0.0,
        aligned=_is_aligned(vq, vk, vv, vout, pointers, dims["Dvo"], dtype_o),
    )
    launcher = None
    problem.check_dtypes()
    if vq.device.kind == "cuda":
        problem.check_supported()
        launcher = AttentionLauncher(problem, options, heads, kv_heads, vq.device.index)
    return Entry(problem, options, heads, kv_heads, kv_strides, axis, dtype_o, given, launcher)


def _normalise(given: Options, head_dim: int, has_mask: bool) -> AttentionOptions:
    default = 1.0 / math.sqrt(head_dim) if head_dim else 1.0
    scale = parse.finite(given.sm_scale, "sm_scale", default)
    scale *= parse.finite(given.q_scale, "q_scale", 1.0)
    scale = parse.finite(scale * parse.finite(given.k_scale, "k_scale", 1.0), "sm_scale", 1.0)
    return AttentionOptions(
        causal=parse.flag(given.causal, "causal") and not has_mask,
        window_left=parse.window_left(given.window_left),
        sm_scale=scale,
        output_scale=parse.finite(given.v_scale, "v_scale", 1.0),
        logits_soft_cap=parse.soft_cap(given.logits_soft_cap),
        rope_scale=parse.positive(given.rope_scale, "rope_scale", 1.0),
        rope_theta=parse.positive(given.rope_theta, "rope_theta", 1e4),
    )


def _is_aligned(
    vq: ArrayView,
    vk: ArrayView,
    vv: ArrayView,
    vout: ArrayView | None,
    pointers: int,
    head_dim_vo: int,
    dtype_o: DType,
) -> bool:
    """True if every row of q, k, v and o starts on a 16-byte boundary, however many there are."""
    views = (vq, vk, vv, vout)
    strides = [(v.strides[:-1], v.dtype) for v in views if v is not None]
    if vout is None:
        strides.append(((head_dim_vo,), dtype_o))
    return are_rows_aligned(pointers, strides)
