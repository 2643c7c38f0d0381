"""Calls without a plan on the CPU: the reference, request by request."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from .. import array
from ..array import ArrayView
from ..core import parse
from ..errors import ArgumentError
from . import cpu, row_mask
from .arrays import Arrays
from .check_planless import Call, require_from_zero
from .views import Names


class RoomError(ArgumentError, RuntimeError):
    """Keys past the pages or rows of a cache, for which flash_attn raises RuntimeError."""


class Request(NamedTuple):
    """Rows of q and, without a page table, of k and v.

    kv_begin  the first key that rows may see
    """

    q_start: int
    qo_len: int
    kv_start: int
    kv_len: int
    kv_begin: int = 0


class _Lengths(NamedTuple):
    """The rows and keys of each request, where they begin, and the first key that its rows may see:
    int64 [B]."""

    starts: np.ndarray
    qo_len: np.ndarray
    kv_start: np.ndarray
    kv_len: np.ndarray
    kv_begin: np.ndarray


def requests_of(call: Call, read: Callable[[ArrayView], np.ndarray], names: Names) -> list[Request]:
    """The requests' lengths, checked; `read` brings an index array to the host.

    Raises ArgumentError for what the GPU would cut.
    """
    found = _read_lengths(call, read, names)
    starts, qo_len, _, kv_len, kv_begin = found
    if call.mask is not None and (qo_len > call.mask_bits).any():
        raise ArgumentError(
            f"mask: a request has {qo_len.max()} rows, but those of the mask are of "
            f"{call.mask_bits} bits; wanted {names.max_q_len} to be the most rows of one request"
        )
    _check_room(call, found, names)
    order = np.argsort(starts[qo_len > 0])
    first, behind = (x[qo_len > 0][order] for x in (starts, starts + qo_len))
    if (first[1:] < behind[:-1]).any():
        raise ArgumentError(
            f"{names.qo_offsets}: requests share rows of {names.q}; wanted rows of its own for each"
        )
    if call.pads_lse and _gives_lse(call) and qo_len.max(initial=0) > call.lse_shape[1]:
        raise ArgumentError(
            f"{names.max_q_len}: got {call.lse_shape[1]}, but request {qo_len.argmax()} has "
            f"{qo_len.max()} rows, which the LSE needs room for"
        )
    wrong = np.flatnonzero((kv_begin < 0) | (kv_begin > np.maximum(kv_len, 0)))
    if wrong.size:
        at = int(wrong[0])
        raise ArgumentError(
            f"{names.kv_begin}: request {at} begins at key {kv_begin[at]} of {kv_len[at]}; wanted "
            "one of its keys"
        )
    return [Request(*map(int, each)) for each in zip(*found, strict=True)]


def _read_lengths(call: Call, read: Callable[[ArrayView], np.ndarray], names: Names) -> _Lengths:
    """Lengths and offsets as the call means them: in tokens, and those left out from the others."""
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
    kv_len = tokens(given.kv_lens, abs(formats[1].unit), names.kv_lens)
    assert kv_len is not None
    if formats[1].unit < 0:
        kv_len = np.diff(kv_len)
    starts = tokens(given.qo_offsets, formats[2].unit, names.qo_offsets)
    kv_start = tokens(given.kv_offsets, formats[3].unit, names.kv_offsets)
    for what, v, own, unit in (
        ("o", given.o_offsets, starts, call.units[0]),
        ("v", given.v_offsets, kv_start, call.units[1]),
    ):
        repeated = tokens(v, unit, f"batch_offsets_{what}")
        if repeated is not None and own is not None and (repeated[:count] != own[:count]).any():
            raise ArgumentError(
                f"batch_offsets_{what}: it names other rows than the offsets of "
                f"{'q' if what == 'o' else 'k'}; pass offsets of the same rows, or none"
            )
    if qo_len is None:
        if lengths.qo_len >= 0:
            qo_len = np.full(count, lengths.qo_len)
        else:
            assert starts is not None
            require_from_zero(starts, names.qo_offsets)
            qo_len = np.diff(starts)
    if starts is None:
        starts = np.arange(count) * max(lengths.qo_len, 0)
    kv_begin = tokens(given.kv_begin, 1, names.kv_begin)
    none = np.zeros(count, np.int64)
    return _Lengths(
        starts[:count],
        qo_len,
        none if kv_start is None else kv_start[:count],
        kv_len,
        none if kv_begin is None else kv_begin,
    )


def _check_room(call: Call, found: _Lengths, names: Names) -> None:
    """ArgumentError for rows or keys that the arrays do not hold."""
    lengths = call.lengths
    for name, begin, size, longest, most in (
        (names.qo_offsets, found.starts, found.qo_len, lengths.num_rows, lengths.num_rows),
        (names.kv_lens, found.kv_start, found.kv_len, lengths.max_kv_len, lengths.kv_room),
    ):
        # Sums might be beyond 64 bits.
        is_outside = (size < 0) | (begin < 0) | (size > longest) | (begin > most - size)
        wrong = np.flatnonzero(is_outside)
        if not wrong.size:
            continue
        at = int(wrong[0])
        hint = ""
        may_hint = names.has_layout and name == names.kv_lens
        if may_hint and _fits_other_layout(call, int(begin[at]) + int(size[at])):
            hint = f". With kv_layout={parse.other_layout(call.geometry.spec.kv_layout)!r} "
            hint += "they would hold as many"
        kind: type[ArgumentError] = ArgumentError
        holder = f"{names.q if name == names.qo_offsets else names.k} holds"
        if name == names.kv_lens and size[at] > most:
            kind = RoomError
            if call.block_tables is not None and "table" in names.block_tables:
                holder = f"{names.block_tables} has pages for"
        raise kind(
            f"{name}: request {at} has {size[at]}{_from(int(begin[at]))}, and {holder} {most}{hint}"
        )


def _from(begin: int) -> str:
    return f" from {begin} on" if begin else ""


def _fits_other_layout(call: Call, num_keys: int) -> bool:
    """Whether a request may have so many keys if heads and slots of the cache change places."""
    spec, table = call.geometry.spec, call.block_tables
    if table is None or spec.page_size == 0 or spec.num_qo_heads % spec.page_size:
        return False
    return num_keys <= table.shape[1] * spec.num_kv_heads


Tables = tuple[np.ndarray, np.ndarray]


def read_tables(
    call: Call, requests: list[Request], read: Callable[[ArrayView], np.ndarray], name: str
) -> Tables | None:
    """The page tables of keys and of values; ArgumentError for pages in use that the cache does not
    have."""
    if call.block_tables is None or call.value_tables is None:
        return None
    keys = read(call.block_tables).astype(np.int64)
    is_one = call.value_tables is call.block_tables
    tables = keys, keys if is_one else read(call.value_tables).astype(np.int64)
    for index, request in enumerate(requests):
        for table in tables:
            own = pages_of(call, table, index, request)
            wrong = own[(own < 0) | (own >= call.keys.size)]
            if wrong.size:
                raise ArgumentError(
                    f"{name}: request {index} has page {int(wrong[0])}; the cache holds "
                    f"{call.keys.size} pages"
                )
    return tables


def pages_of(call: Call, table: np.ndarray, index: int, request: Request) -> np.ndarray:
    """The pages that hold a request's keys."""
    count = -(-request.kv_len // call.geometry.spec.page_size)
    if call.has_table_offsets:
        return table.reshape(-1)[request.kv_start : request.kv_start + count]
    return table[index, :count]


def answer(call: Call, arrays: Arrays, append: Callable[[], None] | None = None) -> Any:
    """out, or (out, lse) if `return_lse`. append: see call.run."""
    names = call.names
    places = requests_of(call, array.as_numpy, names)
    tables = read_tables(call, places, array.as_numpy, names.block_tables)
    if append is not None:
        append()
    scales = call.scales
    spec = replace(call.geometry.spec, sm_scale=scales.logits, output_scale=scales.output)
    requests = list(_reference_requests(call, places, tables))
    extras = {"sinks": call.sinks, "output_gate": call.output_gate}
    o, lse = cpu.attend(spec, array.as_numpy(call.q), requests, extras)
    owned = np.zeros(len(o), np.bool_)
    for request in requests:
        owned[request.rows] = True
    # As on a GPU, rows of no request are left as they are.
    out = cpu.deliver(o if call.out else o.reshape(call.out_shape), call.out, call.q, owned)
    out = out if arrays.out is None else arrays.out
    if not _gives_lse(call):
        return out
    if call.pads_lse:
        lse, owned = _padded(call, requests, lse), np.ones(len(requests), np.bool_)
    lse = lse.astype(np.float32)
    lse = cpu.deliver(lse if call.lse else lse.reshape(call.lse_shape), call.lse, call.q, owned)
    lse = lse if arrays.lse is None else arrays.lse
    return (out, lse) if call.return_lse else out


def _gives_lse(call: Call) -> bool:
    return call.return_lse or call.lse is not None


def _reference_requests(
    call: Call, places: list[Request], tables: Tables | None
) -> Iterator[cpu.Request]:
    spec, seen = call.geometry.spec, None
    kv_layout = spec.kv_layout if spec.page_size else "NHD"
    k, v = (cpu.tokens_first(x, kv_layout) for x in (call.keys.k, call.keys.v))
    if call.mask is not None:
        seen = row_mask.visible(call.mask, call.lengths.num_rows, call.mask_bits)
    options = _options(call)
    for index, place in enumerate(places):
        q_start, qo_len, kv_start, kv_len, kv_begin = place
        rows = slice(q_start, q_start + qo_len)
        mask = None
        if seen is not None:
            mask = row_mask.with_earlier_keys(seen[rows, :qo_len], kv_len)
        if tables is None:
            own_k, own_v = (x[kv_start : kv_start + kv_len] for x in (k, v))
        else:
            own_k, own_v = (
                cpu.gather(x, pages_of(call, ids, index, place), kv_len)
                for x, ids in zip((k, v), tables, strict=True)
            )
        own = options(index)
        yield cpu.Request(rows, own_k[kv_begin:], own_v[kv_begin:], mask, options=own)


def _options(call: Call) -> Callable[[int], dict[str, Any]]:
    """What differs between requests, or is not in the spec, as options of reference.attention."""
    same: dict[str, Any] = {"attention_chunk": call.attention_chunk}
    by_request: dict[str, np.ndarray] = {}
    if call.alibi_slopes is not None:
        by_request["alibi_slopes"] = array.as_numpy(call.alibi_slopes)
    for name, v, is_by_head in zip(
        ("scale_q", "scale_k", "scale_v"), call.scales.views, call.scales.by_head, strict=True
    ):
        if v is not None and is_by_head:
            values = array.as_numpy(v)
            if name == "scale_q":
                values = values.repeat(call.geometry.spec.group_size, axis=1)
            by_request[name] = values
    return lambda index: same | {name: values[index] for name, values in by_request.items()}


def _padded(call: Call, requests: list[cpu.Request], lse: np.ndarray) -> np.ndarray:
    """[requests, max_q_len, num_qo_heads] in natural log, -inf behind a request's rows."""
    padded = np.full(call.lse_shape, -np.inf, np.float32)
    for index, request in enumerate(requests):
        own = lse[request.rows][: padded.shape[1]]
        padded[index, : len(own)] = own * math.log(2.0)
    return padded


def check_values(call: Call) -> None:
    """Under CUPYATTN_DEBUG=1: read what such calls trust device memory with, and check it.

    Waits for lengths, offsets and page tables. Raises ArgumentError for what would be cut or stray.
    """
    requests = requests_of(call, array.to_host, call.names)
    read_tables(call, requests, array.to_host, call.names.block_tables)
