"""Launches the serving_metadata kernel: lengths, offsets and tables of a serving step."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any, NamedTuple

from ... import jit
from ...core.device import device_props
from ..driver import params
from ..driver.enqueue import Launch, enqueue

_THREADS = 256
MAX_ROWS = 128
# Blocks of one request share the columns of its tables; more than this many don't pay.
_MAX_PARTS = 16
CONFIG = jit.Config({"kThreads": _THREADS, "kMaxRows": MAX_ROWS})

# kernels/cupyattn/params/serving.cuh: what a step gives, then what steps of one form share.
_CHUNKS = struct.Struct("<4Q")
_ROW_TABLES = struct.Struct("<2Q 2i")
_SHARED = struct.Struct(f"<10Q {_CHUNKS.size}s {2 * _ROW_TABLES.size}s 7q 16i")
SERVING_METADATA = struct.Struct(f"<12Q 3Q 2q {_SHARED.size}s")

NO_TREE, FLAT, SQUARE, WORDS, BEAMS = range(5)


class Outputs(NamedTuple):
    """Addresses of int32 arrays, 0 for what nobody needs; see params/serving.cuh."""

    kv_lens: int = 0
    cu_seqlens_q: int = 0
    kv_offsets: int = 0
    page_table: int = 0
    swa_table: int = 0
    encoder_lens: int = 0
    encoder_offsets: int = 0
    draft_table: int = 0
    draft_lens: int = 0
    tree_bits: int = 0
    chunk_qo_lens: int = 0
    chunk_qo_offsets: int = 0
    chunk_kv_lens: int = 0
    chunk_kv_offsets: int = 0
    window_slots: int = 0
    window_lens: int = 0
    chunk_slots: int = 0
    chunk_lens: int = 0


class Sizes(NamedTuple):
    """The rest of the struct, by its names."""

    pool_stride: int
    num_pool_rows: int
    room: int
    map_size: int
    page_stride: int
    swa_stride: int
    chunk_stride: int
    num_requests: int
    rows: int
    num_steps: int
    len_delta: int
    page_size: int
    chunk_size: int
    num_chunks: int
    chunk_page: int
    chunks_are_slots: int
    window: int
    swa_window: int
    swa_chunk: int
    first_step: int
    draft_steps: int
    draft_width: int
    tree_form: int
    window_width: int
    chunk_width: int


class Prepared(NamedTuple):
    """A launch for steps of one form, whatever arrays they give.

    is_wide  whether the first five arrays are of int64
    over     address of full_to_swa, whether it is of int64, and the address of req_to_token
    """

    launch: Launch
    shared: bytes
    is_wide: tuple[bool, ...]
    over: tuple[int, int, int]
    device_index: int

    def enqueue(self, stream: int, at: Sequence[int], tree_size: int, num_real: int) -> None:
        """at: addresses of seq_lens, req_pool_indices, extend_seq_lens, encoder_lens,
        out_cache_loc, tree and beam_rows, 0 for none."""
        arguments = params.this_thread.launch_buffer
        lens, rows, extend, encoder, loc, tree, beams = at
        wide = self.is_wide
        SERVING_METADATA.pack_into(
            arguments.buffer,
            arguments.offset,
            lens,
            wide[0],
            rows,
            wide[1],
            extend,
            wide[2],
            encoder,
            wide[3],
            loc,
            wide[4],
            *self.over,
            tree,
            beams,
            tree_size,
            num_real,
            self.shared,
        )
        enqueue(self.launch, arguments, self.device_index, stream)


def prepare(
    outputs: Outputs,
    sizes: Sizes,
    columns: int,
    device: int,
    is_wide: tuple[bool, ...],
    over: tuple[int, int, int],
) -> Prepared:
    """columns: entries of the longest table that a request has."""
    kernel: Any = jit.load("serving_metadata", CONFIG, device, device_props(device).arch)
    parts = min(max(1, -(-columns // _THREADS)), _MAX_PARTS)
    shared = _SHARED.pack(
        *outputs[:10],
        _CHUNKS.pack(*outputs[10:14]),
        _ROW_TABLES.pack(outputs[14], outputs[15], sizes.window_width, 0)
        + _ROW_TABLES.pack(outputs[16], outputs[17], sizes.chunk_width, 0),
        *sizes[:7],
        *sizes[7:23],
    )
    launch = Launch(kernel.function, (sizes.num_requests, parts, 1), _THREADS, 0)
    return Prepared(launch, shared, is_wide, over, device)
