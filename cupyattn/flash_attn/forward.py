"""What flash_attn's functions do, whatever the order of their arguments: attention over arrays,
ragged rows and caches, as calls without a plan."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any, Literal

import numpy as np

from .. import array
from ..array import ArrayView
from ..core import parse
from ..engine import geometry
from ..engine.arrays import Arrays, make_arrays
from ..engine.index_arrays import compute, progression
from ..engine.planless_reference import RoomError
from ..engine.run_planless import remember, run_cached
from ..engine.views import Names, next_power_of_two
from ..errors import ArgumentError, UnsupportedError
from .attend import (
    MANY_ROWS,
    Common,
    FlashOptions,
    attend,
    make_dense_options,
    make_options,
    parse_window,
    widened_queries,
)
from .batch import Batch
from .caches import (
    Append,
    CacheArrays,
    as_rows,
    lengths,
    offsets_of,
    page_table_of,
    select_rows,
    vector,
    view_cache,
)
from .latent import attend_latent, is_latent
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
# Up to that keys are never converted ahead of attention.
_FEW_ROWS = 64
_VARLEN_BY_OFFSETS = _VARLEN._replace(kv_lens="cu_seqlens_k")
_CACHE = _VARLEN._replace(
    k="k_cache", v="v_cache", block_tables="page_table", kv_lens="cache_seqlens"
)
_BLOCKS = _CACHE._replace(block_tables="block_table")  # FlashAttention-2's name of the table


def dense(
    q: Any,
    k: Any,
    v: Any,
    softmax_scale: Any,
    causal: Any,
    window_size: Any,
    softcap: Any,
    alibi_slopes: Any,
    return_lse: bool,
    qv: Any,
    q_descale: Any,
    k_descale: Any,
    v_descale: Any,
    attention_chunk: Any,
    num_splits: Any,
    out: Any,
    sinks: Any,
    s_aux: Any,
) -> Any:
    """Requests of one length: `flash_attn_func`."""
    if (
        qv is q_descale is k_descale is v_descale is alibi_slopes is sinks is s_aux is None
        and not return_lse
        and type(attention_chunk) is int
        and attention_chunk == 0
        and type(window_size) is tuple
    ):
        # Most calls look like one that was checked, and need not be made rows of a batch.
        alone = make_arrays(q=q, k=k, v=v, out=out)
        plain = make_dense_options(
            q_shape=getattr(q, "shape", None),
            k_shape=getattr(k, "shape", None),
            softmax_scale=softmax_scale,
            causal=causal,
            window_size=window_size,
            softcap=softcap,
            num_splits=num_splits,
        )
        answer = run_cached(alone, plain)
        if answer is not None:
            return answer
    else:
        alone = None
    common = Common(
        softmax_scale=softmax_scale,
        causal=causal,
        window_size=window_of(window_size),
        attention_chunk=_chunk(attention_chunk),
        softcap=softcap,
        num_splits=num_splits,
        q_descale=q_descale,
        k_descale=k_descale,
        v_descale=v_descale,
        alibi_slopes=alibi_slopes,
        sinks=_either(sinks=sinks, s_aux=s_aux),
        out=out,
        return_lse=return_lse,
    )
    batch = _dense_batch(q, k, v, qv)
    answer = None
    if _is_repeatable(batch, common):
        arrays, options = _repeated(batch, common)
        answer = run_cached(arrays, options)
        if answer is not None and alone is not None:
            remember(alone, plain, arrays, options)
    return attend(batch, common) if answer is None else answer


def _dense_batch(q: Any, k: Any, v: Any, qv: Any) -> Batch:
    """Requests of one length as rows of all requests, or each as a page where they are apart."""
    views, vq = view_cache(k, v, _DENSE), array.view(q, "q")
    count, seqlen_k = views[0].shape[:2]
    if len(vq.shape) == 4 and vq.shape[0] != count:
        raise ArgumentError(f"k: holds {count} requests and q {vq.shape[0]}; wanted as many")
    kv_lens = progression(count, seqlen_k, 0, vq)
    batch = Batch(_DENSE, q, k, v, kv_lens, max_seqlen_k=seqlen_k, qv=qv)
    rows = as_rows(k, v, views, _DENSE)
    if rows is None:
        batch.table = progression(count, 0, 1, vq)[:, None]
    else:
        batch.k, batch.v, apart = rows
        batch.kv_offsets = progression(count, 0, apart, vq)
    return batch


def _is_repeatable(batch: Batch, common: Common) -> bool:
    """Whether kernels read these arrays as they are, so that a call like an earlier one needs no
    further look."""
    if batch.table is not None or batch.qv is not None or common.return_lse:
        return False
    if (
        common.attention_chunk
        or not common.q_descale is common.k_descale is common.v_descale is None
    ):
        return False
    if not array.view(batch.k, "k").dtype.is_fp8:
        return True
    shape = array.view(batch.q, "q").shape
    return len(shape) == 4 and shape[1] <= _FEW_ROWS


def _repeated(batch: Batch, common: Common) -> tuple[Arrays, FlashOptions]:
    """The arrays and options of such a call."""
    arrays = make_arrays(
        q=batch.q,
        k=batch.k,
        v=batch.v,
        kv_lens=batch.kv_lens,
        out=common.out,
        kv_offsets=batch.kv_offsets,
        sinks=common.sinks,
        alibi_slopes=common.alibi_slopes,
    )
    options = make_options(
        names=_DENSE,
        max_q_len=None,
        max_kv_len=next_power_of_two(batch.max_seqlen_k),
        softmax_scale=common.softmax_scale,
        causal=common.causal,
        window_size=common.window_size,
        softcap=common.softcap,
        num_splits=common.num_splits,
    )
    return arrays, options


def varlen(
    q: Any,
    k: Any,
    v: Any,
    cu_seqlens_q: Any,
    cu_seqlens_k: Any,
    max_seqlen_q: Any,
    max_seqlen_k: Any,
    seqused_q: Any,
    seqused_k: Any,
    softmax_scale: Any,
    causal: Any,
    window_size: Any,
    softcap: Any,
    alibi_slopes: Any,
    return_lse: bool,
    block_table: Any,
    page_table: Any,
    qv: Any,
    q_descale: Any,
    k_descale: Any,
    v_descale: Any,
    attention_chunk: Any,
    num_splits: Any,
    out: Any,
    sinks: Any,
    s_aux: Any,
    dynamic_causal: Any = None,
) -> Any:
    """Requests of any lengths, whose rows follow each other: `flash_attn_varlen_func`."""
    # Most calls take their arrays as they are and look like one that was checked.
    window = window_size if type(window_size) is tuple else window_of(window_size)
    if (
        qv is q_descale is k_descale is v_descale is s_aux is dynamic_causal is None
        and return_lse is False
        and (block_table is None or page_table is None)
        and type(max_seqlen_k) is type(attention_chunk) is int
        and (max_seqlen_q is None or (type(max_seqlen_q) is int and max_seqlen_q >= 0))
        and not attention_chunk
        and max_seqlen_k >= 0
        # Keys of long prompts may be converted first, but for those of pages.
        and (
            max_seqlen_q is None
            or max_seqlen_q <= _FEW_ROWS
            or not block_table is page_table is None
            or not _is_fp8(k)
        )
    ):
        table = page_table if block_table is None else block_table
        lens, offsets = seqused_k, None if table is not None else cu_seqlens_k
        names, has_kv_steps = _VARLEN, False
        if lens is None:
            names, has_kv_steps = _VARLEN_BY_OFFSETS, table is not None
            lens = None if table is None else cu_seqlens_k
        arrays = make_arrays(
            q=q,
            k=k,
            v=v,
            block_tables=table,
            kv_lens=lens,
            out=out,
            qo_lens=seqused_q,
            qo_offsets=cu_seqlens_q,
            kv_offsets=offsets,
            sinks=sinks,
            alibi_slopes=alibi_slopes,
        )
        options = make_options(
            names=names,
            max_q_len=None if max_seqlen_q is None else min(max(max_seqlen_q, 1), MANY_ROWS),
            max_kv_len=next_power_of_two(max_seqlen_k),
            softmax_scale=softmax_scale,
            causal=causal,
            window_size=window,
            softcap=softcap,
            num_splits=num_splits,
            has_kv_steps=has_kv_steps,
        )
        answer = run_cached(arrays, options)
        if answer is not None:
            return answer
    if cu_seqlens_q is None:
        raise ArgumentError("cu_seqlens_q: got None; wanted offsets of q's rows, [batch + 1]")
    common = Common(
        softmax_scale=softmax_scale,
        causal=causal,
        window_size=window,
        attention_chunk=_chunk(attention_chunk),
        softcap=softcap,
        num_splits=num_splits,
        q_descale=q_descale,
        k_descale=k_descale,
        v_descale=v_descale,
        alibi_slopes=alibi_slopes,
        sinks=_either(sinks=sinks, s_aux=s_aux),
        out=out,
        return_lse=return_lse,
    )
    batch = Batch(
        names=_VARLEN,
        q=q,
        k=k,
        v=v,
        kv_lens=seqused_k,
        table=_either(block_table=block_table, page_table=page_table),
        qo_lens=seqused_q,
        qo_offsets=cu_seqlens_q,
        kv_offsets=cu_seqlens_k,
        max_seqlen_q=_bound(max_seqlen_q, "max_seqlen_q"),
        max_seqlen_k=_bound(max_seqlen_k, "max_seqlen_k"),
        qv=qv,
        are_causal=dynamic_causal,
    )
    _place_keys(batch, common)
    return attend(batch, common)


def _place_keys(batch: Batch, common: Common) -> None:
    """Say how long the keys of ragged requests are and where they begin."""
    cu_seqlens_k = batch.kv_offsets
    if batch.kv_lens is None:
        if cu_seqlens_k is None:
            raise ArgumentError("cu_seqlens_k: got None without seqused_k; wanted one of them")
        batch.names = _VARLEN_BY_OFFSETS
        offsets_of(cu_seqlens_k, "cu_seqlens_k")
    if batch.are_causal is not None and not parse.flag(common.causal, "causal"):
        raise ArgumentError(
            "dynamic_causal: says which requests of a causal call are; pass causal=True"
        )
    if batch.table is not None:
        views = view_cache(batch.k, batch.v, batch.names)
        batch.table = page_table_of(batch.table, "block_table", views)
        batch.kv_offsets = None
        if batch.kv_lens is None:
            batch.kv_lens, batch.has_kv_steps = cu_seqlens_k, True
    elif cu_seqlens_k is None:
        # Keys of each request in a row of their own, of which the first count.
        views = view_cache(batch.k, batch.v, batch.names)
        batch.table = progression(views[0].shape[0], 0, 1, views[0])[:, None]
        _prefer_rows(batch, views, common.attention_chunk)


def with_kvcache(
    q: Any,
    k_cache: Any,
    v_cache: Any,
    k: Any,
    v: Any,
    rotary_cos: Any,
    rotary_sin: Any,
    cache_seqlens: Any,
    cache_batch_idx: Any,
    cache_leftpad: Any,
    block_table: Any,
    page_table: Any,
    softmax_scale: Any,
    causal: Any,
    window_size: Any,
    softcap: Any,
    rotary_interleaved: Any,
    alibi_slopes: Any,
    num_splits: Any,
    return_lse: bool,
    qv: Any,
    cu_seqlens_q: Any,
    cu_seqlens_k_new: Any,
    max_seqlen_q: Any,
    rotary_seqlens: Any,
    q_descale: Any,
    k_descale: Any,
    v_descale: Any,
    attention_chunk: Any,
    out: Any,
    sinks: Any,
    s_aux: Any,
) -> Any:
    """A batch's last tokens over a cache: `flash_attn_with_kvcache`."""
    # Most calls of a decoding loop take the cache as it is and look like one that was checked.
    window = window_size if type(window_size) is tuple else window_of(window_size)
    if k is v is qv is rotary_cos is rotary_sin is cache_batch_idx is cache_leftpad is None and (
        q_descale is k_descale is v_descale is s_aux is None
        and (block_table is None or page_table is None)
        and return_lse is False
        and rotary_interleaved is True
        and type(attention_chunk) is int
        and not attention_chunk
        and (max_seqlen_q is None or (type(max_seqlen_q) is int and max_seqlen_q >= 0))
    ):
        table = page_table if block_table is None else block_table
        arrays = make_arrays(
            q=q,
            k=k_cache,
            v=v_cache,
            block_tables=table,
            kv_lens=cache_seqlens,
            out=out,
            qo_offsets=cu_seqlens_q,
            sinks=sinks,
            alibi_slopes=alibi_slopes,
        )
        options = make_options(
            names=_BLOCKS if page_table is None else _CACHE,
            max_q_len=None if max_seqlen_q is None else min(max(max_seqlen_q, 1), MANY_ROWS),
            max_kv_len=None,
            softmax_scale=softmax_scale,
            causal=causal,
            window_size=window,
            softcap=softcap,
            num_splits=num_splits,
        )
        answer = run_cached(arrays, options)
        if answer is not None:
            return answer
    if rotary_interleaved is not True:
        parse.flag(rotary_interleaved, "rotary_interleaved")
    common = Common(
        softmax_scale=softmax_scale,
        causal=causal,
        window_size=window,
        attention_chunk=attention_chunk,
        softcap=softcap,
        num_splits=num_splits,
        q_descale=q_descale,
        k_descale=k_descale,
        v_descale=v_descale,
        alibi_slopes=alibi_slopes,
        sinks=_either(sinks=sinks, s_aux=s_aux),
        out=out,
        return_lse=return_lse,
    )
    cache = CacheArrays(
        q=q,
        k_cache=k_cache,
        v_cache=v_cache,
        k=k,
        v=v,
        rotary_cos=rotary_cos,
        rotary_sin=rotary_sin,
        rotary_seqlens=rotary_seqlens,
        rotary_interleaved=rotary_interleaved,
        cache_seqlens=cache_seqlens,
        cache_batch_idx=cache_batch_idx,
        cache_leftpad=cache_leftpad,
        table=_either(page_table=page_table, block_table=block_table),
        cu_seqlens_q=cu_seqlens_q,
        cu_seqlens_k_new=cu_seqlens_k_new,
        max_seqlen_q=max_seqlen_q,
        qv=qv,
    )
    return _attend_cache(cache, common, _BLOCKS if page_table is None else _CACHE)


