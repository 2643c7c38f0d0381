"""SGLang's functions of MiniMax-M3, over sparse.select and sparse.attend.

Each has the name and the arguments that SGLang 0.5.23's `minimax_sparse_prefill` and
`minimax_sparse_decode` call it by; `integrations.sglang.register` puts them in place of SGLang's
own where it is asked to.

Examples: :doc:`/docs/integrations/sglang`.
"""

from __future__ import annotations

from typing import Any

from ..errors import UnsupportedError
from ..sparse import attend, select


def flash_decode_with_gqa_share_sparse(
    q: Any,
    sink: Any,
    k_cache: Any,
    v_cache: Any,
    req_to_token: Any,
    seq_lens: Any,
    slot_ids: Any,
    block_size: int,
    topk_idx: Any,
    sm_scale: float | None = None,
    use_tma: bool = True,
    page_size: int = 0,
    q_scale: float | None = None,
    k_scale: float | None = None,
    v_scale: float | None = None,
    hisparse_slots: Any = None,
) -> Any:
    """Attention of one token of each request to the blocks of keys of its lists.

    Parameters
    ----------
    q
        [batch, num_q_heads, head_dim]; k_cache, v_cache [slots, num_kv_heads, head_dim] of q's
        dtype or fp8 with scales. req_to_token int32 [requests, keys]: the slot of each key;
        slot_ids [batch]: the rows of it that the batch has; seq_lens [batch].
    topk_idx
        int32 [num_kv_heads, batch, topk]: blocks of block_size keys, -1 for none.
    page_size
        So many keys of a request lie side by side, from multiples of it on.
    sink, hisparse_slots
        Raise UnsupportedError; use_tma is accepted for compatibility.

    Returns
    -------
    result
        An array like q. Other errors as `sparse.attend`.
    """
    _refuse(sink=sink, hisparse_slots=hisparse_slots)
    size = max(1, page_size)
    return attend(
        q,
        (_pages(k_cache, size), _pages(v_cache, size)),
        topk_idx.permute(1, 0, 2),
        _table(req_to_token, slot_ids, size),
        _int32(seq_lens),
        granularity=block_size,
        **_scales(q, sm_scale, q_scale, k_scale, v_scale),
    )


def flash_prefill_with_gqa_share_sparse(
    q: Any,
    k_cache: Any,
    v_cache: Any,
    sink: Any,
    req_to_token: Any,
    slot_ids: Any,
    topk_idx: Any,
    block_size_q: int,
    block_size_k: int,
    cu_seqlens: Any,
    seq_lens: Any,
    prefix_lens: Any,
    max_seqlen_q: int,
    sm_scale: float | None = None,
    use_tma: bool = True,
    cu_seqblocks_q: Any = None,
    max_seqblock_q: int | None = None,
    q_scale: float | None = None,
    k_scale: float | None = None,
    v_scale: float | None = None,
    loc_mapping: Any = None,
) -> Any:
    """The same of the tokens of prompts, [tokens, num_q_heads, head_dim], which are the last keys
    of their requests; cu_seqlens int32 [batch + 1] is where those of each begin. block_size_q,
    tokens that share a list, must be 1, and loc_mapping None."""
    _refuse(sink=sink, loc_mapping=loc_mapping)
    _require_own_lists(block_size_q)
    return attend(
        q,
        (_pages(k_cache, 1), _pages(v_cache, 1)),
        topk_idx.permute(1, 0, 2),
        _table(req_to_token, slot_ids, 1),
        _int32(seq_lens),
        granularity=block_size_k,
        indptr=cu_seqlens,
        **_scales(q, sm_scale, q_scale, k_scale, v_scale),
    )


def flash_decode_with_topk_idx(
    q: Any,
    sink: Any,
    k_cache: Any,
    v_cache: Any,
    req_to_token: Any,
    seq_lens: Any,
    max_seqlen: int,
    slot_ids: Any,
    block_size: int,
    topk: int,
    init_blocks: int,
    local_blocks: int,
    sm_scale: float | None = None,
    use_tma: bool = True,
    score_type: str = "max",
    disable_index_value: bool = False,
    use_dense_main_attn: bool = False,
    page_size: int = 1,
    q_scale: float | None = None,
    k_scale: float | None = None,
    v_scale: float | None = None,
) -> tuple[None, Any, None]:
    """(None, blocks int32 [index_heads, batch, topk], None): the blocks of the greatest products of
    each index query and row, ascending, then -1.

    Parameters
    ----------
    q
        [batch, index_heads, head_dim]; k_cache [slots, 1, head_dim]. The others as in
        `flash_decode_with_gqa_share_sparse`.
    init_blocks, local_blocks
        So many first and last blocks are always chosen. Only disable_index_value with score_type
        "max", and no dense main attention, are served; others raise UnsupportedError. Other errors
        as `sparse.select`.
    """
    _require_scores(sink, score_type, disable_index_value, sm_scale)
    if use_dense_main_attn:
        raise UnsupportedError("use_dense_main_attn: got True; page tables are not made here")
    keys = k_cache, req_to_token, slot_ids, seq_lens
    blocks = {"block": block_size, "first": init_blocks, "last": local_blocks}
    return None, _chosen(q, keys, page_size, topk=topk, **blocks), None


