"""Prefill and append attention: many query rows at the end of a KV cache."""

from __future__ import annotations

import functools
import importlib
import inspect
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

from .core import overloads, parse
from .core.names import missing
from .core.problem import KV_LAYOUTS
from .core.tracing import exported, is_exporting, untraced
from .engine import geometry, logits
from .engine.block_scales import BlockScales
from .engine.run_single import make_arrays, make_options, run
from .errors import ArgumentError
from .typing import Array, ArrayT, Scale
from .wrappers.prefill import (
    BatchPrefillWithPagedKVCacheWrapper,
    BatchPrefillWithRaggedKVCacheWrapper,
)

if TYPE_CHECKING:
    from .cudnn import cudnn_batch_prefill_with_kv_cache
    from .trtllm import (
        trtllm_batch_context_with_kv_cache,
        trtllm_fmha_v2_prefill,
        trtllm_ragged_attention_deepseek,
    )

__all__ = [
    "BatchPrefillWithPagedKVCacheWrapper",
    "BatchPrefillWithRaggedKVCacheWrapper",
    "cudnn_batch_prefill_with_kv_cache",
    "single_prefill_with_kv_cache",
    "single_prefill_with_kv_cache_return_lse",
    "trtllm_batch_context_with_kv_cache",
    "trtllm_fmha_v2_prefill",
    "trtllm_ragged_attention_deepseek",
]


if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        # FlashInfer has some functions here as well as in modules of their own.
        if name in __all__:
            return getattr(importlib.import_module("cupyattn"), name)
        raise missing(__name__, name)


_F = TypeVar("_F", bound=Callable[..., Any])
_AUTO = "auto"
# The positional order of older releases, after q, k, v.
_OLD_ORDER = (
    "custom_mask",
    "packed_custom_mask",
    "causal",
    "kv_layout",
    "pos_encoding_mode",
    "use_fp16_qk_reduction",
    "sm_scale",
    "window_left",
    "logits_soft_cap",
    "rope_scale",
    "rope_theta",
)


def _is_old_order(rest: tuple[Any, ...]) -> bool:
    """True if the arguments after q, k, v can only be meant in the old order.

    There, slots 0 and 1 are masks (bool or uint8 arrays), 2 is a bool and 3 a layout; in today's
    order these are three scales (float arrays or numbers) and a dtype.
    """
    kinds = ("bool", "torch.bool", "uint8", "torch.uint8")
    if any(str(getattr(x, "dtype", "")) in kinds for x in rest[:2]):
        return True
    has_layout = any(isinstance(x, str) and x in KV_LAYOUTS for x in rest[3:4])
    return has_layout or any(isinstance(x, bool) for x in rest[2:3])


def _accepts_old_calls(function: _F) -> _F:
    """Let calls in the old positional order, and with old argument names, through."""

    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        if "allow_fp16_qk_reduction" in kwargs:
            kwargs["use_fp16_qk_reduction"] = kwargs.pop("allow_fp16_qk_reduction")
        if len(args) > 3 and _is_old_order(args[3:]):
            if len(args) - 3 > len(_OLD_ORDER):
                raise TypeError(
                    f"{function.__name__}() takes at most {len(_OLD_ORDER) + 3} positional "
                    f"arguments in the old order ({len(args)} given)"
                )
            named = dict(zip(_OLD_ORDER, args[3:], strict=False))
            twice = sorted(named.keys() & kwargs.keys())
            if twice:
                raise TypeError(f"{function.__name__}() got multiple values for {twice[0]!r}")
            return function(*args[:3], **named, **kwargs)
        return function(*args, **kwargs)

    return wrapper  # type: ignore[return-value]


