"""Calls that XLA records in command buffers (CUDA graphs), which it replays without asking us.

What a call allocates while a graph records it must be there as long as the graph, copies of it and
their runs. CUDA counts these: a user object that the graph holds is destroyed behind the last one,
by a function of C that posts a semaphore. Python looks at the semaphores when it records the next
call: no Python runs in CUDA's threads, which may outlive it.

Calls that write the same memory never run at a time, in whatever graphs they are: they share what
they allocate, so that layers of a model have a few pieces of memory, and not one each.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any
from weakref import WeakValueDictionary

from ..core.cupy_module import cupy_module

# cuda.h: CU_STREAM_CAPTURE_MODE_RELAXED, CU_USER_OBJECT_NO_DESTRUCTOR_SYNC,
# CU_GRAPH_USER_OBJECT_MOVE.
_RELAXED, _NO_DESTRUCTOR_SYNC, _MOVE = 2, 1, 1
_SEMAPHORE_BYTES = 64  # of a sem_t, and more


class _Memory:
    """What one allocation of a call has, for as long as a graph holds it."""

    def __init__(self, memory: Any) -> None:
        self.memory = memory


# The semaphore of each graph that is not known to be gone, and the memory that it uses.
_held: list[tuple[Any, list[_Memory]]] = []
# (device, output of the call, which of its allocations, bytes) -> memory.
_shared: WeakValueDictionary[tuple[int, ...], _Memory] = WeakValueDictionary()
_lock = threading.RLock()


@functools.cache
def _driver() -> SimpleNamespace:
    cuda, c = ctypes.CDLL("libcuda.so.1"), ctypes.CDLL(None)
    pointer = ctypes.c_void_p
    cuda.cuThreadExchangeStreamCaptureMode.argtypes = [pointer]
    # Since CUDA 12.3 edges of the graph have data too, which are not asked for.
    newer = getattr(cuda, "cuStreamGetCaptureInfo_v3", None)
    capture_info = newer or cuda.cuStreamGetCaptureInfo_v2
    capture_info.argtypes = [pointer] * (7 if newer else 6)
    cuda.cuUserObjectCreate.argtypes = [pointer] * 3 + [ctypes.c_uint] * 2
    cuda.cuGraphRetainUserObject.argtypes = [pointer, pointer, ctypes.c_uint, ctypes.c_uint]
    unasked = (None,) * (3 if newer else 2)
    return SimpleNamespace(
        exchange_mode=cuda.cuThreadExchangeStreamCaptureMode,
        capture_info=lambda *asked: capture_info(*asked, *unasked),
        create=cuda.cuUserObjectCreate,
        retain=cuda.cuGraphRetainUserObject,
        init=c.sem_init,
        try_wait=c.sem_trywait,
        post=ctypes.cast(c.sem_post, pointer),
    )


@contextlib.contextmanager
def recorded(stream: int, device_index: int, output: int) -> Iterator[None]:
    """What this thread allocates by CuPy belongs to the graph that the stream is recording.

    output: the address of what the call writes.
    """
    cuda, driver = cupy_module().cuda, _driver()
    owners: list[_Memory] = []
    allocate = cuda.get_allocator()

    def allocate_and_keep(num_bytes: int) -> Any:
        key = device_index, output, len(owners), num_bytes
        with _lock:
            kept = _shared.get(key)
            if kept is None:
                kept = _shared[key] = _Memory(allocate(num_bytes))
        owners.append(kept)
        return kept.memory

    # Pools that have no memory left ask the driver for some, which is no part of the graph.
    mode = ctypes.c_int(_RELAXED)
    driver.exchange_mode(ctypes.addressof(mode))
    try:
        with cuda.using_allocator(allocate_and_keep):
            yield
        if owners:
            _hold(stream, owners)
    finally:
        driver.exchange_mode(ctypes.addressof(mode))


def _hold(stream: int, owners: list[_Memory]) -> None:
    """Let the graph hold them; for ever where this driver does not say when it is gone."""
    driver = _driver()
    status, number, graph = ctypes.c_int(), ctypes.c_uint64(), ctypes.c_void_p()
    semaphore = ctypes.create_string_buffer(_SEMAPHORE_BYTES)
    driver.init(semaphore, 0, 0)
    with _lock:
        _held[:] = [x for x in _held if driver.try_wait(x[0])]  # 0: it was posted
        _held.append((semaphore, owners))
    user_object = ctypes.c_void_p()
    code = driver.capture_info(
        stream,
        ctypes.addressof(status),
        ctypes.addressof(number),
        ctypes.addressof(graph),
    )
    if code == 0 and graph:
        begin, address = ctypes.addressof(user_object), ctypes.addressof(semaphore)
        if driver.create(begin, address, driver.post, 1, _NO_DESTRUCTOR_SYNC) == 0:
            driver.retain(graph, user_object, 1, _MOVE)