def _attend_cache(cache: CacheArrays, common: Common, names: Names) -> Any:
    """A call over a cache that is none of those that were checked."""
    most = _bound(cache.max_seqlen_q, "max_seqlen_q")
    if cache.qv is not None and is_latent(cache, common):
        return attend_latent(cache, common, most)
    common = replace(common, attention_chunk=_chunk(common.attention_chunk))
    # --- 1. Find the keys ---
    views = view_cache(cache.k_cache, cache.v_cache, names)
    is_paged = cache.table is not None
    names, table, room = _pages_or_rows(names, views, cache.table, cache.cache_batch_idx)
    begin = _begin(cache, views[0], table.shape[0], room, names if is_paged else False)
    # --- 2. Rotate, and write new keys ---
    cache, rotation, is_fp8_q = _rotated(cache, common, begin, names)
    append, kv_lens = None, begin
    if cache.k is not None or cache.v is not None:
        append = _append(cache, begin, table, rotation)
        has_padded_rows = cache.cache_leftpad is not None and not is_paged
        is_split = bool(common.attention_chunk) or has_padded_rows
        kv_lens = append.lengths_after(are_read_early=is_split)
    # --- 3. Attend ---
    batch = Batch(
        names=names,
        q=cache.q,
        k=cache.k_cache,
        v=cache.v_cache,
        kv_lens=kv_lens,
        table=table,
        qo_offsets=cache.cu_seqlens_q,
        kv_begin=cache.cache_leftpad,
        max_seqlen_q=most,
        # The table says it to the kernels.
        max_seqlen_k=room if not is_paged or common.attention_chunk else None,
        qv=cache.qv,
        is_fp8_q=is_fp8_q,
        append=append,
    )
    if not is_paged:
        _prefer_rows(batch, views, common.attention_chunk)
    return attend(batch, common)


