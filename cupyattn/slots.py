"""Keys and values into the slots of a cache that the caller names."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from . import array, reference
from .array import ArrayView
from .array.match import (
    Dims,
    is_contiguous,
    require_dtype,
    require_output,
    require_same_dtype,
)
from .core import dtypes, parse
from .core.dtypes import DType
from .core.tracing import untraced
from .engine.call_cache import Argument, CallCache
from .engine.cpu import tokens_first
from .engine.kv_cache import Keys, view_paged
from .errors import ArgumentError
from .launch.ops import store_kv as launcher
from .launch.ops.rows import Rows
from .page import FP8, WIDE, append_scales, view_index, view_rows
from .typing import Array, Scale

__all__ = ["reshape_and_cache"]


@untraced
def reshape_and_cache(
    k: Array,
    v: Array,
    k_cache: Array,
    v_cache: Array,
    slot_mapping: Array,
    kv_layout: str = "NHD",
    *,
    k_scale: Scale = None,
    v_scale: Scale = None,
    slot_map: Array | None = None,
) -> None:
    """Write the keys and values of tokens into the slots of a cache, in place and in one launch.

    Parameters
    ----------
    k, v
        [n, Hkv, Dk] and [n, Hkv, Dv] of one dtype: float16, bfloat16, float32 or fp8.
    k_cache, v_cache
        [slots, Hkv, D], or pages [num_pages, page_size, Hkv, D] ("HND": [num_pages, Hkv, page_size,
        D]), of k's dtype, or fp8 while k has 16 or 32 bits: then it is converted. K and V have any
        strides of their own but a contiguous last dimension.
    slot_mapping
        int32 or int64 [n]: the slot of each token, page * page_size + offset; a negative one skips
        its token.
    k_scale, v_scale
        What fp8 values are to be multiplied by later: stored is x / scale, rounded and saturated as
        in `append_paged_kv_cache`. Numbers above 0, or float32 arrays of one element or of one for
        each KV head, read where they are.
    slot_map
        int32 or int64 [m]: the slot of the cache for each slot that slot_mapping names, for a pool
        whose slots follow those of another.
    kv_layout
        "NHD", or "HND", of pages.

    Raises
    ------
    CupyAttnError
        ArgumentError for other shapes, dtypes and devices, and for a cache that cannot be written.

    Notes
    -----
    Two tokens for one slot leave either of them. On a GPU a repeated call takes a few microseconds
    of host time, any number of tokens is one signature, and a CUDA graph may capture it. A slot
    beyond the cache is left out there, and raises ArgumentError on the CPU.

    Semantics: vLLM's reshape_and_cache_flash.

    Examples
    --------
    >>> import numpy as np
    >>> from cupyattn import serving
    >>> k_cache, v_cache = np.zeros((2, 4, 16, 2, 64), np.float16)
    >>> k = v = np.ones((2, 2, 64), np.float16)
    >>> serving.reshape_and_cache(k, v, k_cache, v_cache, np.array([17, -1]))  # -1: skipped
    >>> k_cache[1, 1].min(), k_cache.sum()
    (np.float16(1.0), np.float16(128.0))
    """
    number_k, scale_k = _number_or_array(k_scale)
    number_v, scale_v = _number_or_array(v_scale)
    arrays = k, v, k_cache, v_cache, slot_mapping, scale_k, scale_v, slot_map
    options = kv_layout, number_k, number_v
    if not _store_cached(arrays, options):
        _store(arrays, options)


_STORES: CallCache[Any] = CallCache(
    Argument("k", 0),
    Argument("v", 0),
    Argument("k_cache", is_output=True),
    Argument("v_cache", is_output=True),
    Argument("slot_mapping", 0),
    Argument("k_scale"),
    Argument("v_scale"),
    Argument("slot_map"),
)
_INPUTS, _CACHES = (0, 1, 4, 5, 6, 7), (2, 3)


def _store_cached(arrays: tuple[Any, ...], options: tuple[Any, ...]) -> bool:
    """Enqueue a write that looks like an earlier one, if there was one."""
    hit = _STORES.lookup(arrays, options)
    if hit is None:
        return False
    cached, addresses = hit
    n, sizes = cached.lengths[0], cached.sizes
    if n != cached.lengths[1] or n != cached.lengths[4]:
        return False
    for cache in _CACHES:
        low = addresses[cache]
        high = low + sizes[cache]
        for index in _INPUTS:
            if addresses[index] < high and low < addresses[index] + sizes[index]:
                return False
    call = cached.call
    call.checked.enqueue(
        call.current_stream(),
        n,
        (addresses[0], addresses[1]),
        (addresses[2], addresses[3]),
        (addresses[5], addresses[6]),
        addresses[4],
        addresses[7],
    )
    return True


def _store(arrays: tuple[Any, ...], options: tuple[Any, ...]) -> None:
    """The checks of `reshape_and_cache`, and the write."""
    # --- 1. Validate ---
    layout = parse.kv_layout(options[0])
    dims = Dims()
    k, v, k_cache, v_cache, slot_mapping, scale_k, scale_v, slot_map = arrays
    vk = view_rows(k, "n num_kv_heads head_dim_qk", dims, "k")
    vv = view_rows(v, "n num_kv_heads head_dim_vo", dims, "v")
    require_same_dtype(vv, "v", vk, "k")
    cache = view_paged((k_cache, v_cache), layout, dims)
    cache = cache._replace(names=("k_cache", "v_cache"))
    slots = view_index(slot_mapping, "n", dims, "slot_mapping")
    table = None if slot_map is None else view_index(slot_map, "m", dims, "slot_map")
    numbers = append_scales(options[1], options[2], vk.dtype, cache.k.dtype, ("k_cache", "k"))
    scales = [
        None if x is None else _scale_view(x, name, dims["num_kv_heads"], vk.dtype, cache.k.dtype)
        for x, name in ((scale_k, "k_scale"), (scale_v, "v_scale"))
    ]
    named = {"k": vk, "v": vv, "slot_mapping": slots, "slot_map": table}
    inputs = named | {"k_scale": scales[0], "v_scale": scales[1]}
    device = array.same_device(**inputs, k_cache=cache.k, v_cache=cache.v)
    for name, view in (("k_cache", cache.k), ("v_cache", cache.v)):
        require_output(view, name, **inputs)
    if cache.k.ptr == cache.v.ptr and 0 not in cache.k.shape and 0 not in cache.v.shape:
        raise ArgumentError("k_cache, v_cache: are at one address; wanted memory for each")
    page_size, num_slots = dims["page_size"], dims["page_size"] * cache.size
    # --- 2. Write on the CPU ---
    if device.kind == "cpu":
        _store_on_cpu((vk, vv), cache, (slots, table), numbers, scales, layout, page_size)
        return
    # --- 3. Launch on the caller's stream ---
    if 0 not in (dims["n"], dims["num_kv_heads"], num_slots):
        store = _store_on_gpu(inputs, cache, numbers, page_size)
        if store is not None:
            _STORES.insert(arrays, options, store, vk, vk.dtype, None, None)


def _store_on_gpu(
    inputs: dict[str, ArrayView | None],
    cache: Keys,
    numbers: tuple[float, float],
    page_size: int,
) -> launcher.Store | None:
    """Enqueue a write. Returns it if later calls of its signature may enqueue it as it is."""
    vk, vv, given_slots = inputs["k"], inputs["v"], inputs["slot_mapping"]
    assert vk is not None and vv is not None and given_slots is not None
    scales = inputs["k_scale"], inputs["v_scale"]
    given_indices = given_slots, inputs["slot_map"]
    slots, table = _contiguous(given_slots), inputs["slot_map"]
    table = None if table is None else _contiguous(table)
    k_slot, k_head, v_slot, v_head, k_page, v_page = cache.strides
    of_k, of_v = (0 if x is None or x.shape[0] == 1 else x.strides[0] for x in scales)
    store = launcher.prepare(
        vk,
        Rows.of(vk, cache.k, (k_page, k_slot, k_head), numbers[0]),
        Rows.of(vv, cache.v, (v_page, v_slot, v_head), numbers[1]),
        dtype_cache=cache.k.dtype,
        scale_strides=(of_k, of_v),
        slots=slots,
        slot_map=table,
        num_slots=page_size * cache.size,
        page_size=page_size,
    )
    used = [x for x in (*inputs.values(), cache.k, cache.v, slots, table) if x is not None]
    array.acquire(vk, *used)
    at = [0 if x is None else x.ptr for x in (*scales, slots, table)]
    store.enqueue(
        array.current_stream(vk),
        vk.shape[0],
        (vk.ptr, vv.ptr),
        (cache.k.ptr, cache.v.ptr),
        (at[0], at[1]),
        at[2],
        at[3],
    )
    array.release(vk, *used)
    return store if (slots, table) == given_indices else None  # copies are made at each call


def _contiguous(v: ArrayView) -> ArrayView:
    return v if is_contiguous(v) else array.row_major_view(v)


def _store_on_cpu(
    rows: tuple[ArrayView, ArrayView],
    cache: Keys,
    indices: tuple[ArrayView, ArrayView | None],
    numbers: tuple[float, float],
    scales: list[ArrayView | None],
    layout: str,
    page_size: int,
) -> None:
    slots = array.as_numpy(indices[0]).astype(np.int64)
    if indices[1] is not None:
        table = array.as_numpy(indices[1]).astype(np.int64)
        if (slots >= table.size).any():
            raise ArgumentError(f"slot_mapping: {slots.max()}; slot_map has {table.size} slots")
        slots = np.where(slots < 0, -1, table[slots])
    if (slots >= cache.size * page_size).any():
        raise ArgumentError(
            f"slot_mapping: has slot {slots.max()}; the cache holds {cache.size * page_size} slots"
        )
    own = np.flatnonzero(slots >= 0)
    targets = own, slots[own] // page_size, slots[own] % page_size
    for new, pages, number, scale in zip(rows, (cache.k, cache.v), numbers, scales, strict=True):
        x = array.as_numpy(new)
        by_head = number if scale is None else array.as_numpy(scale)[None, :, None]
        reference.store_rows(x, tokens_first(pages, layout), targets, by_head)


def _number_or_array(scale: Any) -> tuple[Any, Any]:
    """A scale as (number or None, array or None)."""
    is_array = hasattr(scale, "shape") and not isinstance(scale, np.generic)
    return (None, scale) if is_array else (scale, None)


def _scale_view(
    x: Any, name: str, num_heads: int, dtype: DType, dtype_cache: DType
) -> ArrayView | None:
    """Scales in memory as [1] or [num_kv_heads]; those of a write that converts nothing are none of
    its business."""
    v = array.view(x, name)
    require_dtype(v, dtypes.float32, name)
    if math.prod(v.shape) == 1:
        v = array.as_strided(v, (1,), (1,))
    elif tuple(v.shape) != (num_heads,):
        raise ArgumentError(
            f"{name}: shape is {list(v.shape)}; wanted one number, or [{num_heads}], one for each "
            "KV head"
        )
    return v if dtype in WIDE and dtype_cache in FP8 else None
