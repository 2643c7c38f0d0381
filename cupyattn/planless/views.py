"""Views of what the calls without a plan take: caches, lengths, offsets, scales; each checked."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

from .. import array
from ..array import ArrayView
from ..array.match import Dims, match, require_contiguous_last, require_dtype
from ..core import dtypes
from ..errors import ArgumentError, UnsupportedError
from ..inputs.kv_cache import Keys, half
from ..inputs.workspace import refuse_capture
from ..launch.attention.plan_batch import INDEX_DTYPES

_PAGES = {"NHD": "page_size Hkv", "HND": "Hkv page_size"}


class Names(NamedTuple):
    """What a function calls its arguments, for messages."""

    q: str
    k: str
    v: str
    block_tables: str = "block_tables"
    kv_lens: str = "seq_lens"
    qo_lens: str = "actual_seq_lens_q"
    qo_offsets: str = "cum_seq_lens_q"
    kv_offsets: str = "batch_offsets_k"
    sm_scale: str = "bmm1_scale"
    k_scale: str = "k_scale"
    output_scale: str = "bmm2_scale"
    q_len: str = "q_len_per_req"
    max_q_len: str = "max_q_len"
    max_kv_len: str = "max_seq_len"
    out: str = "out"
    o_dtype: str = "out_dtype"


def merge_leading(v: ArrayView, name: str, kept: int) -> ArrayView:
    """v with all axes but the last `kept` as one; those of an extent of 1 may have any stride."""
    if len(v.shape) == kept + 1:
        return v
    leading = range(len(v.shape) - kept)
    stride, reach = 0, 1
    for axis in reversed(leading):
        extent, step = v.shape[axis], v.strides[axis]
        if extent == 1:
            continue
        if reach > 1 and step != stride * reach and 0 not in v.shape:
            raise ArgumentError(
                f"{name}: shape {list(v.shape)} with strides {list(v.strides)} has rows that are "
                "not equally far apart; pass a contiguous array"
            )
        stride = stride if reach > 1 else step
        reach *= extent
    count = math.prod(v.shape[axis] for axis in leading)
    return array.as_strided(
        v, (count, *v.shape[len(leading) :]), (stride, *v.strides[len(leading) :])
    )


def view_rows(x: Any, name: str, axes: tuple[int, ...]) -> ArrayView:
    """[..., heads, dim]; `axes` says how many the array may have."""
    v = array.view(x, name)
    if len(v.shape) not in axes:
        wanted = " or ".join(str(n) for n in axes)
        raise ArgumentError(
            f"{name}: shape {list(v.shape)} has {len(v.shape)} dimensions; wanted {wanted}, the "
            "last two being heads and head_dim"
        )
    require_contiguous_last(v, name)
    return v


def view_cache(k: Any, v: Any, kv_layout: str, names: Names, dims: Dims) -> Keys:
    """Pages of keys and values; `dims` gives and takes P, page_size, Hkv, Dqk and Dvo.

    v None: k is one tensor [P, 2, ...] of both, or [P, 1, ...] of what serves as both. Tensors
    [P, 2, ...] for k and for v: K of the first and V of the second.
    """
    k_name, v_name = names.k, names.v
    vk = array.view(k, k_name)
    vv = vk if v is None else array.view(v, v_name)
    if v is None:
        if len(vk.shape) != 5 or vk.shape[1] not in (1, 2):
            raise ArgumentError(
                f"{k_name}: shape is {list(vk.shape)}; wanted [num_pages, 2, "
                f"{_PAGES[kv_layout].replace(' ', ', ')}, head_dim], or a pair (K, V) without the "
                "axis of 2"
            )
        vk, vv = half(vk, 0), half(vv, vv.shape[1] - 1)
    elif len(vk.shape) == len(vv.shape) == 5 and vk.shape[1] == vv.shape[1] == 2:
        vk, vv = half(vk, 0), half(vv, 1)
    for x, name, dim in ((vk, k_name, "Dqk"), (vv, v_name, "Dvo")):
        match(x, f"P {_PAGES[kv_layout]} {dim}", dims, name)
        require_contiguous_last(x, name)
    slot, head = (1, 2) if kv_layout == "NHD" else (2, 1)
    strides = (vk.strides[slot], vk.strides[head], vv.strides[slot], vv.strides[head])
    return _keys(vk, vv, (*strides, vk.strides[0], vv.strides[0]), dims["P"], names)


def view_ragged_keys(k: Any, v: Any, names: Names, dims: Dims) -> Keys:
    """Rows [n, Hkv, D] of all requests."""
    views = array.view(k, names.k), array.view(v, names.v)
    for x, name, dim in zip(views, (names.k, names.v), ("Dqk", "Dvo"), strict=True):
        match(x, f"n Hkv {dim}", dims, name)
        require_contiguous_last(x, name)
    vk, vv = views
    strides = (*vk.strides[:2], *vv.strides[:2], 0, 0)
    return _keys(vk, vv, strides, dims["n"], names)


def _keys(vk: ArrayView, vv: ArrayView, strides: Any, size: int, names: Names) -> Keys:
    if vk.dtype is not vv.dtype:
        raise ArgumentError(
            f"{names.v}: dtype is {vv.dtype} but {names.k} is {vk.dtype}; wanted the same"
        )
    return Keys(vk, vv, strides, size, (names.k, names.v))


def view_table(x: Any, name: str) -> ArrayView:
    """A page table [B, max_pages] of int32."""
    v = array.view(x, name)
    if len(v.shape) == 3:
        raise UnsupportedError(
            f"{name}: shape {list(v.shape)} has a table each for K and V; one for both is "
            "supported, [B, max_pages]"
        )
    match(v, "B max_pages", Dims(), name)
    require_dtype(v, dtypes.int32, name)
    require_contiguous_last(v, name)
    if v.strides[0] < 0 or v.strides[0] * v.shape[0] > 2**31 - 1:
        raise UnsupportedError(
            f"{name}: rows are {v.strides[0]} entries apart; {v.shape[0]} of them must lie within "
            "2^31 entries, pass a contiguous table"
        )
    return v


def view_index(
    x: Any, name: str, counts: tuple[int, ...], like: ArrayView, may_copy: bool
) -> ArrayView:
    """Lengths or offsets in one axis, `counts` of them; other axes have an extent of 1.

    may_copy: those of the host are copied to the device of `like`, except into a graph.
    """
    v = array.view(x, name)
    require_dtype(v, INDEX_DTYPES, name)
    size = math.prod(v.shape)
    if sum(extent != 1 for extent in v.shape) > 1 or size not in counts:
        wanted = " or ".join(f"[{n}]" for n in counts)
        raise ArgumentError(f"{name}: shape is {list(v.shape)}; wanted {wanted}, or [n, 1, ...]")
    if may_copy and v.device.kind == "cpu" and like.device.kind == "cuda":
        refuse_capture(array.current_stream(like), f"{name} on the host", "pass it on the GPU")
        return array.view(array.from_numpy(array.as_numpy(v).reshape(-1), like), name)
    steps = [s for n, s in zip(v.shape, v.strides, strict=True) if n != 1]
    return array.as_strided(v, (size,), (steps[0] if steps else 1,))


def view_sinks(x: Any, num_heads: int) -> ArrayView:
    """float32, one for each query head, in one axis or [num_kv_heads, group]."""
    v = array.view(x, "sinks")
    require_dtype(v, dtypes.float32, "sinks")
    low, high = array.byte_range(v)
    if math.prod(v.shape) != num_heads or len(v.shape) > 2:
        raise ArgumentError(
            f"sinks: shape is {list(v.shape)}; wanted one for each of the {num_heads} query heads"
        )
    if high - low != 4 * num_heads or low != v.ptr:
        raise ArgumentError("sinks: is not contiguous; pass a contiguous array")
    return array.as_strided(v, (num_heads,), (1,))


def bucket(length: Any) -> Any:
    """A bound of lengths as the next power of two, so that calls of growing requests look alike."""
    if type(length) is int and length > 0:
        return 1 << (length - 1).bit_length()
    return length
