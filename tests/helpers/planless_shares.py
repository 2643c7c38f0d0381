"""Calls without a plan over the keys that several ranks share: each rank's, by every door, and what
their states merge to. Cases are those of key_shares."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

import cupyattn
from cupyattn import flash_attn, flash_mla, paging, reference

from . import key_shares
from .cases import pick
from .key_shares import LATENT, Case, Put, Rank, Whole

# By door: kinds of cases that it serves.
DOORS = {
    "varlen": ("decode", "verify", "prefill"),
    "kvcache": ("decode", "verify"),
    "trtllm": ("decode", "verify", "tree"),
    "trtllm rows": ("verify", "prefill"),
    "mla": ("mla",),
    "mla rows": ("mla",),
    "flash_mla": ("mla",),
    "latent kvcache": ("mla",),
    "lists": ("mla",),
}
_LN2 = math.log(2.0)
_UNIFORM = "kvcache", "trtllm", "mla", "flash_mla", "latent kvcache", "lists"


def random_case(seed: int, door: str) -> Case:
    """The same case for the same seed."""
    kinds = DOORS[door]
    case = key_shares.random_case(seed, kinds[seed % len(kinds)])
    rng = np.random.default_rng((seed, 48))
    if door in _UNIFORM:
        q_len = 1 if case.kind == "decode" else pick(rng, (1, 2, 3, 5))
        case = replace(case, qo_len=(q_len,) * len(case.kv_len))
    if door.startswith("trtllm"):
        case = replace(case, soft_cap=0.0, window_right=0)
    elif case.kind != "mla":
        case = replace(case, layout="NHD")
    if case.kind != "mla" and min(case.kv_len) < max(case.qo_len):
        case = replace(case, kv_len=tuple(map(max, case.kv_len, case.qo_len)))
    return case


def answer(door: str, whole: Whole, rank: Rank, put: Put, make_out: Callable) -> Any:
    """(o, lse in base 2) [rows, heads] of one rank's call."""
    case, share = whole.case, rank.arguments
    count, page = len(case.kv_len), case.page_size
    table = paging.csr_to_table(rank.indptr, rank.indices, max_pages=_room(whole, page), fill=-7)
    kind = (np.int32, np.int64)[case.seed % 2]
    tables, own = put(table.astype(np.int32)), put(rank.kv_len.astype(kind))
    lengths = put(np.array(case.kv_len, kind))
    offsets = put(np.concatenate([[0], np.cumsum(case.qo_len)]).astype(np.int32))
    q_len, heads = max((0, *case.qo_len)), case.heads[0]
    longest = int(rank.kv_len.max(initial=1))
    by_request = (count, q_len, heads, whole.q.shape[-1])
    if case.kind == "mla":
        of_pages = put(rank.k[:, :, 0])
        return _latent(door, whole, of_pages, tables, own, lengths, offsets, share, put)
    k, v = put(rank.k), put(rank.v)
    if door.startswith("trtllm"):
        before = put(np.array(case.kv_len, kind) - np.array(case.qo_len, kind))
        world = {"cp_world": share["cp_world_size"], "cp_rank": share["cp_rank"]}
        world["cp_kv_cache_interleave_size"] = share["cp_kv_cache_interleave_size"]
        rows: dict[str, Any] = {"q_len_per_req": q_len}
        if door == "trtllm rows":
            rows = {"cum_seq_lens_q": offsets, "max_q_len": q_len, "q_len_per_req": None}
        if whole.tree is not None:
            rows["mask"] = put(whole.tree.reshape(count, q_len, q_len))
        return cupyattn.trtllm_batch_decode_with_kv_cache(
            put(whole.q),
            (k, v),
            None,
            tables,
            own,
            longest,
            case.dim**-0.5,
            1.0,
            case.window_left,
            out_dtype="float32",
            kv_layout=case.layout,
            return_lse=True,
            causal_seqlens_kv_global=before,
            **rows,
            **world,
        )
    right = case.window_right if case.window_right else -1
    named = {"causal": not case.window_right, "window_size": (case.window_left, right)}
    named |= {"softcap": case.soft_cap, "return_softmax_lse": True, **share}
    named["cp_tot_seqused_k"] = lengths
    out = make_out((*whole.q.shape[:-1], case.dim))
    if door == "varlen":
        o, lse = flash_attn.flash_attn_varlen_func(
            put(whole.q), k, v, offsets, max_seqlen_q=q_len, max_seqlen_k=longest, seqused_k=own,
            block_table=tables, out=out, **named,
        )  # fmt: skip
        return o, lse.swapaxes(0, 1) / _LN2
    o, lse = flash_attn.flash_attn_with_kvcache(
        put(whole.q.reshape(by_request)), k, v, cache_seqlens=own, block_table=tables,
        out=out.reshape(*by_request[:-1], case.dim), **named,
    )  # fmt: skip
    return o.reshape(out.shape), lse.swapaxes(1, 2).reshape(whole.q.shape[:2]) / _LN2


