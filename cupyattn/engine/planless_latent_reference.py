"""Calls of latent attention without a plan on the CPU: the reference, request by request."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np

from .. import array
from ..array import ArrayView
from ..core.spec import AttentionSpec
from ..errors import ArgumentError
from ..launch.driver.params import LSE_OF_NO_KEYS_IS_INFINITE, LSE_WITHOUT_SINKS
from . import cpu
from . import latent_rows as latent
from .arrays import Arrays
from .check_planless_latent import Call

_SHARPNESS = 2.0**40


def answer(call: Call, arrays: Arrays, append: Callable[[], None] | None = None) -> Any:
    """out, or (out, lse) if `return_lse`. append: None, for such calls write no keys."""
    assert append is None
    options, vq = call.options, call.queries.latent
    requests = list(requests_of(call, array.as_numpy))
    spec = replace(call.geometry.spec, sm_scale=options.sm_scale, output_scale=options.output_scale)
    q = latent.as_rows(call.queries, options.rope_scale)
    o, lse = cpu.attend(spec, q, requests, {"sinks": call.sinks})
    if call.sinks is not None and options.lse_form & LSE_WITHOUT_SINKS:
        _, lse = cpu.attend(spec, q, requests, {})
    if options.lse_form & LSE_OF_NO_KEYS_IS_INFINITE:
        lse[np.isneginf(lse)] = np.inf
    if call.max_logits is not None:
        array.as_numpy(call.max_logits)[...] = _max_logits(spec, q, requests)
    owned = np.zeros(len(o), np.bool_)
    for request in requests:
        owned[request.rows] = True
    out = cpu.deliver(o if call.out else o.reshape(call.out_shape), call.out, vq, owned)
    out = out if arrays.out is None else arrays.out
    if not (options.return_lse or call.lse is not None):
        return out
    if options.natural_lse:
        lse = lse * math.log(2.0)
    if options.pads_lse and call.lse is None:
        count, heads, rows = call.lse_shape
        lse = lse.reshape(count, rows, heads).swapaxes(-1, -2)
    elif call.lse is None:
        lse = lse.reshape(call.lse_shape)
    else:
        lse = lse.reshape(call.lse.shape)
    if options.pads_lse:
        owned = np.ones(len(lse), np.bool_)
    lse = cpu.deliver(np.ascontiguousarray(lse, np.float32), call.lse, vq, owned)
    lse = lse if arrays.lse is None else arrays.lse
    return (out, lse) if options.return_lse else out


def _max_logits(spec: AttentionSpec, q: np.ndarray, requests: list[cpu.Request]) -> np.ndarray:
    """The largest natural logit of each row and head: the LSE of logits that are so large that the
    largest is all of it, over that factor."""
    sharp = replace(spec, sm_scale=spec.sm_scale * _SHARPNESS)
    _, lse = cpu.attend(sharp, q, requests, {})
    return lse * (math.log(2.0) / _SHARPNESS)


def requests_of(call: Call, read: Callable[[ArrayView], np.ndarray]) -> Iterator[cpu.Request]:
    """The requests, whose lengths and tables are checked; keys are gathered on the CPU only.

    Raises ArgumentError for what the GPU would cut, or read astray.
    """
    names, lengths = call.options.names, call.lengths
    table = read(call.table).astype(np.int64)
    if call.kv_lens is None:
        kv_lens = np.full(table.shape[0], table.shape[1])
    else:
        kv_lens = read(call.kv_lens).reshape(-1).astype(np.int64)
    if call.kv_lens is not None and call.options.is_list:
        kv_lens = _lens_of_tokens(call, kv_lens)
    if call.qo_offsets is None:
        starts = np.arange(lengths.num_requests + 1) * max(lengths.qo_len, 0)
    else:
        starts = read(call.qo_offsets).reshape(-1).astype(np.int64)
    if (np.diff(starts) < 0).any() or starts[0] < 0 or starts[-1] > lengths.num_rows:
        raise ArgumentError(
            f"{names.qo_offsets}: {starts.tolist()[:8]} do not rise from 0 to the "
            f"{lengths.num_rows} rows of {names.q}"
        )
    wrong = np.flatnonzero((kv_lens < 0) | (kv_lens > lengths.max_kv_len))
    if wrong.size:
        at = int(wrong[0])
        raise ArgumentError(
            f"{names.kv_lens}: request {at} has {kv_lens[at]} keys; wanted 0 to "
            f"{lengths.max_kv_len}, what {names.block_tables} has room for"
        )
    num_pages, page_size = call.pages.latent.shape[:2]
    is_list, on_cpu = call.options.is_list, call.queries.latent.device.kind == "cpu"
    most = num_pages * page_size if is_list else num_pages
    begins = None
    if call.kv_offsets is not None:
        begins, table = read(call.kv_offsets).astype(np.int64), table.reshape(1, -1)
        ends = begins - (-kv_lens // page_size)
        if (begins < 0).any() or (ends > table.size).any():
            raise ArgumentError(
                f"{names.kv_offsets}: {begins.tolist()[:8]}; {names.block_tables} has {table.size} "
                "entries, and pages of requests lie beyond"
            )
    for index, kv_len in enumerate(kv_lens.tolist()):
        row, begin = (index, 0) if begins is None else (0, int(begins[index]))
        ids = table[row, begin : begin + (kv_len if is_list else -(-kv_len // page_size))]
        ids = ids[(ids >= 0) & (ids < most)] if is_list else ids
        outside = ids[(ids < 0) | (ids >= most)]
        if outside.size:
            raise ArgumentError(
                f"{names.block_tables}: request {index} names {int(outside[0])}; the cache holds "
                f"{most} pages"
            )
        if not on_cpu:
            continue
        rows = slice(int(starts[index]), int(starts[index + 1]))
        if is_list:
            k, v = latent.gather(call.pages, ids // page_size, len(ids) * page_size)
            places = np.arange(len(ids)) * page_size + ids % page_size
            yield cpu.Request(rows, k[places], v[places])
        else:
            yield cpu.Request(rows, *latent.gather(call.pages, ids, kv_len))


def check_values(call: Call) -> None:
    """Under CUPYATTN_DEBUG=1: read what such calls trust device memory with, and check it."""
    for _ in requests_of(call, array.to_host):
        pass


def _lens_of_tokens(call: Call, kv_lens: np.ndarray) -> np.ndarray:
    """How many entries of each token's list count, from those of the caller's requests."""
    tokens = call.options.request_tokens
    lens = kv_lens.repeat(tokens)
    if not call.options.counts_later:
        return lens
    later = tokens - 1 - np.arange(len(lens)) % tokens
    return (lens - later).clip(0, call.lengths.max_kv_len)
