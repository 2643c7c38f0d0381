"""What a GPU tells of its collectives, so that one that waits for a peer for ever is noticed.

A rank that lives and does not come leaves the others' collectives running: NCCL sees no error, and
calls on the host have returned long ago. So each stream writes into host memory when a collective
begins and when it ends, in CUDA graphs too, and a thread looks at what is there.
"""

from __future__ import annotations

import ctypes
import functools
import time
from typing import Any

from ..core.cupy_module import cupy_module
from ..engine.staging import alloc_pinned
from ..launch.driver.enqueue import cuda

_STREAMS = 64
# What a stream writes in one word of 8 bytes: where it is, and beside it that this is news. A graph
# writes the same every time, so the thread takes the news away to see whether more comes.
_INSIDE, _OUTSIDE, _NEWS = 1, 2, 1 << 32
_NO_BARRIER = 1  # CU_STREAM_WRITE_VALUE_NO_MEMORY_BARRIER
_RELAXED = 2  # CU_STREAM_CAPTURE_MODE_RELAXED

# A graph may be replayed once more after its group is closed; what it writes must be there.
_kept: list[object] = []


class Progress:
    """The words of a rank's streams on its GPU."""

    def __init__(self, driver: Driver, device: int) -> None:
        self._driver, self._device = driver, device
        words, memory = alloc_pinned(2 * _STREAMS)
        words[:] = 0
        _kept.append(memory)
        self._words = words.reshape(_STREAMS, 2)  # [stream, (where, news)]
        self._places: dict[int, int] = {}
        self._since: list[float | None] = [None] * _STREAMS
        self.is_working = driver.can_write(words.ctypes.data)
        self._is_in_graphs = self.is_working and driver.can_capture(words.ctypes.data)
        words[:] = 0

    def begin(self, stream: int | None) -> None:
        self._mark(stream or 0, _INSIDE | _NEWS)

    def end(self, stream: int | None) -> None:
        self._mark(stream or 0, _OUTSIDE | _NEWS)

    def is_stuck(self, seconds: float) -> bool:
        """Whether a stream has been in one collective for so long, asked now and then."""
        now = time.monotonic()
        for place in range(min(len(self._places), _STREAMS)):
            since, (where, news) = self._since[place], self._words[place].tolist()
            if where != _INSIDE:
                self._since[place] = None
            elif since is None or news:
                self._words[place, 1] = 0
                self._since[place] = now
            elif now - since > seconds:
                return True
        return False

    def _mark(self, stream: int, value: int) -> None:
        place = self._places.get(stream)
        if place is None:
            # More streams than words take turns: a mark of one may hide another's.
            place = self._places[stream] = len(self._places) % _STREAMS
        if not self._is_in_graphs and cuda().is_capturing(stream):
            return
        address = self._words.ctypes.data + 8 * place
        if self._driver.write(stream, address, value):
            # A thread that has made no call of the runtime yet has no context.
            cupy_module().cuda.runtime.setDevice(self._device)
            self._driver.write(stream, address, value)


class Driver:
    """Writes of a stream into host memory, by the driver itself: no kernel, and no engine."""

    def __init__(self) -> None:
        self._library = library = ctypes.CDLL("libcuda.so.1")
        self._write = library.cuStreamWriteValue64_v2
        self._write.argtypes = [ctypes.c_void_p, ctypes.c_uint64, ctypes.c_uint64, ctypes.c_uint]

    def write(self, stream: int, address: int, value: int) -> int:
        """The driver's code: 0 if the stream will write `value`."""
        code: int = self._write(stream, address, value, _NO_BARRIER)
        return code

    def can_write(self, address: int) -> bool:
        """Whether this GPU's streams write at all, tried on one of its own."""
        stream = cupy_module().cuda.Stream(non_blocking=True)
        code = self.write(stream.ptr, address, _OUTSIDE)
        stream.synchronize()
        return code == 0

    def can_capture(self, address: int) -> bool:
        """Whether graphs hold such writes, tried on a stream of its own."""
        library, stream = self._library, cupy_module().cuda.Stream(non_blocking=True)
        graph, made = ctypes.c_void_p(), ctypes.c_void_p()
        handle = ctypes.c_void_p(stream.ptr)
        if library.cuStreamBeginCapture_v2(handle, _RELAXED):
            return False
        code = self.write(stream.ptr, address, _OUTSIDE)
        code |= library.cuStreamEndCapture(handle, ctypes.byref(graph))
        if graph.value:
            code |= library.cuGraphInstantiateWithFlags(ctypes.byref(made), graph, 0)
            if made.value:
                library.cuGraphExecDestroy(made)
            library.cuGraphDestroy(graph)
        return code == 0


@functools.cache
def driver() -> Any:
    """None where libcuda has no such call: before CUDA 11.7."""
    try:
        return Driver()
    except (AttributeError, OSError):
        return None


def of_this_gpu() -> Progress | None:
    """For the current device; None where its driver has no such writes."""
    found = driver()
    if found is None:
        return None
    made = Progress(found, int(cupy_module().cuda.Device().id))
    return made if made.is_working else None
