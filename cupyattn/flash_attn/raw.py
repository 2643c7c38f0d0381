"""What programs take from flash_attn.flash_attn_interface besides its public functions: the forward
passes that always return the LSE, as attention over a ring of GPUs needs it."""

from __future__ import annotations

from typing import Any

from ..core.parse import require_int
from ..core.tracing import untraced
from ..errors import UnsupportedError
from .api import flash_attn_func, flash_attn_varlen_func


@untraced
def _flash_attn_forward(
    q: Any,
    k: Any,
    v: Any,
    dropout_p: float,
    softmax_scale: float | None,
    causal: bool,
    window_size_left: int = -1,
    window_size_right: int = -1,
    softcap: float = 0.0,
    alibi_slopes: Any = None,
    return_softmax: bool = False,
) -> tuple[Any, Any, Any, None]:
    """(out, lse, an empty array, None for the state of a generator) of `flash_attn_func`."""
    window = window_size_left, window_size_right
    result = flash_attn_func(
        q,
        k,
        v,
        dropout_p=dropout_p,
        softmax_scale=softmax_scale,
        causal=causal,
        window_size=window,
        softcap=softcap,
        alibi_slopes=alibi_slopes,
        return_attn_probs=True,
    )
    return *result, None


@untraced
def _flash_attn_varlen_forward(
    q: Any,
    k: Any,
    v: Any,
    cu_seqlens_q: Any,
    cu_seqlens_k: Any,
    max_seqlen_q: Any,
    max_seqlen_k: Any,
    dropout_p: float,
    softmax_scale: float | None,
    causal: bool,
    window_size_left: int = -1,
    window_size_right: int = -1,
    softcap: float = 0.0,
    alibi_slopes: Any = None,
    return_softmax: bool = False,
    block_table: Any = None,
    leftpad_k: Any = None,
    seqused_k: Any = None,
    zero_tensors: bool = False,
    num_splits: int = 0,
) -> tuple[Any, Any, Any, None]:
    """The same of `flash_attn_varlen_func`, whose keys of a table may be counted by seqused_k."""
    if leftpad_k is not None:
        raise UnsupportedError("leftpad_k: is not supported here; pass flash_attn_with_kvcache one")
    if require_int(num_splits, "num_splits", 0) > 1:
        raise UnsupportedError(
            f"num_splits: got {num_splits}, and num_splits > 1 is not supported: the plan on the "
            "GPU decides how often keys are split; pass 0, or 1 for not at all"
        )
    window = window_size_left, window_size_right
    result = flash_attn_varlen_func(
        q,
        k,
        v,
        cu_seqlens_q,
        cu_seqlens_k,
        max_seqlen_q,
        max_seqlen_k,
        dropout_p=dropout_p,
        softmax_scale=softmax_scale,
        causal=causal,
        window_size=window,
        softcap=softcap,
        alibi_slopes=alibi_slopes,
        return_attn_probs=True,
        block_table=block_table,
        seqused_k=seqused_k,
        num_splits=num_splits,
    )
    return *result, None


def _get_block_size_n(device: Any, head_dim: int, is_dropout: bool, is_causal: bool) -> int:
    """Keys that FlashAttention-2 takes at a time, which matters where dropout is looked at."""
    return 128 if head_dim <= 64 else 64
