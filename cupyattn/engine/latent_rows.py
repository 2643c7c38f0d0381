"""Queries and keys of latent attention (MLA), whose rows have two parts.

A row of q has latent columns and rope columns, one of the cache likewise; the latent columns of a
key are its value too. The parts may be one array ("packed") or two ("split"): kernels take two
addresses with strides of their own, so the two forms are one to them.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from .. import array
from ..array import ArrayView
from ..array.match import require_contiguous_last, require_same_dtype
from ..core.device import device_props
from ..core.dtypes import DType, float8_e4m3fn, float16
from ..errors import ArgumentError
from ..launch.attention import tma_wide
from ..launch.driver import params
from ..launch.ops import copy_rows
from ..reference.latent_rows import NUM_BYTES
from .kv_cache import KeyStrides


class Dims(NamedTuple):
    """Columns of the two parts."""

    latent: int
    rope: int

    @property
    def both(self) -> int:
        return self.latent + self.rope


class Parts(NamedTuple):
    """The two parts of rows; rope is None where there are no such columns.

    names   of the arrays that hold them, for messages
    offset  bytes from the first part to the second, where one array holds both; else -1
    """

    latent: ArrayView
    rope: ArrayView | None
    names: tuple[str, str]
    offset: int

    @property
    def views(self) -> dict[str, ArrayView | None]:
        """The arrays by name, as the checks of devices and overlaps want them."""
        return {self.names[0]: self.latent, self.names[1]: self.rope}


def _split(v: ArrayView, dims: Dims) -> tuple[ArrayView, ArrayView | None]:
    """The two parts of an array that holds both."""
    shape = v.shape[:-1]
    latent = array.as_strided(v, (*shape, dims.latent), v.strides)
    if not dims.rope:
        return latent, None
    return latent, array.as_strided(v, (*shape, dims.rope), v.strides, dims.latent)


def view_parts(
    first: Any,
    second: Any,
    dims: Dims,
    names: tuple[str, str],
    planned: tuple[DType, str] | None = None,
) -> Parts:
    """The parts of rows of any leading axes, checked; `second` None: `first` holds both.

    planned   the dtype that a plan says, and its argument of plan()

    Raises ArgumentError for last dimensions that are others, or strided, and for two dtypes or
    others than planned.
    """
    v = array.view(first, names[0])
    if not v.shape:
        raise ArgumentError(f"{names[0]}: has no dimension; wanted rows of {dims.both} columns")
    require_contiguous_last(v, names[0])
    other = None if second is None else array.view(second, names[1])
    if other is None or (not dims.rope and 0 in other.shape):
        if v.shape[-1] != dims.both:
            hint = "" if v.shape[-1] != dims.latent else f"; {names[1]} has the other {dims.rope}"
            raise ArgumentError(
                f"{names[0]}: rows have {v.shape[-1]} columns; wanted {dims.both}, {dims.latent} "
                f"latent and {dims.rope} rope{hint}"
            )
        _require_planned(v, names[0], planned)
        offset = dims.latent * v.dtype.itemsize if dims.rope else 0
        latent, rope = _split(v, dims)
        return Parts(latent, rope, names, offset)
    require_contiguous_last(other, names[1])
    for x, name, dim in ((v, names[0], dims.latent), (other, names[1], dims.rope)):
        if not x.shape or x.shape[-1] != dim:
            raise ArgumentError(f"{name}: shape is {list(x.shape)}; wanted rows of {dim} columns")
    if v.shape[:-1] != other.shape[:-1]:
        raise ArgumentError(
            f"{names[1]}: shape is {list(other.shape)}; wanted {[*v.shape[:-1], dims.rope]}, with "
            f"the rows of {names[0]}"
        )
    _require_planned(v, names[0], planned)
    _require_planned(other, names[1], planned)
    require_same_dtype(other, names[1], v, names[0])
    return Parts(v, other, names, -1)


def _require_planned(v: ArrayView, name: str, planned: tuple[DType, str] | None) -> None:
    if planned is None:
        return
    wanted, argument = planned
    if v.dtype is not wanted:
        raise ArgumentError(
            f"{name}: dtype is {v.dtype}, but the plan says {wanted}; cast it, or plan with "
            f"{argument}={name}.dtype"
        )


def view_scaled_rows(x: Any, dims: Dims, name: str) -> Parts:
    """The parts of rows of 656 bytes on a GPU (reference/latent_rows.py).

    Both count as e4m3, so that strides are bytes; the rope part, of bfloat16, begins behind the
    scales.
    """
    v = array.view(x, name)
    if dims != (512, 64):
        raise ArgumentError(
            f"{name}: rows of {NUM_BYTES} bytes have 512 latent and 64 rope columns; wanted "
            f"{dims.latent} and {dims.rope}"
        )
    require_contiguous_last(v, name)
    offset = NUM_BYTES - 2 * dims.rope
    parts = [
        array.as_strided(v, (*v.shape[:-1], columns), v.strides, begin)
        for columns, begin in ((dims.latent, 0), (dims.rope, offset))
    ]
    for part in parts:
        part.dtype = float8_e4m3fn
    return Parts(parts[0], parts[1], (name, name), offset)


def in_16_bits(q: Any, name: str, keys: Any) -> Any:
    """Queries of fp8 as 16 bits, which hold them exactly: of the type of 16-bit keys, else float16.
    Others stay as they are. They are few beside the keys that they are multiplied by."""
    v = array.view(q, name)
    if not v.dtype.is_fp8:
        return q
    dtype = array.view(keys, "kv_cache").dtype
    widened = array.empty(v.shape, dtype if dtype.is_float16 else float16, v)
    target = array.view(widened, name)
    if v.device.kind == "cpu":
        array.as_numpy(target)[...] = array.as_numpy(v).astype(target.dtype.numpy)
    else:
        require_contiguous_last(v, name)
        array.acquire(target, v)
        copy_rows.launch([(v, target)], array.current_stream(target))
        array.release(target, v)
    return array.deliver(widened, v)


def as_pages(parts: Parts, page_size: int | None) -> Parts:
    """Parts of a cache as [num_pages, page_size, columns], checked; page_size None: any.

    A cache has that shape, an axis of one head before or after that of slots, or no axis but pages
    of one token. Raises ArgumentError for other shapes.
    """
    name, v = parts.names[0], parts.latent
    of_pages, of_slots = _slot_axes(tuple(v.shape), page_size, name)
    latent = _with_axes(v, of_pages, of_slots)
    rope = None if parts.rope is None else _with_axes(parts.rope, of_pages, of_slots)
    if page_size is not None and latent.shape[1] != page_size:
        raise ArgumentError(
            f"{name}: pages hold {latent.shape[1]} tokens; wanted {page_size}, the page size of "
            "the plan"
        )
    return parts._replace(latent=latent, rope=rope)


def _slot_axes(shape: tuple[int, ...], page_size: int | None, name: str) -> tuple[int, int | None]:
    """(axis of pages, axis of slots or None) of a cache of this shape."""
    if len(shape) == 2:
        return 0, None
    if len(shape) == 3:
        return 0, 1
    if len(shape) == 4 and 1 in shape[1:3]:
        is_behind = shape[2] == 1 and (page_size is None or shape[1] == page_size)
        return 0, 1 if is_behind or shape[1] != 1 else 2
    raise ArgumentError(
        f"{name}: shape is {list(shape)}; wanted [num_pages, page_size, columns], with an axis of "
        "one head before or behind page_size or none"
    )


def _with_axes(v: ArrayView, pages: int, slots: int | None) -> ArrayView:
    if slots is None:
        shape, strides = (v.shape[0], 1, v.shape[-1]), (v.strides[0], 0, v.strides[-1])
    else:
        shape = v.shape[pages], v.shape[slots], v.shape[-1]
        strides = v.strides[pages], v.strides[slots], v.strides[-1]
    return array.as_strided(v, shape, strides)


def key_strides(pages: Parts) -> KeyStrides:
    """The strides of keys and values, which are the latent part of pages as `as_pages` has them."""
    page, token, _ = pages.latent.strides
    return token, 0, token, 0, page, page


class Second:
    """How a launch is told of the second parts.

    offsets  bytes from the first part to the second of q, and of k, where one array holds both
    rest     params.LATENT from LATENT_REST on, packed, without addresses
    boxes    of the cache, where the copy engine may bring its keys: it knows how many pages there
             are, and reads zeros beyond them
    """

    __slots__ = ("_boxes", "_of_pages", "_offsets", "_rest", "_rests")

    def __init__(
        self, offsets: tuple[int, int], rest: bytes, boxes: tma_wide.Boxes | None = None
    ) -> None:
        self._offsets, self._rest, self._boxes = offsets, rest, boxes
        # What follows the addresses in the struct, by those of the cache.
        self._rests: dict[tuple[int, int], bytes] = {}
        self._of_pages: dict[int, Second] = {}

    def of_pages(self, num_pages: int) -> Second:
        """The same for a cache of so many pages."""
        boxes = self._boxes
        if boxes is None or boxes.num_pages == num_pages:
            return self
        second = self._of_pages.get(num_pages)
        if second is None:
            if len(self._of_pages) >= _MAX_KEPT:
                self._of_pages.clear()
            second = Second(self._offsets, self._rest, boxes._replace(num_pages=num_pages))
            self._of_pages[num_pages] = second
        return second

    def pack(
        self, q: int, q_rope: int, k: int, k_rope: int, max_logits: int = 0, list_lens: int = 0
    ) -> bytes:
        """params.LATENT for parts at these addresses; 0 for a second part in the first's array, and
        for what is not given."""
        of_q, of_k = self._offsets
        second = k_rope or k + of_k
        rest = self._rest
        if self._boxes is not None:
            rest = self._rests.get((k, second)) or self._rest_of(k, second, self._boxes)
        if max_logits or list_lens:
            begin, end = params.LATENT_REST.size, params.LATENT_REST.size + _OF_LISTS.size
            rest = rest[:begin] + _OF_LISTS.pack(max_logits, list_lens) + rest[end:]
        return params.LATENT_PLACES.pack(q_rope or q + of_q, second) + rest

    def _rest_of(self, k: int, second: int, boxes: tma_wide.Boxes) -> bytes:
        if len(self._rests) >= _MAX_KEPT:
            self._rests.clear()
        rest = self._rests[k, second] = self._rest + boxes.pack(k, second)
        return rest


_MAX_KEPT = 256  # a model has a cache a layer
_OF_LISTS = params.LATENT_OF_LISTS


class Lists(NamedTuple):
    """How rows of q and lists of keys lie, beside their strides.

    step      entries from a token's list of keys to the next one's, where lists are of one length
    gaps      elements between requests of q, of q_rope and of lists (latent_call.Call.gaps)
    tokens    of each such request
    lens_stride  of lengths of lists that are of one length but for what tokens may not see yet
    """

    step: int = 0
    gaps: tuple[int, int, int] = (0, 0, 0)
    tokens: int = 1
    lens_stride: int = 0


NO_LISTS = Lists()


def second_parts(
    queries: Parts, pages: Parts, rope_scale: float, lists: Lists = NO_LISTS
) -> Second:
    """What a launch is told of the second parts, and of lists."""
    q, k = queries.rope, pages.rope
    strides = (0, 0, 0, 0)
    if q is not None and k is not None:
        strides = q.strides[0], q.strides[1], k.strides[1], k.strides[0]
    offsets = max(0, queries.offset), max(0, pages.offset)
    num_slots = min(pages.latent.shape[0] * pages.latent.shape[1], 2**31 - 1)
    of_q, of_rope, of_lists = lists.gaps
    rest = (
        params.LATENT_REST.pack(*strides, rope_scale, lists.step, of_q, of_rope)
        + _OF_LISTS.pack(0, 0)
        + params.LATENT_COUNTS.pack(lists.lens_stride, lists.tokens, of_lists, num_slots)
    )
    return Second(offsets, rest, _boxes(pages))


def _boxes(pages: Parts) -> tma_wide.Boxes | None:
    """None where no kernel copies boxes of these pages."""
    k, rope = pages.latent, pages.rope
    if rope is None or k.device.kind == "cpu" or device_props(k.device.index).arch != "sm_90a":
        return None
    return tma_wide.boxes(
        k.dtype,
        (k.shape[-1], rope.shape[-1]),
        (k.strides[1], k.strides[0]),
        (rope.strides[1], rope.strides[0]),
        (k.shape[1], k.shape[0]),
    )


def as_rows(parts: Parts, scale: float = 1.0) -> np.ndarray:
    """On the CPU: both parts side by side; `scale` multiplies the rope columns."""
    latent = array.as_numpy(parts.latent)
    if parts.rope is None:
        return latent
    rope = array.as_numpy(parts.rope)
    if scale != 1.0:
        latent, rope = latent.astype(np.float64), rope.astype(np.float64) * scale
    return np.concatenate((latent, rope), -1)


def gather(
    pages: Parts, ids: np.ndarray, kv_len: int, token_scales: np.ndarray | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """On the CPU: keys [kv_len, 1, columns] and values of the first tokens of these pages.

    token_scales  [num_pages, page_size]: each multiplies the latent columns of a token
    """
    latent = array.as_numpy(pages.latent)[ids]
    if token_scales is not None:
        latent = latent.astype(np.float64) * token_scales[ids][..., None]
    latent = latent.reshape(-1, 1, latent.shape[-1])[:kv_len]
    if pages.rope is None:
        return latent, latent
    rope = array.as_numpy(pages.rope)[ids].reshape(-1, 1, pages.rope.shape[-1])[:kv_len]
    return np.concatenate((latent, rope.astype(latent.dtype)), -1), latent


def require_columns(dims: Dims) -> None:
    """ArgumentError for parts without columns, or rope columns that are negative."""
    if dims.latent < 1 or dims.rope < 0:
        raise ArgumentError(
            f"head_dim_ckv, head_dim_kpe: got {dims.latent} and {dims.rope}; wanted latent "
            "columns from 1 on and rope columns from 0 on"
        )
