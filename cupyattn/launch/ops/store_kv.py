"""Launches the store_kv kernel: keys and values into the slots that the caller names."""

from __future__ import annotations

import struct
from functools import lru_cache
from typing import Any, NamedTuple

from ... import jit
from ...array import ArrayView
from ...core import dtypes
from ...core.device import device_props
from ...core.dtypes import DType
from ..driver import params
from ..driver.enqueue import Launch, enqueue

_THREADS = 256
_MAX_BLOCKS, _MAX_HEADS = 2**31 - 1, 2**16 - 1
_MAX_LANE_BITS = 5
# What a kernel that converts nothing takes elements of a size for: bytes are bytes.
_COPIED = {1: dtypes.uint8, 2: dtypes.float16, 4: dtypes.float32}

# kernels/cupyattn/params/page.cuh: addresses, and what calls of one signature share.
_ROWS = struct.Struct("<5q i f")  # strides, head_dim, scale
_REST = struct.Struct("<6i")
STORE_KV = struct.Struct(f"<2Q {_ROWS.size}s 2Q {_ROWS.size}s 2Q Q q Q q 3q {_REST.size}s")


class Rows(NamedTuple):
    """Keys or values, and the cache they go to. Strides are in elements."""

    source: ArrayView
    cache: ArrayView
    cache_strides: tuple[int, int, int]  # page, slot, head
    scale: float
    scale_stride: int


class Store(NamedTuple):
    """A write of arrays of one look, wherever they are and however many tokens they have."""

    function: Any
    rows: tuple[bytes, bytes]
    is_wide: bool
    is_map_wide: bool
    map_size: int
    num_slots: int
    rest: bytes
    num_heads: int
    rows_per_block: int
    device_index: int

    def enqueue(
        self,
        stream: int,
        num_tokens: int,
        sources: tuple[int, int],
        caches: tuple[int, int],
        scales: tuple[int, int],
        slots: int,
        slot_map: int,
    ) -> None:
        """Launch on arrays at these addresses, 0 for those that are not there."""
        arguments = params.this_thread.launch_buffer
        STORE_KV.pack_into(
            arguments.buffer,
            arguments.offset,
            sources[0],
            caches[0],
            self.rows[0],
            sources[1],
            caches[1],
            self.rows[1],
            *scales,
            slots,
            self.is_wide,
            slot_map,
            self.is_map_wide,
            self.map_size,
            self.num_slots,
            num_tokens,
            self.rest,
        )
        # The kernel walks on with tokens beyond the last block.
        blocks = min(-(-num_tokens // self.rows_per_block), _MAX_BLOCKS)
        launch = _launch(self.function, blocks, min(self.num_heads, _MAX_HEADS))
        enqueue(launch, arguments, self.device_index, stream)


@lru_cache(maxsize=1024)
def _launch(function: Any, blocks: int, heads: int) -> Launch:
    return Launch(function, (blocks, 2, heads), _THREADS, 0)


@lru_cache(maxsize=256)
def config(dtype: DType, dtype_cache: DType, is_aligned: bool) -> jit.Config:
    """The kernel's Config; fp8 caches convert wider types."""
    if dtype is dtype_cache:
        dtype = dtype_cache = _COPIED[dtype.itemsize]
    values: dict[str, jit.Constant] = {"DType": dtype, "DTypeCache": dtype_cache}
    return jit.Config({**values, "kAligned": is_aligned, "kThreads": _THREADS})


def prepare(
    k: Rows,
    v: Rows,
    *,
    slots: ArrayView,
    slot_map: ArrayView | None,
    num_slots: int,
    page_size: int,
) -> Store:
    """The launch for arrays that look like these: [tokens, heads, head_dim] and their caches."""
    dtype, dtype_cache = k.source.dtype, k.cache.dtype
    is_aligned = all(_is_aligned(rows) for rows in (k, v))
    device = k.source.device.index
    chosen = config(dtype, dtype_cache, is_aligned)
    kernel = jit.load("store_kv", chosen, device, device_props(device).arch)
    head_dim = max(k.source.shape[2], v.source.shape[2])
    chunks = head_dim // (16 // dtype.itemsize if is_aligned else 1)
    lane_bits = min((max(chunks, 1) - 1).bit_length(), _MAX_LANE_BITS)
    num_heads = k.source.shape[1]
    rest = _REST.pack(k.scale_stride, v.scale_stride, num_heads, page_size, lane_bits, 0)
    return Store(
        kernel.function,
        (_pack(k), _pack(v)),
        slots.dtype is dtypes.int64,
        slot_map is not None and slot_map.dtype is dtypes.int64,
        0 if slot_map is None else slot_map.shape[0],
        num_slots,
        rest,
        num_heads,
        _THREADS >> lane_bits,
        device,
    )


def _pack(rows: Rows) -> bytes:
    return _ROWS.pack(
        *rows.source.strides[:2], *rows.cache_strides, rows.source.shape[2], rows.scale
    )


def _is_aligned(rows: Rows) -> bool:
    """True if every row can be read 16 bytes at a time, and written as many elements at a time."""
    size, cache_size = rows.source.dtype.itemsize, rows.cache.dtype.itemsize
    source, cache = rows.source.ptr, rows.cache.ptr
    for stride in (*rows.source.strides[:2], rows.source.shape[2]):
        source |= stride * size
    for stride in rows.cache_strides:
        cache |= stride * cache_size
    return source % 16 == 0 and cache % (16 // size * cache_size) == 0
