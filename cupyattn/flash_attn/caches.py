"""Key-value caches as pages or rows, and new keys and values written into them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from .. import array
from ..array import ArrayView
from ..array.match import require_contiguous_last, require_dtype, require_output
from ..core import dtypes
from ..core.problem import MAX_LENGTH
from ..engine.arrays import ROLES, Arrays, MoreArrays
from ..engine.check_planless import Extents
from ..engine.index_arrays import compute, fresh_progression
from ..engine.views import Names, merge_leading
from ..engine.workspace import int32_on_device
from ..errors import ArgumentError, UnsupportedError
from ..launch.attention import append_new_kv
from ..launch.attention.append_new_kv import Rotation
from ..launch.attention.plan_batch import INDEX_DTYPES
from ..launch.ops.rows import Rows
from ..page import append_paged_kv_cache

_CACHES = "k_cache", "v_cache"
_Q, _K, _V, _TABLE, _KV_LENS, _OFFSETS = map(
    Arrays._fields.index, ("q", "k", "v", "block_tables", "kv_lens", "qo_offsets")
)
_NEW_K, _NEW_V, _NEW_OFFSETS, _COSINES, _SINES, _BEGIN = map(
    ROLES.index,
    ("new_k", "new_v", "new_offsets", "rotary_cos", "rotary_sin", "rotary_begin"),
)
# Roles that an append reads, or in which it leaves what attention reads.
_APPENDED = frozenset(
    ("kv_lens", "new_k", "new_v", "new_offsets", "rotary_cos", "rotary_sin", "rotary_begin")
)


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
    last = max(0, vt.shape[0] - 1)
    return compute(lambda t, i: t[i.clip(0, last)], vt, vi)


def lengths(x: Any, count: int, like: ArrayView, name: str) -> Any:
    """Lengths [count] of an array, or of one number for all."""
    if isinstance(x, (int, np.integer)) and not isinstance(x, bool):
        if not 0 <= x < 2**31:
            raise ArgumentError(f"{name}: got {x}; wanted a length from 0 up")
        return fresh_progression(count, int(x), 0, like)
    return x


class StoredAppend(NamedTuple):
    """An append that was launched, with everything packed but addresses.

    lens_bytes  of the lengths that it writes first, before rotated queries if there are any
    row_bytes   of a row of such queries; 0: none are rotated
    tokens      rows of new keys for each entry of their first axis
    table       address and owner of a table that the call makes; None: the caller's
    """

    bound: append_new_kv.Bound
    num_bytes: int
    lens_bytes: int
    row_bytes: int
    tokens: int
    table: tuple[int, object] | None

    def of_lengths(self, lengths: Sequence[int], extents: Extents) -> StoredAppend | None:
        """See prepared.Before."""
        if extents.table is None or self.table is not None:
            return None
        if lengths[_NEW_V] != lengths[_NEW_K] or lengths[_NEW_K] * self.tokens > MAX_LENGTH:
            return None
        q_rows = extents.num_rows if self.row_bytes else 0
        bound = self.bound.of_lengths(
            extents.table[2],
            extents.num_keys,
            q_rows,
            lengths[_NEW_K] * self.tokens,
            extents.num_requests,
            extents.table[1],
        )
        lens_bytes = _lens_bytes(extents.num_requests)
        num_bytes = lens_bytes + q_rows * self.row_bytes
        return self._replace(bound=bound, num_bytes=num_bytes, lens_bytes=lens_bytes)

    def launch(self, addresses: list[int], space: int, stream: int) -> None:
        """Enqueue it, and let attention read what it writes."""
        lens, table, q = addresses[_KV_LENS], addresses[_TABLE], 0
        begin, q_offsets, rotated = lens, 0, 0
        if self.row_bytes:
            q, q_offsets, rotated = addresses[_Q], addresses[_OFFSETS], space + self.lens_bytes
            begin = addresses[_BEGIN] or lens
            addresses[_Q] = rotated
        pointers = append_new_kv.Addresses(
            addresses[_NEW_K],
            addresses[_K],
            addresses[_NEW_V],
            addresses[_V],
            q,
            rotated,
            addresses[_COSINES],
            addresses[_SINES],
            lens=lens,
            begin=begin,
            q_offsets=q_offsets,
            k_offsets=addresses[_NEW_OFFSETS],
            lens_after=space,
            table=table if self.table is None else self.table[0],
        )
        addresses[_KV_LENS] = space
        self.bound.enqueue(pointers, stream)


def _lens_bytes(count: int) -> int:
    return -(-4 * count // 16) * 16


class Append:
    """New keys and values [b, n, heads, head_dim], or [rows, heads, head_dim] with offsets, which
    go to positions from `begin` [b] on: a function of no arguments writes them.

    arrays, more: the caller's, with what is rotated on the CPU. A negative length stands for a
    request that gets none.
    """

    def __init__(
        self, arrays: Arrays, more: MoreArrays, begin: Any, table: Any, rotation: Rotation | None
    ) -> None:
        self.arrays, self.more, self.begin, self.table = arrays, more, begin, table
        self.offsets = more.new_offsets
        self._bound: append_new_kv.Bound | None = None
        vk, vv = array.view(more.new_k, "k"), array.view(more.new_v, "v")
        self.lens = array.view(begin, "cache_seqlens")
        self.count = self.lens.shape[0] if self.lens.shape else 0
        axes = 4 if self.offsets is None else 3
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
        if math.prod(vk.shape[:-2]) > MAX_LENGTH:
            raise UnsupportedError(f"k: shape is {list(vk.shape)}; at most {MAX_LENGTH} rows")
        pages = arrays.k, arrays.v
        self.caches = [array.view(x, name) for x, name in zip(pages, _CACHES, strict=True)]
        for v, cache, name in zip((vk, vv), self.caches, "kv", strict=True):
            if v.dtype is not cache.dtype:
                raise ArgumentError(
                    f"{name}: dtype is {v.dtype} but {name}_cache is {cache.dtype}; wanted the same"
                )
        self.vk, self.vv = vk, vv
        self.rotation = rotation
        self._check_caches()
        if self.offsets is not None:
            vo = array.view(self.offsets, "cu_seqlens_k_new")
            if tuple(vo.shape) != (self.count + 1,):
                raise ArgumentError(
                    f"cu_seqlens_k_new: shape is {list(vo.shape)}; wanted [{self.count + 1}]"
                )
            require_dtype(vo, INDEX_DTYPES, "cu_seqlens_k_new")
            self.vo = vo
        self.after: Any = None
        if self.lens.device.kind == "cuda":
            self.after = array.empty((self.count,), dtypes.int32, self.lens)

    def _check_caches(self) -> None:
        """Whether the caches may be written with the new keys."""
        inputs = {"k": self.vk, "v": self.vv, "cache_seqlens": self.lens}
        require_dtype(self.lens, INDEX_DTYPES, "cache_seqlens")
        caches = dict(zip(_CACHES, self.caches, strict=True))
        for v, cache, name in zip((self.vk, self.vv), self.caches, "kv", strict=True):
            if v.shape[-2:] != cache.shape[-2:]:
                raise ArgumentError(
                    f"{name}: shape is {list(v.shape)} with {name}_cache of {list(cache.shape)}; "
                    "wanted the same heads and head_dim"
                )
            require_contiguous_last(v, name)
            require_contiguous_last(cache, f"{name}_cache")
        array.same_device(**inputs, **caches)
        for name, cache in caches.items():
            require_output(cache, name, **inputs)
        if caches["k_cache"].ptr == caches["v_cache"].ptr and 0 not in self.vk.shape:
            raise ArgumentError("v_cache: is at the address of k_cache; wanted memory of its own")

    def _view_table(self) -> ArrayView:
        table = array.view(self.table, "page_table")
        if table.dtype is not dtypes.int32 or (table.shape[1] > 1 and table.strides[1] != 1):
            return int32_on_device(table, "page_table")
        return table

    def _launch(self) -> None:
        """Enqueue the append, with the rotation if there is one."""
        k, v, table, caches = self.vk, self.vv, self._view_table(), self.caches
        if self.offsets is None:
            k, v = (with_even_rows(x.owner, x)[1] for x in (k, v))
        tokens = merge_leading(k, "k", 2), merge_leading(v, "v", 2)
        rows = [
            Rows.of(x, cache, tuple(cache.strides[:3]))
            for x, cache in zip(tokens, caches, strict=True)
        ]
        after = array.view(self.after, "cache_seqlens")
        rotation, offsets = self.rotation, None if self.offsets is None else self.vo
        num_pages, page_size = caches[0].shape[:2]
        new = append_new_kv.NewKeys(
            rows[0],
            rows[1],
            k.dtype,
            num_kv_heads=k.shape[-2],
            num_rows=tokens[0].shape[0],
            k_offsets=offsets,
            k_len=0 if offsets is not None else k.shape[1],
            lens=self.lens,
            lens_after=after,
            table=table,
            num_pages=num_pages,
            page_size=page_size,
        )
        used = [k, v, self.lens, after, table, *caches]
        used += [x for x in (offsets, *(rotation or ())) if isinstance(x, ArrayView)]
        array.acquire(k, *used)
        self._bound = append_new_kv.bind(new, rotation, k.device.index)
        addresses = append_new_kv.addresses_of(new, rotation)
        self._bound.enqueue(addresses, array.current_stream(k))
        array.release(k, *used)

    def roles(self, arrays: Arrays, more: MoreArrays, read: Arrays) -> frozenset[str]:
        """See planless_cache.Append: none where a launch reads copies."""
        if self.after is None or read.kv_lens is not self.after or arrays.kv_lens is not self.begin:
            return frozenset()
        pairs = [(more.new_k, self.vk), (more.new_v, self.vv), (self.table, self._view_table())]
        if self.offsets is None and not (_has_even_rows(self.vk) and _has_even_rows(self.vv)):
            return frozenset()
        rotation = self.rotation
        if rotation is not None:
            begin = arrays.kv_lens if more.rotary_begin is None else more.rotary_begin
            pairs += [(more.rotary_cos, rotation.cosines), (more.rotary_sin, rotation.sines)]
            pairs += [(arrays.q, rotation.q), (begin, rotation.begin)]
            pairs += [(read.q, rotation.rotated_q)]
        if any(array.view(x, "an array").ptr != v.ptr for x, v in pairs):
            return frozenset()
        return _APPENDED | ({"q"} if rotation is not None else frozenset())

    def before(self) -> StoredAppend:
        """The same of a call that was launched."""
        assert self._bound is not None
        lens_bytes, num_rows, row_bytes = _lens_bytes(self.count), 0, 0
        if self.rotation is not None:
            num_rows, *row = self.rotation.rotated_q.shape
            row_bytes = math.prod(row) * self.rotation.rotated_q.dtype.itemsize
        is_own = self.arrays.block_tables is None
        table = (array.view(self.table, "page_table").ptr, self.table) if is_own else None
        tokens, num_bytes = math.prod(self.vk.shape[1:-2]), lens_bytes + num_rows * row_bytes
        return StoredAppend(self._bound, num_bytes, lens_bytes, row_bytes, tokens, table)

    def lengths_after(self, *, are_read_early: bool) -> Any:
        """[b], with the new keys. are_read_early: before the append, which writes them on a GPU."""
        if self.lens.device.kind == "cuda" and not are_read_early:
            return self.after
        if self.offsets is None:
            new = self.vk.shape[1]
            return compute(lambda x: (x + new) * (x >= 0), self.lens)
        return compute(lambda x, o: (x + (o[1:] - o[:-1])) * (x >= 0), self.lens, self.vo)

    def __call__(self) -> None:
        if self.lens.device.kind == "cuda":
            self._launch()
            return
        requests, positions = self._positions()
        k, v = (self._in_rows(x) for x in (self.more.new_k, self.more.new_v))
        table = array.as_numpy(array.view(self.table, "page_table"))
        indptr = np.arange(self.count + 1) * table.shape[1]
        pages = self.arrays.k, self.arrays.v
        append_paged_kv_cache(
            k, v, requests, positions, pages, table.reshape(-1), indptr, self.begin
        )

    def _positions(self) -> tuple[Any, Any]:
        """(request, position) of each new token on the CPU; a request below 0 is nowhere."""
        begin = array.as_numpy(self.lens).astype(np.int64)
        if self.offsets is None:
            new = self.vk.shape[1]
            owner = np.repeat(np.arange(self.count), new)
            at = begin[owner] + np.tile(np.arange(new), self.count)
            return np.where(begin[owner] < 0, -1, owner), at
        offsets = array.as_numpy(self.vo)
        owner = np.repeat(np.arange(self.count), np.diff(offsets))
        spare = self.vk.shape[0] - owner.size
        if (np.diff(offsets) < 0).any() or spare < 0:
            raise ArgumentError("cu_seqlens_k_new: wanted offsets into k that never fall")
        at = begin[owner] + np.arange(owner.size) - offsets[owner]
        owner = np.where(begin[owner] < 0, -1, owner)
        return np.pad(owner, (0, spare), constant_values=-1), np.pad(at, (0, spare))

    def _in_rows(self, x: Any) -> Any:
        if self.offsets is not None:
            return x
        return x.reshape(-1, *x.shape[2:])


def with_even_rows(x: Any, v: ArrayView) -> tuple[Any, ArrayView]:
    """x [b, s, h, d] whose rows of all requests are equally far apart: a copy, unless they are.

    The owner of a copy of fp8 elements may be an array of bytes.
    """
    if _has_even_rows(v):
        return x, v
    if v.dtype.is_fp8:
        copy = array.row_major_view(v)
        return copy.owner, copy
    copy = x.contiguous() if v.framework == "torch" else compute(lambda a: a.copy(order="C"), v)
    return copy, array.view(copy, "a copy")


def _has_even_rows(v: ArrayView) -> bool:
    requests, rows = v.shape[:2]
    return requests <= 1 or rows <= 1 or 0 in v.shape or v.strides[0] == rows * v.strides[1]


def vector(x: Any, name: str) -> Any:
    v = array.view(x, name)
    if len(v.shape) != 1:
        raise ArgumentError(f"{name}: shape is {list(v.shape)}; wanted one axis, [batch]")
    return x


def offsets_of(x: Any, name: str) -> ArrayView:
    v = array.view(x, name)
    is_list = len(v.shape) == 1 and 0 < v.shape[0] <= MAX_LENGTH
    if not is_list or v.dtype.name not in ("int32", "int64"):
        raise ArgumentError(
            f"{name}: {v.dtype} of shape {list(v.shape)}; wanted int32 or int64 [batch + 1]"
        )
    return v
