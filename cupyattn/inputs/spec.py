"""The options of a call as given, and the checks that make an AttentionSpec of them."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from ..core import dtypes, parse
from ..core.dtypes import DType
from ..core.problem import MAX_LENGTH
from ..core.spec import AttentionSpec
from ..errors import ArgumentError, UnsupportedError


class Given(NamedTuple):
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

    @property
    def is_constant(self) -> bool:
        """Whether equal options always mean the same: a tensor may change its value."""
        kinds = (str, int, float, np.generic)
        return all(x is None or isinstance(x, kinds) for x in self._replace(o_dtype=None))


def make_spec(
    given: Given,
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
    causal = parse.flag(given.causal, "causal") and mask_form is None
    causal = causal or mask_form == "runs"
    default_scale = 1.0 / math.sqrt(head_dim_qk) if head_dim_qk else 1.0
    sm_scale = parse.finite(given.sm_scale, "sm_scale", default_scale)
    sm_scale *= parse.finite(given.q_scale, "q_scale", 1.0)
    sm_scale *= parse.finite(given.k_scale, "k_scale", 1.0)
    spec = AttentionSpec(
        num_qo_heads=num_qo_heads,
        num_kv_heads=num_kv_heads,
        head_dim_qk=head_dim_qk,
        head_dim_vo=head_dim_vo,
        dtype_q=dtype_q,
        dtype_kv=dtype_kv,
        dtype_o=dtype_q if given.o_dtype is None else dtypes.parse(given.o_dtype, o_name),
        kv_layout=parse.kv_layout(given.kv_layout),
        page_size=page_size,
        mask_form="runs" if mask_form == "ranges" else mask_form,
        causal=causal,
        window_left=parse.window(given.window_left, "window_left"),
        window_right=parse.window(given.window_right, "window_right"),
        pos_encoding=parse.pos_encoding_mode(given.pos_encoding_mode),
        logits_soft_cap=parse.soft_cap(given.logits_soft_cap),
        sm_scale=parse.finite(sm_scale, "sm_scale", 1.0),
        output_scale=parse.finite(given.v_scale, "v_scale", 1.0),
        rope_scale=parse.positive(given.rope_scale, "rope_scale", 1.0),
        rope_theta=parse.positive(given.rope_theta, "rope_theta", 1e4),
        value_pages=given.value_pages,
        latent=given.latent,
        sparse=given.sparse,
    )
    spec.problem().check_dtypes()
    return spec


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
