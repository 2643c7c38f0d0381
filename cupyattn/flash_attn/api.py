"""flash_attn's attention functions in FlashAttention-2's order of arguments; by name they take what
FlashAttention-3, SGLang and vLLM add."""

from __future__ import annotations

import inspect
from typing import Any

from .. import array
from ..core import dtypes, overloads
from ..core.tracing import exported, is_exporting, untraced
from ..engine.arrays import NO_MORE, Arrays, MoreArrays, make_arrays
from ..engine.key_share import WHOLE_LENGTHS, read_share
from ..engine.run_planless import run_cached
from ..errors import ArgumentError
from . import forward
from .batch import MANY_ROWS, FlashOptions, make_options
from .forward import (
    BLOCKS,
    CACHE,
    DENSE,
    VARLEN,
    VARLEN_BY_OFFSETS,
    asks,
    bounds,
    either,
    is_fp8,
    max_rows,
    refuse_dropout,
    window_of,
)

# The arguments of flash_attn_varlen_func that must be None, and what messages call one of them.
_NOT_SERVED = (
    "q_v",
    "output_scale",
    "score_mod",
    "mask_mod",
    "block_sparse_tensors",
    "aux_tensors",
    "aux_tensor_leading_dims",
)
_OTHER_NAMES = {"q_v": "qv"}


