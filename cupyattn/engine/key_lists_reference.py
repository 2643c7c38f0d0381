"""Attention by lists on the CPU: the reference, token by token and group by group."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, Protocol

import numpy as np

from .. import array
from ..core.spec import AttentionSpec
from ..errors import ArgumentError
from . import cpu
from .check_planless import Call
from .key_lists import NAME, KeyLists


class Span(Protocol):
    """Tokens of a request, its keys, and where these begin where there are no pages."""

    @property
    def q_start(self) -> int: ...
    @property
    def qo_len(self) -> int: ...
    @property
    def kv_start(self) -> int: ...
    @property
    def kv_len(self) -> int: ...


# Keys and values [positions, heads, columns] at positions of a request, by its number.
Gather = Callable[[int, Span, np.ndarray, slice], tuple[np.ndarray, np.ndarray]]


def listed_keys(entries: np.ndarray, num_seen: int, form: KeyLists) -> np.ndarray:
    """The positions that a token attends to which sees so many keys of its request: those of its
    list in the order of its entries, as often as they are named, and those of its window."""
    size, begin = form.granularity, max(num_seen - form.window, 0)
    blocks = entries[entries >= 0].astype(np.int64)
    positions = (blocks[:, None] * size + np.arange(size)).reshape(-1)
    return np.concatenate([positions[positions < begin], np.arange(begin, num_seen)])


def num_seen(span: Span, token: int, is_causal: bool) -> int:
    """The keys that a token of a request sees."""
    later = span.qo_len - 1 - token if is_causal else 0
    return max(span.kv_len - later, 0)


def attend(
    call: Call,
    spec: AttentionSpec,
    q: np.ndarray,
    spans: Sequence[Span],
    tables: np.ndarray | None,
) -> tuple[np.ndarray, np.ndarray]:
    """(o, lse) as cpu.attend has them."""
    form = call.options.key_lists
    assert call.lists is not None and form is not None
    lists = array.as_numpy(call.lists)
    o = np.zeros((*q.shape[:2], spec.head_dim_vo), spec.dtype_o.numpy)
    lse = np.full(q.shape[:2], -np.inf)
    num_groups = lists.shape[1]
    num_heads = spec.num_qo_heads // num_groups
    gather = _gather(call, tables)
    for group in range(num_groups):
        heads = slice(group * num_heads, (group + 1) * num_heads)
        first = heads.start // spec.group_size
        kv_heads = slice(first, max(first + 1, heads.stop // spec.group_size))
        own = replace(spec, num_qo_heads=num_heads, num_kv_heads=kv_heads.stop - kv_heads.start)
        requests = _requests(call, spans, lists[:, group], gather, kv_heads)
        extras = _of_heads(call, heads)
        o[:, heads], lse[:, heads] = cpu.attend(own, q[:, heads], requests, extras)
    return o, lse


def _of_heads(call: Call, heads: slice) -> dict[str, array.ArrayView | None]:
    """What these heads have of their own in all requests."""
    extras: dict[str, array.ArrayView | None] = {}
    if call.sinks is not None:
        extras["sinks"] = array.view(array.as_numpy(call.sinks)[heads], "sinks")
    if call.output_gate is not None:
        gate = np.ascontiguousarray(array.as_numpy(call.output_gate)[:, heads])
        extras["output_gate"] = array.view(gate, "output_gate")
    return extras


def _requests(
    call: Call, spans: Sequence[Span], lists: np.ndarray, gather: Gather, kv_heads: slice
) -> Iterator[cpu.Request]:
    """A request for each token, over the keys that its list has."""
    form, scales = call.options.key_lists, call.scales
    assert form is not None
    by_head: dict[str, Any] = {
        name: array.as_numpy(v)[:, kv_heads]
        for name, v in zip(("scale_q", "scale_k", "scale_v"), scales.views, strict=True)
        if v is not None
    }
    for index, span in enumerate(spans):
        options = {name: values[index] for name, values in by_head.items()}
        for token in range(span.qo_len):
            row = span.q_start + token
            seen = num_seen(span, token, form.is_causal)
            k, v = gather(index, span, listed_keys(lists[row], seen, form), kv_heads)
            yield cpu.Request(slice(row, row + 1), k, v, options=options)


def _gather(call: Call, tables: np.ndarray | None) -> Gather:
    """What gives listed keys. Only the pages that hold some are looked up."""
    spec, num_pages = call.geometry.spec, call.keys.size
    kv_layout, size = spec.kv_layout if spec.page_size else "NHD", spec.page_size
    k, v = (cpu.tokens_first(x, kv_layout) for x in (call.keys.k, call.keys.v))

    def of_rows(
        index: int, span: Span, positions: np.ndarray, heads: slice
    ) -> tuple[np.ndarray, np.ndarray]:
        rows = span.kv_start + positions
        return k[rows][:, heads], v[rows][:, heads]

    def of_pages(
        index: int, span: Span, positions: np.ndarray, heads: slice
    ) -> tuple[np.ndarray, np.ndarray]:
        assert tables is not None
        pages, slots = tables[index][positions // size], positions % size
        wrong = pages[(pages < 0) | (pages >= num_pages)]
        if wrong.size:
            raise ArgumentError(
                f"{call.names.block_tables}: {NAME} name keys of request {index} on page "
                f"{int(wrong[0])}; the cache holds {num_pages} pages"
            )
        return k[pages, slots][:, heads], v[pages, slots][:, heads]

    return of_rows if tables is None else of_pages
