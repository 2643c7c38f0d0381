"""FlashMLA's functions: latent attention over pages, dense or over lists of keys.

`import cupyattn.flash_mla as flash_mla` serves a program written for FlashMLA.
"""

from __future__ import annotations

import math
import sys
from typing import TYPE_CHECKING, Any

import numpy as np

from . import array
from .array import ArrayView
from .core import dtypes, parse
from .core.cupy_module import cupy_module
from .core.names import refuse_names
from .core.parse import require_int
from .core.tracing import untraced
from .errors import ArgumentError, UnsupportedError
from .inputs import geometry
from .inputs.index_arrays import compute, fresh_progression
from .inputs.latent import Dims
from .planless.latent import NAMES, Options, repeat_of, run, run_repeat
from .reference.latent_rows import NUM_BYTES, unpack_rows

__all__ = [
    "FlashMLASchedMeta",
    "flash_mla_sparse_fwd",
    "flash_mla_with_kvcache",
    "get_mla_metadata",
]

if not TYPE_CHECKING:
    __getattr__ = refuse_names(__name__)

_DENSE = NAMES._replace(
    q="q", k="k_cache", block_tables="block_table", kv_lens="cache_seqlens",
    sm_scale="softmax_scale",
)  # fmt: skip
_SPARSE = _DENSE._replace(block_tables="indices", kv_lens="topk_length")
_LEAST_SHARE = 2.0**-18
_FLAT = _SPARSE._replace(k="kv", sm_scale="sm_scale")


class FlashMLASchedMeta:
    """What FlashMLA keeps of a schedule. Here every call plans on the device, so it holds nothing
    and may be reused whatever lengths are."""


def get_mla_metadata(*args: Any, **kwargs: Any) -> tuple[Any, Any]:
    """(metadata, num_splits) for flash_mla_with_kvcache, which needs neither.

    Returns without arguments FlashMLASchedMeta() and None. In the older form, get_mla_metadata(
    cache_seqlens, ...), int32 arrays of its framework, [1, 8] and [B + 1] of zeros, which programs
    may copy about; raises ArgumentError for what is no array. Semantics: FlashMLA's function of the
    same name.
    """
    lengths = kwargs.get("cache_seqlens", args[0] if args else None)
    if lengths is None:
        return FlashMLASchedMeta(), None
    v = array.view(lengths, "cache_seqlens")
    made = [fresh_progression(n, 0, 0, v) for n in (8, math.prod(v.shape) + 1)]
    return made[0].reshape(1, 8), made[1]