@untraced
@overloads.flash_attn_func
def flash_attn_func(
    q: Any,
    k: Any,
    v: Any,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Any = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Any = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    *,
    qv: Any = None,
    q_descale: Any = None,
    k_descale: Any = None,
    v_descale: Any = None,
    attention_chunk: int = 0,
    num_splits: int = 0,
    pack_gqa: bool | None = None,
    sm_margin: int = 0,
    return_softmax_lse: bool = False,
    out: Any = None,
    sinks: Any = None,
    s_aux: Any = None,
    output_gate: Any = None,
) -> Any:
    """Attention of requests of one length.

    Parameters
    ----------
    q
        [b, seqlen_q, num_heads, head_dim], float16 or bfloat16 (on the CPU float32 too); also
        float8_e4m3fn and float8_e5m2, computed in 16 bits, with an output in bfloat16. On a GPU fp8
        keys and values in rows that many queries read are first copied in q's 16 bits.
    k, v
        [b, seqlen_k, num_heads_k, head_dim], v's head_dim may differ; q's dtype, or fp8. Any
        strides but a contiguous last dimension. Head dims up to 256: those that are no multiple of
        8 are copied into arrays with columns of zeros, as FlashAttention does.
    dropout_p
        Must be 0.
    softmax_scale
        Of the logits, not 0; default 1 / sqrt(head_dim).
    causal
        Row i sees keys up to i + seqlen_k - seqlen_q.
    window_size
        (left, right): keys beside that one that a row sees, both ends included; -1 or None: all. An
        array of two numbers too, on the CPU.
    softcap
        c > 0: logits become c * tanh(logit / c); 0: off.
    alibi_slopes
        float32 [num_heads] or [b, num_heads]: slope * abs(i + seqlen_k - seqlen_q - j) is taken
        from the logits, behind the soft cap.
    return_attn_probs
        Return three values, as FlashAttention-2 does.
    return_softmax_lse
        Return the LSE too.
    attention_chunk
        Keys of a chunk: a row sees the chunk that it lies in; 0: all keys.
    q_descale, k_descale, v_descale
        What fp8 values are multiplied by; no effect on other dtypes. float32: one number,
        [num_heads_k], or [b, num_heads_k].
    sinks, s_aux
        Two names of [num_heads] logits of keys without values, natural and unscaled, of any float
        dtype.
    output_gate
        [b, seqlen_q, num_heads] or [b, seqlen_q, num_heads, head_dim of v], without b for rows of
        all requests, in q's dtype or float32: the output is multiplied by its sigmoid before it is
        rounded.
    out
        Array to write instead of a new one.
    num_splits
        1: keys are not split; any other number lets the plan on the GPU decide.
    deterministic, pack_gqa, sm_margin
        Accepted; outputs are the same each time.
    qv
        [b, seqlen_q, num_heads, head_dim of v]: queries that are multiplied with v; the logits are
        the sums of both products, and softmax_scale is 1 / sqrt(the sum of both head dims) by
        default. q, k, v and qv are copied side by side first.

    Returns
    -------
    out
        [b, seqlen_q, num_heads, head_dim of v]; with return_softmax_lse (out, lse): lse float32 [b,
        num_heads, seqlen_q], natural logarithms; with return_attn_probs (out, lse, an empty array,
        for there is no dropout whose mask it would be). A row that sees no key gives 0 and -inf.
        Nothing is copied to the host and nothing waits, so a CUDA graph may capture the call.

    Raises
    ------
    CupyAttnError
        ArgumentError for arguments that do not fit each other, UnsupportedError for what is not
        served, and nothing is written then.

    Notes
    -----
    Semantics: flash_attn's function of the same name, without a backward pass;
    `cupyattn.flash_attn_interface` has it in FlashAttention-3's order.

    Examples
    --------
    >>> import numpy as np
    >>> from cupyattn import flash_attn
    >>> q = np.ones((2, 5, 8, 64), np.float16)  # [requests, tokens, heads, head dim]
    >>> k = v = np.ones((2, 9, 2, 64), np.float16)
    >>> flash_attn.flash_attn_func(q, k, v, causal=True).shape
    (2, 5, 8, 64)
    """
    if type(dropout_p) is not float or dropout_p != 0.0:
        refuse_dropout(dropout_p)
    return_lse = False
    if return_attn_probs is not False or return_softmax_lse is not False:
        return_lse = asks(return_attn_probs, return_softmax_lse)
    arrays = make_arrays(
        q=q,
        k=k,
        v=v,
        out=out,
        sinks=sinks if s_aux is None else either(sinks=sinks, s_aux=s_aux),
        scale_q=q_descale,
        scale_k=k_descale,
        scale_v=v_descale,
        alibi_slopes=alibi_slopes,
        output_gate=output_gate,
    )
    options = make_options(
        names=DENSE,
        softmax_scale=softmax_scale,
        causal=causal,
        window_size=window_size if type(window_size) is tuple else window_of(window_size),
        softcap=softcap,
        num_splits=num_splits,
        attention_chunk=attention_chunk,
        return_lse=return_lse,
    )
    result = run_cached(arrays, options) if qv is None else None
    if result is None:
        try:
            result = forward.dense(arrays, qv, options)
        except ArgumentError as error:
            return _exported(flash_attn_func, locals(), error)
    return with_no_mask(result, q) if return_attn_probs else result


