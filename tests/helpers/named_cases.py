"""Calls of sparse attention by the names of engines and libraries, drawn by seeds, beside float64.

    case = named_cases.draw("vllm m3 decode", seed)
    case.check(case.run(lambda x: put(x, "cuda")))

Names are those of NAMES. What no list names, and no token sees, is poison: NaN in keys, absurd
pages in tables. Lists have entries that are no block anywhere in them, blocks twice, and blocks
that the last key cuts; requests may share pages, and have fewer keys than tokens.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
import torch

from cupyattn import dsa_indexer, flash_mla, msa_ops
from cupyattn.integrations import sglang_sparse, vllm_sparse

ABSURD = 2147480000
BLOCK = 128
DTYPES = {"float16": np.dtype(np.float16), "bfloat16": np.dtype(ml_dtypes.bfloat16)}
E4M3 = np.dtype(ml_dtypes.float8_e4m3fn)
TOLERANCE = {"float16": 2e-3, "bfloat16": 1.6e-2}
Put = Callable[[np.ndarray], Any]


def put(x: np.ndarray, device: str = "cpu") -> torch.Tensor:
    """A tensor of the device."""
    bits = torch.from_numpy(np.ascontiguousarray(x).view(f"i{x.dtype.itemsize}").copy())
    return bits.to(device).view(getattr(torch, x.dtype.name))


def get(x: torch.Tensor) -> np.ndarray:
    """The elements of a tensor in float64, or of its integers."""
    return np.asarray(x.detach().cpu().numpy() if not x.is_floating_point() else x.double().cpu())


@dataclass
class NamedCase:
    """A call. `call` makes it with arrays placed by `put`, and gives the arrays that it made."""

    name: str
    seed: int
    call: Callable[[Put], list[Any]]
    check: Callable[[list[np.ndarray]], None]

    def run(self, place: Put) -> list[np.ndarray]:
        return [get(x) for x in self.call(place)]

    def __str__(self) -> str:
        return f"{self.name}, seed {self.seed}"


class Keys:
    """Keys of requests in slots, K and V float64 [len, heads, dim] as rows of `dtype`.

    slots    of each request's keys; `pool` of so many, whole pages of `page`
    table    the pages of each request, absurd behind its keys
    """

    def __init__(self, rng: np.random.Generator, lens: np.ndarray, page: int, width: int) -> None:
        count = len(lens)
        self.lens, self.page, self.pool = lens, page, (count * width + 2) * page
        self.table = np.full((count, width), ABSURD, np.int32)
        pages = rng.permutation(count * width + 2)
        shares = count > 1 and rng.random() < 0.3
        self.slots: list[np.ndarray] = []
        for request, length in enumerate(lens.tolist()):
            used = -(-length // page)
            self.table[request, :used] = pages[request * width : request * width + used]
            if shares and request and used and lens[request - 1]:
                self.table[request, 0] = self.table[request - 1, 0]
            at = np.arange(length)
            self.slots.append(self.table[request][at // page].astype(np.int64) * page + at % page)

    def values(
        self, rng: np.random.Generator, shape: tuple[int, ...], dtype: np.dtype, seen: Any = None
    ) -> np.ndarray:
        """[slots, *shape], NaN where nothing is seen: `seen` [request] of keys, default all."""
        rows = np.full((self.pool, *shape), np.nan)
        for request, slots in enumerate(self.slots):
            own = slots if seen is None else slots[seen[request]]
            rows[own] = rng.standard_normal((len(own), *shape))
        return rows.astype(dtype)


def _requests(
    rng: np.random.Generator, most: int, tokens: int, is_even: bool
) -> tuple[np.ndarray, np.ndarray]:
    """(keys, tokens) of requests; a token's keys may be none."""
    count = int(rng.integers(1, 4))
    lens = rng.integers(0, int(rng.choice([3, 90, most])), size=count)
    each = np.full(count, rng.integers(1, tokens)) if is_even else rng.integers(0, tokens, count)
    return lens, each


