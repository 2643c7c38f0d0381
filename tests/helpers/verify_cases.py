"""Seeded random verifications: a few draft tokens a request, and a mask of which sees which.

They are batches of the decode wrapper whose run brings a mask, in every form that it takes.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from .batch_cases import _KV_LENS, _PAGE_SIZES, PROBLEMS, Case
from .cases import pick

NUM_CASES = 360
FORMS = ("bool3", "bool2", "uint8", "uint16", "uint32", "int32", "uint64", "int64")
_PROBLEMS = [p for p in PROBLEMS if p.dims[0] == p.dims[1] and not p.is_masked]
_Q_LENS = (1, 2, 3, 4, 4, 5, 7, 8, 8, 9, 16, 31, 32, 33, 40, 65)
_MAX_MULTIPLIES = 8_000_000


def random_case(seed: int) -> Case:
    """The same case for the same seed."""
    rng = np.random.default_rng((seed, 80))
    problem = _PROBLEMS[seed % len(_PROBLEMS)]
    q_len, group, count = (
        pick(rng, _Q_LENS),
        pick(rng, (1, 2, 4, 4, 5, 8)),
        pick(rng, (1, 1, 2, 3, 5, 9)),
    )
    num_kv_heads = pick(rng, (1, 1, 2))
    kv_len = [pick(rng, _KV_LENS) for _ in range(count)]
    if rng.random() < 0.3:
        kv_len[0] = int(rng.integers(1000, 4000))
    # What bounds the time of the two CPU answers.
    each = q_len * num_kv_heads * group * sum(problem.dims)
    while sum(kv_len) * each > _MAX_MULTIPLIES:
        kv_len[int(np.argmax(kv_len))] //= 2
    return Case(
        seed=seed,
        wrapper="decode",
        problem=problem,
        qo_len=(q_len,) * count,
        kv_len=tuple(kv_len),
        page_size=pick(rng, _PAGE_SIZES),
        num_kv_heads=num_kv_heads,
        group=group,
        kv_layout=pick(rng, ("NHD", "HND")),
        causal=True,
        window_left=pick(rng, (-1, -1, -1, 0, 3, 60)),
        sm_scale=pick(rng, (None, None, 0.11)),
        has_sinks=bool(rng.random() < 0.2),
        scale_v=pick(rng, ("none", "none", "float", "per_head")),
        is_pair=bool(rng.random() < 0.5),
        is_packed=True,
        ids_on_device=bool(rng.random() < 0.5),
        table_dtype=pick(rng, ("int32", "int64")),
        split=pick(rng, ((None, False), (None, True), (pick(rng, (1, 4, 16)), False))),
        is_padded=bool(rng.random() < 0.5),
        with_out=bool(rng.random() < 0.7),
        tree=FORMS[seed // len(_PROBLEMS) % len(FORMS)],
    )


def random_tree(rng: np.random.Generator, count: int, q_len: int) -> np.ndarray:
    """bool [count * q_len, q_len]: trees of tokens that see their ancestors, or anything at all."""
    rows = rng.random((count, q_len, q_len)) < rng.choice([0.1, 0.5, 0.9])
    for tree in rows[::2]:
        tree[...] = np.eye(q_len, dtype=bool)
        for token in range(1, q_len):
            tree[token] |= tree[int(rng.integers(token))]
    return rows.reshape(count * q_len, q_len)


def whole_masks(rows: np.ndarray, kv_len: Sequence[int]) -> list[np.ndarray]:
    """Whether the rows of each request see its keys: all but the last as random_tree says."""
    q_len, found = rows.shape[1], []
    for index, count in enumerate(kv_len):
        mask = np.ones((q_len, count + q_len), bool)
        mask[:, count:] = rows[index * q_len : (index + 1) * q_len]
        found.append(mask[:, q_len:])
    return found


def in_form(rows: np.ndarray, form: str, rng: np.random.Generator) -> np.ndarray:
    """The rows as a caller may give them; bits that mean nothing are random."""
    num_rows, q_len = rows.shape
    if form.startswith("bool"):
        return rows.reshape(-1, q_len, q_len) if form == "bool3" else rows
    dtype = np.dtype(form)
    bits = 8 * dtype.itemsize
    words = -(-q_len // bits)
    if form == "uint16":
        words += words % 2  # xqa's
    spread = rng.random((num_rows, words * bits)) < 0.5
    spread[:, :q_len] = rows
    packed = np.packbits(spread, axis=1, bitorder="little").view(dtype)
    if form == "uint8":
        return packed
    if words > 1 or form == "uint16":
        return packed.reshape(-1, q_len, words)
    return packed.reshape(-1) if form.endswith("32") else packed.reshape(-1, q_len)