@untraced
@overloads.flash_attn_varlen_func
def flash_attn_varlen_func(
    q: Any,
    k: Any,
    v: Any,
    cu_seqlens_q: Any,
    cu_seqlens_k: Any = None,
    max_seqlen_q: Any = None,
    max_seqlen_k: Any = None,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Any = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Any = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: Any = None,
    *,
    page_table: Any = None,
    seqused_q: Any = None,
    seqused_k: Any = None,
    qv: Any = None,
    q_descale: Any = None,
    k_descale: Any = None,
    v_descale: Any = None,
    attention_chunk: int = 0,
    num_splits: int = 0,
    pack_gqa: bool | None = None,
    sm_margin: int = 0,
    return_softmax_lse: bool = False,
    out: Any = None,
    sinks: Any = None,
    s_aux: Any = None,
    scheduler_metadata: Any = None,
    fa_version: int | None = None,
    ver: int | None = None,
    q_v: Any = None,
    output_scale: Any = None,
    score_mod: Any = None,
    mask_mod: Any = None,
    block_sparse_tensors: Any = None,
    aux_tensors: Any = None,
    aux_tensor_leading_dims: Any = None,
    dynamic_causal: Any = None,
    cp_world_size: int = 1,
    cp_rank: int = 0,
    cp_tot_seqused_k: Any = None,
    cp_kv_cache_interleave_size: int = 1,
    output_gate: Any = None,
) -> Any:
    """Attention of requests of any lengths, whose rows follow each other.

    Parameters
    ----------
    q
        [rows, num_heads, head_dim].
    k, v
        [n, num_heads_k, head_dim]; with a table pages [num_pages, page_size, num_heads_k,
        head_dim], of any size and strides.
    cu_seqlens_q, cu_seqlens_k
        int32 or int64 [b + 1]: the first row of each request and the end of the last, of q and of
        k. They may repeat their last value: such requests are empty. With a table, cu_seqlens_k
        only says lengths.
    max_seqlen_q, max_seqlen_k
        Upper bounds of one request: integers, or arrays of one element, which are not read where
        they are on a GPU. They affect speed only: the kernel and how keys are split; but under
        attention_chunk max_seqlen_q must not be too small.
    block_table, page_table
        Two names of int32 or int64 [b, max_pages]: the pages of each request; entries past its last
        page may hold anything.
    seqused_q, seqused_k
        [b]: how many of a request's rows count; default: all.
    scheduler_metadata, fa_version, ver
        Accepted for compatibility.
    dynamic_causal
        [b], bool or an integer, with causal=True: 0 for requests whose rows see all their keys.
    cp_world_size, cp_rank, cp_kv_cache_interleave_size
        The keys of every request are spread over this many ranks (GPUs); the rank of this call; the
        number of consecutive tokens that go to one rank before the next takes over. With
        block_table; seqused_k and the table are those of this rank's keys, see `cupyattn.shares`.
        States of all ranks, with their LSEs, merge into the answer (`merge_states`). Not with
        alibi_slopes and attention_chunk; `sinks` on rank 0 alone.
    cp_tot_seqused_k
        [b]: whole lengths, by which rows see keys. Only where causal or with a window; of one rank
        it decides nothing.
    q_v, output_scale, block_sparse_tensors
        Must be None.
    score_mod, mask_mod, aux_tensors, aux_tensor_leading_dims
        Must be None.
    other arguments
        All other arguments as in `flash_attn_func`.

    Returns
    -------
    out
        [rows, num_heads, head_dim of v], and as there an LSE, float32 [num_heads, rows], natural
        logarithms. Rows of no request hold anything, in a given `out` what they held.

    Raises
    ------
    CupyAttnError
        Errors as there.

    Notes
    -----
    Semantics: flash_attn's function of the same name.

    Examples
    --------
    >>> import numpy as np
    >>> from cupyattn import flash_attn
    >>> q, k = np.ones((20, 8, 64), np.float16), np.ones((20, 2, 64), np.float16)
    >>> offsets = np.array([0, 4, 20], np.int32)  # two prompts, of 4 and of 16 tokens
    >>> flash_attn.flash_attn_varlen_func(q, k, k, offsets, offsets, 16, 16, causal=True).shape
    (20, 8, 64)
    """
    if type(dropout_p) is not float or dropout_p != 0.0:
        refuse_dropout(dropout_p)
    if not (
        q_v is output_scale is score_mod is mask_mod is block_sparse_tensors is None
        and aux_tensors is aux_tensor_leading_dims is None
    ):
        _refuse_others(locals())
    return_lse = False
    if return_attn_probs is not False or return_softmax_lse is not False:
        return_lse = asks(return_attn_probs, return_softmax_lse)
    table = block_table
    if page_table is not None:
        table = either(block_table=block_table, page_table=page_table)
    has_kv_steps = seqused_k is None and table is not None
    arrays = make_arrays(
        q=q,
        k=k,
        v=v,
        block_tables=table,
        kv_lens=cu_seqlens_k if has_kv_steps else seqused_k,
        out=out,
        qo_lens=seqused_q,
        qo_offsets=cu_seqlens_q,
        kv_offsets=None if table is not None else cu_seqlens_k,
        sinks=sinks if s_aux is None else either(sinks=sinks, s_aux=s_aux),
        scale_q=q_descale,
        scale_k=k_descale,
        scale_v=v_descale,
        alibi_slopes=alibi_slopes,
        output_gate=output_gate,
    )
    more = None if qv is dynamic_causal is None else MoreArrays(qv=qv, are_causal=dynamic_causal)
    max_rows, max_keys = bounds(max_seqlen_q, max_seqlen_k)
    options = make_options(
        names=VARLEN_BY_OFFSETS if seqused_k is None else VARLEN,
        softmax_scale=softmax_scale,
        causal=causal,
        window_size=window_size if type(window_size) is tuple else window_of(window_size),
        softcap=softcap,
        num_splits=num_splits,
        attention_chunk=attention_chunk,
        return_lse=return_lse,
        max_q_len=max_rows,
        max_kv_len=max_keys,
        has_kv_steps=has_kv_steps,
    )
    if type(cp_world_size) is not int or cp_world_size != 1:
        arrays, options = _with_share(locals(), arrays, options)
    result = None
    # Keys of long prompts may be converted first, but for those of pages.
    if max_rows is None or max_rows < MANY_ROWS or table is not None or not is_fp8(k):
        result = run_cached(arrays, options, None, more)
    if result is None:
        try:
            result = forward.varlen(
                arrays, more or NO_MORE, options, cu_seqlens_k, max_seqlen_q, max_seqlen_k
            )
        except ArgumentError as error:
            return _exported(flash_attn_varlen_func, locals(), error)
    return with_no_mask(result, q) if return_attn_probs else result


