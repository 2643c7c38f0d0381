"""TensorRT-LLM's calls: decode and context attention over page tables that stay on the device."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

from . import array
from .core import dtypes, overloads, parse
from .core.key_share import KeyShare
from .core.parse import require_int
from .core.records import maker
from .core.tracing import untraced
from .engine import geometry
from .engine.arrays import Arrays, make_arrays
from .engine.check_planless import Options, check, options_of
from .engine.chunks import split_by_chunks
from .engine.index_arrays import compute
from .engine.planless_share import share_of_world
from .engine.run_planless import run
from .engine.views import (
    CONFIRMED,
    Names,
    confirmed_count,
    next_power_of_two,
    numbers_and_arrays,
)
from .engine.widening import widened
from .errors import ArgumentError, UnsupportedError
from .typing import Array, Pages, Scale

__all__ = [
    "trtllm_batch_context_with_kv_cache",
    "trtllm_batch_decode_with_kv_cache",
    "trtllm_fmha_v2_prefill",
    "trtllm_ragged_attention_deepseek",
    "xqa_batch_decode_with_kv_cache",
]

_BACKENDS = "auto", "xqa", "trtllm-gen"
_MANY_ROWS = 65
_LOG2_SCALE = "bmm1_scale_log2"
_ONE = Names("query", "kv_cache", "kv_cache[:, 1]")
_PAIR = Names("query", "kv_cache[0]", "kv_cache[1]")
_ROWS = Names("query", "key", "value", kv_offsets="cum_seq_lens_kv", max_kv_len="max_kv_len")
_QKV = _ROWS.but(q="qkv (Q)", k="qkv (K)", v="qkv (V)")
# What `qkv` is in each layout.
_LAYOUTS = {
    "PACKED_QKV": "one array [rows, 3, num_heads, head_dim]",
    "CONTIGUOUS_Q_KV": "(Q, KV), KV [rows, 2, num_kv_heads, head_dim]",
    "SEPARATE_Q_K_V": "(Q, K, V)",
    "Q_PAGED_KV_NHD": "(Q, pages)",
    "Q_PAGED_KV_HND": "(Q, pages)",
}


@untraced
@overloads.trtllm_batch_decode_with_kv_cache
def trtllm_batch_decode_with_kv_cache(
    query: Array,
    kv_cache: Pages,
    workspace_buffer: Any,
    block_tables: Array,
    seq_lens: Array,
    max_seq_len: int,
    bmm1_scale: Scale = 1.0,
    bmm2_scale: Scale = 1.0,
    window_left: int = -1,
    out: Array | None = None,
    out_dtype: Any = None,
    o_sf_scale: Any = None,
    o_sf_vec_size: int | None = None,
    sinks: Array | None = None,
    kv_layout: str = "HND",
    enable_pdl: bool | None = None,
    backend: str = "auto",
    q_len_per_req: int | None = 1,
    o_scale: float | None = 1.0,
    mask: Array | None = None,
    max_q_len: int | None = None,
    cum_seq_lens_q: Array | None = None,
    skip_softmax_threshold_scale_factor: float | None = None,
    kv_cache_sf: Any = None,
    uses_shared_paged_kv_idx: bool = True,
    lse: Array | None = None,
    return_lse: bool = False,
    bmm1_scale_log2: Any = None,
    multi_ctas_kv_counter_buffer: Any = None,
    enable_block_sparse_attention: bool = False,
    bf16q_fp8kv_transform_mode: Any = None,
    *,
    cp_world: int = 1,
    cp_rank: int = 0,
    causal_seqlens_kv_global: Array | None = None,
    cp_kv_cache_interleave_size: int = 1,
) -> Any:
    """Attention of a batch's last tokens over paged keys; page table and lengths stay where they
    are, on the device, so that a CUDA graph may capture the call and follow their changes.

    Parameters
    ----------
    query
        [B * q_len_per_req, num_qo_heads, head_dim], float16 or bfloat16 (on the CPU float32 too):
        request after request, the last tokens of each, causal among themselves. With cum_seq_lens_q
        any number of rows of each.
    kv_cache
        [num_pages, 2, num_kv_heads, page_size, head_dim] ("HND") or [num_pages, 2, page_size,
        num_kv_heads, head_dim] ("NHD"); with an axis of 1 in place of the 2 keys are values too; or
        a pair (K, V) without that axis. dtype of query, float8_e4m3fn or float8_e5m2. Any page
        size; head dims any multiple of 8 up to 256.
    kv_layout
        "HND" or "NHD".
    workspace_buffer
        Bytes on a 16-byte boundary, whatever they hold: work list and partial states; 128 MB are
        enough for any batch that fits a GPU, and too few are an error that names the need. Calls
        that overlap in time need one each. None, or a JAX array, which cannot be written: memory
        for this call.
    block_tables
        int32 [B, max_pages], pages of each request in the order of its keys; entries past its last
        page may hold anything. int64 is converted at each call.
    seq_lens
        int32, uint32 or int64 [B], keys of each request, the new tokens among them; 0: its rows
        give 0 and -inf. Lengths beyond the table are cut to it.
    max_seq_len
        An upper bound of seq_lens. It affects speed only, by how finely keys are split.
    bmm1_scale, bmm2_scale
        The whole scale of the logits (k_scale / sqrt(head_dim), say), and that of the output
        (v_scale). Numbers, or float32 arrays of one element: on a GPU they are read there, without
        waiting.
    window_left
        Keys to the left of a row's own that it sees; -1: all.
    out, lse
        Arrays to write instead of new ones; lse float32 [rows, num_qo_heads], base 2.
    return_lse
        Return the LSE too.
    out_dtype
        float16, bfloat16, float32, float8_e4m3fn or float8_e5m2; default that of `out`, or of
        query. fp8 is saturated, after bmm2_scale.
    sinks
        float32 [num_qo_heads]: extra natural-log logits in the denominator.
    q_len_per_req
        Rows of each request.
    cum_seq_lens_q
        Instead, [B + 1]: where the rows of each begin and how many there are.
    max_q_len
        Bounds the rows of one then, as does a q_len_per_req above 1.
    skip_softmax_threshold_scale_factor
        As in `single_prefill_with_kv_cache`. Few rows are exact.
    o_scale, enable_pdl, backend, multi_ctas_kv_counter_buffer, bf16q_fp8kv_transform_mode
        Accepted for compatibility; they change nothing here.
    mask
        Over the query tokens of each request, in place of causality: bools [B, q_len_per_req,
        q_len_per_req], or their bits, lowest first, in words of any size with an axis of words
        behind (uint16 [B, q, 2 * ceil(q / 32)], say). Earlier keys are visible. With cum_seq_lens_q
        a row for each row of query, of max_q_len bools or bits.
    bmm1_scale_log2
        bmm1_scale times log2(e), which then counts in its place: a number, or float32 array of one
        element.
    cp_world, cp_rank, cp_kv_cache_interleave_size
        The keys of every request are spread over this many ranks (GPUs); the rank of this call; the
        number of consecutive tokens that go to one rank before the next takes over
        (cupyattn.shares). block_tables and seq_lens are those of this rank's keys; the states
        of all ranks, with their LSEs, merge into the answer. sinks on rank 0 alone.
    causal_seqlens_kv_global
        [B]: keys of each whole request ahead of its rows of query, where several rows, a window or
        a mask go by places in it.
    o_sf_scale, o_sf_vec_size, kv_cache_sf
        Must be None.
    enable_block_sparse_attention
        Must be False.
    uses_shared_paged_kv_idx
        False: block_tables is [B, 2, max_pages], the pages of K and those of V.

    Returns
    -------
    out
        [rows, num_qo_heads, head_dim] in query's framework and device, or (out, lse) if
        `return_lse`. Nothing is copied to the host and nothing waits. Rows of no request are not
        written.

    Raises
    ------
    CupyAttnError
        ArgumentError for arguments that do not fit each other, UnsupportedError for what has no
        kernel, WorkspaceError, all before anything is written. The values of tables on a GPU are
        not known to the host: CUPYATTN_DEBUG=1 reads and checks them; on the CPU they always are.

    Notes
    -----
    Semantics: FlashInfer's function of the same name, which on Hopper has no LSE, no
    cum_seq_lens_q, and pages of 16 to 128 only.

    Examples
    --------
    >>> import numpy as np
    >>> import cupyattn
    >>> pool = np.ones((4, 2, 16, 2, 64), np.float16)  # [pages, K and V, page_size, heads, D]
    >>> table, lengths = np.array([[3, 0], [1, -1]], np.int32), np.array([21, 16], np.int32)
    >>> q = np.ones((2, 8, 64), np.float16)  # a token of each request
    >>> o = cupyattn.trtllm_batch_decode_with_kv_cache(
    ...     q, pool, None, table, lengths, max_seq_len=32, bmm1_scale=64**-0.5, kv_layout="NHD"
    ... )
    >>> o.shape
    (2, 8, 64)
    """
    k, v = kv_cache, None
    if isinstance(kv_cache, (tuple, list)):
        k, v = _pair(kv_cache)
    has_log2_scale = bmm1_scale_log2 is not None
    of_logits = bmm1_scale_log2 if has_log2_scale else bmm1_scale
    sm_scale, scale_q, output_scale, scale_v = numbers_and_arrays(of_logits, bmm2_scale)
    arrays = make_arrays(
        q=query,
        k=k,
        v=v,
        workspace=workspace_buffer,
        block_tables=block_tables,
        kv_lens=seq_lens,
        out=out,
        lse=lse,
        qo_offsets=cum_seq_lens_q,
        sinks=sinks,
        scale_q=scale_q,
        scale_v=scale_v,
        mask=mask,
    )
    share = None
    if type(cp_world) is not int or cp_world != 1:
        share = share_of_world(cp_world, cp_rank, cp_kv_cache_interleave_size)
    if share is not None:
        arrays = arrays._replace(kv_begin=causal_seqlens_kv_global)
    options = _make_decode(
        sm_scale=sm_scale,
        output_scale=output_scale,
        kv_layout=kv_layout,
        q_len=q_len_per_req,
        max_q_len=max_q_len,
        max_kv_len=next_power_of_two(max_seq_len),
        window_left=window_left,
        o_dtype=out_dtype,
        return_lse=return_lse,
        o_scale=o_scale,
        backend=backend,
        shares_pages=uses_shared_paged_kv_idx,
        skip_softmax=skip_softmax_threshold_scale_factor,
        o_sf_scale=o_sf_scale,
        o_sf_vec_size=o_sf_vec_size,
        kv_cache_sf=kv_cache_sf,
        enable_block_sparse_attention=enable_block_sparse_attention,
        has_log2_scale=has_log2_scale,
        key_share=share,
    )
    return run(arrays, options)


@untraced
@overloads.xqa_batch_decode_with_kv_cache
def xqa_batch_decode_with_kv_cache(
    query: Array,
    kv_cache: Pages,
    workspace_buffer: Any,
    block_tables: Array,
    seq_lens: Array,
    max_seq_len: int,
    bmm1_scale: Scale = 1.0,
    bmm2_scale: Scale = 1.0,
    window_left: int = -1,
    out: Array | None = None,
    sinks: Array | None = None,
    kv_layout: str = "NHD",
    enable_pdl: bool | None = None,
    q_len_per_req: int | None = 1,
    o_scale: float | None = 1.0,
    mask: Array | None = None,
    kv_cache_sf: Any = None,
    q_cu_seq_lens: Array | None = None,
    *,
    lse: Array | None = None,
    return_lse: bool = False,
) -> Any:
    """`trtllm_batch_decode_with_kv_cache` with its arguments in another order, and NHD by default.

    q_cu_seq_lens is that function's cum_seq_lens_q. Nothing in workspace_buffer needs to be zero.
    Answers and errors as there.

    Notes
    -----
    Semantics: FlashInfer's function of the same name, which has no LSE.

    Examples
    --------
    >>> import numpy as np
    >>> import cupyattn
    >>> pool = np.ones((4, 2, 16, 2, 64), np.float16)  # [pages, K and V, page_size, heads, D]
    >>> table, lengths = np.array([[3, 0], [1, -1]], np.int32), np.array([21, 16], np.int32)
    >>> q = np.ones((2, 8, 64), np.float16)
    >>> cupyattn.xqa_batch_decode_with_kv_cache(
    ...     q, pool, None, table, lengths, max_seq_len=32, bmm1_scale=64**-0.5
    ... ).shape
    (2, 8, 64)
    """
    return trtllm_batch_decode_with_kv_cache(  # type: ignore[call-overload]
        query,
        kv_cache,
        workspace_buffer,
        block_tables,
        seq_lens,
        max_seq_len,
        bmm1_scale=bmm1_scale,
        bmm2_scale=bmm2_scale,
        window_left=window_left,
        out=out,
        sinks=sinks,
        kv_layout=kv_layout,
        q_len_per_req=q_len_per_req,
        o_scale=o_scale,
        mask=mask,
        cum_seq_lens_q=q_cu_seq_lens,
        kv_cache_sf=kv_cache_sf,
        lse=lse,
        return_lse=return_lse,
    )


@untraced
@overloads.trtllm_batch_context_with_kv_cache
def trtllm_batch_context_with_kv_cache(
    query: Array,
    kv_cache: Pages,
    workspace_buffer: Any,
    block_tables: Array,
    seq_lens: Array,
    max_q_len: int,
    max_kv_len: int,
    bmm1_scale: Scale,
    bmm2_scale: Scale,
    batch_size: int,
    cum_seq_lens_q: Array,
    cum_seq_lens_kv: Array,
    window_left: int = -1,
    out: Array | None = None,
    out_dtype: Any = None,
    o_sf_scale: Any = None,
    o_sf_vec_size: int | None = None,
    kv_layout: str = "HND",
    enable_pdl: bool | None = None,
    sinks: Array | None = None,
    kv_cache_sf: Any = None,
    skip_softmax_threshold_scale_factor: float | None = None,
    uses_shared_paged_kv_idx: bool = True,
    causal: bool = True,
    lse: Array | None = None,
    return_lse: bool = False,
    multi_ctas_kv_counter_buffer: Any = None,
    use_fp16_softmax: bool | None = None,
    uses_spcompress: bool | None = None,
) -> Any:
    """Attention of a batch's new tokens over paged keys; page table, lengths and offsets stay on
    the device, so that a CUDA graph may capture the call and follow their changes.

    Parameters
    ----------
    query
        [rows, num_qo_heads, head_dim], request after request, the last tokens of each.
    cum_seq_lens_q
        int32, uint32 or int64 [B + 1]: the first row of each, and their number.
    max_q_len
        An upper bound of the rows of one request. It affects speed only.
    max_kv_len
        An upper bound of seq_lens. It affects speed only. batch_size must be B.
    cum_seq_lens_kv
        Accepted for compatibility: seq_lens says the same. So are use_fp16_softmax and
        uses_spcompress, which allow less exact outputs.
    causal
        Row i of n sees keys up to i + seq_len - n, else all of its request.
    other arguments
        All other arguments as in `trtllm_batch_decode_with_kv_cache`.

    Returns
    -------
    out
        [rows, num_qo_heads, head_dim], or (out, lse [rows, num_qo_heads], base 2) if `return_lse`.

    Raises
    ------
    CupyAttnError
        Errors likewise.

    Notes
    -----
    Semantics: FlashInfer's function of the same name, which does not run on Hopper, nor with a
    window where it is not causal: here a row's window ends at its own position plus what follows.

    Examples
    --------
    >>> import numpy as np
    >>> import cupyattn
    >>> pool = np.ones((4, 2, 16, 2, 64), np.float16)  # [pages, K and V, page_size, heads, D]
    >>> table, lengths = np.array([[3, 0], [1, -1]], np.int32), np.array([21, 16], np.int32)
    >>> q, offsets = np.ones((20, 8, 64), np.float16), np.array([0, 4, 20], np.int32)
    >>> o = cupyattn.trtllm_batch_context_with_kv_cache(
    ...     q, pool, None, table, lengths, max_q_len=16, max_kv_len=32, bmm1_scale=64**-0.5,
    ...     bmm2_scale=1.0, batch_size=2, cum_seq_lens_q=offsets, cum_seq_lens_kv=None,
    ...     kv_layout="NHD",
    ... )
    >>> o.shape
    (20, 8, 64)
    """
    k, v = kv_cache, None
    if isinstance(kv_cache, (tuple, list)):
        k, v = _pair(kv_cache)
    sm_scale, scale_q, output_scale, scale_v = numbers_and_arrays(bmm1_scale, bmm2_scale)
    arrays = make_arrays(
        q=query,
        k=k,
        v=v,
        workspace=workspace_buffer,
        block_tables=block_tables,
        kv_lens=seq_lens,
        out=out,
        lse=lse,
        qo_offsets=cum_seq_lens_q,
        sinks=sinks,
        scale_q=scale_q,
        scale_v=scale_v,
    )
    options = _Rows(
        names=None,
        sm_scale=sm_scale,
        output_scale=output_scale,
        kv_layout=kv_layout,
        max_q_len=_max_rows(max_q_len),
        max_kv_len=next_power_of_two(max_kv_len),
        window_left=window_left,
        o_dtype=out_dtype,
        return_lse=return_lse,
        causal=causal,
        batch_size=confirmed_count(batch_size, block_tables),
        shares_pages=uses_shared_paged_kv_idx,
        skip_softmax=skip_softmax_threshold_scale_factor,
        o_sf_scale=o_sf_scale,
        o_sf_vec_size=o_sf_vec_size,
        kv_cache_sf=kv_cache_sf,
    )
    return run(arrays, options)


@untraced
def trtllm_ragged_attention_deepseek(
    query: Array,
    key: Array,
    value: Array,
    workspace_buffer: Any,
    seq_lens: Array,
    max_q_len: int,
    max_kv_len: int,
    bmm1_scale: Scale,
    bmm2_scale: Scale,
    o_sf_scale: float,
    batch_size: int,
    window_left: int,
    cum_seq_lens_q: Array,
    cum_seq_lens_kv: Array,
    enable_pdl: bool | None,
    is_causal: bool,
    return_lse: bool,
    attention_sinks: Array | None = None,
    skip_softmax_threshold_scale_factor: float | None = None,
    out: Array | None = None,
    lse: Array | None = None,
    sage_attn_sfs: tuple[Any, Any, Any, Any] = (None, None, None, None),
    num_elts_per_sage_attn_blk: tuple[int, int, int, int] = (0, 0, 0, 0),
    backend: str = "trtllm-gen",
    q_seq_lens_cpu: Any = None,
    kv_seq_lens_cpu: Any = None,
    use_fp16_softmax: bool | None = None,
    uses_spcompress: bool | None = None,
) -> Any:
    """Attention of a batch's new tokens over keys in rows; lengths and offsets stay on the device,
    so that a CUDA graph may capture the call and follow their changes.

    Parameters
    ----------
    query
        [rows, num_qo_heads, head_dim_qk], request after request, the last tokens of each.
    key, value
        [n, num_kv_heads, head_dim], request after request; head dims may differ. Beside keys of 16
        bits, values may be fp8: they are widened to the dtype of the keys first.
    seq_lens
        int32, uint32 or int64 [B]: keys of each request; 0: its rows give 0 and -inf.
    cum_seq_lens_q, cum_seq_lens_kv
        Likewise [B + 1]: the first row of each in query, and in key.
    max_q_len, max_kv_len, batch_size
        As in `trtllm_batch_context_with_kv_cache`.
    bmm1_scale, bmm2_scale, window_left, workspace_buffer, out, lse
        As in `trtllm_batch_decode_with_kv_cache`, and so are all dtypes.
    attention_sinks
        As sinks there.
    skip_softmax_threshold_scale_factor
        As in `single_prefill_with_kv_cache`.
    is_causal
        Row i of n sees keys up to i + seq_len - n, else all of its request.
    sage_attn_sfs
        Must be four times None.
    return_lse
        Return the LSE too.
    o_sf_scale
        Accepted for compatibility: it belongs to 4-bit outputs.
    q_seq_lens_cpu, kv_seq_lens_cpu
        Accepted for compatibility: the lengths are those on the device.
    enable_pdl, num_elts_per_sage_attn_blk, backend
        Accepted for compatibility.
    use_fp16_softmax, uses_spcompress
        Accepted for compatibility.

    Returns
    -------
    out
        [rows, num_qo_heads, head_dim_vo], or (out, lse [rows, num_qo_heads], base 2) if
        `return_lse`.

    Raises
    ------
    CupyAttnError
        Errors as in `trtllm_batch_decode_with_kv_cache`.

    Notes
    -----
    Semantics: FlashInfer's function of the same name, which does not run on Hopper and takes three
    pairs of head dims.

    Examples
    --------
    >>> import numpy as np
    >>> import cupyattn
    >>> q, k = np.ones((20, 8, 192), np.float16), np.ones((20, 8, 192), np.float16)
    >>> v = np.ones((20, 8, 128), np.float16)
    >>> lengths, offsets = np.array([4, 16], np.int32), np.array([0, 4, 20], np.int32)
    >>> cupyattn.trtllm_ragged_attention_deepseek(
    ...     q, k, v, None, lengths, max_q_len=16, max_kv_len=16, bmm1_scale=192**-0.5,
    ...     bmm2_scale=1.0, o_sf_scale=1.0, batch_size=2, window_left=-1, cum_seq_lens_q=offsets,
    ...     cum_seq_lens_kv=offsets, enable_pdl=False, is_causal=True, return_lse=False,
    ... ).shape
    (20, 8, 128)
    """
    if not isinstance(sage_attn_sfs, (tuple, list)) or any(x is not None for x in sage_attn_sfs):
        raise UnsupportedError("sage_attn_sfs: scale factors by block are not supported; pass None")
    if getattr(value, "dtype", None) != getattr(key, "dtype", None):
        value = _like_keys(key, value)
    sm_scale, scale_q, output_scale, scale_v = numbers_and_arrays(bmm1_scale, bmm2_scale)
    arrays = make_arrays(
        q=query,
        k=key,
        v=value,
        workspace=workspace_buffer,
        kv_lens=seq_lens,
        out=out,
        lse=lse,
        qo_offsets=cum_seq_lens_q,
        kv_offsets=cum_seq_lens_kv,
        sinks=attention_sinks,
        scale_q=scale_q,
        scale_v=scale_v,
    )
    options = _Rows(
        names=_ROWS,
        sm_scale=sm_scale,
        output_scale=output_scale,
        batch_size=confirmed_count(batch_size, seq_lens),
        max_q_len=_max_rows(max_q_len),
        max_kv_len=next_power_of_two(max_kv_len),
        window_left=window_left,
        return_lse=return_lse,
        causal=is_causal,
        skip_softmax=skip_softmax_threshold_scale_factor,
    )
    return run(arrays, options)


@untraced
def trtllm_fmha_v2_prefill(
    qkv: Array | tuple[Array, ...] | list[Array],
    input_layout: str,
    workspace_buffer: Any,
    seq_lens: Array,
    max_q_len: int,
    max_kv_len: int,
    bmm1_scale: Scale,
    bmm2_scale: Scale,
    batch_size: int,
    cum_seq_lens_q: Array,
    cum_seq_lens_kv: Array,
    block_tables: Array | None = None,
    out: Array | None = None,
    out_dtype: Any = None,
    sinks: Array | None = None,
    pos_encoding_mode: str | None = None,
    logits_soft_cap_scale: float | None = None,
    mask_mode: str = "causal",
    window_left: int = -1,
    chunked_attention_size: int = 0,
    save_softmax_stats: bool = False,
    skip_softmax_threshold_scale_factor: float = 0,
    *,
    lse: Array | None = None,
    return_lse: bool = False,
) -> Any:
    """`trtllm_ragged_attention_deepseek`, or with pages `trtllm_batch_context_with_kv_cache`, whose
    q, k and v come in one of several layouts.

    Parameters
    ----------
    input_layout
        Says what qkv is: "PACKED_QKV" one array [rows, 3, num_heads, head_dim]; "CONTIGUOUS_Q_KV"
        (Q, KV), KV [n, 2, num_kv_heads, head_dim]; "SEPARATE_Q_K_V" (Q, K, V); "Q_PAGED_KV_NHD" and
        "Q_PAGED_KV_HND" (Q, pages), pages as kv_cache there, found through block_tables [B,
        max_pages], which the others do not take. With pages (K, V) block_tables may be [B, 2,
        max_pages], K's and V's of each request. Those of V count from K's first page too, so V lies
        whole pages behind K in one allocation.
    mask_mode
        "causal", "sliding_window" (the same: window_left always holds), or "padding": rows see all
        keys of their request. "chunked": a row sees those of its own chunk up to itself; chunks are
        chunked_attention_size keys from the first key of a request on.
    max_q_len
        Under "chunked" no request may have more rows.
    pos_encoding_mode
        None or "alibi", which is always causal.
    logits_soft_cap_scale
        c > 0: logits become c * tanh(logits / c); None or 0: off.
    save_softmax_stats
        Return (out, stats [rows, num_qo_heads, 2]): m and s of each row, where m + ln(s) is the
        LSE, natural log. (m is no row's maximum: the LSE itself, with s = 1, and under a soft cap
        0).
    skip_softmax_threshold_scale_factor
        As in `single_prefill_with_kv_cache`.
    other arguments
        As there, and so are results and errors.

    Notes
    -----
    Semantics: FlashInfer's function of the same name.

    Examples
    --------
    >>> import numpy as np
    >>> import cupyattn
    >>> qkv = np.ones((20, 3, 8, 64), np.float16)  # [tokens, q and k and v, heads, head dim]
    >>> lengths, offsets = np.array([4, 16], np.int32), np.array([0, 4, 20], np.int32)
    >>> cupyattn.trtllm_fmha_v2_prefill(
    ...     qkv, "PACKED_QKV", None, lengths, 16, 16, 64**-0.5, 1.0, 2, offsets, offsets
    ... ).shape
    (20, 8, 64)
    """
    parse.choice(input_layout, tuple(_LAYOUTS), "input_layout")
    has_stats = parse.flag(save_softmax_stats, "save_softmax_stats")
    if has_stats and parse.flag(return_lse, "return_lse"):
        raise ArgumentError("save_softmax_stats, return_lse: got both; wanted one of them")
    is_causal, chunk, encoding = _mask_of(
        mask_mode, chunked_attention_size, pos_encoding_mode, window_left
    )
    query, key, value = _split(qkv, input_layout, block_tables)
    has_own_pages = len(getattr(block_tables, "shape", ())) == 3
    if has_own_pages:
        key = value = _both_pages(key, value)
    count = confirmed_count(batch_size, seq_lens if block_tables is None else block_tables)
    sm_scale, scale_q, output_scale, scale_v = numbers_and_arrays(bmm1_scale, bmm2_scale)
    arrays = make_arrays(
        q=query,
        k=key,
        v=value,
        workspace=workspace_buffer,
        block_tables=block_tables,
        kv_lens=seq_lens,
        out=out,
        lse=lse,
        qo_offsets=cum_seq_lens_q,
        kv_offsets=cum_seq_lens_kv if block_tables is None else None,
        sinks=sinks,
        scale_q=scale_q,
        scale_v=scale_v,
    )
    options = _Rows(
        names=_QKV,
        sm_scale=sm_scale,
        output_scale=output_scale,
        kv_layout=input_layout[-3:],
        batch_size=count,
        max_q_len=_max_rows(max_q_len),
        max_kv_len=next_power_of_two(max_kv_len),
        window_left=window_left,
        o_dtype=out_dtype,
        return_lse=True if has_stats else return_lse,
        causal=is_causal,
        pos_encoding_mode=encoding,
        logits_soft_cap=logits_soft_cap_scale,
        skip_softmax=skip_softmax_threshold_scale_factor,
        shares_pages=not has_own_pages,
        attention_chunk=chunk,
    )
    if chunk and array.view(query, _QKV.q).device.kind == "cuda":
        arrays, options = _by_chunks(arrays, options, max_q_len)
    result = run(arrays, options)
    return (result[0], _softmax_stats(result[1], logits_soft_cap_scale)) if has_stats else result


def _mask_of(
    mask_mode: Any, chunked_attention_size: Any, pos_encoding_mode: Any, window_left: Any
) -> tuple[bool, int, str]:
    """(whether rows are causal, keys of a chunk or 0, the encoding) of trtllm_fmha_v2_prefill."""
    modes = "causal", "sliding_window", "padding", "chunked"
    mode = parse.choice(_lower(mask_mode), modes, "mask_mode")
    chunk = require_int(chunked_attention_size, "chunked_attention_size", 0)
    if (mode == "chunked") != (chunk > 0):
        raise ArgumentError(
            f"chunked_attention_size: got {chunk} with mask_mode={mode!r}; wanted the keys of a "
            "chunk with 'chunked', else 0"
        )
    has_alibi = pos_encoding_mode is not None
    if has_alibi:
        parse.choice(_lower(pos_encoding_mode), ("alibi",), "pos_encoding_mode")
    is_causal = has_alibi or mode != "padding"
    if not is_causal and parse.window(window_left, "window_left") != -1:
        raise ArgumentError(f"window_left: got {window_left!r} with mask_mode='padding'; wanted -1")
    return is_causal, chunk, "ALIBI" if has_alibi else "NONE"


def _both_pages(key: Any, value: Any) -> Any:
    """One array of K's pages, what lies behind them, and V's pages."""
    if value is None:
        raise ArgumentError(
            "block_tables: has a table each for K and V; wanted one for both, [B, max_pages], or "
            "pages (K, V)"
        )
    vk, vv = array.view(key, _QKV.k), array.view(value, _QKV.v)
    page = vk.strides[0] * vk.dtype.itemsize if len(vk.shape) == 4 else 0
    is_alike = (vk.shape, vk.strides, vk.dtype) == (vv.shape, vv.strides, vv.dtype)
    if page <= 0 or not is_alike or vv.ptr < vk.ptr or (vv.ptr - vk.ptr) % page:
        raise ArgumentError(
            f"{_QKV.v}: {list(vv.shape)} begins {vv.ptr - vk.ptr} bytes behind {_QKV.k}; with "
            "block_tables [B, 2, max_pages] wanted pages like K's, some whole pages behind them in "
            "one allocation"
        )
    count = (vv.ptr - vk.ptr) // page + vv.shape[0]
    return array.restride(key, _QKV.k, (count, *vk.shape[1:]), tuple(vk.strides))


def _softmax_stats(lse: Any, soft_cap: Any) -> Any:
    """[..., 2] from an LSE in base 2, see trtllm_fmha_v2_prefill. FlashInfer's maximum has another
    unit under a soft cap; of 0 the unit does not matter, and sums are bounded there."""
    v = array.view(lse, "lse")
    pairs = array.empty((*v.shape, 2), dtypes.float32, v)

    def fill(stats: Any, x: Any) -> Any:
        stats[..., 0] = 0.0 if soft_cap else x * math.log(2.0)
        stats[..., 1] = 2.0**x if soft_cap else 1.0
        return stats

    compute(fill, array.view(pairs, "stats"), v)
    return array.deliver(pairs, v)


def _like_keys(key: Any, value: Any) -> Any:
    """fp8 values in the dtype of keys of 16 bits; others as they are."""
    v, wide = array.view(value, "value"), array.view(key, "key").dtype
    if not v.dtype.is_fp8 or wide not in (dtypes.float16, dtypes.bfloat16):
        return value
    return widened(v, wide, "value")


def _lower(word: Any) -> Any:
    return word.lower() if isinstance(word, str) else word


def _max_rows(max_q_len: Any) -> Any:
    """The most rows of a request, as far as it matters: beyond some one kernel serves all."""
    return min(max_q_len, _MANY_ROWS) if type(max_q_len) is int else max_q_len


def _split(qkv: Any, layout: str, block_tables: Any) -> tuple[Any, Any, Any]:
    """q, k and v; for pages in one array v is None."""
    is_paged = "PAGED" in layout
    if (block_tables is not None) != is_paged:
        wanted = "the pages of each request, [B, n]" if is_paged else "None"
        raise ArgumentError(f"block_tables: wanted {wanted}, with input_layout={layout!r}")
    if layout == "PACKED_QKV":
        return tuple(_part(qkv, "qkv", 3, i) for i in range(3))  # type: ignore[return-value]
    count = 3 if layout == "SEPARATE_Q_K_V" else 2
    if not isinstance(qkv, (tuple, list)) or len(qkv) != count:
        raise ArgumentError(f"qkv: with input_layout={layout!r} wanted {_LAYOUTS[layout]}")
    if layout == "CONTIGUOUS_Q_KV":
        return qkv[0], _part(qkv[1], "qkv[1]", 2, 0), _part(qkv[1], "qkv[1]", 2, 1)
    if not is_paged:
        return tuple(qkv)  # type: ignore[return-value]
    pages = qkv[1]
    if isinstance(pages, (tuple, list)):
        if len(pages) != 2:
            raise ArgumentError(f"qkv[1]: got {len(pages)} arrays; wanted two, (K, V)")
        return qkv[0], pages[0], pages[1]
    return qkv[0], pages, None


def _part(x: Any, name: str, count: int, index: int) -> Any:
    """One of `count` arrays that lie along the second of four axes."""
    shape = tuple(array.view(x, name).shape)
    if len(shape) != 4 or shape[1] != count:
        raise ArgumentError(
            f"{name}: shape is {list(shape)}; wanted [rows, {count}, num_heads, head_dim]"
        )
    return x[:, index]


def _pair(kv_cache: Any) -> Any:
    """Pages of keys and of values."""
    if len(kv_cache) != 2:
        raise ArgumentError(f"kv_cache: got {len(kv_cache)} arrays; wanted two, (K, V)")
    return kv_cache


def _by_chunks(arrays: Arrays, options: _Rows, max_q_len: Any) -> tuple[Arrays, _Rows]:
    """The same call with each chunk that a request's rows lie in as a request of its own."""
    chunk, whole = options.attention_chunk, options._replace(attention_chunk=0)
    call = check(arrays, whole.resolve(arrays))  # before anything is computed
    kv_lens, qo_offsets, kv_offsets = (
        x.reshape(-1) if len(getattr(x, "shape", (0,))) > 1 else x
        for x in (arrays.kv_lens, arrays.qo_offsets, arrays.kv_offsets)
    )
    in_rows = arrays._replace(kv_lens=kv_lens, qo_offsets=qo_offsets, kv_offsets=kv_offsets)
    max_rows = require_int(max_q_len, _QKV.max_q_len)
    page_size = call.geometry.spec.page_size
    split = split_by_chunks(in_rows, _QKV, call.q, chunk, max_rows, page_size=page_size)
    made_options = whole._replace(
        batch_size=CONFIRMED,
        max_q_len=_max_rows(split.max_q_len),
        max_kv_len=next_power_of_two(min(chunk, call.lengths.likely_kv_len)),
        has_table_offsets=arrays.block_tables is not None,
    )
    return split.arrays, made_options


