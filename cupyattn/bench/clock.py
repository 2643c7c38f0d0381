"""A stopwatch on one GPU, made of CuPy alone."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np

from ..core.cupy_module import cupy_module
from .timing import FLUSH_BYTES, PREHEAT_SECONDS, ContextLost, describe

_COPIED_BYTES = 1 << 30


class Clock:
    """The stopwatch of the current device, on the default stream, which torch's calls use too."""

    def __init__(self) -> None:
        self._cupy = cupy_module()
        self._stream = self._cupy.cuda.Stream.null
        self._scratch = self._cupy.cuda.alloc(FLUSH_BYTES)

    def visit(self, call: Callable[[], Any], calls: int) -> list[tuple[Any, Any]]:
        """Enqueue `calls` timed calls. The flush before each also hides the host's part of it."""
        event = self._cupy.cuda.Event
        pairs = []
        for _ in range(calls):
            begin, end = event(), event()
            self._scratch.memset_async(0, FLUSH_BYTES, self._stream)
            begin.record(self._stream)
            call()
            end.record(self._stream)
            pairs.append((begin, end))
        return pairs

    def read(self, visit: list[tuple[Any, Any]]) -> list[float]:
        """µs of each call of a visit, after `wait`."""
        elapsed = self._cupy.cuda.get_elapsed_time
        return [elapsed(begin, end) * 1e3 for begin, end in visit]

    def wait(self) -> None:
        try:
            self._cupy.cuda.runtime.deviceSynchronize()
        except Exception as error:
            raise ContextLost(describe(error)) from error

    def check_alive(self) -> None:
        """Raise ContextLost if the device no longer answers; any other state is fine."""
        self.wait()

    def preheat(self, seconds: float = PREHEAT_SECONDS) -> None:
        """Keep the memory busy until clocks have settled."""
        stop = time.perf_counter() + seconds
        while time.perf_counter() < stop:
            for _ in range(10):
                self._scratch.memset_async(0, FLUSH_BYTES, self._stream)
            self.wait()

    def copy_gbps(self) -> float:
        """GB/s, read and written, of a copy in the GPU's memory: what decode runs against."""
        source, target = (self._cupy.cuda.alloc(_COPIED_BYTES) for _ in range(2))
        source.memset_async(1, _COPIED_BYTES, self._stream)

        def copy() -> None:
            target.copy_from_device_async(source, _COPIED_BYTES, self._stream)

        self.preheat()
        visit = self.visit(copy, 10)
        self.wait()
        return 2 * _COPIED_BYTES / float(np.median(self.read(visit))) / 1e3