@untraced
def flash_mla_with_kvcache(
    q: Any,
    k_cache: Any,
    block_table: Any,
    cache_seqlens: Any,
    head_dim_v: int,
    tile_scheduler_metadata: Any = None,
    num_splits: Any = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    is_fp8_kvcache: bool = False,
    indices: Any = None,
    attn_sink: Any = None,
    extra_k_cache: Any = None,
    extra_indices_in_kvcache: Any = None,
    topk_length: Any = None,
    extra_topk_length: Any = None,
) -> tuple[Any, Any]:
    """Latent attention of a batch's last tokens; everything stays on the device.

    q       [b, seqlen_q, num_heads, 576], float16 or bfloat16 (on the CPU float32 too).
    k_cache [num_blocks, page_size, 1, 576] of q's dtype or float8_e4m3fn; any page size. With
            is_fp8_kvcache also rows of 656 bytes: 512 e4m3, 4 float32 scales, 64 bfloat16; on a
            GPU beside q of bfloat16 and on sm_90 only.
    block_table int32 [b, max_blocks]; cache_seqlens int32 [b].
    head_dim_v  512 (or 256): the latent columns, the first of each row.
    tile_scheduler_metadata, num_splits   of get_mla_metadata; not read.
    softmax_scale   default 1 / sqrt of the columns of q.
    causal  row i sees keys up to i + cache_seqlen - seqlen_q. Not with indices.
    indices int32 [b, seqlen_q, topk]: slots of the cache (block * page_size + offset) of each
            token's keys, negative for none, in place of block_table and cache_seqlens, which may
            be None; topk_length int32 [b], how many of them count.
    attn_sink   float32 [num_heads]: extra natural-log logits in the denominator, without which the
            LSE is; where it outweighs the keys of a row 2^18 times, the LSE is -inf.
    extra_k_cache, extra_indices_in_kvcache, extra_topk_length   must be None.

    Returns (out [b, seqlen_q, num_heads, head_dim_v], lse float32 [b, num_heads, seqlen_q]),
    natural logarithms; a row that sees no key gives 0 and -inf. Raises ArgumentError or
    UnsupportedError before anything is written. Semantics: FlashMLA's function of the same name,
    which takes lists over rows of 656 bytes only, and 64 or 128 heads.
    """
    geometry.refuse(
        "a second cache is not supported",
        extra_k_cache=extra_k_cache,
        extra_indices_in_kvcache=extra_indices_in_kvcache,
        extra_topk_length=extra_topk_length,
    )
    repeat = None
    if indices is topk_length is None:
        scalars = "flash_mla", head_dim_v, causal, is_fp8_kvcache
        repeat = repeat_of(*scalars, scales=(softmax_scale,))
    given: tuple[Any, ...] = (
        *(q, None, k_cache, None, None, block_table, cache_seqlens, None, None, None, attn_sink),
    )
    answer = run_repeat(given, repeat) if attn_sink is None else None
    if answer is not None:
        return answer  # type: ignore[no-any-return]
    vq = array.view(q, "q")
    if len(vq.shape) != 4:
        raise ArgumentError(
            f"q: shape is {list(vq.shape)}; wanted [b, seqlen_q, num_heads, columns]"
        )
    count, q_len, heads, columns = vq.shape
    dims = _dims(columns, head_dim_v, "head_dim_v")
    o_dtype, key_scales = vq.dtype.name, ""
    if parse.flag(is_fp8_kvcache, "is_fp8_kvcache"):
        q, k_cache, key_scales = _with_scales(q, k_cache, vq)
    scale = parse.finite(softmax_scale, "softmax_scale", 1.0 / math.sqrt(max(1, columns)))
    is_causal = parse.flag(causal, "causal")
    options = Options(
        _DENSE, dims, scale, q_axes=(4,), q_len=q_len, causal=is_causal and q_len > 1,
        pads_lse=True, natural_lse=True, return_lse=True, o_dtype=o_dtype, key_scales=key_scales,
    )  # fmt: skip
    if indices is not None:
        if is_causal:
            raise ArgumentError("causal: got True with indices, which name all keys; pass False")
        options = options._replace(names=_SPARSE, q_len=1, is_list=True, pads_lse=False)
        lengths = _repeated(topk_length, "topk_length", count, q_len)
        given = q, None, k_cache, None, None, indices, lengths, None, None, None, attn_sink
        out, lse = run(given, options)
        lse = lse.swapaxes(-1, -2)
    else:
        if topk_length is not None:
            raise ArgumentError("topk_length: given without indices; pass both, or none")
        out, lse = run((q, None, k_cache, *given[3:]), options, repeat)
    return out, lse if attn_sink is None else _without_sink(lse, attn_sink, (heads, 1))