def _seen(lens: np.ndarray, each: np.ndarray, causal: bool = True) -> list[tuple[int, int]]:
    """Of each token its request, and the keys that it sees."""
    return [
        (request, max(int(lens[request]) - (int(n) - 1 - i if causal else 0), 0))
        for request, n in enumerate(each.tolist())
        for i in range(n)
    ]


def _list(rng: np.random.Generator, blocks: int, entries: int) -> np.ndarray:
    """Blocks anywhere, some twice, and entries that are none."""
    own = rng.choice((-1, -1, -9, -(2**31)), size=entries)
    wanted = min(round(float(rng.choice([0.0, 0.4, 1.0])) * entries), blocks)
    places = rng.permutation(entries)
    own[places[:wanted]] = rng.permutation(blocks)[:wanted]
    rest = places[wanted:]
    if rest.size and rng.random() < 0.4:
        own[rest[0]] = int(rng.choice([blocks, blocks + 3, 2**31 - 1]))
    if wanted and rest.size > 1 and rng.random() < 0.4:
        own[rest[1]] = own[places[0]]
    return own.astype(np.int32)


def _keys_of(entries: np.ndarray, granularity: int, end: int) -> np.ndarray:
    """The keys that a list names, each as often as it does."""
    blocks = entries[(entries >= 0) & (entries.astype(np.int64) * granularity < end)]
    keys = blocks.astype(np.int64)[:, None] * granularity + np.arange(granularity)
    return keys[keys < end]


