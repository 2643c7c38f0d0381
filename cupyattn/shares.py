"""What one of several GPUs holds of every request's keys: its lengths, slots and lists.

Tokens go round the ranks in runs of cp_kv_cache_interleave_size: token t of a request lies on rank
t // cp_kv_cache_interleave_size % cp_world_size, and each rank keeps its own one behind the other.
Attention over a rank's keys, with cp_world_size, cp_rank and the whole lengths, gives a state; the
states of all ranks merge into the result.

Pages of a rank hold its own tokens. Where an engine gives every rank the same page table, a page
stands for page_size * cp_world_size tokens of the request, and the slot of a token in that whole
cache, page * page_size * cp_world_size + offset, becomes a rank's by `get_share_slots`; the run is
a divisor of page_size then. Where pages of a request lie on the ranks in turn instead, the run is
page_size and a rank's page table is block_tables[:, cp_rank::cp_world_size].
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from . import array
from .array import ArrayView
from .array.match import is_contiguous, match_array, require_dtype, require_output
from .core import dtypes, parse
from .core.key_share import NOT_HELD, KeyShare
from .core.names import refuse_names
from .core.problem import MAX_LENGTH
from .core.tracing import untraced
from .engine.call_cache import Argument, CallCache
from .errors import ArgumentError, UnsupportedError
from .launch.ops import share_indices as launcher
from .typing import Array, ArrayT

__all__ = ["get_share_lists", "get_share_seq_lens", "get_share_slots"]

if not TYPE_CHECKING:
    __getattr__ = refuse_names(__name__)

_INT32_MAX = 2**31 - 1


@untraced
def get_share_seq_lens(
    seq_lens: ArrayT,
    cp_world_size: int,
    cp_rank: int,
    cp_kv_cache_interleave_size: int = 1,
    *,
    out: Array | None = None,
) -> ArrayT:
    """How many keys of each request a rank holds.

    Parameters
    ----------
    seq_lens
        int32 or int64, any shape: whole lengths, or any other numbers of first tokens; negative
        ones count as 0.
    out
        int32 of seq_lens' shape, to write into (default: a new array).
    cp_world_size, cp_rank
        Ranks that share the keys, and which of them asks.
    cp_kv_cache_interleave_size
        Tokens in a row that go to one rank before the next takes over.

    Returns
    -------
    result
        int32 of seq_lens' shape in its framework and device; on a GPU nothing waits for it, and a
        graph may capture it.

    Raises
    ------
    CupyAttnError
        ArgumentError for other dtypes, devices, and numbers that name no rank.

    Notes
    -----
    Semantics: vLLM's get_dcp_local_seq_lens of one rank.

    Examples
    --------
    >>> import numpy as np
    >>> get_share_seq_lens(np.array([5, 8]), 2, 0).tolist()
    [3, 4]
    """
    arrays = _Numbers(seq_lens, None, None, out, None)
    scalars = launcher.LENGTHS, cp_world_size, cp_rank, cp_kv_cache_interleave_size
    return _numbers(arrays, scalars)


@untraced
def get_share_slots(
    slots: ArrayT,
    cp_world_size: int,
    cp_rank: int,
    cp_kv_cache_interleave_size: int = 1,
    *,
    out: Array | None = None,
) -> ArrayT:
    """The slots that tokens have on a rank, -1 for tokens that other ranks hold.

    Parameters
    ----------
    slots
        int32 or int64, any shape: slots of the whole cache, whose pages hold those of all ranks, or
        positions in a request; negative ones stay -1.
    out
        int32 of slots' shape, to write into (default: a new array).
    cp_world_size, cp_rank
        Ranks that share the keys, and which of them asks.
    cp_kv_cache_interleave_size
        Tokens in a row that go to one rank before the next takes over.

    Returns
    -------
    result
        int32, and raises ArgumentError, as `get_share_seq_lens`.

    Notes
    -----
    `reshape_and_cache` takes the result as slot_mapping, and writes nothing for -1.

    Semantics: SGLang's localize_dcp_indices.

    Examples
    --------
    >>> import numpy as np
    >>> get_share_slots(np.array([0, 1, 2, 3, -1]), 2, 1).tolist()
    [-1, 0, -1, 1, -1]
    """
    arrays = _Numbers(slots, None, None, out, None)
    scalars = launcher.INDICES, cp_world_size, cp_rank, cp_kv_cache_interleave_size
    return _numbers(arrays, scalars)


@untraced
def get_share_lists(
    lists: ArrayT,
    cp_world_size: int,
    cp_rank: int,
    cp_kv_cache_interleave_size: int = 1,
    *,
    lens: Array | None = None,
    block_tables: Array | None = None,
    page_size: int | None = None,
    out: Array | None = None,
    counts: Array | None = None,
) -> tuple[ArrayT, ArrayT]:
    """Lists of keys as a rank reads them: its own slots in their order, then -1.

    Parameters
    ----------
    lists
        int32 or int64 [..., top_k]: slots of the whole cache, as FlashMLA's `indices` are of one
        GPU, or with block_tables positions in each row's request. Negative ones are no keys.
    lens
        int32 or int64 [...]: how many of each list count (default: all).
    block_tables, page_size
        int32 or int64 [B, max_pages], the rank's pages of each request, and tokens of a page. Rows
        of lists are as many for each request, one request behind the other. A key behind the table,
        and one of a negative page, is left out.
    out, counts
        int32 of lists' shape, and without top_k, to write into (default: new arrays).
    cp_world_size, cp_rank
        Ranks that share the keys, and which of them asks.
    cp_kv_cache_interleave_size
        Tokens in a row that go to one rank before the next takes over.

    Returns
    -------
    tuple of arrays
        (lists, counts): int32, counts the rank's own of each list. They are what
        `flash_mla_with_kvcache` takes as indices and topk_length, and
        `trtllm_batch_decode_with_kv_cache_mla` as block_tables and sparse_mla_top_k_lens. Nothing
        waits on a GPU.

    Raises
    ------
    CupyAttnError
        Errors as `get_share_seq_lens`.

    Notes
    -----
    Semantics: SGLang's remap_dcp_sparse_indices; with block_tables, vLLM's
    triton_filter_and_convert_dcp_index.

    Examples
    --------
    >>> import numpy as np
    >>> got = get_share_lists(np.array([[7, 2, 3, -1]]), 2, 1)
    >>> [x.tolist() for x in got]
    [[[3, 1, -1, -1]], [2]]
    """
    arrays = _Numbers(lists, lens, block_tables, out, counts)
    scalars = cp_world_size, cp_rank, cp_kv_cache_interleave_size, page_size
    result = _lists_again(arrays, scalars)
    if result is not None:
        return result
    share = KeyShare(cp_world_size, cp_rank, cp_kv_cache_interleave_size)
    views = _view_lists(arrays, page_size)
    shape = tuple(views.numbers.shape)
    if views.numbers.device.kind == "cpu":
        cached, count = _lists_on_cpu(views, share, page_size)
        return _delivered(cached, out, views.numbers), _delivered(count, counts, views.numbers)
    built, made_counts = (
        array.empty(extents, dtypes.int32, views.numbers) if x is None else x
        for x, extents in ((out, shape), (counts, shape[:-1]))
    )
    if 0 not in shape[:-1]:
        launch = _prepare(launcher.LISTS, views, share, page_size)
        _enqueue(launch, views, array.view(built, "out"), array.view(made_counts, "counts"))
        if _is_as_given(arrays, views) and len(shape) == 2:
            checked = _Checked(launch, array.allocator(dtypes.int32, views.numbers))
            _CALLS.insert(arrays, scalars, checked, views.numbers, dtypes.int32, shape, None)
    return tuple(  # type: ignore[return-value]
        array.deliver(x, views.numbers) if y is None else x
        for x, y in ((built, out), (made_counts, counts))
    )


class _Numbers(NamedTuple):
    """The arrays of a call, or their views."""

    numbers: Any
    lens: Any
    tables: Any
    out: Any
    counts: Any


class _Checked(NamedTuple):
    """What calls of one signature share. make_counts: an array for counts, by its shape."""

    launch: launcher.ShareIndices
    make_counts: Callable[[tuple[int, ...]], Any]


_CALLS: CallCache[_Checked] = CallCache(
    Argument("lists", 0),
    Argument("lens", 0),
    Argument("block_tables", 0),
    Argument("out", 0, is_output=True),
    Argument("counts", 0, is_output=True),
)


def _numbers(arrays: _Numbers, scalars: tuple[Any, ...]) -> Any:
    """Lengths or slots of a rank, number by number. scalars: which of them, and the share."""
    result = _CALLS.lookup(arrays, scalars)
    if result is not None:
        cached, at = result
        out, call = arrays.out, cached.call
        count = cached.lengths[0]
        if out is None:
            out = call.make_out((count,))
            at[3] = call.address(out)
        if count and cached.lengths[3] in (0, count) and not call.overlaps(at, cached.sizes):
            call.checked.launch.enqueue(call.current_stream(), count, at[0], at[3])
            return out
    what, world, rank, run = scalars
    share = KeyShare(world, rank, run)
    name = "seq_lens" if what == launcher.LENGTHS else "slots"
    v = _index(arrays.numbers, name)
    out = _output(arrays.out, "out", tuple(v.shape), **{name: v})
    array.same_device(**{name: v}, out=out)
    if v.device.kind == "cpu":
        whole = array.as_numpy(v)
        own = share.count(whole) if what == launcher.LENGTHS else _indices(share, whole)
        return _delivered(own, arrays.out, v)
    built = array.empty(v.shape, dtypes.int32, v) if arrays.out is None else arrays.out
    if 0 not in v.shape:
        views = arrays._replace(numbers=v if is_contiguous(v) else array.row_major_view(v))
        launch = _prepare(what, views, share, None)
        _enqueue(launch, views, array.view(built, "out"), None)
        if views.numbers is v and len(v.shape) == 1:
            checked = _Checked(launch, array.allocator(dtypes.int32, v))
            _CALLS.insert(arrays, scalars, checked, v, dtypes.int32, v.shape, None)
    return array.deliver(built, v) if arrays.out is None else built


def _lists_again(arrays: _Numbers, scalars: tuple[Any, ...]) -> Any:
    """(lists, counts) if a call like this one passed the checks, else None."""
    result = _CALLS.lookup(arrays, scalars)
    if result is None:
        return None
    cached, at = result
    call, (rows, lens, tables, *outputs) = cached.call, cached.lengths
    out, counts = arrays.out, arrays.counts
    if out is None:
        out = call.make_out(tuple(cached.shapes[0]))
        at[3] = call.address(out)
    elif outputs[0] != rows:
        return None
    if counts is None:
        counts = call.checked.make_counts((rows,))
        at[4] = call.address(counts)
    elif outputs[1] != rows:
        return None
    has_tables = arrays.tables is not None
    if arrays.lens is not None and lens != rows:
        return None
    if not rows or (has_tables and (not tables or rows % tables)):
        return None
    if call.overlaps(at, cached.sizes):
        return None
    numbers, of_lens, of_tables, to, to_counts = at
    number = tables if has_tables else 1
    stream = call.current_stream()
    call.checked.launch.enqueue(stream, rows, numbers, to, of_lens, of_tables, to_counts, number)
    return out, counts


def _view_lists(arrays: _Numbers, page_size: Any) -> _Numbers:
    """The arrays of `get_share_lists`, checked; the lists are contiguous, and so are lens."""
    v = _index(arrays.numbers, "lists")
    if not v.shape:
        raise ArgumentError("lists: has no dimension; wanted [..., top_k]")
    shape, rows = tuple(v.shape), math.prod(v.shape[:-1])
    lens, tables = arrays.lens, arrays.tables
    if lens is not None:
        lens = _index(lens, "lens")
        if tuple(lens.shape) not in (shape[:-1], (rows,)):
            raise ArgumentError(f"lens: shape is {list(lens.shape)}; wanted {list(shape[:-1])}")
        lens = lens if len(lens.shape) == 1 or is_contiguous(lens) else array.row_major_view(lens)
    if (tables is None) != (page_size is None):
        raise ArgumentError("block_tables, page_size: got one of the two; wanted both, or none")
    if tables is not None:
        parse.require_int(page_size, "page_size", 1)
        tables = _index(tables, "block_tables")
        if len(tables.shape) != 2 or (rows and (not tables.shape[0] or rows % tables.shape[0])):
            raise ArgumentError(
                f"block_tables: shape is {list(tables.shape)} for {rows} lists; wanted "
                "[B, max_pages], with as many lists for each request"
            )
        if tables.shape[1] > 1 and tables.strides[1] != 1:
            tables = array.row_major_view(tables)
    inputs = {"lists": v, "lens": lens, "block_tables": tables}
    out = _output(arrays.out, "out", shape, **inputs)
    counts = _output(arrays.counts, "counts", shape[:-1], **inputs, out=out)
    array.same_device(**inputs, out=out, counts=counts)
    return _Numbers(v if is_contiguous(v) else array.row_major_view(v), lens, tables, out, counts)


def _output(
    x: Any, name: str, shape: tuple[int, ...], /, **others: ArrayView | None
) -> ArrayView | None:
    if x is None:
        return None
    v = array.view(x, name)
    match_array(v, " ".join(map(str, shape)), dtypes.int32, name, {})
    if v.device.kind != "cpu" and not is_contiguous(v):
        raise ArgumentError(f"{name}: strides are {list(v.strides)}; wanted a contiguous array")
    require_output(v, name, **others)
    return v


def _prepare(what: int, views: _Numbers, share: KeyShare, page_size: Any) -> launcher.ShareIndices:
    v, lens, tables = views.numbers, views.lens, views.tables
    form = launcher.Form(
        v.shape[-1] if what == launcher.LISTS else 1,
        v.dtype is dtypes.int64,
        lens is not None and lens.dtype is dtypes.int64,
        tables is not None and tables.dtype is dtypes.int64,
        0 if lens is None else (lens.strides[0] if len(lens.shape) == 1 else 1),
        0 if tables is None else tables.strides[0],
        0 if tables is None else tables.shape[1],
        page_size or 1,
    )
    return launcher.prepare(what, form, share, v.device.index)


def _enqueue(
    launch: launcher.ShareIndices, views: _Numbers, out: ArrayView, counts: ArrayView | None
) -> None:
    v, lens, tables = views.numbers, views.lens, views.tables
    used = [x for x in (lens, tables, out, counts) if x is not None]
    array.acquire(v, *used)
    count = math.prod(v.shape)
    launch.enqueue(
        array.current_stream(v),
        math.prod(v.shape[:-1]) if launch.is_list else count,
        v.ptr,
        out.ptr,
        0 if lens is None else lens.ptr,
        0 if tables is None else tables.ptr,
        0 if counts is None else counts.ptr,
        1 if tables is None else tables.shape[0],
    )
    array.release(v, v, *used)


def _is_as_given(arrays: _Numbers, views: _Numbers) -> bool:
    """Whether kernels read the caller's arrays and no copies of them."""
    pairs = zip(arrays[:3], views[:3], strict=True)
    return all(x is None or array.view(x, "x").ptr == v.ptr for x, v in pairs)


