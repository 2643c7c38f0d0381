"""FlashInfer's functions of MiniMax Sparse Attention: scores of blocks of 128 keys, the choice of
blocks, and attention to those.

`cupyattn.sparse.select` scores and chooses at once, without a matrix of scores.
"""

from __future__ import annotations

import itertools
import math
from typing import TYPE_CHECKING, Any

import numpy as np

from . import array, reference
from .array import ArrayView
from .array.match import (
    match_array,
    match_output,
    require_contiguous_last,
    require_dtype,
    require_same_dtype,
)
from .core import dtypes, parse
from .core.names import refuse_names
from .core.parse import require_int
from .core.tracing import untraced
from .engine import geometry
from .engine.scores import KeyRows, offsets_of, require_cpu
from .errors import ArgumentError
from .launch.ops import select_topk
from .sparse import attend
from .typing import Array

__all__ = [
    "SUPPORTS_PACKED_KV",
    "msa_proxy_score",
    "msa_sparse_attention",
    "msa_sparse_decode_attention",
    "msa_topk_select",
]

if not TYPE_CHECKING:
    __getattr__ = refuse_names(__name__)

# Keys and values may be halves of one array.
SUPPORTS_PACKED_KV = True
_BLOCK = 128
_QUERY_DTYPES = dtypes.float16, dtypes.bfloat16, dtypes.float32, dtypes.float8_e4m3fn
_INSTEAD = "use sparse.select, or pass CPU arrays"


@untraced
def msa_sparse_decode_attention(
    q: Array,
    k: Array,
    v: Array,
    q2k_indices: Array,
    *,
    page_table: Array | None = None,
    seqused_k: Array | None = None,
    cu_seqlens_k: Array | None = None,
    seqlen_q: int = 1,
    causal: bool = True,
    softmax_scale: float | None = None,
    return_softmax_lse: bool = False,
    k_scale: Any = None,
    v_scale: Any = None,
    k_global_scale: float | None = None,
    v_global_scale: float | None = None,
    q_offset: Any = None,
    partial_dtype: Any = None,
    force_fused: bool | None = None,
) -> Any:
    """`sparse.attend` of requests that have seqlen_q tokens each, over blocks of 128 keys.

    Parameters
    ----------
    q
        [B * seqlen_q, num_qo_heads, head_dim], float16 or bfloat16 (on the CPU float32 too).
    k, v
        [num_pages, num_kv_heads, page_size, head_dim] with `page_table`, or [rows, num_kv_heads,
        head_dim] with `cu_seqlens_k`; of q's dtype or fp8. They may be halves of one array.
    page_table, seqused_k
        int32 [B, most pages] and [B]: the pages and keys of each request.
    cu_seqlens_k
        int32 [B + 1]: the first row of each request, and their number.
    seqlen_q
        Tokens of each request.
    q2k_indices
        int32 [num_kv_heads, B * seqlen_q, topk], -1 for none.
    causal
        Token i of a request sees its keys up to seqlen_k - seqlen_q + i.
    softmax_scale
        Default 1 / sqrt(head_dim).
    v_global_scale
        Multiplies the output.
    return_softmax_lse
        Return the LSE too.
    k_scale, v_scale, k_global_scale, q_offset
        Must be None.
    partial_dtype, force_fused
        Accepted for compatibility.

    Returns
    -------
    result
        out like q, or (out, lse float32 [B * seqlen_q, num_qo_heads], natural logarithms) if
        `return_softmax_lse`.

    Raises
    ------
    CupyAttnError
        Errors as `sparse.attend`.

    Notes
    -----
    Semantics: FlashInfer's function of the same name, which has head dim 128 and pages of 128.

    Examples
    --------
    >>> import numpy as np
    >>> from cupyattn import msa_ops
    >>> pages = np.ones((4, 2, 128, 64), np.float16)  # [pages, key heads, page_size, head dim]
    >>> table, lengths = np.array([[3, 0], [1, -1]], np.int32), np.array([150, 20], np.int32)
    >>> lists = np.array([[[0, 1], [0, -1]]] * 2, np.int32)  # [key heads, tokens, entries]
    >>> q = np.ones((2, 8, 64), np.float16)
    >>> msa_ops.msa_sparse_decode_attention(
    ...     q, pages, pages, lists, page_table=table, seqused_k=lengths
    ... ).shape
    (2, 8, 64)
    """
    num_tokens = require_int(seqlen_q, "seqlen_q")
    lengths = cu_seqlens_k if page_table is None else seqused_k
    if lengths is None:
        raise ArgumentError("seqused_k, cu_seqlens_k: got None; wanted the keys of each request")
    count = max(0, math.prod(array.view(lengths, "lengths").shape) - (page_table is None))
    tokens = math.prod(array.view(q, "q").shape[:1])
    if tokens != count * num_tokens:
        raise ArgumentError(
            f"q: has {tokens} tokens of {count} requests; wanted {num_tokens} of each, seqlen_q"
        )
    return msa_sparse_attention(
        q,
        k,
        v,
        q2k_indices,
        None,
        cu_seqlens_k,
        causal,
        softmax_scale,
        page_table,
        seqused_k,
        return_softmax_lse,
        k_scale,
        v_scale,
        k_global_scale,
        v_global_scale,
        q_offset,
    )


