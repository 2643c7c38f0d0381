"""Calls without a plan on the CPU: the reference, request by request, of both layouts of keys."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from .. import array
from ..array import ArrayView
from ..core import parse
from ..core.spec import AttentionSpec
from ..errors import ArgumentError
from ..launch.driver.params import LSE_OF_NO_KEYS_IS_INFINITE, LSE_WITHOUT_SINKS
from . import cpu, key_lists_reference, planless_share, row_mask
from . import latent_rows as latent
from .arrays import Arrays
from .check_planless import Call, require_from_zero
from .views import Names

# Logits times this are so large that the largest is all of their LSE.
_SHARPNESS = 2.0**40


class RoomError(ArgumentError, RuntimeError):
    """Keys past the pages or rows of a cache, for which flash_attn raises RuntimeError."""


class Request(NamedTuple):
    """Rows of q and, without a page table, of k and v.

    kv_begin  the first key that rows may see
    whole_len  keys of the whole request, where ranks share them and their places decide; else -1
    """

    q_start: int
    qo_len: int
    kv_start: int
    kv_len: int
    kv_begin: int = 0
    whole_len: int = -1


class _Lengths(NamedTuple):
    """The rows and keys of each request, where they begin, the first key that its rows may see, and
    the length of the whole request: int64 [B]."""

    starts: np.ndarray
    qo_len: np.ndarray
    kv_start: np.ndarray
    kv_len: np.ndarray
    kv_begin: np.ndarray
    whole_len: np.ndarray


def requests_of(call: Call, read: Callable[[ArrayView], np.ndarray], names: Names) -> list[Request]:
    """The requests' lengths, checked; `read` brings an index array to the host.

    Raises ArgumentError for what the GPU would cut.
    """
    lengths = _read_lengths(call, read, names)
    starts, qo_len, _, kv_len, kv_begin, _ = lengths
    if call.mask is not None and (qo_len > call.mask_bits).any():
        raise ArgumentError(
            f"mask: a request has {qo_len.max()} rows, but those of the mask are of "
            f"{call.mask_bits} bits; wanted {names.max_q_len} to be the most rows of one request"
        )
    _check_room(call, lengths, names)
    order = np.argsort(starts[qo_len > 0])
    first, behind = (x[qo_len > 0][order] for x in (starts, starts + qo_len))
    if (first[1:] < behind[:-1]).any():
        raise ArgumentError(
            f"{names.qo_offsets}: requests share rows of {names.q}; wanted rows of its own for each"
        )
    max_rows = _padded_shape(call)[1] if call.pads_lse else 0
    if call.pads_lse and _gives_lse(call) and qo_len.max(initial=0) > max_rows:
        raise ArgumentError(
            f"{names.max_q_len}: got {max_rows}, but request {qo_len.argmax()} has "
            f"{qo_len.max()} rows, which the LSE needs room for"
        )
    wrong = np.flatnonzero((kv_begin < 0) | (kv_begin > np.maximum(kv_len, 0)))
    if wrong.size:
        at = int(wrong[0])
        raise ArgumentError(
            f"{names.kv_begin}: request {at} begins at key {kv_begin[at]} of {kv_len[at]}; wanted "
            "one of its keys"
        )
    return [Request(*map(int, each)) for each in zip(*lengths, strict=True)]


def _read_lengths(call: Call, read: Callable[[ArrayView], np.ndarray], names: Names) -> _Lengths:
    """Lengths and offsets as the call means them: in tokens, and those left out from the others."""
    lengths, indices = call.lengths, call.indices
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

    qo_len = tokens(indices.qo_lens, 1, names.qo_lens)
    kv_len = tokens(indices.kv_lens, abs(formats[1].unit), names.kv_lens)
    if kv_len is None:
        kv_len = np.full(count, lengths.max_kv_len)
    elif formats[1].unit < 0:
        kv_len = np.diff(kv_len)
    elif call.options.is_list:
        kv_len = _lens_of_tokens(call, kv_len)
    starts = tokens(indices.qo_offsets, formats[2].unit, names.qo_offsets)
    kv_start = tokens(indices.kv_offsets, formats[3].unit, names.kv_offsets)
    for what, v, own, unit in (
        ("o", indices.o_offsets, starts, call.units[0]),
        ("v", indices.v_offsets, kv_start, call.units[1]),
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
    kv_begin = tokens(indices.kv_begin, 1, names.kv_begin)
    none, whole_len = np.zeros(count, np.int64), np.full(count, -1)
    share = call.geometry.spec.key_share
    if share is not None and kv_begin is not None:
        rows = none if formats[4].unit > 0 else qo_len
        whole_len = planless_share.whole_lengths(share, kv_begin, rows, kv_len, names.kv_begin)
        kv_begin = None
    return _Lengths(
        starts[:count],
        qo_len,
        none if kv_start is None else kv_start[:count],
        kv_len,
        none if kv_begin is None else kv_begin,
        whole_len,
    )


def _lens_of_tokens(call: Call, kv_len: np.ndarray) -> np.ndarray:
    """How many entries of each token's list count, from those of the caller's requests."""
    tokens = call.options.request_tokens
    lens = kv_len.repeat(tokens)
    if not call.options.counts_later:
        return lens
    later = tokens - 1 - np.arange(len(lens)) % tokens
    return (lens - later).clip(0, call.lengths.max_kv_len)


def _check_room(call: Call, read: _Lengths, names: Names) -> None:
    """ArgumentError for rows or keys that the arrays do not hold."""
    lengths, kv_start = call.lengths, read.kv_start
    if call.form.has_table_offsets:
        kv_start = kv_start * call.form.page_size
    for name, begin, size, longest, room in (
        (names.qo_offsets, read.starts, read.qo_len, lengths.num_rows, lengths.num_rows),
        (names.kv_lens, kv_start, read.kv_len, lengths.max_kv_len, lengths.kv_room),
    ):
        # Sums might be beyond 64 bits.
        is_outside = (size < 0) | (begin < 0) | (size > longest) | (begin > room - size)
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
        if name == names.kv_lens and size[at] > room:
            kind = RoomError
            if call.options.is_list:
                holder = f"{names.block_tables} has entries for"
            elif call.block_tables is not None and "table" in names.block_tables:
                holder = f"{names.block_tables} has pages for"
        raise kind(
            f"{name}: request {at} has {size[at]}{_from(int(begin[at]))}, and {holder} {room}{hint}"
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
    if call.options.is_list or call.lists is not None:  # which read what lists name alone
        return tables
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
    """The pages that hold a request's keys, or its slots in a list."""
    count = -(-request.kv_len // call.form.page_size)
    if call.form.has_table_offsets:
        return table.reshape(-1)[request.kv_start : request.kv_start + count]
    return table[index, :count]


def attend(call: Call, arrays: Arrays, append: Callable[[], None] | None = None) -> Any:
    """out, or (out, lse) if `return_lse`. append: see call.run."""
    names = call.names
    spans = requests_of(call, array.as_numpy, names)
    tables = read_tables(call, spans, array.as_numpy, names.block_tables)
    if append is not None:
        append()
    scales, options = call.scales, call.options
    spec = replace(call.geometry.spec, sm_scale=scales.logits, output_scale=scales.output)
    q = array.as_numpy(call.q)
    if call.queries is not None:
        q = latent.as_rows(call.queries, options.rope_scale)
    if call.lists is None:
        requests = list(_reference_requests(call, spans, tables))
        extras = {"sinks": call.sinks, "output_gate": call.output_gate}
        o, lse = cpu.attend(spec, q, requests, extras)
    else:
        requests = []
        o, lse = key_lists_reference.attend(
            call, spec, q, spans, None if tables is None else tables[0]
        )
    if call.sinks is not None and options.lse_form & LSE_WITHOUT_SINKS:
        _, lse = cpu.attend(spec, q, requests, {})
    if options.lse_form & LSE_OF_NO_KEYS_IS_INFINITE:
        lse[np.isneginf(lse)] = np.inf
    if call.max_logits is not None:
        array.as_numpy(call.max_logits)[...] = _max_logits(spec, q, requests)
    owned = np.zeros(len(o), np.bool_)
    for span in spans:
        owned[span.q_start : span.q_start + span.qo_len] = True
    # As on a GPU, rows of no request are left as they are.
    out = cpu.deliver(o if call.out else o.reshape(call.out_shape), call.out, call.q, owned)
    out = out if arrays.out is None else arrays.out
    if not _gives_lse(call):
        return out
    if options.natural_lse or call.pads_lse:
        lse = lse * math.log(2.0)
    if call.pads_lse:
        lse, owned = _padded(call, requests, lse), np.ones(len(requests), np.bool_)
    if call.lse is not None:
        lse = lse.reshape(call.lse.shape)
    else:
        lse = lse.reshape(call.lse_shape)
    lse = cpu.deliver(np.ascontiguousarray(lse, np.float32), call.lse, call.q, owned)
    lse = lse if arrays.lse is None else arrays.lse
    return (out, lse) if call.return_lse else out


def _max_logits(spec: AttentionSpec, q: np.ndarray, requests: list[cpu.Request]) -> np.ndarray:
    """The largest natural logit of each row and head."""
    sharp = replace(spec, sm_scale=spec.sm_scale * _SHARPNESS)
    _, lse = cpu.attend(sharp, q, requests, {})
    return lse * (math.log(2.0) / _SHARPNESS)


def _gives_lse(call: Call) -> bool:
    return call.return_lse or call.lse is not None


def _reference_requests(
    call: Call, spans: list[Request], tables: Tables | None
) -> Iterator[cpu.Request]:
    seen, options, keys_of = None, _options(call), _keys_of(call, tables)
    if call.mask is not None:
        seen = row_mask.visible(call.mask, call.lengths.num_rows, call.mask_bits)
    for index, span in enumerate(spans):
        rows, mask = slice(span.q_start, span.q_start + span.qo_len), None
        positions = planless_share.key_positions(call.geometry.spec, span.kv_len, span.whole_len)
        if seen is not None:
            mask = row_mask.with_earlier_keys(seen[rows, : span.qo_len], span.kv_len, **positions)
        k, v = (x[span.kv_begin :] for x in keys_of(index, span))
        yield cpu.Request(rows, k, v, mask, options=options(index) | positions)


def _keys_of(
    call: Call, tables: Tables | None
) -> Callable[[int, Request], tuple[np.ndarray, np.ndarray]]:
    """What gives the keys and values of a request."""
    spec, pages = call.geometry.spec, call.pages
    kv_layout = spec.kv_layout if spec.page_size else "NHD"
    k, v = (cpu.tokens_first(x, kv_layout) for x in (call.keys.k, call.keys.v))

    def of_rows(index: int, span: Request) -> tuple[np.ndarray, np.ndarray]:
        own = slice(span.kv_start, span.kv_start + span.kv_len)
        return k[own], v[own]

    def of_heads(index: int, span: Request) -> tuple[np.ndarray, np.ndarray]:
        assert tables is not None
        of_k, of_v = (pages_of(call, ids, index, span) for ids in tables)
        return cpu.gather(k, of_k, span.kv_len), cpu.gather(v, of_v, span.kv_len)

    def of_latent_rows(index: int, span: Request) -> tuple[np.ndarray, np.ndarray]:
        assert tables is not None and pages is not None
        ids = pages_of(call, tables[0], index, span)
        if not call.options.is_list:
            return latent.gather(pages, ids, span.kv_len)
        ids = ids[(ids >= 0) & (ids < call.keys.size * spec.page_size)]
        own_k, own_v = latent.gather(pages, ids // spec.page_size, len(ids) * spec.page_size)
        slots = np.arange(len(ids)) * spec.page_size + ids % spec.page_size
        return own_k[slots], own_v[slots]

    if tables is None:
        return of_rows
    return of_heads if pages is None else of_latent_rows


def _options(call: Call) -> Callable[[int], dict[str, Any]]:
    """What differs between requests, or is not in the spec, as options of reference.attention."""
    same: dict[str, Any] = {"attention_chunk": call.options.attention_chunk}
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


def _padded_shape(call: Call) -> tuple[int, int, int]:
    """(requests, rows of each, heads) of an LSE that is padded."""
    count, rows, heads = call.lse_shape
    return count, rows, heads


def _padded(call: Call, requests: list[cpu.Request], lse: np.ndarray) -> np.ndarray:
    """`_padded_shape`, -inf behind a request's rows."""
    padded = np.full(_padded_shape(call), -np.inf, np.float32)
    for index, request in enumerate(requests):
        own = lse[request.rows][: padded.shape[1]]
        padded[index, : len(own)] = own
    return padded


def check_values(call: Call) -> None:
    """Under CUPYATTN_DEBUG=1: read what such calls trust device memory with, and check it.

    Waits for lengths, offsets and page tables. Raises ArgumentError for what would be cut or stray.
    """
    requests = requests_of(call, array.to_host, call.names)
    read_tables(call, requests, array.to_host, call.names.block_tables)
