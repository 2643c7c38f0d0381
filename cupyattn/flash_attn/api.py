"""flash_attn's attention functions, over calls without a plan."""

from __future__ import annotations

import inspect
import math
from typing import Any

import numpy as np

from .. import array
from ..array import ArrayView
from ..core import parse
from ..core.tracing import untraced
from ..errors import ArgumentError, UnsupportedError
from ..inputs import geometry
from ..inputs.index_arrays import compute, progression
from ..planless.views import Names
from .attend import Common, attend, attend_cached, parse_window
from .batch import Batch
from .caches import (
    Append,
    as_rows,
    lengths,
    offsets_of,
    page_table_of,
    select_rows,
    vector,
    view_cache,
)
from .latent import attend_latent
from .rotary import Rotary

# An array without a name of the caller's is one that the call makes. No two have one name.
_DENSE = Names(
    *("q", "k", "v"),
    block_tables="requests of k",
    kv_lens="seqlen_k",
    qo_lens="seqlen_q",
    qo_offsets="offsets of q",
    kv_offsets="offsets of k",
    sm_scale="q_descale",
    k_scale="k_descale",
    output_scale="v_descale",
    q_len="seqlen_q",
    max_q_len="max_seqlen_q",
    max_kv_len="max_seqlen_k",
    kv_begin="cache_leftpad",
    has_layout=False,
)
_VARLEN = _DENSE._replace(
    block_tables="block_table",
    kv_lens="seqused_k",
    qo_lens="seqused_q",
    qo_offsets="cu_seqlens_q",
    kv_offsets="cu_seqlens_k",
)
_VARLEN_BY_OFFSETS = _VARLEN._replace(kv_lens="cu_seqlens_k")
_CACHE = _VARLEN._replace(
    k="k_cache", v="v_cache", block_tables="page_table", kv_lens="cache_seqlens"
)


@untraced
def flash_attn_func(
    q: Any,
    k: Any,
    v: Any,
    softmax_scale: float | None = None,
    causal: bool = False,
    qv: Any = None,
    q_descale: Any = None,
    k_descale: Any = None,
    v_descale: Any = None,
    window_size: Any = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    num_splits: int = 0,
    pack_gqa: bool | None = None,
    deterministic: bool = False,
    sm_margin: int = 0,
    return_attn_probs: bool = False,
    *,
    dropout_p: float = 0.0,
    alibi_slopes: Any = None,
    return_softmax_lse: bool = False,
    out: Any = None,
    sinks: Any = None,
    s_aux: Any = None,
) -> Any:
    """Attention of requests of one length.

    q       [b, seqlen_q, num_heads, head_dim], float16 or bfloat16 (on the CPU float32 too); also
            float8_e4m3fn and float8_e5m2, computed in 16 bits, with an answer in bfloat16.
    k, v    [b, seqlen_k, num_heads_k, head_dim], v's head_dim may differ; q's dtype, or fp8. Any
            strides but a contiguous last dimension.
    softmax_scale   of the logits; default 1 / sqrt(head_dim).
    causal  row i sees keys up to i + seqlen_k - seqlen_q.
    window_size   (left, right): keys beside that one that a row sees, both ends included; -1 or
            None: all.
    attention_chunk   keys of a chunk: a row sees the chunk that it lies in; 0: all keys.
    softcap   c > 0: logits become c * tanh(logit / c); 0: off.
    q_descale, k_descale, v_descale   what fp8 values are multiplied by; no effect on other dtypes.
            float32: one number, [num_heads_k], or [b, num_heads_k], which on a GPU must be the
            same for all requests (of stride 0, say).
    sinks, s_aux   two names of [num_heads] logits of keys without values, natural and unscaled, of
            any float dtype.
    alibi_slopes   float32 [num_heads] or [b, num_heads]: slope * |i + seqlen_k - seqlen_q - j| is
            taken from the logits, behind the soft cap. On a GPU where rows see no keys to their
            right, and without a soft cap.
    out     array to write instead of a new one.
    return_attn_probs, return_softmax_lse   two names of: return the LSE too.
    num_splits   1: keys are not split; any other number lets the plan on the GPU decide. (FA3's
            default is 1 here.)
    pack_gqa, deterministic, sm_margin   accepted; answers are the same each time.
    dropout_p   must be 0; qv None.

    Returns out [b, seqlen_q, num_heads, head_dim of v], or (out, lse): float32 [b, num_heads,
    seqlen_q], natural logarithms. A row that sees no key gives 0 and -inf. Nothing is copied to the
    host and nothing waits, so a CUDA graph may capture the call. Raises ArgumentError for arguments
    that do not fit each other, UnsupportedError for what is not served, and nothing is written
    then. Semantics: flash_attn's function of the same name, without a backward pass.
    """
    _refuse(dropout_p, qv=qv)
    views = view_cache(k, v, _DENSE)
    count, seqlen_k = views[0].shape[:2]
    vq = array.view(q, "q")
    if len(vq.shape) == 4 and vq.shape[0] != count:
        raise ArgumentError(f"k: holds {count} requests and q {vq.shape[0]}; wanted as many")
    batch = Batch(_DENSE, q, k, v, progression(count, seqlen_k, 0, vq), max_seqlen_k=seqlen_k)
    rows = as_rows(k, v, views, _DENSE)
    if rows is None:
        batch.table = progression(count, 0, 1, vq)[:, None]
    else:
        batch.k, batch.v, apart = rows
        batch.kv_offsets = progression(count, 0, apart, vq)
    common = Common(
        *(softmax_scale, causal, window_size, _chunk(attention_chunk), softcap, num_splits),
        *(q_descale, k_descale, v_descale, alibi_slopes, _either(sinks=sinks, s_aux=s_aux), out),
        _asks(return_attn_probs, return_softmax_lse),
    )
    answer = None
    is_repeatable = q_descale is k_descale is v_descale is None and not common.attention_chunk
    if rows is not None and is_repeatable and not common.return_lse:
        given = (
            *(q, batch.k, batch.v, None, None, batch.kv_lens, out, None, None, None),
            *(batch.kv_offsets, None, None, common.sinks, None, None, None, None, None),
            alibi_slopes,
        )
        window = tuple(window_size) if type(window_size) is list else window_size
        options = "func", None, seqlen_k, softmax_scale, causal, window, softcap, num_splits
        answer = attend_cached(_DENSE, given, options)
    return attend(batch, common) if answer is None else answer


