"""Launches the append_paged_kv_cache kernel."""

from __future__ import annotations

import ctypes
from functools import lru_cache
from typing import Any, NamedTuple

from ... import jit
from ...core import dtypes
from ...core.device import device_props
from ...core.dtypes import DType
from ..driver import params, scratch
from ..driver.enqueue import Launch, cuda, enqueue

_THREADS = 256
_MAX_BLOCKS = 2**31 - 1
_MAX_LANE_BITS = 5
_DEVICE_TO_HOST = 2
# What a kernel that converts nothing takes elements of a size for: bytes are bytes.
COPIED = {1: dtypes.uint8, 2: dtypes.float16, 4: dtypes.float32}


class Rows(NamedTuple):
    """Keys, or values, and the cache they go to. Strides are in elements."""

    source: int
    cache: int
    source_strides: tuple[int, int]  # token, head
    cache_strides: tuple[int, int, int]  # page, slot, head
    head_dim: int
    scale: float


class Append(NamedTuple):
    """The append of rows that lie alike, wherever they are and however many.

    k, v  params.APPENDED_ROWS without the addresses, packed
    """

    function: int
    k: bytes
    v: bytes
    num_pages: int
    page_size: int
    num_kv_heads: int
    lane_bits: int
    device_index: int

    def enqueue(
        self,
        stream: int,
        k: int,
        v: int,
        k_cache: int,
        v_cache: int,
        batch_indices: int,
        positions: int,
        kv_indices: int,
        kv_indptr: int,
        nnz: int,
        num_indices: int,
        batch_size: int,
        num_refused: int = 0,
    ) -> None:
        """Launch the copy of every token, of arrays at these addresses; index arrays are contiguous
        int32. num_refused: a counter of tokens that have no slot, or 0."""
        arguments = params.this_thread.launch_buffer
        params.APPEND_PAGED_KV_CACHE.pack_into(
            arguments.buffer,
            arguments.offset,
            k,
            k_cache,
            self.k,
            v,
            v_cache,
            self.v,
            batch_indices,
            positions,
            kv_indices,
            kv_indptr,
            num_indices,
            self.num_pages,
            batch_size,
            self.page_size,
            num_refused,
            nnz,
            self.num_kv_heads,
            self.lane_bits,
        )
        # The kernel walks on with rows beyond the last block.
        blocks = min(-(-nnz * self.num_kv_heads // (_THREADS >> self.lane_bits)), _MAX_BLOCKS)
        enqueue(_launch(self.function, blocks), arguments, self.device_index, stream)


@lru_cache(maxsize=1024)
def _launch(function: Any, blocks: int) -> Launch:
    return Launch(function, (blocks, 2, 1), _THREADS, 0)


@lru_cache(maxsize=256)
def config(dtype: DType, dtype_cache: DType, is_aligned: bool) -> jit.Config:
    """The kernel's Config; fp8 caches convert wider types."""
    if dtype is dtype_cache:
        dtype = dtype_cache = COPIED[dtype.itemsize]
    values: dict[str, jit.Constant] = {"DType": dtype, "DTypeCache": dtype_cache}
    return jit.Config({**values, "kAligned": is_aligned, "kThreads": _THREADS})


def prepare(
    k: Rows,
    v: Rows,
    dtype: DType,
    dtype_cache: DType,
    num_kv_heads: int,
    pages: tuple[int, int],
    device: int,
) -> Append:
    """The append of rows like these. pages: how many there are, and the tokens of each."""
    is_aligned = all(is_row_aligned(rows, dtype, dtype_cache) for rows in (k, v))
    chosen = config(dtype, dtype_cache, is_aligned)
    kernel = jit.load("append_paged_kv_cache", chosen, device, device_props(device).arch)
    chunks = max(k.head_dim, v.head_dim) // (16 // dtype.itemsize if is_aligned else 1)
    lane_bits = min((chunks - 1).bit_length(), _MAX_LANE_BITS)
    num_pages, page_size = pages
    return Append(
        kernel.function,
        pack_rows(k),
        pack_rows(v),
        num_pages,
        page_size,
        num_kv_heads,
        lane_bits,
        device,
    )


class Refused:
    """A counter in device memory, zeroed on a stream."""

    def __init__(self, stream: int, allocate: scratch.Allocate) -> None:
        self.address, self._owner = allocate(4)
        cuda().runtime.memsetAsync(self.address, 0, 4, stream)

    def read(self) -> int:
        """The count, once launches have been waited for."""
        host = bytearray(4)
        buffer = (ctypes.c_char * 4).from_buffer(host)
        cuda().runtime.memcpy(ctypes.addressof(buffer), self.address, 4, _DEVICE_TO_HOST)
        return int.from_bytes(host, "little")


def pack_rows(rows: Rows) -> bytes:
    return params.APPENDED_ROWS.pack(
        *rows.source_strides,
        *rows.cache_strides,
        rows.head_dim,
        rows.scale,
    )


def is_row_aligned(rows: Rows, dtype: DType, dtype_cache: DType) -> bool:
    """True if every row can be read 16 bytes at a time, and written as many elements at a time."""
    count = 16 // dtype.itemsize
    source = rows.source
    for stride in (*rows.source_strides, rows.head_dim):
        source |= stride * dtype.itemsize
    cache = rows.cache
    for stride in rows.cache_strides:
        cache |= stride * dtype_cache.itemsize
    return source % 16 == 0 and cache % (count * dtype_cache.itemsize) == 0
