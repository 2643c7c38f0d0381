"""Operations on a paged KV cache: appending to it, and the index arrays that say where."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from . import array, paging, reference
from .array import ArrayView, Device
from .array.match import (
    Dims,
    match,
    match_array,
    require_dtype,
    require_output,
    require_same_dtype,
)
from .core import dtypes, parse
from .core.dtypes import DType
from .core.key_share import KeyShare
from .core.names import refuse_names
from .core.tracing import untraced
from .engine.call_cache import Argument, CallCache
from .engine.cpu import tokens_first
from .engine.kv_cache import Keys, is_pair, view_paged
from .engine.workspace import int32_on_device
from .errors import ArgumentError
from .launch.driver import scratch
from .launch.driver.enqueue import cuda
from .launch.ops import get_batch_indices_positions as get_positions
from .launch.ops import get_seq_lens as get_lengths
from .launch.ops.append_paged_kv_cache import Append, Refused, prepare
from .launch.ops.get_batch_indices_positions import FindPositions
from .launch.ops.get_seq_lens import FindLengths
from .launch.ops.rows import Rows
from .typing import Array, ArrayT, Pages

__all__ = [
    "append_paged_kv_cache",
    "append_paged_mla_kv_cache",
    "get_batch_indices_positions",
    "get_seq_lens",
]

if not TYPE_CHECKING:
    __getattr__ = refuse_names(__name__)

_INT32_MAX = 2**31 - 1
WIDE = (dtypes.float16, dtypes.bfloat16, dtypes.float32)
FP8 = (dtypes.float8_e4m3fn, dtypes.float8_e5m2)


@untraced
def append_paged_kv_cache(
    append_key: Array,
    append_value: Array,
    batch_indices: Array,
    positions: Array,
    paged_kv_cache: Pages,
    kv_indices: Array,
    kv_indptr: Array,
    kv_last_page_len: Array,
    kv_layout: str = "NHD",
    *,
    k_scale: float | None = None,
    v_scale: float | None = None,
) -> Any:
    """Write the keys and values of new tokens into their slots of a paged cache, in place.

    Token i belongs to request b = batch_indices[i] and is its key number p = positions[i]; its slot
    is p % page_size of page kv_indices[kv_indptr[b] + p // page_size].

    Parameters
    ----------
    append_key
        [nnz, Hkv, Dk] float16, bfloat16, float32, float8_e4m3fn or float8_e5m2.
    append_value
        [nnz, Hkv, Dv] of the same dtype.
    batch_indices
        int32 or int64 [nnz], as all index arrays; a negative one skips its token.
    positions
        [nnz].
    paged_kv_cache
        As in BatchPrefillWithPagedKVCacheWrapper.run, of append_key's dtype, or fp8 while
        append_key has 16 or 32 bits: then it is converted.
    kv_indices
        [>= kv_indptr[B]], the pages of all requests.
    kv_indptr
        [B + 1], after the append: all pages that are written are there.
    kv_last_page_len
        [B]; its shape is checked and its values change nothing.
    kv_layout
        "NHD" or "HND".
    k_scale, v_scale
        Numbers above 0 (default 1), only where the cache is converted to: stored is x / scale to
        nearest, ties to even, beyond the largest finite value that value, a NaN as a NaN. Attention
        takes the same k_scale and v_scale.

    Returns
    -------
    None
        But for a cache of JAX arrays, which cannot be written: then a copy of the cache with the
        tokens in it, in the same form.

    Raises
    ------
    CupyAttnError
        ArgumentError for other shapes, dtypes, layouts and devices, a cache that cannot be written,
        and, on the CPU, a token without a slot: a request, position or page out of bounds. On a GPU
        the values of index arrays are not known to the host: such a token is left out, and counted
        and raised under CUPYATTN_DEBUG=1.

    Notes
    -----
    Keys, values and caches have any strides but for a contiguous last dimension. Index arrays have
    any stride; on a GPU those of int64 or with gaps are copied there first. Two tokens for one slot
    leave either of them.

    Semantics: FlashInfer's append_paged_kv_cache, where a negative batch index writes out of
    bounds, and fp8 input must have been cast.

    Examples
    --------
    >>> import numpy as np
    >>> import cupyattn
    >>> cache = np.zeros((4, 2, 16, 2, 64), np.float16)
    >>> indptr, indices, last = np.array([0, 2, 3]), np.array([3, 0, 1]), np.array([5, 16])
    >>> k = v = np.ones((2, 2, 64), np.float16)  # the last token of each request
    >>> requests, positions = np.array([0, 1]), np.array([20, 15])
    >>> cupyattn.append_paged_kv_cache(k, v, requests, positions, cache, indices, indptr, last)
    >>> cache[0, 0, 4].min(), cache[1, 1, 15].min()
    (np.float16(1.0), np.float16(1.0))
    """
    # An array of both keys and values is passed as K.
    pages: Any = paged_kv_cache
    has_two = is_pair(pages) and len(pages) == 2
    if not has_two:
        pages = pages, None
    arrays = (
        append_key,
        append_value,
        batch_indices,
        positions,
        kv_indices,
        kv_indptr,
        kv_last_page_len,
        *pages,
    )
    options = kv_layout, k_scale, v_scale, has_two
    if _append_again(arrays, options):
        return None

    # Validate.
    layout = parse.kv_layout(kv_layout)
    dims = Dims()
    new_k = view_rows(append_key, "nnz num_kv_heads head_dim_qk", dims, "append_key")
    new_v = view_rows(append_value, "nnz num_kv_heads head_dim_vo", dims, "append_value")
    require_same_dtype(new_v, "append_value", new_k, "append_key")
    cache = view_paged(paged_kv_cache, layout, dims)
    if "jax" in (cache.k.framework, cache.v.framework):
        again = functools.partial(
            append_paged_kv_cache,
            append_key,
            append_value,
            batch_indices,
            positions,
            kv_indices=kv_indices,
            kv_indptr=kv_indptr,
            kv_last_page_len=kv_last_page_len,
            kv_layout=kv_layout,
            k_scale=k_scale,
            v_scale=v_scale,
        )
        return _append_to_copies(paged_kv_cache, lambda pages: again(paged_kv_cache=pages))
    _require_cache(cache, dims)
    scales = append_scales(k_scale, v_scale, new_k.dtype, cache.k.dtype)
    index = {
        "batch_indices": view_index(batch_indices, "nnz", dims, "batch_indices"),
        "positions": view_index(positions, "nnz", dims, "positions"),
        "kv_indices": view_index(kv_indices, "num_indices", dims, "kv_indices"),
        **_offsets_and_lengths(dims, kv_indptr=kv_indptr, kv_last_page_len=kv_last_page_len),
    }
    device = _device_of(cache, {"append_key": new_k, "append_value": new_v, **index})
    has_columns = dims["head_dim_qk"] or dims["head_dim_vo"]
    if device.kind == "cpu":
        _append_on_cpu(new_k, new_v, cache, dims["page_size"], index, scales, layout)
    elif dims["nnz"] and dims["num_kv_heads"] and has_columns:
        append = _append_on_gpu(new_k, new_v, cache, dims["page_size"], index, scales)
        if append is not None:
            v_offset = 0 if has_two else cache.v.ptr - cache.k.ptr
            checked = _Checked(append, v_offset)
            _APPENDS.insert(arrays, options, checked, new_k, dtypes.int32, None, None)
    return None


def _device_of(cache: Keys, inputs: dict[str, ArrayView]) -> Device:
    """That of all arrays, of which the cache is written and overlaps no other."""
    caches = dict(zip(cache.names, (cache.k, cache.v), strict=True))
    device = array.same_device(**inputs, **caches)
    for name, v in caches.items():
        require_output(v, name, **inputs)
    return device


def _require_cache(cache: Keys, dims: Dims) -> None:
    """Memory of K and V each, and sizes that kernels count."""
    if cache.k.ptr == cache.v.ptr and 0 not in cache.k.shape and 0 not in cache.v.shape:
        raise ArgumentError(
            "paged_kv_cache: K and V are at the same address; wanted memory for each"
        )
    sizes = ("page_size", "num_kv_heads", "head_dim_qk", "head_dim_vo")
    if max(dims[name] for name in sizes) > _INT32_MAX:
        raise ArgumentError("paged_kv_cache: page size, heads and head dims must fit 32 bits")


@untraced
def get_batch_indices_positions(
    append_indptr: ArrayT,
    seq_lens: Array,
    nnz: int,
    batch_indices: Array | None = None,
    positions: Array | None = None,
    *,
    cp_world_size: int = 1,
    cp_rank: int = 0,
    cp_kv_cache_interleave_size: int = 1,
) -> tuple[ArrayT, ArrayT]:
    """The request and the position of every new token: what `append_paged_kv_cache` takes.

    Parameters
    ----------
    append_indptr
        int32 or int64 [B + 1], never falling: the new tokens of request b are the rows from
        append_indptr[b] to append_indptr[b + 1].
    seq_lens
        int32 or int64 [B], keys of each request after the append.
    nnz
        Number of rows, append_indptr[B] or more; rows beyond get -1 and 0.
    batch_indices, positions
        int32 [nnz] to write into (default: new arrays).
    cp_world_size, cp_rank, cp_kv_cache_interleave_size
        The number of ranks (GPUs) over which the keys of every request are spread; this rank; and
        the number of consecutive tokens that go to one rank before the next takes over. seq_lens
        are then whole lengths and positions those among this rank's keys. Tokens of other ranks
        get -1 and 0, so that an append leaves them out.

    Returns
    -------
    tuple of arrays
        (batch_indices, positions), int32 [nnz], in append_indptr's framework and device; on a GPU
        nothing waits for it.

    Raises
    ------
    CupyAttnError
        ArgumentError for other shapes, dtypes and devices, outputs that cannot be written, and, on
        the CPU, values that make no sense: offsets that fall, fewer rows than tokens, more new
        tokens than keys.

    Notes
    -----
    Semantics: FlashInfer's get_batch_indices_positions.

    Examples
    --------
    >>> import numpy as np
    >>> import cupyattn
    >>> rows, lengths = np.array([0, 2, 3]), np.array([7, 1])  # 2 and 1 new tokens among them
    >>> cupyattn.get_batch_indices_positions(rows, lengths, nnz=3)
    (array([0, 0, 1], dtype=int32), array([5, 6, 0], dtype=int32))
    """
    arrays = append_indptr, seq_lens, batch_indices, positions
    scalars = cp_world_size, cp_rank, cp_kv_cache_interleave_size
    if type(nnz) is int:
        result = _positions_again(arrays, scalars, nnz)
        if result is not None:
            return result

    # Validate.
    share = KeyShare(cp_world_size, cp_rank, cp_kv_cache_interleave_size)
    dims = Dims(nnz=parse.require_int(nnz, "nnz", 0))
    index = _offsets_and_lengths(dims, append_indptr=append_indptr, seq_lens=seq_lens)
    outputs: dict[str, ArrayView] = {}
    for name, x in (("batch_indices", batch_indices), ("positions", positions)):
        if x is not None:
            v = array.view(x, name)
            match_array(v, "nnz", dtypes.int32, name, dims)
            require_output(v, name, **index, **outputs)
            outputs[name] = v
    device = array.same_device(**index, **outputs)
    vi, vl = index.values()
    # Compute.
    shape = (dims["nnz"],)
    if device.kind == "cpu":
        computed = paging.positions_of(array.as_numpy(vi), array.as_numpy(vl), dims["nnz"])
        computed = _of_share(share, computed)
        b, p = (outputs.get(name) for name in ("batch_indices", "positions"))
        found_p = _as_int32(computed[1], p, vi, "seq_lens")
        return _as_int32(computed[0], b, vi, "append_indptr"), found_p
    b, p = (
        outputs[name].owner if name in outputs else array.empty(shape, dtypes.int32, vi)
        for name in ("batch_indices", "positions")
    )
    vb, vp = array.view(b, "batch_indices"), array.view(p, "positions")
    if dims["nnz"]:
        offsets, lengths = (int32_on_device(v, name) for name, v in index.items())
        array.acquire(vi, offsets, lengths, *outputs.values())
        find = get_positions.prepare(share, vi.device.index)
        find.enqueue(
            array.current_stream(vi),
            offsets.ptr,
            lengths.ptr,
            vb.ptr,
            vp.ptr,
            dims["nnz"],
            lengths.shape[0],
        )
        array.release(vi, offsets, lengths, *outputs.values())
        if _are_unconverted(index.values(), (offsets, lengths)):
            _POSITIONS.insert(arrays, scalars, find, vi, dtypes.int32, shape, None)
    b, p = (
        x if name in outputs else array.deliver(x, vi)
        for name, x in (("batch_indices", b), ("positions", p))
    )
    return b, p


@untraced
def get_seq_lens(kv_indptr: ArrayT, kv_last_page_len: Array, page_size: int) -> ArrayT:
    """Keys of each request of a page table: max(pages - 1, 0) * page_size + kv_last_page_len.

    kv_indptr [B + 1], kv_last_page_len [B], both int32 or int64; page_size from 1 up. A request
    without pages has kv_last_page_len keys, so keep that at 0.

    Returns
    -------
    result
        int32 [B] in kv_indptr's framework and device.

    Raises
    ------
    CupyAttnError
        ArgumentError for other shapes, dtypes and devices, and, on the CPU, offsets that fall and
        lengths beyond 32 bits.

    Notes
    -----
    Semantics: FlashInfer's get_seq_lens.

    Examples
    --------
    >>> import numpy as np
    >>> import cupyattn
    >>> cupyattn.get_seq_lens(np.array([0, 3, 4]), np.array([5, 16]), page_size=16)
    array([37, 16], dtype=int32)
    """
    arrays = kv_indptr, kv_last_page_len
    result = _seq_lens_again(arrays, page_size)
    if result is not None:
        return result

    # Validate.
    dims = Dims()
    options = (page_size,)
    page_size = parse.require_int(page_size, "page_size")
    index = _offsets_and_lengths(dims, kv_indptr=kv_indptr, kv_last_page_len=kv_last_page_len)
    device = array.same_device(**index)
    vi, vl = index.values()
    # Compute.
    if device.kind == "cpu":
        computed = paging.pages_to_lengths(array.as_numpy(vi), array.as_numpy(vl), page_size)
        return _as_int32(computed, None, vi, "kv_indptr")
    out = array.empty((dims["B"],), dtypes.int32, vi)
    if dims["B"]:
        offsets, lengths = (int32_on_device(v, name) for name, v in index.items())
        vout = array.view(out, "out")
        array.acquire(vi, offsets, lengths)
        find = get_lengths.prepare(page_size, vi.device.index)
        stream = array.current_stream(vi)
        find.enqueue(stream, offsets.ptr, lengths.ptr, vout.ptr, dims["B"])
        array.release(vi, offsets, lengths)
        if _are_unconverted(index.values(), (offsets, lengths)):
            _SEQ_LENS.insert(arrays, options, find, vi, dtypes.int32, (dims["B"],), None)
    return array.deliver(out, vi)


def _of_share(
    share: KeyShare, tokens: tuple[np.ndarray, np.ndarray]
) -> tuple[np.ndarray, np.ndarray]:
    """Requests and positions in a rank's keys; tokens of other ranks belong to no request."""
    if share.is_whole:
        return tokens
    batch_indices, positions = tokens
    own = share.index(positions)
    is_own = (batch_indices >= 0) & (own >= 0)
    return np.where(is_own, batch_indices, paging.NO_REQUEST), np.where(is_own, own, 0)


def _append_to_copies(cache: Any, append: Callable[[Any], None]) -> Any:
    """What `append` makes of a cache whose JAX arrays are copied first."""
    views = [array.view(x, "paged_kv_cache") for x in (cache if is_pair(cache) else (cache,))]
    pages = [array.writable_copy(v) if v.framework == "jax" else v.owner for v in views]
    append(tuple(pages) if is_pair(cache) else pages[0])
    copies = [array.deliver(x, v) for x, v in zip(pages, views, strict=True)]
    return tuple(copies) if is_pair(cache) else copies[0]


class _Checked(NamedTuple):
    """What appends of one signature share. v_offset: bytes from the array that holds V to V."""

    append: Append
    v_offset: int


_TOKENS = ("append_key", "append_value", "batch_indices", "positions")
_APPENDS: CallCache[_Checked] = CallCache(
    *(Argument(name, 0) for name in (*_TOKENS, "kv_indices", "kv_indptr", "kv_last_page_len")),
    Argument("k", is_output=True, interleaves=True),
    Argument("v", is_output=True, interleaves=True),
)


_POSITIONS: CallCache[FindPositions] = CallCache(
    Argument("append_indptr", 0),
    Argument("seq_lens", 0),
    Argument("batch_indices", 0, is_output=True),
    Argument("positions", 0, is_output=True),
)
_SEQ_LENS: CallCache[FindLengths] = CallCache(
    Argument("kv_indptr", 0), Argument("kv_last_page_len", 0)
)


def _append_again(arrays: tuple[Any, ...], options: tuple[Any, ...]) -> bool:
    """Whether an append like this one passed the checks; if so, this one is enqueued too."""
    hit = _APPENDS.lookup(arrays, options)
    if hit is None:
        return False
    cached, addresses = hit
    call = cached.call
    nnz, num_values, num_requests, num_positions, num_indices, num_offsets, batch_size, *_ = (
        cached.lengths
    )
    if not nnz == num_values == num_requests == num_positions or not nnz:
        return False
    new_k, new_v, requests, positions, indices, indptr, _, k, v = addresses
    if num_offsets != batch_size + 1 or k == v or call.overlaps(addresses, cached.sizes):
        return False
    append, v_offset = call.checked
    append.enqueue(
        call.current_stream(),
        new_k,
        new_v,
        k,
        (v or k) + v_offset,
        requests,
        positions,
        indices,
        indptr,
        nnz,
        num_indices,
        batch_size,
    )
    return True


def _positions_again(arrays: tuple[Any, ...], scalars: tuple[Any, ...], nnz: int) -> Any:
    """(batch_indices, positions) if a call like this one passed the checks, else None."""
    hit = _POSITIONS.lookup(arrays, scalars)
    if hit is None or nnz <= 0:
        return None
    cached, addresses = hit
    call = cached.call
    num_offsets, batch_size, *num_rows = cached.lengths
    outputs = list(arrays[2:])
    for index, x in enumerate(outputs):
        if x is None:
            x = outputs[index] = call.make_out((nnz,))
            addresses[2 + index] = call.address(x)
        elif num_rows[index] != nnz:
            return None
    if num_offsets != batch_size + 1 or call.overlaps(addresses, cached.sizes):
        return None
    indptr, lengths, b, p = addresses
    call.checked.enqueue(call.current_stream(), indptr, lengths, b, p, nnz, batch_size)
    return outputs[0], outputs[1]


def _seq_lens_again(arrays: tuple[Any, ...], page_size: Any) -> Any:
    """The lengths if a call like this one passed the checks, else None."""
    hit = _SEQ_LENS.lookup(arrays, (page_size,))
    if hit is None:
        return None
    cached, addresses = hit
    call = cached.call
    num_offsets, batch_size = cached.lengths
    if num_offsets != batch_size + 1 or not batch_size:
        return None
    out = call.make_out((batch_size,))
    indptr, lengths = addresses
    call.checked.enqueue(call.current_stream(), indptr, lengths, call.address(out), batch_size)
    return out


def _append_on_cpu(
    new_k: ArrayView,
    new_v: ArrayView,
    cache: Keys,
    page_size: int,
    index_arrays: dict[str, ArrayView],
    scales: tuple[float, float],
    layout: str,
) -> None:
    tables = {n: array.as_numpy(v) for n, v in index_arrays.items() if n != "kv_last_page_len"}
    slots = paging.slots(**tables, page_size=page_size, pool_size=cache.size)
    for new, pages, scale in ((new_k, cache.k, scales[0]), (new_v, cache.v, scales[1])):
        reference.store_rows(array.as_numpy(new), tokens_first(pages, layout), slots, scale)


def _append_on_gpu(
    new_k: ArrayView,
    new_v: ArrayView,
    cache: Keys,
    page_size: int,
    index_arrays: dict[str, ArrayView],
    scales: tuple[float, float],
) -> Append | None:
    """Enqueue an append. Returns it if later calls of its signature may enqueue it as it is."""
    index = {n: int32_on_device(v, n) for n, v in index_arrays.items() if n != "kv_last_page_len"}
    stream = array.current_stream(new_k)
    k_slot, k_head, v_slot, v_head, k_page, v_page = cache.strides
    append = prepare(
        Rows.of(new_k, cache.k, (k_page, k_slot, k_head), scales[0]),
        Rows.of(new_v, cache.v, (v_page, v_slot, v_head), scales[1]),
        new_k.dtype,
        cache.k.dtype,
        new_k.shape[1],
        (cache.size, page_size),
        new_k.device.index,
    )
    others = [new_v, cache.k, cache.v, *index.values()]
    array.acquire(new_k, *others)
    refused = Refused(stream, scratch.allocator(new_k)) if cuda().is_debugging else None
    append.enqueue(
        stream,
        k=new_k.ptr,
        v=new_v.ptr,
        k_cache=cache.k.ptr,
        v_cache=cache.v.ptr,
        batch_indices=index["batch_indices"].ptr,
        positions=index["positions"].ptr,
        kv_indices=index["kv_indices"].ptr,
        kv_indptr=index["kv_indptr"].ptr,
        nnz=new_k.shape[0],
        num_indices=index["kv_indices"].shape[0],
        batch_size=index["kv_indptr"].shape[0] - 1,
        num_refused=0 if refused is None else refused.address,
    )
    num_refused = 0 if refused is None else refused.read()
    array.release(new_k, new_k, *others)
    if num_refused:
        raise ArgumentError(
            f"positions: {num_refused} of {new_k.shape[0]} tokens have no slot and were left out: "
            "their request, position or page is out of bounds; wanted pages for all keys"
        )
    views = [index_arrays[name] for name in index]
    return append if _are_unconverted(views, index.values()) else None


def _are_unconverted(originals: Iterable[ArrayView], used: Iterable[ArrayView]) -> bool:
    """Whether index arrays of later calls may be used as they are, if they look like these."""
    return not cuda().is_debugging and all(a is b for a, b in zip(originals, used, strict=True))


def view_rows(x: Any, spec: str, dims: Dims, name: str) -> ArrayView:
    v = array.view(x, name)
    match_array(v, spec, (*WIDE, *FP8), name, dims)
    return v


def view_index(x: Any, extent: str, dims: Dims, name: str) -> ArrayView:
    v = array.view(x, name)
    match(v, extent, dims, name)
    require_dtype(v, (dtypes.int32, dtypes.int64), name)
    return v


def _offsets_and_lengths(dims: Dims, **index: Any) -> dict[str, ArrayView]:
    """Two index arrays by name: offsets [B + 1], and a number for each of the B requests."""
    (name, offsets), (per_request, lengths) = index.items()
    views = {
        name: view_index(offsets, "num_offsets", dims, name),
        per_request: view_index(lengths, "B", dims, per_request),
    }
    if dims["num_offsets"] != dims["B"] + 1:
        raise ArgumentError(
            f"{name}: has {dims['num_offsets']} offsets for the {dims['B']} requests of "
            f"{per_request}; wanted {dims['B'] + 1}"
        )
    return views


def _as_int32(values: np.ndarray, out: ArrayView | None, like: ArrayView, name: str) -> Any:
    """int64 results as int32: written to `out`, or a new array of like's framework.

    ArgumentError, which says that the argument `name` gives them, for those beyond 32 bits.
    """
    if values.max(initial=0) > _INT32_MAX:
        raise ArgumentError(f"{name}: gives {values.max()}; results are at most {_INT32_MAX}")
    if out is None:
        return array.from_numpy(values.astype(np.int32), like)
    array.as_numpy(out)[...] = values
    return out.owner


def append_scales(
    k_scale: float | None,
    v_scale: float | None,
    dtype: DType,
    dtype_cache: DType,
    names: tuple[str, str] = ("paged_kv_cache", "append_key"),
) -> tuple[float, float]:
    """Checked numbers; names are those of the cache and of new keys."""
    converts = dtype in WIDE and dtype_cache in FP8
    if not converts and dtype is not dtype_cache:
        raise ArgumentError(
            f"{names[0]}: dtype is {dtype_cache} but {names[1]} is {dtype}; wanted the same, "
            "or an fp8 cache for input of 16 or 32 bits"
        )
    scales = []
    for name, value in (("k_scale", k_scale), ("v_scale", v_scale)):
        scale = float(np.float32(parse.positive(value, name, 1.0)))
        if scale == 0.0:
            raise ArgumentError(f"{name}: got {value!r}, which is 0 in float32; wanted more")
        if scale != 1.0 and not converts:
            raise ArgumentError(
                f"{name}: got {value!r}, but this append copies and does not convert to fp8; "
                "wanted None, or append input of 16 or 32 bits to an fp8 cache"
            )
        scales.append(scale)
    return scales[0], scales[1]


@untraced
def append_paged_mla_kv_cache(
    append_ckv: Array,
    append_kpe: Array,
    batch_indices: Array,
    positions: Array,
    ckv_cache: Array,
    kpe_cache: Array | None,
    kv_indices: Array,
    kv_indptr: Array,
    kv_last_page_len: Array,
    *,
    ckv_scale: float | None = None,
    kpe_scale: float | None = None,
) -> Any:
    """Write the latent rows of new tokens into their slots of a paged cache, in place.

    Parameters
    ----------
    append_ckv
        [nnz, latent columns]; append_kpe [nnz, rope columns], of the same dtype.
    ckv_cache
        [num_pages, page_size, latent columns]; kpe_cache [num_pages, page_size, rope columns].
        kpe_cache None: ckv_cache holds rows of both parts.
    ckv_scale, kpe_scale
        Numbers above 0, as k_scale and v_scale in append_paged_kv_cache, for a cache of fp8.
    other arguments
        All other arguments and errors are those of append_paged_kv_cache. Returns what that
        returns, of ckv_cache and kpe_cache. Semantics: FlashInfer's append_paged_mla_kv_cache,
        which takes 512 and 64 columns only and does not quantise.

    Examples
    --------
    >>> import numpy as np
    >>> import cupyattn
    >>> ckv, kpe = np.zeros((4, 64, 512), np.float16), np.zeros((4, 64, 64), np.float16)
    >>> indptr, indices, last = np.array([0, 2]), np.array([3, 0]), np.array([5])
    >>> new = np.ones((1, 512), np.float16), np.ones((1, 64), np.float16)
    >>> cupyattn.append_paged_mla_kv_cache(
    ...     *new, np.array([0]), np.array([68]), ckv, kpe, indices, indptr, last
    ... )
    >>> ckv[0, 4].min(), kpe[0, 4].min()
    (np.float16(1.0), np.float16(1.0))
    """
    latent, rope = array.view(append_ckv, "append_ckv"), array.view(append_kpe, "append_kpe")
    if len(latent.shape) != 2 or len(rope.shape) != 2:
        raise ArgumentError(
            f"append_ckv, append_kpe: shapes are {list(latent.shape)} and {list(rope.shape)}; "
            "wanted [nnz, columns]"
        )
    cache = array.view(ckv_cache, "ckv_cache")
    if len(cache.shape) != 3:
        raise ArgumentError(
            f"ckv_cache: shape is {list(cache.shape)}; wanted [num_pages, page_size, columns]"
        )
    if kpe_cache is None:
        columns = latent.shape[1], rope.shape[1]
        if cache.shape[2] != sum(columns):
            raise ArgumentError(
                f"ckv_cache: rows have {cache.shape[2]} columns; wanted {sum(columns)}, those of "
                "append_ckv and append_kpe, or a kpe_cache"
            )
        if cache.framework == "jax":
            raise ArgumentError("kpe_cache: got None with a JAX array; pass the parts apart")
        pages = tuple(
            array.restride(
                ckv_cache, "ckv_cache", (*cache.shape[:2], 1, n), (*cache.strides[:2], 0, 1), at
            )
            for n, at in zip(columns, (0, columns[0]), strict=True)
        )
    else:
        pages = _with_head(ckv_cache, "ckv_cache"), _with_head(kpe_cache, "kpe_cache")
    try:
        copies = append_paged_kv_cache(
            _with_head(append_ckv, "append_ckv"),
            _with_head(append_kpe, "append_kpe"),
            batch_indices,
            positions,
            pages,
            kv_indices,
            kv_indptr,
            kv_last_page_len,
            k_scale=ckv_scale,
            v_scale=kpe_scale,
        )
    except ArgumentError as error:
        raise _of_latent_rows(error, kpe_cache is not None) from error
    return None if copies is None else tuple(x[:, :, 0] for x in copies)


_LATENT_NAMES = {
    "paged_kv_cache": "ckv_cache",
    "paged_kv_cache[0]": "ckv_cache",
    "paged_kv_cache[1]": "kpe_cache",
    "append_key": "append_ckv",
    "append_value": "append_kpe",
    "k_scale": "ckv_scale",
    "v_scale": "kpe_scale",
}
_LATENT_NAME = re.compile(r"\b(?:paged_kv_cache(?:\[[01]\])?|append_(?:key|value)\b|[kv]_scale\b)")


def _of_latent_rows(error: ArgumentError, has_kpe_cache: bool) -> ArgumentError:
    """An error of append_paged_kv_cache, with the names that arguments of latent rows have."""
    names = _LATENT_NAMES if has_kpe_cache else _LATENT_NAMES | {"paged_kv_cache[1]": "ckv_cache"}
    return type(error)(_LATENT_NAME.sub(lambda match: names[match[0]], str(error)))


def _with_head(x: Any, name: str) -> Any:
    """An array with an axis of one head before its columns."""
    v = array.view(x, name)
    if not v.shape:
        raise ArgumentError(f"{name}: has no dimension; wanted rows of columns")
    shape, strides = (*v.shape[:-1], 1, v.shape[-1]), (*v.strides[:-1], 0, v.strides[-1])
    return array.restride(x, name, shape, strides)
