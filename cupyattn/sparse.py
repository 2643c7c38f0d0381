"""Sparse attention: block-sparse masks, and lists of the keys that each token attends to."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, NamedTuple

from . import array
from .core import overloads, parse
from .core.names import refuse_names
from .core.parse import require_int
from .core.tracing import untraced
from .engine import listed_latent
from .engine.arrays import Arrays, make_arrays
from .engine.check_planless import Options
from .engine.index_arrays import progression
from .engine.key_lists import KeyLists, require_granularity
from .engine.kv_cache import is_pair
from .engine.planless_cache import Asked
from .engine.run_planless import run, run_cached
from .engine.select import SelectArrays, SelectOptions
from .engine.select import run as run_select
from .engine.views import Names, number_or_array
from .errors import ArgumentError, UnsupportedError
from .typing import Array, Pages, Scale
from .wrappers.block_sparse import BlockSparseAttentionWrapper
from .wrappers.variable_block_sparse import VariableBlockSparseAttentionWrapper

__all__ = [
    "BlockSparseAttentionWrapper",
    "VariableBlockSparseAttentionWrapper",
    "attend",
    "select",
]

if not TYPE_CHECKING:
    __getattr__ = refuse_names(__name__)

_NAMES = Names(
    "q",
    "cache[0]",
    "cache[1]",
    block_tables="table",
    kv_lens="lengths",
    qo_offsets="indptr",
    kv_offsets="kv_indptr",
    sm_scale="sm_scale",
    k_scale="k_scale",
    output_scale="v_scale",
    q_len="q",
    o_dtype="o_dtype",
)
_ONE_CACHE = _NAMES.but(k="cache", v="cache[:, 1]")


@untraced
@overloads.attend
def attend(
    q: Array,
    cache: Pages,
    lists: Array,
    table: Array | None = None,
    lengths: Array | None = None,
    *,
    granularity: int = 1,
    indptr: Array | None = None,
    kv_indptr: Array | None = None,
    causal: bool = True,
    window: int = 0,
    sinks: Array | None = None,
    output_gate: Array | None = None,
    sm_scale: float | None = None,
    logits_soft_cap: float | None = None,
    k_scale: Scale = None,
    v_scale: Scale = None,
    head_dim_v: int | None = None,
    kv_layout: str = "NHD",
    o_dtype: Any = None,
    out: Array | None = None,
    lse: Array | None = None,
    return_lse: bool = False,
) -> Any:
    """Attention of each token to the blocks of keys that a list of its own names. Lists, lengths
    and tables stay where they are, on the device, so that a CUDA graph may capture the call.

    Parameters
    ----------
    q
        [tokens, num_qo_heads, head_dim], float16 or bfloat16 (on the CPU float32 too): the tokens
        of one request after those of another.
    cache
        Keys and values, of q's dtype, float8_e4m3fn or float8_e5m2, in one of three forms: pages,
        with `table`: a pair (K, V) of [num_pages, page_size, num_kv_heads, head_dim], or heads
        before slots with kv_layout "HND"; or one array [num_pages, 2, ...] of both. Any page size
        and strides; V may have a head dim of its own. Rows, with `kv_indptr`: a pair of [rows,
        num_kv_heads, head_dim]. Requests of one size: a pair of [requests, keys, num_kv_heads,
        head_dim], or [keys, num_kv_heads, head_dim] of one request. With `head_dim_v` one array of
        latent rows, see there.
    lists
        int32 [tokens, groups, entries], in which each entry is the number of a block of
        `granularity` keys, counted within the request of the token. groups is 1 (or there is no
        such axis), num_kv_heads or num_qo_heads: the heads that share a list are neighbours.
        Negative entries, and blocks that the token does not see, are no keys, wherever they stand;
        of a block that the last key cuts, the keys up to that count. A block is attended as often
        as it is listed: list it once. `select` makes such lists.
    table
        int32 [requests, most pages], pages of each request in the order of its keys. What no list
        names is not read: other entries, pages and keys may hold anything.
    lengths
        int32 [requests], keys of each request, those of its new tokens among them; needed with
        `table`, else all rows of a request by default.
    granularity
        Keys of a block, a power of two from 1 to 256.
    indptr
        int32 [requests + 1], the first token of each request and their number. By default all
        requests have equally many tokens. Rows of q past the last offset are left alone.
    kv_indptr
        int32 [requests + 1], the first row of each request's keys and their number.
    causal
        A token sees no key behind its own, for tokens are the last of their requests: token i of n
        sees lengths - (n - 1 - i) keys. False: all of them.
    window
        The number of last keys that a token sees besides those of its list. Each counts once, even
        if it is listed too.
    sinks
        float32 [num_qo_heads]: extra natural-log logits in the denominator and in the LSE.
    output_gate
        [tokens, num_qo_heads] or [tokens, num_qo_heads, head_dim], q's dtype or float32: the output
        is multiplied by its sigmoid.
    sm_scale
        Multiplies the logits; default 1 / sqrt(head_dim).
    logits_soft_cap
        c > 0 makes c * tanh(logit / c) of them.
    k_scale, v_scale
        What fp8 keys and values are multiplied by: numbers, or float32 [num_kv_heads] or [requests,
        num_kv_heads].
    head_dim_v
        The latent columns of a key, 512 or 256, which are its value too: cache is pages of latent
        rows, [num_pages, page_size, head_dim] with an axis of one head or none, all heads share a
        list, and a launch first finds the slots of its keys. Scales are numbers then, gates and
        caps are not served, and rows of q past the last offset become 0.
    o_dtype
        float16, bfloat16, float32, float8_e4m3fn or float8_e5m2; default that of `out`, or q.
    out, lse
        Arrays to write instead of new ones; lse float32 [tokens, num_qo_heads], base 2.
    kv_layout
        "NHD", or "HND": heads before slots, of pages.
    return_lse
        Return the LSE too.

    Returns
    -------
    out
        [tokens, num_qo_heads, head_dim], or (out, lse) if `return_lse`, a state that merges with
        others (`merge_state`). A token without keys gives 0 and -inf, with a sink 0 and the sink.

    Raises
    ------
    CupyAttnError
        ArgumentError for shapes, dtypes and values that do not fit, and UnsupportedError for what
        no kernel serves, before anything is launched. On the CPU lengths and listed pages are
        checked.

    Notes
    -----
    Semantics of lists: those of cuDNN's sparse attention (`indices` and `index_granularity`).

    Examples
    --------
    >>> import numpy as np
    >>> rng = np.random.default_rng(0)
    >>> q = rng.standard_normal((2, 4, 64)).astype(np.float16)  # a token each of two requests
    >>> cache = rng.standard_normal((6, 2, 16, 2, 64)).astype(np.float16)  # six pages of 16 tokens
    >>> table = np.array([[0, 1, 2], [3, 4, 5]], np.int32)
    >>> lists = np.array([[[0, 3], [1, -1]], [[4, 5], [0, 2]]], np.int32)  # of each KV head
    >>> lengths = np.array([40, 44], np.int32)
    >>> attend(q, cache, lists, table, lengths, granularity=8).shape
    (2, 4, 64)
    """
    is_latent = head_dim_v is not None
    k, v = (cache, None) if is_latent else _keys_and_values(cache, has_table=table is not None)
    k_number, scale_k = number_or_array(k_scale)
    v_number, scale_v = number_or_array(v_scale)
    arrays = make_arrays(
        q=q,
        k=k,
        v=v,
        block_tables=table,
        kv_lens=lengths,
        out=out,
        lse=lse,
        qo_offsets=indptr,
        kv_offsets=kv_indptr,
        sinks=sinks,
        scale_k=scale_k,
        scale_v=scale_v,
        output_gate=output_gate,
        lists=lists,
    )
    options = _Options(
        granularity=granularity,
        window=window,
        causal=causal,
        sm_scale=sm_scale,
        k_scale=k_number,
        v_scale=v_number,
        logits_soft_cap=logits_soft_cap,
        kv_layout=kv_layout,
        o_dtype=o_dtype,
        return_lse=return_lse,
    )
    if is_latent:
        return _attend_latent(arrays, options, head_dim_v)
    if table is not None or kv_indptr is not None:
        return run(arrays, options)
    result = run_cached(arrays, options)
    return _attend_dense(arrays, options) if result is None else result


class _Options(NamedTuple):
    """The options of `attend`."""

    granularity: Any
    window: Any
    causal: Any
    sm_scale: Any
    k_scale: Any
    v_scale: Any
    logits_soft_cap: Any
    kv_layout: Any
    o_dtype: Any
    return_lse: Any

    def resolve(self, arrays: Arrays) -> Options:
        if arrays.block_tables is not None and arrays.kv_offsets is not None:
            raise ArgumentError("kv_indptr: given beside table; pass one of them")
        vq = array.view(arrays.q, "q")
        columns = vq.shape[-1] if vq.shape else 1
        sm_scale = parse.finite(self.sm_scale, "sm_scale", 1.0 / math.sqrt(max(1, columns)))
        return Options(
            _ONE_CACHE if arrays.v is None else _NAMES,
            kv_layout=self.kv_layout,
            q_len=0 if arrays.qo_offsets is not None else _tokens_of_each(arrays),
            sm_scale=sm_scale * parse.finite(self.k_scale, "k_scale", 1.0),
            output_scale=self.v_scale,
            o_dtype=self.o_dtype,
            return_lse=self.return_lse,
            logits_soft_cap=self.logits_soft_cap,
            scales_by_head=True,
            key_lists=KeyLists(
                require_granularity(self.granularity),
                require_int(self.window, "window", 0),
                parse.flag(self.causal, "causal"),
            ),
        )


def _attend_latent(arrays: Arrays, options: _Options, head_dim_v: Any) -> Any:
    """Pages of latent rows, whose first columns are the values."""
    if is_pair(arrays.k) or arrays.block_tables is None or arrays.kv_offsets is not None:
        raise ArgumentError(
            "head_dim_v: given without one array of pages and their table; pass all three, or None"
        )
    if arrays.kv_lens is None:
        raise ArgumentError("lengths: got None beside table; wanted the keys of each request")
    if parse.soft_cap(options.logits_soft_cap):
        raise UnsupportedError("logits_soft_cap: is not served beside head_dim_v; pass None")
    columns = (array.view(arrays.q, "q").shape or (1,))[-1]
    sm_scale = parse.finite(options.sm_scale, "sm_scale", 1.0 / math.sqrt(max(1, columns)))
    form = KeyLists(
        require_granularity(options.granularity),
        require_int(options.window, "window", 0),
        parse.flag(options.causal, "causal"),
    )
    own = listed_latent.LatentOptions(
        head_dim_v,
        sm_scale * parse.finite(options.k_scale, "k_scale", 1.0),
        options.v_scale,
        options.o_dtype,
        options.return_lse,
    )
    return listed_latent.attend(arrays, own, form)


def _keys_and_values(cache: Any, has_table: bool) -> tuple[Any, Any]:
    """K and V of a cache; V is None where one array has both."""
    if not is_pair(cache):
        if not has_table:
            raise ArgumentError("cache: got one array without table; wanted a pair (K, V)")
        return cache, None
    if len(cache) != 2:
        raise ArgumentError(f"cache: got {len(cache)} arrays; wanted one, or a pair (K, V)")
    return cache[0], cache[1]


def _tokens_of_each(arrays: Arrays) -> int:
    """How many tokens each request has, where all have equally many."""
    if arrays.block_tables is not None:
        shape, extra = array.view(arrays.block_tables, "table").shape, 0
    elif arrays.kv_lens is not None:
        shape, extra = array.view(arrays.kv_lens, "lengths").shape, 0
    else:
        shape, extra = array.view(arrays.kv_offsets, "kv_indptr").shape, 1
    count = max(0, math.prod(shape[:1]) - extra)
    tokens = math.prod(array.view(arrays.q, "q").shape[:1])
    if tokens % max(1, count):
        raise ArgumentError(
            f"q: has {tokens} tokens of {count} requests; wanted equally many of each, or indptr"
        )
    return tokens // max(1, count)


def _attend_dense(arrays: Arrays, options: _Options) -> Any:
    """Requests of one size: each is a page of its own."""
    views = [array.view(x, name) for x, name in zip(arrays[1:3], _NAMES_OF_KV, strict=True)]
    pages: dict[str, Any] = {}
    for role, x, v, name in zip("kv", arrays[1:3], views, _NAMES_OF_KV, strict=True):
        if len(v.shape) not in (3, 4):
            raise ArgumentError(
                f"{name}: shape is {list(v.shape)}; wanted [requests, keys, num_kv_heads, head_dim]"
                ", without the first axis for one request, or table or kv_indptr besides"
            )
        if len(v.shape) == 3:
            pages[role] = array.restride(x, name, (1, *v.shape), (0, *v.strides))
    vq = array.view(arrays.q, "q")
    count, room = (1, *views[0].shape[-3:-2]) if len(views[0].shape) == 3 else views[0].shape[:2]
    pages["block_tables"] = progression(count, 0, 1, vq)[:, None]
    if arrays.kv_lens is None:
        pages["kv_lens"] = progression(count, room, 0, vq)
    asked = Asked(arrays, options, pages)
    return run(arrays._replace(**pages), options, asked=asked)


_NAMES_OF_KV = "cache[0]", "cache[1]"


@untraced
def select(
    q_index: Array,
    index_cache: Array,
    table: Array | None = None,
    lengths: Array | None = None,
    *,
    topk: int,
    block: int = 128,
    score: str = "max",
    weights: Array | None = None,
    groups: int | None = None,
    first: int = 0,
    last: int = 0,
    ratio: int = 1,
    tail: bool = False,
    causal: bool = True,
    indptr: Array | None = None,
    kv_indptr: Array | None = None,
    candidates: Array | None = None,
    candidate_block: int | None = None,
    sm_scale: float | None = None,
    k_scale: Scale = None,
    k_scales: Array | None = None,
    out: Array | None = None,
    values: Array | None = None,
    return_values: bool = False,
) -> Any:
    """The blocks of keys that each token attends to: those of the greatest scores of an index,
    which has a key of one head for every key or few keys. `attend` takes such lists.

    Parameters
    ----------
    q_index
        [tokens, index_heads, head_dim], float16, bfloat16 or float8_e4m3fn (on the CPU float32
        too): the tokens of one request after those of another.
    index_cache
        Rows of q_index's dtype or float8_e4m3fn: pages [num_pages, page_size, head_dim] with
        `table`, [rows, head_dim] of all requests with `kv_indptr`, or [requests, rows, head_dim].
        An axis of one head behind page_size is allowed. Pages may be DeepGEMM's, uint8 [num_pages,
        page_size, 1, head_dim + 4]: the e4m3 rows of a page, and behind them a float32 scale of
        each.
    table
        int32 [requests, most pages], the pages of each request's index rows.
    lengths
        int32 [requests], keys (not index rows) of each request, those of its new tokens among them;
        needed with `table`, else as many as there is room for.
    topk
        Entries of a list, 1 to 2048.
    block
        Keys of the block that an entry names, a power of two from 1 to 256.
    score
        Of a block, by products of index queries and rows times sm_scale: "max": the largest of the
        block's rows and the group's heads. "relu_sum": of each row the sum over the group's heads
        of weight * max(product, 0); of a block its largest row. "softmax": the sum over the block's
        rows and the group's heads of weight * probability, where a head's probabilities are over
        all rows that the token sees.
    weights
        float32 or q_index's dtype [tokens, index_heads]; default 1. Not with "max".
    groups
        Lists of a token, for each of which neighbouring heads vote; default index_heads for "max",
        else 1.
    first, last
        So many first and last blocks that the token sees are in its list whatever their scores, and
        count in topk.
    ratio
        Keys that an index row stands for. A token that sees n keys sees n // ratio rows.
    tail
        Where block equals ratio, above 1: one more entry, for the last block where the token sees
        only some of its keys, so that no row stands for it.
    causal
        Token i of a request's n sees lengths - (n - 1 - i) keys. False: all of them.
    indptr
        int32 [requests + 1], the first token of each request and their number. By default all
        requests have equally many tokens.
    kv_indptr
        int32 [requests + 1], the first index row of each request and their number.
    candidates
        int32 [tokens, groups or 1, entries], -1 for none, each once: blocks that alone compete.
    candidate_block
        Keys of such a block, a multiple of `block`; by default the same.
    sm_scale
        Multiplies the products; default 1, for "softmax" 1 / sqrt(head_dim).
    k_scale, k_scales
        Of fp8 rows: a number or float32 [1], and float32 [num_pages, page_size] (or like
        index_cache without its last axis), one for each row.
    out, values
        Arrays to write instead of new ones: int32 and float32 [tokens, groups, topk].
    return_values
        Return the scores too.

    Returns
    -------
    result
        int32 [tokens, groups, topk], with a tail topk + 1: block numbers within the token's
        request, ascending, then -1. Which blocks is exact: the greatest scores, of equal ones the
        lower block; NaN counts as -inf. All blocks that the token sees compete. Tokens of no
        request have -1. With `return_values` (lists, values), float32: the scores of what is
        listed, -inf beside -1 and the tail.

    Raises
    ------
    CupyAttnError
        ArgumentError and UnsupportedError, before anything is launched.

    Notes
    -----
    On a GPU a call is two launches: scores of all blocks, then the greatest of each list; three for
    "softmax". Kernels have up to 64 heads, but for "softmax" in groups of 1, 2, 4 or multiples of
    8; head dims of whole 32 up to 256, over fp8 rows 64 and 128; rows on 16-byte boundaries. What
    is wrong in lengths, tables or candidates goes unnoticed there. A call like an earlier one, but
    for addresses, is not checked again.

    Examples
    --------
    >>> import numpy as np
    >>> rng = np.random.default_rng(0)
    >>> q_index = rng.standard_normal((2, 4, 32)).astype(np.float16)  # a token each of two requests
    >>> index_cache = rng.standard_normal((8, 16, 32)).astype(np.float16)  # eight pages of 16 rows
    >>> table = np.array([[0, 1, 2, 3], [4, 5, 6, 7]], np.int32)
    >>> lengths = np.array([60, 9], np.int32)
    >>> lists = select(q_index, index_cache, table, lengths, topk=3, block=8, last=1)
    >>> lists.shape
    (2, 4, 3)
    >>> lists[1, 0].tolist()  # nine keys are two blocks
    [0, 1, -1]
    """
    k_number, k_array = number_or_array(k_scale)
    arrays = SelectArrays(
        q=q_index,
        index_cache=index_cache,
        table=table,
        lengths=lengths,
        weights=weights,
        indptr=indptr,
        kv_indptr=kv_indptr,
        candidates=candidates,
        k_scale=k_array,
        k_scales=k_scales,
        out=out,
        values=values,
    )
    options = SelectOptions(
        topk=topk,
        block=block,
        score=score,
        groups=groups,
        first=first,
        last=last,
        ratio=ratio,
        tail=tail,
        causal=causal,
        candidate_block=candidate_block,
        sm_scale=sm_scale,
        k_scale=k_number,
        return_values=return_values,
    )
    return run_select(arrays, options)
