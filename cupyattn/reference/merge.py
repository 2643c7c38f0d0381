"""The algebra of attention states: a value v and the base-2 LSE s of the keys it came from."""

from __future__ import annotations

import itertools

import numpy as np

from ..errors import ArgumentError


def merge_state(
    v_a: np.ndarray, s_a: np.ndarray, v_b: np.ndarray, s_b: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """The state over the keys of a and of b: v [n, H, D] and s [n, H], both float64.

    Raises
    ------
    CupyAttnError
        ArgumentError if the shapes do not match.
    """
    if v_a.shape != v_b.shape or s_a.shape != s_b.shape:
        raise ArgumentError(
            f"v_a {list(v_a.shape)}, s_a {list(s_a.shape)} against v_b {list(v_b.shape)}, s_b "
            f"{list(s_b.shape)}: wanted two states of one shape"
        )
    return merge_states(np.stack([v_a, v_b], axis=1), np.stack([s_a, s_b], axis=1))


def merge_states(v: np.ndarray, s: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The state over m parts: v [n, m, H, D], s [n, m, H] (base 2) -> [n, H, D], [n, H], float64.

    A part with s = -inf saw no key: it adds nothing whatever its v holds, NaN included. No part
    with a key (m = 0 among them) gives v = 0, s = -inf.

    Raises
    ------
    CupyAttnError
        ArgumentError on shapes.
    """
    if v.ndim != 4 or s.shape != v.shape[:3]:
        raise ArgumentError(
            f"v, s: got {list(v.shape)} and {list(s.shape)}; wanted [n, m, H, D] and [n, m, H]"
        )
    logits = s.astype(np.float64)
    top = logits.max(axis=1, initial=-np.inf)
    top = np.where(top == -np.inf, 0.0, top)
    is_empty = logits == -np.inf
    with np.errstate(divide="ignore", invalid="ignore"):
        weights = np.exp2(logits - top[:, None])
        total = weights.sum(axis=1)
        parts = np.where(is_empty[..., None], 0.0, v.astype(np.float64)) * weights[..., None]
        merged = np.where(total[..., None] == 0, 0.0, parts.sum(axis=1) / total[..., None])
        return merged, top + np.log2(total)


def variable_length_merge_states(
    v: np.ndarray, s: np.ndarray, indptr: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """The states over parts indptr[i] to indptr[i + 1], without the last, for each row i.

    v [num_states, H, D], s [num_states, H], indptr [n + 1], never falling, within the states -> [n,
    H, D], [n, H], float64.
    """
    merged_v, merged_s = (
        np.zeros((len(indptr) - 1, *v.shape[1:])),
        np.zeros((len(indptr) - 1, v.shape[1])),
    )
    for row, (begin, end) in enumerate(itertools.pairwise(indptr)):
        merged_v[row], merged_s[row] = merge_states(v[None, begin:end], s[None, begin:end])
    return merged_v, merged_s
