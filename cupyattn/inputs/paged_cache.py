"""A paged cache as callers give it: one array or a (K, V) pair, in either layout."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from .. import array
from ..array import ArrayView
from ..array.match import Dims, match, require_contiguous_last
from ..core.dtypes import DType
from ..errors import ArgumentError

_PAGES = {"NHD": "page_size Hkv", "HND": "Hkv page_size"}


@dataclass(frozen=True, slots=True)
class CachePart:
    """K or V of a paged cache [num_pages, page_size, num_kv_heads, head_dim].

    `strides` (page, slot, head) are in elements; `index` is the part's place on axis 1 of a
    combined array, None if `view` is the part's own array.
    """

    view: ArrayView
    ptr: int
    strides: tuple[int, int, int]
    kv_layout: str
    index: int | None

    def as_numpy(self) -> np.ndarray:
        """The part of a cache on the CPU as [num_pages, page_size, num_kv_heads, head_dim]."""
        x = array.as_numpy(self.view)
        if self.index is not None:
            x = x[:, self.index]
        if x.ndim == 3:
            return x[:, None]
        return x if self.kv_layout == "NHD" else x.swapaxes(1, 2)


@dataclass(frozen=True, slots=True)
class PagedCache:
    """`views` are the caller's arrays by their names in messages: one, or K's and V's."""

    views: dict[str, ArrayView]
    k: CachePart
    v: CachePart
    dtype: DType
    num_pages: int
    page_size: int


def paged_cache(x: Any, kv_layout: str, dims: Dims, name: str = "paged_kv_cache") -> PagedCache:
    """Read a cache; `dims` gives and takes the symbols P, page_size, Hkv, Dk and Dv.

    One array [P, 2, page_size, Hkv, D] (NHD) or [P, 2, Hkv, page_size, D] (HND), or a pair without
    the axis of 2, whose strides and head dims may differ. Without a page axis (one axis fewer) the
    page size is 1. Raises ArgumentError for other shapes, a strided last dimension, or two dtypes.
    """
    if isinstance(x, (tuple, list)):
        return _pair(x, kv_layout, dims, name)
    v = array.view(x, name)
    pages = _pages(v, 5, kv_layout, name)
    match(v, f"P 2 {pages} Dk", dims, name)
    if dims.setdefault("Dv", dims["Dk"]) != dims["Dk"]:
        raise ArgumentError(
            f"{name}: one array has one head dim, {dims['Dk']}, but V has {dims['Dv']}; wanted a "
            "(K, V) pair of caches"
        )
    require_contiguous_last(v, name)
    strides = (v.strides[0], *v.strides[2:])
    k_part, v_part = (
        CachePart(
            v,
            v.ptr + index * v.strides[1] * v.dtype.itemsize,
            _strides(strides, kv_layout),
            kv_layout,
            index,
        )
        for index in (0, 1)
    )
    return PagedCache({name: v}, k_part, v_part, v.dtype, dims["P"], dims.get("page_size", 1))


def _pair(x: Any, kv_layout: str, dims: Dims, name: str) -> PagedCache:
    if len(x) != 2:
        raise ArgumentError(f"{name}: got {len(x)} arrays; wanted one, or a pair (K, V)")
    views = {f"{name}[{i}]": array.view(part, f"{name}[{i}]") for i, part in enumerate(x)}
    parts = []
    for (label, part), dim in zip(views.items(), ("Dk", "Dv"), strict=True):
        match(part, f"P {_pages(part, 4, kv_layout, label)} {dim}", dims, label)
        require_contiguous_last(part, label)
        strides = _strides(part.strides, kv_layout)
        parts.append(CachePart(part, part.ptr, strides, kv_layout, None))
    k, v = parts
    if len(k.view.shape) != len(v.view.shape):
        raise ArgumentError(f"{name}: only one of K and V has a page axis; wanted both, or none")
    if k.view.dtype is not v.view.dtype:
        raise ArgumentError(
            f"{name}[1]: dtype is {v.view.dtype} but {name}[0] is {k.view.dtype}; wanted the same"
        )
    if k.ptr == v.ptr and 0 not in k.view.shape and 0 not in v.view.shape:
        raise ArgumentError(f"{name}: K and V are at the same address; wanted memory for each")
    return PagedCache(views, k, v, k.view.dtype, dims["P"], dims.get("page_size", 1))


def _pages(v: ArrayView, axes: int, kv_layout: str, name: str) -> str:
    """The symbols between the first and the last axis, whether or not there is a page axis."""
    if len(v.shape) not in (axes, axes - 1):
        combined = "2, " if axes == 5 else ""
        inner = _PAGES[kv_layout].replace(" ", ", ")
        raise ArgumentError(
            f"{name}: shape {list(v.shape)} has {len(v.shape)} dimensions; wanted "
            f"[P, {combined}{inner}, D], or [P, {combined}Hkv, D] for pages of one slot"
        )
    return _PAGES[kv_layout] if len(v.shape) == axes else "Hkv"


def _strides(strides: tuple[int, ...], kv_layout: str) -> tuple[int, int, int]:
    """(page, slot, head) of an array's strides; a slot stride of 0 stands for no page axis."""
    if len(strides) == 3:
        return strides[0], 0, strides[1]
    page, first, second, _ = strides
    return (page, first, second) if kv_layout == "NHD" else (page, second, first)
