"""Multi-head latent attention (MLA): batches that are planned, and calls without a plan."""

from __future__ import annotations

import functools
import math
import sys
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from . import array
from .core import parse
from .core.key_share import KeyShare
from .core.names import refuse_names
from .core.parse import require_int
from .core.records import maker
from .core.tracing import untraced
from .engine.arrays import Arrays, make_arrays
from .engine.check_planless import Options
from .engine.index_arrays import compute
from .engine.latent_rows import Dims, in_16_bits
from .engine.mla_dimensions import (
    MLAHeadDimensions,
    MLALayerDimensions,
    deepseek_mla_dimensions,
    nope_mla_dimensions,
    smaller_mla_dimensions,
    supported_mla_head_dimensions,
    supported_mla_layer_dimensions,
)
from .engine.planless_cache import Asked
from .engine.planless_share import share_of_world
from .engine.run_planless import run, run_cached
from .engine.views import LATENT_NAMES, are_numbers, bounded, next_power_of_two, read_scale
from .errors import ArgumentError, UnsupportedError
from .page import append_paged_mla_kv_cache
from .typing import Array, Scale
from .wrappers.mla import BatchMLAPagedAttentionWrapper, MLAPlanMetadata

__all__ = [
    "BatchMLAPagedAttentionWrapper",
    "MLAHeadDimensions",
    "MLALayerDimensions",
    "MLAPlanMetadata",
    "append_paged_mla_kv_cache",
    "deepseek_mla_dimensions",
    "nope_mla_dimensions",
    "smaller_mla_dimensions",
    "supported_mla_head_dimensions",
    "supported_mla_layer_dimensions",
    "trtllm_batch_decode_with_kv_cache_mla",
    "xqa_batch_decode_with_kv_cache_mla",
    "xqa_mla",
]

if not TYPE_CHECKING:
    __getattr__ = refuse_names(__name__)

