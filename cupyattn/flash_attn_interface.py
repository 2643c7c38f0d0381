"""FlashAttention-3's functions: those of `cupyattn.flash_attn` in its order of arguments.

`import cupyattn.flash_attn_interface as flash_attn_interface` serves a program written for it; for
one that imports flash_attn_interface itself, put the module there first:
`sys.modules["flash_attn_interface"] = cupyattn.flash_attn_interface`.
"""

from __future__ import annotations

from typing import Any

from . import flash_attn
from .core import overloads
from .core.tracing import untraced
from .flash_attn.api import hide
from .flash_attn.forward import asks
from .flash_attn.packed import split_heads
from .flash_attn.states import flash_attn_combine as flash_attn_combine
from .flash_attn.states import get_scheduler_metadata as get_scheduler_metadata

__all__ = [
    "flash_attn_combine",
    "flash_attn_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_with_kvcache",
    "get_scheduler_metadata",
]

# FlashAttention-3's, whose interface this is: programs ask for it.
__version__ = "3.0.0"


@untraced
@overloads.fa3_flash_attn_func
def flash_attn_func(
    q: Any,
    k: Any,
    v: Any,
    softmax_scale: float | None = None,
    causal: bool = False,
    qv: Any = None,
    q_descale: Any = None,
    k_descale: Any = None,
    v_descale: Any = None,
    window_size: Any = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    num_splits: int = 0,
    pack_gqa: bool | None = None,
    deterministic: bool = False,
    sm_margin: int = 0,
    return_attn_probs: bool = False,
    *,
    dropout_p: float = 0.0,
    alibi_slopes: Any = None,
    return_softmax_lse: bool = False,
    out: Any = None,
    sinks: Any = None,
    s_aux: Any = None,
) -> Any:
    """`cupyattn.flash_attn.flash_attn_func` in FlashAttention-3's order of arguments.

    Parameters
    ----------
    return_attn_probs, return_softmax_lse
        Two names of: return (out, lse).
    num_splits
        1, FlashAttention-3's default here: keys are not split.
    other arguments
        As in `flash_attn.flash_attn_func`, in FlashAttention-3's order.

    Notes
    -----
    All else is said there.

    Semantics: flash_attn_interface's function of the same name, without a backward pass.

    Examples
    --------
    >>> import numpy as np
    >>> from cupyattn import flash_attn_interface as fa3
    >>> q, k = np.ones((2, 5, 8, 64), np.float16), np.ones((2, 9, 2, 64), np.float16)
    >>> fa3.flash_attn_func(q, k, k, 64**-0.5, True).shape
    (2, 5, 8, 64)
    """
    return flash_attn.flash_attn_func(
        q,
        k,
        v,
        softmax_scale=softmax_scale,
        causal=causal,
        qv=qv,
        q_descale=q_descale,
        k_descale=k_descale,
        v_descale=v_descale,
        window_size=window_size,
        attention_chunk=attention_chunk,
        softcap=softcap,
        num_splits=num_splits,
        dropout_p=dropout_p,
        alibi_slopes=alibi_slopes,
        return_softmax_lse=asks(return_attn_probs, return_softmax_lse),
        out=out,
        sinks=sinks,
        s_aux=s_aux,
    )


@untraced
@overloads.fa3_flash_attn_qkvpacked_func
def flash_attn_qkvpacked_func(
    qkv: Any,
    softmax_scale: float | None = None,
    causal: bool = False,
    q_descale: Any = None,
    k_descale: Any = None,
    v_descale: Any = None,
    window_size: Any = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    deterministic: bool = False,
    num_heads_q: int | None = None,
    sm_margin: int = 0,
    return_attn_probs: bool = False,
) -> Any:
    """`flash_attn_func` of queries, keys and values in one array.

    Parameters
    ----------
    qkv
        [b, seqlen, 3, num_heads, head_dim]; with num_heads_q [b, seqlen, heads, head_dim], of which
        so many are the queries', and the others half keys', half values'.
    other arguments
        All else as there.

    Notes
    -----
    Semantics: flash_attn_interface's function of the same name.

    Examples
    --------
    >>> import numpy as np
    >>> from cupyattn import flash_attn_interface as fa3
    >>> fa3.flash_attn_qkvpacked_func(np.ones((2, 5, 3, 8, 64), np.float16), causal=True).shape
    (2, 5, 8, 64)
    """
    q, k, v = split_heads(qkv, num_heads_q)
    return flash_attn_func(
        q,
        k,
        v,
        softmax_scale=softmax_scale,
        causal=causal,
        q_descale=q_descale,
        k_descale=k_descale,
        v_descale=v_descale,
        window_size=window_size,
        attention_chunk=attention_chunk,
        softcap=softcap,
        return_attn_probs=return_attn_probs,
    )