@untraced
def flash_attn_varlen_func(
    q: Any,
    k: Any,
    v: Any,
    cu_seqlens_q: Any,
    cu_seqlens_k: Any = None,
    max_seqlen_q: Any = None,
    max_seqlen_k: Any = None,
    seqused_q: Any = None,
    seqused_k: Any = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    qv: Any = None,
    q_descale: Any = None,
    k_descale: Any = None,
    v_descale: Any = None,
    window_size: Any = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    num_splits: int = 0,
    pack_gqa: bool | None = None,
    deterministic: bool = False,
    sm_margin: int = 0,
    return_attn_probs: bool = False,
    *,
    block_table: Any = None,
    page_table: Any = None,
    dropout_p: float = 0.0,
    alibi_slopes: Any = None,
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
) -> Any:
    """Attention of requests of any lengths, whose rows follow each other.

    q       [rows, num_heads, head_dim].
    k, v    [n, num_heads_k, head_dim]; with a table pages [num_pages, page_size, num_heads_k,
            head_dim], of any size and strides.
    cu_seqlens_q, cu_seqlens_k   int32 or int64 [b + 1]: the first row of each request and the end
            of the last, of q and of k. They may repeat their last value: such requests are empty.
            With a table, cu_seqlens_k only says lengths.
    seqused_q, seqused_k   [b]: how many of a request's rows count; default: all.
    block_table, page_table   two names of int32 or int64 [b, max_pages]: the pages of each request;
            entries past its last page may hold anything.
    max_seqlen_q, max_seqlen_k   the most of one request: integers, or arrays of one element, which
            are not read where they are on a GPU. They choose the kernel and how keys are split,
            never the answer; but under attention_chunk max_seqlen_q must not be too small.
    scheduler_metadata, fa_version, ver, cp_rank   accepted for compatibility.
    q_v, output_scale, score_mod, mask_mod, block_sparse_tensors, aux_tensors,
    aux_tensor_leading_dims, dynamic_causal, cp_tot_seqused_k   must be None; cp_world_size 1.
    All other arguments as in `flash_attn_func`.

    Returns out [rows, num_heads, head_dim of v], or (out, lse): float32 [num_heads, rows], natural
    logarithms. Rows of no request hold anything, in a given `out` what they held. Errors as there.
    Semantics: flash_attn's function of the same name.
    """
    # Most calls take their arrays as they are and look like one that was checked.
    if (
        qv is q_v is output_scale is score_mod is mask_mod is block_sparse_tensors is None
        and aux_tensors is aux_tensor_leading_dims is dynamic_causal is cp_tot_seqused_k is None
        and q_descale is k_descale is v_descale is s_aux is None
        and return_attn_probs is return_softmax_lse is False
        and (block_table is None or page_table is None)
        and type(max_seqlen_k) is type(attention_chunk) is type(cp_world_size) is int
        and (max_seqlen_q is None or (type(max_seqlen_q) is int and max_seqlen_q >= 0))
        and type(dropout_p) is float
        and dropout_p == 0.0
        and cp_world_size == 1
        and not attention_chunk
        and max_seqlen_k >= 0
    ):
        table = page_table if block_table is None else block_table
        lens, offsets = seqused_k, None if table is not None else cu_seqlens_k
        names, form = _VARLEN, "varlen"
        if lens is None:
            names, form = _VARLEN_BY_OFFSETS, "varlen by offsets"
            lens = None if table is None else cu_seqlens_k
        given: tuple[Any, ...] = q, k, v, None, table, lens, out, None
        given += seqused_q, cu_seqlens_q, offsets
        if not sinks is alibi_slopes is None:
            given += None, None, sinks, None, None, None, None, None, alibi_slopes
        window = tuple(window_size) if type(window_size) is list else window_size
        options = (
            *(form, max_seqlen_q, max_seqlen_k, softmax_scale),
            *(causal, window, softcap, num_splits),
        )
        has_kv_steps = table is not None and seqused_k is None
        answer = attend_cached(names, given, options, has_kv_steps)
        if answer is not None:
            return answer
    _refuse(
        *(dropout_p, cp_world_size),
        qv=qv if q_v is None else q_v,
        output_scale=output_scale,
        score_mod=score_mod,
        mask_mod=mask_mod,
        block_sparse_tensors=block_sparse_tensors,
        aux_tensors=aux_tensors,
        aux_tensor_leading_dims=aux_tensor_leading_dims,
        dynamic_causal=dynamic_causal,
        cp_tot_seqused_k=cp_tot_seqused_k,
    )
    names, table = _VARLEN, _either(block_table=block_table, page_table=page_table)
    if cu_seqlens_q is None:
        raise ArgumentError("cu_seqlens_q: got None; wanted offsets of q's rows, [batch + 1]")
    common = Common(
        *(softmax_scale, causal, window_size, _chunk(attention_chunk), softcap, num_splits),
        *(q_descale, k_descale, v_descale, alibi_slopes, _either(sinks=sinks, s_aux=s_aux), out),
        _asks(return_attn_probs, return_softmax_lse),
    )
    most_q, most_k = _bound(max_seqlen_q, "max_seqlen_q"), _bound(max_seqlen_k, "max_seqlen_k")
    if seqused_k is None:
        if cu_seqlens_k is None:
            raise ArgumentError("cu_seqlens_k: got None without seqused_k; wanted one of them")
        names = _VARLEN_BY_OFFSETS
        offsets_of(cu_seqlens_k, "cu_seqlens_k")
    batch = Batch(
        *(names, q, k, v, seqused_k, table),
        *(seqused_q, cu_seqlens_q, cu_seqlens_k),
        max_seqlen_q=most_q,
        max_seqlen_k=most_k,
    )
    if table is not None:
        batch.table = page_table_of(table, "block_table", view_cache(k, v, names))
        batch.kv_offsets = None
        if seqused_k is None:
            batch.kv_lens, batch.has_kv_steps = cu_seqlens_k, True
    elif cu_seqlens_k is None:
        # Keys of each request in a row of their own, of which the first count.
        views = view_cache(k, v, names)
        batch.table = progression(views[0].shape[0], 0, 1, views[0])[:, None]
        _prefer_rows(batch, views, attention_chunk)
    return attend(batch, common)


