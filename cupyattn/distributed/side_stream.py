"""A stream beside the caller's, on which collectives run while kernels do."""

from __future__ import annotations

from typing import Any

from ..array import Device
from ..core.cupy_module import cupy_module

_HIGHEST = -5  # CUDA takes what it has instead, if that is lower


class SideStream:
    """Work beside that of the caller's stream, in an order that events keep; nothing waits on the
    host. On the CPU, where calls end when they return, it does nothing.

    handle   of the stream; None on the CPU
    """

    def __init__(self, device: Device) -> None:
        self._device = device
        self.handle: int | None = None
        self._marks: list[Any] = []
        self._used = 0
        self._last: tuple[int, Any] | None = None
        if device.kind == "cuda":
            cuda = cupy_module().cuda
            with cuda.Device(device.index):
                # Blocks of collectives are few, and go before those of a kernel that fills the GPU.
                self._stream = cuda.Stream(non_blocking=True, priority=_HIGHEST)
                self._begin = cuda.Event(disable_timing=True)
                self._end = cuda.Event(disable_timing=True)
            self.handle = self._stream.ptr

    def begin(self, stream: int | None) -> None:
        """Let the side stream wait for all that the caller's has been given."""
        self._used = 0
        if self.handle is not None:
            self._record(self._begin, stream)
            self._wait(self.handle, self._begin)

    def mark(self) -> int:
        """A mark behind all that the side stream has been given; they count from 0 at `begin`."""
        if self.handle is not None:
            if self._used == len(self._marks):
                with cupy_module().cuda.Device(self._device.index):
                    self._marks.append(cupy_module().cuda.Event(disable_timing=True))
            self._record(self._marks[self._used], self.handle)
        self._used += 1
        return self._used - 1

    def wait(self, stream: int | None, mark: int) -> None:
        """Let the caller's stream wait for a mark."""
        if self.handle is not None:
            self._wait(stream, self._marks[mark])

    def enter(self, stream: int | None) -> None:
        """Before a call that uses memory which the one before used: on another stream it waits."""
        if self._last is not None and self._last[0] != stream and not self._is_capturing(stream):
            self._wait(stream, self._last[1])

    def leave(self, stream: int | None) -> None:
        """Behind such a call."""
        if self.handle is not None and not self._is_capturing(stream):
            self._record(self._end, stream)
            self._last = stream or 0, self._end

    def _record(self, event: Any, stream: int | None) -> None:
        cupy_module().cuda.runtime.eventRecord(event.ptr, stream or 0)

    def _wait(self, stream: int | None, event: Any) -> None:
        cupy_module().cuda.runtime.streamWaitEvent(stream or 0, event.ptr)

    def _is_capturing(self, stream: int | None) -> bool:
        return bool(cupy_module().cuda.runtime.streamIsCapturing(stream or 0))
