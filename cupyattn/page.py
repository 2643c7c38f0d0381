"""Operations on a paged KV cache: appending to it, and the index arrays that say where."""

from __future__ import annotations

from numbers import Integral
from typing import Any

import numpy as np

from . import array, paging, reference
from .array import ArrayView
from .array.match import Dims, match, require_contiguous_last, require_dtype, require_output
from .core import dtypes
from .core.dtypes import DType
from .errors import ArgumentError
from .inputs import parse
from .inputs.paged_cache import CachePart, PagedCache, paged_cache

__all__ = ["append_paged_kv_cache", "get_batch_indices_positions", "get_seq_lens"]

_INT32_MAX = 2**31 - 1
_WIDE = (dtypes.float16, dtypes.bfloat16, dtypes.float32)
_FP8 = (dtypes.float8_e4m3fn, dtypes.float8_e5m2)


def append_paged_kv_cache(
    append_key: Any,
    append_value: Any,
    batch_indices: Any,
    positions: Any,
    paged_kv_cache: Any,
    kv_indices: Any,
    kv_indptr: Any,
    kv_last_page_len: Any,
    kv_layout: str = "NHD",
    *,
    k_scale: float | None = None,
    v_scale: float | None = None,
) -> None:
    """Write the keys and values of new tokens into their slots of a paged cache, in place.

    Token i belongs to request b = batch_indices[i] and is its key number p = positions[i]; its slot
    is p % page_size of page kv_indices[kv_indptr[b] + p // page_size].

    append_key        [nnz, Hkv, Dk] float16, bfloat16, float32, float8_e4m3fn or float8_e5m2
    append_value      [nnz, Hkv, Dv] of the same dtype
    batch_indices     int32 [nnz]; a negative one skips its token
    positions         int32 [nnz]
    paged_kv_cache    [P, 2, page_size, Hkv, D] (NHD) or [P, 2, Hkv, page_size, D] (HND), or a
                      (K, V) pair without the axis of 2, each with strides and a head dim of its
                      own; without a page axis the page size is 1. Of append_key's dtype, or fp8
                      while append_key has 16 or 32 bits: then it is converted
    kv_indices        int32 [>= kv_indptr[B]], the pages of all requests
    kv_indptr         int32 [B + 1], after the append: all pages that are written are there
    kv_last_page_len  int32 [B]; its shape is checked and its values change nothing
    kv_layout         "NHD" or "HND"
    k_scale, v_scale  numbers above 0 (default 1), only where the cache is converted to: stored is
                      x / scale to nearest, ties to even, beyond the largest finite value that
                      value, a NaN as a NaN. Attention takes the same k_scale and v_scale

    On the CPU index arrays may be int64. Arrays have any strides but for a contiguous last
    dimension. Two tokens for one slot leave either of them.

    Raises ArgumentError for other shapes, dtypes, layouts and devices, a cache that cannot be
    written, and, on the CPU, a token without a slot: a request, position or page out of bounds.
    On a GPU the values of index arrays are not known to the host: such a token is left out, and
    counted and raised under CUPYATTN_DEBUG=1. Semantics: FlashInfer's append_paged_kv_cache,
    where a negative batch index writes out of bounds, and fp8 input must have been cast.
    """
    # Validate.
    layout = parse.kv_layout(kv_layout)
    dims = Dims()
    new_k = _rows(append_key, "nnz Hkv Dk", dims, "append_key")
    new_v = _rows(append_value, "nnz Hkv Dv", dims, "append_value")
    if new_v.dtype is not new_k.dtype:
        raise ArgumentError(
            f"append_value: dtype is {new_v.dtype} but append_key is {new_k.dtype}; wanted the same"
        )
    cache = paged_cache(paged_kv_cache, layout, dims)
    if max(cache.page_size, dims["Hkv"], dims["Dk"], dims["Dv"]) > _INT32_MAX:
        raise ArgumentError("paged_kv_cache: page size, heads and head dims must fit 32 bits")
    scales = _scales(k_scale, v_scale, new_k.dtype, cache.dtype)
    index = {
        "batch_indices": _index(batch_indices, "nnz", dims, "batch_indices"),
        "positions": _index(positions, "nnz", dims, "positions"),
        "kv_indices": _index(kv_indices, "num_indices", dims, "kv_indices"),
        "kv_indptr": _index(kv_indptr, "num_offsets", dims, "kv_indptr"),
        "kv_last_page_len": _index(kv_last_page_len, "B", dims, "kv_last_page_len"),
    }
    _check_offsets(dims["num_offsets"], dims["B"], "kv_indptr", "kv_last_page_len")
    inputs: dict[str, ArrayView | None] = {"append_key": new_k, "append_value": new_v, **index}
    device = array.same_device(**inputs, **cache.views)
    for name, v in cache.views.items():
        require_output(v, name, **inputs)
    if device.kind == "cpu":
        _append_on_cpu(new_k, new_v, cache, index, scales)
        return
    if not (dims["nnz"] and dims["Hkv"] and (dims["Dk"] or dims["Dv"])):
        return
    _append_on_gpu(new_k, new_v, cache, index, scales)