def attend(
    q: np.ndarray, k: np.ndarray, v: np.ndarray, scale: float
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(o [heads, columns], natural LSE, largest logits) of a token over one head of keys."""
    if not len(k):
        return np.zeros((len(q), v.shape[-1])), *(np.full(len(q), -np.inf) for _ in "lm")
    logits = q.astype(np.float64) @ k.astype(np.float64).T * scale
    largest = logits.max(1)
    weights = np.exp(logits - largest[:, None])
    total = weights.sum(1)
    return weights @ v.astype(np.float64) / total[:, None], largest + np.log(total), largest


# --- attention to blocks and keys ---


@dataclass
class Attention:
    """A call over lists [tokens, groups, entries]: what all names of attention draw."""

    keys: Keys
    lists: np.ndarray
    tokens: list[tuple[int, int]]
    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    each: np.ndarray
    granularity: int
    sm_scale: float
    scales: tuple[float, float] = (1.0, 1.0)

    @property
    def indptr(self) -> np.ndarray:
        return np.append(0, np.cumsum(self.each)).astype(np.int32)

    def expected(self) -> tuple[np.ndarray, np.ndarray]:
        """(o, natural LSE)."""
        o, lse = np.zeros((*self.q.shape[:2], self.v.shape[-1])), np.zeros(self.q.shape[:2])
        groups, heads = self.lists.shape[1], self.q.shape[1]
        kv_heads = self.k.shape[1]
        for token, (request, end) in enumerate(self.tokens):
            for head in range(heads):
                entries = self.lists[token, head * groups // heads]
                slots = self.keys.slots[request][_keys_of(entries, self.granularity, end)]
                own, scale = head * kv_heads // heads, self.sm_scale * self.scales[0]
                one = attend(
                    self.q[token, head][None], self.k[slots, own], self.v[slots, own], scale
                )
                o[token, head], lse[token, head] = one[0][0] * self.scales[1], one[1][0]
        return o, lse

    def check(self, answer: list[np.ndarray], gate: np.ndarray | None = None) -> None:
        want, want_lse = self.expected()
        if gate is not None:
            want /= 1.0 + np.exp(-gate.astype(np.float64).reshape(want.shape))
        near = TOLERANCE[self.q.dtype.name] * max(1.0, self.scales[1])
        np.testing.assert_allclose(answer[0], want, rtol=near, atol=near)
        if len(answer) > 1:
            np.testing.assert_allclose(answer[1], want_lse, rtol=1e-3, atol=1e-3 + near / 4)


def _attention(
    rng: np.random.Generator, granularity: int, page: int, *, is_even: bool, causal: bool = True
) -> Attention:
    lens, each = _requests(rng, 700, 4, is_even)
    dim, kv_heads = int(rng.choice([64, 128])), int(rng.choice([1, 2, 4]))
    heads = kv_heads * int(rng.choice([1, 4, 8, 16]))
    width = max(1, -(-int(lens.max(initial=0)) // page)) + int(rng.integers(0, 2))
    keys, tokens = Keys(rng, lens, page, width), _seen(lens, each, causal)
    dtype = DTYPES[str(rng.choice([*DTYPES]))]
    entries = int(rng.choice([1, 4, 16])) if granularity > 1 else int(rng.choice([1, 40, 200]))
    lists = np.zeros((len(tokens), kv_heads, entries), np.int32)
    seen: list[list[np.ndarray]] = [[np.zeros(0, np.int64)] for _ in lens]
    for token, (request, end) in enumerate(tokens):
        for group in range(kv_heads):
            own = _list(rng, -(-int(lens[request]) // granularity), entries)
            lists[token, group] = own
            seen[request].append(_keys_of(own, granularity, end))
    is_fp8 = bool(rng.random() < 0.3)
    named = [np.unique(np.concatenate(x)) for x in seen]
    k, v = (keys.values(rng, (kv_heads, dim), E4M3 if is_fp8 else dtype, named) for _ in range(2))
    q = rng.standard_normal((len(tokens), heads, dim)).astype(dtype)
    scale = float(rng.choice([dim**-0.5, 0.11]))
    scales = (0.5, 1.5) if is_fp8 else (1.0, 1.0)
    return Attention(keys, lists, tokens, q, k, v, each, granularity, scale, scales)


def _as_pages(x: np.ndarray, page: int) -> np.ndarray:
    """[pages, page, ...] of slots."""
    return x.reshape(-1, page, *x.shape[1:])


def _m3_attention(rng: np.random.Generator, is_decode: bool) -> tuple[Any, Any]:
    a = _attention(rng, BLOCK, int(rng.choice([16, 128])), is_even=is_decode)
    joined = np.concatenate([_as_pages(x, a.keys.page).swapaxes(1, 2) for x in (a.k, a.v)], axis=-1)
    lens, kv_heads = a.keys.lens.astype(np.int32), a.k.shape[1]

    def call(place: Put) -> list[Any]:
        q, out = place(a.q), place(np.full_like(a.q, np.nan))
        first = q, place(joined), place(a.lists.swapaxes(0, 1)), place(a.keys.table)
        scales = [None if x == 1.0 else place(np.array([x], np.float32)) for x in a.scales]
        if is_decode:
            vllm_sparse.minimax_m3_sparse_attn_decode(
                *first, place(lens), kv_heads, a.sm_scale, out, int(a.each[0]), *scales
            )
        else:
            prefix = place((lens - a.each).astype(np.int32))
            vllm_sparse.minimax_m3_sparse_attn(
                *first,
                place(a.indptr),
                place(lens),
                prefix,
                int(a.each.max(initial=0)),
                kv_heads,
                a.sm_scale,
                out,
                *scales,
            )
        return [out]

    return call, a.check


def _qsa_attention(rng: np.random.Generator) -> tuple[Any, Any]:
    a = _attention(rng, 1, int(rng.choice([1, 16, 64])), is_even=False, causal=False)
    a.lists, entries = a.lists[:, :1], a.lists.shape[2]
    a.sm_scale = a.q.shape[2] ** -0.5
    used = [x.size for x in a.keys.slots]
    for token, (request, _) in enumerate(a.tokens):  # its reader does not know the length
        own = a.lists[token, 0]
        own[(own >= used[request]) & (own < 2**31 - 1)] = -1
    counts = np.full((len(a.tokens), 1), entries, np.int32)
    owners, has_bytes = np.array([x for x, _ in a.tokens], np.int64), bool(rng.random() < 0.5)
    gate = rng.standard_normal((len(a.tokens), a.q.shape[1] * a.q.shape[2])).astype(a.q.dtype)

    def call(place: Put) -> list[Any]:
        k, v = (place(_as_pages(x, a.keys.page)) for x in (a.k, a.v))
        if k.dtype == torch.float8_e4m3fn and has_bytes:
            k, v = k.view(torch.uint8), v.view(torch.uint8)
        lists = place(np.concatenate([a.lists[:, 0], counts], axis=1))
        out = vllm_sparse.qsa_sparse_paged_attention(
            place(a.q),
            k,
            v,
            lists,
            place(a.keys.table),
            place(owners),
            False,
            None,
            *a.scales,
            output_gate=place(gate),
        )
        return [out]

    return call, lambda answer: a.check(answer, gate)


def _sglang_attention(rng: np.random.Generator, is_decode: bool) -> tuple[Any, Any]:
    page = int(rng.choice([1, 16, 64])) if is_decode else 1
    a = _attention(rng, int(rng.choice([16, 64, 128])), page, is_even=is_decode)
    if is_decode:
        a = _with_one_token(rng, a)
    slots = np.full((len(a.keys.lens) + 2, a.keys.table.shape[1] * page), ABSURD, np.int32)
    order = rng.permutation(len(slots))[: len(a.keys.lens)]
    for row, own in zip(order, a.keys.slots, strict=True):
        slots[row, : own.size] = own
    lens = a.keys.lens.astype(np.int64)
    scales = {"k_scale": a.scales[0], "v_scale": a.scales[1]} if a.scales[0] != 1.0 else {}

    def call(place: Put) -> list[Any]:
        q, k, v, rows = (place(x) for x in (a.q, a.k, a.v, order.astype(np.int64)))
        table, lists = place(slots), place(a.lists.swapaxes(0, 1))
        if is_decode:
            out = sglang_sparse.flash_decode_with_gqa_share_sparse(
                q,
                None,
                k,
                v,
                table,
                place(lens),
                rows,
                a.granularity,
                lists,
                sm_scale=a.sm_scale,
                page_size=page,
                **scales,
            )
        else:
            prefix = place((lens - a.each).astype(np.int32))
            out = sglang_sparse.flash_prefill_with_gqa_share_sparse(
                q,
                k,
                v,
                None,
                table,
                rows,
                lists,
                1,
                a.granularity,
                place(a.indptr),
                place(lens),
                prefix,
                int(a.each.max(initial=0)),
                sm_scale=a.sm_scale,
                **scales,
            )
        return [out]

    return call, a.check


def _with_one_token(rng: np.random.Generator, a: Attention) -> Attention:
    """The same of each request's last token, which sees all keys."""
    last = np.cumsum(a.each) - 1
    a.lists, a.q, a.tokens = a.lists[last], a.q[last], [a.tokens[i] for i in last]
    a.each = np.ones_like(a.each)
    return a


def _msa_attention(rng: np.random.Generator, is_decode: bool) -> tuple[Any, Any]:
    causal = bool(rng.random() < 0.7)
    a = _attention(rng, BLOCK, int(rng.choice([16, 128])), is_even=is_decode, causal=causal)
    if a.scales[0] != 1.0:  # FlashInfer's have a scale of V alone
        a.scales = 1.0, a.scales[1]
    has_pages, lens = bool(rng.random() < 0.6), a.keys.lens.astype(np.int32)
    ends = np.append(0, np.cumsum(lens)).astype(np.int32)
    order = np.concatenate([*a.keys.slots, np.zeros(0, np.int64)])
    named = {"softmax_scale": a.sm_scale, "causal": causal, "return_softmax_lse": True}
    named |= {"v_global_scale": a.scales[1]} if a.scales[1] != 1.0 else {}

    def call(place: Put) -> list[Any]:
        if has_pages:
            k, v = (place(_as_pages(x, a.keys.page).swapaxes(1, 2)) for x in (a.k, a.v))
            where = {"page_table": place(a.keys.table), "seqused_k": place(lens)}
        else:
            k, v = (place(x[order]) for x in (a.k, a.v))
            where = {"cu_seqlens_k": place(ends)}
        q, lists = place(a.q), place(a.lists.swapaxes(0, 1))
        if is_decode:
            where["seqlen_q"] = int(a.each[0])
            return [*msa_ops.msa_sparse_decode_attention(q, k, v, lists, **where, **named)]
        return [*msa_ops.msa_sparse_attention(q, k, v, lists, place(a.indptr), **where, **named)]

    return call, a.check


# --- choices of blocks ---


@dataclass
class Choice:
    """What is chosen: scores [token][group] of blocks in float64, and how near they are equal."""

    scores: list[list[np.ndarray]]
    topk: int
    first: int = 0
    last: int = 0
    near: float = 0.0

    def check(self, lists: np.ndarray) -> None:
        """lists [tokens, groups, topk]."""
        for token, groups in enumerate(self.scores):
            for group, scores in enumerate(groups):
                self._check_one(lists[token, group].tolist(), scores, f"{token}, {group}")

    def _check_one(self, entries: list[int], scores: np.ndarray, what: str) -> None:
        own = [b for b in entries if b >= 0]
        assert entries == sorted(own) + [-1] * (len(entries) - len(own)), (what, entries)
        assert len(own) == len(set(own)) == min(self.topk, len(scores)), (what, own, len(scores))
        assert not own or own[-1] < len(scores), (what, own)
        forced = {b for b in range(len(scores)) if self._is_forced(b, len(scores))}
        assert forced <= set(own) or len(forced) > self.topk, (what, forced, own)
        free = set(own) - forced
        left = sorted(set(range(len(scores))) - set(own))
        if not free or not left:
            return
        least = min(scores[b] for b in free)
        near = self.near * max(1.0, float(np.abs(scores).max()))
        assert scores[left].max() <= least + near, (what, own)
        if not self.near:  # of equal scores the lower block
            equal = [b for b in left if scores[b] == least]
            chosen = [b for b in free if scores[b] == least]
            assert not equal or max(chosen) < equal[0], (what, own)

    def _is_forced(self, block: int, count: int) -> bool:
        return block < self.first or block >= count - self.last


def _index(
    rng: np.random.Generator, page: int, *, is_even: bool
) -> tuple[Keys, list[tuple[int, int]], np.ndarray, np.ndarray, np.ndarray]:
    """(keys, tokens, tokens of each request, index queries, index rows of slots)."""
    lens, each = _requests(rng, 2500, 4, is_even)
    width = max(1, -(-int(lens.max(initial=0)) // page)) + 1
    keys, tokens = Keys(rng, lens, page, width), _seen(lens, each)
    dim, heads = 128, int(rng.choice([1, 4]))
    dtype = DTYPES[str(rng.choice([*DTYPES]))]
    if rng.random() < 0.4:  # small whole numbers, whose scores tie
        rows = keys.values(rng, (dim,), np.dtype(np.float64))
        rows = np.sign(np.round(rows)).astype(dtype)
        q = rng.integers(-1, 2, (len(tokens), heads, dim)).astype(dtype)
    else:
        rows = keys.values(rng, (dim,), dtype)
        q = rng.standard_normal((len(tokens), heads, dim)).astype(dtype)
    return keys, tokens, each, q, rows


def _maxima(keys: Keys, tokens: Any, q: np.ndarray, rows: np.ndarray, block: int) -> Any:
    """[token][head] the largest product with a key of each block."""
    scores = []
    for token, (request, end) in enumerate(tokens):
        own = rows[keys.slots[request][:end]].astype(np.float64)
        products = q[token].astype(np.float64) @ own.T
        starts = range(0, end, block)
        scores.append(
            [np.array([x[b : b + block].max() for b in starts], np.float64) for x in products]
        )
    return scores


def _forced(rng: np.random.Generator, topk: int) -> tuple[int, int]:
    first = int(rng.integers(0, min(3, topk + 1)))
    return first, int(rng.integers(0, min(3, topk - first + 1)))


def _m3_choice(rng: np.random.Generator, is_decode: bool) -> tuple[Any, Any]:
    keys, tokens, each, q, rows = _index(rng, 128, is_even=is_decode)
    topk = int(rng.choice([1, 4, 16]))
    first, last = _forced(rng, topk)
    choice = Choice(_maxima(keys, tokens, q, rows, BLOCK), topk, first, last, 2e-6)
    lens, heads = keys.lens.astype(np.int32), q.shape[1]
    indptr = np.append(0, np.cumsum(each)).astype(np.int32)
    has_out, room = bool(rng.random() < 0.5), len(tokens) + int(rng.integers(0, 3))

    def call(place: Put) -> list[Any]:
        out = place(np.full((heads, room, topk), 77, np.int32)) if has_out else None
        args = place(q), place(_as_pages(rows, 128)), place(keys.table)
        if is_decode:
            lists = vllm_sparse.minimax_m3_index_decode(
                *args, place(lens), 4096, topk, first, last, heads, int(each[0]), 4, out
            )
        else:
            begins, prefix = place(indptr), place((lens - each).astype(np.int32))
            most = int(each.max(initial=0))
            score = vllm_sparse.minimax_m3_index_score(
                *args, begins, place(lens), prefix, most, 4096, heads
            )
            lists = vllm_sparse.minimax_m3_index_topk(
                score, begins, prefix, most, topk, first, last, out
            )
        if out is not None:
            assert (out[:, len(tokens) :] == 77).all()
            assert torch.equal(out[:, : len(tokens)], lists)
        return [lists.permute(1, 0, 2)]

    return call, lambda answer: choice.check(answer[0])


def _sglang_choice(rng: np.random.Generator, is_decode: bool) -> tuple[Any, Any]:
    page = int(rng.choice([1, 16, 64]))
    keys, tokens, each, q, rows = _index(rng, page, is_even=is_decode)
    if is_decode:
        last_of = np.cumsum(each) - 1
        tokens, q, each = [tokens[i] for i in last_of], q[last_of], np.ones_like(each)
    block, topk = int(rng.choice([64, 128])), int(rng.choice([1, 4, 16]))
    first, last = _forced(rng, topk)
    choice = Choice(_maxima(keys, tokens, q, rows, block), topk, first, last, 2e-6)
    slots = np.full((len(keys.lens) + 2, keys.table.shape[1] * page), ABSURD, np.int32)
    order = rng.permutation(len(slots))[: len(keys.lens)].astype(np.int64)
    for row, own in zip(order, keys.slots, strict=True):
        slots[row, : own.size] = own
    lens, indptr = keys.lens.astype(np.int64), np.append(0, np.cumsum(each)).astype(np.int32)
    named: dict[str, Any] = {"disable_index_value": True, "page_size": page}

    def call(place: Put) -> list[Any]:
        cache, table, ids = place(rows[:, None]), place(slots), place(order)
        if is_decode:
            _, lists, _ = sglang_sparse.flash_decode_with_topk_idx(
                place(q),
                None,
                cache,
                None,
                table,
                place(lens),
                4096,
                ids,
                block,
                topk,
                first,
                last,
                **named,
            )
        else:
            prefix = place((lens - each).astype(np.int32))
            _, lists = sglang_sparse.flash_prefill_with_topk_index(
                place(q),
                cache,
                None,
                None,
                table,
                ids,
                place(indptr),
                place(lens),
                prefix,
                4,
                4096,
                1,
                block,
                topk,
                first,
                last,
                **named,
            )
        return [lists.permute(1, 0, 2)]

    return call, lambda answer: choice.check(answer[0])


def _qsa_choice(rng: np.random.Generator) -> tuple[Any, Any]:
    page, ratio = int(rng.choice([16, 64])), int(rng.choice([1, 4]))
    keys, tokens, each, q, rows = _index(rng, page, is_even=True)
    topk = int(rng.choice([1, 8, 64]))
    tokens = [(request, int(rng.integers(0, keys.lens[request] + 1))) for request, _ in tokens]
    scores = []
    for token, (request, end) in enumerate(tokens):
        own = rows[keys.slots[request][:end]].astype(np.float64)
        products = q[token].astype(np.float64) @ own.T
        scores.append([np.maximum(products, 0.0).sum(0)])
    choice = Choice(scores, topk, near=2e-6)
    visible = np.array([end for _, end in tokens], np.int32)

    def call(place: Put) -> list[Any]:
        out = place(np.full((len(tokens), topk), 77, np.int32))
        cache = place(_as_pages(rows, page)[:, :, None])
        vllm_sparse.qsa_select_paged_decode(
            place(q),
            cache,
            place(keys.table),
            place(visible),
            topk * ratio,
            ratio,
            int(each[0]),
            out,
        )
        return [out[:, None]]

    return call, lambda answer: choice.check(answer[0])


def _msa_choice(rng: np.random.Generator) -> tuple[Any, Any]:
    heads, blocks, tokens = (int(rng.integers(1, n)) for n in (5, 90, 6))
    topk = int(rng.choice([1, 4, 16]))
    first, last = _forced(rng, topk)
    scores = rng.standard_normal((heads, blocks, tokens)).astype(np.float32)
    if rng.random() < 0.5:
        scores = np.round(scores)
    counts: Any = rng.integers(0, blocks + 1, tokens).astype(np.int32)
    kind = int(rng.integers(0, 3))
    each = counts if kind == 0 else np.full(tokens, blocks if kind == 1 else counts[0])
    own = [
        [scores[h, : each[t], t].astype(np.float64) for h in range(heads)] for t in range(tokens)
    ]
    choice = Choice(own, topk, first, last)

    def call(place: Put) -> list[Any]:
        valid = place(counts) if kind == 0 else (None if kind == 1 else int(counts[0]))
        return [msa_ops.msa_topk_select(place(scores), topk, valid, None, first, last)]

    return call, lambda answer: choice.check(answer[0])


def _dsa_choice(rng: np.random.Generator) -> tuple[Any, Any]:
    count = int(rng.integers(1, 4))
    lens = rng.integers(0, int(rng.choice([5, 700])), count)
    each = np.minimum(rng.integers(0, 5, count), np.where(rng.random(count) < 0.2, 9, lens))
    keys, tokens = Keys(rng, lens, 1, max(1, int(lens.max()))), _seen(lens, each)
    heads, topk = int(rng.choice([1, 8, 64])), int(rng.choice([1, 64, 512]))
    dtype, whole = DTYPES[str(rng.choice([*DTYPES]))], bool(rng.random() < 0.4)
    order = np.concatenate([*keys.slots, np.zeros(0, np.int64)])
    rows = keys.values(rng, (128,), dtype)
    q = rng.standard_normal((len(tokens), heads, 128)).astype(dtype)
    w = rng.standard_normal((len(tokens), heads)).astype(np.float32)
    if whole:
        rows, q, w = (np.sign(x).astype(x.dtype) for x in (rows, q, w))
    scale = float(rng.choice([128**-0.5, 1.0]))
    scores = []
    for token, (request, end) in enumerate(tokens):
        own = rows[keys.slots[request][:end]].astype(np.float64)
        products = np.maximum(q[token].astype(np.float64) @ own.T * scale, 0.0)
        scores.append([w[token].astype(np.float64) @ products])
    choice = Choice(scores, topk, near=4e-6)
    begins = [np.append(0, np.cumsum(x)).astype(np.int32) for x in (each, lens)]

    def call(place: Put) -> list[Any]:
        lists, values = dsa_indexer.dsa_indexer_topk(
            place(q),
            place(rows[order]),
            place(w),
            *map(place, begins),
            top_k=topk,
            softmax_scale=scale,
        )
        return [lists[:, None], values]

    def check(answer: list[np.ndarray]) -> None:
        choice.check(answer[0])
        for token, (own,) in enumerate(scores):
            chosen = answer[0][token, 0]
            want = own[chosen[chosen >= 0]]
            slack = 4e-6 * float(np.abs(own).max(initial=1.0)) * max(1.0, math.sqrt(heads))
            found = answer[1][token]
            np.testing.assert_allclose(found[: len(want)], want, rtol=2e-5, atol=slack)
            assert np.isneginf(found[len(want) :]).all()

    return call, check


# --- FlashMLA's lists of one cache ---


def _flash_mla_flat(rng: np.random.Generator) -> tuple[Any, Any]:
    tokens, heads = (int(rng.integers(1, n)) for n in (6, 20))
    heads = int(rng.choice([heads, 64, 128]))
    rows, length = int(rng.choice([1, 40, 300])), int(rng.choice([1, 17, 128]))
    dtype = DTYPES[str(rng.choice([*DTYPES]))]
    q = rng.standard_normal((tokens, heads, 576)).astype(dtype)
    kv = rng.standard_normal((rows, 1, 576)).astype(dtype)
    lists = rng.integers(-rows // 4 - 1, rows + 4, (tokens, 1, length)).astype(np.int32)
    lists[rng.random(lists.shape) < 0.1] = 2**31 - 1
    counts = rng.integers(0, length + 1, tokens).astype(np.int32) if rng.random() < 0.5 else None
    sinks = rng.standard_normal(heads).astype(np.float32) if rng.random() < 0.5 else None
    named = []
    for token in range(tokens):
        own = lists[token, 0, : None if counts is None else counts[token]]
        named.append(own[(own >= 0) & (own < rows)])
    unlisted = np.setdiff1d(np.arange(rows), np.concatenate(named))
    kv[unlisted] = np.nan
    scale = float(rng.choice([576**-0.5, 0.06]))

    def call(place: Put) -> list[Any]:
        given = [None if x is None else place(x) for x in (sinks, counts)]
        return [
            *flash_mla.flash_mla_sparse_fwd(place(q), place(kv), place(lists), scale, 512, *given)
        ]

    def check(answer: list[np.ndarray]) -> None:
        near = TOLERANCE[dtype.name]
        for token, own in enumerate(named):
            k = kv[own, 0]
            o, lse, largest = attend(q[token], k, k[:, :512], scale)
            if sinks is not None and len(own):
                o /= 1.0 + np.exp(sinks.astype(np.float64) - lse)[:, None]
            if not len(own):
                lse = np.full(heads, np.inf)
            np.testing.assert_allclose(answer[0][token], o, rtol=near, atol=near)
            np.testing.assert_allclose(answer[1][token], largest, rtol=2e-3, atol=4e-3)
            np.testing.assert_allclose(answer[2][token], lse, rtol=1e-3, atol=2e-3)

    return call, check


NAMES: dict[str, Callable[[np.random.Generator], tuple[Any, Any]]] = {
    "vllm m3 decode": lambda rng: _m3_attention(rng, True),
    "vllm m3 prompts": lambda rng: _m3_attention(rng, False),
    "vllm m3 index of decode": lambda rng: _m3_choice(rng, True),
    "vllm m3 index of prompts": lambda rng: _m3_choice(rng, False),
    "vllm qsa": _qsa_attention,
    "vllm qsa index": _qsa_choice,
    "sglang m3 decode": lambda rng: _sglang_attention(rng, True),
    "sglang m3 prompts": lambda rng: _sglang_attention(rng, False),
    "sglang m3 index of decode": lambda rng: _sglang_choice(rng, True),
    "sglang m3 index of prompts": lambda rng: _sglang_choice(rng, False),
    "msa decode": lambda rng: _msa_attention(rng, True),
    "msa prompts": lambda rng: _msa_attention(rng, False),
    "msa choice": _msa_choice,
    "dsa indexer": _dsa_choice,
    "flash_mla of one list": _flash_mla_flat,
}


def draw(name: str, seed: int) -> NamedCase:
    """A small call by this name."""
    rng = np.random.default_rng((seed, [*NAMES].index(name), 48))
    call, check = NAMES[name](rng)
    return NamedCase(name, seed, call, check)