_XQA = LATENT_NAMES.but(
    q="q", k="k_cache", block_tables="page_table", sm_scale="q_scale", output_scale="kv_scale",
    out="output",
)  # fmt: skip
_WHOLE_LENGTHS = "causal_seqlens_kv_global"
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
    seq_lens: Array | None,
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
    return_lse_base: str | None = None,
    *,
    cp_kv_cache_interleave_size: int = 1,
    window_left: int = -1,
) -> Any:
    """Latent attention of a batch's last tokens; page table and lengths stay on the device, so that
    a CUDA graph may capture the call and follow their changes.

    Parameters
    ----------
    query
        [B, q_len, num_heads, kv_lora_rank + qk_rope_head_dim], float16 or bfloat16 (on the CPU
        float32 too), or float8_e4m3fn or float8_e5m2, which a launch turns into 16 bits: the last
        tokens of each request, causal among themselves. With cum_seq_lens_q [B + 1] any number of
        rows of each: [rows, num_heads, columns]; max_q_len then bounds the rows of
        one.
    kv_cache
        [num_pages, page_size, columns], with an axis of one head before or behind page_size or
        none; dtype of query or float8_e4m3fn. Any page size.
    workspace_buffer
        Bytes on a 16-byte boundary; too few are an error that names the need. None, or a JAX array:
        memory for this call.
    kv_lora_rank, qk_rope_head_dim
        512 or 256, and 64 or 0. qk_nope_head_dim is accepted for compatibility: it is what
        bmm1_scale is made of.
    block_tables
        int32 [B, max_pages]; seq_lens int32, uint32 or int64 [B]. With
        uses_shared_paged_kv_idx=False int32 [B, 2, max_pages], of K and of V, which must name the
        same pages, because a latent row is key and value: the first is read.
    sparse_mla_top_k
        Above 0: block_tables is int32 [B, q_len, sparse_mla_top_k], with cum_seq_lens_q [rows,
        sparse_mla_top_k], slots of the cache (page * page_size + offset) of each token's keys; an
        entry that is no slot, negative or beyond the cache, is no key. The first seq_len entries
        count of the last token of a request, and one fewer of each token before it; all of them
        where seq_lens is None. sparse_mla_top_k_lens [B * q_len]: how many count of each token's,
        whatever seq_lens says.
    max_seq_len
        An upper bound of seq_lens. It affects speed only.
    bmm1_scale
        The whole scale of the logits, 1 / sqrt(128 + 64) in DeepSeek's models; bmm2_scale that of
        the output. Numbers, or float32 arrays of one element, read on the device.
    out, lse
        Arrays to write; lse float32 of query's shape without columns, or [B * q_len, num_heads],
        base 2 unless return_lse_base says otherwise.
    sinks
        float32 [num_heads]: extra natural-log logits in the denominator. Rank 0 alone takes them
        where ranks share the keys.
    enable_dcp
        Whether cp_world GPUs hold the keys of every request, of which cp_rank is this one: runs of
        cp_kv_cache_interleave_size tokens in turn (cupyattn.shares). block_tables and seq_lens are
        those of this rank's keys, causal_seqlens_kv_global [B] whole lengths, the new tokens among
        them: several rows of a request need them. Lists name this rank's slots (`get_share_lists`).
        The states of all ranks merge into the answer.
    return_lse_base
        "base2", as None, or "basee", natural logarithms.
    window_left
        A row sees no more than so many keys before its own; -1: all. Older ones are not read. Not
        with lists.
    other arguments
        All others are accepted for compatibility.

    Returns
    -------
    out
        [B, q_len, num_heads, kv_lora_rank], or (out, lse) if `return_lse`: of query's dtype, for
        fp8 queries that of the keys, and bfloat16 where both are fp8.

    Raises
    ------
    CupyAttnError
        ArgumentError, UnsupportedError or WorkspaceError before anything is written.

    Notes
    -----
    Semantics: FlashInfer's function of the same name, which runs on Blackwell only.

    Examples
    --------
    >>> import numpy as np
    >>> import cupyattn
    >>> cache = np.ones((4, 64, 576), np.float16)  # pages of 512 latent and 64 rope columns
    >>> table, lengths = np.array([[3, 0], [1, -1]], np.int32), np.array([100, 20], np.int32)
    >>> q = np.ones((2, 1, 16, 576), np.float16)
    >>> cupyattn.trtllm_batch_decode_with_kv_cache_mla(
    ...     q, cache, None, 128, 512, 64, table, lengths, max_seq_len=128, bmm1_scale=192**-0.5
    ... ).shape
    (2, 1, 16, 512)
    """
    has_counts = sparse_mla_top_k_lens is not None
    arrays = make_arrays(
        q=query,
        k=kv_cache,
        workspace=workspace_buffer,
        block_tables=block_tables,
        kv_lens=sparse_mla_top_k_lens if has_counts else seq_lens,
        out=out,
        lse=lse,
        qo_offsets=cum_seq_lens_q,
        sinks=sinks,
        kv_begin=causal_seqlens_kv_global,
    )
    arguments = _make_decode(
        kv_lora_rank=kv_lora_rank,
        qk_rope_head_dim=qk_rope_head_dim,
        max_seq_len=next_power_of_two(max_seq_len),
        backend=backend,
        return_lse=return_lse,
        shares_pages=uses_shared_paged_kv_idx,
        max_q_len=max_q_len,
        enable_dcp=enable_dcp,
        cp_world=cp_world,
        cp_rank=cp_rank,
        interleave_size=cp_kv_cache_interleave_size,
        return_lse_base=return_lse_base,
        window_left=window_left,
        top_k=sparse_mla_top_k,
        has_counts=has_counts,
        bmm1_scale=bmm1_scale,
        bmm2_scale=bmm2_scale,
    )
    is_plain = are_numbers(bmm1_scale, bmm2_scale)
    result = run_cached(arrays, arguments) if is_plain else None
    if result is None:
        asked = Asked(arrays, arguments, {}) if is_plain else None
        result = _attend(arrays, seq_lens, arguments, asked)
    return result


