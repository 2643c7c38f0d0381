"""Launches the pad_lse kernel, behind attention whose LSE is wanted request by request."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import NamedTuple

from ... import jit
from ..driver import params
from ..driver.enqueue import MAX_GRID_YZ, Launch, enqueue, load_function
from . import plan_batch

_THREADS = 256
CONFIG = jit.Config({"kThreads": _THREADS})
# kernels/cupyattn/params/plan_batch.cuh, PadLseParams
_PARAMS = struct.Struct(f"<4Q 32x {plan_batch.PARAMS.size - 64}s 2Q 3q 2i")


class Padding(NamedTuple):
    """A launch, and what of its arguments is the same for many."""

    launch: Launch
    strides: tuple[int, int, int]
    num_heads: int
    max_qo_len: int


def prepare(shape: Sequence[int], strides: Sequence[int], device: int) -> Padding:
    """Make ready to write an LSE [num_requests, max_qo_len, num_heads]."""
    num_requests, maximum, num_heads = shape
    function = load_function("pad_lse", CONFIG, device)
    grid = (-(-maximum * num_heads // _THREADS), max(1, min(num_requests, MAX_GRID_YZ)), 1)
    request, token, head = strides
    return Padding(Launch(function, grid, _THREADS, 0), (request, token, head), num_heads, maximum)


def launch(
    padding: Padding,
    planned: bytes,
    indices: tuple[int, int, int, int, int],
    rows: int,
    padded: int,
    device: int,
    stream: int,
) -> None:
    """Enqueue it on `rows` [num_rows, num_heads]; `planned` and indices are the planner's."""
    arguments = params.this_thread.launch_buffer
    _PARAMS.pack_into(
        arguments.buffer,
        arguments.offset,
        *indices[:4],
        planned,
        rows,
        padded,
        *padding.strides,
        padding.num_heads,
        padding.max_qo_len,
    )
    enqueue(padding.launch, arguments, device, stream)
