"""The short way of a call without a plan that looks like an earlier one.

As in _repeat.py: all that the checks depend on but addresses is a call's look (shapes included, for
lengths are in device memory), and a look that has passed them passes them again. Nothing is raised
here: whatever is uncommon goes the general way (planless/call.py).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from .. import array
from ..array import LOWEST_ADDRESS
from ..batch.repeat import _ADDRESSES
from ..core import dtypes
from ..single.repeat import _READERS, _Read

if TYPE_CHECKING:
    from .call import Prepared
    from .check import Arrays, Call

_MAX_KNOWN = 4096
# Addresses of what is not usual, where there is nothing of it: the last stands for no array.
_NO_MORE: tuple[int, ...] = (0,) * 11


def _read_torch_integers(x: Any) -> tuple[int, Any, tuple[object, ...]]:
    """_read_torch without what only floats have: gradients, lazy negation."""
    return x.data_ptr(), x.shape, (type(x), x.dtype, x.stride(), x.is_cuda, x.get_device())


# How to read arrays of floats, and those of integers: workspaces, page tables, lengths.
_INTEGER_READERS = {**_READERS, "torch": _read_torch_integers}
_reader_of: dict[type, tuple[_Read, _Read]] = {}


@dataclass(frozen=True, slots=True)
class _Known:
    """What calls of one look share.

    v_offset      bytes from v to its first page (from k, if they are one tensor)
    extents       bytes that each of the usual arrays spans, from its address on; `more_extents`
                  those of the others
    scale_places  where among the others the scales of q, k and v are
    """

    prepared: Prepared
    v_offset: int
    extents: tuple[int, ...]
    more_extents: tuple[int, ...]
    scale_places: tuple[int, int, int]
    returns_lse: bool
    out_shape: tuple[int, ...]
    lse_shape: tuple[int, ...]
    empty: Callable[[tuple[int, ...]], Any]
    empty_lse: Callable[[tuple[int, ...]], Any]
    address: Callable[[Any], int]
    current_stream: Callable[[], int]


_known: dict[tuple[object, ...], _Known] = {}
# The last call that was known: what was seen of it, and what is known.
_last: list[tuple[Any, Any]] = [(None, None)]


def repeat(usual: tuple[Any, ...], more: tuple[Any, ...] | None, rest: tuple[Any, ...]) -> Any:
    """The answer, or None: take the general way.

    usual, more: the fields of Arrays, None for all of the second part if none is given; rest: all
    other arguments, and which function's they are.
    """
    q, k, v, workspace, table, kv_lens, out, lse = usual
    readers = _reader_of.get(type(q))
    if readers is None:
        return None
    read, read_integers = readers
    v_ptr = table_ptr = out_ptr = lse_ptr = 0
    v_shape = table_shape = out_shape = lse_shape = None
    v_look = table_look = out_look = lse_look = more_seen = None
    others = _NO_MORE
    try:
        q_ptr, q_shape, q_look = read(q)
        k_ptr, k_shape, k_look = read(k)
        space_ptr, space_shape, space_look = read_integers(workspace)
        lens_ptr, lens_shape, lens_look = read_integers(kv_lens)
        if v is not None:
            v_ptr, v_shape, v_look = read(v)
        if table is not None:
            table_ptr, table_shape, table_look = read_integers(table)
        if out is not None:
            out_ptr, out_shape, out_look = read(out)
        if lse is not None:
            lse_ptr, lse_shape, lse_look = read(lse)
        if more is not None:
            found = [(0, None, None) if x is None else read(x) for x in more]
            others = (*[pointer for pointer, _, _ in found], 0)
            more_seen = [(shape, look) for _, shape, look in found]
        seen = (
            q_shape, q_look, k_shape, k_look, v_shape, v_look, space_shape, space_look,
            table_shape, table_look, lens_shape, lens_look, out_shape, out_look, lse_shape,
            lse_look, more_seen, (q_ptr | k_ptr | v_ptr | out_ptr) & 15, space_ptr & 15, rest,
        )  # fmt: skip
        last_seen, known = _last[0]
        if seen != last_seen:
            known = _known.get(_key(seen))
            if known is None:
                return None
            _last[0] = seen, known
    except Exception:  # arguments raise what they like when they are read, compared or hashed
        return None
    v_ptr = (v_ptr or k_ptr) + known.v_offset
    if q_ptr < LOWEST_ADDRESS or k_ptr < LOWEST_ADDRESS or v_ptr < LOWEST_ADDRESS:
        return None
    # What is written meets nothing else: the workspace, then the answers.
    q_size, k_size, v_size, space_size, table_size, lens_size, out_size, lse_size = known.extents
    q_end, k_end, v_end = q_ptr + q_size, k_ptr + k_size, v_ptr + v_size
    table_end, lens_end = table_ptr + table_size, lens_ptr + lens_size
    space_end = space_ptr + space_size
    if (
        space_ptr < LOWEST_ADDRESS
        or (q_ptr < space_end and space_ptr < q_end)
        or (k_ptr < space_end and space_ptr < k_end)
        or (v_ptr < space_end and space_ptr < v_end)
        or (table_ptr < space_end and space_ptr < table_end)
        or (lens_ptr < space_end and space_ptr < lens_end)
    ):
        return None
    written = [(space_ptr, space_end)]
    for given, low, size in ((out, out_ptr, out_size), (lse, lse_ptr, lse_size)):
        if given is None:
            continue
        high = low + size
        if (
            low < LOWEST_ADDRESS
            or (q_ptr < high and low < q_end)
            or (k_ptr < high and low < k_end)
            or (v_ptr < high and low < v_end)
            or (table_ptr < high and low < table_end)
            or (lens_ptr < high and low < lens_end)
            or (space_ptr < high and low < space_end)
        ):
            return None
        written.append((low, high))
    if lse is not None and lse_ptr < out_ptr + out_size and out_ptr < lse_ptr + lse_size:
        return None
    if more is not None:
        for pointer, size in zip(others, known.more_extents, strict=False):
            for low, high in written:
                if pointer < high and low < pointer + size:
                    return None
    if out is None:
        out = known.empty(known.out_shape)
        out_ptr = known.address(out)
    if lse is None and known.returns_lse:
        lse = known.empty_lse(known.lse_shape)
        lse_ptr = known.address(lse)
    known.prepared.launch(
        space_ptr,
        q_ptr,
        k_ptr,
        v_ptr,
        out_ptr,
        lse_ptr,
        table_ptr,
        lens_ptr,
        others,
        known.scale_places,
        known.current_stream(),
    )
    return (out, lse) if known.returns_lse else out


def _key(seen: tuple[Any, ...]) -> tuple[Any, ...]:
    """What was seen, hashable."""
    more = seen[16]
    return seen if more is None else (*seen[:16], tuple(more), *seen[17:])


def remember(
    usual: tuple[Any, ...],
    more: tuple[Any, ...] | None,
    rest: tuple[Any, ...],
    arrays: Arrays,
    call: Call,
    prepared: Prepared,
) -> None:
    """Let calls like this one, which has passed every check, go the short way from now on."""
    vq = call.q
    read = _READERS.get(vq.framework)
    if read is None or arrays.workspace is None:
        return
    views = [None if x is None else array.view(x, "array") for x in arrays]
    for x, view in zip(arrays, views, strict=True):
        if view is None:
            continue
        # A tensor that requires grad is refused or not by the mode of the day.
        if view.framework != vq.framework or getattr(x, "requires_grad", False):
            return
        if view.device != vq.device or 0 in view.shape or any(s < 0 for s in view.strides):
            return
    extents = []
    for view in views:
        low, high = (0, 0) if view is None else array.byte_range(view)
        extents.append(high - low)
    pointers = [0 if view is None else view.ptr for view in views]
    q, k, v, workspace, *_ = pointers
    by_place = (read, read, read, *(3 * (_INTEGER_READERS[vq.framework],)), read, read)
    looks = [
        (0, None, None) if x is None else read_x(x)
        for x, read_x in zip(usual, by_place, strict=True)
    ]
    seen: list[Any] = [part for _, shape, look in looks for part in (shape, look)]
    if more is None:
        seen.append(None)
    else:
        seen.append([((None, None) if x is None else read(x)[1:]) for x in more])
    seen += (q | k | v | pointers[6]) & 15, workspace & 15, rest
    # Values are all between their first page and the end of what holds them.
    v_offset = call.keys.v.ptr - (pointers[2] or pointers[1])
    extents[2] = (extents[2] or extents[1]) - v_offset
    if len(_known) >= _MAX_KNOWN:
        _known.clear()
    try:
        _known[_key(tuple(seen))] = _Known(
            prepared=prepared,
            v_offset=v_offset,
            extents=tuple(extents[:8]),
            more_extents=tuple(extents[8:]),
            scale_places=call.scales.places,
            returns_lse=call.return_lse,
            out_shape=call.out_shape,
            lse_shape=call.lse_shape,
            empty=array.allocator(call.geometry.problem.dtype_o, vq),
            empty_lse=array.allocator(dtypes.float32, vq),
            address=_ADDRESSES[vq.framework],
            current_stream=array.stream_reader(vq),
        )
    except TypeError:  # an argument that cannot be hashed
        return
    _reader_of[type(arrays.q)] = read, _INTEGER_READERS[vq.framework]