def _attend(arrays: Arrays, seq_lens: Any, arguments: _Decode, asked: Asked | None) -> Any:
    """The output of `trtllm_batch_decode_with_kv_cache_mla`."""
    query, o_dtype = _queries(arrays.q, "query", arrays.k, arrays.out)
    parse.choice(arguments.backend, _BACKENDS, "backend")
    share = _share_of(arguments, arrays.kv_begin)
    if share is None:
        arrays = arrays._replace(kv_begin=None)
    base = arguments.return_lse_base
    if base is not None:
        parse.choice(base, ("base2", "basee"), "return_lse_base")
    block_tables, is_ragged = arrays.block_tables, arrays.qo_offsets is not None
    if not parse.flag(arguments.shares_pages, "uses_shared_paged_kv_idx"):
        block_tables = _table_of_keys(block_tables)
    top_k = require_int(arguments.top_k, "sparse_mla_top_k", 0)
    dims = _dims(arguments.kv_lora_rank, arguments.qk_rope_head_dim)
    shape = array.view(query, "query").shape
    if len(shape) != (3 if is_ragged else 4):
        wanted = "[B, q_len, heads, columns]"
        if is_ragged:
            wanted = "[rows, heads, columns] with cum_seq_lens_q"
        raise ArgumentError(f"query: shape is {list(shape)}; wanted {wanted}")
    tokens = 1 if is_ragged else int(shape[1])
    q_len = 1 if top_k else tokens
    sm_scale, scale_q = read_scale(arguments.bmm1_scale, "bmm1_scale")
    output_scale, scale_v = read_scale(arguments.bmm2_scale, "bmm2_scale")
    max_q_len = arguments.max_q_len
    options = Options(
        LATENT_NAMES.but(kv_begin=_WHOLE_LENGTHS),
        dims=dims,
        sm_scale=sm_scale,
        q_axes=(len(shape),),
        q_len=q_len,
        max_q_len=None if max_q_len is None else require_int(max_q_len, "max_q_len"),
        max_kv_len=None if top_k else bounded(arguments.max_seq_len, "max_seq_len"),
        output_scale=output_scale,
        causal=not top_k and (is_ragged or q_len > 1),
        is_list=top_k > 0,
        return_lse=parse.flag(arguments.return_lse, "return_lse"),
        natural_lse=base == "basee",
        o_dtype=o_dtype,
        key_share=share,
        window_left=arguments.window_left,
    )
    read = arrays._replace(q=query, block_tables=block_tables, scale_q=scale_q, scale_v=scale_v)
    if top_k:
        _check_lists(block_tables, top_k, is_ragged)
        if arguments.has_counts:
            options = options._replace(names=LATENT_NAMES.but(kv_lens="sparse_mla_top_k_lens"))
        elif seq_lens is not None:
            lens, of_each = _lens_of_lists(seq_lens, arrays.qo_offsets, int(shape[0]), tokens)
            options = options._replace(request_tokens=of_each, counts_later=True)
            read = read._replace(kv_lens=lens)
        read = read._replace(qo_offsets=None)
    else:
        read = read._replace(kv_lens=seq_lens)
    return run(read, options, asked=asked)


def _share_of(arguments: _Decode, whole_lengths: Any) -> KeyShare | None:
    """This rank's share of the keys, if it has one. ArgumentError for parts of one without
    enable_dcp."""
    if parse.flag(arguments.enable_dcp, "enable_dcp"):
        return share_of_world(arguments.cp_world, arguments.cp_rank, arguments.interleave_size)
    if require_int(arguments.cp_world, "cp_world") != 1 or whole_lengths is not None:
        name = "cp_world" if whole_lengths is None else _WHOLE_LENGTHS
        raise ArgumentError(f"{name}: given without enable_dcp=True; pass both, or none")
    return None


