"""What the clocks of CuPy and torch share: how a call is timed as it runs in a model.

Before a sample, L2 is emptied, other kernels' code displaces the call's from the instruction
caches, and a small kernel keeps the GPU busy until the host has enqueued the call.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from .between import CODE_BYTES

FLUSH_BYTES = 256 << 20  # four times the L2 of an H200
# How long the GPU is kept busy while the host enqueues a call. A sample whose call took the host
# longer is taken again with twice the time, so that the GPU does not wait for the host between the
# events; a call that waits for the GPU itself is always late, and stands as it is.
_HOLD_US = 100.0
_MAX_HOLD_US = 1600.0

# For the header of a result: what lay between two samples.
BETWEEN = {
    "calls_a_visit": 1,
    "flush_bytes": FLUSH_BYTES,
    "other_code_bytes": CODE_BYTES,
    "hold_us": _HOLD_US,
}


class Event(Protocol):
    """A CUDA event."""

    def record(self, stream: Any) -> Any: ...


class EventClock:
    """A stopwatch of CUDA events; a framework says how it makes them, and how it flushes L2.

    stream: where events are recorded; None is the framework's current one.
    """

    def __init__(self, stream: Any = None) -> None:
        self._stream = stream

    def _event(self) -> Event:
        raise NotImplementedError

    def _flush(self) -> None:
        """Enqueue a write of FLUSH_BYTES."""
        raise NotImplementedError

    def _run_other_code(self) -> None:
        """Enqueue kernels of other code."""
        raise NotImplementedError

    def _hold(self, us: float) -> None:
        """Enqueue what keeps the GPU busy for so many microseconds."""
        raise NotImplementedError

    def _has_passed(self, event: Any) -> bool:
        """Whether the GPU has come to an event."""
        raise NotImplementedError

    def _us_between(self, begin: Any, end: Any) -> float:
        raise NotImplementedError

    def wait(self) -> None:
        """Until the GPU has done all. Raises ContextLost if it does not respond."""
        raise NotImplementedError

    def visit(self, call: Callable[[], Any], calls: int) -> list[tuple[Event, Event]]:
        """Enqueue `calls` timed calls, each behind a flush, other code and a hold."""
        return [self._timed(call) for _ in range(calls)]

    def read(self, visit: list[tuple[Event, Event]]) -> list[float]:
        """µs of each call of a visit, after `wait`."""
        return [self._us_between(begin, end) for begin, end in visit]

    def _timed(self, call: Callable[[], Any]) -> tuple[Event, Event]:
        us = _HOLD_US
        while True:
            begin, end = self._event(), self._event()
            self._flush()
            self._run_other_code()
            self._hold(us)
            begin.record(self._stream)
            call()
            is_late = self._has_passed(begin)
            end.record(self._stream)
            if not is_late or us >= _MAX_HOLD_US:
                return begin, end
            us *= 2
