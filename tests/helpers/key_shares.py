"""Seeded batches whose keys several ranks share: each rank's call, and what they merge to.

A case has whole sequences. Each rank gets its own keys in pages (or rows) of its own, and answers
with an LSE; the reference merges the states of all ranks, and has the answer over whole sequences.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

import cupyattn
from cupyattn import reference
from cupyattn.core import dtypes
from cupyattn.core.key_share import KeyShare

from .cases import pick
from .verify_cases import random_tree

KINDS = "decode", "verify", "tree", "prefill", "ragged", "mla"
# Latent columns and rope columns.
LATENT = 512, 64
Put = Callable[[np.ndarray], Any]


@dataclass(frozen=True)
class Case:
    """kv_len, qo_len: of whole sequences, and rows of each, its last tokens."""

    seed: int
    kind: str
    world: int
    run: int
    kv_len: tuple[int, ...]
    qo_len: tuple[int, ...]
    page_size: int = 16
    heads: tuple[int, int] = (4, 2)
    dim: int = 64
    dtype: str = "float16"
    kv_dtype: str = "float16"
    window_left: int = -1
    window_right: int = 0
    soft_cap: float = 0.0
    layout: str = "NHD"

    @property
    def shares(self) -> list[KeyShare]:
        return KeyShare(self.world, 0, self.run).all_ranks()

    def alone(self) -> Case:
        """The same on one rank."""
        return replace(self, world=1, run=1)


def random_case(seed: int, kind: str | None = None, dim: int = 64, most: int = 260) -> Case:
    """The same case for the same seed. most: keys of a sequence."""
    rng = np.random.default_rng((seed, 45))
    kind = kind or KINDS[seed % len(KINDS)]
    page_size = pick(rng, (1, 16, 64))
    world = int(rng.integers(1, 6))
    run = pick(rng, (1, 1, page_size, int(rng.integers(1, page_size + 1))))
    count = int(rng.integers(1, 5))
    # Short ones, of which some ranks hold nothing.
    kv_len = [int(x) for x in rng.integers(1, most, count)]
    if rng.random() < 0.4:
        kv_len[0] = int(rng.integers(1, run + 1))
    q_len = pick(rng, (2, 3, 4, 8, 17))
    qo_len = [1 if kind == "decode" else q_len] * count
    if kind in ("prefill", "ragged"):
        qo_len = [int(x) for x in rng.integers(0, pick(rng, (6, 40, 150)), count)]
    if kind == "mla":
        qo_len = [int(x) for x in rng.integers(1, 5, count)]
    kv_dtype = pick(rng, ("float16", "float16", "float8_e4m3fn"))
    window_left = -1 if kind == "mla" else pick(rng, (-1, -1, 0, 5, 40, 100))
    window_right = 0
    if kind in ("prefill", "ragged") and rng.random() < 0.3:
        window_right = int(rng.integers(1, 9))
    return Case(
        seed=seed,
        kind=kind,
        world=world,
        run=run,
        kv_len=tuple(kv_len),
        qo_len=tuple(qo_len),
        page_size=page_size,
        heads=(pick(rng, (2, 8)), 1) if kind == "mla" else pick(rng, ((4, 2), (8, 1), (3, 3))),
        dim=dim,
        kv_dtype="float16" if kind in ("mla", "ragged") else kv_dtype,
        window_left=window_left,
        window_right=window_right,
        soft_cap=0.0 if kind == "mla" else pick(rng, (0.0, 0.0, 20.0)),
        layout="NHD" if kind == "mla" else pick(rng, ("NHD", "HND")),
    )


@dataclass
class Whole:
    """The arrays of a case: q of all rows; keys and values of each request; trees of drafts."""

    case: Case
    q: np.ndarray
    keys: list[np.ndarray]
    values: list[np.ndarray]
    tree: np.ndarray | None

    @classmethod
    def of(cls, case: Case) -> Whole:
        rng = np.random.default_rng((case.seed, 46))

        def normal(dtype: str, *shape: int) -> np.ndarray:
            values = rng.standard_normal(shape).astype(np.float32)
            return values.astype(dtypes.parse(dtype).numpy)

        heads, kv_heads = case.heads
        rows = sum(case.qo_len)
        if case.kind == "mla":
            q = normal(case.dtype, rows, heads, sum(LATENT))
            keys = [normal(case.kv_dtype, n, 1, sum(LATENT)) for n in case.kv_len]
            return cls(case, q, keys, [k[..., : LATENT[0]] for k in keys], None)
        q = normal(case.dtype, rows, heads, case.dim)
        keys = [normal(case.kv_dtype, n, kv_heads, case.dim) for n in case.kv_len]
        values = [normal(case.kv_dtype, n, kv_heads, case.dim) for n in case.kv_len]
        tree = None
        if case.kind == "tree":
            tree = random_tree(rng, len(case.kv_len), case.qo_len[0])
        return cls(case, q, keys, values, tree)

    def rows(self, index: int) -> slice:
        begin = sum(self.case.qo_len[:index])
        return slice(begin, begin + self.case.qo_len[index])

    def expected(self) -> tuple[np.ndarray, np.ndarray]:
        """(o, lse) over whole sequences, in float64."""
        case, parts = self.case, []
        for index, (k, v) in enumerate(zip(self.keys, self.values, strict=True)):
            mask = None
            if self.tree is not None:
                mask = np.ones((case.qo_len[index], len(k)), bool)
                tree = self.tree[self.rows(index)]
                own = min(len(k), tree.shape[1])
                mask[:, len(k) - own :] = tree[:, tree.shape[1] - own :]
            scale = 0.07 if case.kind == "mla" else None
            parts.append(
                reference.attention(
                    self.q[self.rows(index)],
                    k,
                    v,
                    window_left=case.window_left,
                    window_right=-1 if mask is not None else case.window_right,
                    mask=mask,
                    logits_soft_cap=case.soft_cap,
                    sm_scale=scale,
                )
            )
        o, lse = (np.concatenate([part[i] for part in parts]) for i in (0, 1))
        return o, lse


@dataclass
class Rank:
    """What a rank holds: lengths, its pages with the table, or rows one after another."""

    share: KeyShare
    kv_len: np.ndarray
    indptr: np.ndarray
    indices: np.ndarray
    last_page_len: np.ndarray
    k: np.ndarray
    v: np.ndarray

    @classmethod
    def of(cls, whole: Whole, share: KeyShare) -> Rank:
        case, size = whole.case, whole.case.page_size
        held = [share.holds(np.arange(n)) for n in case.kv_len]
        keys = [k[own] for k, own in zip(whole.keys, held, strict=True)]
        values = [v[own] for v, own in zip(whole.values, held, strict=True)]
        kv_len = np.array([len(k) for k in keys], np.int32)
        assert kv_len.tolist() == share.count(np.array(case.kv_len)).tolist()
        if case.kind == "ragged":
            indptr = np.concatenate([[0], np.cumsum(kv_len)]).astype(np.int32)
            k, v = np.concatenate(keys), np.concatenate(values)
            if case.layout == "HND":
                k, v = (np.ascontiguousarray(x.swapaxes(0, 1)) for x in (k, v))
            return cls(share, kv_len, indptr, kv_len[:0], kv_len[:0], k, v)
        rng = np.random.default_rng((case.seed, 47, share.cp_rank))
        pages = -(-kv_len // size)
        indptr = np.concatenate([[0], np.cumsum(pages)]).astype(np.int32)
        indices = rng.permutation(int(indptr[-1]) + 3).astype(np.int32)[: int(indptr[-1])]
        last = np.where(kv_len > 0, (kv_len - 1) % size + 1, 0).astype(np.int32)
        k, v = (
            np.full((int(indptr[-1]) + 3, size, *x[0].shape[1:]), np.nan, np.float32)
            for x in (whole.keys, whole.values)
        )
        for x, own in ((k, keys), (v, values)):
            for index, part in enumerate(own):
                ids = indices[indptr[index] : indptr[index + 1]]
                for page, at in enumerate(ids):
                    tokens = part[page * size : (page + 1) * size]
                    x[at, : len(tokens)] = tokens
        kind = dtypes.parse(case.kv_dtype).numpy
        k, v = k.astype(kind), v.astype(kind)
        if case.layout == "HND":
            k, v = (np.ascontiguousarray(x.swapaxes(1, 2)) for x in (k, v))
        return cls(share, kv_len, indptr, indices, last, k, v)

    @property
    def arguments(self) -> dict[str, int]:
        """This rank's, of plan()."""
        return {
            "cp_world_size": self.share.cp_world_size,
            "cp_rank": self.share.cp_rank,
            "cp_kv_cache_interleave_size": self.share.cp_kv_cache_interleave_size,
        }


