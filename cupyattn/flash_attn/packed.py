"""flash_attn's functions of queries, keys and values in one array, or keys and values in one."""

from __future__ import annotations

from typing import Any

from .. import array
from ..core import overloads
from ..core.parse import require_int
from ..core.tracing import untraced
from ..errors import ArgumentError
from .api import flash_attn_func, flash_attn_varlen_func


@untraced
@overloads.flash_attn_qkvpacked_func
def flash_attn_qkvpacked_func(
    qkv: Any,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Any = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Any = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """`flash_attn_func` of qkv [b, seqlen, 3, num_heads, head_dim], which is not copied.

    Raises
    ------
    CupyAttnError
        Errors call its parts q, k and v. All else as there.

    Notes
    -----
    Semantics: flash_attn's function of the same name.

    Examples
    --------
    >>> import numpy as np
    >>> from cupyattn import flash_attn
    >>> qkv = np.ones((2, 5, 3, 8, 64), np.float16)
    >>> flash_attn.flash_attn_qkvpacked_func(qkv, causal=True).shape
    (2, 5, 8, 64)
    """
    q, k, v = parts_of(qkv, "qkv", 2, 3, 5)
    return flash_attn_func(
        q,
        k,
        v,
        dropout_p=dropout_p,
        softmax_scale=softmax_scale,
        causal=causal,
        window_size=window_size,
        softcap=softcap,
        alibi_slopes=alibi_slopes,
        deterministic=deterministic,
        return_attn_probs=return_attn_probs,
    )


@untraced
@overloads.flash_attn_kvpacked_func
def flash_attn_kvpacked_func(
    q: Any,
    kv: Any,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Any = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Any = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """`flash_attn_func` of q and of kv [b, seqlen_k, 2, num_heads_k, head_dim], which is not
    copied.

    Raises
    ------
    CupyAttnError
        Errors call its parts k and v. All else as there.

    Notes
    -----
    Semantics: flash_attn's function of the same name.

    Examples
    --------
    >>> import numpy as np
    >>> from cupyattn import flash_attn
    >>> q, kv = np.ones((2, 5, 8, 64), np.float16), np.ones((2, 9, 2, 2, 64), np.float16)
    >>> flash_attn.flash_attn_kvpacked_func(q, kv, causal=True).shape
    (2, 5, 8, 64)
    """
    k, v = parts_of(kv, "kv", 2, 2, 5)
    return flash_attn_func(
        q,
        k,
        v,
        dropout_p=dropout_p,
        softmax_scale=softmax_scale,
        causal=causal,
        window_size=window_size,
        softcap=softcap,
        alibi_slopes=alibi_slopes,
        deterministic=deterministic,
        return_attn_probs=return_attn_probs,
    )


@untraced
@overloads.flash_attn_varlen_qkvpacked_func
def flash_attn_varlen_qkvpacked_func(
    qkv: Any,
    cu_seqlens: Any,
    max_seqlen: Any,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Any = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Any = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """`flash_attn_varlen_func` of qkv [rows, 3, num_heads, head_dim], which is not copied.

    Parameters
    ----------
    qkv
        [rows, 3, num_heads, head_dim], request after request.
    cu_seqlens, max_seqlen
        Those of the queries and of the keys.
    other arguments
        As in `flash_attn_func`.

    Raises
    ------
    CupyAttnError
        Errors call its parts q, k and v. All else as there.

    Notes
    -----
    Semantics: flash_attn's function of the same name.

    Examples
    --------
    >>> import numpy as np
    >>> from cupyattn import flash_attn
    >>> qkv, offsets = np.ones((20, 3, 8, 64), np.float16), np.array([0, 4, 20], np.int32)
    >>> flash_attn.flash_attn_varlen_qkvpacked_func(qkv, offsets, 16, causal=True).shape
    (20, 8, 64)
    """
    q, k, v = parts_of(qkv, "qkv", 1, 3, 4)
    return flash_attn_varlen_func(
        q,
        k,
        v,
        cu_seqlens_q=cu_seqlens,
        cu_seqlens_k=cu_seqlens,
        max_seqlen_q=max_seqlen,
        max_seqlen_k=max_seqlen,
        dropout_p=dropout_p,
        softmax_scale=softmax_scale,
        causal=causal,
        window_size=window_size,
        softcap=softcap,
        alibi_slopes=alibi_slopes,
        deterministic=deterministic,
        return_attn_probs=return_attn_probs,
    )


@untraced
@overloads.flash_attn_varlen_kvpacked_func
def flash_attn_varlen_kvpacked_func(
    q: Any,
    kv: Any,
    cu_seqlens_q: Any,
    cu_seqlens_k: Any,
    max_seqlen_q: Any,
    max_seqlen_k: Any,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Any = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Any = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """`flash_attn_varlen_func` of q and of kv [n, 2, num_heads_k, head_dim], which is not copied.

    Raises
    ------
    CupyAttnError
        Errors call its parts k and v. All else as there.

    Notes
    -----
    Semantics: flash_attn's function of the same name.

    Examples
    --------
    >>> import numpy as np
    >>> from cupyattn import flash_attn
    >>> q, kv = np.ones((20, 8, 64), np.float16), np.ones((20, 2, 2, 64), np.float16)
    >>> offsets = np.array([0, 4, 20], np.int32)
    >>> o = flash_attn.flash_attn_varlen_kvpacked_func(q, kv, offsets, offsets, 16, 16, causal=True)
    >>> o.shape
    (20, 8, 64)
    """
    k, v = parts_of(kv, "kv", 1, 2, 4)
    return flash_attn_varlen_func(
        q,
        k,
        v,
        cu_seqlens_q=cu_seqlens_q,
        cu_seqlens_k=cu_seqlens_k,
        max_seqlen_q=max_seqlen_q,
        max_seqlen_k=max_seqlen_k,
        dropout_p=dropout_p,
        softmax_scale=softmax_scale,
        causal=causal,
        window_size=window_size,
        softcap=softcap,
        alibi_slopes=alibi_slopes,
        deterministic=deterministic,
        return_attn_probs=return_attn_probs,
    )


def parts_of(x: Any, name: str, axis: int, count: int, axes: int) -> list[Any]:
    """The parts of x along an axis of `count`, without that axis; x has `axes` axes."""
    shape = array.view(x, name).shape
    if len(shape) != axes or shape[axis] != count:
        lead = "batch, seqlen" if axis == 2 else "rows"
        raise ArgumentError(
            f"{name}: shape is {list(shape)}; wanted [{lead}, {count}, heads, head_dim]"
        )
    before = (slice(None),) * axis
    return [x[(*before, part)] for part in range(count)]


def split_heads(qkv: Any, num_heads_q: Any) -> list[Any]:
    """q, k and v of qkv [b, s, 3, heads, d], or of [b, s, heads, d] whose first heads are q's."""
    shape = array.view(qkv, "qkv").shape
    if len(shape) != 4:
        return parts_of(qkv, "qkv", 2, 3, 5)
    if num_heads_q is None:
        raise ArgumentError(
            f"num_heads_q: got None for qkv of shape {list(shape)}; wanted how many heads are the "
            "queries'"
        )
    count = require_int(num_heads_q, "num_heads_q")
    rest = shape[2] - count
    if rest < 2 or rest % 2:
        raise ArgumentError(
            f"num_heads_q: got {count} of {shape[2]} heads; wanted an even number of others, keys' "
            "and values'"
        )
    middle = count + rest // 2
    return [qkv[:, :, :count], qkv[:, :, count:middle], qkv[:, :, middle:]]
