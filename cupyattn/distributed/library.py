"""The transport over a library: its collectives, with failures of ranks noticed and said."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np

from ..core.cupy_module import cupy_module
from ..errors import CupyAttnError, DeviceError
from . import windows
from .channels import Channel
from .ranks import Ranks, in_time
from .transport import Transport, Window


class Calls(Protocol):
    """The collectives of one library, for ranks that have met. Arrays and streams as Transport's.

    library   its name and release, in words
    """

    library: str
    on_gpu: bool
    can_capture: bool

    def all_to_all(self, out: Any, given: Any, stream: int | None) -> None: ...

    def all_gather(self, out: Any, given: Any, stream: int | None) -> None: ...

    def reduce_scatter(self, out: Any, given: Any, stream: int | None) -> None: ...

    def part(
        self, members: Sequence[int], ranks: Ranks
    ) -> tuple[Callable[[Ranks], Calls], Channel]:
        """What makes the calls of these ranks among each other, once they have met over the
        channel that is given with it. All ranks call it."""

    def failure(self) -> str | None:
        """What the library has noticed by itself since it last returned."""

    def abort(self) -> None:
        """Let what waits for peers end. It may be called from another thread, and may take long."""

    def close(self) -> None:
        """Give back what was made here. It may wait for the other ranks."""

    def symmetric(self) -> windows.Source | None:
        """Windows of this library's own."""


# Calls that graphs may hold. A graph asks its communicator when it is destroyed, and the process
# would end badly if that had been freed before.
_KEPT: list[Calls] = []


class LibraryTransport:
    """Collectives of a library among ranks that have met."""

    def __init__(self, calls: Calls, ranks: Ranks) -> None:
        self.rank, self.size = ranks.rank, ranks.size
        self.hosts: Sequence[int] = ranks.hosts
        self.on_gpu, self.can_capture = calls.on_gpu, calls.can_capture
        self._calls, self._ranks = calls, ranks
        self._windows: list[Window] = []
        self._sources = "not asked for yet"
        self._is_in_graphs = False
        if self.on_gpu:  # what barriers send: made here, since a graph could not allocate it
            self._own, self._all = (cupy_module().zeros(n, np.uint8) for n in (1, self.size))
        ranks.ask = calls.failure
        ranks.on_failure.append(self._give_up)

    @property
    def name(self) -> str:
        hosts = len(set(self.hosts))
        where = "" if hosts == 1 else f", {hosts} hosts"
        return f"{self._calls.library}{where}, windows: {self._sources}"

    def all_to_all(self, out: Any, given: Any, stream: int | None) -> None:
        self._do(self._calls.all_to_all, out, given, stream)

    def all_gather(self, out: Any, given: Any, stream: int | None) -> None:
        self._do(self._calls.all_gather, out, given, stream)

    def reduce_scatter(self, out: Any, given: Any, stream: int | None) -> None:
        self._do(self._calls.reduce_scatter, out, given, stream)

    def barrier(self, stream: int | None) -> None:
        if not self.on_gpu:
            self.share_bytes(b"")
            return
        self._do(self._calls.all_gather, self._all, self._own, stream)

    def share_bytes(self, data: bytes) -> list[bytes]:
        return self._ranks.share("share_bytes", data)

    def window(self, nbytes: int) -> Window | None:
        if not self.on_gpu:
            return None
        window, self._sources = windows.opened(self._ranks, self._calls.symmetric(), nbytes)
        if window is not None:
            self._windows.append(window)
        return window

    def split(self, members: Sequence[int]) -> Transport:
        make, channel = self._ranks.in_time(
            "making a part of the group", lambda: self._calls.part(members, self._ranks)
        )
        facts = {"gpu": self._ranks.facts[self.rank].get("gpu", "")}
        ranks = Ranks(channel, facts, self._ranks.seconds)
        # Whoever waits in the part waits for ranks of a group that has failed.
        self._ranks.on_failure.append(lambda: ranks.fail(str(self._ranks.reason)))
        return LibraryTransport(make(ranks), ranks)

    def failure(self) -> str | None:
        return self._ranks.reason

    def abort(self, reason: str) -> None:
        self._ranks.fail(reason, tell=True)

    def close(self) -> None:
        for window in self._windows:
            with contextlib.suppress(Exception):  # memory of a rank that has ended
                window.close()
        self._windows.clear()
        self._ranks.stop()
        if self._is_in_graphs:
            _KEPT.append(self._calls)
        elif self._ranks.reason is None:
            try:
                self._ranks.in_time("closing the group", self._calls.close, 5.0)
            except Exception as error:  # the others are gone, or have not come to close theirs
                self._ranks.fail(f"the group was closed ({error})")

    def _do(self, call: Callable[..., None], out: Any, given: Any, stream: int | None) -> None:
        if stream and self.on_gpu and not self._is_in_graphs:
            runtime = cupy_module().cuda.runtime
            self._is_in_graphs = bool(runtime.streamIsCapturing(stream))
        try:
            call(out, given, stream)
        except CupyAttnError:
            raise
        except Exception as error:
            # A connection breaks before the watching thread has seen why.
            self._wait_for_reason(0.3)
            self._ranks.fail(f"{self._calls.library} failed: {error}")
            raise DeviceError(self._ranks.reason) from error

    def _wait_for_reason(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        while self._ranks.reason is None and time.monotonic() < end:
            time.sleep(0.01)

    def _give_up(self) -> None:
        """Abort in a thread: a library that hangs there may not hold this one."""
        try:
            in_time("aborting", self._calls.abort, 1.0)
        except Exception:
            pass  # the reason is known already; a library that cannot abort has no more to say
