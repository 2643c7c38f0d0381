"""Masks over the last keys of each request, those of its query tokens: bits for each row of q.

What verification of draft tokens needs: which of a request's q query tokens each of them sees,
along a tree. All earlier keys are visible, so a row has q bits, however long the request is.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np

from .. import array
from ..array import ArrayView
from ..array.match import require_contiguous, require_dtype
from ..core import dtypes
from ..core.dtypes import DType
from ..errors import ArgumentError

_WORDS = (
    *(dtypes.uint8, dtypes.uint16, dtypes.uint32, dtypes.uint64),
    *(dtypes.int32, dtypes.int64),
)


class MaskBits(NamedTuple):
    """A mask as a launch takes it: `num_bytes` from `address` on, in rows of `row_bytes`.

    row_bytes 0: no rows of bits, but the mask of a plan.
    """

    address: int
    row_bytes: int
    num_bytes: int


NO_BITS = MaskBits(0, 0, 0)


def view_row_mask(
    mask: Any, num_rows: int, q_len: int, name: str = "mask", is_ragged: bool = False
) -> ArrayView:
    """The checked view of a mask for `num_rows` rows of q, q_len of each request (q_len > 0).

    Bools [B, q, q] or [B * q, q], or bits in words of any size, the lowest bit of the first word
    for the first of the q keys: [B, q] or [B * q], or with an axis of words behind. Bits past q
    mean nothing. is_ragged: requests have q_len rows at most, and the mask has no axis of requests.
    Raises ArgumentError.
    """
    v = array.view(mask, name)
    require_dtype(v, (dtypes.bool_, *_WORDS), name)
    shape = tuple(v.shape)
    count = num_rows // q_len
    leads = ((num_rows,),) if is_ragged else ((num_rows,), (count, q_len))
    if v.dtype is dtypes.bool_:
        fits = shape[:-1] in leads and shape[-1] == q_len
        wanted = f"[{num_rows}, {q_len}]"
        if not is_ragged:
            wanted = f"[{count}, {q_len}, {q_len}] or {wanted}"
    else:
        words = 1 if shape in leads else shape[-1] if shape[:-1] in leads else 0
        fits = words * v.dtype.bits >= q_len
        num_words = -(-q_len // v.dtype.bits)
        axes = [num_rows] if is_ragged else [count, q_len]
        axes = axes if num_words == 1 else [*axes, num_words]
        wanted = f"{axes}, {q_len} bits a row"
    if not fits:
        requests = "requests of at most" if is_ragged else f"{count} requests of"
        raise ArgumentError(
            f"{name}: {v.dtype} of shape {list(shape)}; wanted {wanted}, for {requests} {q_len} "
            "query tokens"
        )
    require_contiguous(v, name)
    return v


def bits_of(v: ArrayView, num_rows: int) -> MaskBits:
    """A checked mask of words, where it is."""
    num_bytes = math.prod(v.shape) * v.dtype.itemsize
    return MaskBits(v.ptr, num_bytes // max(1, num_rows), num_bytes)


def num_packed_bytes(num_rows: int, q_len: int) -> int:
    """What `pack` writes."""
    return num_rows * -(-q_len // 8)


def pack(v: ArrayView, num_rows: int, q_len: int, address: int, stream: int) -> MaskBits:
    """Enqueue the packing of a checked mask of bools into bytes from `address` on."""
    from ..launch.ops import packbits

    num_bytes = num_packed_bytes(num_rows, q_len)
    bools = flat_view(v, v.ptr, num_rows * q_len, dtypes.bool_)
    packed = flat_view(v, address, num_bytes, dtypes.uint8)
    packbits.launch(bools, packed, None, None, True, stream, num_segments=num_rows)
    return MaskBits(address, -(-q_len // 8), num_bytes)


def flat_view(like: ArrayView, address: int, size: int, dtype: DType) -> ArrayView:
    """A view of `size` elements at an address in memory that `like` keeps alive."""
    return ArrayView(address, (size,), (1,), dtype, like.device, like.framework, False, like.owner)


def visible(v: ArrayView, num_rows: int, q_len: int) -> np.ndarray:
    """On the CPU: bool [num_rows, q_len]."""
    row = math.prod(v.shape) // max(1, num_rows)
    rows = np.ascontiguousarray(array.as_numpy(v)).reshape(num_rows, row)
    if v.dtype is dtypes.bool_:
        return rows
    return np.unpackbits(rows.view(np.uint8), axis=1, count=q_len, bitorder="little").view(np.bool_)


def with_earlier_keys(
    rows: np.ndarray,
    kv_len: int,
    key_positions: np.ndarray | None = None,
    whole_len: int = -1,
) -> np.ndarray:
    """On the CPU: bool [q_len, kv_len] from one request's rows [q_len, q_len].

    key_positions: of these keys in a sequence of whole_len, whose last q_len tokens the rows are.
    """
    q_len = rows.shape[-1]
    mask = np.ones((q_len, kv_len), np.bool_)
    if key_positions is None:
        key_positions, whole_len = np.arange(kv_len), kv_len
    token = key_positions - (whole_len - q_len)
    mask[:, token >= 0] = rows[:, token[token >= 0]]
    return mask
