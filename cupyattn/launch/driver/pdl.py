"""Launches with attributes, for sm_90 and later. CuPy has no such call.

One that begins early may do so while the one before it on its stream is running, which says in its
kernel when (`ptx::launch_dependents`): "programmatic dependent launch" of the CUDA programming
guide. The blocks of a cluster run at the same time and read each other's shared memory.
"""

from __future__ import annotations

import ctypes
import functools
import struct
from typing import Any

from ...errors import DeviceError

# cuda.h: CUlaunchConfig, and two CUlaunchAttribute: PROGRAMMATIC_STREAM_SERIALIZATION and
# CLUSTER_DIMENSION.
_CONFIG = struct.Struct("<7I 4x 2Q I 4x")
_ATTRIBUTE = struct.Struct("<i 4x 3i 52x")
_CLUSTER_DIMENSION, _SERIALIZATION = 4, 6


_MAX_KEPT = 1024


class _Config:
    """A CUlaunchConfig and its attributes, which nobody changes: launches of one shape on a stream
    share it."""

    __slots__ = ("_buffer", "_pinned", "address")

    def __init__(
        self, sizes: tuple[int, ...], stream: int, cluster: int = 1, is_dependent: bool = False
    ) -> None:
        attributes = []
        if is_dependent:
            attributes.append((_SERIALIZATION, 1, 0, 0))
        if cluster > 1:
            attributes.append((_CLUSTER_DIMENSION, cluster, 1, 1))
        self._buffer = bytearray(_CONFIG.size + len(attributes) * _ATTRIBUTE.size)
        self._pinned = (ctypes.c_char * len(self._buffer)).from_buffer(self._buffer)
        self.address = ctypes.addressof(self._pinned)
        begin = self.address + _CONFIG.size
        _CONFIG.pack_into(self._buffer, 0, *sizes, stream, begin, len(attributes))
        for index, attribute in enumerate(attributes):
            _ATTRIBUTE.pack_into(self._buffer, _CONFIG.size + index * _ATTRIBUTE.size, *attribute)


@functools.lru_cache(maxsize=_MAX_KEPT)
def _config(sizes: tuple[int, ...], stream: int, cluster: int, is_dependent: bool) -> _Config:
    return _Config(sizes, stream, cluster, is_dependent)


def launch_early(
    function: int,
    x: int,
    y: int,
    z: int,
    block_x: int,
    block_y: int,
    block_z: int,
    shared_bytes: int,
    stream: int,
    arguments: int,
    extra: int,
) -> None:
    """As cuLaunchKernel, with its arguments. Raises DeviceError if the driver refuses."""
    sizes = x, y, z, block_x, block_y, block_z, shared_bytes
    config = _config(sizes, stream, 1, True)
    _launch(config, function, arguments, extra, (x, y, z))


def launch_clusters(
    function: int,
    x: int,
    y: int,
    z: int,
    block_x: int,
    block_y: int,
    block_z: int,
    shared_bytes: int,
    stream: int,
    arguments: int,
    extra: int,
    cluster: int,
    is_dependent: bool = False,
) -> None:
    """Launch a kernel in clusters of `cluster` blocks along x; early if it `is_dependent`."""
    sizes = x, y, z, block_x, block_y, block_z, shared_bytes
    config = _config(sizes, stream, cluster, is_dependent)
    _launch(config, function, arguments, extra, (x, y, z))


def max_clusters(function: int, threads: int, shared_bytes: int, cluster: int) -> int:
    """How many clusters of so many blocks run at a time on the current device."""
    count = ctypes.c_int()
    config = _Config((cluster, 1, 1, threads, 1, 1, shared_bytes), 0, cluster)
    call = ctypes.CDLL("libcuda.so.1").cuOccupancyMaxActiveClusters
    call.argtypes = [ctypes.c_void_p] * 3
    status = call(ctypes.addressof(count), function, config.address)
    if status:
        raise DeviceError(f"the driver does not say how many clusters run (error {status})")
    return count.value


def _launch(
    config: _Config, function: int, arguments: int, extra: int, blocks: tuple[int, int, int]
) -> None:
    status = _launch_kernel()(config.address, function, arguments, extra)
    if status:
        raise DeviceError(f"the driver refuses a launch of {blocks} blocks (error {status})")


@functools.cache
def _launch_kernel() -> Any:
    call = ctypes.CDLL("libcuda.so.1").cuLaunchKernelEx
    call.argtypes = [ctypes.c_void_p] * 4
    return call
