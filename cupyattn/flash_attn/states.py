"""flash_attn's functions on partial outputs, and on schedules, which calls here do not need."""

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
from ..engine import merge_states as merge
from ..engine.index_arrays import compute, progression
from ..errors import ArgumentError
from ..typing import Array, ArrayT, LseT

_FLOATS = dtypes.float32, dtypes.float16, dtypes.bfloat16
_ATTN_STATES = merge.PAIR._replace(
    names=merge.PAIR.names._replace(
        v_a="prefix_output",
        v_b="suffix_output",
        s_a="prefix_lse",
        s_b="suffix_lse",
        out="output",
        lse="output_lse",
    )
)


@untraced
def merge_state_v2(
    v_a: ArrayT, s_a: LseT, v_b: Array, s_b: Array, v_merged: Any = None, s_merged: Any = None
) -> tuple[ArrayT, LseT]:
    """The output over the keys of two states, which have none in common.

    Parameters
    ----------
    v_a, v_b
        [rows, num_heads, head_dim], float16, bfloat16 or float32.
    s_a, s_b
        [rows, num_heads]: their LSE, natural logarithms. An infinite one, of either sign, stands
        for no keys.
    v_merged, s_merged
        Arrays to write instead of new ones; s_merged may be s_a or s_b.

    Returns
    -------
    tuple of arrays
        (v, s), s float32; without any key 0 and -inf.

    Raises
    ------
    CupyAttnError
        Errors as in `merge_state`.

    Notes
    -----
    Semantics: sgl_kernel's function of the same name, which gives NaN there.

    Examples
    --------
    >>> import numpy as np
    >>> from cupyattn import flash_attn
    >>> v, s = np.ones((3, 8, 64), np.float16), np.zeros((3, 8), np.float32)
    >>> o, lse = flash_attn.merge_state_v2(v, s, v, s)
    >>> o.shape, lse.shape
    ((3, 8, 64), (3, 8))
    """
    s_a, s_b = (
        _without_infinity(s, tuple(array.view(v, of).shape[:-1]), name)
        for s, name, v, of in ((s_a, "s_a", v_a, "v_a"), (s_b, "s_b", v_b, "v_b"))
    )
    arrays = merge.make_arrays(v_a=v_a, v_b=v_b, s_a=s_a, s_b=s_b, out=v_merged, lse=s_merged)
    return merge.run(merge.PAIR, arrays, True)


@untraced
def merge_attn_states(
    output: Any,
    prefix_output: Any,
    prefix_lse: Any,
    suffix_output: Any,
    suffix_lse: Any,
    output_lse: Any = None,
    prefill_tokens_with_context: int | None = None,
    output_scale: Any = None,
) -> None:
    """Write the output over the keys of a prefix and of a suffix, which have none in common.

    Parameters
    ----------
    output
        [rows, num_heads, head_dim], float16, bfloat16, float32, float8_e4m3fn or float8_e5m2.
    prefix_output, suffix_output
        Likewise, of one dtype that is not fp8.
    prefix_lse, suffix_lse
        float32 [num_heads, rows]: their LSE, natural logarithms. An infinite one, of either sign,
        stands for no keys.
    output_lse
        float32 [num_heads, rows] to write, or None.
    prefill_tokens_with_context
        Rows that have a prefix; later ones get the suffix's as they are. Default: all.
    output_scale
        Of an fp8 output, which holds the output divided by it, saturated: a number, or a float32
        array of one element, read on the device.

    Returns
    -------
    result
        None.

    Raises
    ------
    CupyAttnError
        Errors as in `merge_state`.

    Notes
    -----
    Semantics: vLLM's function of the same name, which gives NaN where neither has keys; here 0 and
    -inf.

    Examples
    --------
    >>> import numpy as np
    >>> from cupyattn import flash_attn
    >>> output, states = np.empty((3, 8, 64), np.float16), np.ones((2, 3, 8, 64), np.float16)
    >>> lse = np.zeros((2, 8, 3), np.float32)
    >>> flash_attn.merge_attn_states(output, states[0], lse[0], states[1], lse[1])
    >>> output.min()
    np.float16(1.0)
    """
    vo, vs = array.view(output, "output"), array.view(suffix_lse, "suffix_lse")
    num_rows = count = vo.shape[0] if vo.shape else 0
    if prefill_tokens_with_context is not None:
        count = require_int(prefill_tokens_with_context, "prefill_tokens_with_context", 0)
    wanted = tuple(vo.shape[1::-1])
    s_a = _without_infinity(prefix_lse, wanted, "prefix_lse", count, -math.inf)
    s_b = _without_infinity(suffix_lse, wanted, "suffix_lse", count, 0.0)
    lse = None if output_lse is None else _by_rows(output_lse, "output_lse")
    arrays = merge.make_arrays(
        v_a=prefix_output,
        v_b=suffix_output,
        s_a=_by_rows(s_a, "prefix_lse, suffix_lse"),
        s_b=_by_rows(s_b, "prefix_lse, suffix_lse"),
        out=output,
        lse=lse,
    )
    merge.run(_ATTN_STATES, arrays, True, output_scale)
    if output_lse is not None and count < num_rows:
        compute(_copy_from(count), array.view(output_lse, "output_lse"), vs)