@untraced
def msa_sparse_attention(
    q: Array,
    k: Array,
    v: Array,
    q2k_indices: Array,
    cu_seqlens_q: Array | None,
    cu_seqlens_k: Array | None = None,
    causal: bool = False,
    softmax_scale: float | None = None,
    page_table: Array | None = None,
    seqused_k: Array | None = None,
    return_softmax_lse: bool = False,
    k_scale: Any = None,
    v_scale: Any = None,
    k_global_scale: float | None = None,
    v_global_scale: float | None = None,
    q_offset: Any = None,
    return_temperature_lse: bool = False,
    lse_temperature_scale: float = 1.0,
) -> Any:
    """`msa_sparse_decode_attention` of requests with any number of tokens each.

    Parameters
    ----------
    q
        [tokens, num_qo_heads, head_dim].
    q2k_indices
        int32 [num_kv_heads, tokens, topk].
    cu_seqlens_q
        int32 [B + 1], the first token of each request and their number; None: all have equally
        many.
    causal
        As there, but by default False: a token sees all blocks that it lists.
    return_temperature_lse
        Must be False.
    lse_temperature_scale
        Without effect then.
    other arguments
        The other arguments, results and errors are as there.

    Notes
    -----
    Semantics: FlashInfer's function of the same name.

    Examples
    --------
    >>> import numpy as np
    >>> from cupyattn import msa_ops
    >>> q, k = np.ones((4, 8, 64), np.float16), np.ones((300, 2, 64), np.float16)
    >>> rows, keys = np.array([0, 4], np.int32), np.array([0, 300], np.int32)
    >>> lists = np.tile(np.array([0, 2], np.int32), (2, 4, 1))  # blocks of 128 keys
    >>> msa_ops.msa_sparse_attention(q, k, k, lists, rows, keys, causal=True).shape
    (4, 8, 64)
    """
    _refuse_scales(k_scale, v_scale, k_global_scale, q_offset)
    geometry.refuse("is not supported", return_temperature_lse=return_temperature_lse)
    if page_table is None and cu_seqlens_k is None:
        raise ArgumentError("cu_seqlens_k: got None without page_table; pass one of them")
    has_lse = parse.flag(return_softmax_lse, "return_softmax_lse")
    result: Any = attend(
        q,
        (k, v),
        _by_token(q2k_indices),
        page_table,
        None if page_table is None else seqused_k,
        granularity=_BLOCK,
        indptr=cu_seqlens_q,
        kv_indptr=cu_seqlens_k if page_table is None else None,
        causal=causal,
        sm_scale=softmax_scale,
        v_scale=v_global_scale,
        kv_layout="NHD" if page_table is None else "HND",
        return_lse=has_lse,  # type: ignore[arg-type]
    )
    if not has_lse:
        return result
    vq = array.view(q, "q")
    return result[0], array.deliver(array.scaled(result[1], math.log(2.0)), vq)


def _by_token(q2k_indices: Any) -> Any:
    """Lists [num_kv_heads, tokens, topk] as [tokens, num_kv_heads, topk], of the same memory."""
    name = "q2k_indices"
    lists = array.view(q2k_indices, name)
    if len(lists.shape) != 3:
        raise ArgumentError(
            f"{name}: shape is {list(lists.shape)}; wanted [num_kv_heads, tokens, topk]"
        )
    (groups, tokens, topk), (of_group, of_token, of_entry) = lists.shape, lists.strides
    return array.restride(q2k_indices, name, (tokens, groups, topk), (of_token, of_group, of_entry))


def _refuse_scales(k_scale: Any, v_scale: Any, k_global_scale: Any, q_offset: Any) -> None:
    what = "is of keys in NVFP4, which have no kernel here"
    geometry.refuse(what, k_scale=k_scale, v_scale=v_scale, k_global_scale=k_global_scale)
    geometry.refuse("is not supported: tokens are the last of their requests", q_offset=q_offset)


