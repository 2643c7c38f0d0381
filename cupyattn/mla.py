"""Multi-head latent attention (MLA): batches that are planned, and calls without a plan."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from . import array
from .core import parse
from .core.names import refuse_names
from .core.parse import require_int
from .core.tracing import untraced
from .errors import ArgumentError, UnsupportedError
from .inputs import geometry
from .inputs.latent import Dims
from .page import append_paged_mla_kv_cache
from .planless.latent import NAMES, Options, repeat_of, run, run_repeat
from .planless.latent_call import bounded, read_scale
from .typing import Array, Scale
from .wrappers.mla import BatchMLAPagedAttentionWrapper, MLAPlanMetadata

__all__ = [
    "BatchMLAPagedAttentionWrapper",
    "MLAPlanMetadata",
    "append_paged_mla_kv_cache",
    "trtllm_batch_decode_with_kv_cache_mla",
    "xqa_batch_decode_with_kv_cache_mla",
    "xqa_mla",
]

if not TYPE_CHECKING:
    __getattr__ = refuse_names(__name__)

_XQA = NAMES._replace(
    q="q", k="k_cache", block_tables="page_table", sm_scale="q_scale", output_scale="kv_scale",
    out="output",
)  # fmt: skip
_BACKENDS = "auto", "trtllm-gen", "xqa", "cute-dsl"


@untraced
def trtllm_batch_decode_with_kv_cache_mla(
    query: Array,
    kv_cache: Array,
    workspace_buffer: Any,
    qk_nope_head_dim: int,
    kv_lora_rank: int,
    qk_rope_head_dim: int,
    block_tables: Array,
    seq_lens: Array,
    max_seq_len: int,
    sparse_mla_top_k: int = 0,
    out: Array | None = None,
    bmm1_scale: Scale = 1.0,
    bmm2_scale: Scale = 1.0,
    sinks: Array | None = None,
    skip_softmax_threshold_scale_factor: float | None = None,
    enable_pdl: bool | None = None,
    backend: str = "auto",
    is_var_seq: bool = True,
    uses_shared_paged_kv_idx: bool = True,
    lse: Array | None = None,
    return_lse: bool = False,
    cute_dsl_impl: str = "auto",
    kv_scale_format: str = "auto",
    cum_seq_lens_q: Array | None = None,
    max_q_len: int | None = None,
    multi_ctas_kv_counter_buffer: Any = None,
    sparse_mla_top_k_lens: Array | None = None,
    enable_dcp: bool = False,
    cp_world: int = 1,
    cp_rank: int = 0,
    causal_seqlens_kv_global: Any = None,
    use_fp16_softmax: bool | None = None,
    return_lse_base: Any = None,
) -> Any:
    """Latent attention of a batch's last tokens; page table and lengths stay on the device, so that
    a CUDA graph may capture the call and follow their changes.

    query   [B, q_len, num_heads, kv_lora_rank + qk_rope_head_dim], float16 or bfloat16 (on the CPU
            float32 too): the last tokens of each request, causal among themselves. With
            cum_seq_lens_q [B + 1] any number of rows of each: [rows, num_heads, columns];
            max_q_len is then the most of one, as far as is known.
    kv_cache   [num_pages, page_size, columns], with an axis of one head before or behind page_size
            or none; dtype of query or float8_e4m3fn. Any page size.
    workspace_buffer   bytes on a 16-byte boundary; too few are an error that names the need. None,
            or a JAX array: memory for this call.
    kv_lora_rank, qk_rope_head_dim   512 or 256, and 64 or 0. qk_nope_head_dim is accepted for
            compatibility: it is what bmm1_scale is made of.
    block_tables   int32 [B, max_pages]; seq_lens int32, uint32 or int64 [B].
    sparse_mla_top_k   above 0: block_tables is int32 [B, q_len, sparse_mla_top_k], slots of the
            cache (page * page_size + offset) of each token's keys, negative for none;
            sparse_mla_top_k_lens [B * q_len], how many of them count, default all. seq_lens is then
            not read.
    max_seq_len   the most of seq_lens, as far as is known: it bounds how finely keys are split.
    bmm1_scale   the whole scale of the logits, 1 / sqrt(128 + 64) in DeepSeek's models; bmm2_scale
            that of the output. Numbers, or float32 arrays of one element, read on the device.
    out, lse   arrays to write; lse float32 of query's shape without columns, base 2.
    sinks   float32 [num_heads]: extra natural-log logits in the denominator.
    enable_dcp, causal_seqlens_kv_global, return_lse_base   must be False and None; cp_world 1.
    All others are accepted for compatibility.

    Returns out [B, q_len, num_heads, kv_lora_rank], or (out, lse) if `return_lse`. Raises
    ArgumentError, UnsupportedError or WorkspaceError before anything is written. Semantics:
    FlashInfer's function of the same name, which runs on Blackwell only.
    """
    is_dense = type(sparse_mla_top_k) is int and sparse_mla_top_k == 0
    is_plain = is_dense and sparse_mla_top_k_lens is causal_seqlens_kv_global is None
    repeat = None
    if is_plain:
        repeat = repeat_of(
            *("trtllm", kv_lora_rank, qk_rope_head_dim, max_seq_len, backend, return_lse),
            *(uses_shared_paged_kv_idx, max_q_len, enable_dcp, cp_world, return_lse_base),
            scales=(bmm1_scale, bmm2_scale),
        )
    arrays: tuple[Any, ...] = (
        *(query, None, kv_cache, None, workspace_buffer, block_tables, seq_lens, out, lse),
        *(cum_seq_lens_q, sinks),
    )
    answer = run_repeat(arrays, repeat)
    if answer is not None:
        return answer
    parse.choice(backend, _BACKENDS, "backend")
    geometry.refuse(
        "is not supported",
        enable_dcp=enable_dcp,
        causal_seqlens_kv_global=causal_seqlens_kv_global,
        return_lse_base=return_lse_base,
    )
    if require_int(cp_world, "cp_world") != 1:
        raise UnsupportedError(f"cp_world: got {cp_world}; only 1 is supported")
    if not parse.flag(uses_shared_paged_kv_idx, "uses_shared_paged_kv_idx"):
        raise UnsupportedError("uses_shared_paged_kv_idx: a latent row is key and value; pass True")
    top_k = require_int(sparse_mla_top_k, "sparse_mla_top_k", 0)
    dims = _dims(kv_lora_rank, qk_rope_head_dim)
    is_ragged = cum_seq_lens_q is not None
    shape = array.view(query, "query").shape
    if len(shape) != (3 if is_ragged else 4):
        wanted = "[rows, heads, columns] with cum_seq_lens_q" if is_ragged else (
            "[B, q_len, heads, columns]"
        )  # fmt: skip
        raise ArgumentError(f"query: shape is {list(shape)}; wanted {wanted}")
    q_len = 1 if top_k or is_ragged else int(shape[1])
    sm_scale, scale_q = read_scale(bmm1_scale, "bmm1_scale")
    output_scale, scale_v = read_scale(bmm2_scale, "bmm2_scale")
    names = NAMES._replace(kv_lens="sparse_mla_top_k_lens") if top_k else NAMES
    options = Options(
        names,
        dims,
        sm_scale,
        q_axes=(len(shape),),
        q_len=q_len,
        max_q_len=None if max_q_len is None else require_int(max_q_len, "max_q_len"),
        max_kv_len=None if top_k else bounded(max_seq_len, "max_seq_len"),
        output_scale=output_scale,
        causal=is_ragged or q_len > 1,
        is_list=top_k > 0,
        return_lse=parse.flag(return_lse, "return_lse"),
    )
    if top_k:
        given = tuple(array.view(block_tables, "block_tables").shape)
        if not given or given[-1] != top_k or is_ragged:
            raise ArgumentError(
                f"block_tables: shape is {list(given)}; wanted [B, q_len, {top_k}], "
                "sparse_mla_top_k slots of each token, without cum_seq_lens_q"
            )
        arrays = *arrays[:6], sparse_mla_top_k_lens, *arrays[7:]
    if not scale_q is scale_v is None:
        arrays += scale_q, scale_v
    return run(arrays, options, repeat)


@untraced
def xqa_batch_decode_with_kv_cache_mla(
    query: Array,
    kv_cache: Array,
    workspace_buffer: Any,
    qk_nope_head_dim: int,
    kv_lora_rank: int,
    qk_rope_head_dim: int,
    block_tables: Array,
    seq_lens: Array,
    max_seq_len: int,
    out: Array | None = None,
    bmm1_scale: Scale = 1.0,
    bmm2_scale: Scale = 1.0,
    sinks: Array | None = None,
    enable_pdl: bool | None = None,
) -> Any:
    """Latent attention of one token of each request: arguments as in
    `trtllm_batch_decode_with_kv_cache_mla`.

    query   [B, 1, num_heads, columns]. Nothing in workspace_buffer needs to be zero.

    Returns out [B, num_heads, kv_lora_rank], which `out` may be. Errors as there. Semantics:
    FlashInfer's function of the same name, which runs on SM120 only, for 128 heads of fp8.
    """
    scalars = "xqa_batch", kv_lora_rank, qk_rope_head_dim, max_seq_len
    repeat = repeat_of(*scalars, scales=(bmm1_scale, bmm2_scale))
    arrays: tuple[Any, ...] = (
        *(_one_row(query, "query"), None, kv_cache, None, workspace_buffer),
        *(block_tables, seq_lens, out, None, None, sinks),
    )
    answer = run_repeat(arrays, repeat)
    if answer is not None:
        return answer
    dims = _dims(kv_lora_rank, qk_rope_head_dim)
    sm_scale, scale_q = read_scale(bmm1_scale, "bmm1_scale")
    output_scale, scale_v = read_scale(bmm2_scale, "bmm2_scale")
    options = Options(
        NAMES,
        dims,
        sm_scale,
        max_kv_len=bounded(max_seq_len, "max_seq_len"),
        output_scale=output_scale,
        causal=False,
    )
    return run((*arrays, scale_q, scale_v), options, repeat)


@untraced
def xqa_mla(
    q: Array,
    k_cache: Array,
    v_cache: Array,
    page_table: Array,
    seq_lens: Array,
    output: Array | None = None,
    workspace_buffer: Any = None,
    semaphores: Any = None,
    page_size: int | None = None,
    q_scale: Scale = 1.0,
    kv_scale: Scale = 1.0,
    sm_count: int | None = None,
    enable_pdl: bool | None = None,
) -> Any:
    """Latent attention of one token of each request, in XQA's form.

    q           [B, 1, num_heads, 576], float16 or bfloat16.
    k_cache     [num_pages, page_size, 1, 576], or as `trtllm_batch_decode_with_kv_cache_mla` has
                kv_cache; v_cache the same array, or its first 512 columns: a value is part of its
                key.
    page_table  int32 [B, max_pages]; seq_lens [B] or [B, 1].
    output      [B, 1, num_heads, 512]; None: a new array is returned.
    page_size   if given, must be the cache's.
    q_scale     the whole scale of the logits; kv_scale multiplies logits and output where the cache
                is fp8, and has no effect on others.
    workspace_buffer  as in `trtllm_batch_decode_with_kv_cache_mla`; semaphores, sm_count and
                enable_pdl are accepted for compatibility.

    Returns None where `output` is given, else the output. Errors as there. Semantics: FlashInfer's
    function of the same name, which runs on SM120 only, for 128 heads of fp8.
    """
    repeat = None
    if v_cache is k_cache:
        repeat = repeat_of("xqa", page_size, scales=(q_scale, kv_scale))
    arrays: tuple[Any, ...] = (
        *(q, None, k_cache, None, workspace_buffer, page_table, seq_lens, output, None),
        *(None, None),
    )
    answer = run_repeat(arrays, repeat)
    if answer is not None:
        return answer if output is None else None
    vk, vv = array.view(k_cache, "k_cache"), array.view(v_cache, "v_cache")
    if vk.ptr != vv.ptr or vk.shape[:-1] != vv.shape[:-1]:
        raise ArgumentError(
            "v_cache: is not at the address of k_cache; wanted the same array, or its first 512 "
            "columns"
        )
    sm_scale, scale_q = read_scale(q_scale, "q_scale")
    output_scale, scale_v = read_scale(kv_scale, "kv_scale")
    if not vk.dtype.is_fp8:
        output_scale, scale_v = 1.0, None
    elif scale_v is not None:
        raise UnsupportedError("kv_scale: an array on the GPU has no kernel here; pass a number")
    if page_size is not None:
        slots = {n for n in vk.shape[1:-1] if n != 1} or {1}
        if require_int(page_size, "page_size") not in slots:
            raise ArgumentError(
                f"page_size: got {page_size}, but k_cache has shape {list(vk.shape)}"
            )
    options = Options(
        _XQA, Dims(512, 64), sm_scale * output_scale, q_axes=(4,), output_scale=output_scale,
        causal=False,
    )  # fmt: skip
    if output is not None and len(array.view(output, "output").shape) == 3:
        options, repeat = options._replace(q_axes=(3,)), None
        arrays = _one_row(q, "q"), *arrays[1:]
    answer = run((*arrays, scale_q), options, repeat)
    return answer if output is None else None


def _dims(kv_lora_rank: Any, qk_rope_head_dim: Any) -> Dims:
    return Dims(
        require_int(kv_lora_rank, "kv_lora_rank"),
        require_int(qk_rope_head_dim, "qk_rope_head_dim", 0),
    )


def _one_row(query: Any, name: str) -> Any:
    """[B, 1, heads, columns] as [B, heads, columns]."""
    v = array.view(query, name)
    if len(v.shape) == 3:
        return query
    if len(v.shape) != 4 or v.shape[1] != 1:
        raise ArgumentError(f"{name}: shape is {list(v.shape)}; wanted [B, 1, heads, columns]")
    shape, strides = (v.shape[0], *v.shape[2:]), (v.strides[0], *v.strides[2:])
    return array.restride(query, name, shape, strides)
