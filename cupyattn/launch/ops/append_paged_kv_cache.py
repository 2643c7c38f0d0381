"""Launches the append_paged_kv_cache kernel."""

from __future__ import annotations

import ctypes
from functools import lru_cache
from typing import Any, NamedTuple

from ... import jit
from ...core.device import device_props
from ...core.dtypes import DType
from ..driver import params, scratch
from ..driver.enqueue import Launch, cuda, enqueue
from .rows import THREADS, Rows, config, lane_bits, num_blocks

_DEVICE_TO_HOST = 2


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
        blocks = num_blocks(nnz * self.num_kv_heads, self.lane_bits)
        enqueue(_launch(self.function, blocks), arguments, self.device_index, stream)


@lru_cache(maxsize=1024)
def _launch(function: Any, blocks: int) -> Launch:
    return Launch(function, (blocks, 2, 1), THREADS, 0)


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
    is_aligned = all(rows.is_aligned(dtype, dtype_cache) for rows in (k, v))
    chosen = config(dtype, dtype_cache, is_aligned)
    kernel = jit.load("append_paged_kv_cache", chosen, device, device_props(device).arch)
    num_pages, page_size = pages
    return Append(
        kernel.function,
        k.pack(),
        v.pack(),
        num_pages,
        page_size,
        num_kv_heads,
        lane_bits(max(k.head_dim, v.head_dim), dtype, is_aligned),
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