@untraced
def msa_proxy_score(
    q: Array,
    k: Array,
    cu_seqlens_q: Array,
    cu_seqlens_k: Array | None = None,
    *,
    page_table: Array | None = None,
    seqused_k: Array | None = None,
    causal: bool = True,
    max_seqlen_q: int | None = None,
    max_k_tiles: int | None = None,
    output: Array | None = None,
    reduce_heads: bool = False,
    q_offset: Any = None,
) -> Any:
    """The largest product of each query with the keys of each block of 128, on the CPU alone:
    `sparse.select` keeps no such matrix.

    Parameters
    ----------
    q
        [tokens, num_qo_heads, head_dim].
    k
        [rows, num_kv_heads, head_dim], or pages [num_pages, num_kv_heads, page_size, head_dim], of
        q's dtype or float8_e4m3fn.
    cu_seqlens_q, cu_seqlens_k
        int32 [B + 1], the first token of each request, and of rows the first row, and their number.
    page_table, seqused_k
        Of pages: int32 [B, most pages] and [B], the pages and keys of each request.
    causal
        Token i of a request sees its keys up to seqlen_k - seqlen_q + i.
    max_k_tiles
        Blocks of the output; default those of the longest request.
    output
        The array to write.
    reduce_heads
        The largest of all heads instead of each head's.
    max_seqlen_q
        Accepted for compatibility.
    q_offset
        Must be None.

    Returns
    -------
    result
        float32 [num_qo_heads, max_k_tiles, tokens], or [1, ...] if `reduce_heads`; -inf where a
        token sees no key of a block.

    Raises
    ------
    CupyAttnError
        ArgumentError, and UnsupportedError on a GPU.

    Notes
    -----
    Semantics: FlashInfer's function of the same name.

    Examples
    --------
    >>> import numpy as np
    >>> from cupyattn import msa_ops
    >>> q, k = np.ones((4, 2, 64), np.float16), np.ones((200, 2, 64), np.float16)
    >>> rows, keys = np.array([0, 4], np.int32), np.array([0, 200], np.int32)
    >>> msa_ops.msa_proxy_score(q, k, rows, keys).shape  # [heads, blocks of 128 keys, tokens]
    (2, 2, 4)
    """
    vq = array.view(q, "q")
    match_array(vq, "tokens heads head_dim", _QUERY_DTYPES, "q")
    require_cpu(vq, "q", _INSTEAD)
    geometry.refuse("is not supported: tokens are the last of their requests", q_offset=q_offset)
    keys = KeyRows.of(k, page_table, seqused_k, cu_seqlens_k)
    if keys.dtype is not dtypes.float8_e4m3fn:
        require_same_dtype(keys.k, "k", vq, "q")
    if keys.head_dim != vq.shape[2] or vq.shape[1] % max(1, keys.num_heads):
        raise ArgumentError(
            f"k: has {keys.num_heads} heads of {keys.head_dim} columns; wanted those of q, "
            f"{vq.shape[2]}, and a divisor of its {vq.shape[1]} heads"
        )
    begins = offsets_of(cu_seqlens_q, "cu_seqlens_q", vq.shape[0], keys.num_requests + 1)
    max_blocks = -(-max(keys.lengths, default=0) // _BLOCK)
    num_blocks = max_blocks
    if max_k_tiles is not None:
        num_blocks = require_int(max_k_tiles, "max_k_tiles", max_blocks)
    scores = _scores(vq, keys, begins, num_blocks, parse.flag(causal, "causal"))
    if parse.flag(reduce_heads, "reduce_heads"):
        scores = scores.max(0, keepdims=True)
    return _deliver(scores, output, dtypes.float32, vq)


def _scores(
    vq: ArrayView, keys: KeyRows, begins: list[int], num_blocks: int, is_causal: bool
) -> np.ndarray:
    tokens, heads, _ = vq.shape
    scores = np.full((heads, num_blocks, tokens), -np.inf, np.float32)
    queries, group = array.as_numpy(vq), heads // max(1, keys.num_heads)
    for request, (begin, end) in enumerate(itertools.pairwise(begins)):
        rows = keys.rows(request)
        for token in range(begin, end):
            seen = max(len(rows) - (end - 1 - token if is_causal else 0), 0)
            for head in range(heads):
                own = queries[token, head][None]
                of_blocks = reference.score_blocks(
                    own, rows[:seen, head // group], block_rows=_BLOCK
                )
                scores[head, : of_blocks.shape[1], token] = of_blocks[0]
    return scores


@untraced
def msa_topk_select(
    max_score: Array,
    topk: int,
    num_valid_pages: Any = None,
    output: Array | None = None,
    force_begin_blocks: int = 0,
    force_end_blocks: int = 0,
) -> Any:
    """The blocks of the greatest scores. `sparse.select` scores and chooses at once.

    Parameters
    ----------
    max_score
        float32 [heads, blocks, tokens], of `msa_proxy_score`.
    topk
        Entries of a list.
    num_valid_pages
        So many blocks compete, a number or int32 [tokens]; default all.
    output
        int32 [tokens, heads, topk], the array to write.
    force_begin_blocks, force_end_blocks
        So many first and last blocks of those that compete are in each list.

    Returns
    -------
    result
        int32 [tokens, heads, topk], ascending, then -1; of equal scores the lower block.

    Raises
    ------
    CupyAttnError
        ArgumentError.

    Notes
    -----
    Semantics: FlashInfer's function of the same name, which has lists of 16.

    Examples
    --------
    >>> import numpy as np
    >>> from cupyattn import msa_ops
    >>> scores = np.array([0.1, 0.9, 0.3], np.float32).reshape(1, 3, 1)  # [heads, blocks, tokens]
    >>> msa_ops.msa_topk_select(scores, topk=2)
    array([[[1, 2]]], dtype=int32)
    """
    v = array.view(max_score, "max_score")
    match_array(v, "heads blocks tokens", dtypes.float32, "max_score")
    heads, blocks, tokens = v.shape
    size = require_int(topk, "topk")
    first = require_int(force_begin_blocks, "force_begin_blocks", 0)
    last = require_int(force_end_blocks, "force_end_blocks", 0)
    if first + last > size:
        raise ArgumentError(
            f"force_begin_blocks, force_end_blocks: got {first} and {last}; wanted at most topk, "
            f"{size}, together"
        )
    counts = _valid_blocks(num_valid_pages, blocks, tokens)
    array.same_device(
        max_score=v, num_valid_pages=counts if isinstance(counts, ArrayView) else None
    )
    if v.device.kind != "cpu":
        return _select_on_gpu(v, counts, select_topk.Choice(size, first, last), output)
    each = array.as_numpy(counts) if isinstance(counts, ArrayView) else np.full(tokens, counts)
    lists, scores = np.full((tokens, heads, size), -1, np.int32), array.as_numpy(v)
    for token in range(tokens):
        for head in range(heads):
            own = scores[head, : each[token].clip(0, blocks), token].astype(np.float64)
            chosen = reference.choose_blocks(own, size, first=first, last=last)
            lists[token, head, : chosen.size] = chosen
    return _deliver(lists, output, dtypes.int32, v)


def _select_on_gpu(
    v: ArrayView, counts: ArrayView | int, choice: select_topk.Choice, output: Any
) -> Any:
    """Launch on the stream of the scores [heads, blocks, tokens]."""
    heads, blocks, tokens = v.shape
    shape = tokens, heads, choice.topk
    own = None if output is None else array.view(output, "output")
    match_output(own, shape, dtypes.int32, "output", input=v)
    if own is not None:
        require_contiguous_last(own, "output")
    built = array.empty(shape, dtypes.int32, v) if output is None else output
    target, used = array.view(built, "output"), []
    rows = select_topk.Given()
    if isinstance(counts, ArrayView):
        rows, used = rows._replace(counts=counts.ptr), [counts]
    else:
        blocks = counts
    scores = array.as_strided(
        v, (tokens, heads, blocks), (v.strides[2], v.strides[0], v.strides[1])
    )
    array.acquire(v, target, *used)
    lists = select_topk.Lists(target.ptr, (target.strides[0], target.strides[1]))
    select_topk.launch_given(scores, rows, choice, lists, array.current_stream(v))
    array.release(v, target, *used)
    return array.deliver(built, v) if output is None else output


def _valid_blocks(num_valid_pages: Any, blocks: int, tokens: int) -> ArrayView | int:
    """How many blocks compete, for all tokens or for each."""
    if num_valid_pages is None:
        return blocks
    if isinstance(num_valid_pages, (int, np.integer)):
        return require_int(num_valid_pages, "num_valid_pages", 0, blocks)
    v = array.view(num_valid_pages, "num_valid_pages")
    require_dtype(v, dtypes.int32, "num_valid_pages")
    if tuple(v.shape) != (tokens,):
        raise ArgumentError(
            f"num_valid_pages: shape is {list(v.shape)}; wanted a number, or [{tokens}]"
        )
    require_contiguous_last(v, "num_valid_pages")
    return v


def _deliver(x: np.ndarray, output: Any, dtype: dtypes.DType, like: ArrayView) -> Any:
    """x in the caller's array, or as a new one of its framework."""
    if output is None:
        return array.from_numpy(x, like)
    target = array.view(output, "output")
    match_output(target, x.shape, dtype, "output", input=like)
    array.as_numpy(target)[...] = x
    return output