@untraced
def flash_attn_with_kvcache(
    q: Any,
    k_cache: Any,
    v_cache: Any,
    k: Any = None,
    v: Any = None,
    qv: Any = None,
    rotary_cos: Any = None,
    rotary_sin: Any = None,
    cache_seqlens: Any = None,
    cache_batch_idx: Any = None,
    cache_leftpad: Any = None,
    page_table: Any = None,
    cu_seqlens_q: Any = None,
    cu_seqlens_k_new: Any = None,
    max_seqlen_q: Any = None,
    rotary_seqlens: Any = None,
    q_descale: Any = None,
    k_descale: Any = None,
    v_descale: Any = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Any = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    scheduler_metadata: Any = None,
    num_splits: int = 0,
    pack_gqa: bool | None = None,
    sm_margin: int = 0,
    return_softmax_lse: bool = False,
    *,
    block_table: Any = None,
    alibi_slopes: Any = None,
    out: Any = None,
    sinks: Any = None,
    s_aux: Any = None,
    score_mod: Any = None,
    aux_tensors: Any = None,
    fa_version: int | None = None,
    ver: int | None = None,
) -> Any:
    """Attention of a batch's last tokens over a cache, to which their keys may be added first.

    q       [b, seqlen_q, num_heads, head_dim], or [rows, num_heads, head_dim] with cu_seqlens_q
            (int32 or int64 [b + 1]) and max_seqlen_q.
    k_cache, v_cache   [b, seqlen_cache, num_heads_k, head_dim]; with page_table pages [num_pages,
            page_size, num_heads_k, head_dim]. Any page size, any strides but a contiguous last
            dimension.
    page_table   int32 or int64 [b, max_pages]: the pages of each request; entries past its last
            page may hold anything. block_table is another name, which the signature does not show.
    cache_seqlens   keys of each request before the new ones: int32 or int64 [b], or an integer;
            default: as many as the cache has room for.
    k, v    new keys and values [b, seqlen_new, num_heads_k, head_dim], or with cu_seqlens_k_new
            ([b + 1]) [rows, num_heads_k, head_dim], of the caches' dtype: written to the caches
            from position cache_seqlens on, before attention. A negative length stands for a request
            without any key, to which nothing is written.
    rotary_cos, rotary_sin   [positions, rotary_dim / 2]: k is rotated to the positions that it is
            written to before that, and q to the same where causal or with a window, else all rows
            to cache_seqlens. rotary_interleaved: pairs are neighbours, else halves of rotary_dim.
            rotary_seqlens [b]: positions to begin at instead. On a GPU a position beyond the tables
            gives NaN; q, k and the caches are float16 or bfloat16 there.
    cache_batch_idx   int32 or int64 [b]: the row of the caches, or of page_table, of each request.
    cache_leftpad   [b]: the first key of each request; those before it do not exist.
    qv      [b, seqlen_q, num_heads, 512] beside q and k_cache of 64 columns: latent attention,
            whose v_cache [num_pages, page_size, 1, 512] is multiplied with qv too. It takes no new
            keys, rotation, windows, chunks, soft caps and slopes. softmax_scale: default
            1 / sqrt(576).
    scheduler_metadata, fa_version, ver   accepted for compatibility.
    score_mod, aux_tensors   must be None.
    All other arguments as in `flash_attn_func`.

    Returns out in q's shape (v's head_dim), or (out, lse): float32 [b, num_heads, seqlen_q], with
    cu_seqlens_q [num_heads, rows], natural logarithms. Errors as there; a cache that is too short
    for the new keys is one on the CPU, while on a GPU such keys are left out. Semantics: FA3's
    function of the same name.
    """
    # Most calls of a decoding loop take the cache as it is and look like one that was checked.
    if k is v is qv is rotary_cos is rotary_sin is cache_batch_idx is cache_leftpad is None and (
        q_descale is k_descale is v_descale is block_table is s_aux is score_mod is None
        and return_softmax_lse is False
        and rotary_interleaved is True
        and aux_tensors is None
        and type(attention_chunk) is int
        and not attention_chunk
        and (max_seqlen_q is None or (type(max_seqlen_q) is int and max_seqlen_q >= 0))
    ):
        given: tuple[Any, ...] = q, k_cache, v_cache, None, page_table, cache_seqlens, out, None
        if not cu_seqlens_q is sinks is alibi_slopes is None:
            given += None, cu_seqlens_q, None, None, None, sinks, *(None,) * 5, alibi_slopes
        window = tuple(window_size) if type(window_size) is list else window_size
        options = (
            *("with_kvcache", max_seqlen_q, None, softmax_scale),
            *(causal, window, softcap, num_splits),
        )
        answer = attend_cached(_CACHE, given, options)
        if answer is not None:
            return answer
    if rotary_interleaved is not True:
        parse.flag(rotary_interleaved, "rotary_interleaved")
    _refuse(0.0, score_mod=score_mod, aux_tensors=aux_tensors)
    names, table = _CACHE, _either(page_table=page_table, block_table=block_table)
    if qv is not None:
        return attend_latent(
            (q, qv, k_cache, v_cache), table, cache_seqlens, cu_seqlens_q,
            _bound(max_seqlen_q, "max_seqlen_q"), softmax_scale, causal,
            _either(sinks=sinks, s_aux=s_aux), out, _asks(False, return_softmax_lse),
            {
                "k": k, "v": v, "rotary_cos": rotary_cos, "rotary_sin": rotary_sin,
                "cache_batch_idx": cache_batch_idx, "cache_leftpad": cache_leftpad,
                "window_size": window_size, "attention_chunk": attention_chunk,
                "softcap": softcap, "q_descale": q_descale, "k_descale": k_descale,
                "v_descale": v_descale, "alibi_slopes": alibi_slopes,
            },
        )  # fmt: skip
    common = Common(
        *(softmax_scale, causal, window_size, _chunk(attention_chunk), softcap, num_splits),
        *(q_descale, k_descale, v_descale, alibi_slopes, _either(sinks=sinks, s_aux=s_aux), out),
        _asks(False, return_softmax_lse),
    )
    most = _bound(max_seqlen_q, "max_seqlen_q")
    views = view_cache(k_cache, v_cache, names)
    is_paged = table is not None
    names, table, room = _pages_or_rows(names, views, table, cache_batch_idx)
    count = table.shape[0]
    if cache_seqlens is None:
        begin = progression(count, room, 0, views[0])
    else:
        begin = lengths(cache_seqlens, count, views[0], "cache_seqlens")
    append, kv_lens, rotation = None, begin, None
    if rotary_cos is not None or rotary_sin is not None:
        rotary = Rotary(
            *(rotary_cos, rotary_sin, begin if rotary_seqlens is None else rotary_seqlens),
            parse.flag(rotary_interleaved, "rotary_interleaved"),
            bool(causal or attention_chunk) or parse_window(window_size) != (-1, -1),
        )
        if array.view(q, "q").device.kind == "cuda":
            q, rotation = rotary.on_gpu(q, k, cu_seqlens_q)
        else:
            q, k = rotary.on_cpu(q, k, cu_seqlens_q, cu_seqlens_k_new)
    if k is not None or v is not None:
        if k is None or v is None:
            raise ArgumentError("k, v: got one of the two; wanted both, or none")
        if cache_seqlens is None:
            raise ArgumentError("cache_seqlens: got None; wanted where k and v are written to")
        append = Append((k, v), cu_seqlens_k_new, begin, (k_cache, v_cache), table, rotation)
        is_split = bool(attention_chunk) or (cache_leftpad is not None and not is_paged)
        kv_lens = append.lengths_after(are_read_early=is_split)
    batch = Batch(
        *(names, q, k_cache, v_cache, kv_lens, table, None, cu_seqlens_q, None, cache_leftpad),
        max_seqlen_q=most,
        max_seqlen_k=room,
        append=append,
    )
    if not is_paged:
        _prefer_rows(batch, views, attention_chunk)
    return attend(batch, common)


