"""Launches the find_mean kernel twice: sums of blocks of rows, then the means of requests."""

from __future__ import annotations

import math
import struct
from functools import lru_cache

from ... import jit
from ...array import ArrayView
from ...core.device import device_props
from ...core.dtypes import DType
from ..driver import params, scratch
from ..driver.enqueue import Launch, enqueue
from .quantize import Part, lanes_of

# kernels/cupyattn/params/quantize.cuh
FIND_MEAN = struct.Struct("<4Q 3q 5i f")
_THREADS, _BLOCK = 256, 256


@lru_cache(maxsize=256)
def config(
    dtype: DType, lanes: int, *, is_aligned: bool, hadamard: bool, divides: bool
) -> jit.Config:
    """The kernel's Config; divides: the second launch."""
    values: dict[str, jit.Constant] = {
        "DType": dtype,
        "kAligned": is_aligned,
        "kHadamard": hadamard,
        "kDivides": divides,
        "kThreads": _THREADS,
        "kLanes": lanes,
    }
    return jit.Config(values)


def launch(part: Part, mean: ArrayView, hadamard: bool, stream: int) -> None:
    """Write the means of a part's requests, of rotated rows if `hadamard`, to float32 [requests,
    heads, head_dim], contiguous."""
    source = part.source
    n, heads, head_dim = source.shape
    if heads == 0 or head_dim == 0:
        return
    device = source.device.index
    num_blocks = n // _BLOCK + part.batch_size
    allocate = scratch.allocator(source)
    sums, owner = scratch.workspace(8 * num_blocks * heads * head_dim, device, stream, allocate)
    arguments = params.this_thread.launch_buffer
    FIND_MEAN.pack_into(
        arguments.buffer,
        arguments.offset,
        source.ptr,
        sums,
        mean.ptr,
        0 if part.offsets is None else part.offsets.ptr,
        n,
        *source.strides[:2],
        heads,
        head_dim,
        num_blocks,
        part.batch_size,
        part.rows_per_request,
        1.0 / math.sqrt(head_dim),
    )
    arch = device_props(device).arch
    for divides, blocks in ((False, num_blocks * heads), (True, part.batch_size * heads)):
        chosen = config(
            source.dtype,
            lanes_of(head_dim),
            is_aligned=part.is_aligned,
            hadamard=hadamard,
            divides=divides,
        )
        kernel = jit.load("find_mean", chosen, device, arch)
        enqueue(Launch(kernel.function, (blocks, 1, 1), _THREADS, 0), arguments, device, stream)
    del owner  # the launches are enqueued