def _begin(
    cache: CacheArrays, vk: ArrayView, count: int, room: int, names: Names | Literal[False]
) -> Any:
    """The keys of each request before the new ones. names: of a cache with pages."""
    lens = cache.cache_seqlens
    if lens is None:
        return progression(count, room, 0, vk)
    begin = lengths(lens, count, vk, "cache_seqlens")
    if isinstance(lens, (int, np.integer)):
        _check_room(int(lens), cache.k, cache.cu_seqlens_k_new, room, names)
    return begin


def _rotated(
    cache: CacheArrays, common: Common, begin: Any, names: Names
) -> tuple[CacheArrays, Any, bool]:
    """The call with rotated rows, the rotation that is left for new keys on a GPU, and whether fp8
    rows became rows of 16 bits."""
    if cache.rotary_cos is None and cache.rotary_sin is None:
        return cache, None, False
    has_window = parse_window(common.window_size) != (-1, -1)
    rotary = Rotary(
        cache.rotary_cos,
        cache.rotary_sin,
        begin if cache.rotary_seqlens is None else cache.rotary_seqlens,
        parse.flag(cache.rotary_interleaved, "rotary_interleaved"),
        bool(common.causal or common.attention_chunk) or has_window,
    )
    q, is_fp8_q = cache.q, False
    vq = array.view(q, "q")
    if vq.dtype.is_fp8:
        # Rotated numbers of 16 bits keep what fp8 would lose.
        is_fp8_q, q = True, widened_queries(vq, cache.k_cache, names)
    if vq.device.kind == "cuda":
        q, rotation = rotary.on_gpu(q, cache.k, cache.cu_seqlens_q)
        return cache._replace(q=q), rotation, is_fp8_q
    q, k = rotary.on_cpu(q, cache.k, cache.cu_seqlens_q, cache.cu_seqlens_k_new)
    return cache._replace(q=q, k=k), None, is_fp8_q