# Programs take the one of the two names that the signature shows, and may not show both.
_signature = inspect.signature(flash_attn_with_kvcache)
flash_attn_with_kvcache.__signature__ = _signature.replace(  # type: ignore[attr-defined]
    parameters=[x for x in _signature.parameters.values() if x.name != "block_table"]
)


def _refuse(dropout_p: Any, cp_world_size: Any = 1, **arguments: Any) -> None:
    if type(dropout_p) is not float or dropout_p != 0.0:
        if parse.finite(dropout_p, "dropout_p", 0.0):
            raise UnsupportedError("dropout_p: there is no dropout here; pass 0")
    if type(cp_world_size) is not int or cp_world_size != 1:
        if parse.require_int(cp_world_size, "cp_world_size") != 1:
            raise UnsupportedError(f"cp_world_size: got {cp_world_size!r}; 1 is supported")
    for name, x in arguments.items():
        if x is not None:
            geometry.refuse("is not supported", **{name: x})


def _asks(return_attn_probs: Any, return_softmax_lse: Any) -> bool:
    """Whether one of two flags is set."""
    if return_attn_probs is return_softmax_lse is False:
        return False
    first = parse.flag(return_attn_probs, "return_attn_probs")
    return parse.flag(return_softmax_lse, "return_softmax_lse") or first


