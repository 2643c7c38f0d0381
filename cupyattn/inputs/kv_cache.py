"""Views of keys and values as a plan expects them: one paged tensor, a pair, or ragged rows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from .. import array
from ..array import ArrayView
from ..array.match import Dims, match, require_contiguous_last
from ..errors import ArgumentError
from .geometry import Geometry

_WORDS = {
    "NHD": ("page_size", "num_kv_heads"),
    "HND": ("num_kv_heads", "page_size"),
}


class Keys(NamedTuple):
    """k and v without what their packing adds. `strides` are (token, head) of k and v, then those
    of a page of k and v; `size` is the number of pages, or of rows that both have; `names` are k's
    and v's."""

    k: ArrayView
    v: ArrayView
    strides: tuple[int, int, int, int, int, int]
    size: int
    names: tuple[str, str]


def planned(geometry: Geometry) -> Dims:
    """The extents that arrays of a run must have, by the names of plan()'s arguments."""
    problem = geometry.problem
    known = {
        "num_qo_heads": geometry.num_qo_heads,
        "num_kv_heads": geometry.num_kv_heads,
        "head_dim_qk": problem.head_dim_qk,
        "head_dim_vo": problem.head_dim_vo,
        "page_size": geometry.page_size,
    }
    dims = Dims(**known)
    dims.source = dict.fromkeys(known, "the plan")
    return dims


def is_pair(cache: Any) -> bool:
    return isinstance(cache, (tuple, list))


def view_paged(cache: Any, geometry: Geometry) -> Keys:
    """The cache [P, 2, ...] or ([P, ...], [P, ...]), with or without an axis of pages of one token.

    Raises ArgumentError for other shapes.
    """
    if is_pair(cache):
        if len(cache) != 2:
            raise ArgumentError(f"paged_kv_cache: got {len(cache)} arrays; wanted two, (K, V)")
        names = ("paged_kv_cache[0]", "paged_kv_cache[1]")
        k, v = (array.view(x, name) for x, name in zip(cache, names, strict=True))
    else:
        both = array.view(cache, "paged_kv_cache")
        if len(both.shape) not in (4, 5) or both.shape[1] != 2:
            raise ArgumentError(
                f"paged_kv_cache: shape is {list(both.shape)}; wanted [num_pages, 2, ...] with 5 "
                "dimensions (4 for pages of one token), or a pair (K, V)"
            )
        names = ("paged_kv_cache", "paged_kv_cache")
        k, v = half(both, 0), half(both, 1)
    dims = planned(geometry)
    k, v = (_with_pages(x, name, geometry) for x, name in zip((k, v), names, strict=True))
    words = _WORDS[geometry.given.kv_layout]
    for x, dim, name in ((k, "head_dim_qk", names[0]), (v, "head_dim_vo", names[1])):
        match(x, f"_ {words[0]} {words[1]} {dim}", dims, name)
        require_contiguous_last(x, name)
    if v.shape[0] != k.shape[0]:
        raise ArgumentError(
            f"paged_kv_cache[1]: holds {v.shape[0]} pages but K holds {k.shape[0]}; wanted the same"
        )
    slot, head = (1, 2) if geometry.given.kv_layout == "NHD" else (2, 1)
    strides = (
        *(k.strides[slot], k.strides[head], v.strides[slot], v.strides[head]),
        *(k.strides[0], v.strides[0]),
    )
    if names[0] == names[1]:
        names = (names[0], f"{names[1]}[:, 1]")
    return Keys(k, v, strides, k.shape[0], names)


def view_ragged(k: Any, v: Any, geometry: Geometry) -> Keys:
    """Rows of keys and of values, [n, num_kv_heads, head_dim] or heads first ("HND")."""
    views = array.view(k, "k"), array.view(v, "v")
    dims = planned(geometry)
    layout = geometry.given.kv_layout
    for x, dim, name in zip(views, ("head_dim_qk", "head_dim_vo"), "kv", strict=True):
        spec = f"n num_kv_heads {dim}" if layout == "NHD" else f"num_kv_heads n {dim}"
        match(x, spec, dims, name)
        require_contiguous_last(x, name)
    vk, vv = views
    token, head = (0, 1) if layout == "NHD" else (1, 0)
    strides = (vk.strides[token], vk.strides[head], vv.strides[token], vv.strides[head], 0, 0)
    return Keys(vk, vv, strides, min(vk.shape[token], vv.shape[token]), ("k", "v"))


def half(both: ArrayView, index: int) -> ArrayView:
    """K or V of a tensor that holds both, or one for both, along its second axis."""
    offset = index * both.strides[1] * both.dtype.itemsize
    return _reshaped(
        both,
        both.ptr + offset,
        (both.shape[0], *both.shape[2:]),
        (both.strides[0], *both.strides[2:]),
        lambda owner: owner[:, index],
    )


def _with_pages(v: ArrayView, name: str, geometry: Geometry) -> ArrayView:
    """[P, heads, dim] as pages of one token."""
    if len(v.shape) != 3:
        return v
    axis = 1 if geometry.given.kv_layout == "NHD" else 2
    shape, strides = list(v.shape), list(v.strides)
    shape.insert(axis, 1)
    strides.insert(axis, 0)
    return _reshaped(
        v, v.ptr, tuple(shape), tuple(strides), lambda owner: np.expand_dims(owner, axis)
    )


def _reshaped(
    v: ArrayView,
    ptr: int,
    shape: tuple[int, ...],
    strides: tuple[int, ...],
    select: Callable[[Any], Any],
) -> ArrayView:
    """Another view of the memory of v; `select` does the same to a NumPy array."""
    owner = select(v.owner) if v.framework == "numpy" else v.owner
    made = ArrayView(ptr, shape, strides, v.dtype, v.device, v.framework, v.readonly, owner)
    if v.framework in ("jax", "dlpack"):
        made._memory = v._memory
    return made
