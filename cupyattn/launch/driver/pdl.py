"""A launch that may begin while the one before it on its stream is running.

That one says in its kernel when (`ptx::launch_dependents`): "programmatic dependent
launch" of the CUDA programming guide, for sm_90 and later. CuPy has no such call.
"""

from __future__ import annotations

import ctypes
import functools
import struct
import threading
from typing import Any

from ...errors import DeviceError

# cuda.h: CUlaunchConfig, and one CUlaunchAttribute, PROGRAMMATIC_STREAM_SERIALIZATION.
_CONFIG = struct.Struct("<7I 4x 2Q I 4x")
_ATTRIBUTE = struct.Struct("<i 4x i 60x")
_SERIALIZATION = 6


class _Room(threading.local):
    """One thread's structs, which the driver reads during the call."""

    def __init__(self) -> None:
        self.buffer = bytearray(_CONFIG.size + _ATTRIBUTE.size)
        self._pinned = (ctypes.c_char * len(self.buffer)).from_buffer(self.buffer)
        self.address = ctypes.addressof(self._pinned)
        _ATTRIBUTE.pack_into(self.buffer, _CONFIG.size, _SERIALIZATION, 1)


_room = _Room()


def launch_early(
    function: int, x: int, y: int, z: int, block_x: int, block_y: int, block_z: int,
    shared_bytes: int, stream: int, arguments: int, extra: int,
) -> None:  # fmt: skip
    """As cuLaunchKernel, with its arguments. Raises DeviceError if the driver refuses."""
    attribute = _room.address + _CONFIG.size
    sizes = x, y, z, block_x, block_y, block_z, shared_bytes
    _CONFIG.pack_into(_room.buffer, 0, *sizes, stream, attribute, 1)
    status = _launch_kernel()(_room.address, function, arguments, extra)
    if status:
        raise DeviceError(f"the driver refuses a launch of {(x, y, z)} blocks (error {status})")


@functools.cache
def _launch_kernel() -> Any:
    call = ctypes.CDLL("libcuda.so.1").cuLaunchKernelEx
    call.argtypes = [ctypes.c_void_p] * 4
    return call