def get_batch_indices_positions(
    append_indptr: Any,
    seq_lens: Any,
    nnz: int,
    batch_indices: Any = None,
    positions: Any = None,
) -> tuple[Any, Any]:
    """The request and the position of every new token: what `append_paged_kv_cache` takes.

    append_indptr  int32 [B + 1], never falling: the new tokens of request b are the rows from
                   append_indptr[b] to append_indptr[b + 1]
    seq_lens       int32 [B], keys of each request after the append
    nnz            number of rows, append_indptr[B] or more; rows beyond get -1 and 0
    batch_indices, positions  int32 [nnz] to write into (default: new arrays)

    On the CPU index arrays may be int64. Returns (batch_indices, positions), int32 [nnz], in
    append_indptr's framework and device; on a GPU nothing waits for it. Raises ArgumentError for
    other shapes, dtypes and devices, outputs that cannot be written, and, on the CPU, values that
    make no sense: offsets that fall, fewer rows than tokens, more new tokens than keys. Semantics:
    FlashInfer's get_batch_indices_positions.
    """
    # Validate.
    dims = Dims(nnz=_count(nnz, "nnz", 0))
    vi = _index(append_indptr, "num_offsets", dims, "append_indptr")
    vl = _index(seq_lens, "B", dims, "seq_lens")
    _check_offsets(dims["num_offsets"], dims["B"], "append_indptr", "seq_lens")
    given = {
        name: _output(x, dims, name, append_indptr=vi, seq_lens=vl)
        for name, x in (("batch_indices", batch_indices), ("positions", positions))
        if x is not None
    }
    if len(given) == 2:
        require_output(given["positions"], "positions", batch_indices=given["batch_indices"])
    device = array.same_device(append_indptr=vi, seq_lens=vl, **given)
    # Compute.
    shape = (dims["nnz"],)
    if device.kind == "cpu":
        found = paging.positions_of(array.as_numpy(vi), array.as_numpy(vl), dims["nnz"])
        answers = zip(("batch_indices", "positions"), found, strict=True)
        return tuple(_answer(x, given.get(name), vi) for name, x in answers)  # type: ignore[return-value]
    b, p = (
        given[name].owner if name in given else array.empty(shape, dtypes.int32, vi)
        for name in ("batch_indices", "positions")
    )
    vb, vp = array.view(b, "batch_indices"), array.view(p, "positions")
    if dims["nnz"]:
        from .launch.ops import get_batch_indices_positions as launcher

        array.acquire(vi, vl, *given.values())
        launcher.launch(vi, vl, vb, vp, array.current_stream(vi))
        array.release(vi, vi, vl, *given.values())
    b, p = (
        x if name in given else array.deliver(x, vi)
        for name, x in (("batch_indices", b), ("positions", p))
    )
    return b, p


def get_seq_lens(kv_indptr: Any, kv_last_page_len: Any, page_size: int) -> Any:
    """Keys of each request of a page table: max(pages - 1, 0) * page_size + kv_last_page_len.

    kv_indptr int32 [B + 1], kv_last_page_len int32 [B], page_size from 1 up; on the CPU int64 too.
    A request without pages has kv_last_page_len keys, so keep that at 0.

    Returns int32 [B] in kv_indptr's framework and device. Raises ArgumentError for other shapes,
    dtypes and devices, and, on the CPU, offsets that fall. Semantics: FlashInfer's get_seq_lens.
    """
    # Validate.
    dims = Dims()
    page_size = _count(page_size, "page_size", 1)
    vi = _index(kv_indptr, "num_offsets", dims, "kv_indptr")
    vl = _index(kv_last_page_len, "B", dims, "kv_last_page_len")
    _check_offsets(dims["num_offsets"], dims["B"], "kv_indptr", "kv_last_page_len")
    device = array.same_device(kv_indptr=vi, kv_last_page_len=vl)
    # Compute.
    if device.kind == "cpu":
        found = paging.pages_to_lengths(array.as_numpy(vi), array.as_numpy(vl), page_size)
        return _answer(found, None, vi)
    out = array.empty((dims["B"],), dtypes.int32, vi)
    if dims["B"]:
        from .launch.ops import get_seq_lens as launcher

        array.acquire(vi, vl)
        launcher.launch(vi, vl, array.view(out, "out"), page_size, array.current_stream(vi))
        array.release(vi, vi, vl)
    return array.deliver(out, vi)