class _Decode(NamedTuple):
    """The options of `trtllm_batch_decode_with_kv_cache_mla`."""

    kv_lora_rank: Any
    qk_rope_head_dim: Any
    max_seq_len: Any
    backend: Any
    return_lse: Any
    shares_pages: Any
    max_q_len: Any
    enable_dcp: Any
    cp_world: Any
    cp_rank: Any
    interleave_size: Any
    return_lse_base: Any
    window_left: Any
    top_k: int
    has_counts: bool
    bmm1_scale: Any
    bmm2_scale: Any


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

    Parameters
    ----------
    query
        [B, 1, num_heads, columns], or without the axis of one token.
    workspace_buffer
        As there; nothing in it needs to be zero.
    kv_cache, qk_nope_head_dim to max_seq_len, bmm1_scale to sinks
        As there.
    enable_pdl
        Accepted for compatibility.
    out
        The array to write, [B, 1, num_heads, kv_lora_rank] or without that axis.

    Returns
    -------
    result
        `out`, by default a new array of query's axes.

    Raises
    ------
    CupyAttnError
        Errors as there.

    Notes
    -----
    Semantics: FlashInfer's function of the same name, which runs on SM120 only, for 128 heads of
    fp8.

    Examples
    --------
    >>> import numpy as np
    >>> import cupyattn
    >>> cache = np.ones((4, 64, 576), np.float16)  # pages of 512 latent and 64 rope columns
    >>> table, lengths = np.array([[3, 0], [1, -1]], np.int32), np.array([100, 20], np.int32)
    >>> q = np.ones((2, 1, 16, 576), np.float16)
    >>> cupyattn.xqa_batch_decode_with_kv_cache_mla(
    ...     q, cache, None, 128, 512, 64, table, lengths, max_seq_len=128, bmm1_scale=192**-0.5
    ... ).shape
    (2, 1, 16, 512)
    """
    arrays = make_arrays(
        q=query,
        k=kv_cache,
        workspace=workspace_buffer,
        block_tables=block_tables,
        kv_lens=seq_lens,
        out=out,
        sinks=sinks,
    )
    asked = None
    if are_numbers(bmm1_scale, bmm2_scale):
        arguments = _XqaBatch(
            kv_lora_rank=kv_lora_rank,
            qk_rope_head_dim=qk_rope_head_dim,
            max_seq_len=next_power_of_two(max_seq_len),
            bmm1_scale=bmm1_scale,
            bmm2_scale=bmm2_scale,
        )
        result = run_cached(arrays, arguments)
        if result is not None:
            return result
        asked = Asked(arrays, arguments, {})
    query, o_dtype = _queries(query, "query", kv_cache, out)
    arrays = arrays._replace(q=query)
    axes = len(array.view(query, "query").shape)
    if axes != 3:
        one_row = _one_row(query, "query")
        if out is not None and len(array.view(out, "out").shape) == 3:
            axes, arrays = 3, arrays._replace(q=one_row)
    dims = _dims(kv_lora_rank, qk_rope_head_dim)
    sm_scale, scale_q = read_scale(bmm1_scale, "bmm1_scale")
    output_scale, scale_v = read_scale(bmm2_scale, "bmm2_scale")
    options = Options(
        LATENT_NAMES,
        dims=dims,
        sm_scale=sm_scale,
        q_axes=(axes,),
        max_kv_len=bounded(max_seq_len, "max_seq_len"),
        output_scale=output_scale,
        causal=False,
        o_dtype=o_dtype,
    )
    return run(arrays._replace(scale_q=scale_q, scale_v=scale_v), options, asked=asked)


_make_decode = maker(_Decode)


class _XqaBatch(NamedTuple):
    """The options of `xqa_batch_decode_with_kv_cache_mla`."""

    kv_lora_rank: Any
    qk_rope_head_dim: Any
    max_seq_len: Any
    bmm1_scale: Any
    bmm2_scale: Any


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

    Parameters
    ----------
    q
        [B, 1, num_heads, 576]; dtypes as there.
    k_cache
        [num_pages, page_size, 1, 576], or as `trtllm_batch_decode_with_kv_cache_mla` has kv_cache.
    v_cache
        The same array, or its first 512 columns: a value is part of its key.
    page_table
        int32 [B, max_pages].
    seq_lens
        [B] or [B, 1].
    output
        [B, 1, num_heads, 512]; None: a new array is returned.
    page_size
        If given, must be the cache's.
    q_scale
        The whole scale of the logits.
    kv_scale
        Multiplies logits and output where the cache is fp8, and has no effect on others.
    workspace_buffer
        As in `trtllm_batch_decode_with_kv_cache_mla`.
    semaphores, sm_count, enable_pdl
        Accepted for compatibility.

    Returns
    -------
    result
        None where `output` is given, else the output, as there.

    Raises
    ------
    CupyAttnError
        Errors likewise.

    Notes
    -----
    Semantics: FlashInfer's function of the same name, which runs on SM120 only, for 128 heads of
    fp8.

    Examples
    --------
    >>> import numpy as np
    >>> import cupyattn
    >>> cache = np.ones((4, 64, 1, 576), np.float16)
    >>> table, lengths = np.array([[3, 0], [1, -1]], np.int32), np.array([100, 20], np.uint32)
    >>> q = np.ones((2, 1, 16, 576), np.float16)
    >>> cupyattn.xqa_mla(q, cache, cache, table, lengths, q_scale=192**-0.5).shape
    (2, 1, 16, 512)
    """
    arrays = make_arrays(
        q=q,
        k=k_cache,
        workspace=workspace_buffer,
        block_tables=page_table,
        kv_lens=seq_lens,
        out=output,
    )
    asked = None
    if v_cache is k_cache and are_numbers(q_scale, kv_scale):
        arguments = _Xqa(page_size=page_size, q_scale=q_scale, kv_scale=kv_scale)
        result = run_cached(arrays, arguments)
        if result is not None:
            return result if output is None else None
        asked = Asked(arrays, arguments, {})
    q, o_dtype = _queries(q, "q", k_cache, output)
    arrays = arrays._replace(q=q)
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
        scale_q = _product(scale_q, scale_v)
    if page_size is not None:
        slots = {n for n in vk.shape[1:-1] if n != 1} or {1}
        if require_int(page_size, "page_size") not in slots:
            raise ArgumentError(
                f"page_size: got {page_size}, but k_cache has shape {list(vk.shape)}"
            )
    options = Options(
        _XQA,
        dims=Dims(512, 64),
        sm_scale=sm_scale * output_scale,
        q_axes=(4,),
        output_scale=output_scale,
        causal=False,
        o_dtype=o_dtype,
    )
    if output is not None and len(array.view(output, "output").shape) == 3:
        options = options._replace(q_axes=(3,))
        arrays = arrays._replace(q=_one_row(q, "q"))
    result = run(arrays._replace(scale_q=scale_q, scale_v=scale_v), options, asked=asked)
    return result if output is None else None


