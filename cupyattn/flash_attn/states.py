"""flash_attn's functions on partial answers, and on schedules, which calls here do not need."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from .. import array
from ..array import ArrayView
from ..array.match import match_array
from ..core import dtypes
from ..core.parse import require_int
from ..core.tracing import untraced
from ..errors import ArgumentError
from ..inputs.index_arrays import compute, progression
from ..states import merge

_FLOATS = dtypes.float32, dtypes.float16, dtypes.bfloat16


@untraced
def merge_state_v2(
    v_a: Any, s_a: Any, v_b: Any, s_b: Any, v_merged: Any = None, s_merged: Any = None
) -> tuple[Any, Any]:
    """The answer over the keys of two answers, which have none in common.

    v_a, v_b   [rows, num_heads, head_dim], float16, bfloat16 or float32.
    s_a, s_b   [rows, num_heads]: their LSE, natural logarithms. An infinite one, of either sign,
            stands for no keys.
    v_merged, s_merged   arrays to write instead of new ones; s_merged may be s_a or s_b.

    Returns (v, s), s float32; without any key 0 and -inf. Errors as in `merge_state`. Semantics:
    sgl_kernel's function of the same name, which gives NaN there.
    """
    s_a, s_b = (
        _without_infinity(s, v, names)
        for s, v, names in ((s_a, v_a, ("s_a", "v_a")), (s_b, v_b, ("s_b", "v_b")))
    )
    return merge.run(merge.PAIR, (v_a, v_b, s_a, s_b, v_merged, s_merged), True)


@untraced
def flash_attn_combine(
    out_partial: Any, lse_partial: Any, out: Any = None, out_dtype: Any = None
) -> tuple[Any, Any]:
    """The answer over the keys of several answers, which have none in common.

    out_partial   float32 [num_splits, b, seqlen, num_heads, head_dim], or [num_splits, rows,
            num_heads, head_dim].
    lse_partial   float32, the same without head_dim: natural logarithms, -inf for no keys.
    out     the array to write, contiguous in its rows; out_dtype the dtype of a new one, default
            float32.

    Returns (out, lse): out_partial without num_splits, in its dtype or as asked, and lse float32
    [b, seqlen, num_heads] or [rows, num_heads]. Raises ArgumentError. Semantics: FA3's function of
    the same name.
    """
    v, s = array.view(out_partial, "out_partial"), array.view(lse_partial, "lse_partial")
    if len(v.shape) not in (4, 5):
        raise ArgumentError(
            f"out_partial: shape is {list(v.shape)}; wanted [num_splits, batch, seqlen, heads, "
            "head_dim], or rows in place of batch and seqlen"
        )
    match_array(v, " ".join("abcdefgh"[: len(v.shape)]), _FLOATS, "out_partial")
    if tuple(s.shape) != tuple(v.shape[:-1]):
        raise ArgumentError(
            f"lse_partial: shape is {list(s.shape)}; wanted {list(v.shape[:-1])}, that of "
            "out_partial without head_dim"
        )
    (splits, *lead, heads, dim), rows = v.shape, math.prod(v.shape[1:-2])
    if out is None:
        dtype = dtypes.float32 if out_dtype is None else dtypes.parse(out_dtype, "out_dtype")
        target = array.empty((rows, heads, dim), dtype, v)
    else:
        vo = array.view(out, "out")
        if tuple(vo.shape) != (*lead, heads, dim):
            raise ArgumentError(f"out: shape is {list(vo.shape)}; wanted {[*lead, heads, dim]}")
        if out_dtype is not None and vo.dtype is not dtypes.parse(out_dtype, "out_dtype"):
            raise ArgumentError(f"out_dtype: got {out_dtype}, but out is {vo.dtype}; pass one")
        target = out.reshape(rows, heads, dim)
        if array.view(target, "out").ptr != vo.ptr:
            raise ArgumentError(
                "out: has rows that are not equally far apart; pass a contiguous one"
            )
    states = out_partial.reshape(splits, rows, heads, dim).swapaxes(0, 1)
    s_rows = lse_partial.reshape(splits, rows, heads).swapaxes(0, 1)
    made, lse = merge.run(merge.STATES, (states, None, s_rows, None, target, None), True)
    return (made.reshape(*lead, heads, dim) if out is None else out), lse.reshape(*lead, heads)


@untraced
def get_scheduler_metadata(
    batch_size: int,
    max_seqlen_q: Any,
    max_seqlen_k: Any,
    num_heads_q: int,
    num_heads_kv: int,
    headdim: int,
    cache_seqlens: Any,
    qkv_dtype: Any = "bfloat16",
    headdim_v: int | None = None,
    cu_seqlens_q: Any = None,
    cu_seqlens_k_new: Any = None,
    cache_leftpad: Any = None,
    page_size: int | None = None,
    max_seqlen_k_new: int = 0,
    causal: bool = False,
    window_size: Any = (-1, -1),
    attention_chunk: int = 0,
    has_softcap: bool = False,
    num_splits: int = 0,
    pack_gqa: bool | None = None,
    sm_margin: int = 0,
) -> Any:
    """What programs pass on as scheduler_metadata, which attention here ignores: it plans in each
    call, on the device.

    Returns int32 [1], a zero that must not be written, where cache_seqlens is. Only batch_size,
    numbers of heads and headdim are checked: ArgumentError. Semantics: FA3's function of the same
    name.
    """
    for name, x in (
        ("batch_size", batch_size),
        ("num_heads_q", num_heads_q),
        ("num_heads_kv", num_heads_kv),
        ("headdim", headdim),
    ):
        require_int(x, name, 0 if name == "batch_size" else 1)
    dtypes.parse(qkv_dtype, "qkv_dtype")
    return progression(1, 0, 0, array.view(cache_seqlens, "cache_seqlens"))


def _without_infinity(s: Any, of: Any, names: tuple[str, str]) -> Any:
    """s with -inf for infinities; or as it is if it is no LSE of `of`, which the checks say."""
    v: ArrayView = array.view(s, names[0])
    if tuple(v.shape) != tuple(array.view(of, names[1]).shape[:-1]):
        return s

    def replaced(x: Any) -> Any:
        if hasattr(x, "masked_fill"):
            return x.masked_fill(x == math.inf, -math.inf)
        return np.where(x == np.inf, x.dtype.type(-np.inf), x)  # CuPy's arrays have their own

    return compute(replaced, v) if v.dtype in _FLOATS else s
