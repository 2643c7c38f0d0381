"""Seeded random calls of the block-sparse wrappers; keys that no row sees are NaN."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

import cupyattn
from cupyattn import reference

from .batches import normal

Put = Callable[[np.ndarray], Any]


@dataclass
class SparseCall:
    """Host arrays of one call: `mask` [heads, M, N] says which keys the rows of a KV head see.

    plan    arguments of plan(), by position and by name
    heads_first   whether q, k and v are
    """

    wrapper: type
    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    mask: np.ndarray
    plan: tuple[list[Any], dict[str, Any]]
    heads_first: bool

    def expected(self, attention: Any = reference.attention) -> tuple[np.ndarray, np.ndarray]:
        """(o, lse) by this model, in the layout of the wrapper."""
        q, k, v = (x.swapaxes(0, 1) if self.heads_first else x for x in (self.q, self.k, self.v))
        group = q.shape[1] // k.shape[1]
        o, lse = np.zeros(q.shape), np.zeros(q.shape[:2])
        for head in range(k.shape[1]):
            own, one = slice(head * group, (head + 1) * group), slice(head, head + 1)
            seen = self.mask[head]
            o[:, own], lse[:, own] = attention(
                q[:, own], np.nan_to_num(k[:, one]), np.nan_to_num(v[:, one]), mask=seen
            )
        return (o.swapaxes(0, 1), lse.T) if self.heads_first else (o, lse)

    def plan_with(self, w: Any, put: Put = np.asarray, put_bits: Put = np.asarray) -> None:
        """Plan, with tables by `put`; a packed mask has to be where the workspace is."""
        args, named = self.plan
        given = [put(x) if isinstance(x, np.ndarray) else x for x in args]
        named = {n: put(x) if isinstance(x, np.ndarray) else x for n, x in named.items()}
        if "packed_mask" in named:
            named["packed_mask"] = put_bits(self.plan[1]["packed_mask"])
        w.plan(*given, **named)


def _causal(mask: np.ndarray) -> np.ndarray:
    rows, columns = mask.shape[-2:]
    return mask & (np.arange(columns) <= np.arange(rows)[:, None] + columns - rows)


def _finish(
    rng: np.random.Generator,
    call: type,
    mask: np.ndarray,
    dtype: str,
    *sizes: int,
) -> dict[str, Any]:
    """q, k and v in rows, [n, heads, dim], of which unseen keys are NaN."""
    (group, heads, dim), (rows, columns) = sizes, mask.shape[1:]
    q = normal(rng, dtype, rows, heads * group, dim)
    k, v = (normal(rng, dtype, columns, heads, dim) for _ in "kv")
    for head in range(heads):
        unseen = ~mask[head % len(mask)].any(0)
        k[unseen, head] = v[unseen, head] = np.nan
    return {"wrapper": call, "q": q, "k": k, "v": v}


def fixed(seed: int, dim: int = 16) -> SparseCall:
    """A call of BlockSparseAttentionWrapper."""
    rng = np.random.default_rng((seed, 71))
    row, column = (int(x) for x in rng.choice((1, 2, 3, 5, 8), 2))
    if seed % 3 == 0:
        column = row
    blocks, columns = rng.integers(1, 7, 2).tolist()
    rows = row * blocks - int(rng.integers(0, row)) * (seed % 2)
    group, heads = int(rng.choice((1, 2, 3, 7))), int(rng.choice((1, 2)))
    dtype = ("float16", "bfloat16")[seed % 2]
    shown = rng.random((blocks, columns)) < rng.choice((0.0, 0.2, 0.6, 1.0))
    causal, form = bool(seed % 4 == 1), ("none", "none", "bool", "packed")[seed // 4 % 4]
    if causal and column == row:
        shown |= np.eye(blocks, columns, columns - blocks, dtype=bool)
    indptr, indices = np.append(0, shown.sum(1).cumsum()), np.nonzero(shown)[1]
    mask = np.kron(shown, np.ones((row, column), bool))[:rows]
    named: dict[str, Any] = {"q_data_type": dtype, "o_data_type": dtype, "causal": causal}
    if form != "none":
        elements = rng.random((indices.size, row, column)) < 0.6
        bits = []
        for block in range(blocks):
            own = elements[indptr[block] : indptr[block + 1]].swapaxes(0, 1)
            own = own[: rows - block * row].reshape(min(row, rows - block * row), -1)
            seen = np.flatnonzero(np.repeat(shown[block], column))
            mask[block * row : (block + 1) * row][:, seen] &= own
            bits.append(np.packbits(own, bitorder="little"))
        named |= {"mask": elements} if form == "bool" else {"packed_mask": np.concatenate(bits)}
    elif causal:
        mask = _causal(mask)
    kind = (np.int32, np.int64)[seed % 2]
    args: list[Any] = [indptr.astype(kind), indices.astype(kind), rows, columns * column]
    args += [row, column, heads * group, heads, dim]
    made = _finish(rng, cupyattn.BlockSparseAttentionWrapper, mask[None], dtype, group, heads, dim)
    whole = np.broadcast_to(mask, (heads, *mask.shape))
    return SparseCall(**made, mask=whole, plan=(args, named), heads_first=False)


def causal_blocks(
    rng: np.random.Generator, rows: int, columns: int, density: float, kept: float
) -> np.ndarray:
    """bool [rows, columns]: the diagonal, and so many of the blocks ahead of it, of which the row
    before has the share `kept`."""
    seen = np.zeros((rows, columns), bool)
    for row in range(rows):
        end = -(-(row + 1) * columns // rows)
        wanted = max(1, round(density * end)) - 1
        before = np.flatnonzero(seen[max(row - 1, 0), : end - 1])
        own = before[rng.random(before.size) < kept][:wanted]
        others = np.setdiff1d(np.arange(end - 1), own)
        seen[row, own] = seen[row, rng.permutation(others)[: wanted - own.size]] = True
        seen[row, end - 1] = True
    return seen


def _split(rng: np.random.Generator, count: int, heads: int, unit: int, total: int) -> np.ndarray:
    """[heads, count] sizes of blocks, multiples of `unit`, some 0, which sum to `total` units."""
    cuts = np.sort(rng.integers(0, total + 1, (heads, count - 1)), axis=1)
    ends = np.concatenate([np.zeros((heads, 1), int), cuts, np.full((heads, 1), total)], axis=1)
    return np.diff(ends, axis=1) * unit


def variable(seed: int, dim: int = 16) -> SparseCall:
    """A call of VariableBlockSparseAttentionWrapper."""
    rng = np.random.default_rng((seed, 72))
    group, heads = int(rng.choice((1, 2, 3))), int(rng.choice((1, 2, 3)))
    unit = int(rng.choice((1, 4)))
    rows = _split(rng, int(rng.integers(1, 6)), heads, 1, int(rng.integers(1, 30)))
    columns = _split(rng, int(rng.integers(1, 6)), heads, unit, int(rng.integers(1, 20)))
    shown = rng.random((heads, rows.shape[1], columns.shape[1])) < rng.choice((0.0, 0.3, 0.7, 1.0))
    causal, dtype = bool(seed % 3 == 1), ("float16", "bfloat16")[seed % 2]
    if seed % 6 == 1:  # causality that kernels do themselves
        rows = columns = np.full((heads, 3), 8)
        shown = np.broadcast_to(np.tri(3, dtype=bool), (heads, 3, 3))
    mask = np.stack(
        [
            np.repeat(np.repeat(s, r, axis=0), c, axis=1)
            for s, r, c in zip(shown, rows, columns, strict=True)
        ]
    )
    if causal:
        mask = _causal(mask)
    made = _finish(
        rng, cupyattn.VariableBlockSparseAttentionWrapper, mask, dtype, group, heads, dim
    )
    made |= {n: np.ascontiguousarray(made[n].swapaxes(0, 1)) for n in "qkv"}
    kind = (np.int32, np.int64)[seed % 2]
    args = [shown, rows.astype(kind), columns.astype(kind), heads * group, heads, dim]
    named = {"q_data_type": dtype, "causal": causal}
    return SparseCall(**made, mask=mask, plan=(args, named), heads_first=True)