class _Rows(NamedTuple):
    """Options of a call with offsets of q, and of keys where they are rows.

    names  None: those of pages
    """

    names: Names | None
    sm_scale: Any
    output_scale: Any
    batch_size: Any
    max_q_len: Any
    max_kv_len: Any
    window_left: Any
    return_lse: Any
    causal: Any
    skip_softmax: Any
    kv_layout: str = "NHD"
    o_dtype: Any = None
    pos_encoding_mode: Any = "NONE"
    logits_soft_cap: Any = None
    shares_pages: bool = True
    attention_chunk: int = 0
    has_table_offsets: bool = False
    o_sf_scale: Any = None
    o_sf_vec_size: Any = None
    kv_cache_sf: Any = None

    def resolve(self, arrays: Arrays) -> Options:
        geometry.refuse(
            "is not supported",
            o_sf_scale=self.o_sf_scale,
            o_sf_vec_size=self.o_sf_vec_size,
            kv_cache_sf=self.kv_cache_sf,
        )
        names, have = self.names, "the arrays have {} requests"
        if names is None:
            names = _names_of(arrays).but(max_kv_len="max_kv_len")
            have = "block_tables has {} rows, wanted as many"
        per_request = arrays.kv_lens if arrays.block_tables is None else arrays.block_tables
        _check_count(self.batch_size, per_request, have)
        kv_layout = "NHD" if arrays.block_tables is None else self.kv_layout
        return options_of(self, names=names, kv_layout=kv_layout, q_len=0)