def _room(whole: Whole, page: int) -> int:
    return -(-max(1, *whole.case.kv_len) // page)


def _latent(
    door: str,
    whole: Whole,
    pages: Any,
    tables: Any,
    own: Any,
    lengths: Any,
    offsets: Any,
    share: dict[str, int],
    put: Put,
) -> Any:
    case = whole.case
    count, q_len, heads = len(case.kv_len), max(case.qo_len), case.heads[0]
    rows, columns = len(whole.q), sum(LATENT)
    q = whole.q.reshape(count, q_len, heads, columns) if door != "mla rows" else whole.q
    world = {"cp_world": share["cp_world_size"], "cp_rank": share["cp_rank"]}
    world["cp_kv_cache_interleave_size"] = share["cp_kv_cache_interleave_size"]
    if door == "latent kvcache":
        latent, rope = slice(0, LATENT[0]), slice(LATENT[0], None)
        o, lse = flash_attn.flash_attn_with_kvcache(
            put(q[..., rope]), pages[:, :, None, rope], pages[:, :, None, latent],
            cache_seqlens=own, block_table=tables, softmax_scale=0.07, causal=True,
            qv=put(q[..., latent]), return_softmax_lse=True, cp_tot_seqused_k=lengths, **share,
        )  # fmt: skip
        return o.reshape(rows, heads, -1), lse.swapaxes(1, 2).reshape(rows, heads) / _LN2
    if door == "flash_mla":
        o, lse = flash_mla.flash_mla_with_kvcache(
            put(q), pages[:, :, None], tables, own, LATENT[0], softmax_scale=0.07, causal=True,
            cp_tot_seqused_k=lengths, **share,
        )  # fmt: skip
        return o.reshape(rows, heads, -1), lse.swapaxes(1, 2).reshape(rows, heads) / _LN2
    if door == "lists":
        return _of_lists(whole, q, pages, tables, share, put)
    base, rows_of = ("basee", _LN2) if case.seed % 3 == 0 else (None, 1.0), {}
    if door == "mla rows":
        rows_of = {"cum_seq_lens_q": offsets, "max_q_len": q_len}
    o, lse = cupyattn.trtllm_batch_decode_with_kv_cache_mla(
        put(q), pages, None, 128, *LATENT, tables, own, 300, bmm1_scale=0.07, return_lse=True,
        enable_dcp=True, causal_seqlens_kv_global=lengths, return_lse_base=base[0], **rows_of,
        **world,
    )  # fmt: skip
    return o.reshape(rows, heads, -1), lse.reshape(rows, heads) / base[1]


def lists_of(whole: Whole) -> np.ndarray:
    """For each row some keys of its request that it sees, by position, -1 behind them."""
    case, rng = whole.case, np.random.default_rng((whole.case.seed, 49))
    q_len, top_k = case.qo_len[0], 64
    lists = np.full((len(case.kv_len), q_len, top_k), -1)
    for request, kv_len in enumerate(case.kv_len):
        for row in range(q_len):
            seen = rng.permutation(max(kv_len - q_len + row + 1, 0))[:top_k]
            lists[request, row, : len(seen)] = seen
    return lists


def _of_lists(
    whole: Whole, q: np.ndarray, pages: Any, tables: Any, share: dict[str, int], put: Put
) -> Any:
    lists = lists_of(whole).astype(np.int32)
    own, counts = cupyattn.get_share_lists(
        put(lists), **share, block_tables=tables, page_size=whole.case.page_size
    )
    top_k, heads = lists.shape[-1], whole.case.heads[0]
    world = {"cp_world": share["cp_world_size"], "cp_rank": share["cp_rank"]}
    o, lse = cupyattn.trtllm_batch_decode_with_kv_cache_mla(
        put(q), pages, None, 128, *LATENT, own, None, 300, top_k, bmm1_scale=0.07, return_lse=True,
        sparse_mla_top_k_lens=counts.reshape(-1), enable_dcp=True, **world,
    )  # fmt: skip
    return o.reshape(-1, heads, LATENT[0]), lse.reshape(-1, heads)


def expected(door: str, whole: Whole) -> tuple[np.ndarray, np.ndarray]:
    """The answer over whole requests, in float64."""
    if door != "lists":
        return whole.expected()
    parts = []
    for request, lists in enumerate(lists_of(whole)):
        q = whole.q[whole.rows(request)]
        for row, keys in enumerate(lists):
            keys = keys[keys >= 0]
            k, v = whole.keys[request][keys], whole.values[request][keys]
            parts.append(reference.attention(q[row : row + 1], k, v, sm_scale=0.07))
    o, lse = (np.concatenate([part[i] for part in parts]) for i in (0, 1))
    return o, lse


def merged(
    door: str, case: Case, put: Put, get: Callable[[Any], np.ndarray], make_out: Callable
) -> tuple[np.ndarray, np.ndarray]:
    """(o, lse): the states of all ranks, merged in rank order by the reference. Each call is made
    twice, for the same bits."""
    whole, states = Whole.of(case), []
    for share in case.shares:
        rank = Rank.of(whole, share)
        first, again = (
            [np.array(get(x)) for x in answer(door, whole, rank, put, make_out)] for _ in "12"
        )
        for x, y in zip(first, again, strict=True):
            np.testing.assert_array_equal(x, y)
        if case.world == 1:  # FlashMLA's LSE of no keys
            first[1][np.isposinf(first[1])] = -np.inf
        states.append(first)
    o, lse = (np.stack([state[i] for state in states], axis=1) for i in (0, 1))
    return reference.merge_states(o.astype(np.float64), lse.astype(np.float64))