@untraced
@overloads.fa3_flash_attn_varlen_func
def flash_attn_varlen_func(
    q: Any,
    k: Any,
    v: Any,
    cu_seqlens_q: Any,
    cu_seqlens_k: Any = None,
    max_seqlen_q: Any = None,
    max_seqlen_k: Any = None,
    seqused_q: Any = None,
    seqused_k: Any = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    qv: Any = None,
    q_descale: Any = None,
    k_descale: Any = None,
    v_descale: Any = None,
    window_size: Any = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    num_splits: int = 0,
    pack_gqa: bool | None = None,
    deterministic: bool = False,
    sm_margin: int = 0,
    return_attn_probs: bool = False,
    *,
    block_table: Any = None,
    page_table: Any = None,
    dropout_p: float = 0.0,
    alibi_slopes: Any = None,
    return_softmax_lse: bool = False,
    out: Any = None,
    sinks: Any = None,
    s_aux: Any = None,
    scheduler_metadata: Any = None,
) -> Any:
    """`cupyattn.flash_attn.flash_attn_varlen_func` in FlashAttention-3's order of arguments.

    Parameters
    ----------
    return_attn_probs, return_softmax_lse
        Two names of: return (out, lse).
    other arguments
        As in `flash_attn.flash_attn_varlen_func`, in FlashAttention-3's order.

    Notes
    -----
    All else is said there.

    Semantics: flash_attn_interface's function of the same name.

    Examples
    --------
    >>> import numpy as np
    >>> from cupyattn import flash_attn_interface as fa3
    >>> q, k = np.ones((20, 8, 64), np.float16), np.ones((20, 2, 64), np.float16)
    >>> offsets = np.array([0, 4, 20], np.int32)
    >>> fa3.flash_attn_varlen_func(q, k, k, offsets, offsets, 16, 16, causal=True).shape
    (20, 8, 64)
    """
    return flash_attn.flash_attn_varlen_func(
        q,
        k,
        v,
        cu_seqlens_q,
        cu_seqlens_k,
        max_seqlen_q,
        max_seqlen_k,
        seqused_q=seqused_q,
        seqused_k=seqused_k,
        softmax_scale=softmax_scale,
        causal=causal,
        qv=qv,
        q_descale=q_descale,
        k_descale=k_descale,
        v_descale=v_descale,
        window_size=window_size,
        attention_chunk=attention_chunk,
        softcap=softcap,
        num_splits=num_splits,
        block_table=block_table,
        page_table=page_table,
        dropout_p=dropout_p,
        alibi_slopes=alibi_slopes,
        return_softmax_lse=asks(return_attn_probs, return_softmax_lse),
        out=out,
        sinks=sinks,
        s_aux=s_aux,
    )


@untraced
@overloads.fa3_flash_attn_with_kvcache
def flash_attn_with_kvcache(
    q: Any,
    k_cache: Any,
    v_cache: Any,
    k: Any = None,
    v: Any = None,
    qv: Any = None,
    rotary_cos: Any = None,
    rotary_sin: Any = None,
    cache_seqlens: Any = None,
    cache_batch_idx: Any = None,
    cache_leftpad: Any = None,
    page_table: Any = None,
    cu_seqlens_q: Any = None,
    cu_seqlens_k_new: Any = None,
    max_seqlen_q: Any = None,
    rotary_seqlens: Any = None,
    q_descale: Any = None,
    k_descale: Any = None,
    v_descale: Any = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Any = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    scheduler_metadata: Any = None,
    num_splits: int = 0,
    pack_gqa: bool | None = None,
    sm_margin: int = 0,
    return_softmax_lse: bool = False,
    *,
    block_table: Any = None,
    alibi_slopes: Any = None,
    out: Any = None,
    sinks: Any = None,
    s_aux: Any = None,
) -> Any:
    """`cupyattn.flash_attn.flash_attn_with_kvcache` in FlashAttention-3's order of arguments, with
    page_table for block_table.

    Notes
    -----
    Semantics: flash_attn_interface's function of the same name.

    Examples
    --------
    >>> import numpy as np
    >>> from cupyattn import flash_attn_interface as fa3
    >>> k_cache = v_cache = np.ones((4, 16, 2, 64), np.float16)
    >>> table, lengths = np.array([[3, 0], [1, -1]], np.int32), np.array([21, 16], np.int32)
    >>> q = np.ones((2, 1, 8, 64), np.float16)
    >>> o = fa3.flash_attn_with_kvcache(
    ...     q, k_cache, v_cache, cache_seqlens=lengths, page_table=table
    ... )
    >>> o.shape
    (2, 1, 8, 64)
    """
    return flash_attn.flash_attn_with_kvcache(
        q,
        k_cache,
        v_cache,
        k,
        v,
        qv=qv,
        rotary_cos=rotary_cos,
        rotary_sin=rotary_sin,
        cache_seqlens=cache_seqlens,
        cache_batch_idx=cache_batch_idx,
        cache_leftpad=cache_leftpad,
        page_table=page_table,
        cu_seqlens_q=cu_seqlens_q,
        cu_seqlens_k_new=cu_seqlens_k_new,
        max_seqlen_q=max_seqlen_q,
        rotary_seqlens=rotary_seqlens,
        q_descale=q_descale,
        k_descale=k_descale,
        v_descale=v_descale,
        softmax_scale=softmax_scale,
        causal=causal,
        window_size=window_size,
        attention_chunk=attention_chunk,
        softcap=softcap,
        rotary_interleaved=rotary_interleaved,
        num_splits=num_splits,
        return_softmax_lse=return_softmax_lse,
        block_table=block_table,
        alibi_slopes=alibi_slopes,
        out=out,
        sinks=sinks,
        s_aux=s_aux,
    )


hide(flash_attn_with_kvcache, "block_table")
