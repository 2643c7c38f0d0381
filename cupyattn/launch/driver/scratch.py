"""Scratch memory of launches: bytes for one launch, or for one thread's launches on a stream, and
the arrival counters of split ones."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Hashable

from ...array import ArrayView
from ...core import recording
from ...core.cupy_module import as_stream, cupy_module
from .enqueue import cuda

Allocate = Callable[[int], tuple[int, object]]

# A launch splits only while it has fewer tiles than the GPU has slots for blocks.
_CAPACITY = 8192
# The handle of each thread's own default stream (cudaStreamPerThread): one for all these streams.
_PER_THREAD = 2
# (device, raw stream) -> address and owner; never of a stream of threads.
_counters: dict[tuple[int, int], tuple[int, object]] = {}
_lock = threading.Lock()
# As much as torch keeps for cuBLAS on a stream.
_MAX_KEPT_BYTES = 32 << 20
_MAX_KEPT_STREAMS = 16


class _Kept(threading.local):
    """What belongs to one thread.

    workspaces  (device, raw stream) -> bytes, address and owner
    counters    device -> address and owner, of the thread's default stream
    sign        tells the thread from all others, also from later ones of the same number
    """

    def __init__(self) -> None:
        self.workspaces: dict[tuple[int, int], tuple[int, int, object]] = {}
        self.counters: dict[int, tuple[int, object]] = {}
        self.sign = object()


_kept = _Kept()


def identity(stream: int) -> Hashable:
    """What tells streams apart in this process. Their handles do not where each thread has one."""
    return _kept.sign if stream == _PER_THREAD else stream


def allocator(like: ArrayView) -> Allocate:
    """A function from a number of bytes to their address and their owner, on like's device.

    The memory comes from like's framework, ordered on its current stream, so the owner may go as
    soon as the launch is enqueued. The function does not keep `like`.
    """
    if like.framework == "torch":
        torch, device = sys.modules["torch"], like.owner.device
        empty, uint8 = torch.empty, torch.uint8

        def allocate_torch(num_bytes: int) -> tuple[int, object]:
            memory = empty(num_bytes, dtype=uint8, device=device)
            if recording.current is not None:
                recording.keep(memory)
            return memory.data_ptr(), memory

        return allocate_torch
    index = like.device.index

    def allocate_cupy(num_bytes: int) -> tuple[int, object]:
        api = cuda()
        if api.get_device() == index:
            memory = api.alloc(num_bytes)
        else:
            with api.Device(index):
                memory = api.alloc(num_bytes)
        if recording.current is not None:
            recording.keep(memory)
        return memory.ptr, memory

    return allocate_cupy


def workspace(
    num_bytes: int, device_index: int, stream: int, allocate: Allocate
) -> tuple[int, object]:
    """The address of memory for launches that this thread enqueues next on a stream, and an owner.

    One thread's launches on a stream are ordered, so they share memory, which an allocation at each
    call would cost a tenth of the call. It is CuPy's: torch runs a graph's functions once in the
    graph's own pool, where nothing may be kept. What a graph being captured uses belongs to its
    pool.
    """
    if num_bytes > _MAX_KEPT_BYTES or cuda().is_capturing(stream):
        return allocate(num_bytes)
    workspaces = _kept.workspaces
    kept = workspaces.get((device_index, stream))
    if kept is None or kept[0] < num_bytes:
        if len(workspaces) >= _MAX_KEPT_STREAMS:
            workspaces.clear()
        built = _allocate_on(num_bytes, device_index, stream)
        kept = workspaces[device_index, stream] = num_bytes, *built
    if recording.current is not None:
        recording.keep(kept[2])
    return kept[1], kept[2]


def _allocate_on(num_bytes: int, device_index: int, stream: int) -> tuple[int, object]:
    """Memory from CuPy's pool of this stream: only later launches on it get what is let go."""
    api = cuda()
    with api.Device(device_index), as_stream(stream):
        memory = api.alloc(num_bytes)
    return memory.ptr, memory


def counters(count: int, device_index: int, stream: int, allocate: Allocate) -> tuple[int, object]:
    """The address of `count` zeroed uint32 counters for one launch on a stream, and an owner.

    Kernels leave counters as they found them, so launches on one stream share an array: they are
    ordered. Threads share one handle for their own default streams, and no array. A graph being
    captured may be replayed on any stream, so it gets an array of its own, zeroed inside the graph.
    """
    api = cuda()
    if count > _CAPACITY or api.is_capturing(stream):
        recording.spoil()  # each launch finds them zeroed
        address, owner = allocate(4 * count)
        api.runtime.memsetAsync(address, 0, 4 * count, stream)
        return address, owner
    return _counters.get((device_index, stream)) or _counters_of(device_index, stream)


def _counters_of(device_index: int, stream: int) -> tuple[int, object]:
    """The counters of a stream that `_counters` does not have."""
    if stream == _PER_THREAD:
        own = _kept.counters
        if device_index not in own:
            own[device_index] = _make(device_index, stream)
        return own[device_index]
    with _lock:
        if (device_index, stream) not in _counters:
            _counters[device_index, stream] = _make(device_index, stream)
        return _counters[device_index, stream]


def _make(device_index: int, stream: int) -> tuple[int, object]:
    """Counters that are zeroed on their stream, in memory that only later launches on it get once
    it is let go."""
    with cuda().Device(device_index), as_stream(stream):
        built = cupy_module().zeros(_CAPACITY, "uint32")
    return built.data.ptr, built
