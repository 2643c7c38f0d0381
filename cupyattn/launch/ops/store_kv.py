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
from .rows import THREADS, Rows, config, lane_bits, num_blocks

_MAX_HEADS = 2**16 - 1

# kernels/cupyattn/params/page.cuh: addresses, and what calls of one signature share.
_REST = struct.Struct("<6i")
_ROWS = f"2Q {params.APPENDED_ROWS.size}s"
STORE_KV = struct.Struct(f"<{_ROWS} {_ROWS} 2Q Q q Q q 3q {_REST.size}s")


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
    lane_bits: int
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
        blocks = num_blocks(num_tokens, self.lane_bits)
        launch = _launch(self.function, blocks, min(self.num_heads, _MAX_HEADS))
        enqueue(launch, arguments, self.device_index, stream)


@lru_cache(maxsize=1024)
def _launch(function: Any, blocks: int, heads: int) -> Launch:
    return Launch(function, (blocks, 2, heads), THREADS, 0)


def prepare(
    vk: ArrayView,
    k: Rows,
    v: Rows,
    *,
    dtype_cache: DType,
    scale_strides: tuple[int, int],
    slots: ArrayView,
    slot_map: ArrayView | None,
    num_slots: int,
    page_size: int,
) -> Store:
    """The launch for rows like these. vk: keys [tokens, heads, head_dim]."""
    dtype, num_heads, device = vk.dtype, vk.shape[1], vk.device.index
    is_aligned = all(rows.is_aligned(dtype, dtype_cache) for rows in (k, v))
    chosen = config(dtype, dtype_cache, is_aligned)
    kernel = jit.load("store_kv", chosen, device, device_props(device).arch)
    bits = lane_bits(max(k.head_dim, v.head_dim), dtype, is_aligned)
    rest = _REST.pack(*scale_strides, num_heads, page_size, bits, 0)
    return Store(
        kernel.function,
        (k.pack(), v.pack()),
        slots.dtype is dtypes.int64,
        slot_map is not None and slot_map.dtype is dtypes.int64,
        0 if slot_map is None else slot_map.shape[0],
        num_slots,
        rest,
        num_heads,
        bits,
        device,
    )
