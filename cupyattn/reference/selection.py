"""Which blocks of keys a token attends to: scores of an index, and the greatest of them."""

from __future__ import annotations

import numpy as np


def score_blocks(
    q: np.ndarray,
    rows: np.ndarray,
    *,
    score: str = "max",
    num_groups: int = 1,
    block_rows: int = 1,
    sm_scale: float = 1.0,
    row_scales: np.ndarray | None = None,
    weights: np.ndarray | None = None,
) -> np.ndarray:
    """float64 [num_groups, ceil(n / block_rows)]: the scores of blocks of index rows, the last of
    which may be cut.

    Parameters
    ----------
    q
        [heads, head_dim]; neighbouring heads belong to one group.
    rows
        [n, head_dim]: the index rows that the token sees.
    score
        "max": the largest product of a block's rows and a group's heads. "relu_sum": of each row
        the sum over heads of weight * max(product, 0), of a block its largest row. "softmax": the
        sum over a block's rows and a group's heads of weight * probability, each head's over all
        rows.
    sm_scale
        Multiplies the products; row_scales [n] besides, of "relu_sum" the sums.
    weights
        [heads]; default 1. Without effect on "max".
    """
    products = (q.astype(np.float64) @ rows.astype(np.float64).T) * sm_scale
    heads, n = products.shape
    scales = np.ones(n) if row_scales is None else row_scales.astype(np.float64)
    by_head = np.ones(heads) if weights is None else weights.astype(np.float64)
    if score == "relu_sum":
        products = by_head[:, None] * np.maximum(products, 0.0)
    else:
        products *= scales
    if score == "softmax" and n:
        products = np.exp(products - products.max(1, keepdims=True))
        products *= (by_head / products.sum(1))[:, None]
    grouped = products.reshape(num_groups, heads // num_groups, n)
    of_rows = grouped.max(1) if score == "max" else grouped.sum(1)
    if score == "relu_sum":
        of_rows = of_rows * scales
    begins = np.arange(0, n, block_rows)
    if not begins.size:
        return np.zeros((num_groups, 0))
    reduce = np.add if score == "softmax" else np.maximum
    return np.asarray(reduce.reduceat(of_rows, begins, axis=1))


def choose_blocks(
    scores: np.ndarray,
    topk: int,
    *,
    first: int = 0,
    last: int = 0,
    allowed: np.ndarray | None = None,
) -> np.ndarray:
    """The blocks of a list, ascending: int64 [at most topk].

    The first and last blocks are in, then those of the greatest scores [blocks]; of equal ones the
    lower block. NaN counts as -inf. allowed: bool [blocks], the others do not compete at all.
    """
    blocks = np.arange(scores.size)
    is_forced = (blocks < first) | (blocks >= scores.size - last)
    keys = np.where(np.isnan(scores), -np.inf, scores)
    order = np.lexsort((blocks, -keys, ~is_forced))
    if allowed is not None:
        order = order[allowed[order]]
    return np.sort(order[:topk])
