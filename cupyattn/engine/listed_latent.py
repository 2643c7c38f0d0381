"""Attention of tokens to blocks of latent rows that their lists name: slots first, then the latent
attention of lists of slots."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from .. import array
from ..array import ArrayView
from ..array.match import match_contiguous, require_contiguous, require_dtype
from ..core import dtypes, parse
from ..core.parse import require_int
from ..errors import ArgumentError, UnsupportedError
from ..launch.driver.enqueue import cuda
from ..launch.ops import list_slots
from .arrays import Arrays
from .call_cache import Argument, CallCache
from .check_planless import Options
from .key_lists import NAME, KeyLists
from .key_lists_reference import listed_keys
from .latent_rows import Dims, as_pages, view_parts
from .planless_cache import Asked
from .run_planless import run, run_cached
from .views import Names, are_numbers

_NAMES = Names(
    "q",
    "cache",
    "cache",
    block_tables=NAME,
    kv_lens="lengths",
    sm_scale="sm_scale",
    output_scale="v_scale",
    o_dtype="o_dtype",
    q_rope="q[1]",
    k_rope="cache[1]",
    has_layout=False,
)


class LatentOptions(NamedTuple):
    """What else decides about a call, as given.

    sm_scale, v_scale  of the logits, with that of fp8 keys, and of the output
    """

    head_dim_v: Any
    sm_scale: Any
    v_scale: Any
    o_dtype: Any
    return_lse: Any


class _Blocks(NamedTuple):
    """Checked: what lists name, and of whom."""

    lists: ArrayView
    table: ArrayView
    lengths: ArrayView
    indptr: ArrayView | None
    form: KeyLists
    page_size: int
    num_pages: int

    @property
    def request_tokens(self) -> int:
        """Tokens of each request; 0 with offsets."""
        if self.indptr is not None:
            return 0
        return self.lists.shape[0] // max(1, self.lengths.shape[0])

    @property
    def num_slots(self) -> int:
        """Slots of a token."""
        return self.lists.shape[1] * self.form.granularity + self.form.window


class _SlotOptions(NamedTuple):
    """What calls that find their slots alike have in common, field by field as CallCache wants."""

    head_dim_v: Any
    sm_scale: Any
    v_scale: Any
    o_dtype: Any
    return_lse: Any
    granularity: int
    window: int
    is_causal: bool


@dataclass(frozen=True, slots=True)
class _Slots:
    """What calls of one signature share: all but addresses, and what makes slots."""

    told: list_slots.Blocks
    shape: tuple[int, ...]
    make: Callable[[Sequence[int]], Any]
    device_index: int


_ARGUMENTS = "q", "cache", "lists", "table", "lengths", "indptr"
_SLOTS: CallCache[_Slots] = CallCache(*map(Argument, _ARGUMENTS))


def attend(arrays: Arrays, options: LatentOptions, form: KeyLists) -> Any:
    """out, or (out, lse). lists and all that belongs to them are taken from `arrays`, as
    sparse.attend has them. Raises ArgumentError and UnsupportedError."""
    key = _slot_options(arrays, options, form)
    slots = None if key is None else _slots_again(arrays, key)
    if slots is not None:
        result = run_cached(_own_arrays(arrays, slots), options)
        if result is not None:
            return result
    return _attend_checked(arrays, options, form, key)


def _attend_checked(
    arrays: Arrays, options: LatentOptions, form: KeyLists, key: _SlotOptions | None
) -> Any:
    vq = array.view(arrays.q, "q")
    if len(vq.shape) != 3:
        raise ArgumentError(f"q: shape is {list(vq.shape)}; wanted [tokens, num_qo_heads, columns]")
    latent = require_int(options.head_dim_v, "head_dim_v")
    if latent > vq.shape[2]:
        raise ArgumentError(f"head_dim_v: got {latent}, but q has {vq.shape[2]} columns")
    dims = Dims(latent, vq.shape[2] - latent)
    blocks = _check(arrays, form, vq, dims)
    resolved = Options(
        _NAMES,
        dims=dims,
        sm_scale=parse.finite(options.sm_scale, "sm_scale", 1.0),
        output_scale=parse.finite(options.v_scale, "v_scale", 1.0),
        is_list=True,
        o_dtype=options.o_dtype,
        return_lse=options.return_lse,
    )
    if not vq.shape[0]:
        return _nothing(arrays, options, vq, latent)
    slots = _slots_on_cpu(blocks) if vq.device.kind == "cpu" else _slots_on_gpu(blocks, vq)
    own = _own_arrays(arrays, slots)
    result = run_cached(own, options)
    if result is None:
        result = run(own, resolved, asked=Asked(own, options, {}))
    if key is not None and vq.device.kind == "cuda" and not cuda().is_debugging:
        _SLOTS.insert(_read(arrays), key, _prepare(blocks, vq), vq, dtypes.int32, None, None)
    return result


def _own_arrays(arrays: Arrays, slots: Any) -> Arrays:
    """What latent attention of lists of slots is given."""
    return Arrays(
        q=arrays.q,
        k=arrays.k,
        block_tables=slots,
        out=arrays.out,
        lse=arrays.lse,
        sinks=arrays.sinks,
    )


def _read(arrays: Arrays) -> tuple[Any, ...]:
    """As _ARGUMENTS name them."""
    return (
        arrays.q,
        arrays.k,
        arrays.lists,
        arrays.block_tables,
        arrays.kv_lens,
        arrays.qo_offsets,
    )


def _slot_options(arrays: Arrays, options: LatentOptions, form: KeyLists) -> _SlotOptions | None:
    """By what slots of like calls are found; None where something is read that is refused, or
    numbers are in arrays."""
    others = arrays.output_gate, arrays.scale_k, arrays.scale_v
    if any(x is not None for x in others) or not are_numbers(options.sm_scale, options.v_scale):
        return None
    return _SlotOptions(
        head_dim_v=options.head_dim_v,
        sm_scale=options.sm_scale,
        v_scale=options.v_scale,
        o_dtype=options.o_dtype,
        return_lse=options.return_lse,
        granularity=form.granularity,
        window=form.window,
        is_causal=form.is_causal,
    )


def _slots_again(arrays: Arrays, key: _SlotOptions) -> Any:
    """The slots of a call like one before; None if there was none."""
    known = _SLOTS.lookup(_read(arrays), key)
    if known is None:
        return None
    cached, addresses = known
    call = cached.call
    slots = call.checked.make(call.checked.shape)
    _, _, lists, table, kv_lens, qo_offsets = addresses
    told = call.checked.told._replace(
        lists=lists, table=table, kv_lens=kv_lens, qo_offsets=qo_offsets
    )
    index, stream = call.checked.device_index, call.current_stream()
    list_slots.launch(told, call.address(slots), index, stream)
    return slots


def _nothing(arrays: Arrays, options: LatentOptions, vq: ArrayView, latent: int) -> Any:
    """The answer of no tokens."""
    dtype = vq.dtype if options.o_dtype is None else dtypes.parse(options.o_dtype, "o_dtype")
    heads, out, lse = vq.shape[1], arrays.out, arrays.lse
    if out is None:
        out = array.deliver(array.empty((0, heads, latent), dtype, vq), vq)
    if not parse.flag(options.return_lse, "return_lse"):
        return out
    if lse is None:
        lse = array.deliver(array.empty((0, heads), dtypes.float32, vq), vq)
    return out, lse


def _check(arrays: Arrays, form: KeyLists, vq: ArrayView, dims: Dims) -> _Blocks:
    refused = {
        "output_gate": arrays.output_gate,
        "k_scale": arrays.scale_k,
        "v_scale": arrays.scale_v,
    }
    for name, x in refused.items():
        if x is not None:
            raise UnsupportedError(
                f"{name}: an array of this has no kernel beside head_dim_v; pass a number for a "
                "scale, and no gate"
            )
    pages = as_pages(view_parts(arrays.k, None, dims, ("cache", "cache")), None).latent
    tokens = vq.shape[0]
    lists = array.view(arrays.lists, NAME)
    if len(lists.shape) == 3 and lists.shape[1] == 1:
        shape, strides = (tokens, lists.shape[2]), (lists.strides[0], lists.strides[2])
        if lists.shape[0] == tokens:
            lists = array.as_strided(lists, shape, strides)
    match_contiguous(lists, f"{tokens} entries", {}, NAME)
    require_dtype(lists, dtypes.int32, NAME)
    table, lengths = (
        array.view(x, name)
        for x, name in ((arrays.block_tables, "table"), (arrays.kv_lens, "lengths"))
    )
    match_contiguous(table, "requests pages", {}, "table")
    match_contiguous(lengths, f"{table.shape[0]}", {}, "lengths")
    indptr = None if arrays.qo_offsets is None else array.view(arrays.qo_offsets, "indptr")
    indices = {"table": table, "lengths": lengths, "indptr": indptr}
    if indptr is not None:
        match_contiguous(indptr, f"{table.shape[0] + 1}", {}, "indptr")
    elif tokens % max(1, table.shape[0]):
        raise ArgumentError(
            f"q: has {tokens} tokens of {table.shape[0]} requests; wanted equally many of each, or "
            "indptr"
        )
    for name, v in indices.items():
        if v is not None:
            require_dtype(v, dtypes.int32, name)
    for name, v in (("lengths", lengths), ("indptr", indptr)):
        if v is not None:
            require_contiguous(v, name)
    array.same_device(q=vq, cache=pages, lists=lists, **indices)
    return _Blocks(lists, table, lengths, indptr, form, pages.shape[1], pages.shape[0])


def _prepare(blocks: _Blocks, vq: ArrayView) -> _Slots:
    told = list_slots.Blocks(
        lists=0,
        table=0,
        kv_lens=0,
        qo_offsets=0,
        list_stride=blocks.lists.strides[0],
        table_stride=blocks.table.strides[0],
        num_tokens=vq.shape[0],
        length=blocks.lists.shape[1],
        block_shift=blocks.form.granularity.bit_length() - 1,
        window=blocks.form.window,
        page_size=blocks.page_size,
        num_requests=blocks.lengths.shape[0],
        request_tokens=blocks.request_tokens,
        max_kv_len=blocks.table.shape[1] * blocks.page_size,
        is_causal=blocks.form.is_causal,
    )
    shape = vq.shape[0], max(1, blocks.num_slots)
    return _Slots(told, shape, array.allocator(dtypes.int32, vq), vq.device.index)


def _slots_on_gpu(blocks: _Blocks, vq: ArrayView) -> Any:
    prepared = _prepare(blocks, vq)
    slots = prepared.make(prepared.shape)
    used = [x for x in (blocks.lists, blocks.table, blocks.lengths, blocks.indptr) if x is not None]
    array.acquire(vq, *used)
    told = prepared.told._replace(
        lists=blocks.lists.ptr,
        table=blocks.table.ptr,
        kv_lens=blocks.lengths.ptr,
        qo_offsets=0 if blocks.indptr is None else blocks.indptr.ptr,
    )
    target, stream = array.view(slots, "slots").ptr, array.current_stream(vq)
    list_slots.launch(told, target, vq.device.index, stream)
    array.release(vq, *used)
    return slots


def _slots_on_cpu(blocks: _Blocks) -> Any:
    tokens = blocks.lists.shape[0]
    slots = np.full((tokens, max(1, blocks.num_slots)), -1, np.int32)
    lists, table, lengths = map(array.as_numpy, (blocks.lists, blocks.table, blocks.lengths))
    room = blocks.table.shape[1] * blocks.page_size
    if lengths.size and not 0 <= lengths.min() <= lengths.max() <= room:
        raise ArgumentError(
            f"lengths: holds {lengths.tolist()[:8]}; wanted 0 to {room}, what table has pages for"
        )
    begins = np.arange(len(lengths) + 1) * blocks.request_tokens
    if blocks.indptr is not None:
        begins = array.as_numpy(blocks.indptr)
    if begins[0] or (np.diff(begins) < 0).any() or begins[-1] > tokens:
        raise ArgumentError(f"indptr: holds {begins.tolist()[:8]}; wanted offsets up to {tokens}")
    for request, length in enumerate(lengths.tolist()):
        end = int(begins[request + 1])
        for token in range(int(begins[request]), end):
            seen = max(length - (end - 1 - token), 0) if blocks.form.is_causal else length
            keys = listed_keys(lists[token], seen, blocks.form)
            pages = table[request][keys // blocks.page_size]
            if pages.size and not 0 <= pages.min() <= pages.max() < blocks.num_pages:
                raise ArgumentError(
                    f"table: {NAME} name keys of request {request} on page {pages.max()}; the "
                    f"cache holds {blocks.num_pages} pages"
                )
            slots[token, : keys.size] = pages * blocks.page_size + keys % blocks.page_size
    return array.from_numpy(slots, blocks.lists)
