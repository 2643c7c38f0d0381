"""Launches the copy_rows kernel: rows into memory of another layout, type or number of columns."""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence

from ... import jit
from ...array import ArrayView
from ...core.device import device_props
from ...core.dtypes import DType
from ..driver import params
from ..driver.enqueue import Launch, enqueue
from . import rows

_MAX_ARRAYS = 2
_VECTOR = 16  # bytes

# kernels/cupyattn/params/copy_rows.cuh
_ROWS = struct.Struct("<2Q 3q 3q q 4i")
_PARAMS = struct.Struct(f"<{_MAX_ARRAYS * _ROWS.size}s q")

Pair = tuple[ArrayView, ArrayView]


def config(dtype: DType, dtype_target: DType, is_aligned: bool) -> jit.Config:
    """The kernel's Config."""
    return rows.config(dtype, dtype_target, is_aligned, "DTypeTarget")


def launch(pairs: Sequence[Pair], stream: int) -> None:
    """Enqueue copies of (source, target), at most two, on their device.

    A source [..., columns] has up to four axes; its target has the same but for the columns, of
    which those that the source does not have become zeros. fp8 may become float16 or bfloat16.
    """
    pairs = [(source, target) for source, target in pairs if 0 not in target.shape]
    if not pairs:
        return
    if len({(source.dtype, target.dtype) for source, target in pairs}) > 1:
        for pair in pairs:
            launch([pair], stream)
        return
    first, target = pairs[0]
    device = first.device.index
    is_aligned = all(_is_aligned(source, target) for source, target in pairs)
    chosen = config(first.dtype, target.dtype, is_aligned)
    kernel = jit.load("copy_rows", chosen, device, device_props(device).arch)
    columns = max(target.shape[-1] for _, target in pairs)
    lane_bits = rows.lane_bits(columns, first.dtype, is_aligned)
    arguments = params.this_thread.launch_buffer
    packed = b"".join(_pack(source, target) for source, target in pairs)
    _PARAMS.pack_into(arguments.buffer, arguments.offset, packed, lane_bits)
    num_rows = max(math.prod(target.shape[:-1]) for _, target in pairs)
    grid = rows.num_blocks(num_rows, lane_bits), len(pairs), 1
    enqueue(Launch(kernel.function, grid, rows.THREADS, 0), arguments, device, stream)


def _pack(source: ArrayView, target: ArrayView) -> bytes:
    shape = (1, 1, 1, *target.shape)[-4:-1]
    strides = [((0, 0, 0, *v.strides)[-4:-1]) for v in (source, target)]
    columns = min(source.shape[-1], target.shape[-1])
    return _ROWS.pack(
        source.ptr,
        target.ptr,
        *strides[0],
        *strides[1],
        math.prod(shape),
        shape[1],
        shape[2],
        columns,
        target.shape[-1],
    )


def _is_aligned(source: ArrayView, target: ArrayView) -> bool:
    """Whether what is copied is whole vectors on their boundaries, and nothing is filled."""
    bits = source.ptr | target.ptr
    for v in (source, target):
        for stride in v.strides[:-1]:
            bits |= stride * v.dtype.itemsize
    columns = target.shape[-1]
    is_whole = columns * source.dtype.itemsize % _VECTOR == 0
    return is_whole and columns <= source.shape[-1] and bits % _VECTOR == 0
