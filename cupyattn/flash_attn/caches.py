"""Key-value caches as pages or rows, and new keys and values written into them."""

from __future__ import annotations

from typing import Any

import numpy as np

from .. import array
from ..array import ArrayView
from ..errors import ArgumentError
from ..inputs.index_arrays import compute, fresh_progression, progression
from ..inputs.workspace import int32_on_device
from ..page import append_paged_kv_cache, get_batch_indices_positions
from ..planless.views import Names

# Far below any position.
_NOWHERE = 1 << 30


def view_cache(k: Any, v: Any, names: Names) -> tuple[ArrayView, ArrayView]:
    """k and v [n, tokens, heads, head_dim] of equally many requests, or pages."""
    vk, vv = array.view(k, names.k), array.view(v, names.v)
    for x, name in ((vk, names.k), (vv, names.v)):
        if len(x.shape) != 4:
            raise ArgumentError(
                f"{name}: shape is {list(x.shape)}; wanted four dimensions, [batch or pages, "
                "tokens, heads, head_dim]"
            )
    if vk.shape[:3] != vv.shape[:3]:
        raise ArgumentError(
            f"{names.v}: shape is {list(vv.shape)} but {names.k} is {list(vk.shape)}; wanted the "
            "same but for head_dim"
        )
    return vk, vv


def as_rows(
    k: Any, v: Any, views: tuple[ArrayView, ArrayView], names: Names
) -> tuple[Any, Any, int] | None:
    """k and v [b, s, heads, head_dim] as rows of all requests, and how many rows lie between the
    first of one request and the next one's; None where strides of the two don't allow it."""
    ratios = {_rows_apart(x) for x in views}
    if len(ratios) > 1 or None in ratios:
        return None
    apart = ratios.pop()
    assert apart is not None
    requests, tokens = views[0].shape[:2]
    count = 0 if 0 in (requests, tokens) else (requests - 1) * apart + tokens
    rows = []
    for x, view, name in zip((k, v), views, (names.k, names.v), strict=True):
        # Requests of one token have any stride between tokens.
        step = view.strides[0] if tokens == 1 else view.strides[1]
        shape, strides = (count, *view.shape[2:]), (step, *view.strides[2:])
        rows.append(array.restride(x, name, shape, strides))
    return rows[0], rows[1], apart


def _rows_apart(v: ArrayView) -> int | None:
    (requests, tokens), (step, token) = v.shape[:2], v.strides[:2]
    if requests <= 1 or 0 in v.shape:
        return tokens
    if tokens == 1:
        return 1
    return step // token if token > 0 and step >= 0 and step % token == 0 else None


def page_table_of(x: Any, name: str, views: tuple[ArrayView, ArrayView]) -> Any:
    """A page table [b, n] of pages; on a GPU in int32."""
    v = array.view(x, name)
    if len(v.shape) != 2:
        raise ArgumentError(f"{name}: shape is {list(v.shape)}; wanted [batch, pages of each]")
    if not views[0].shape[1]:
        raise ArgumentError("k_cache: has pages of no token; wanted 1 or more")
    if v.device.kind == "cuda" and v.dtype.name == "int64":
        return int32_on_device(v, name).owner
    return x


def select_rows(table: Any, index: Any, name: str) -> Any:
    """Rows of a page table, by an array of their numbers."""
    vt, vi = array.view(table, name), array.view(index, "cache_batch_idx")
    if vt.device.kind == "cpu":
        rows = array.as_numpy(vi)
        if ((rows < 0) | (rows >= vt.shape[0])).any():
            raise ArgumentError(
                f"cache_batch_idx: {rows.tolist()[:8]}; wanted rows of {name}, which has "
                f"{vt.shape[0]}"
            )
        return array.as_numpy(vt)[rows]
    most = max(0, vt.shape[0] - 1)
    return compute(lambda t, i: t[i.clip(0, most)], vt, vi)


def lengths(x: Any, count: int, like: ArrayView, name: str) -> Any:
    """Lengths [count] of an array, or of one number for all."""
    if isinstance(x, (int, np.integer)) and not isinstance(x, bool):
        if not 0 <= x < 2**31:
            raise ArgumentError(f"{name}: got {x}; wanted a length from 0 up")
        return fresh_progression(count, int(x), 0, like)
    return x