def _chunk(x: Any) -> int:
    return x if type(x) is int else parse.require_int(x, "attention_chunk", 0)


def _either(**names: Any) -> Any:
    """What one of two names of an argument has."""
    (first, x), (second, y) = names.items()
    if x is not None and y is not None:
        raise ArgumentError(f"{first}, {second}: are two names of one argument; pass one")
    return y if x is None else x


def _bound(x: Any, name: str) -> int | None:
    """An integer, or one in an array of the host's; None for what is unknown or on a GPU."""
    if x is None or type(x) is int:
        number = x
    elif hasattr(x, "shape") and not isinstance(x, np.generic):
        v = array.view(x, name)
        if math.prod(v.shape) != 1:
            raise ArgumentError(f"{name}: shape is {list(v.shape)}; wanted one number")
        if v.device.kind != "cpu":
            return None
        number = parse.require_int(array.as_numpy(v).ravel()[0], name, 0, 2**63)
    else:
        number = parse.require_int(x, name, 0)
    if number is not None and number < 0:
        raise ArgumentError(f"{name}: got {number}; wanted 0 or more")
    return number


def _pages_or_rows(
    names: Names, views: tuple[ArrayView, ArrayView], table: Any, cache_batch_idx: Any
) -> tuple[Names, Any, int]:
    """(names, table, most keys of a request); without pages each row of a cache is a page."""
    if table is not None:
        table = page_table_of(table, "page_table", views)
        if cache_batch_idx is not None:
            table = select_rows(table, cache_batch_idx, "page_table")
        return names, table, table.shape[1] * views[0].shape[1]
    num_rows, room, *_ = views[0].shape
    rows, label = cache_batch_idx, "cache_batch_idx"
    if rows is None:
        rows, label = progression(num_rows, 0, 1, views[0]), "requests of k_cache"
    names = names._replace(block_tables=label)
    return names, vector(rows, "cache_batch_idx")[:, None], room


