"""Rows of keys, values or queries that a kernel copies, a row by some lanes of a warp."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

from ... import jit
from ...array import ArrayView
from ...core import dtypes
from ...core.dtypes import DType
from ..driver import params

THREADS = 256
_MAX_BLOCKS = 2**31 - 1
_MAX_LANE_BITS = 5
# What a kernel that converts nothing takes elements of a size for: bytes are bytes.
COPIED = {1: dtypes.uint8, 2: dtypes.float16, 4: dtypes.float32}


class Rows(NamedTuple):
    """Keys, or values, and the cache they go to. Strides are in elements."""

    source: int
    cache: int
    source_strides: tuple[int, ...]  # token, head
    cache_strides: tuple[int, ...]  # page, slot, head
    head_dim: int
    scale: float = 1.0

    @classmethod
    def of(
        cls, v: ArrayView, cache: ArrayView, cache_strides: tuple[int, ...], scale: float = 1.0
    ) -> Rows:
        """Of [tokens, heads, head_dim]."""
        return cls(v.ptr, cache.ptr, tuple(v.strides[:2]), cache_strides, v.shape[2], scale)

    def pack(self) -> bytes:
        """params.APPENDED_ROWS without the addresses."""
        return params.APPENDED_ROWS.pack(
            *self.source_strides, *self.cache_strides, self.head_dim, self.scale
        )

    def is_aligned(self, dtype: DType, dtype_cache: DType) -> bool:
        """Whether each can be read 16 bytes at a time, and written as many elements at a time."""
        count = 16 // dtype.itemsize
        source, cache = self.source, self.cache
        for stride in (*self.source_strides, self.head_dim):
            source |= stride * dtype.itemsize
        for stride in self.cache_strides:
            cache |= stride * dtype_cache.itemsize
        return source % 16 == 0 and cache % (count * dtype_cache.itemsize) == 0


@lru_cache(maxsize=256)
def config(
    dtype: DType, dtype_target: DType, is_aligned: bool, target: str = "DTypeCache"
) -> jit.Config:
    """The Config of a kernel that copies, and converts where dtypes differ. target: what it calls
    the other type."""
    if dtype is dtype_target:
        dtype = dtype_target = COPIED[dtype.itemsize]
    values: dict[str, jit.Constant] = {"DType": dtype, target: dtype_target}
    return jit.Config({**values, "kAligned": is_aligned, "kThreads": THREADS})


def lane_bits(columns: int, dtype: DType, is_aligned: bool) -> int:
    """The lanes of a row, as a power of two: one for 16 bytes, or for each element of rows that are
    not aligned."""
    chunks = columns // (16 // dtype.itemsize if is_aligned else 1)
    return min(max(chunks - 1, 0).bit_length(), _MAX_LANE_BITS)


def num_blocks(num_rows: int, lane_bits: int) -> int:
    """Kernels walk on with rows beyond the last block."""
    return min(-(-num_rows // (THREADS >> lane_bits)), _MAX_BLOCKS)