def _append(cache: CacheArrays, begin: Any, table: Any, rotation: Any) -> Append:
    """What writes new keys and values."""
    if cache.k is None or cache.v is None:
        raise ArgumentError("k, v: got one of the two; wanted both, or none")
    if cache.cache_seqlens is None:
        raise ArgumentError("cache_seqlens: got None; wanted where k and v are written to")
    caches = cache.k_cache, cache.v_cache
    return Append((cache.k, cache.v), cache.cu_seqlens_k_new, begin, caches, table, rotation)


def refuse_given(**arguments: Any) -> None:
    """UnsupportedError for the first argument that is given."""
    for name, x in arguments.items():
        if x is not None:
            geometry.refuse("is not supported", **{name: x})


def refuse_dropout(dropout_p: Any) -> None:
    """UnsupportedError unless it is 0."""
    if parse.finite(dropout_p, "dropout_p", 0.0):
        raise UnsupportedError(
            f"dropout_p: got {dropout_p}, and there is no dropout here; pass 0. (Where a scale is "
            "meant, pass softmax_scale by name, or take cupyattn.flash_attn_interface, whose "
            "functions have FlashAttention-3's order)"
        )


def refuse_parallel(cp_world_size: Any) -> None:
    """UnsupportedError for a context that is divided over GPUs."""
    if parse.require_int(cp_world_size, "cp_world_size") != 1:
        raise UnsupportedError(f"cp_world_size: got {cp_world_size!r}; 1 is supported")