class Append:
    """New keys and values [b, n, heads, head_dim], or [rows, heads, head_dim] with offsets, which
    go to positions from `begin` [b] on: a function of no arguments writes them.

    A negative length stands for a request that gets none.
    """

    def __init__(
        self, new: tuple[Any, Any], offsets: Any, begin: Any, pages: tuple[Any, Any], table: Any
    ) -> None:
        self.new, self.offsets, self.begin = new, offsets, begin
        self.pages, self.table = pages, table
        vk, vv = array.view(new[0], "k"), array.view(new[1], "v")
        self.lens = array.view(begin, "cache_seqlens")
        self.count = self.lens.shape[0] if self.lens.shape else 0
        axes = 4 if offsets is None else 3
        wanted = "[batch, new tokens, heads, head_dim]" if axes == 4 else "[rows, heads, head_dim]"
        for v, name in ((vk, "k"), (vv, "v")):
            if len(v.shape) != axes:
                raise ArgumentError(f"{name}: shape is {list(v.shape)}; wanted {wanted}")
        if axes == 4 and vk.shape[0] != self.count:
            raise ArgumentError(
                f"k: holds {vk.shape[0]} requests but cache_seqlens {self.count}; wanted as many"
            )
        if vk.shape[:-1] != vv.shape[:-1]:
            raise ArgumentError(f"v: shape is {list(vv.shape)} with k of {list(vk.shape)}")
        for v, page, name in ((vk, pages[0], "k"), (vv, pages[1], "v")):
            cache = array.view(page, f"{name}_cache")
            if v.dtype is not cache.dtype:
                raise ArgumentError(
                    f"{name}: dtype is {v.dtype} but {name}_cache is {cache.dtype}; wanted the same"
                )
        self.vk = vk
        if offsets is not None:
            vo = array.view(offsets, "cu_seqlens_k_new")
            if tuple(vo.shape) != (self.count + 1,):
                raise ArgumentError(
                    f"cu_seqlens_k_new: shape is {list(vo.shape)}; wanted [{self.count + 1}]"
                )
            self.vo = vo

    def lengths_after(self) -> Any:
        """[b], with the new keys."""
        if self.offsets is None:
            new = self.vk.shape[1]
            return compute(lambda x: (x + new) * (x >= 0), self.lens)
        return compute(lambda x, o: (x + (o[1:] - o[:-1])) * (x >= 0), self.lens, self.vo)

    def __call__(self) -> None:
        requests, positions = self._places()
        k, v = (self._in_rows(x) for x in self.new)
        table = array.view(self.table, "page_table")
        indices, step = self._flat_table(table)
        indptr = progression(self.count + 1, 0, step, table)
        append_paged_kv_cache(k, v, requests, positions, self.pages, indices, indptr, self.begin)

    def _places(self) -> tuple[Any, Any]:
        """(request, position) of each new token; a request below 0 stands for nowhere."""
        count, like = self.count, self.lens
        if self.offsets is None:
            new = self.vk.shape[1]
            requests = array.view(progression(count, 0, 1, like), "requests")
            tokens = array.view(progression(new, 0, 1, like), "tokens")

            def place(index: Any, token: Any, begin: Any) -> list[Any]:
                begin = begin[:, None]
                owner = index[:, None] - (begin < 0) * _NOWHERE
                return [(owner + 0 * token).reshape(-1), (begin + token).reshape(-1)]

            found = compute(place, requests, tokens, like)
            return found[0], found[1]
        if like.device.kind == "cpu":
            offsets, begin = array.as_numpy(self.vo), array.as_numpy(like)
            owner = np.repeat(np.arange(count), np.diff(offsets))
            spare = self.vk.shape[0] - owner.size
            if (np.diff(offsets) < 0).any() or spare < 0:
                raise ArgumentError("cu_seqlens_k_new: wanted offsets into k that never fall")
            at = begin[owner] + np.arange(owner.size) - offsets[owner]
            owner = np.where(begin[owner] < 0, -1, owner)
            return np.pad(owner, (0, spare), constant_values=-1), np.pad(at, (0, spare))
        return get_batch_indices_positions(self.offsets, self.lengths_after(), self.vk.shape[0])

    def _in_rows(self, x: Any) -> Any:
        if self.offsets is not None:
            return x
        return x.reshape(-1, *x.shape[2:])

    def _flat_table(self, table: ArrayView) -> tuple[Any, int]:
        """Entries of all rows, and how many lie between rows."""
        rows, width = table.shape
        step = table.strides[0]
        if rows > 1 and step >= width and table.strides[1] == 1 and 0 not in table.shape:
            shape = ((rows - 1) * step + width,)
            if table.device.kind == "cuda":
                return array.restride(self.table, "page_table", shape, (1,)), step
        return self.table.reshape(-1), width


def rotate(
    x: Any, positions: np.ndarray, cos: Any, sin: Any, *, is_interleaved: bool, name: str
) -> Any:
    """x [tokens, heads, head_dim] on the CPU, its first elements rotated to positions [tokens].

    cos, sin [n, rotated / 2]. Tokens at negative positions stay as they are.
    """
    vx, vc, vs = (
        array.view(a, n) for a, n in ((x, name), (cos, "rotary_cos"), (sin, "rotary_sin"))
    )
    if len(vc.shape) != 2 or vc.shape != vs.shape or vc.shape[1] % 8:
        raise ArgumentError(
            f"rotary_cos, rotary_sin: shapes are {list(vc.shape)} and {list(vs.shape)}; wanted "
            "[positions, rotary_dim / 2] of both, rotary_dim a multiple of 16"
        )
    turned = 2 * vc.shape[1]
    if turned > vx.shape[-1]:
        raise ArgumentError(
            f"rotary_cos: turns {turned} elements, but {name} has head_dim {vx.shape[-1]}"
        )
    if positions.size and positions.max() >= vc.shape[0]:
        raise ArgumentError(
            f"rotary_cos: has {vc.shape[0]} positions; {name} needs position {positions.max()}"
        )
    values = array.as_numpy(vx).astype(np.float64)
    at = np.maximum(positions, 0)
    c, s = (array.as_numpy(a)[at].astype(np.float64)[:, None] for a in (vc, vs))
    half = turned // 2
    if is_interleaved:
        low, high = slice(0, turned, 2), slice(1, turned, 2)
    else:
        low, high = slice(0, half), slice(half, turned)
    a, b = values[..., low].copy(), values[..., high].copy()
    values[..., low], values[..., high] = a * c - b * s, a * s + b * c
    rotated = values.astype(vx.dtype.numpy)
    rotated[positions < 0] = array.as_numpy(vx)[positions < 0]
    return array.from_numpy(rotated, vx)
