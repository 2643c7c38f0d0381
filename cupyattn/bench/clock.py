"""A stopwatch on one GPU, made of CuPy alone."""

from __future__ import annotations

import time
from typing import Any

import numpy as np

from ..core.cupy_module import cupy_module
from .between import Between
from .event_clock import FLUSH_BYTES, EventClock
from .timing import PREHEAT_SECONDS, ContextLost, describe

_COPIED_BYTES = 1 << 30


class Clock(EventClock):
    """The stopwatch of the current device, on the default stream, which torch's calls use too."""

    def __init__(self) -> None:
        self._cupy = cupy_module()
        self._null = self._cupy.cuda.Stream.null
        super().__init__(self._null)
        self._scratch = self._cupy.cuda.alloc(FLUSH_BYTES)
        self._between = Between()

    def _event(self) -> Any:
        return self._cupy.cuda.Event()

    def _flush(self) -> None:
        self._scratch.memset_async(0, FLUSH_BYTES, self._null)

    def _run_other_code(self) -> None:
        self._between.run_code(self._null)

    def _hold(self, us: float) -> None:
        self._between.hold(us, self._null)

    def _has_passed(self, event: Any) -> bool:
        return bool(event.done)

    def _us_between(self, begin: Any, end: Any) -> float:
        return float(self._cupy.cuda.get_elapsed_time(begin, end)) * 1e3

    def wait(self) -> None:
        try:
            self._cupy.cuda.runtime.deviceSynchronize()
        except Exception as error:
            raise ContextLost(describe(error)) from error

    def check_alive(self) -> None:
        """Raise ContextLost if the device no longer responds; any other state is fine."""
        self.wait()

    def preheat(self, seconds: float = PREHEAT_SECONDS) -> None:
        """Keep the memory busy until clocks have settled."""
        stop = time.perf_counter() + seconds
        while time.perf_counter() < stop:
            for _ in range(10):
                self._flush()
            self.wait()

    def copy_gbps(self) -> float:
        """GB/s, read and written, of a copy in the GPU's memory: what decode runs against."""
        source, target = (self._cupy.cuda.alloc(_COPIED_BYTES) for _ in range(2))
        source.memset_async(1, _COPIED_BYTES, self._null)

        def copy() -> None:
            target.copy_from_device_async(source, _COPIED_BYTES, self._null)

        self.preheat()
        visit = self.visit(copy, 10)
        self.wait()
        return 2 * _COPIED_BYTES / float(np.median(self.read(visit))) / 1e3
