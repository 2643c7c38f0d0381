"""Mirrors of the kernels' Params structs, and the buffers they are launched from."""

from __future__ import annotations

import ctypes
import struct
import threading

import numpy as np

# kernels/cupyattn/params/attention.cuh, field by field: pointers, strides and mask_bytes, lengths,
# flags and scales. The table of RoPE steps follows.
ATTENTION = struct.Struct("<13Q 11q 8i 5f i")
MAX_ROPE_PAIRS = 128
ATTENTION_BYTES = ATTENTION.size + 4 * MAX_ROPE_PAIRS

# kernels/cupyattn/params/rotate_keys.cuh; the table of RoPE steps follows.
ROTATE_KEYS = struct.Struct("<2Q 2q 2i")

# kernels/cupyattn/params/packbits.cuh
PACKBITS = struct.Struct("<4Q 4q 2i")

_MAX_PARAMS_BYTES = 1024
_PARAMS_OFFSET = 16


class LaunchBuffer(threading.local):
    """One thread's launch arguments: the array of argument pointers (of one), then the struct.

    The driver copies the struct during the launch call, so a thread can reuse its buffer at once.
    """

    def __init__(self) -> None:
        self.buffer = (ctypes.c_char * (_PARAMS_OFFSET + _MAX_PARAMS_BYTES))()
        self.address = ctypes.addressof(self.buffer)
        struct.pack_into("<Q", self.buffer, 0, self.address + _PARAMS_OFFSET)
        self.offset = _PARAMS_OFFSET
        self.rope_offset = _PARAMS_OFFSET + ATTENTION.size
        self.has_context = False


launch_buffer = LaunchBuffer()


def rope_steps(head_dim: int, rope_scale: float, rope_theta: float) -> bytes:
    """Turns per position of each rotated pair, as 32-bit fractions (arXiv 2104.09864)."""
    pairs = np.arange(head_dim // 2, dtype=np.float64)
    radians = rope_theta ** (-2.0 * pairs / head_dim) / rope_scale
    fraction = np.mod(radians / (2.0 * np.pi), 1.0)
    steps = np.round(fraction * 2.0**32).astype(np.uint64) & np.uint64(0xFFFFFFFF)
    return steps.astype("<u4").tobytes()
