"""What the clocks of CuPy and torch share: a flush of L2, then a call between two events."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Protocol

FLUSH_BYTES = 256 << 20  # four times the L2 of an H200
# While the GPU flushes, the host enqueues the call. One flush takes 65 us on an H200. A slow host
# needs more than that for some calls: the GPU would wait for it between the events, and the time
# of the host would count as the kernel's.
_HIDDEN_HOST_US = 250.0


class Event(Protocol):
    """A CUDA event."""

    def record(self, stream: Any) -> Any: ...


class EventClock:
    """A stopwatch of CUDA events; a framework says how it makes them, and how it flushes L2.

    stream: where events are recorded; None is the framework's current one.
    """

    def __init__(self, stream: Any = None) -> None:
        self._stream = stream
        self._num_flushes = 0

    def _event(self) -> Event:
        raise NotImplementedError

    def _flush(self) -> None:
        """Enqueue a write of FLUSH_BYTES."""
        raise NotImplementedError

    def _us_between(self, begin: Any, end: Any) -> float:
        raise NotImplementedError

    def wait(self) -> None:
        """Until the GPU has done all. Raises ContextLost if it does not respond."""
        raise NotImplementedError

    def visit(self, call: Callable[[], Any], calls: int) -> list[tuple[Event, Event]]:
        """Enqueue `calls` timed calls. The flushes before each also hide the host's part of it."""
        if not self._num_flushes:
            self._num_flushes = self._count_flushes()
        return [self._timed(call, self._num_flushes) for _ in range(calls)]

    def read(self, visit: list[tuple[Event, Event]]) -> list[float]:
        """µs of each call of a visit, after `wait`."""
        return [self._us_between(begin, end) for begin, end in visit]

    def _timed(self, call: Callable[[], Any], num_flushes: int) -> tuple[Event, Event]:
        begin, end = self._event(), self._event()
        for _ in range(num_flushes):
            self._flush()
        begin.record(self._stream)
        call()
        end.record(self._stream)
        return begin, end

    def _count_flushes(self) -> int:
        """As many as take _HIDDEN_HOST_US of this GPU."""
        pairs = [self._timed(self._flush, 1) for _ in range(3)]
        self.wait()
        return max(1, math.ceil(_HIDDEN_HOST_US / min(self.read(pairs))))
