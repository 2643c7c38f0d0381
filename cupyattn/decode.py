"""Decode attention: few query rows against a KV cache."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from .core import overloads, parse
from .core.names import missing
from .core.tracing import exported, is_exporting, untraced
from .engine import logits
from .engine.run_single import make_arrays, make_options, run
from .errors import ArgumentError
from .typing import Array
from .wrappers.decode import (
    BatchDecodeWithPagedKVCacheWrapper,
    CUDAGraphBatchDecodeWithPagedKVCacheWrapper,
    fast_decode_plan,
)
from .wrappers.mla_decode import BatchDecodeMlaWithPagedKVCacheWrapper

if TYPE_CHECKING:
    from .cudnn import cudnn_batch_decode_with_kv_cache
    from .mla import trtllm_batch_decode_with_kv_cache_mla, xqa_batch_decode_with_kv_cache_mla
    from .trtllm import trtllm_batch_decode_with_kv_cache, xqa_batch_decode_with_kv_cache

__all__ = [
    "BatchDecodeMlaWithPagedKVCacheWrapper",
    "BatchDecodeWithPagedKVCacheWrapper",
    "CUDAGraphBatchDecodeWithPagedKVCacheWrapper",
    "cudnn_batch_decode_with_kv_cache",
    "fast_decode_plan",
    "single_decode_with_kv_cache",
    "trtllm_batch_decode_with_kv_cache",
    "trtllm_batch_decode_with_kv_cache_mla",
    "xqa_batch_decode_with_kv_cache",
    "xqa_batch_decode_with_kv_cache_mla",
]


if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        # FlashInfer has some functions here as well as in modules of their own.
        if name in __all__:
            return getattr(importlib.import_module("cupyattn"), name)
        raise missing(__name__, name)


@untraced
@overloads.single_decode_with_kv_cache
def single_decode_with_kv_cache(
    q: Array,
    k: Array,
    v: Array,
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
    sinks: Array | None = None,
    out: Array | None = None,
    lse: Array | None = None,
    logits_transform: str | None = None,
    mask_fn: str | None = None,
    logits_params: Mapping[str, Any] | None = None,
    output_gate: Array | None = None,
    rel_logits: Array | None = None,
) -> Any:
    """Attention of one query token over the KV cache of its request.

    Parameters
    ----------
    q
        [num_qo_heads, head_dim_qk], float16 or bfloat16 (float32 on the CPU too), at position
        kv_len - 1.
    use_tensor_cores, enable_pdl
        Accepted for compatibility: tensor cores are always used, launches are ordinary ones.
    q_scale, k_scale
        Multiply the logits; v_scale multiplies the output. Default 1.
    window_left
        Keys to the left of the last that are seen; -1: all.
    output_gate
        [num_qo_heads] or [num_qo_heads, head_dim_vo].
    rel_logits
        [1, num_qo_heads, distances].
    other arguments
        All other arguments as in `single_prefill_with_kv_cache`.

    Returns
    -------
    out
        [num_qo_heads, head_dim_vo] in q's framework, dtype and device, or (out, lse [num_qo_heads])
        if `return_lse`. With no visible key out is 0 and lse -inf.

    Raises
    ------
    CupyAttnError
        As that function.

    Notes
    -----
    Semantics: FlashInfer's function of the same name.

    Examples
    --------
    >>> import numpy as np
    >>> import cupyattn
    >>> q = np.ones((8, 64), np.float16)  # [query heads, head dim]
    >>> k = v = np.ones((20, 2, 64), np.float16)  # [keys, key heads, head dim]
    >>> cupyattn.single_decode_with_kv_cache(q, k, v).shape
    (8, 64)
    """
    if use_tensor_cores is not False and use_tensor_cores is not True:
        parse.flag(use_tensor_cores, "use_tensor_cores")
    options = make_options(
        kv_layout=kv_layout,
        pos_encoding_mode=pos_encoding_mode,
        window_left=window_left,
        logits_soft_cap=logits_soft_cap,
        sm_scale=sm_scale,
    )
    if not (rope_scale is rope_theta is q_scale is k_scale is v_scale is None):
        options = options._replace(
            rope_scale=rope_scale,
            rope_theta=rope_theta,
            q_scale=q_scale,
            k_scale=k_scale,
            v_scale=v_scale,
        )
    arrays = make_arrays(q, k, v, out, lse, sinks)
    if output_gate is not None:
        arrays = arrays._replace(output_gate=output_gate)
    read: tuple[Any, ...] = ()
    if not (logits_transform is mask_fn is logits_params is rel_logits is None):
        expression, read = logits.read(logits_transform, mask_fn, logits_params, rel_logits)
        options = options._replace(logits=expression)
    try:
        return run(arrays, options, read, return_lse=return_lse, is_decode=True)
    except ArgumentError:
        if not is_exporting():
            raise
        return exported(single_decode_with_kv_cache, locals())
