"""vLLM's functions of MiniMax-M3 and QSA, over sparse.select and sparse.attend.

Each has the name and the arguments that vLLM 0.33 calls it by; `integrations.vllm.register` puts
them in place of vLLM's own where it is asked to.

Examples: :doc:`/docs/integrations/vllm`.
"""

from __future__ import annotations

import functools
import sys
from typing import Any, NamedTuple

from ..errors import ArgumentError, UnsupportedError
from ..sparse import attend, select

_BLOCK = 128  # keys of a block of MiniMax-M3
# A page table with a row for each token of q takes at most so many bytes.
_MAX_TABLE = 1 << 28


class Scores(NamedTuple):
    """What `minimax_m3_index_score` was asked: `minimax_m3_index_topk` scores and chooses at once,
    so that no scores are kept. A tuple of the call's arguments, in their order."""

    idx_q: Any
    index_kv_cache: Any
    block_table: Any
    cu_seqlens_q: Any
    seq_lens: Any
    prefix_lens: Any
    max_query_len: int
    max_seq_len: int
    num_kv_heads: int


def minimax_m3_index_score(
    idx_q: Any,
    index_kv_cache: Any,
    block_table: Any,
    cu_seqlens_q: Any,
    seq_lens: Any,
    prefix_lens: Any,
    max_query_len: int,
    max_seq_len: int,
    num_kv_heads: int,
) -> Scores:
    """What `minimax_m3_index_topk` takes for scores; nothing is computed yet.

    Parameters
    ----------
    idx_q
        [tokens, index_heads, head_dim]; index_kv_cache [num_blocks, 128, head_dim].
    block_table
        int32 [batch, max_blocks]; cu_seqlens_q int32 [batch + 1]; seq_lens int32 [batch],
        prefix_lens [batch]: keys of a request, and those ahead of its tokens.
    """
    return Scores(
        idx_q,
        index_kv_cache,
        block_table,
        cu_seqlens_q,
        seq_lens,
        prefix_lens,
        max_query_len,
        max_seq_len,
        num_kv_heads,
    )


def minimax_m3_index_topk(
    score: Scores,
    cu_seqlens_q: Any,
    prefix_lens: Any,
    max_query_len: int,
    topk: int,
    init_blocks: int,
    local_blocks: int,
    out: Any = None,
) -> Any:
    """The blocks of each token and index head: int32 [index_heads, tokens, topk], ascending, -1 at
    the end; a view of `out` [index_heads, at least tokens, topk] if that is given.

    Parameters
    ----------
    score
        Of `minimax_m3_index_score`; scores in memory raise UnsupportedError.
    init_blocks, local_blocks
        So many first and last blocks are always chosen. Errors as `sparse.select`.
    """
    if type(score) is not Scores:
        raise UnsupportedError("score: is an array; wanted what minimax_m3_index_score returns")
    return _select(
        score.idx_q,
        score.index_kv_cache,
        score.block_table,
        score.seq_lens,
        topk,
        (init_blocks, local_blocks),
        out,
        score.cu_seqlens_q,
    )


def minimax_m3_index_decode(
    idx_q: Any,
    index_kv_cache: Any,
    block_table: Any,
    seq_lens: Any,
    max_seq_len: int,
    topk: int,
    init_blocks: int,
    local_blocks: int,
    num_kv_heads: int,
    decode_query_len: int,
    max_decode_query_len: int,
    out: Any = None,
    score_out: Any = None,
) -> Any:
    """The same of requests that have decode_query_len tokens each, one request behind the other.
    score_out, an array for scores, raises UnsupportedError. Errors as `sparse.select`."""
    if score_out is not None:
        raise UnsupportedError("score_out: scores are not kept; pass None")
    _require_tokens(idx_q, seq_lens, decode_query_len)
    forced = init_blocks, local_blocks
    return _select(idx_q, index_kv_cache, block_table, seq_lens, topk, forced, out, None)