class _Xqa(NamedTuple):
    """The options of `xqa_mla`."""

    page_size: Any
    q_scale: Any
    kv_scale: Any


def _product(scale: Any, other: Any) -> Any:
    """The product of two scales on the device, of which the first may be None."""
    if scale is None:
        return other
    views = array.view(scale, "q_scale"), array.view(other, "kv_scale")
    return compute(lambda a, b: a.reshape(1) * b.reshape(1), *views)


def _queries(query: Any, name: str, keys: Any, out: Any) -> tuple[Any, Any]:
    """Queries that kernels take, and the dtype of the output where query and out do not tell."""
    queries = in_16_bits(query, name, keys)
    is_told = queries is query or out is not None or not array.view(keys, "kv_cache").dtype.is_fp8
    return queries, None if is_told else "bfloat16"


def _table_of_keys(block_tables: Any) -> Any:
    """The pages of keys of [B, 2, max_pages]."""
    v = array.view(block_tables, "block_tables")
    if len(v.shape) != 3 or v.shape[1] != 2:
        raise ArgumentError(
            f"block_tables: shape is {list(v.shape)}; with uses_shared_paged_kv_idx=False wanted "
            "[B, 2, max_pages], a table for K and one for V"
        )
    if v.device.kind == "cpu":
        tables = array.as_numpy(v)
        if (tables[:, 0] != tables[:, 1]).any():
            raise UnsupportedError(
                "block_tables: K and V have different pages, but a latent row is key and value; "
                "pass one table and uses_shared_paged_kv_idx=True"
            )
    shape, strides = (v.shape[0], v.shape[2]), (v.strides[0], v.strides[2])
    return array.restride(block_tables, "block_tables", shape, strides)


def _check_lists(block_tables: Any, top_k: int, is_ragged: bool) -> None:
    shape = tuple(array.view(block_tables, "block_tables").shape)
    if not shape or shape[-1] != top_k or (is_ragged and len(shape) != 2):
        wanted = f"[rows, {top_k}]" if is_ragged else f"[B, q_len, {top_k}]"
        raise ArgumentError(
            f"block_tables: shape is {list(shape)}; wanted {wanted}, sparse_mla_top_k slots of "
            "each token"
        )


def _lens_of_lists(seq_lens: Any, cum_seq_lens_q: Any, count: int, tokens: int) -> tuple[Any, int]:
    """How many entries count of the lists of the last token of each request, and how many tokens
    that stands for.

    count   of requests, or of rows where there are offsets
    tokens  of each request
    """
    v = array.view(seq_lens, "seq_lens")
    if cum_seq_lens_q is None:
        is_of_tokens = tokens > 1 and math.prod(v.shape) == count * tokens
        return seq_lens, 1 if is_of_tokens else tokens
    offsets = array.view(cum_seq_lens_q, "cum_seq_lens_q")
    if math.prod(offsets.shape) != math.prod(v.shape) + 1:
        raise ArgumentError(
            f"cum_seq_lens_q: shape is {list(offsets.shape)}; wanted [{math.prod(v.shape) + 1}], "
            "one more than seq_lens"
        )
    return compute(functools.partial(_lens_of_rows, count), v, offsets), 1


def _lens_of_rows(num_rows: int, seq_lens: Any, offsets: Any) -> Any:
    """int32 [num_rows]: the keys of each row's request, less the rows of it that follow."""
    xp: Any = sys.modules[type(seq_lens).__module__.partition(".")[0]]
    lens, ends = seq_lens.reshape(-1), offsets.reshape(-1)[1:]
    device = {"device": lens.device} if xp.__name__ == "torch" else {}
    rows = xp.arange(num_rows, **device)
    owner = xp.searchsorted(ends, rows, side="right").clip(0, len(lens) - 1)
    counts = lens[owner] - (ends[owner] - 1 - rows)
    return counts.int() if xp.__name__ == "torch" else counts.astype(np.int32)


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
