"""Launches with attributes, for sm_90 and later. CuPy has no such call.

One that begins early may do so while the one before it on its stream is running, which says in its
kernel when (`ptx::launch_dependents`): "programmatic dependent launch" of the CUDA programming
guide. The blocks of a cluster run at the same time and read each other's shared memory.
"""

from __future__ import annotations

import ctypes
import functools
import struct
import threading
from typing import Any

from ...errors import DeviceError

# cuda.h: CUlaunchConfig, and two CUlaunchAttribute: PROGRAMMATIC_STREAM_SERIALIZATION and
# CLUSTER_DIMENSION.
_CONFIG = struct.Struct("<7I 4x 2Q I 4x")
_ATTRIBUTE = struct.Struct("<i 4x 3i 52x")
_CLUSTER_DIMENSION, _SERIALIZATION = 4, 6


class _Room(threading.local):
    """One thread's structs, which the driver reads during the call."""

    def __init__(self) -> None:
        self.buffer = bytearray(_CONFIG.size + 2 * _ATTRIBUTE.size)
        self._pinned = (ctypes.c_char * len(self.buffer)).from_buffer(self.buffer)
        self.address = ctypes.addressof(self._pinned)
        _ATTRIBUTE.pack_into(self.buffer, _CONFIG.size, _SERIALIZATION, 1, 0, 0)


_room = _Room()


def launch_early(
    function: int, x: int, y: int, z: int, block_x: int, block_y: int, block_z: int,
    shared_bytes: int, stream: int, arguments: int, extra: int,
) -> None:  # fmt: skip
    """As cuLaunchKernel, with its arguments. Raises DeviceError if the driver refuses."""
    sizes = x, y, z, block_x, block_y, block_z, shared_bytes
    _launch(function, sizes, stream, arguments, extra, _room.address + _CONFIG.size, 1)


def launch_clusters(
    function: int, x: int, y: int, z: int, block_x: int, block_y: int, block_z: int,
    shared_bytes: int, stream: int, arguments: int, extra: int, cluster: int,
    is_dependent: bool = False,
) -> None:  # fmt: skip
    """Launch a kernel in clusters of `cluster` blocks along x; early if it `is_dependent`."""
    begin = _CONFIG.size + _ATTRIBUTE.size
    _ATTRIBUTE.pack_into(_room.buffer, begin, _CLUSTER_DIMENSION, cluster, 1, 1)
    attributes = _room.address + (_CONFIG.size if is_dependent else begin)
    sizes = x, y, z, block_x, block_y, block_z, shared_bytes
    _launch(function, sizes, stream, arguments, extra, attributes, 2 if is_dependent else 1)


def most_clusters(function: int, threads: int, shared_bytes: int, cluster: int) -> int:
    """How many clusters of so many blocks run at a time on the current device."""
    begin, count = _CONFIG.size + _ATTRIBUTE.size, ctypes.c_int()
    _ATTRIBUTE.pack_into(_room.buffer, begin, _CLUSTER_DIMENSION, cluster, 1, 1)
    sizes = cluster, 1, 1, threads, 1, 1, shared_bytes
    _CONFIG.pack_into(_room.buffer, 0, *sizes, 0, _room.address + begin, 1)
    call = ctypes.CDLL("libcuda.so.1").cuOccupancyMaxActiveClusters
    call.argtypes = [ctypes.c_void_p] * 3
    status = call(ctypes.addressof(count), function, _room.address)
    if status:
        raise DeviceError(f"the driver does not say how many clusters run (error {status})")
    return count.value


def _launch(
    function: int,
    sizes: tuple[int, ...],
    stream: int,
    arguments: int,
    extra: int,
    attributes: int,
    count: int,
) -> None:
    _CONFIG.pack_into(_room.buffer, 0, *sizes, stream, attributes, count)
    status = _launch_kernel()(_room.address, function, arguments, extra)
    if status:
        raise DeviceError(f"the driver refuses a launch of {sizes[:3]} blocks (error {status})")


@functools.cache
def _launch_kernel() -> Any:
    call = ctypes.CDLL("libcuda.so.1").cuLaunchKernelEx
    call.argtypes = [ctypes.c_void_p] * 4
    return call
