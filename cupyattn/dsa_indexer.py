"""FlashInfer's index of DeepSeek Sparse Attention, over `cupyattn.sparse.select`."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from . import array
from .core import parse
from .core.names import refuse_names
from .core.tracing import untraced
from .engine import geometry
from .errors import ArgumentError
from .sparse import select
from .typing import Array

__all__ = ["dsa_indexer_topk"]

if not TYPE_CHECKING:
    __getattr__ = refuse_names(__name__)


@untraced
def dsa_indexer_topk(
    q: Array,
    k: Array,
    w: Array,
    cu_seqlens_q: Array,
    cu_seqlens_k: Array,
    *,
    top_k: int = 2048,
    softmax_scale: float | None = None,
    q_causal_offsets: Any = None,
    ratio: int = 1,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    workspace_buffer: Any = None,
    indices: Array | None = None,
    scores: Array | None = None,
    backend: str = "cake",
) -> Any:
    """The keys of the greatest sums over heads of w * max(softmax_scale * q · k, 0), for each token
    of a prompt: `sparse.select` with score "relu_sum" and blocks of one key.

    Parameters
    ----------
    q
        [tokens, heads, head_dim], float16 or bfloat16.
    k
        [rows, head_dim], of any row stride.
    w
        float32 [tokens, heads], of any sign.
    cu_seqlens_q, cu_seqlens_k
        int32 [segments + 1]. The tokens of a segment are its last keys.
    top_k
        Entries of a list.
    softmax_scale
        Above 0, default 1 / sqrt(head_dim).
    indices, scores
        Arrays to write: int32 and float32 [tokens, top_k].
    ratio
        Must be 1.
    q_causal_offsets
        Must be None.
    max_seqlen_q, max_seqlen_k, workspace_buffer, backend
        Accepted for compatibility.

    Returns
    -------
    tuple of arrays
        (indices, scores): ascending within the segment, then -1 and -inf. Of equal scores the lower
        key is taken, where FlashInfer takes the higher one.

    Raises
    ------
    CupyAttnError
        Errors as `sparse.select`.

    Notes
    -----
    Semantics: FlashInfer's function of the same name.

    Examples
    --------
    >>> import numpy as np
    >>> from cupyattn import dsa_indexer
    >>> q, k = np.ones((4, 8, 64), np.float16), np.ones((4, 64), np.float16)
    >>> w, offsets = np.ones((4, 8), np.float32), np.array([0, 4], np.int32)
    >>> indices, scores = dsa_indexer.dsa_indexer_topk(q, k, w, offsets, offsets, top_k=2)
    >>> indices
    array([[ 0, -1],
           [ 0,  1],
           [ 0,  1],
           [ 0,  1]], dtype=int32)
    """
    geometry.refuse("is not supported", q_causal_offsets=q_causal_offsets)
    if ratio != 1:
        raise ArgumentError(f"ratio: got {ratio!r}; wanted 1, or sparse.select with its ratio")
    columns = [1, *getattr(q, "shape", ())][-1]  # what is no array is refused by select
    scale = parse.positive(softmax_scale, "softmax_scale", 1.0 / math.sqrt(max(1, columns)))
    lists, values = select(
        q,
        k,
        topk=top_k,
        block=1,
        score="relu_sum",
        weights=w,
        indptr=cu_seqlens_q,
        kv_indptr=cu_seqlens_k,
        sm_scale=scale,
        out=_with_groups(indices, "indices"),
        values=_with_groups(scores, "scores"),
        return_values=True,
    )
    if indices is None:
        indices = _without_groups(lists)
    if scores is None:
        scores = _without_groups(values)
    return indices, scores


def _with_groups(x: Any, name: str) -> Any:
    """[tokens, entries] as [tokens, 1, entries], of the same memory."""
    if x is None:
        return None
    v = array.view(x, name)
    if len(v.shape) != 2:
        raise ArgumentError(f"{name}: shape is {list(v.shape)}; wanted [tokens, top_k]")
    tokens, entries = v.shape
    return array.restride(x, name, (tokens, 1, entries), (v.strides[0], 0, v.strides[1]))


def _without_groups(x: Any) -> Any:
    """[tokens, 1, entries] as [tokens, entries], of the same memory."""
    return x[:, 0]
