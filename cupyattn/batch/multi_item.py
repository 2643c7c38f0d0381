"""Multi-item scoring: a prefix and items behind it that see the prefix and themselves.

A sequence is prefix, delimiter, item, delimiter, item, ..., delimiter. A token of an item sees the
prefix and its item up to itself; a delimiter sees the prefix and is seen by nobody; within the
prefix attention is causal. So what a row sees is two runs of keys, and no bits are needed.
Semantics: FlashInfer's mask mode of the same name (flashinfer-ai/flashinfer pull request 1015).
"""

from __future__ import annotations

import operator
from typing import Any

import numpy as np

from .. import array
from ..errors import ArgumentError
from .requests import Batch


def read_runs(
    batch: Batch,
    prefix_len_ptr: Any,
    token_pos_in_items_ptr: Any,
    token_pos_in_items_len: Any,
    max_item_len_ptr: Any,
) -> np.ndarray | None:
    """int32 [rows of q, 2], the KeyInterval of each row (params/attention.cuh); None without items.

    Arguments as in BatchPrefillWithPagedKVCacheWrapper.plan. Raises ArgumentError.
    """
    given = {
        "prefix_len_ptr": prefix_len_ptr,
        "token_pos_in_items_ptr": token_pos_in_items_ptr,
        "token_pos_in_items_len": token_pos_in_items_len or None,
        "max_item_len_ptr": max_item_len_ptr,
    }
    named = [name for name, x in given.items() if x is not None]
    if not named:
        return None
    for name in ("prefix_len_ptr", "token_pos_in_items_ptr"):
        if given[name] is None:
            raise ArgumentError(
                f"{name}: None, but {named[0]} is given; multi-item scoring needs both "
                "prefix_len_ptr and token_pos_in_items_ptr"
            )
    count = batch.num_requests
    if max_item_len_ptr is not None:
        _per_request(
            array.view(max_item_len_ptr, "max_item_len_ptr").shape, count, "max_item_len_ptr"
        )
    prefix = _host_integers(prefix_len_ptr, "prefix_len_ptr")
    _per_request(prefix.shape, count, "prefix_len_ptr")
    places = _host_integers(token_pos_in_items_ptr, "token_pos_in_items_ptr")
    stride = _stride(token_pos_in_items_len, places, count)
    lengths = batch.requests
    behind = lengths.kv_len - prefix
    if count and int(behind.max()) > stride:
        at = int(np.argmax(behind))
        raise ArgumentError(
            f"token_pos_in_items_len: {stride} places a request, but request {at} has "
            f"{behind[at]} keys behind its prefix of {prefix[at]}; wanted a place for each"
        )
    request = np.repeat(np.arange(count), lengths.qo_len)
    token = np.arange(batch.num_rows) - lengths.q_start[request]
    position = token + (lengths.kv_len - lengths.qo_len)[request]
    index = position - prefix[request]
    # Rows of the prefix, and those ahead of all keys, see what causality lets them.
    runs = np.stack([position + 1, position + 1], axis=1)
    inside = np.flatnonzero(index >= 0)
    place = places[request[inside] * stride + index[inside]]
    runs[inside, 0] = prefix[request[inside]]
    runs[inside, 1] -= place
    return np.ascontiguousarray(runs, np.int32)


def visible(runs: np.ndarray, qo_len: int, kv_len: int) -> np.ndarray:
    """On the CPU: bool [qo_len, kv_len] of one request, from its rows of `read_runs`."""
    keys = np.arange(kv_len)
    position = np.arange(qo_len)[:, None] + kv_len - qo_len
    seen: np.ndarray = (keys < runs[:, :1]) | (keys >= runs[:, 1:])
    return seen & (keys <= position)


def _host_integers(x: Any, name: str) -> np.ndarray:
    """int64 [n] of numbers that are not negative; an array on a GPU is waited for."""
    a = array.to_host(array.view(x, name))
    if a.ndim != 1 or a.dtype.kind not in "iu":
        raise ArgumentError(
            f"{name}: got {a.dtype} {list(a.shape)}; wanted integers with one dimension"
        )
    if a.size and ((a.dtype.kind == "i" and a.min() < 0) or a.max() >= 1 << 31):
        raise ArgumentError(f"{name}: holds {a.min()} to {a.max()}; wanted 0 to {2**31 - 1}")
    return a.astype(np.int64)


def _per_request(shape: Any, count: int, name: str) -> None:
    if tuple(shape) != (count,):
        raise ArgumentError(f"{name}: shape is {list(shape)}; wanted [{count}], one a request")


def _stride(given: Any, places: np.ndarray, count: int) -> int:
    """Places of a request in token_pos_in_items_ptr; 0 stands for all, if there is one request."""
    try:
        stride = operator.index(given)
    except TypeError:
        stride = -1
    if stride == 0 and count <= 1:
        stride = int(places.size)
    if stride < 0 or (stride == 0 and count) or count * stride > places.size:
        raise ArgumentError(
            f"token_pos_in_items_len: got {given!r}, for {places.size} places and {count} requests;"
            " wanted how many places each request has in token_pos_in_items_ptr"
        )
    return stride
