"""Calls without a plan on the CPU: the reference, request by request."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from .. import array, reference
from ..array import ArrayView
from ..errors import ArgumentError
from ..inputs import row_mask
from .check import Arrays, Call
from .views import Names


class Request(NamedTuple):
    """Rows of q and, without a page table, of k and v."""

    q_start: int
    qo_len: int
    kv_start: int
    kv_len: int


def requests_of(call: Call, read: Callable[[ArrayView], np.ndarray], names: Names) -> list[Request]:
    """The requests' lengths, checked; `read` brings an index array to the host.

    Raises ArgumentError for what the GPU would cut.
    """
    lengths, given = call.lengths, call.indices
    count, formats = lengths.num_requests, lengths.formats

    def tokens(v: ArrayView | None, unit: int, name: str) -> np.ndarray | None:
        if v is None:
            return None
        values = read(v).reshape(-1).astype(np.int64)
        if (values % unit).any():
            raise ArgumentError(
                f"{name}: {values.tolist()[:8]} are not all multiples of a token's {unit} "
                "elements; pass batch_offsets_units='tokens' if they count tokens"
            )
        return values // unit

    qo_len = tokens(given.qo_lens, 1, names.qo_lens)
    kv_len = tokens(given.kv_lens, 1, names.kv_lens)
    starts = tokens(given.qo_offsets, formats[2].unit, names.qo_offsets)
    kv_start = tokens(given.kv_offsets, formats[3].unit, names.kv_offsets)
    for what, v, own, unit in (
        ("o", given.o_offsets, starts, call.units[0]),
        ("v", given.v_offsets, kv_start, call.units[1]),
    ):
        double = tokens(v, unit, f"batch_offsets_{what}")
        if double is not None and own is not None and (double[:count] != own[:count]).any():
            raise ArgumentError(
                f"batch_offsets_{what}: it names other rows than the offsets of "
                f"{'q' if what == 'o' else 'k'}; pass offsets of the same rows, or none"
            )
    assert kv_len is not None
    if qo_len is None:
        if lengths.qo_len >= 0:
            qo_len = np.full(count, lengths.qo_len)
        else:
            assert starts is not None
            qo_len = np.diff(starts)
    if starts is None:
        starts = np.arange(count) * max(lengths.qo_len, 0)
    if kv_start is None:
        kv_start = np.zeros(count, np.int64)
    for name, begin, size, most in (
        (names.qo_offsets, starts[:count], qo_len, lengths.num_rows),
        (names.kv_lens, kv_start[:count], kv_len, lengths.max_kv_len),
    ):
        wrong = np.flatnonzero((size < 0) | (begin < 0) | (begin + size > most))
        if wrong.size:
            at = int(wrong[0])
            raise ArgumentError(
                f"{name}: request {at} has {size[at]} from {begin[at]} on; wanted them within "
                f"{most}, what the arrays hold"
            )
    return [
        Request(*map(int, each))
        for each in zip(starts[:count], qo_len, kv_start[:count], kv_len, strict=True)
    ]


def check_pages(call: Call, requests: list[Request], table: np.ndarray, name: str) -> None:
    """ArgumentError for pages in use that the cache does not have."""
    page_size = call.geometry.page_size
    for index, request in enumerate(requests):
        own = table[index, : -(-request.kv_len // page_size)]
        wrong = own[(own < 0) | (own >= call.keys.size)]
        if wrong.size:
            raise ArgumentError(
                f"{name}: request {index} has page {int(wrong[0])}; the cache holds "
                f"{call.keys.size} pages"
            )


def answer(call: Call, arrays: Arrays, names: Names) -> Any:
    """out, or (out, lse) if `return_lse`."""
    geometry, requests = call.geometry, requests_of(call, array.as_numpy, names)
    q, k, v = (array.as_numpy(x) for x in (call.q, call.keys.k, call.keys.v))
    if geometry.given.kv_layout == "HND" and geometry.page_size:
        k, v = k.swapaxes(1, 2), v.swapaxes(1, 2)
    table = None
    if call.block_tables is not None:
        table = array.as_numpy(call.block_tables).astype(np.int64)
        check_pages(call, requests, table, names.block_tables)
    o = np.zeros((*q.shape[:2], geometry.problem.head_dim_vo))
    lse = np.full(q.shape[:2], -np.inf)
    padded = np.full(call.lse_shape if call.pads_lse else (0, 0, 0), -np.inf)
    owned = np.zeros(len(q), np.bool_)
    seen = None
    if call.mask is not None:
        seen = row_mask.visible(call.mask, len(q), call.lengths.qo_len)
    for index, request in enumerate(requests):
        rows = slice(request.q_start, request.q_start + request.qo_len)
        o[rows], lse[rows] = reference.attention(
            q[rows],
            *(_keys_of(x, table, index, request) for x in (k, v)),
            causal=geometry.options.causal and seen is None,
            window_left=geometry.options.window_left,
            mask=None if seen is None else row_mask.with_earlier_keys(seen[rows], request.kv_len),
            sm_scale=call.scales.logits,
            sinks=None if call.sinks is None else array.as_numpy(call.sinks),
        )
        owned[rows] = True
        if call.pads_lse:
            count = min(request.qo_len, padded.shape[1])
            padded[index, :count] = lse[rows][:count] * math.log(2.0)
    with np.errstate(over="ignore", invalid="ignore"):
        values = (o * call.scales.output).astype(geometry.problem.dtype_o.numpy)
    # As on a GPU, rows of nobody are left as they are.
    if call.out is not None:
        array.as_numpy(call.out)[owned] = values[owned]
    if call.lse is not None and call.pads_lse:
        array.as_numpy(call.lse)[...] = padded
    elif call.lse is not None:
        array.as_numpy(call.lse)[owned] = lse[owned]
    out = arrays.out
    if out is None:
        out = array.from_numpy(values.reshape(call.out_shape), call.q)
    if not call.return_lse:
        return out
    if arrays.lse is not None:
        return out, arrays.lse
    sums = (padded if call.pads_lse else lse).astype(np.float32)
    return out, array.from_numpy(sums.reshape(call.lse_shape), call.q)


def _keys_of(x: np.ndarray, table: np.ndarray | None, index: int, request: Request) -> np.ndarray:
    """[kv_len, num_kv_heads, head_dim] of one request, from its pages or rows."""
    if table is None:
        return x[request.kv_start : request.kv_start + request.kv_len]
    pages = table[index, : -(-request.kv_len // x.shape[1])]
    return x[pages].reshape(-1, *x.shape[2:])[: request.kv_len]


def check_values(call: Call, names: Names) -> None:
    """Under CUPYATTN_DEBUG=1: read what such calls trust device memory with, and check it.

    Waits for lengths, offsets and page tables. Raises ArgumentError for what would be cut or stray.
    """
    requests = requests_of(call, array.to_host, names)
    if call.block_tables is not None:
        check_pages(call, requests, array.to_host(call.block_tables), names.block_tables)