@untraced
@overloads.flash_attn_with_kvcache
def flash_attn_with_kvcache(
    q: Any,
    k_cache: Any,
    v_cache: Any,
    k: Any = None,
    v: Any = None,
    rotary_cos: Any = None,
    rotary_sin: Any = None,
    cache_seqlens: Any = None,
    cache_batch_idx: Any = None,
    cache_leftpad: Any = None,
    block_table: Any = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Any = (-1, -1),
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    alibi_slopes: Any = None,
    num_splits: int = 0,
    return_softmax_lse: bool = False,
    *,
    page_table: Any = None,
    qv: Any = None,
    cu_seqlens_q: Any = None,
    cu_seqlens_k_new: Any = None,
    max_seqlen_q: Any = None,
    rotary_seqlens: Any = None,
    q_descale: Any = None,
    k_descale: Any = None,
    v_descale: Any = None,
    attention_chunk: int = 0,
    scheduler_metadata: Any = None,
    pack_gqa: bool | None = None,
    sm_margin: int = 0,
    out: Any = None,
    sinks: Any = None,
    s_aux: Any = None,
    score_mod: Any = None,
    aux_tensors: Any = None,
    fa_version: int | None = None,
    ver: int | None = None,
    cp_world_size: int = 1,
    cp_rank: int = 0,
    cp_tot_seqused_k: Any = None,
    cp_kv_cache_interleave_size: int = 1,
    output_gate: Any = None,
) -> Any:
    """Attention of a batch's last tokens over a cache, to which their keys may be added first.

    Parameters
    ----------
    q
        [b, seqlen_q, num_heads, head_dim], or [rows, num_heads, head_dim] with cu_seqlens_q (int32
        or int64 [b + 1]) and max_seqlen_q.
    k_cache, v_cache
        [b, seqlen_cache, num_heads_k, head_dim]; with block_table pages [num_pages, page_size,
        num_heads_k, head_dim]. Any page size, any strides but a contiguous last dimension. Caches
        whose head_dim is no multiple of 8 are copied in each call.
    block_table
        int32 or int64 [b, max_pages]: the pages of each request; entries past its last page may
        hold anything. page_table is another name, which the signature does not show.
    cache_seqlens
        Keys of each request before the new ones: int32 or int64 [b], or an integer; default: as
        many as the cache has room for.
    k, v
        New keys and values [b, seqlen_new, num_heads_k, head_dim], or with cu_seqlens_k_new ([b +
        1]) [rows, num_heads_k, head_dim], of the caches' dtype: written to the caches from position
        cache_seqlens on, before attention. A negative length stands for a request without any key,
        to which nothing is written.
    rotary_cos, rotary_sin
        [positions, rotary_dim / 2]: k is rotated to the positions that it is written to before
        that, and q to the same where causal or with a window, else all rows to cache_seqlens.
        Rotated q and k are rounded to their dtype, fp8 q to 16 bits. On a GPU a position beyond the
        tables gives NaN; q is float16, bfloat16 or fp8 there, and k too.
    rotary_interleaved
        Pairs are neighbours, else halves of rotary_dim.
    rotary_seqlens
        [b]: positions to begin at instead of cache_seqlens.
    cache_batch_idx
        int32 or int64 [b]: the row of the caches, or of block_table, of each request.
    cache_leftpad
        [b]: the first key of each request; those before it do not exist.
    qv
        As in `flash_attn_func`, for the whole caches. With q and k_cache of 64 columns and v_cache
        [num_pages, page_size, 1, 512], without new keys and options that change a logit or hide a
        key, it is latent attention, which copies nothing.
    cp_world_size, cp_rank, cp_tot_seqused_k, cp_kv_cache_interleave_size
        As in `flash_attn_varlen_func`, without new keys, rotation and cache_leftpad: block_table
        and cache_seqlens are those of this rank's keys. One row of each request needs no
        cp_tot_seqused_k, but for a window.
    scheduler_metadata, fa_version, ver
        Accepted for compatibility.
    score_mod, aux_tensors
        Must be None.
    other arguments
        All other arguments as in `flash_attn_func`.

    Returns
    -------
    result
        out in q's shape (v's head_dim), or (out, lse): float32 [b, num_heads, seqlen_q], with
        cu_seqlens_q [num_heads, rows], natural logarithms.

    Raises
    ------
    CupyAttnError
        Errors as there. A cache or a table that is too short for the keys is an error where the
        host knows the lengths: in CPU arrays, as an integer, and under CUPYATTN_DEBUG=1; else, for
        the call waits for nothing, keys past the end are neither written nor seen (FlashAttention-2
        waits for the lengths there).

    Notes
    -----
    Semantics: flash_attn's function of the same name.

    Examples
    --------
    >>> import numpy as np
    >>> from cupyattn import flash_attn
    >>> k_cache, v_cache = np.zeros((2, 4, 16, 2, 64), np.float16)  # 4 pages of 16 tokens
    >>> table, lengths = np.array([[3, 0], [1, -1]], np.int32), np.array([20, 15], np.int32)
    >>> q, new = np.ones((2, 1, 8, 64), np.float16), np.ones((2, 1, 2, 64), np.float16)
    >>> o = flash_attn.flash_attn_with_kvcache(
    ...     q, k_cache, v_cache, new, new, cache_seqlens=lengths, block_table=table, causal=True
    ... )
    >>> o.shape, k_cache[0, 4].min()
    ((2, 1, 8, 64), np.float16(1.0))
    """
    if not score_mod is aux_tensors is None:
        forward.refuse_given(score_mod=score_mod, aux_tensors=aux_tensors)
    if return_softmax_lse is not False:
        return_softmax_lse = asks(False, return_softmax_lse)
    table = block_table
    if page_table is not None:
        table = either(page_table=page_table, block_table=block_table)
    arrays = make_arrays(
        q=q,
        k=k_cache,
        v=v_cache,
        block_tables=table,
        kv_lens=cache_seqlens,
        out=out,
        qo_offsets=cu_seqlens_q,
        sinks=sinks if s_aux is None else either(sinks=sinks, s_aux=s_aux),
        scale_q=q_descale,
        scale_k=k_descale,
        scale_v=v_descale,
        alibi_slopes=alibi_slopes,
        output_gate=output_gate,
    )
    more = None
    if not (
        k is v is cu_seqlens_k_new is rotary_cos is rotary_sin is rotary_seqlens is None
        and cache_batch_idx is cache_leftpad is qv is None
    ):
        arrays = arrays._replace(kv_begin=cache_leftpad)
        more = MoreArrays(
            qv=qv,
            new_k=k,
            new_v=v,
            new_offsets=cu_seqlens_k_new,
            rotary_cos=rotary_cos,
            rotary_sin=rotary_sin,
            rotary_begin=rotary_seqlens,
            cache_rows=cache_batch_idx,
        )
    options = make_options(
        names=BLOCKS if page_table is None else CACHE,
        softmax_scale=softmax_scale,
        causal=causal,
        window_size=window_size if type(window_size) is tuple else window_of(window_size),
        softcap=softcap,
        num_splits=num_splits,
        attention_chunk=attention_chunk,
        return_lse=return_softmax_lse,
        max_q_len=None if max_seqlen_q is None else max_rows(max_seqlen_q),
        rotary_interleaved=rotary_interleaved,
    )
    if type(cp_world_size) is not int or cp_world_size != 1:
        arrays, options = _with_share(locals(), arrays, options)
    result = run_cached(arrays, options, None, more)
    if result is None:
        try:
            result = forward.with_kvcache(arrays, more or NO_MORE, options, max_seqlen_q)
        except ArgumentError as error:
            return _exported(flash_attn_with_kvcache, locals(), error)
    return result