def _indices(share: KeyShare, whole: np.ndarray) -> np.ndarray:
    return np.where(whole < 0, NOT_HELD, share.index(whole.astype(np.int64)))


def _lists_on_cpu(
    views: _Numbers, share: KeyShare, page_size: Any
) -> tuple[np.ndarray, np.ndarray]:
    """The lists of a rank and how many keys each has."""
    whole = array.as_numpy(views.numbers)
    *lead, top_k = whole.shape
    own = _indices(share, whole).reshape(math.prod(lead), top_k)
    if views.tables is not None:
        own = _slots_of_pages(own, array.as_numpy(views.tables).astype(np.int64), page_size)
    if views.lens is not None:
        lens = array.as_numpy(views.lens).reshape(-1, 1)
        own = np.where(np.arange(top_k) < lens, own, NOT_HELD)
    # The sort keeps the order of the rank's own.
    order = np.argsort(own < 0, axis=1, kind="stable")
    packed = np.take_along_axis(own, order, axis=1)
    return packed.reshape(whole.shape), (own >= 0).sum(axis=1).reshape(lead)


def _slots_of_pages(own: np.ndarray, tables: np.ndarray, page_size: int) -> np.ndarray:
    if not own.size or not tables.shape[1]:
        return np.full_like(own, NOT_HELD)
    request = np.arange(len(own))[:, None] // (len(own) // len(tables))
    entry = np.maximum(own, 0) // page_size
    page = tables[request, np.minimum(entry, tables.shape[1] - 1)]
    is_held = (own >= 0) & (entry < tables.shape[1]) & (page >= 0)
    return np.where(is_held, page * page_size + own % page_size, NOT_HELD)


def _delivered(cached: np.ndarray, out: Any, like: ArrayView) -> Any:
    """int64 results as int32, in `out` or a new array of like's framework."""
    if cached.max(initial=0) > _INT32_MAX:
        raise ArgumentError(f"gives {cached.max()}; answers are at most {_INT32_MAX}")
    if out is None:
        return array.from_numpy(cached.astype(np.int32), like)
    array.as_numpy(array.view(out, "out"))[...] = cached
    return out


def _index(x: Any, name: str) -> ArrayView:
    v = array.view(x, name)
    require_dtype(v, (dtypes.int32, dtypes.int64), name)
    if math.prod(v.shape) > MAX_LENGTH:
        raise UnsupportedError(f"{name}: shape is {list(v.shape)}; at most {MAX_LENGTH} numbers")
    return v