def _prefer_rows(batch: Batch, views: tuple[ArrayView, ArrayView], chunk: Any) -> None:
    """Take a cache without pages as rows of all requests, the first of each behind its padding,
    where they are all of one array."""
    names, is_empty = batch.names, 0 in views[0].shape
    is_plain = batch.kv_begin is None and not chunk
    if not is_empty and (is_plain or views[0].device.kind == "cpu"):
        return
    rows = as_rows(batch.k, batch.v, views, names)
    if rows is None:
        return
    first = array.view(batch.table.reshape(-1), "cache_batch_idx")
    batch.k, batch.v, apart = rows
    batch.table = None
    if batch.kv_begin is None:
        batch.kv_offsets = compute(lambda i: i * apart, first)
        return
    pad = array.view(vector(batch.kv_begin, names.kv_begin), names.kv_begin)
    kv_lens = array.view(batch.kv_lens, names.kv_lens)
    for v, name in ((pad, names.kv_begin), (kv_lens, names.kv_lens)):
        if v.shape != first.shape or v.dtype.name not in ("int32", "int64"):
            raise ArgumentError(
                f"{name}: {v.dtype} of shape {list(v.shape)}; wanted int32 or int64 "
                f"{list(first.shape)}"
            )
    batch.kv_offsets = compute(lambda i, p: i * apart + p, first, pad)
    batch.kv_lens = compute(lambda n, p: n - p, kv_lens, pad)
    batch.kv_begin = None
