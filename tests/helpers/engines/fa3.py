"""FlashAttention-3 for engines whose own build of it is not there: over the op of the library that
CUPYATTN_BENCH_FA3 names."""

from __future__ import annotations

import os
from typing import Any


def is_there() -> bool:
    return bool(os.environ.get("CUPYATTN_BENCH_FA3"))


def _forward(*args: Any, **named: Any) -> Any:
    import torch

    if not hasattr(torch.ops.flash_attn_3, "fwd"):
        torch.ops.load_library(os.environ["CUPYATTN_BENCH_FA3"])
    return torch.ops.flash_attn_3.fwd(*args, **named)


def varlen(
    q: Any, k: Any, v: Any, max_seqlen_q: int, cu_seqlens_q: Any, max_seqlen_k: int,
    cu_seqlens_k: Any = None, seqused_k: Any = None, softmax_scale: float | None = None,
    causal: bool = False, window_size: Any = None, softcap: float = 0.0, block_table: Any = None,
    out: Any = None, num_splits: int = 0, return_softmax_lse: bool = False, **_: Any,
) -> Any:  # fmt: skip
    """vLLM's function."""
    left, right = window_size or (-1, -1)
    made = _forward(
        q, k, v, out=out, cu_seqlens_q=cu_seqlens_q, seqused_k=seqused_k,
        cu_seqlens_k=None if block_table is not None else cu_seqlens_k,
        max_seqlen_q=max_seqlen_q, max_seqlen_k=max_seqlen_k, page_table=block_table,
        softmax_scale=softmax_scale, is_causal=causal, window_size_left=left,
        window_size_right=right, softcap=softcap, num_splits=num_splits,
    )  # fmt: skip
    return made[:2] if return_softmax_lse else made[0]


def with_kvcache(
    q: Any, k_cache: Any, v_cache: Any, k: Any = None, v: Any = None, qv: Any = None,
    rotary_cos: Any = None, rotary_sin: Any = None, cache_seqlens: Any = None,
    cache_batch_idx: Any = None, cache_leftpad: Any = None, page_table: Any = None,
    cu_seqlens_q: Any = None, cu_seqlens_k_new: Any = None, max_seqlen_q: int | None = None,
    rotary_seqlens: Any = None, q_descale: Any = None, k_descale: Any = None, v_descale: Any = None,
    softmax_scale: float | None = None, causal: bool = False,
    window_size: tuple[int, int] = (-1, -1), attention_chunk: int | None = None,
    softcap: float = 0.0, rotary_interleaved: bool = True, scheduler_metadata: Any = None,
    num_splits: int = 0, pack_gqa: Any = None, sm_margin: int = 0,
    return_softmax_lse: bool = False, **_: Any,
) -> Any:  # fmt: skip
    """SGLang's function."""
    out, lse, *_others = _forward(
        q, k_cache, v_cache, page_table=page_table, seqused_k=cache_seqlens,
        cu_seqlens_q=cu_seqlens_q, max_seqlen_q=max_seqlen_q, softmax_scale=softmax_scale,
        is_causal=causal, window_size_left=window_size[0], window_size_right=window_size[1],
        softcap=softcap, num_splits=num_splits,
    )  # fmt: skip
    return (out, lse, None, None) if return_softmax_lse else out
