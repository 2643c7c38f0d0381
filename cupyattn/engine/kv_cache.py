"""Views of keys and values as a plan expects them: one paged tensor, a pair, or ragged rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from .. import array
from ..array import ArrayView
from ..array.match import Dims, match, require_contiguous_last, require_same_dtype
from ..core import dtypes, parse
from ..core.dtypes import DType
from ..errors import ArgumentError
from ..launch.driver import params
from .geometry import Geometry

# (token, head) of k and v, then of a page of k and v, in elements.
KeyStrides = tuple[int, int, int, int, int, int]
_AXES = {"NHD": "page_size num_kv_heads", "HND": "num_kv_heads page_size"}


class Keys(NamedTuple):
    """k and v without what their packing adds; `size` is the number of pages, or of rows that both
    have; `names` are k's and v's."""

    k: ArrayView
    v: ArrayView
    strides: KeyStrides
    size: int
    names: tuple[str, str]


def pack_strides(
    q: ArrayView, keys: KeyStrides, out: ArrayView, lse_strides: Sequence[int]
) -> bytes:
    """params.STRIDES of q and out [rows, heads, columns], keys, and an LSE [rows, heads]."""
    k_token, k_head, v_token, v_head, k_page, v_page = keys
    lse_row, lse_head = lse_strides
    return params.STRIDES.pack(
        q.strides[0],
        q.strides[1],
        k_token,
        k_head,
        v_token,
        v_head,
        out.strides[0],
        out.strides[1],
        lse_row,
        lse_head,
        k_page,
        v_page,
    )


def planned(geometry: Geometry) -> Dims:
    """The extents that arrays of a run must have, by the names of plan()'s arguments."""
    names = ("num_qo_heads", "num_kv_heads", "head_dim_qk", "head_dim_vo", "page_size")
    known = {name: getattr(geometry.spec, name) for name in names}
    dims = Dims(**known)
    dims.source = dict.fromkeys(known, "the plan")
    return dims


def is_pair(cache: Any) -> bool:
    return isinstance(cache, (tuple, list))


def view_paged(
    cache: Any,
    kv_layout: str,
    dims: Dims,
    name: str = "paged_kv_cache",
) -> Keys:
    """Pages of keys and values; `dims` gives and takes num_pages, page_size, num_kv_heads,
    head_dim_qk and head_dim_vo.

    One array [num_pages, 2, page_size, num_kv_heads, head_dim] ("HND": heads before slots), or a
    pair (K, V) without the axis of 2, whose strides and head dims may differ. Without an axis of
    slots a page holds one token. Raises ArgumentError for other shapes, a strided last dimension,
    or two dtypes.
    """
    if is_pair(cache):
        if len(cache) != 2:
            raise ArgumentError(f"{name}: got {len(cache)} arrays; wanted one, or a pair (K, V)")
        names = f"{name}[0]", f"{name}[1]"
        k, v = (array.view(x, label) for x, label in zip(cache, names, strict=True))
        if len(k.shape) != len(v.shape):
            raise ArgumentError(
                f"{name}: only one of K and V has a page axis; wanted both, or none"
            )
    else:
        both = array.view(cache, name)
        if len(both.shape) not in (4, 5) or both.shape[1] != 2:
            raise ArgumentError(
                f"{name}: shape is {list(both.shape)}; wanted [num_pages, 2, "
                f"{_AXES[kv_layout].replace(' ', ', ')}, head_dim], without page_size for pages of "
                "one token, or a pair (K, V) without the axis of 2"
            )
        names = name, f"{name}[:, 1]"
        k, v = select_kv(both, 0), select_kv(both, 1)
    k, v = with_slots(k, kv_layout), with_slots(v, kv_layout)
    return match_pages(k, v, kv_layout, dims, names)


def match_pages(
    k: ArrayView, v: ArrayView, kv_layout: str, dims: Dims, names: tuple[str, str]
) -> Keys:
    """Pages [num_pages, page_size, num_kv_heads, head_dim] of keys, and of values, checked."""
    for x, dim, name in ((k, "head_dim_qk", names[0]), (v, "head_dim_vo", names[1])):
        match_keys(x, "num_pages page_size", dim, kv_layout, dims, name)
    slot, head = (1, 2) if kv_layout == "NHD" else (2, 1)
    strides = k.strides[slot], k.strides[head], v.strides[slot], v.strides[head]
    require_kv_dtypes(k, v, names)
    return Keys(k, v, (*strides, k.strides[0], v.strides[0]), dims["num_pages"], names)


