"""Mirrors of the kernels' Params structs, and the buffers they are launched from."""

from __future__ import annotations

import ctypes
import struct
import threading

import numpy as np

MAX_ROPE_PAIRS = 128

# kernels/cupyattn/params/attention.cuh, field by field, in the parts that change together: what is
# the same for many calls is packed once, and copied by each.
OPTIONAL = struct.Struct("<6Q")  # lse, mask, sinks, scale_q, scale_k, scale_v
STRIDES = struct.Struct("<12q")  # (token, head) of q, k, v, o, lse; page of k, v
CONSTANTS = struct.Struct("<6i 5f 3i")  # num_kv_heads to num_work; the RoPE steps follow
# q, k, v, o; OPTIONAL; partial_o, partial_lse, counters; work, merges, kv_indices; STRIDES;
# mask_bytes; lengths; the rest.
ATTENTION = struct.Struct(
    f"<4Q {OPTIONAL.size}s 6Q {STRIDES.size}s q 2i {CONSTANTS.size + 4 * MAX_ROPE_PAIRS}s"
)
NO_OPTIONAL = bytes(OPTIONAL.size)

# kernels/cupyattn/params/rotate_keys.cuh, the table of RoPE steps included.
ROTATE_KEYS = struct.Struct(f"<2Q 2q 2i {4 * MAX_ROPE_PAIRS}s")

# kernels/cupyattn/params/packbits.cuh
PACKBITS = struct.Struct("<4Q 4q 2i")

_MAX_PARAMS_BYTES = 1024
_PARAMS_OFFSET = 16


class LaunchBuffer:
    """One thread's launch arguments: the array of argument pointers (of one), then the struct.

    The driver copies the struct during the launch call, so a thread can reuse its buffer at once.
    """

    __slots__ = ("_pinned", "address", "buffer", "has_context", "offset")

    def __init__(self) -> None:
        self.buffer = bytearray(_PARAMS_OFFSET + _MAX_PARAMS_BYTES)
        self._pinned = (ctypes.c_char * len(self.buffer)).from_buffer(self.buffer)
        self.address = ctypes.addressof(self._pinned)
        self.offset = _PARAMS_OFFSET
        struct.pack_into("<Q", self.buffer, 0, self.address + _PARAMS_OFFSET)
        self.has_context = False


class _ThisThread(threading.local):
    def __init__(self) -> None:
        self.launch_buffer = LaunchBuffer()


this_thread = _ThisThread()


def rope_steps(head_dim: int, rope_scale: float, rope_theta: float) -> bytes:
    """Turns per position of each rotated pair, as 32-bit fractions (arXiv 2104.09864)."""
    pairs = np.arange(head_dim // 2, dtype=np.float64)
    radians = rope_theta ** (-2.0 * pairs / head_dim) / rope_scale
    fraction = np.mod(radians / (2.0 * np.pi), 1.0)
    steps = np.round(fraction * 2.0**32).astype(np.uint64) & np.uint64(0xFFFFFFFF)
    return steps.astype("<u4").tobytes()