def _copy_from(column: int) -> Any:
    def copy(to: Any, source: Any) -> Any:
        to[:, column:] = source[:, column:]
        return to

    return copy


def _by_rows(s: Any, name: str) -> Any:
    """[num_heads, rows] as [rows, num_heads]; others as they are, for the checks to refuse."""
    return s.swapaxes(0, 1) if len(array.view(s, name).shape) == 2 else s


@untraced
def flash_attn_combine(
    out_partial: ArrayT, lse_partial: LseT, out: Any = None, out_dtype: Any = None
) -> tuple[ArrayT, LseT]:
    """The output over the keys of several states, which have none in common.

    Parameters
    ----------
    out_partial
        float32 [num_splits, b, seqlen, num_heads, head_dim], or [num_splits, rows, num_heads,
        head_dim].
    lse_partial
        float32, the same without head_dim: natural logarithms, -inf for no keys.
    out
        The array to write, contiguous in its rows.
    out_dtype
        The dtype of a new one, default float32.

    Returns
    -------
    tuple of arrays
        (out, lse): out_partial without num_splits, in its dtype or as asked, and lse float32 [b,
        seqlen, num_heads] or [rows, num_heads].

    Raises
    ------
    CupyAttnError
        ArgumentError.

    Notes
    -----
    Semantics: FA3's function of the same name.

    Examples
    --------
    >>> import numpy as np
    >>> from cupyattn import flash_attn
    >>> states, lse = np.ones((4, 2, 5, 8, 64), np.float32), np.zeros((4, 2, 5, 8), np.float32)
    >>> o, whole = flash_attn.flash_attn_combine(states, lse)
    >>> o.shape, whole.shape
    ((2, 5, 8, 64), (2, 5, 8))
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
    parts: Any = out_partial
    lses: Any = lse_partial
    states = parts.reshape(splits, rows, heads, dim).swapaxes(0, 1)
    s_rows = lses.reshape(splits, rows, heads).swapaxes(0, 1)
    arrays = merge.make_arrays(v_a=states, s_a=s_rows, out=target)
    output, lse = merge.run(merge.STATES, arrays, True)
    return (output.reshape(*lead, heads, dim) if out is None else out), lse.reshape(*lead, heads)


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

    Returns
    -------
    result
        int32 [1], a zero that must not be written, where cache_seqlens is. Only batch_size, numbers
        of heads and headdim are checked: ArgumentError.

    Notes
    -----
    Semantics: FA3's function of the same name.

    Examples
    --------
    >>> import numpy as np
    >>> from cupyattn import flash_attn
    >>> lengths = np.array([20, 15], np.int32)
    >>> flash_attn.get_scheduler_metadata(2, 1, 32, 8, 2, 64, lengths)
    array([0], dtype=int32)
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


def _without_infinity(
    s: Any, shape: tuple[int, ...], name: str, count: int = 0, beyond: float | None = None
) -> Any:
    """s with -inf for infinities, and from column `count` on `beyond`, unless that is None; or as
    it is if it has another shape, which the checks say."""
    v: ArrayView = array.view(s, name)
    if tuple(v.shape) != shape or v.dtype not in _FLOATS:
        return s

    def replaced(x: Any) -> Any:
        if hasattr(x, "masked_fill"):
            result = x.masked_fill(x == math.inf, -math.inf)
        else:  # CuPy's arrays have their own
            result = np.where(x == np.inf, x.dtype.type(-np.inf), x)
        if beyond is not None:
            result[:, count:] = beyond
        return result

    return compute(replaced, v)