def _check_count(batch_size: Any, per_request: Any, have: str) -> None:
    """ArgumentError unless batch_size is the number of requests. have: what the array says."""
    count = None if batch_size is CONFIRMED else require_int(batch_size, "batch_size", 0)
    shape = getattr(per_request, "shape", ())
    if isinstance(shape, tuple) and shape and count not in (None, shape[0]):
        raise ArgumentError(f"batch_size: got {count}; {have.format(shape[0])}")


class _Decode(NamedTuple):
    """Options of decode over pages. Whether rows are causal follows from how many there are."""

    sm_scale: Any
    output_scale: Any
    kv_layout: Any
    q_len: Any
    max_kv_len: Any
    window_left: Any
    return_lse: Any
    o_scale: Any
    max_q_len: Any = None
    o_dtype: Any = None
    backend: Any = "auto"
    shares_pages: Any = True
    skip_softmax: Any = None
    o_sf_scale: Any = None
    o_sf_vec_size: Any = None
    kv_cache_sf: Any = None
    enable_block_sparse_attention: Any = False
    has_log2_scale: bool = False
    key_share: KeyShare | None = None

    def resolve(self, arrays: Arrays) -> Options:
        parse.choice(self.backend, _BACKENDS, "backend")
        geometry.refuse(
            "is not supported",
            o_sf_scale=self.o_sf_scale,
            o_sf_vec_size=self.o_sf_vec_size,
            kv_cache_sf=self.kv_cache_sf,
            enable_block_sparse_attention=self.enable_block_sparse_attention,
        )
        parse.finite(self.o_scale, "o_scale", 1.0)
        names, sm_scale = _names_of(arrays), self.sm_scale
        if self.key_share is not None:
            names = names.but(kv_begin="causal_seqlens_kv_global")
        if self.has_log2_scale:
            names = names.but(sm_scale=_LOG2_SCALE)
            sm_scale = math.log(2.0) * parse.finite(sm_scale, _LOG2_SCALE, 1.0)
        q_len = require_int(1 if self.q_len is None else self.q_len, "q_len_per_req")
        max_q_len, causal = self.max_q_len, q_len != 1
        if arrays.qo_offsets is not None:
            # As the most of one, where it says more than the default.
            max_q_len = q_len if max_q_len is None and q_len > 1 else max_q_len
            q_len, causal = 0, True
        return options_of(
            self,
            names=names,
            q_len=q_len,
            max_q_len=max_q_len,
            sm_scale=sm_scale,
            causal=causal,
            counts_rows=False,
        )


_make_decode = maker(_Decode)


def _names_of(arrays: Arrays) -> Names:
    return _ONE if arrays.v is None else _PAIR