def answer(whole: Whole, rank: Rank, put: Put, workspace: Any, **run: Any) -> Any:
    """(o, lse) of one rank's call, in float32, by the wrapper of its kind."""
    case = whole.case
    heads, kv_heads = case.heads
    lengths = np.array(case.kv_len, np.int32 if case.seed % 2 else np.int64)
    given: dict[str, Any] = rank.arguments | {"cp_tot_seqused_k": lengths}
    table = rank.indptr, rank.indices, rank.last_page_len
    qo_indptr = np.concatenate([[0], np.cumsum(case.qo_len)]).astype(np.int32)
    if case.kind == "mla":
        w: Any = cupyattn.BatchMLAPagedAttentionWrapper(workspace)
        w.plan(
            qo_indptr,
            rank.indptr,
            rank.indices,
            rank.kv_len,
            heads,
            *LATENT,
            case.page_size,
            True,
            0.07,
            case.dtype,
            case.kv_dtype,
            output_dtype="float32",
            **given,
        )
        pages = put(rank.k[:, :, 0])
        return w.run(query=put(whole.q), kv_cache=pages, return_lse=True)
    given |= {
        "window_left": case.window_left,
        "logits_soft_cap": case.soft_cap,
        "q_data_type": case.dtype,
        "kv_data_type": case.kv_dtype,
        "o_data_type": "float32",
    }
    if case.kind in ("prefill", "ragged"):
        given |= {"causal": not case.window_right, "window_right": case.window_right or -1}
    if case.kind == "ragged":
        w = cupyattn.BatchPrefillWithRaggedKVCacheWrapper(workspace, case.layout)
        w.plan(qo_indptr, rank.indptr, heads, kv_heads, case.dim, **given)
        return w.run(put(whole.q), put(rank.k), put(rank.v), return_lse=True, **run)
    cache = put(rank.k), put(rank.v)
    if case.kind == "prefill":
        w = cupyattn.BatchPrefillWithPagedKVCacheWrapper(workspace, case.layout)
        w.plan(qo_indptr, *table, heads, kv_heads, case.dim, case.page_size, **given)
        return w.run(put(whole.q), cache, return_lse=True, **run)
    w = cupyattn.BatchDecodeWithPagedKVCacheWrapper(workspace, case.layout)
    given["q_len_per_req"] = case.qo_len[0]
    if case.kind == "decode" and case.window_left < 0:
        del given["cp_tot_seqused_k"]  # an ordinary call
    w.plan(*table, heads, kv_heads, case.dim, case.page_size, **given)
    mask = None if whole.tree is None else put(whole.tree)
    return w.run(put(whole.q), cache, return_lse=True, mask=mask, **run)


def merged(
    case: Case, put: Put, get: Callable[[Any], np.ndarray], workspace: Any
) -> tuple[np.ndarray, np.ndarray]:
    """(o, lse): the states of all ranks, merged in rank order by the reference."""
    whole = Whole.of(case)
    states = []
    for share in case.shares:
        found = answer(whole, Rank.of(whole, share), put, workspace)
        states.append(tuple(get(x) for x in found))
    o, lse = (np.stack([state[i] for state in states], axis=1) for i in (0, 1))
    return reference.merge_states(o, lse)


def error(got: tuple[np.ndarray, np.ndarray], wanted: tuple[np.ndarray, np.ndarray]) -> float:
    """The root of the mean square of o's error. Rows that see no key are the same ones."""
    np.testing.assert_array_equal(np.isneginf(got[1]), np.isneginf(wanted[1]))
    seen = ~np.isneginf(wanted[1])
    np.testing.assert_allclose(got[1][seen], wanted[1][seen], rtol=0, atol=2e-3)
    difference = got[0] - wanted[0]
    return float(np.sqrt(np.mean(difference**2))) if difference.size else 0.0