def flash_prefill_with_topk_index(
    q: Any,
    k_cache: Any,
    v_cache: Any,
    sink: Any,
    req_to_token: Any,
    slot_ids: Any,
    cu_seqlens: Any,
    seq_lens: Any,
    prefix_lens: Any,
    max_seqlen_q: int,
    max_seqlen_k: int,
    block_size_q: int,
    block_size_k: int,
    topk: int,
    init_blocks: int = 1,
    local_blocks: int = 2,
    sm_scale: float | None = None,
    use_tma: bool = False,
    score_type: str = "max",
    disable_index_value: bool = False,
    cu_seqblocks_q: Any = None,
    max_seqblock_q: int | None = None,
    all_seqblock_q: int | None = None,
    q_scale: float | None = None,
    k_scale: float | None = None,
    v_scale: float | None = None,
    page_size: int = 1,
) -> tuple[None, Any]:
    """(None, blocks int32 [index_heads, tokens, topk]) of the tokens of prompts, as
    `flash_decode_with_topk_idx`."""
    _require_scores(sink, score_type, disable_index_value, sm_scale)
    _require_own_lists(block_size_q)
    keys = k_cache, req_to_token, slot_ids, seq_lens
    blocks = {"block": block_size_k, "first": init_blocks, "last": local_blocks}
    return None, _chosen(q, keys, page_size, topk=topk, indptr=cu_seqlens, **blocks)


def _chosen(q: Any, keys: tuple[Any, ...], page_size: int, **options: Any) -> Any:
    """Blocks [index_heads, rows, topk]. keys: (cache, table of slots, its rows, lengths)."""
    cache, req_to_token, slot_ids, seq_lens = keys
    size = max(1, page_size)
    table = _table(req_to_token, slot_ids, size)
    lists = select(q, _pages(cache, size), table, _int32(seq_lens), **options)
    return lists.permute(1, 0, 2)


def _refuse(**options: Any) -> None:
    for name, x in options.items():
        if x is not None:
            raise UnsupportedError(f"{name}: is not served here; pass None")


def _require_own_lists(block_size_q: int) -> None:
    if block_size_q != 1:
        raise UnsupportedError(f"block_size_q: got {block_size_q}; only lists of one token, 1")


def _require_scores(
    sink: Any, score_type: str, disable_index_value: bool, sm_scale: float | None
) -> None:
    """Block maxima without an output of their own, in whose order a scale changes nothing."""
    _refuse(sink=sink)
    is_scale = sm_scale is None or sm_scale > 0.0
    if score_type != "max" or not disable_index_value or not is_scale:
        raise UnsupportedError(
            f"score_type: got {score_type!r} with disable_index_value={disable_index_value}; only "
            "'max' without an index value and with a positive scale is served"
        )


def _pages(cache: Any, size: int) -> Any:
    """[pages, size, heads, head_dim] of [slots, heads, head_dim]."""
    count = cache.shape[0] // size
    return cache[: count * size].unflatten(0, (count, size))


def _table(req_to_token: Any, slot_ids: Any, size: int) -> Any:
    """int32 [batch, pages] of the slots of keys."""
    first = req_to_token[:, ::size].index_select(0, slot_ids)
    return _int32(first if size == 1 else first // size)


def _int32(x: Any) -> Any:
    import torch

    return x if x.dtype == torch.int32 else x.to(torch.int32)


def _scales(
    q: Any,
    sm_scale: float | None,
    q_scale: float | None,
    k_scale: float | None,
    v_scale: float | None,
) -> dict[str, Any]:
    if q_scale not in (None, 1.0):
        raise UnsupportedError(f"q_scale: got {q_scale}; queries of 8 bits are not served here")
    scale = q.shape[-1] ** -0.5 if sm_scale is None else sm_scale
    return {"sm_scale": scale, "k_scale": k_scale, "v_scale": v_scale}


_KERNELS = "sglang.kernels.ops.attention.minimax_sparse"
# By module what is put in place of SGLang's functions there.
FUNCTIONS = {
    f"{_KERNELS}.decode.topk_sparse": (flash_decode_with_gqa_share_sparse,),
    f"{_KERNELS}.decode.flash_with_topk_idx": (flash_decode_with_topk_idx,),
    f"{_KERNELS}.prefill.topk_sparse": (flash_prefill_with_gqa_share_sparse,),
    f"{_KERNELS}.prefill.flash_with_topk_idx": (flash_prefill_with_topk_index,),
}
