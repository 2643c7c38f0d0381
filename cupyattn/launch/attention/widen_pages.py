"""Launches the widen_pages kernel ahead of attention of 16 bits over pages of 8 bits: the pages of
requests come side by side in 16 bits, which hold all their numbers."""

from __future__ import annotations

import struct
from typing import NamedTuple

from ... import jit
from ...core.dtypes import DType
from ...core.spec import AttentionSpec
from ..driver import params
from ..driver.enqueue import MAX_GRID_YZ, Launch, enqueue, load_function
from .key_list_arrays import ListAddresses, Lists

_THREADS = 256
_VECTOR = 8
# kernels/cupyattn/params/widen_pages.cuh, behind the addresses
_REST = struct.Struct("<6q 10i")
_SCALES = struct.Struct("<2Q 4i")
_PARAMS = struct.Struct(f"<6Q {_REST.size}s {_SCALES.size}s")
MAX_BYTES = 1 << 30  # of wide keys and values
_MAX_PAGE_SIZE = 512  # a block widens a page


class WidePages(NamedTuple):
    """A launch, and what attention reads behind it.

    strides    params.STRIDES of the wide pages, of which a request has `pages`
    sizes      bytes of keys, and of values
    steps      from a head's scale to the next one's, and from a request's, of keys and values
    """

    launch: Launch
    packed: bytes
    strides: bytes
    pages: int
    sizes: tuple[int, int]
    steps: tuple[int, int, int, int]

    def enqueue(
        self, at: ListAddresses, to: int, device_index: int, stream: int
    ) -> tuple[int, int]:
        """Widen the pages of a call into memory at `to`; the addresses of keys and values."""
        arguments = params.this_thread.launch_buffer
        k, v = to, to + self.sizes[0]
        _PARAMS.pack_into(
            arguments.buffer,
            arguments.offset,
            at.k,
            at.v,
            k,
            v,
            at.table,
            at.kv_lens,
            self.packed,
            _SCALES.pack(at.key_scales, at.value_scales, *self.steps),
        )
        enqueue(self.launch, arguments, device_index, stream)
        return k, v


def config(dtype: DType, to: DType) -> jit.Config:
    """The kernel that widens pages of a dtype of 8 bits."""
    return jit.Config({"DType": dtype, "DTypeTo": to, "kThreads": _THREADS})


def num_bytes(spec: AttentionSpec, lists: Lists) -> int:
    """What the pages of all requests take in 16 bits, as far as a table has room."""
    dims = spec.head_dim_qk + spec.head_dim_vo
    return 2 * lists.num_requests * lists.max_kv_len * spec.num_kv_heads * dims


def serves(spec: AttentionSpec, lists: Lists, strides: bytes) -> bool:
    """Whether these pages are widened: vectors of their rows, into no more memory than that."""
    _, _, *of_keys = params.STRIDES.unpack(strides)
    steps = (*of_keys[:4], *of_keys[-2:], spec.head_dim_qk, spec.head_dim_vo)
    are_whole = all(step % _VECTOR == 0 for step in steps)
    fits = num_bytes(spec, lists) <= MAX_BYTES and lists.num_requests <= MAX_GRID_YZ
    return 0 < spec.page_size <= _MAX_PAGE_SIZE and are_whole and fits


def prepare(
    spec: AttentionSpec, dtypes: tuple[DType, DType], lists: Lists, strides: bytes, index: int
) -> WidePages:
    """The launch for calls of these lists and params.STRIDES. dtypes: of the pages, and wide."""
    unpacked = [*params.STRIDES.unpack(strides)]
    heads, size = spec.num_kv_heads, spec.page_size
    dims, pages = (spec.head_dim_qk, spec.head_dim_vo), lists.max_kv_len // spec.page_size
    k_row, k_head, v_row, v_head = unpacked[2:6]
    k_page, v_page = unpacked[10:12]
    packed = _REST.pack(
        k_page,
        v_page,
        k_row,
        v_row,
        k_head,
        v_head,
        dims[0],
        dims[1],
        lists.kv_step,
        lists.steps[0],
        lists.kv_lens_are_steps,
        pages,
        size,
        lists.num_pages,
        heads,
        0,
    )
    unpacked[2:6] = heads * dims[0], dims[0], heads * dims[1], dims[1]
    unpacked[10:12] = size * heads * dims[0], size * heads * dims[1]
    rows = lists.num_requests * pages * size * heads
    narrow, wide = dtypes
    function = load_function("widen_pages", config(narrow, wide), index)
    return WidePages(
        Launch(function, (pages, lists.num_requests, 2), _THREADS, 0),
        packed,
        params.STRIDES.pack(*unpacked),
        pages,
        (2 * rows * dims[0], 2 * rows * dims[1]),
        (
            lists.k_scale_step,
            lists.v_scale_step,
            lists.k_scale_request_step,
            lists.v_scale_request_step,
        ),
    )