def _with_share(
    arguments: dict[str, Any], arrays: Arrays, options: FlashOptions
) -> tuple[Arrays, FlashOptions]:
    """The call over this rank's share of the keys, unless it holds all of them."""
    share = read_share(
        arguments["cp_world_size"], arguments["cp_rank"], arguments["cp_kv_cache_interleave_size"]
    )
    if share is None:
        return arrays, options
    forward.refuse_with_share(share, cache_leftpad=arguments.get("cache_leftpad"))
    names = options.names.but(kv_begin=WHOLE_LENGTHS)
    # Rows that see all keys need no places of them.
    sees_all = options.causal is False and options.window_size == (-1, -1)
    whole_lengths = None if sees_all else arguments[WHOLE_LENGTHS]
    return arrays._replace(kv_begin=whole_lengths), options._replace(names=names, key_share=share)


def _exported(function: Any, arguments: dict[str, Any], error: ArgumentError) -> Any:
    """What torch.export traces in place of a call that refused its arrays, which hold nothing."""
    if not is_exporting():
        raise error
    return exported(function, arguments)


def _refuse_others(arguments: dict[str, Any]) -> None:
    """UnsupportedError for the first argument that has no meaning here."""
    forward.refuse_given(**{_OTHER_NAMES.get(name, name): arguments[name] for name in _NOT_SERVED})


def with_no_mask(result: Any, q: Any) -> Any:
    """(out, lse) with what FlashAttention-2 returns as a mask of dropout: nothing."""
    vq = array.view(q, "q")
    dtype = dtypes.bfloat16 if vq.dtype.is_fp8 else vq.dtype.of_output
    return *result, array.deliver(array.empty((0,), dtype, vq), vq)


def hide(function: Any, name: str) -> None:
    """Leave one of two names of an argument out of the signature: programs take the one that it
    shows, and may not find both."""
    shown = inspect.signature(function)
    function.__signature__ = shown.replace(
        parameters=[x for x in shown.parameters.values() if x.name != name]
    )


hide(flash_attn_with_kvcache, "page_table")
