"""The short way of a call without a plan that looks like an earlier one.

As in _repeat.py: all that the checks depend on but addresses is a call's look (shapes included, for
lengths are in device memory), and a look that has passed them passes them again. Nothing is raised
here: whatever is uncommon goes the general way (_unplanned.py).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from . import array, dtypes
from ._batch_repeat import _ADDRESSES
from ._repeat import _READERS, _Read
from .array import LOWEST_ADDRESS

if TYPE_CHECKING:
    from ._unplanned import Prepared
    from ._unplanned_check import Arrays, Call, Options

_MAX_KNOWN = 4096

_reader_of: dict[type, _Read] = {}


@dataclass(frozen=True, slots=True)
class _Known:
    """What calls of one look share.

    v_offset      bytes from k to v, if they are one tensor
    extents       how many bytes each array that is given spans, from its address on
    written       which of those arrays are written
    scale_places  where in Arrays the scales of q, k and v are; the place past its end is of none
    """

    prepared: Prepared
    v_offset: int
    extents: tuple[int, ...]
    written: tuple[int, ...]
    scale_places: tuple[int, int, int]
    out_shape: tuple[int, ...]
    lse_shape: tuple[int, ...]
    empty: Callable[[tuple[int, ...]], Any]
    empty_lse: Callable[[tuple[int, ...]], Any]
    address: Callable[[Any], int]
    current_stream: Callable[[], int]


_known: dict[tuple[object, ...], _Known] = {}
# The last call that was known: what was seen of it, and what is known.
_last: list[tuple[Any, Any]] = [(None, None)]


def repeat(arrays: Arrays, options: Options) -> Any:
    """The answer, or None: take the general way."""
    read = _reader_of.get(type(arrays.q))
    if read is None:
        return None
    pointers: list[int] = []
    given: list[int] = []
    seen: list[Any] = [options]
    try:
        for x in arrays:
            if x is None:
                pointers.append(0)
                seen.append(None)
            else:
                pointer, shape, look = read(x)
                if pointer < LOWEST_ADDRESS:
                    return None
                pointers.append(pointer)
                given.append(pointer)
                seen += shape, look
        q, k, v, workspace, table, *rest = pointers
        kv_lens, qo_lens, qo_offsets, kv_offsets, _, _, sinks, *_, out_address, lse_address = rest
        seen.append(((q | k | v | out_address) & 15, workspace & 15))
        last_seen, known = _last[0]
        if seen != last_seen:
            known = _known.get(tuple(seen))
            if known is not None:
                _last[0] = seen, known
    except Exception:  # arguments raise what they like when they are read, compared or hashed
        return None
    if known is None:
        return None
    # What is written meets nothing else.
    extents = known.extents
    for place in known.written:
        low = given[place]
        high = low + extents[place]
        for i, other in enumerate(given):
            if other < high and low < other + extents[i] and i != place:
                return None
    out, lse = arrays.out, arrays.lse
    if out is None:
        out = known.empty(known.out_shape)
        out_address = known.address(out)
    if lse is None and options.return_lse:
        lse = known.empty_lse(known.lse_shape)
        lse_address = known.address(lse)
    pointers.append(0)
    scale_q, scale_k, scale_v = known.scale_places
    known.prepared.launch(
        workspace,
        q,
        k,
        v or k + known.v_offset,
        out_address,
        lse_address,
        sinks,
        table,
        (qo_lens, kv_lens, qo_offsets, kv_offsets),
        (pointers[scale_q], pointers[scale_k], pointers[scale_v]),
        known.current_stream(),
    )
    return (out, lse) if options.return_lse else out


def remember(arrays: Arrays, options: Options, call: Call, prepared: Prepared) -> None:
    """Let calls like this one, which has passed every check, go the short way from now on."""
    vq = call.q
    read = _READERS.get(vq.framework)
    if read is None or arrays.workspace is None:
        return
    seen: list[Any] = [options]
    pointers: list[int] = []
    extents: list[int] = []
    written: list[int] = []
    for name, x in zip(arrays._fields, arrays, strict=True):
        if x is None:
            pointers.append(0)
            seen.append(None)
            continue
        v = array.view(x, name)
        # A tensor that requires grad is refused or not by the mode of the day.
        if v.framework != vq.framework or getattr(x, "requires_grad", False):
            return
        if v.device != vq.device or 0 in v.shape or any(stride < 0 for stride in v.strides):
            return
        if name in ("workspace", "out", "lse"):
            written.append(len(extents))
        low, high = array.byte_range(v)
        extents.append(high - low)
        pointers.append(v.ptr)
        seen += read(x)[1:]
    q, k, v_pointer, workspace, *_ = pointers
    seen.append(((q | k | v_pointer | pointers[-2]) & 15, workspace & 15))
    if len(_known) >= _MAX_KNOWN:
        _known.clear()
    _reader_of[type(arrays.q)] = read
    _known[tuple(seen)] = _Known(
        prepared=prepared,
        v_offset=call.keys.v.ptr - call.keys.k.ptr,
        extents=tuple(extents),
        written=tuple(written),
        scale_places=call.scales.places,
        out_shape=call.out_shape,
        lse_shape=call.lse_shape,
        empty=array.allocator(call.geometry.problem.dtype_o, vq),
        empty_lse=array.allocator(dtypes.float32, vq),
        address=_ADDRESSES[vq.framework],
        current_stream=array.stream_reader(vq),
    )