@untraced
def flash_mla_sparse_fwd(
    q: Any,
    kv: Any,
    indices: Any,
    sm_scale: float,
    d_v: int = 512,
    attn_sink: Any = None,
    topk_length: Any = None,
    out: Any = None,
) -> tuple[Any, None, Any]:
    """Latent attention of tokens over lists of keys, of a prompt for example.

    q       [s_q, num_heads, 576]; kv [s_kv, 1, 576] of the same dtype.
    indices int32 [s_q, 1, topk]: rows of kv, negative for none; topk_length int32 [s_q], how many
            of them count, default all.
    sm_scale   of the logits. d_v: 512 (or 256), the latent columns.
    attn_sink  float32 [num_heads]: extra natural-log logits in the denominator, without which the
            LSE is; where it outweighs the keys of a row 2^18 times, the LSE is -inf.
    out     array to write instead of a new one.

    Returns (out [s_q, num_heads, d_v], None, lse float32 [s_q, num_heads], base 2): FlashMLA's
    second answer, the largest logits, is not computed. Errors as flash_mla_with_kvcache.
    Semantics: FlashMLA's function of the same name.
    """
    vq = array.view(q, "q")
    dims = _dims(vq.shape[-1] if vq.shape else 0, d_v, "d_v")
    options = Options(
        _FLAT, dims, parse.finite(sm_scale, "sm_scale", 1.0), is_list=True, return_lse=True
    )
    given = q, None, kv, None, None, indices, topk_length, out, None, None, attn_sink
    answer, lse = run(given, options)
    if attn_sink is not None:
        lse = _without_sink(lse, attn_sink, (vq.shape[1],), math.log(2.0))
    return answer, None, lse


def _dims(columns: int, head_dim_v: Any, name: str) -> Dims:
    latent = require_int(head_dim_v, name)
    if latent > columns:
        raise ArgumentError(f"{name}: got {latent}, but q has {columns} columns")
    return Dims(latent, columns - latent)


def _with_scales(q: Any, k_cache: Any, vq: ArrayView) -> tuple[Any, Any, str]:
    """q, the cache and its scales (Options.key_scales). On the CPU rows of 656 bytes become rows of
    float32, and q too."""
    v = array.view(k_cache, "k_cache")
    if v.shape[-1] != NUM_BYTES:
        return q, k_cache, ""
    if v.dtype.itemsize != 1:
        raise ArgumentError(f"k_cache: dtype is {v.dtype}; wanted rows of {NUM_BYTES} bytes")
    if v.device.kind != "cpu":
        if vq.dtype is not dtypes.bfloat16:
            raise UnsupportedError(
                f"q: dtype {vq.dtype} has no kernel for rows of {NUM_BYTES} bytes, whose rope "
                "columns are bfloat16; pass q in bfloat16"
            )
        return q, k_cache, "rows"
    rows = np.ascontiguousarray(array.as_numpy(v)).view(np.uint8)
    keys = array.from_numpy(unpack_rows(rows), vq)
    return array.from_numpy(array.as_numpy(vq).astype(np.float32), vq), keys, ""


def _repeated(lengths: Any, name: str, count: int, q_len: int) -> Any:
    """A length for each token of lengths [b]."""
    if lengths is None:
        return None
    v = array.view(lengths, name)
    if tuple(v.shape) != (count,):
        raise ArgumentError(f"{name}: shape is {list(v.shape)}; wanted [{count}], one a request")
    if q_len == 1:
        return lengths
    if v.framework == "torch" and v.device.kind == "cuda":
        return v.owner.repeat_interleave(q_len)
    return compute(lambda x: x.repeat(q_len), v)


def _without_sink(lse: Any, sink: Any, shape: tuple[int, ...], unit: float = 1.0) -> Any:
    """An LSE less its sink: log(exp(lse) - exp(sink)), of logarithms in units of `unit`.

    The difference loses what the sink outweighs the keys by, so a row whose keys weigh less than
    _LEAST_SHARE counts as one that sees no key.
    """
    x, s = array.view(lse, "lse"), array.view(sink, "attn_sink")
    xp: Any = np
    if x.device.kind == "cuda" and x.framework != "numpy":
        is_torch = x.framework == s.framework == "torch"
        xp = sys.modules["torch"] if is_torch else cupy_module()
    none = -math.inf

    def subtract(x: Any, s: Any) -> Any:
        share = -xp.expm1((s.reshape(shape) - x * unit).clip(none, 0.0))
        return x + xp.where(share < _LEAST_SHARE, none, xp.log(share) / unit)

    with np.errstate(divide="ignore", invalid="ignore"):
        made = compute(subtract, x, s)
    if x.device.kind == "cpu":
        return array.from_numpy(made.astype(np.float32), x)
    return array.deliver(made, x)