@untraced
@_accepts_old_calls
@overloads.single_prefill_with_kv_cache
def single_prefill_with_kv_cache(
    q: Array,
    k: Array,
    v: Array,
    scale_q: Scale = None,
    scale_k: Scale = None,
    scale_v: Scale = None,
    o_dtype: Any = None,
    custom_mask: Array | None = None,
    packed_custom_mask: Array | None = None,
    causal: bool = False,
    kv_layout: str = "NHD",
    pos_encoding_mode: str = "NONE",
    use_fp16_qk_reduction: bool = False,
    sm_scale: float | None = None,
    window_left: int = -1,
    logits_soft_cap: float | None = None,
    rope_scale: float | None = None,
    rope_theta: float | None = None,
    backend: str = "auto",
    return_lse: bool = False,
    kv_cache_sf: Any = None,
    k_scale: float | None = None,
    v_scale: float | None = None,
    *,
    q_scale: float | None = None,
    enable_pdl: bool | None = None,
    sinks: Array | None = None,
    out: Array | None = None,
    lse: Array | None = None,
    window_right: int = -1,
    logits_transform: str | None = None,
    mask_fn: str | None = None,
    logits_params: Mapping[str, Any] | None = None,
    output_gate: Array | None = None,
    q_block_scales: Array | None = None,
    k_block_scales: Array | None = None,
    v_block_scales: Array | None = None,
    k_mean: Array | None = None,
    block_size: int = 64,
    skip_softmax_threshold_scale_factor: float | None = None,
    rel_logits: Array | None = None,
) -> Any:
    """Attention of one request's new tokens, which end its KV cache.

    Parameters
    ----------
    q
        [qo_len, num_qo_heads, head_dim_qk], float16 or bfloat16 (float32 on the CPU too), or
        float8_e4m3fn or int8, which are multiplied as they are: with k of the same dtype, v of
        float8_e4m3fn and head dims that are multiples of 16.
    k, v
        [kv_len, num_kv_heads, head_dim] or heads first, as kv_layout says, dtype of q,
        float8_e4m3fn or float8_e5m2. num_kv_heads divides num_qo_heads; head dims are multiples of
        8 up to 256 and may differ between k and v.
    kv_layout
        "NHD": tokens before heads, or "HND": [num_kv_heads, kv_len, head_dim], of k and v; q is NHD
        in both.
    scale_q, scale_k, scale_v
        A number, or float32 arrays [num_qo_heads], [num_kv_heads], [num_kv_heads]: the first two
        multiply the logits, the last the output. Default 1.
    q_scale, k_scale, v_scale
        Numbers that multiply them. Default 1.
    o_dtype
        Dtype of the output: float16, bfloat16, float32, float8_e4m3fn or float8_e5m2; default that
        of q, and bfloat16 for q of 8 bits. fp8 is saturated; v_scale multiplies it before it is
        rounded.
    custom_mask
        bool [qo_len, kv_len], or flattened, True where a row sees a key; causal is then ignored.
    packed_custom_mask
        uint8 [>= ceil(qo_len * kv_len / 8)]: the same as little-endian bits
        (`packbits(mask.flatten(), bitorder="little")`), without the packing; it wins over
        custom_mask.
    causal
        Row i sees keys up to i + kv_len - qo_len; rows that see none give 0.
    pos_encoding_mode
        "NONE", or with row i at position p = i + kv_len - qo_len "ROPE_LLAMA" or "ALIBI" (bias
        slope * (key - p); FlashInfer's counts from i, which shows in the LSE and under a soft cap).
    use_fp16_qk_reduction, backend, enable_pdl
        Accepted for compatibility: products accumulate in float32, the kernel is chosen by the
        device, launches are ordinary ones.
    sm_scale
        Logit scale; default 1 / sqrt(head_dim_qk).
    window_left, window_right
        Row i sees keys from i + kv_len - qo_len - window_left up to i + kv_len - qo_len +
        window_right; -1: all to that side. Both hold besides a mask.
    logits_soft_cap
        c > 0: logits become c * tanh(logits / c). Default: off.
    rope_scale, rope_theta
        Default 1 and 1e4.
    kv_cache_sf
        Scale factors of 4-bit caches: not supported, must be None.
    sinks
        float32 [num_qo_heads]: extra natural-log logits in the denominator.
    logits_transform
        An expression over logit, q_idx, kv_idx, head, ... and logits_params in place of each logit
        after its scale: docs/logits.md. Default: none.
    mask_fn
        A condition of the same language, False where a row does not see a key; causality and
        windows hold besides. Default: none.
    logits_params
        What the two read by name: numbers, and arrays of 1 to 4 axes (float32, float16, bfloat16,
        int32, uint8 or bool; contiguous).
    rel_logits
        [qo_len, num_qo_heads, distances], float32, float16 or bfloat16, contiguous: biases of near
        keys. To the scaled logit of the key d tokens before the row's own, 0 <= d < distances,
        rel_logits[row, head, d] is added; others have none. Biases are at most 1e30 in size, or
        -inf. Not beside a soft cap, ALiBi or logits_transform.
    output_gate
        [qo_len, num_qo_heads] or [qo_len, num_qo_heads, head_dim_vo], dtype of q or float32: the
        output is multiplied by its sigmoid before it is rounded.
    q_block_scales, k_block_scales, v_block_scales
        float32 [ceil(tokens / block_size), heads], beside q, k and v of 8 bits: what each block of
        tokens is multiplied by, as `quantize_qkv` gives them. They multiply with the scales above.
        On GPUs: Hopper, where products with those of k and v are rounded to float16. Default 1.
    block_size
        Tokens of such a block, 64 or 128.
    k_mean
        float32 [1, num_kv_heads, head_dim_qk], what was subtracted from keys before they were
        quantized: the LSE, soft caps and sinks are of whole keys again. A GPU takes it where there
        are none of these. Default 0.
    skip_softmax_threshold_scale_factor
        Tiles of keys may be left out whose probabilities, taken against the largest logit that the
        row has seen before, are less than it divided by kv_len: a row loses less than this factor
        of its weight. Hopper leaves them out of plain attention in 16 bits; all else is exact.
        Default, and 0: none.
    out, lse
        Arrays to write instead of new ones; lse float32, base 2.
    return_lse
        Return the LSE too.

    Returns
    -------
    out
        [qo_len, num_qo_heads, head_dim_vo] in q's framework and device, or (out, lse [qo_len,
        num_qo_heads]) if `return_lse`.

    Raises
    ------
    CupyAttnError
        ArgumentError for arguments that do not fit each other, UnsupportedError for dtypes and head
        dims without a kernel, before anything is written. The old positional order (custom_mask,
        packed_custom_mask, causal, kv_layout, ...) is recognised by the types of its arguments.

    Notes
    -----
    Semantics: FlashInfer's function of the same name.

    Examples
    --------
    >>> import numpy as np
    >>> import cupyattn
    >>> q = np.ones((5, 8, 64), np.float16)  # the last 5 of 20 tokens
    >>> k = v = np.ones((20, 2, 64), np.float16)
    >>> o, lse = cupyattn.single_prefill_with_kv_cache(q, k, v, causal=True, return_lse=True)
    >>> o.shape, lse.shape
    ((5, 8, 64), (5, 8))
    """
    if backend is not _AUTO or use_fp16_qk_reduction is not False:
        geometry.backend(backend, None)
        parse.flag(use_fp16_qk_reduction, "use_fp16_qk_reduction")
    if kv_cache_sf is not None:
        raise ArgumentError("kv_cache_sf: 4-bit caches are not supported; pass None")
    if not (scale_q is scale_k is scale_v is None):
        q_scale, scale_q = _number_or_array(scale_q, q_scale, "scale_q")
        k_scale, scale_k = _number_or_array(scale_k, k_scale, "scale_k")
        v_scale, scale_v = _number_or_array(scale_v, v_scale, "scale_v")
    options = make_options(
        kv_layout=kv_layout,
        causal=causal,
        pos_encoding_mode=pos_encoding_mode,
        window_left=window_left,
        logits_soft_cap=logits_soft_cap,
        sm_scale=sm_scale,
        window_right=window_right,
        skip_softmax=skip_softmax_threshold_scale_factor,
    )
    if not (o_dtype is rope_scale is rope_theta is q_scale is k_scale is v_scale is None):
        options = options._replace(
            rope_scale=rope_scale,
            rope_theta=rope_theta,
            q_scale=q_scale,
            k_scale=k_scale,
            v_scale=v_scale,
            o_dtype=o_dtype,
        )
    arrays, read = make_arrays(q, k, v, out, lse), tuple[Any, ...]()
    if not (
        sinks
        is custom_mask
        is packed_custom_mask
        is scale_q
        is scale_k
        is scale_v
        is output_gate
        is None
    ):
        arrays = arrays._replace(
            sinks=sinks,
            custom_mask=custom_mask,
            packed_custom_mask=packed_custom_mask,
            scale_q=scale_q,
            scale_k=scale_k,
            scale_v=scale_v,
            output_gate=output_gate,
        )
    if not (q_block_scales is k_block_scales is v_block_scales is k_mean is None):
        blocks = q_block_scales, k_block_scales, v_block_scales, k_mean, block_size
        arrays = arrays._replace(blocks=BlockScales._make(blocks))
    if not (logits_transform is mask_fn is logits_params is rel_logits is None):
        expression, read = logits.read(logits_transform, mask_fn, logits_params, rel_logits)
        options = options._replace(logits=expression)
    try:
        return run(arrays, options, read, return_lse=return_lse, is_decode=False)
    except ArgumentError:
        if not is_exporting():
            raise
        return exported(single_prefill_with_kv_cache, locals())


