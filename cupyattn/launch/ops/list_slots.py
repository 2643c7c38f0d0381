"""Launches the list_slots kernel: lists of blocks of requests to lists of slots of a cache."""

from __future__ import annotations

import struct
from typing import NamedTuple

from ... import jit
from ...core.device import device_props
from ..driver import params
from ..driver.enqueue import MAX_GRID_YZ, Launch, enqueue
from .select import TOKENS

_THREADS = 256
CONFIG = jit.Config({"kThreads": _THREADS})
# kernels/cupyattn/params/list_slots.cuh
_PARAMS = struct.Struct(f"<3Q 2q {TOKENS.size}s 6i")


class Blocks(NamedTuple):
    """Lists [tokens, length] of blocks, and what their tokens see.

    lists, table, kv_lens, qo_offsets  addresses; qo_offsets 0: request_tokens of each request
    list_stride, table_stride  elements from row to row
    block_shift  a block has 1 << block_shift keys; window: so many last keys besides
    max_kv_len   keys that a request has room for
    """

    lists: int
    table: int
    kv_lens: int
    qo_offsets: int
    list_stride: int
    table_stride: int
    num_tokens: int
    length: int
    block_shift: int
    window: int
    page_size: int
    num_requests: int
    request_tokens: int
    max_kv_len: int
    is_causal: bool


def launch(blocks: Blocks, slots: int, device: int, stream: int) -> None:
    """Enqueue slots, int32 [tokens, (length << block_shift) + window] without gaps."""
    count = (blocks.length << blocks.block_shift) + blocks.window
    if not blocks.num_tokens or not count:
        return
    kernel = jit.load("list_slots", CONFIG, device, device_props(device).arch)
    tokens = TOKENS.pack(
        blocks.kv_lens,
        blocks.qo_offsets,
        blocks.num_requests,
        blocks.request_tokens,
        blocks.max_kv_len,
        blocks.is_causal,
        False,
        0,
        0,
        0,
    )
    arguments = params.this_thread.launch_buffer
    _PARAMS.pack_into(
        arguments.buffer,
        arguments.offset,
        blocks.lists,
        blocks.table,
        slots,
        blocks.list_stride,
        blocks.table_stride,
        tokens,
        blocks.num_tokens,
        blocks.length,
        blocks.block_shift,
        blocks.window,
        blocks.page_size,
        0,
    )
    grid = -(-count // _THREADS), min(blocks.num_tokens, MAX_GRID_YZ), 1
    enqueue(Launch(kernel.function, grid, _THREADS, 0), arguments, device, stream)
