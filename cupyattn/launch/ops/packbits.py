"""Launches the packbits kernel."""

from __future__ import annotations

from ... import jit
from ...array import ArrayView
from ...core.device import device_props
from ..driver import params
from ..driver.enqueue import Launch, enqueue

_THREADS = 256


def launch(
    bits: ArrayView,
    packed: ArrayView,
    bit_indptr: ArrayView | None,
    packed_indptr: ArrayView | None,
    little_endian: bool,
    stream: int,
    num_segments: int = 1,
) -> None:
    """Enqueue: bits [n], or [rows, columns] with any row stride, of one byte each -> packed uint8.

    The indptrs are int64, or both None: then there are num_segments of equal length.
    """
    num_packed = packed.shape[0]
    row_length = bits.shape[-1]
    row_stride = bits.strides[0] if len(bits.shape) == 2 else row_length
    num_bits = row_length * (bits.shape[0] if len(bits.shape) == 2 else 1)
    if num_packed == 0:
        return
    device = bits.device.index
    kernel = jit.load("packbits", CONFIG, device, device_props(device).arch)
    arguments = params.this_thread.launch_buffer
    params.PACKBITS.pack_into(
        arguments.buffer,
        arguments.offset,
        bits.ptr,
        packed.ptr,
        0 if bit_indptr is None else bit_indptr.ptr,
        0 if packed_indptr is None else packed_indptr.ptr,
        num_bits,
        num_packed,
        row_length,
        row_stride,
        num_segments if bit_indptr is None else bit_indptr.shape[0] - 1,
        little_endian,
    )
    blocks = -(-num_packed // _THREADS)
    enqueue(Launch(kernel.function, (blocks, 1, 1), _THREADS, 0), arguments, device, stream)


CONFIG = jit.Config({"kThreads": _THREADS})
