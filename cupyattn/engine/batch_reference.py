"""The requests of a batch as the reference computes them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from ..array import ArrayView
from . import row_mask
from .cpu import Request, gather, tokens_first
from .key_share import reference_places
from .kv_cache import Keys
from .requests import Batch
from .wrapper import Plan

# What reference.attention is told of a request of a batch, which has this index.
RequestOptions = Callable[[Batch, int], dict[str, Any]]


def requests_of(
    plan: Plan, keys: Keys, vmask: ArrayView | None, scales: RequestOptions
) -> Iterator[Request]:
    """The requests of a plan. vmask: a run's mask of rows, in place of the plan's."""
    spec, batch = plan.geometry.spec, plan.batch
    k, v = (tokens_first(x, spec.kv_layout) for x in (keys.k, keys.v))
    if batch.parts:
        yield from _requests_of_levels(batch, k, v, spec.causal)
        return
    seen = None
    if vmask is not None:
        seen = row_mask.visible(vmask, batch.num_rows, batch.requests.uniform)
    lengths = batch.requests
    for index in range(batch.num_requests):
        begin, kv_len = int(lengths.q_start[index]), int(lengths.kv_len[index])
        rows = slice(begin, begin + int(lengths.qo_len[index]))
        positions = reference_places(batch, spec, index)
        if seen is None:
            mask = plan.mask.of_request(batch, index)
        else:
            mask = row_mask.with_earlier_keys(seen[rows], kv_len, **positions)
        own_k, own_v = (_keys_of(x, batch, index, kv_len) for x in (k, v))
        options = {**positions, **scales(batch, index)}
        if spec.logits is not None:
            options["batch"] = index
        yield Request(rows, own_k, own_v, mask, options=options)


def _keys_of(x: np.ndarray, batch: Batch, index: int, kv_len: int) -> np.ndarray:
    """[kv_len, num_kv_heads, head_dim] of one request, from its pages or rows."""
    begin = int(batch.requests.kv_start[index])
    if x.ndim == 3:
        return x[begin : begin + kv_len]
    assert batch.page_ids is not None
    return gather(x, batch.page_ids[begin : begin - (-kv_len // x.shape[1])], kv_len)


def _requests_of_levels(
    batch: Batch, k: np.ndarray, v: np.ndarray, causal: bool
) -> Iterator[Request]:
    """The keys of all levels as one sequence, for the rows of each piece between two bounds."""
    last = batch.parts[-1]
    # Between two of these rows the keys of a row are the same.
    bounds = np.unique(np.concatenate([part.qo_indptr for part in batch.parts]))
    for begin, end in zip(bounds[:-1].tolist(), bounds[1:].tolist(), strict=True):
        owners = [_request_of(part, begin) for part in batch.parts]
        keys, values = (
            np.concatenate([_keys_of_level(x, batch, at, own) for at, own in enumerate(owners)])
            for x in (k, v)
        )
        # Positions count from the first row of the last level's request.
        first, stop = last.qo_indptr[owners[-1] : owners[-1] + 2].tolist()
        qo_len, own_len = stop - first, int(last.requests.kv_len[owners[-1]])
        mask = np.ones((qo_len, len(keys)), np.bool_)
        if causal:
            limit = np.maximum(np.arange(qo_len) + own_len - qo_len, -1) + len(keys) - own_len
            mask = np.arange(len(keys)) <= limit[:, None]
        answered = slice(begin - first, end - first)
        yield Request(slice(first, stop), keys, values, mask, answered)


def _request_of(part: Batch, row: int) -> int:
    return int(np.searchsorted(part.qo_indptr, row, side="right")) - 1


def _keys_of_level(x: np.ndarray, batch: Batch, level: int, request: int) -> np.ndarray:
    """[kv_len, num_kv_heads, head_dim] of one request of a level."""
    part = batch.parts[level]
    assert part.page_ids is not None
    begin, end = part.kv_indptr[request : request + 2].tolist()
    return gather(x, part.page_ids[begin:end], int(part.requests.kv_len[request]))
