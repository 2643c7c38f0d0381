"""Scratch memory of split launches: the arrival counters."""

from __future__ import annotations

import threading

from .. import dtypes
from ..array import ArrayView, current_stream, empty, view

# A launch splits only while it has fewer tiles than the GPU has slots for blocks.
_CAPACITY = 8192
_counters: dict[tuple[int, int], object] = {}
_lock = threading.Lock()


def counters(like: ArrayView, count: int) -> tuple[int, object]:
    """The address of `count` zeroed uint32 counters for one launch on like's stream, and an owner.

    Kernels leave counters as they found them, so launches on one stream share an array: they are
    ordered. A graph being captured may be replayed on any stream, so it gets an array of its own,
    zeroed inside the graph.
    """
    from cupy.cuda import runtime

    device = like.device.index
    stream = current_stream(like)
    if count > _CAPACITY or runtime.streamIsCapturing(stream):
        own = empty((count,), dtypes.int32, like)
        address = view(own, "scratch").ptr
        runtime.memsetAsync(address, 0, 4 * count, stream)
        return address, own
    found = _counters.get((device, stream))
    if found is None:
        found = _make(device, stream)
    return found.data.ptr, found  # type: ignore[attr-defined]


def _make(device: int, stream: int) -> object:
    import cupy

    with _lock:
        if (device, stream) not in _counters:
            with cupy.cuda.Device(device):
                made = cupy.zeros(_CAPACITY, cupy.uint32)
                cupy.cuda.get_current_stream().synchronize()
            _counters[device, stream] = made
        return _counters[device, stream]