def _select(
    q: Any,
    cache: Any,
    table: Any,
    lengths: Any,
    topk: int,
    forced: tuple[int, int],
    out: Any,
    indptr: Any,
) -> Any:
    """[index_heads, tokens, topk] of block maxima; forced: so many first and last blocks."""
    target = None if out is None else out[:, : q.shape[0], :].permute(1, 0, 2)
    lists = select(
        q,
        cache,
        table,
        lengths,
        topk=topk,
        block=_BLOCK,
        first=forced[0],
        last=forced[1],
        indptr=indptr,
        out=target,
    )
    return lists.permute(1, 0, 2)


def minimax_m3_sparse_attn(
    q: Any,
    kv_cache: Any,
    topk_idx: Any,
    block_table: Any,
    cu_seqlens_q: Any,
    seq_lens: Any,
    prefix_lens: Any,
    max_query_len: int,
    num_kv_heads: int,
    sm_scale: float,
    output: Any,
    k_scale: Any = None,
    v_scale: Any = None,
) -> None:
    """Write attention of each token to its blocks of 128 keys to `output`.

    Parameters
    ----------
    q, output
        [tokens, num_heads, head_dim]; kv_cache [num_blocks, num_kv_heads, page, 2 * head_dim], of
        q's dtype or float8_e4m3fn or float8_e5m2 with k_scale and v_scale.
    topk_idx
        int32 [num_kv_heads, tokens, topk], -1 for none. The others as in `minimax_m3_index_score`.
        Errors as `sparse.attend`.
    """
    _attend(
        q,
        kv_cache,
        topk_idx,
        block_table,
        seq_lens,
        cu_seqlens_q,
        sm_scale,
        output,
        (k_scale, v_scale),
    )


def minimax_m3_sparse_attn_decode(
    q: Any,
    kv_cache: Any,
    topk_idx: Any,
    block_table: Any,
    seq_lens: Any,
    num_kv_heads: int,
    sm_scale: float,
    output: Any,
    decode_query_len: int,
    k_scale: Any = None,
    v_scale: Any = None,
) -> None:
    """The same of requests that have decode_query_len tokens each, one request behind the other."""
    _require_tokens(q, seq_lens, decode_query_len)
    scales = k_scale, v_scale
    _attend(q, kv_cache, topk_idx, block_table, seq_lens, None, sm_scale, output, scales)


def _attend(
    q: Any,
    kv_cache: Any,
    topk_idx: Any,
    table: Any,
    lengths: Any,
    indptr: Any,
    sm_scale: float,
    output: Any,
    scales: tuple[Any, Any],
) -> None:
    k_scale, v_scale = (None if x is None else _scale(x) for x in scales)
    attend(
        q,
        kv_cache.split(q.shape[-1], dim=-1),
        topk_idx.permute(1, 0, 2),
        table[: lengths.shape[0]],
        lengths,
        granularity=_BLOCK,
        indptr=indptr,
        sm_scale=sm_scale,
        k_scale=k_scale,
        v_scale=v_scale,
        kv_layout="HND",
        out=output,
    )


def _scale(x: Any) -> Any:
    """A scale of all keys, float32 [1]."""
    if x.numel() != 1:
        raise UnsupportedError(
            f"k_scale, v_scale: shape is {list(x.shape)}; only one scale of all keys is served"
        )
    return x.reshape(1)


def _require_tokens(q: Any, lengths: Any, tokens: int) -> None:
    if q.shape[0] != lengths.shape[0] * tokens:
        raise ArgumentError(
            f"q: has {q.shape[0]} tokens of {lengths.shape[0]} requests; wanted {tokens} of each, "
            "decode_query_len"
        )