def asks(return_attn_probs: Any, return_softmax_lse: Any) -> bool:
    """Whether one of two flags is set."""
    first = parse.flag(return_attn_probs, "return_attn_probs")
    return parse.flag(return_softmax_lse, "return_softmax_lse") or first


def window_of(window_size: Any) -> Any:
    """A window as something that can be hashed, and does not change: arrays of the host as a tuple
    of their numbers."""
    if type(window_size) is list:
        return tuple(window_size)
    if window_size is None or isinstance(window_size, tuple) or not hasattr(window_size, "shape"):
        return window_size
    v = array.view(window_size, "window_size")
    if v.device.kind != "cpu" or tuple(v.shape) != (2,):
        raise ArgumentError(
            f"window_size: got an array of shape {list(v.shape)} on {v.device}; wanted (left, "
            "right), or an array of the two on the CPU"
        )
    return tuple(array.as_numpy(v).tolist())


def _is_fp8(x: Any) -> bool:
    """Whether elements have one byte. x may be no array; the look costs under a microsecond."""
    return getattr(getattr(x, "dtype", None), "itemsize", 0) == 1


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


def _check_room(
    length: int, k: Any, offsets: Any, room: int, names: Names | Literal[False]
) -> None:
    """RoomError if keys whose number the host knows are more than a cache has room for; `names` of
    one with pages."""
    new = 0 if k is None or offsets is not None else array.view(k, "k").shape[1]
    if length + new > room:
        holder = f"{names.block_tables} has pages for" if names else "the cache holds"
        more = f" and {new} new keys" if new else ""
        raise RoomError(f"cache_seqlens: got {length}{more}, and {holder} {room}")


def _pages_or_rows(
    names: Names, views: tuple[ArrayView, ArrayView], table: Any, cache_batch_idx: Any
) -> tuple[Names, Any, int]:
    """(names, table, most keys of a request); without pages each row of a cache is a page."""
    if table is not None:
        table = page_table_of(table, names.block_tables, views)
        if cache_batch_idx is not None:
            table = select_rows(table, cache_batch_idx, names.block_tables)
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
