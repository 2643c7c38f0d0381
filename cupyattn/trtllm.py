"""TensorRT-LLM's calls: decode and context attention over page tables that stay on the device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .errors import ArgumentError, UnsupportedError
from .inputs import geometry, parse
from .planless.call import run
from .planless.check import Options, whole
from .planless.repeat import repeat
from .planless.scales import number_or_array
from .planless.views import Names, bucket

__all__ = [
    "trtllm_batch_context_with_kv_cache",
    "trtllm_batch_decode_with_kv_cache",
    "xqa_batch_decode_with_kv_cache",
]

_BACKENDS = "auto", "xqa", "trtllm-gen"
_MANY_ROWS = 65
_ONE = Names("query", "kv_cache", "kv_cache[:, 1]")
_PAIR = Names("query", "kv_cache[0]", "kv_cache[1]")


def trtllm_batch_decode_with_kv_cache(
    query: Any,
    kv_cache: Any,
    workspace_buffer: Any,
    block_tables: Any,
    seq_lens: Any,
    max_seq_len: int,
    bmm1_scale: Any = 1.0,
    bmm2_scale: Any = 1.0,
    window_left: int = -1,
    out: Any = None,
    out_dtype: Any = None,
    o_sf_scale: Any = None,
    o_sf_vec_size: int | None = None,
    sinks: Any = None,
    kv_layout: str = "HND",
    enable_pdl: bool | None = None,
    backend: str = "auto",
    q_len_per_req: int | None = 1,
    o_scale: float | None = 1.0,
    mask: Any = None,
    max_q_len: int | None = None,
    cum_seq_lens_q: Any = None,
    skip_softmax_threshold_scale_factor: float | None = None,
    kv_cache_sf: Any = None,
    uses_shared_paged_kv_idx: bool = True,
    lse: Any = None,
    return_lse: bool = False,
    bmm1_scale_log2: Any = None,
    multi_ctas_kv_counter_buffer: Any = None,
    enable_block_sparse_attention: bool = False,
    bf16q_fp8kv_transform_mode: Any = None,
) -> Any:
    """Attention of a batch's last tokens over paged keys; page table and lengths stay where they
    are, on the device, so that a CUDA graph may capture the call and follow their changes.

    query   [B * q_len_per_req, num_qo_heads, head_dim], float16 or bfloat16 (on the CPU float32
            too): request after request, the last tokens of each, causal among themselves. With
            cum_seq_lens_q any number of rows of each.
    kv_cache   [num_pages, 2, num_kv_heads, page_size, head_dim] ("HND") or [num_pages, 2,
            page_size, num_kv_heads, head_dim] ("NHD"); with an axis of 1 in place of the 2 keys
            are values too; or a pair (K, V) without that axis. dtype of query, float8_e4m3fn or
            float8_e5m2. Any page size; head dims any multiple of 8 up to 256.
    workspace_buffer   bytes on a 16-byte boundary, whatever they hold: work list and partial
            states; 128 MB are enough for any batch that fits a GPU, and too few are an error that
            names the need. Calls that overlap in time need one each. None: memory for this call.
    block_tables   int32 [B, max_pages], pages of each request in the order of its keys; entries
            past its last page may hold anything.
    seq_lens   int32, uint32 or int64 [B], keys of each request, the new tokens among them; 0: its
            rows give 0 and -inf. Lengths beyond the table are cut to it.
    max_seq_len   the most of seq_lens, as far as is known: it bounds how finely keys are split,
            never the answer.
    bmm1_scale   the whole scale of the logits (k_scale / sqrt(head_dim), say); bmm2_scale that of
            the output (v_scale). Numbers, or float32 arrays of one element: on a GPU they are read
            there, without waiting.
    window_left   keys to the left of a row's own that it sees; -1: all.
    out, lse   arrays to write instead of new ones; lse float32 [rows, num_qo_heads], base 2.
    out_dtype  float16, bfloat16 or float32; default that of `out`, or of query.
    sinks   float32 [num_qo_heads]: extra natural-log logits in the denominator.
    q_len_per_req   rows of each request. cum_seq_lens_q: [B + 1], the first row of each and their
            number, in its place; max_q_len is then the most rows of one.
    o_scale, enable_pdl, backend, multi_ctas_kv_counter_buffer, bf16q_fp8kv_transform_mode
            accepted for compatibility; they change nothing here.
    mask    over the query tokens of each request, in place of causality: bools [B, q_len_per_req,
            q_len_per_req], or their bits, lowest first, in words of any size with an axis of words
            behind (uint16 [B, q, 2 * ceil(q / 32)], say). Earlier keys are visible.
    o_sf_scale, o_sf_vec_size, skip_softmax_threshold_scale_factor, kv_cache_sf, bmm1_scale_log2
            must be None; enable_block_sparse_attention False, uses_shared_paged_kv_idx True.

    Returns out [rows, num_qo_heads, head_dim] in query's framework and device, or (out, lse) if
    `return_lse`. Nothing is copied to the host and nothing waits. Rows of no request are not
    written. Raises ArgumentError for arguments that do not fit each other, UnsupportedError for
    what has no kernel, WorkspaceError, all before anything is written. The values of tables on a
    GPU are not known to the host: CUPYATTN_DEBUG=1 reads and checks them; on the CPU they always
    are. Semantics: FlashInfer's function of the same name, which on Hopper has no LSE, no
    cum_seq_lens_q, and pages of 16 to 128 only.
    """
    refused = (
        o_sf_scale, o_sf_vec_size, skip_softmax_threshold_scale_factor, kv_cache_sf,
        bmm1_scale_log2, enable_block_sparse_attention, uses_shared_paged_kv_idx,
    )  # fmt: skip
    rest = (
        kv_layout, q_len_per_req, max_q_len, bucket(max_seq_len), window_left, out_dtype,
        return_lse, o_scale, backend, refused,
    )  # fmt: skip
    return _attend(
        query,
        kv_cache,
        workspace_buffer,
        block_tables,
        seq_lens,
        out,
        lse,
        cum_seq_lens_q,
        sinks,
        mask,
        bmm1_scale,
        bmm2_scale,
        _options_of_decode,
        rest,
    )


def xqa_batch_decode_with_kv_cache(
    query: Any,
    kv_cache: Any,
    workspace_buffer: Any,
    block_tables: Any,
    seq_lens: Any,
    max_seq_len: int,
    bmm1_scale: Any = 1.0,
    bmm2_scale: Any = 1.0,
    window_left: int = -1,
    out: Any = None,
    sinks: Any = None,
    kv_layout: str = "NHD",
    enable_pdl: bool | None = None,
    q_len_per_req: int | None = 1,
    o_scale: float | None = 1.0,
    mask: Any = None,
    kv_cache_sf: Any = None,
    q_cu_seq_lens: Any = None,
    *,
    lse: Any = None,
    return_lse: bool = False,
) -> Any:
    """`trtllm_batch_decode_with_kv_cache` with its arguments in another order, and NHD by default.

    q_cu_seq_lens is that function's cum_seq_lens_q. Nothing in workspace_buffer needs to be zero.
    Semantics: FlashInfer's function of the same name, which has no LSE.
    """
    refused = None, None, None, kv_cache_sf, None, False, True
    rest = (
        *(kv_layout, q_len_per_req, None, bucket(max_seq_len), window_left, None),
        *(return_lse, o_scale, "auto", refused),
    )
    return _attend(
        query,
        kv_cache,
        workspace_buffer,
        block_tables,
        seq_lens,
        out,
        lse,
        q_cu_seq_lens,
        sinks,
        mask,
        bmm1_scale,
        bmm2_scale,
        _options_of_decode,
        rest,
    )


def trtllm_batch_context_with_kv_cache(
    query: Any,
    kv_cache: Any,
    workspace_buffer: Any,
    block_tables: Any,
    seq_lens: Any,
    max_q_len: int,
    max_kv_len: int,
    bmm1_scale: Any,
    bmm2_scale: Any,
    batch_size: int,
    cum_seq_lens_q: Any,
    cum_seq_lens_kv: Any,
    window_left: int = -1,
    out: Any = None,
    out_dtype: Any = None,
    o_sf_scale: Any = None,
    o_sf_vec_size: int | None = None,
    kv_layout: str = "HND",
    enable_pdl: bool | None = None,
    sinks: Any = None,
    kv_cache_sf: Any = None,
    skip_softmax_threshold_scale_factor: float | None = None,
    uses_shared_paged_kv_idx: bool = True,
    causal: bool = True,
    lse: Any = None,
    return_lse: bool = False,
) -> Any:
    """Attention of a batch's new tokens over paged keys; page table, lengths and offsets stay on
    the device, so that a CUDA graph may capture the call and follow their changes.

    query   [rows, num_qo_heads, head_dim], request after request, the last tokens of each.
    cum_seq_lens_q   int32, uint32 or int64 [B + 1]: the first row of each, and their number.
    max_q_len   the most rows of one request, as far as is known: it chooses the kernel.
    max_kv_len  the most of seq_lens, likewise; batch_size must be B.
    cum_seq_lens_kv   accepted for compatibility: seq_lens says the same.
    causal  row i of n sees keys up to i + seq_len - n, else all of its request.
    All other arguments as in `trtllm_batch_decode_with_kv_cache`.

    Returns out [rows, num_qo_heads, head_dim], or (out, lse [rows, num_qo_heads], base 2) if
    `return_lse`. Errors likewise. Semantics: FlashInfer's function of the same name, which does not
    run on Hopper, nor with a window where it is not causal: here a row's window ends at its own
    position plus what follows.
    """
    refused = (
        *(o_sf_scale, o_sf_vec_size, skip_softmax_threshold_scale_factor, kv_cache_sf),
        *(None, False, uses_shared_paged_kv_idx),
    )
    if type(max_q_len) is int and max_q_len > _MANY_ROWS:
        max_q_len = _MANY_ROWS  # beyond that one kernel serves all
    rest = (
        *(kv_layout, max_q_len, bucket(max_kv_len), window_left, out_dtype, return_lse),
        *(causal, batch_size, refused),
    )
    return _attend(
        query,
        kv_cache,
        workspace_buffer,
        block_tables,
        seq_lens,
        out,
        lse,
        cum_seq_lens_q,
        sinks,
        None,
        bmm1_scale,
        bmm2_scale,
        _options_of_context,
        rest,
    )


def _attend(
    query: Any,
    kv_cache: Any,
    workspace: Any,
    block_tables: Any,
    seq_lens: Any,
    out: Any,
    lse: Any,
    offsets: Any,
    sinks: Any,
    mask: Any,
    bmm1_scale: Any,
    bmm2_scale: Any,
    options_of: Callable[..., Options],
    rest: tuple[Any, ...],
) -> Any:
    """options_of makes Options of `rest`, all other arguments, and the scales."""
    k, v = kv_cache, None
    if isinstance(kv_cache, (tuple, list)) and len(kv_cache) == 2:
        k, v = kv_cache
    sm_scale, scale_q = number_or_array(bmm1_scale)
    output_scale, scale_v = number_or_array(bmm2_scale)
    usual = query, k, v, workspace, block_tables, seq_lens, out, lse
    more = None
    if not (offsets is sinks is scale_q is scale_v is mask is None):
        more = None, offsets, None, None, None, sinks, scale_q, None, scale_v, mask
    given = options_of, rest, sm_scale, output_scale
    answer = repeat(usual, more, given)
    if answer is not None:
        return answer
    if v is None and isinstance(kv_cache, (tuple, list)):
        raise ArgumentError(f"kv_cache: got {len(kv_cache)} arrays; wanted two, (K, V)")
    options = options_of(usual, offsets is not None, *rest, sm_scale, output_scale)
    return run(usual, more, given, options)


def _options_of_decode(
    usual: tuple[Any, ...],
    has_offsets: bool,
    kv_layout: Any,
    q_len: Any,
    max_q_len: Any,
    max_kv_len: Any,
    window_left: Any,
    o_dtype: Any,
    return_lse: Any,
    o_scale: Any,
    backend: Any,
    refused: tuple[Any, ...],
    sm_scale: Any,
    output_scale: Any,
) -> Options:
    parse.choice(backend, _BACKENDS, "backend")
    _refuse(refused)
    parse.finite(o_scale, "o_scale", 1.0)
    if has_offsets:
        q_len = 0
    elif q_len is None:
        q_len = 1
    else:
        q_len = whole(q_len, "q_len_per_req")
    return Options(
        _ONE if usual[2] is None else _PAIR,
        kv_layout,
        q_len=q_len,
        max_q_len=max_q_len,
        max_kv_len=max_kv_len,
        sm_scale=sm_scale,
        output_scale=output_scale,
        window_left=window_left,
        causal=q_len != 1,
        o_dtype=o_dtype,
        return_lse=return_lse,
    )


def _options_of_context(
    usual: tuple[Any, ...],
    has_offsets: bool,
    kv_layout: Any,
    max_q_len: Any,
    max_kv_len: Any,
    window_left: Any,
    o_dtype: Any,
    return_lse: Any,
    causal: Any,
    batch_size: Any,
    refused: tuple[Any, ...],
    sm_scale: Any,
    output_scale: Any,
) -> Options:
    _refuse(refused)
    shape = getattr(usual[4], "shape", None)
    if shape and len(shape) == 2 and batch_size != shape[0]:
        raise ArgumentError(
            f"batch_size: got {batch_size!r}; block_tables has {shape[0]} rows, wanted as many"
        )
    return Options(
        (_ONE if usual[2] is None else _PAIR)._replace(max_kv_len="max_kv_len"),
        kv_layout,
        q_len=0,
        max_q_len=max_q_len,
        max_kv_len=max_kv_len,
        sm_scale=sm_scale,
        output_scale=output_scale,
        window_left=window_left,
        causal=causal,
        o_dtype=o_dtype,
        return_lse=return_lse,
    )


def _refuse(given: tuple[Any, ...]) -> None:
    """UnsupportedError for what there is no kernel for."""
    names = (
        *("o_sf_scale", "o_sf_vec_size", "skip_softmax_threshold_scale_factor", "kv_cache_sf"),
        *("bmm1_scale_log2", "enable_block_sparse_attention"),
    )
    *others, is_shared = given
    geometry.refuse("is not supported", **dict(zip(names, others, strict=True)))
    if is_shared is not True:
        raise UnsupportedError(
            "uses_shared_paged_kv_idx: K and V share the ids of their pages; pass True"
        )
