"""FlashMLA's functions: latent attention over pages, dense or over lists of keys.

`import cupyattn.flash_mla as flash_mla` serves a program written for FlashMLA.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from . import array
from .array import ArrayView
from .array.match import match_output
from .core import dtypes, parse
from .core.key_share import KeyShare
from .core.names import refuse_names
from .core.parse import require_int
from .core.tracing import untraced
from .engine import geometry
from .engine.arrays import Arrays, make_arrays
from .engine.check_planless import Options
from .engine.gathered_keys import (
    MAX_BYTES,
    Gathered,
    ListedCache,
    ListedCaches,
    has_pages_of_584,
    serve_again,
)
from .engine.index_arrays import fresh_progression, full
from .engine.kept_list import KeptList
from .engine.key_share import WHOLE_LENGTHS, read_share
from .engine.latent_rows import Dims
from .engine.planless_cache import Asked
from .engine.run_planless import run, run_cached
from .engine.views import LATENT_NAMES, are_numbers
from .errors import ArgumentError, UnsupportedError
from .launch.driver import params
from .launch.ops.gather_keys import PLAIN
from .reference.latent_rows import NUM_BYTES, unpack_rows

__all__ = [
    "FlashMLASchedMeta",
    "flash_mla_sparse_fwd",
    "flash_mla_with_kvcache",
    "get_mla_metadata",
]

if not TYPE_CHECKING:
    __getattr__ = refuse_names(__name__)

_DENSE = LATENT_NAMES.but(
    q="q", k="k_cache", block_tables="block_table", kv_lens="cache_seqlens",
    sm_scale="softmax_scale", kv_begin=WHOLE_LENGTHS,
)  # fmt: skip
_SPARSE = _DENSE.but(block_tables="indices", kv_lens="topk_length")
_LSE_FORM = params.LSE_WITHOUT_SINKS | params.LSE_OF_NO_KEYS_IS_INFINITE
_FLAT = _SPARSE.but(k="kv", sm_scale="sm_scale")


class FlashMLASchedMeta:
    """What FlashMLA keeps of a schedule. Calls with one of these may share a schedule, which one of
    them makes on the device: as in FlashMLA their shapes and the values of cache_seqlens, or of
    topk_length, must be the same. Pass another where lengths have changed.

    Calls of other shapes, whose lengths lie elsewhere, or on another stream make a schedule anew,
    and so does each call in a graph that is captured.

    Examples
    --------
    >>> from cupyattn import flash_mla
    >>> metadata, num_splits = flash_mla.get_mla_metadata()
    >>> isinstance(metadata, flash_mla.FlashMLASchedMeta), num_splits
    (True, None)
    """

    def __init__(self) -> None:
        self._list = KeptList()


def get_mla_metadata(*args: Any, **kwargs: Any) -> tuple[Any, Any]:
    """(metadata, num_splits) for flash_mla_with_kvcache.

    Returns
    -------
    result
        Without arguments FlashMLASchedMeta() and None. In the older form, get_mla_metadata(
        cache_seqlens, ...), int32 arrays of its framework, [1, 8] and [B + 1] of zeros, which
        programs may copy about; raises ArgumentError for what is no array.

    Notes
    -----
    Semantics: FlashMLA's function of the same name.

    Examples
    --------
    >>> from cupyattn import flash_mla
    >>> metadata, num_splits = flash_mla.get_mla_metadata()  # once a step
    >>> num_splits is None
    True
    """
    lengths = kwargs.get("cache_seqlens", args[0] if args else None)
    if lengths is None:
        return FlashMLASchedMeta(), None
    v = array.view(lengths, "cache_seqlens")
    zeros = [fresh_progression(n, 0, 0, v) for n in (8, math.prod(v.shape) + 1)]
    return zeros[0].reshape(1, 8), zeros[1]


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
    out: Any = None,
    *,
    cp_world_size: int = 1,
    cp_rank: int = 0,
    cp_tot_seqused_k: Any = None,
    cp_kv_cache_interleave_size: int = 1,
    window_left: int = -1,
) -> tuple[Any, Any]:
    """Latent attention of a batch's last tokens; everything stays on the device.

    Parameters
    ----------
    q
        [b, seqlen_q, num_heads, 576], float16 or bfloat16 (on the CPU float32 too). Of q and
        indices, requests may lie any number of elements apart.
    k_cache
        [num_blocks, page_size, h_kv, 576] of q's dtype or float8_e4m3fn; any page size. More than
        one head of keys is served by a launch for each, which has num_heads / h_kv heads of q; not
        with indices. With indices also DeepSeek-V4's pages of 584 bytes a token, beside q of 512
        columns, all of which are the value: rows of 448 e4m3 and 64 bfloat16, behind all rows of a
        page 8 bytes of each, the exponents of 7 scales.
    is_fp8_kvcache
        Rows may be of 656 bytes: 512 e4m3, 4 float32 scales, 64 bfloat16; on a GPU beside q of
        bfloat16 and, but for two caches, on sm_90 only.
    block_table
        int32 [b, max_blocks].
    cache_seqlens
        int32 [b].
    head_dim_v
        512 (or 256): the latent columns, the first of each row.
    tile_scheduler_metadata, num_splits
        Of get_mla_metadata. Calls that share a FlashMLASchedMeta must have the same lengths: they
        then plan once. Others are not read, and each call plans.
    softmax_scale
        Default 1 / sqrt of the columns of q.
    causal
        Row i sees keys up to i + cache_seqlen - seqlen_q. Not with indices.
    indices
        int32 [b, seqlen_q, topk]: slots of the cache (block * page_size + offset) of each token's
        keys, in place of block_table and cache_seqlens, which may be None. An entry that is no
        slot, negative or beyond the cache, is no key, and nothing is read for it.
    topk_length
        int32 [b], how many entries of a list count; default all.
    attn_sink
        float32 [num_heads]: extra natural-log logits in the denominator, which are not in the LSE.
        -inf: none; +inf: the output is 0.
    extra_k_cache, extra_indices_in_kvcache, extra_topk_length
        A second cache, of the same rows and any page size, and its lists [b, seqlen_q, extra_topk]
        and counts: each token sees the keys of both its lists, in one softmax. On sm_90 rows of 584
        bytes are read as they lie; else a launch first puts the listed keys side by side, in 16
        bits.
    out
        Array to write instead of a new one.
    cp_world_size, cp_rank, cp_kv_cache_interleave_size
        The keys of every request are spread over this many ranks (GPUs); the rank of this call; the
        number of consecutive tokens that go to one rank before the next takes over
        (cupyattn.shares). block_table and cache_seqlens, or indices (`get_share_lists`), are those
        of this rank's keys. The states of all ranks merge, so that a row that sees no key has -inf
        in its LSE. Not with attn_sink.
    cp_tot_seqused_k
        int32 [b]: whole lengths, where causal or with a window.
    window_left
        A row sees no more than so many keys before its own, key i + cache_seqlen - seqlen_q of row
        i; -1: all. Older ones are not read. Not with indices.

    Returns
    -------
    tuple of arrays
        (out [b, seqlen_q, num_heads, head_dim_v], lse float32 [b, num_heads, seqlen_q]), natural
        logarithms; a row that sees no key gives 0 and, as FlashMLA has it, +inf.

    Raises
    ------
    CupyAttnError
        ArgumentError or UnsupportedError before anything is written.

    Notes
    -----
    Semantics: FlashMLA's function of the same name, which takes lists over rows of 656 bytes only,
    and 64 or 128 heads.

    Examples
    --------
    >>> import numpy as np
    >>> from cupyattn import flash_mla
    >>> cache = np.ones((4, 64, 1, 576), np.float16)
    >>> table, lengths = np.array([[3, 0], [1, -1]], np.int32), np.array([100, 20], np.int32)
    >>> q = np.ones((2, 1, 16, 576), np.float16)
    >>> metadata, num_splits = flash_mla.get_mla_metadata()
    >>> o, lse = flash_mla.flash_mla_with_kvcache(
    ...     q, cache, table, lengths, 512, metadata, num_splits, softmax_scale=192**-0.5
    ... )
    >>> o.shape, lse.shape
    ((2, 1, 16, 512), (2, 16, 1))
    """
    is_list = indices is not None
    arrays = make_arrays(
        q=q,
        k=k_cache,
        block_tables=indices if is_list else block_table,
        kv_lens=topk_length if is_list else cache_seqlens,
        out=out,
        sinks=attn_sink,
    )
    share = None
    if type(cp_world_size) is not int or cp_world_size != 1:
        share = read_share(cp_world_size, cp_rank, cp_kv_cache_interleave_size)
    if share is not None:
        geometry.refuse("is not supported where ranks share the keys", attn_sink=attn_sink)
        arrays = arrays._replace(kv_begin=cp_tot_seqused_k)
    options = _CacheOptions(
        key_share=share,
        is_list=is_list,
        head_dim_v=head_dim_v,
        softmax_scale=softmax_scale,
        causal=causal,
        is_fp8_kvcache=is_fp8_kvcache,
        window_left=window_left,
    )
    second = extra_k_cache, extra_indices_in_kvcache, extra_topk_length
    has_second = any(x is not None for x in second)
    if has_second or (is_fp8_kvcache and has_pages_of_584(k_cache)):
        out, lse = _attend_listed(arrays, second, options)
        return out, lse.swapaxes(-1, -2)
    is_plain = (is_list or topk_length is None) and are_numbers(softmax_scale)
    result = None
    if is_plain:
        is_kept = type(tile_scheduler_metadata) is FlashMLASchedMeta
        kept = tile_scheduler_metadata._list if is_kept else None
        result = run_cached(arrays, options, kept=kept)
    if result is None:
        asked = Asked(arrays, options, {}) if is_plain else None
        result = _attend(arrays, topk_length, options, asked)
    out, lse = result
    return out, lse.swapaxes(-1, -2)


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
) -> tuple[Any, Any, Any]:
    """Latent attention of tokens over lists of keys, of a prompt for example.

    Parameters
    ----------
    q
        [s_q, num_heads, 576].
    kv
        [s_kv, 1, 576] of q's dtype.
    indices
        int32 [s_q, 1, topk]: rows of kv; an entry that is none, negative or from s_kv on, is no
        key.
    topk_length
        int32 [s_q], how many entries count, default all.
    sm_scale
        Of the logits.
    d_v
        512 (or 256), the latent columns.
    attn_sink
        As in flash_mla_with_kvcache.
    out
        Array to write instead of a new one.

    Returns
    -------
    tuple of arrays
        (out [s_q, num_heads, d_v], max_logits float32 [s_q, num_heads], lse likewise): the largest
        of a row's scaled logits, and the natural logarithm of the sum of their exponentials, both
        without the sink. A row that sees no key gives 0, -inf and, as FlashMLA has it, +inf.

    Raises
    ------
    CupyAttnError
        Errors as flash_mla_with_kvcache.

    Notes
    -----
    Semantics: FlashMLA's function of the same name.

    Examples
    --------
    >>> import numpy as np
    >>> from cupyattn import flash_mla
    >>> q, kv = np.ones((5, 16, 576), np.float16), np.ones((40, 1, 576), np.float16)
    >>> indices = np.arange(40, dtype=np.int32).reshape(5, 1, 8)  # 8 keys of each token
    >>> o, max_logits, lse = flash_mla.flash_mla_sparse_fwd(q, kv, indices, sm_scale=192**-0.5)
    >>> o.shape, lse.shape
    ((5, 16, 512), (5, 16))
    """
    max_logits = _no_logits(q)
    arrays = make_arrays(
        q=q,
        k=kv,
        block_tables=indices,
        kv_lens=topk_length,
        out=out,
        sinks=attn_sink,
        max_logits=max_logits,
    )
    arguments, asked = _SparseOptions(d_v=d_v, sm_scale=sm_scale), None
    result = run_cached(arrays, arguments) if are_numbers(sm_scale) else None
    if result is None:
        vq = array.view(q, "q")
        options = Options(
            _FLAT,
            dims=_dims(vq.shape[-1], d_v, "d_v"),
            sm_scale=parse.finite(sm_scale, "sm_scale", 1.0),
            is_list=True,
            natural_lse=True,
            lse_form=_LSE_FORM,
            return_lse=True,
        )
        if are_numbers(sm_scale):
            asked = Asked(arrays, arguments, {})
        result = run(arrays, options, asked=asked)
    out, lse = result
    if type(max_logits) is not type(lse):
        max_logits = array.deliver(max_logits, array.view(q, "q"))
    return out, max_logits, lse


def _no_logits(q: Any) -> Any:
    """The largest logits of rows [s_q, num_heads] that have seen no key yet."""
    make = getattr(q, "new_full", None)
    if make is not None and q.dim() == 3:  # torch's, without a look at the tensor
        return make(q.shape[:2], -math.inf, dtype=sys.modules["torch"].float32)
    v = array.view(q, "q")
    if len(v.shape) != 3:
        raise ArgumentError(f"q: shape is {list(v.shape)}; wanted [s_q, num_heads, columns]")
    return full(v.shape[:2], -math.inf, v)


class _CacheOptions(NamedTuple):
    """The options of flash_mla_with_kvcache."""

    is_list: bool
    head_dim_v: Any
    softmax_scale: Any
    causal: Any
    is_fp8_kvcache: Any
    key_share: KeyShare | None
    window_left: Any


class _SparseOptions(NamedTuple):
    """The options of flash_mla_sparse_fwd."""

    d_v: Any
    sm_scale: Any


def _attend(arrays: Arrays, topk_length: Any, arguments: _CacheOptions, asked: Asked | None) -> Any:
    """(out, lse) of flash_mla_with_kvcache, the LSE as [b, seqlen_q, num_heads]."""
    q, k_cache, is_list = arrays.q, arrays.k, arguments.is_list
    vq, vk = array.view(q, "q"), array.view(k_cache, "k_cache")
    if len(vq.shape) != 4:
        raise ArgumentError(
            f"q: shape is {list(vq.shape)}; wanted [b, seqlen_q, num_heads, columns]"
        )
    if topk_length is not None and not is_list:
        raise ArgumentError("topk_length: given without indices; pass both, or none")
    if len(vk.shape) == 4 and vk.shape[2] > 1:
        if is_list or arrays.sinks is not None:
            raise UnsupportedError(
                f"k_cache: has {vk.shape[2]} heads; with indices or attn_sink wanted one"
            )
        return _attend_heads(arrays, arguments)
    arrays, options = _options(arrays, arguments)
    if is_list:
        if arguments.causal:
            raise ArgumentError("causal: got True with indices, which name all keys; pass False")
        options = options._replace(
            names=_SPARSE, q_len=1, is_list=True, request_tokens=options.q_len
        )
    return run(arrays, options, asked=asked)


def _options(arrays: Arrays, arguments: _CacheOptions) -> tuple[Arrays, Options]:
    """A dense call: its arrays, with rows that kernels read, and its options."""
    vq = array.view(arrays.q, "q")
    _, q_len, _, columns = vq.shape
    dims = _dims(columns, arguments.head_dim_v, "head_dim_v")
    sm_scale = parse.finite(
        arguments.softmax_scale, "softmax_scale", 1.0 / math.sqrt(max(1, columns))
    )
    o_dtype, key_scales = vq.dtype.name, ""
    if parse.flag(arguments.is_fp8_kvcache, "is_fp8_kvcache"):
        q, k_cache, key_scales = _with_scales(arrays.q, arrays.k, vq)
        arrays = arrays._replace(q=q, k=k_cache)
    is_causal = parse.flag(arguments.causal, "causal")
    return arrays, Options(
        _DENSE,
        dims=dims,
        sm_scale=sm_scale,
        q_axes=(4,),
        q_len=q_len,
        causal=is_causal and q_len > 1,
        natural_lse=True,
        lse_form=_LSE_FORM if arguments.key_share is None else params.LSE_WITHOUT_SINKS,
        return_lse=True,
        o_dtype=o_dtype,
        key_scales=key_scales,
        key_share=arguments.key_share,
        window_left=arguments.window_left,
    )


_FIRST_NAMES = "k_cache", "indices", "topk_length"
_SECOND_NAMES = "extra_k_cache", "extra_indices_in_kvcache", "extra_topk_length"


class _GatheredOptions(NamedTuple):
    """The options of flash_mla_with_kvcache over keys that lie side by side."""

    head_dim_v: Any
    softmax_scale: Any
    o_dtype: str
    key_share: KeyShare | None


def _attend_listed(
    arrays: Arrays, second: tuple[Any, Any, Any], arguments: _CacheOptions
) -> tuple[Any, Any]:
    """(out, lse) of lists over two caches, or one that attention cannot read as it is."""
    first = arrays.k, arrays.block_tables, arrays.kv_lens
    inputs = arrays.q, *first, *second, arrays.sinks, arrays.out
    is_plain = are_numbers(arguments.softmax_scale)
    served = serve_again(inputs, arguments) if is_plain else None
    if isinstance(served, Gathered):
        return _attend_gathered(arrays, served, arguments)
    if served is not None:
        return served
    listed = _check_listed(arrays, second, arguments)
    vq, has_scales = (
        array.view(arrays.q, "q"),
        parse.flag(arguments.is_fp8_kvcache, "is_fp8_kvcache"),
    )
    count, tokens, heads, columns = vq.shape
    latent = _dims(columns, arguments.head_dim_v, "head_dim_v").latent
    caches = ListedCaches(arrays.q, listed, has_scales, latent)
    if arrays.out is not None:
        vout, shape = array.view(arrays.out, "out"), (count, tokens, heads, latent)
        match_output(vout, shape, vq.dtype, "out", q=vq, **caches.inputs)
    sm_scale = parse.finite(arguments.softmax_scale, "softmax_scale", max(1, columns) ** -0.5)
    lse_form = _LSE_FORM if arguments.key_share is None else params.LSE_WITHOUT_SINKS
    attended = caches.attend_rows(arrays.sinks, arrays.out, sm_scale, lse_form)
    num_parts = -(-count * tokens * caches.num_bytes // MAX_BYTES)
    if attended is None and num_parts > 1 and vq.device.kind != "cpu":
        return _attend_in_parts(arrays, listed, caches, arguments)
    if attended is None:
        result, rows = _attend_gathered(arrays, caches.gather(arrays.q), arguments), None
    else:
        result, rows = attended
    if is_plain:
        caches.keep(inputs, arguments, rows)
    return result


def _check_listed(
    arrays: Arrays, second: tuple[Any, Any, Any], arguments: _CacheOptions
) -> list[ListedCache]:
    """The caches of a call, whose options are those of lists."""
    extra_k, extra_indices, extra_lens = second
    if not arguments.is_list:
        name = "extra_k_cache" if extra_k is not None else "k_cache"
        raise ArgumentError(f"{name}: is read by lists alone; pass indices too")
    if parse.flag(arguments.causal, "causal"):
        raise ArgumentError("causal: got True with indices, which name all keys; pass False")
    if parse.window(arguments.window_left, "window_left") != -1:
        raise ArgumentError(
            f"window_left: got {arguments.window_left} with indices that name all keys of a token; "
            "pass -1, and lists of the keys in its window"
        )
    parse.finite(arguments.softmax_scale, "softmax_scale", 1.0)
    if (extra_k is None) != (extra_indices is None) or (extra_k is None and extra_lens is not None):
        raise ArgumentError(
            "extra_k_cache, extra_indices_in_kvcache, extra_topk_length: got some of them; pass "
            "the first two with or without the third, or none"
        )
    vq = array.view(arrays.q, "q")
    if len(vq.shape) != 4:
        raise ArgumentError(
            f"q: shape is {list(vq.shape)}; wanted [b, seqlen_q, num_heads, columns]"
        )
    listed = [ListedCache(arrays.k, arrays.block_tables, arrays.kv_lens, _FIRST_NAMES)]
    if extra_k is not None:
        listed.append(ListedCache(extra_k, extra_indices, extra_lens, _SECOND_NAMES))
    return listed


def _attend_in_parts(
    arrays: Arrays, listed: list[ListedCache], caches: ListedCaches, arguments: _CacheOptions
) -> tuple[Any, Any]:
    """(out, lse) of a call whose keys side by side take more than MAX_BYTES."""
    vq = caches.q
    count, tokens, heads, _ = vq.shape
    latent, out = caches.latent, arrays.out
    if out is None:
        out = array.empty((count, tokens, heads, latent), vq.dtype, vq)
    lse = array.empty((count, tokens, heads), dtypes.float32, vq)
    for part in _parts(count, tokens, max(1, MAX_BYTES // caches.num_bytes)):
        of_requests = part[0]
        own = [
            x._replace(
                entries=x.entries[part], lens=None if x.lens is None else x.lens[of_requests]
            )
            for x in listed
        ]
        of_part = arrays._replace(q=arrays.q[part], out=out[part], lse=lse[part])
        of_caches = ListedCaches(of_part.q, own, caches.form != PLAIN, latent)
        _attend_gathered(of_part, of_caches.gather(of_part.q), arguments)
    return array.deliver(out, vq), array.deliver(lse, vq)


def _parts(count: int, tokens: int, limit: int) -> Iterator[tuple[slice, slice]]:
    """Requests, and tokens of each, that are at most so many together."""
    requests, of_each = max(1, limit // tokens), min(tokens, limit)
    for first in range(0, count, requests):
        for token in range(0, tokens, of_each):
            yield slice(first, first + requests), slice(token, token + of_each)


def _attend_gathered(arrays: Arrays, gathered: Gathered, arguments: _CacheOptions) -> Any:
    """(out, lse) of one part."""
    arrays = arrays._replace(
        q=gathered.q,
        q_rope=gathered.q_rope,
        k=gathered.keys,
        block_tables=gathered.entries,
        kv_lens=None,
    )
    asked = None
    if are_numbers(arguments.softmax_scale):
        key = _GatheredOptions(
            arguments.head_dim_v,
            arguments.softmax_scale,
            gathered.dtype,
            arguments.key_share,
        )
        result = run_cached(arrays, key)
        if result is not None:
            return result
        asked = Asked(arrays, key, {})
    arrays, options = _options(arrays, arguments._replace(is_fp8_kvcache=False))
    options = options._replace(
        names=_SPARSE,
        q_len=1,
        is_list=True,
        request_tokens=options.q_len,
        o_dtype=gathered.dtype,
        dims=_dims(gathered.columns, arguments.head_dim_v, "head_dim_v"),
    )
    return run(arrays, options, asked=asked)


def _attend_heads(arrays: Arrays, arguments: _CacheOptions) -> tuple[Any, Any]:
    """A dense call with several heads of keys, each of which serves its share of q's."""
    vq, vk = array.view(arrays.q, "q"), array.view(arrays.k, "k_cache")
    (count, tokens, heads, _), heads_kv = vq.shape, vk.shape[2]
    if heads % heads_kv:
        raise ArgumentError(
            f"q: {heads} heads with {heads_kv} heads of k_cache; wanted a multiple of them"
        )
    latent = _dims(vq.shape[-1], arguments.head_dim_v, "head_dim_v").latent
    out = array.empty((count, tokens, heads, latent), vq.dtype, vq)
    lse = array.empty((count, tokens, heads), dtypes.float32, vq)
    group = heads // heads_kv
    for head in range(heads_kv):
        of_q = slice(head * group, (head + 1) * group)
        of_head = arrays._replace(
            q=arrays.q[:, :, of_q],
            k=arrays.k[:, :, head : head + 1],
            out=out[:, :, of_q],
            lse=lse[:, :, of_q],
        )
        run(*_options(of_head, arguments))
    return array.deliver(out, vq), array.deliver(lse, vq)


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
