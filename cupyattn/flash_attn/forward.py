"""What flash_attn's functions do, whatever the order of their arguments: attention over arrays,
ragged rows and caches, as calls without a plan."""

from __future__ import annotations

import math
from typing import Any, Literal

import numpy as np

from .. import array
from ..array import ArrayView
from ..core import parse
from ..core.key_share import KeyShare
from ..engine import geometry
from ..engine.arrays import NO_MORE, Arrays, MoreArrays
from ..engine.index_arrays import compute, progression
from ..engine.planless_cache import Asked
from ..engine.planless_reference import RoomError
from ..engine.views import Names, next_power_of_two
from ..errors import ArgumentError, UnsupportedError
from .attend import attend, widened_queries
from .batch import MANY_ROWS, Batch, FlashOptions, parse_window
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
from .latent import attend_latent, is_latent
from .rotary import Rotary

# An array without a name of the caller's is one that the call makes. No two have one name.
DENSE = Names(
    q="q",
    k="k",
    v="v",
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
VARLEN = DENSE.but(
    block_tables="block_table",
    kv_lens="seqused_k",
    qo_lens="seqused_q",
    qo_offsets="cu_seqlens_q",
    kv_offsets="cu_seqlens_k",
)
# Up to that keys are never converted ahead of attention.
_FEW_ROWS = 64
VARLEN_BY_OFFSETS = VARLEN.but(kv_lens="cu_seqlens_k")
CACHE = VARLEN.but(k="k_cache", v="v_cache", block_tables="page_table", kv_lens="cache_seqlens")
BLOCKS = CACHE.but(block_tables="block_table")  # FlashAttention-2's name of the table


def dense(arrays: Arrays, qv: Any, options: FlashOptions) -> Any:
    """Requests of one length, as rows of all requests, or each as a page where they are apart."""
    views, vq = view_cache(arrays.k, arrays.v, DENSE), array.view(arrays.q, "q")
    count, seqlen_k = views[0].shape[:2]
    if len(vq.shape) == 4 and vq.shape[0] != count:
        raise ArgumentError(f"k: holds {count} requests and q {vq.shape[0]}; wanted as many")
    asked = Asked(arrays, options, {}, NO_MORE if qv is None else MoreArrays(qv=qv))
    batch = Batch(asked, arrays, options, max_kv_len=seqlen_k, qv=qv)
    # Keys that many rows read may be converted first: that depends on how many there are.
    may_widen = views[0].dtype.is_fp8 and len(vq.shape) == 4 and vq.shape[1] > _FEW_ROWS
    put = batch.take if may_widen else batch.share
    put(kv_lens=progression(count, seqlen_k, 0, vq))
    rows = as_rows(arrays.k, arrays.v, views, DENSE)
    if rows is None:
        put(block_tables=progression(count, 0, 1, vq)[:, None])
    else:
        k, v, apart = rows
        put(k=k, v=v, kv_offsets=progression(count, 0, apart, vq))
    return attend(batch)


def varlen(
    arrays: Arrays,
    more: MoreArrays,
    options: FlashOptions,
    cu_seqlens_k: Any,
    max_seqlen_q: Any,
    max_seqlen_k: Any,
) -> Any:
    """Requests of any lengths, whose rows follow each other."""
    if arrays.qo_offsets is None:
        raise ArgumentError("cu_seqlens_q: got None; wanted offsets of q's rows, [batch + 1]")
    max_q_len, max_kv_len = bound(max_seqlen_q, "max_seqlen_q"), bound(max_seqlen_k, "max_seqlen_k")
    batch = Batch(
        Asked(arrays, options, {}, more),
        arrays,
        options,
        max_q_len,
        max_kv_len,
        qv=more.qv,
        are_causal=more.are_causal,
    )
    if arrays.kv_lens is None or options.has_kv_steps:
        if cu_seqlens_k is None:
            raise ArgumentError("cu_seqlens_k: got None without seqused_k; wanted one of them")
        offsets_of(cu_seqlens_k, "cu_seqlens_k")
    if more.are_causal is not None and not parse.flag(options.causal, "causal"):
        raise ArgumentError(
            "dynamic_causal: says which requests of a causal call are; pass causal=True"
        )
    if options.key_share is not None:
        _require_table(arrays, batch.names)
    if arrays.block_tables is not None:
        views = view_cache(arrays.k, arrays.v, batch.names)
        batch.take(block_tables=page_table_of(arrays.block_tables, "block_table", views))
    elif cu_seqlens_k is None:
        # Keys of each request in a row of their own, of which the first count.
        views = view_cache(arrays.k, arrays.v, batch.names)
        batch.take(block_tables=progression(views[0].shape[0], 0, 1, views[0])[:, None])
        _prefer_rows(batch, views)
    return attend(batch)


def with_kvcache(arrays: Arrays, more: MoreArrays, options: FlashOptions, max_seqlen_q: Any) -> Any:
    """A batch's last tokens over a cache."""
    max_q_len = bound(max_seqlen_q, "max_seqlen_q")
    parse.flag(options.rotary_interleaved, "rotary_interleaved")
    if options.key_share is not None:
        _require_table(arrays, options.names)
        refuse_with_share(
            options.key_share,
            k=more.new_k,
            v=more.new_v,
            rotary_cos=more.rotary_cos,
            rotary_sin=more.rotary_sin,
            rotary_seqlens=more.rotary_begin,
        )
    if more.qv is not None and is_latent(arrays, more, options):
        return attend_latent(arrays, more.qv, options, max_q_len)
    # --- 1. Find the keys ---
    asked, is_paged = Asked(arrays, options, {}, more), arrays.block_tables is not None
    chunk = parse.require_int(options.attention_chunk, "attention_chunk", 0)
    options = options._replace(attention_chunk=chunk)
    views, cache_rows = view_cache(arrays.k, arrays.v, options.names), more.cache_rows
    names, table, room = _pages_or_rows(options.names, views, arrays.block_tables, cache_rows)
    begin = _begin(arrays, more, views[0], table.shape[0], room, names if is_paged else False)
    # --- 2. Rotate, and write new keys ---
    arrays, more, rotation, is_fp8_q = _rotated(arrays, more, options, begin)
    append, kv_lens = None, begin
    if more.new_k is not None or more.new_v is not None:
        append = _append(arrays, more, begin, table, rotation)
        has_padded_rows = arrays.kv_begin is not None and not is_paged
        is_split = chunk > 0 or has_padded_rows
        kv_lens = append.lengths_after(are_read_early=is_split)
    # --- 3. Attend ---
    batch = Batch(
        asked,
        arrays._replace(kv_lens=kv_lens, block_tables=table),
        options._replace(names=names),
        max_q_len=max_q_len,
        # The table says it to the kernels.
        max_kv_len=room if not is_paged or chunk else None,
        is_fp8_q=is_fp8_q,
        append=append,
        qv=more.qv,
    )
    if not is_paged:
        if cache_rows is None:
            batch.share(block_tables=table)
        _prefer_rows(batch, views)
    return attend(batch)


def _begin(
    arrays: Arrays,
    more: MoreArrays,
    vk: ArrayView,
    count: int,
    room: int,
    names: Names | Literal[False],
) -> Any:
    """The keys of each request before the new ones. names: of a cache with pages."""
    lens = arrays.kv_lens
    if lens is None:
        return progression(count, room, 0, vk)
    begin = lengths(lens, count, vk, "cache_seqlens")
    if isinstance(lens, (int, np.integer)):
        _check_room(int(lens), more.new_k, more.new_offsets, room, names)
    return begin


def _rotated(
    arrays: Arrays, more: MoreArrays, options: FlashOptions, begin: Any
) -> tuple[Arrays, MoreArrays, Any, bool]:
    """The arrays with rotated rows, the rotation that is left for new keys on a GPU, and whether
    fp8 rows became rows of 16 bits."""
    if more.rotary_cos is None and more.rotary_sin is None:
        return arrays, more, None, False
    has_window = parse_window(options.window_size) != (-1, -1)
    rotary = Rotary(
        more.rotary_cos,
        more.rotary_sin,
        begin if more.rotary_begin is None else more.rotary_begin,
        parse.flag(options.rotary_interleaved, "rotary_interleaved"),
        bool(options.causal or options.attention_chunk) or has_window,
    )
    q, is_fp8_q = arrays.q, False
    vq = array.view(q, "q")
    if vq.dtype.is_fp8:
        # Rotated numbers of 16 bits keep what fp8 would lose.
        is_fp8_q, q = True, widened_queries(vq, arrays.k, options.names)
    if vq.device.kind == "cuda":
        q, rotation = rotary.on_gpu(q, more.new_k, arrays.qo_offsets)
        return arrays._replace(q=q), more, rotation, is_fp8_q
    q, k = rotary.on_cpu(q, more.new_k, arrays.qo_offsets, more.new_offsets)
    return arrays._replace(q=q), more._replace(new_k=k), None, is_fp8_q


def _append(arrays: Arrays, more: MoreArrays, begin: Any, table: Any, rotation: Any) -> Append:
    """What writes new keys and values."""
    if more.new_k is None or more.new_v is None:
        raise ArgumentError("k, v: got one of the two; wanted both, or none")
    if arrays.kv_lens is None:
        raise ArgumentError("cache_seqlens: got None; wanted where k and v are written to")
    return Append(arrays, more, begin, table, rotation)


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


def _require_table(arrays: Arrays, names: Names) -> None:
    if arrays.block_tables is None:
        raise UnsupportedError(
            f"{names.block_tables}: got None where ranks share the keys; pass this rank's pages of "
            "each request"
        )


def refuse_with_share(share: KeyShare, **arguments: Any) -> None:
    """UnsupportedError for the first argument that is given."""
    for name, x in arguments.items():
        if x is not None:
            raise UnsupportedError(
                f"{name}: is not supported where {share.cp_world_size} ranks share the keys; write "
                "this rank's tokens before the call, as cupyattn.get_share_slots says"
            )


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


def is_fp8(x: Any) -> bool:
    """Whether elements have one byte. x may be no array; the look costs under a microsecond."""
    return getattr(getattr(x, "dtype", None), "itemsize", 0) == 1


def max_rows(max_seqlen_q: Any) -> int | None:
    """An upper bound of a request's rows, as far as it matters."""
    max_q_len = bound(max_seqlen_q, "max_seqlen_q")
    return None if max_q_len is None else min(max(max_q_len, 1), MANY_ROWS)


def bounds(max_seqlen_q: Any, max_seqlen_k: Any) -> tuple[int | None, int | None]:
    """(`max_rows`, an upper bound of a request's keys, rounded up so that growing requests have
    equal signatures)."""
    if type(max_seqlen_q) is type(max_seqlen_k) is int and max_seqlen_q > 0 < max_seqlen_k:
        return min(max_seqlen_q, MANY_ROWS), 1 << (max_seqlen_k - 1).bit_length()
    return max_rows(max_seqlen_q), next_power_of_two(bound(max_seqlen_k, "max_seqlen_k"))


def either(**names: Any) -> Any:
    """What one of two names of an argument has."""
    (first, x), (second, y) = names.items()
    if x is not None and y is not None:
        raise ArgumentError(f"{first}, {second}: are two names of one argument; pass one")
    return y if x is None else x


def bound(x: Any, name: str) -> int | None:
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
    names: Names, views: tuple[ArrayView, ArrayView], table: Any, rows: Any
) -> tuple[Names, Any, int]:
    """(names, table, most keys of a request); without pages each row of a cache is a page."""
    if table is not None:
        table = page_table_of(table, names.block_tables, views)
        if rows is not None:
            table = select_rows(table, rows, names.block_tables)
        return names, table, table.shape[1] * views[0].shape[1]
    num_rows, room, *_ = views[0].shape
    has_own_rows = rows is None
    if has_own_rows:
        rows = progression(num_rows, 0, 1, views[0])
    label = "requests of k_cache" if has_own_rows else "cache_batch_idx"
    return names.but(block_tables=label), vector(rows, "cache_batch_idx")[:, None], room