def qsa_sparse_paged_attention(
    q: Any,
    k_cache: Any,
    v_cache: Any,
    logical_indices: Any,
    block_table: Any,
    token_to_req: Any,
    use_prefill_config: bool,
    out: Any = None,
    k_scale: float | None = None,
    v_scale: float | None = None,
    *,
    output_gate: Any,
) -> Any:
    """Attention of each token to the keys that its row of logical_indices names, times the sigmoid
    of output_gate.

    Parameters
    ----------
    q
        bfloat16 or float16 [tokens, num_heads, head_dim].
    k_cache, v_cache
        [num_blocks, page, num_kv_heads, head_dim] of q's dtype, or e4m3 (as float8_e4m3fn or uint8)
        with scales.
    logical_indices
        int32 [tokens, width + 1]: positions within the token's request, then -1; the last column is
        their count, which is not read.
    block_table
        int32 [requests, max_blocks].
    token_to_req
        int32 [tokens]: the request of each.
    output_gate
        q's elements in any shape.
    out
        Like q, to write; default a new array.
    k_scale, v_scale
        Of keys and values of 8 bits; default 1.
    use_prefill_config
        Accepted for compatibility.

    Notes
    -----
    Each token reads by a row of the page table of its own; UnsupportedError where these take more
    than 256 MiB. Other errors as `sparse.attend`.
    """
    import torch

    rows, width = q.shape[0], block_table.shape[1]
    if rows * width * 4 > _MAX_TABLE:
        raise UnsupportedError(
            f"block_table: rows of {width} pages for {rows} tokens are too many; pass fewer tokens"
        )
    if k_cache.dtype == torch.uint8:
        k_cache, v_cache = (x.view(torch.float8_e4m3fn) for x in (k_cache, v_cache))
    table = block_table.index_select(0, token_to_req)
    lengths = token_to_req.new_full((rows,), width * k_cache.shape[1])
    is_fp8 = k_cache.dtype != q.dtype
    return attend(
        q,
        (k_cache, v_cache),
        logical_indices[:, :-1],
        table,
        lengths,
        causal=False,
        output_gate=output_gate.view_as(q),
        k_scale=k_scale if is_fp8 else None,
        v_scale=v_scale if is_fp8 else None,
        out=torch.empty_like(q) if out is None else out,
    )


def qsa_select_paged_decode(
    q: Any,
    k_cache: Any,
    page_table: Any,
    visible_blocks: Any,
    token_topk: int,
    compress_ratio: int,
    decode_query_len: int,
    block_indices: Any,
) -> None:
    """Write to block_indices which rows of the index each token attends to: those of the greatest
    sums over heads of max(q · k, 0).

    Parameters
    ----------
    q
        [requests * decode_query_len, index_heads, head_dim]; k_cache [num_blocks, page, 1,
        head_dim] of q's dtype. page_table int32 [requests, max_pages].
    visible_blocks
        int32 [tokens]: rows of the index that each token sees.
    token_topk, compress_ratio
        Keys of a list, and keys that a row stands for.
    block_indices
        int32 [tokens, token_topk // compress_ratio]: ascending, then -1. Errors as `sparse.select`.
    """
    if decode_query_len > 1:
        page_table = page_table.repeat_interleave(decode_query_len, 0)
    select(
        q,
        k_cache,
        page_table[: q.shape[0]],
        visible_blocks * compress_ratio,
        topk=token_topk // compress_ratio,
        block=compress_ratio,
        ratio=compress_ratio,
        score="relu_sum",
        out=block_indices[:, None],
    )


_INDEX = "vllm.models.minimax_m3.common.ops.index_topk"


def _scores_or_theirs(ours: Any, theirs: Any) -> Any:
    """`minimax_m3_index_topk`: where it is refused, vLLM scores and chooses."""

    @functools.wraps(ours)
    def call(score: Any, *args: Any, **named: Any) -> Any:
        try:
            return ours(score, *args, **named)
        except UnsupportedError:
            if type(score) is Scores:
                score = sys.modules[_INDEX].minimax_m3_index_score.of_engine(**score._asdict())
            return theirs(score, *args, **named)

    call.of_engine = theirs  # type: ignore[attr-defined]
    return call


# How ours and vLLM's become one, where that is not substitutes.either.
JOINS = {"minimax_m3_index_topk": _scores_or_theirs}
# By module what is put in place of vLLM's functions there.
FUNCTIONS = {
    _INDEX: (
        minimax_m3_index_decode,
        minimax_m3_index_score,
        minimax_m3_index_topk,
    ),
    "vllm.models.minimax_m3.common.ops.sparse_attn": (
        minimax_m3_sparse_attn,
        minimax_m3_sparse_attn_decode,
    ),
    "vllm.models.qwen4_exp.nvidia.ops.qsa": (qsa_sparse_paged_attention,),
    "vllm.models.qwen4_exp.nvidia.ops.qsa_indexer": (qsa_select_paged_decode,),
}