def view_ragged(
    k: Any, v: Any, kv_layout: str, dims: Dims, names: tuple[str, str] = ("k", "v")
) -> Keys:
    """Rows of keys and of values, [n, num_kv_heads, head_dim] or heads first ("HND").

    `dims` as in view_paged.
    """
    token, head = (0, 1) if kv_layout == "NHD" else (1, 0)
    views = array.view(k, names[0]), array.view(v, names[1])
    for x, dim, name in zip(views, ("head_dim_qk", "head_dim_vo"), names, strict=True):
        match_keys(x, "n", dim, kv_layout, dims, name)
    vk, vv = views
    strides = vk.strides[token], vk.strides[head], vv.strides[token], vv.strides[head], 0, 0
    require_kv_dtypes(vk, vv, names)
    return Keys(vk, vv, strides, dims["n"], names)


def require_kv_dtypes(k: ArrayView, v: ArrayView, names: tuple[str, str]) -> None:
    """ArgumentError unless keys and values have one dtype, or are int8 and float8_e4m3fn."""
    if k.dtype is not dtypes.int8 or v.dtype is not dtypes.float8_e4m3fn:
        require_same_dtype(v, names[1], k, names[0])


def dtype_kv(q: ArrayView, k: ArrayView, v: ArrayView, name: str = "k") -> DType:
    """The dtype of values, beside which a problem knows that of keys (`AttentionProblem.dtype_k`).

    Raises ArgumentError for keys of another; name: of `k`.
    """
    require_k_dtype(k, q.dtype.of_keys or v.dtype, q.dtype, name)
    return v.dtype


def require_k_dtype(k: ArrayView, wanted: DType, dtype_q: DType, name: str) -> None:
    """ArgumentError unless keys have the dtype that queries of this one want."""
    if k.dtype is not wanted and dtypes.int8 in (k.dtype, dtype_q):
        raise ArgumentError(
            f"{name}: dtype is {k.dtype} with q of dtype {dtype_q}; wanted {wanted}: keys are int8 "
            "where queries are, and only there"
        )


def match_keys(v: ArrayView, axes: str, dim: str, kv_layout: str, dims: Dims, name: str) -> None:
    """Check keys, or values: [*axes, num_kv_heads, dim], or if "HND" heads before the last of axes.

    Raises ArgumentError, which says so if the other layout is what the shape has.
    """
    before = dict(dims)
    try:
        match(v, _spec_of(axes, dim, kv_layout), dims, name)
    except ArgumentError as error:
        other = parse.other_layout(kv_layout)
        try:
            match(v, _spec_of(axes, dim, other), before, name)
        except ArgumentError:
            raise error from None
        raise ArgumentError(f"{error}. Its shape is that of kv_layout={other!r}") from None
    require_contiguous_last(v, name)


def _spec_of(axes: str, dim: str, kv_layout: str) -> str:
    *outer, tokens = axes.split()
    inner = (tokens, "num_kv_heads") if kv_layout == "NHD" else ("num_kv_heads", tokens)
    return " ".join((*outer, *inner, dim))


def select_kv(both: ArrayView, index: int) -> ArrayView:
    """K or V of a tensor that holds both, or one for both, along its second axis."""
    shape = both.shape[0], *both.shape[2:]
    strides = both.strides[0], *both.strides[2:]
    return array.as_strided(both, shape, strides, index * both.strides[1])


def with_slots(v: ArrayView, kv_layout: str) -> ArrayView:
    """[num_pages, num_kv_heads, head_dim] as pages of one token."""
    if len(v.shape) != 3:
        return v
    axis = 1 if kv_layout == "NHD" else 2
    shape, strides = list(v.shape), list(v.strides)
    shape.insert(axis, 1)
    strides.insert(axis, 0)
    return array.as_strided(v, tuple(shape), tuple(strides))
