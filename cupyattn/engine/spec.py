"""The options of a call as given, and the checks that make an AttentionSpec of them."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from ..core import dtypes, parse
from ..core.dtypes import DType
from ..core.key_share import KeyShare
from ..core.logits import LogitsExpression
from ..core.problem import MAX_LENGTH
from ..core.spec import AttentionSpec
from ..errors import ArgumentError, UnsupportedError


class RawOptions(NamedTuple):
    """The scalar options of a call as given: part of the keys of caches. None is the default."""

    kv_layout: str = "NHD"
    causal: bool = False
    pos_encoding_mode: str = "NONE"
    window_left: int = -1
    logits_soft_cap: float | None = None
    sm_scale: float | None = None
    rope_scale: float | None = None
    rope_theta: float | None = None
    q_scale: float | None = None
    k_scale: float | None = None
    v_scale: float | None = None
    o_dtype: object = None
    window_right: int = -1
    value_pages: int = 0
    latent: bool = False
    sparse: bool = False
    logits: LogitsExpression | None = None
    key_share: KeyShare | None = None
    skip_softmax: float | None = None

    @property
    def is_constant(self) -> bool:
        """Whether equal options always mean the same: a tensor may change its value."""
        kinds = (str, int, float, np.generic, LogitsExpression, KeyShare)
        return all(x is None or isinstance(x, kinds) for x in self._replace(o_dtype=None))


def make_spec(
    options: RawOptions,
    heads_and_dims: tuple[int, int, int, int],
    dtype_q: DType,
    dtype_kv: DType,
    *,
    page_size: int = 0,
    mask_form: str | None = None,
    o_name: str = "o_data_type",
) -> AttentionSpec:
    """Check the options of a call on arrays of these heads and dtypes.

    heads_and_dims: num_qo_heads, num_kv_heads, head_dim_qk, head_dim_vo.
    o_name: an argument of the caller, for messages. Raises ArgumentError or
    UnsupportedError.
    """
    num_qo_heads, num_kv_heads, head_dim_qk, head_dim_vo = heads_and_dims
    require_group(num_qo_heads, num_kv_heads, "num_qo_heads, num_kv_heads")
    # Multi-item scoring, whose mask is intervals of keys, is always causal; ranges say themselves
    # which keys ahead a row sees.
    causal = parse.flag(options.causal, "causal") and mask_form is None
    causal = causal or mask_form == "runs"
    default_scale = 1.0 / math.sqrt(head_dim_qk) if head_dim_qk else 1.0
    sm_scale = parse.finite(options.sm_scale, "sm_scale", default_scale)
    sm_scale *= parse.finite(options.q_scale, "q_scale", 1.0)
    sm_scale *= parse.finite(options.k_scale, "k_scale", 1.0)
    pos_encoding = parse.pos_encoding_mode(options.pos_encoding_mode)
    soft_cap, logits = parse.soft_cap(options.logits_soft_cap), options.logits
    windows = (
        parse.window(options.window_left, "window_left"),
        parse.window(options.window_right, "window_right"),
    )
    if logits is not None:
        soft_cap, factor, logits = resolve_logits(logits, pos_encoding, soft_cap, mask_form)
        sm_scale *= factor
    if logits is not None and logits.mask is not None:
        *own, mask = logits.split_windows()
        windows = narrower(windows[0], own[0]), narrower(windows[1], own[1])
        logits = logits.with_mask(mask)
        mask_form = None if mask is None else "expression"
    spec = AttentionSpec(
        num_qo_heads=num_qo_heads,
        num_kv_heads=num_kv_heads,
        head_dim_qk=head_dim_qk,
        head_dim_vo=head_dim_vo,
        dtype_q=dtype_q,
        dtype_kv=dtype_kv,
        dtype_o=dtype_q.of_output
        if options.o_dtype is None
        else dtypes.parse(options.o_dtype, o_name),
        kv_layout=parse.kv_layout(options.kv_layout),
        page_size=page_size,
        mask_form="runs" if mask_form == "ranges" else mask_form,
        causal=causal,
        window_left=windows[0],
        window_right=windows[1],
        pos_encoding=pos_encoding,
        logits_soft_cap=soft_cap,
        sm_scale=parse.finite(sm_scale, "sm_scale", 1.0),
        output_scale=parse.finite(options.v_scale, "v_scale", 1.0),
        rope_scale=parse.positive(options.rope_scale, "rope_scale", 1.0),
        rope_theta=parse.positive(options.rope_theta, "rope_theta", 1e4),
        value_pages=options.value_pages,
        latent=options.latent,
        sparse=options.sparse,
        logits=logits,
        key_share=options.key_share,
        skip_softmax=read_skip_softmax(options.skip_softmax),
    )
    spec.problem().check_dtypes()
    if spec.key_share is not None:
        _require_shareable(spec, spec.key_share.cp_world_size)
    return spec


def read_skip_softmax(factor: float | None) -> float:
    """skip_softmax_threshold_scale_factor as a number; 0, None: nothing is left out."""
    name = "skip_softmax_threshold_scale_factor"
    result = parse.finite(factor, name, 0.0)
    if result < 0.0:
        raise ArgumentError(f"{name}: got {result:g}; wanted a positive number, or 0 or None (off)")
    return result


def _require_shareable(spec: AttentionSpec, world_size: int) -> None:
    """UnsupportedError for options that would have to know the place of each key."""
    what = f"is not supported with cp_world_size={world_size}"
    if spec.pos_encoding != "NONE":
        remedy = "rotate q and k by their positions before the call"
        if spec.pos_encoding == "ALIBI":
            remedy = "biases count keys between a row and a key, of which this rank holds some"
        raise UnsupportedError(f"pos_encoding_mode: {spec.pos_encoding!r} {what}; {remedy}")
    if spec.logits is not None:
        raise UnsupportedError(
            f"{spec.logits.name}: {what}; its kv_idx would be that among this rank's own keys"
        )
    if spec.mask_form == "runs":
        raise UnsupportedError(
            f"prefix_len_ptr, token_pos_in_items_ptr: multi-item scoring {what}; pass a mask of "
            "this rank's own keys, custom_mask"
        )


def narrower(first: int, second: int) -> int:
    """The window of two that shows less; -1 shows all."""
    return max(first, second) if -1 in (first, second) else min(first, second)


def resolve_logits(
    logits: LogitsExpression, pos_encoding: str, soft_cap: float, mask_form: str | None
) -> tuple[float, float, LogitsExpression | None]:
    """(soft cap, factor of logits, expressions) of a call: a transform that is the soft cap becomes
    that option.

    Raises UnsupportedError for options that an expression would have to take in.
    """
    if logits.mask is not None and mask_form is not None:
        raise UnsupportedError(
            "mask_fn: is not supported beside a custom mask; pass the mask as an array in "
            "logits_params and write mask_fn='... && seen[q_row, kv_idx]'"
        )
    if mask_form == "whole" and logits.reads("batch"):
        raise UnsupportedError(
            "logits_transform: reads batch, which is not supported beside custom_mask; pass the "
            "mask as an array in logits_params and name it in mask_fn"
        )
    if logits.transform is None:
        return soft_cap, 1.0, logits
    if logits.is_relative and (soft_cap or pos_encoding == "ALIBI"):
        other = "pos_encoding_mode='ALIBI'" if not soft_cap else f"logits_soft_cap={soft_cap:g}"
        raise UnsupportedError(
            f"{logits.name}: is not supported beside {other}; write both as one "
            "logits_transform, in which rows of biases are near[q_token, head, q_idx - kv_idx]"
        )
    if soft_cap:
        raise UnsupportedError(
            f"logits_soft_cap: got {soft_cap:g} with logits_transform; write it in the expression, "
            f"as {soft_cap:g} * tanh(logit / {soft_cap:g})"
        )
    if pos_encoding == "ALIBI":
        raise UnsupportedError(
            "pos_encoding_mode: got 'ALIBI' with logits_transform; write it in the expression, as "
            "logit + slopes[head] * (kv_idx - q_idx)"
        )
    cap, factor = logits.soft_cap
    if cap:
        return cap, factor, logits.without_transform()
    return 0.0, 1.0, logits


def require_group(
    num_qo_heads: int, num_kv_heads: int, name: str, kv_layout: str = "", other_heads: int = 0
) -> None:
    """ArgumentError unless equally many query heads share each KV head, UnsupportedError for more
    heads than 32 bits count.

    other_heads: what arrays of keys would have as KV heads, were they not in this kv_layout.
    """
    if num_qo_heads > MAX_LENGTH:
        raise UnsupportedError(f"{name}: {num_qo_heads} query heads; at most {MAX_LENGTH}")
    if num_qo_heads > 0 < num_kv_heads and num_qo_heads % num_kv_heads == 0:
        return
    hint = ""
    if num_qo_heads > 0 < other_heads and num_qo_heads % other_heads == 0:
        hint = f". With kv_layout={parse.other_layout(kv_layout)!r} they would be {other_heads}"
    raise ArgumentError(
        f"{name}: {num_qo_heads} query heads over {num_kv_heads} KV heads; wanted a positive "
        f"multiple{hint}"
    )