def _number_or_array(scale: Any, factor: Any, name: str) -> tuple[Any, Any]:
    """Split a scale that may be a number or a per-head array; numbers are multiplied together."""
    if scale is None:
        return factor, None
    if getattr(scale, "ndim", 0) == 0:
        number = parse.finite(scale, name, 1.0)
        return (number if factor is None else number * parse.finite(factor, name, 1.0)), None
    return factor, scale


@untraced
@overloads.single_prefill_with_kv_cache_return_lse
def single_prefill_with_kv_cache_return_lse(
    q: ArrayT, *args: Any, **kwargs: Any
) -> tuple[ArrayT, ArrayT]:
    """`single_prefill_with_kv_cache` that returns (out, lse) by default; arguments and errors as
    there.

    Notes
    -----
    Semantics: FlashInfer's function of the same name.

    Examples
    --------
    >>> import numpy as np
    >>> import cupyattn
    >>> q = np.ones((5, 8, 64), np.float16)
    >>> k = v = np.ones((20, 2, 64), np.float16)
    >>> o, lse = cupyattn.single_prefill_with_kv_cache_return_lse(q, k, v, causal=True)
    >>> o.shape, lse.shape
    ((5, 8, 64), (5, 8))
    """
    result: Any = single_prefill_with_kv_cache(q, *args, **{"return_lse": True, **kwargs})
    return result


_signature = inspect.signature(single_prefill_with_kv_cache)
single_prefill_with_kv_cache_return_lse.__signature__ = _signature.replace(  # type: ignore[attr-defined]
    parameters=[
        p.replace(default=True) if p.name == "return_lse" else p
        for p in _signature.parameters.values()
    ]
)
