"""Decode attention: few query rows against a KV cache."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from .single import run
from .single.geometry import NO_EXTRAS, Extras
from .wrappers.decode import (
    BatchDecodeWithPagedKVCacheWrapper,
    CUDAGraphBatchDecodeWithPagedKVCacheWrapper,
    fast_decode_plan,
)

if TYPE_CHECKING:
    from .cudnn import cudnn_batch_decode_with_kv_cache
    from .trtllm import trtllm_batch_decode_with_kv_cache, xqa_batch_decode_with_kv_cache

__all__ = [
    "BatchDecodeWithPagedKVCacheWrapper",
    "CUDAGraphBatchDecodeWithPagedKVCacheWrapper",
    "cudnn_batch_decode_with_kv_cache",
    "fast_decode_plan",
    "single_decode_with_kv_cache",
    "trtllm_batch_decode_with_kv_cache",
    "xqa_batch_decode_with_kv_cache",
]

# Functions that FlashInfer has here as well as in their own modules.
_DEFINED_IN = {
    "cudnn_batch_decode_with_kv_cache": "cudnn",
    "trtllm_batch_decode_with_kv_cache": "trtllm",
    "xqa_batch_decode_with_kv_cache": "trtllm",
}


def __getattr__(name: str) -> Any:
    if name in _DEFINED_IN:
        return getattr(importlib.import_module(f"..{_DEFINED_IN[name]}", __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def single_decode_with_kv_cache(
    q: Any,
    k: Any,
    v: Any,
    kv_layout: str = "NHD",
    pos_encoding_mode: str = "NONE",
    use_tensor_cores: bool = False,
    q_scale: float | None = None,
    k_scale: float | None = None,
    v_scale: float | None = None,
    window_left: int = -1,
    logits_soft_cap: float | None = None,
    sm_scale: float | None = None,
    rope_scale: float | None = None,
    rope_theta: float | None = None,
    return_lse: bool = False,
    *,
    enable_pdl: bool | None = None,
    sinks: Any = None,
    out: Any = None,
    lse: Any = None,
) -> Any:
    """Attention of one query token over the KV cache of its request.

    q       [num_qo_heads, head_dim_qk], float16 or bfloat16 (float32 on the CPU too).
    k, v    [kv_len, num_kv_heads, head_dim] ("NHD") or [num_kv_heads, kv_len, head_dim] ("HND"),
            dtype of q, float8_e4m3fn or float8_e5m2. num_kv_heads divides num_qo_heads; head dims
            are multiples of 8 up to 256 and may differ between k and v.
    pos_encoding_mode  "NONE", "ROPE_LLAMA" (q at position kv_len - 1) or "ALIBI".
    use_tensor_cores, enable_pdl  accepted for compatibility: tensor cores are always used, launches
            are ordinary ones.
    q_scale, k_scale   multiply the logits; v_scale multiplies the output. Default 1.
    window_left        keys to the left of the last that are seen; -1: all.
    logits_soft_cap    c > 0: logits become c * tanh(logits / c). Default: off.
    sm_scale           logit scale; default 1 / sqrt(head_dim_qk).
    rope_scale, rope_theta  default 1 and 1e4.
    sinks              float32 [num_qo_heads]: extra natural-log logits in the denominator.
    out, lse           arrays to write instead of new ones; lse float32, base 2.

    Returns out [num_qo_heads, head_dim_vo] in q's framework, dtype and device, or (out, lse
    [num_qo_heads]) if `return_lse`. With no visible key out is 0 and lse -inf.

    Raises ArgumentError for arguments that do not fit each other, UnsupportedError for dtypes and
    head dims without a kernel, before anything is written. Semantics: FlashInfer's function of the
    same name.
    """
    scalars = (
        kv_layout,
        False,
        pos_encoding_mode,
        window_left,
        logits_soft_cap,
        sm_scale,
        rope_scale,
        rope_theta,
        q_scale,
        k_scale,
        v_scale,
        None,
    )
    extras = NO_EXTRAS if sinks is None else Extras(sinks=sinks)
    return run.run(q, k, v, scalars, extras, out, lse, return_lse, is_decode=True)
