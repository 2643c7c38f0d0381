"""A cascade on the CPU: the reference over the keys of all levels as one sequence."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from .. import reference
from ..inputs.geometry import Geometry
from .requests import Batch


def attend_levels(
    geometry: Geometry,
    batch: Batch,
    arrays: tuple[np.ndarray, np.ndarray, np.ndarray],
    sm_scale: float,
    sinks: np.ndarray | None,
    scales: Mapping[str, Any],
) -> tuple[np.ndarray, np.ndarray]:
    """(o [rows, num_qo_heads, head_dim], lse [rows, num_qo_heads]) in float64.

    arrays: q, and k and v as NHD pages.
    """
    q, k, v = arrays
    options, problem = geometry.options, geometry.problem
    o = np.zeros((batch.num_rows, geometry.num_qo_heads, problem.head_dim_vo))
    lse = np.full(o.shape[:-1], -np.inf)
    last = batch.parts[-1]
    # Between two of these rows the keys of a row are the same.
    cuts = np.unique(np.concatenate([part.qo_indptr for part in batch.parts]))
    for begin, end in zip(cuts[:-1].tolist(), cuts[1:].tolist(), strict=True):
        requests = [_request_of(part, begin) for part in batch.parts]
        keys, values = (
            np.concatenate(
                [_rows_of(x, batch, level, r) for level, r in enumerate(requests)], axis=0
            )
            for x in (k, v)
        )
        # Positions count from the first row of the last level's request.
        own, first = last.requests, int(last.qo_indptr[requests[-1]])
        rows = slice(first, int(last.qo_indptr[requests[-1] + 1]))
        qo_len, own_len = rows.stop - rows.start, int(own.kv_len[requests[-1]])
        mask = None
        if options.causal:
            limit = np.maximum(np.arange(qo_len) + own_len - qo_len, -1) + len(keys) - own_len
            mask = np.arange(len(keys)) <= limit[:, None]
        answer = reference.attention(
            q[rows],
            keys,
            values,
            window_left=options.window_left,
            mask=mask,
            logits_soft_cap=options.logits_soft_cap,
            sm_scale=sm_scale,
            pos_encoding_mode=problem.pos_encoding,
            rope_scale=options.rope_scale,
            rope_theta=options.rope_theta,
            sinks=sinks,
            alibi_start=len(keys) - qo_len,
            **scales,
        )
        wanted = slice(begin - first, end - first)
        o[begin:end], lse[begin:end] = answer[0][wanted], answer[1][wanted]
    return o, lse


def _request_of(part: Batch, row: int) -> int:
    return int(np.searchsorted(part.qo_indptr, row, side="right")) - 1


def _rows_of(x: np.ndarray, batch: Batch, level: int, request: int) -> np.ndarray:
    """[keys, num_kv_heads, head_dim] of one request of a level, gathered from its pages."""
    part = batch.parts[level]
    before = sum(other.num_page_ids for other in batch.parts[:level])
    assert batch.page_ids is not None
    begin, end = (before + int(n) for n in part.kv_indptr[request : request + 2])
    pages = batch.page_ids[begin:end]
    kv_len = int(part.requests.kv_len[request])
    return x[pages].reshape(-1, *x.shape[2:])[:kv_len]