def _prefer_rows(batch: Batch, views: tuple[ArrayView, ArrayView]) -> None:
    """Take a cache without pages as rows of all requests, the first of each behind its padding,
    where they are all of one array."""
    names, arrays, is_empty = batch.names, batch.arrays, 0 in views[0].shape
    is_plain = arrays.kv_begin is None and not batch.options.attention_chunk
    if not is_empty and (is_plain or views[0].device.kind == "cpu"):
        return
    rows = as_rows(arrays.k, arrays.v, views, names)
    if rows is None:
        return
    first = array.view(arrays.block_tables.reshape(-1), "cache_batch_idx")
    k, v, apart = rows
    batch.take(k=k, v=v, block_tables=None)
    if arrays.kv_begin is None:
        batch.take(kv_offsets=compute(lambda i: i * apart, first))
        return
    pad = array.view(vector(arrays.kv_begin, names.kv_begin), names.kv_begin)
    kv_lens = array.view(arrays.kv_lens, names.kv_lens)
    for v, name in ((pad, names.kv_begin), (kv_lens, names.kv_lens)):
        if v.shape != first.shape or v.dtype.name not in ("int32", "int64"):
            raise ArgumentError(
                f"{name}: {v.dtype} of shape {list(v.shape)}; wanted int32 or int64 "
                f"{list(first.shape)}"
            )
    batch.take(
        kv_offsets=compute(lambda i, p: i * apart + p, first, pad),
        kv_lens=compute(lambda n, p: n - p, kv_lens, pad),
        kv_begin=None,
    )