def _append_on_cpu(
    new_k: ArrayView,
    new_v: ArrayView,
    cache: PagedCache,
    index: dict[str, ArrayView],
    scales: tuple[float, float],
) -> None:
    slots = paging.slots(
        **{name: array.as_numpy(v) for name, v in index.items() if name != "kv_last_page_len"},
        page_size=cache.page_size,
        pool_size=cache.num_pages,
    )
    for v, part, scale in ((new_k, cache.k, scales[0]), (new_v, cache.v, scales[1])):
        reference.store_rows(array.as_numpy(v), part.as_numpy(), slots, scale)


def _append_on_gpu(
    new_k: ArrayView,
    new_v: ArrayView,
    cache: PagedCache,
    index: dict[str, ArrayView],
    scales: tuple[float, float],
) -> None:
    from .launch.driver import scratch
    from .launch.ops import append_paged_kv_cache as launcher

    def rows(v: ArrayView, part: CachePart, scale: float) -> launcher.Rows:
        strides = v.strides[0], v.strides[1]
        return launcher.Rows(v.ptr, part.ptr, strides, part.strides, v.shape[2], scale)

    others = [new_v, *cache.views.values(), *index.values()]
    array.acquire(new_k, *others)
    num_refused = launcher.launch(
        rows(new_k, cache.k, scales[0]),
        rows(new_v, cache.v, scales[1]),
        new_k.dtype,
        cache.dtype,
        new_k.shape[1],
        index["batch_indices"],
        index["positions"],
        launcher.PageTable(
            index["kv_indices"], index["kv_indptr"], cache.num_pages, cache.page_size
        ),
        new_k.device.index,
        array.current_stream(new_k),
        scratch.allocator(new_k),
    )
    array.release(new_k, new_k, *others)
    if num_refused:
        raise ArgumentError(
            f"positions: {num_refused} of {new_k.shape[0]} tokens have no slot and were left out: "
            "their request, position or page is out of bounds; wanted pages for all keys"
        )


def _rows(x: Any, spec: str, dims: Dims, name: str) -> ArrayView:
    v = array.view(x, name)
    match(v, spec, dims, name)
    require_dtype(v, (*_WIDE, *_FP8), name)
    require_contiguous_last(v, name)
    return v


def _index(x: Any, extent: str, dims: Dims, name: str) -> ArrayView:
    v = array.view(x, name)
    match(v, extent, dims, name)
    # Kernels read 32 bits; a copy of another dtype would be new memory in each call of a graph.
    is_cpu = v.device.kind == "cpu"
    require_dtype(v, (dtypes.int32, dtypes.int64) if is_cpu else dtypes.int32, name)
    require_contiguous_last(v, name)
    return v


def _output(x: Any, dims: Dims, name: str, **inputs: ArrayView) -> ArrayView:
    v = array.view(x, name)
    match(v, "nnz", dims, name)
    require_dtype(v, dtypes.int32, name)
    require_contiguous_last(v, name)
    require_output(v, name, **inputs)
    return v


def _answer(found: np.ndarray, out: ArrayView | None, like: ArrayView) -> Any:
    """int64 results as int32: written to `out`, or a new array of like's framework."""
    if out is None:
        return array.from_numpy(found.astype(np.int32), like)
    array.as_numpy(out)[...] = found
    return out.owner


def _check_offsets(num_offsets: int, batch_size: int, name: str, per_request: str) -> None:
    if num_offsets != batch_size + 1:
        raise ArgumentError(
            f"{name}: has {num_offsets} offsets for the {batch_size} requests of {per_request}; "
            f"wanted {batch_size + 1}"
        )


def _count(value: object, name: str, least: int) -> int:
    if isinstance(value, bool) or not isinstance(value, Integral) or int(value) < least:
        raise ArgumentError(f"{name}: got {value!r}; wanted an integer of {least} or more")
    return int(value)


def _scales(
    k_scale: float | None, v_scale: float | None, dtype: DType, dtype_cache: DType
) -> tuple[float, float]:
    converts = dtype in _WIDE and dtype_cache in _FP8
    if not converts and dtype is not dtype_cache:
        raise ArgumentError(
            f"paged_kv_cache: dtype is {dtype_cache} but append_key is {dtype}; wanted the same, "
            "or an fp8 cache for input of 16 or 32 bits"
        )
    return _scale(k_scale, "k_scale", converts), _scale(v_scale, "v_scale", converts)


def _scale(value: float | None, name: str, converts: bool) -> float:
    scale = float(np.float32(parse.positive(value, name, 1.0)))
    if scale == 0.0:
        raise ArgumentError(f"{name}: got {value!r}, which is 0 in float32; wanted more")
    if scale != 1.0 and not converts:
        raise ArgumentError(
            f"{name}: got {value!r}, but this append copies and does not convert to fp8; wanted "
            "None, or append input of 16 or 32 bits to an fp8 cache"
        )
    return scale
