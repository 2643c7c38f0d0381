"""What one call launches, kept so that an equal call on the same memory can launch it again.

A compiled function of another framework calls us with the same addresses time and again. Then
nothing is left to find out: arguments are packed, and scratch memory is there.

Functions that launch, that look up calls, or that make memory tell the recording of their thread.
One that did anything but launch what the call cache had found is not `whole`, and of no use.
"""

from __future__ import annotations

from threading import get_ident
from typing import Any


class Recording:
    """A context, in which this thread makes one call.

    launches  (launch, its params struct) in their order
    kept      owners of all memory that launches use
    is_whole  whether launches alone do all that the call did
    """

    __slots__ = ("_thread", "is_whole", "kept", "launches")

    def __init__(self) -> None:
        self.launches: list[tuple[Any, bytes]] = []
        self.kept: list[object] = []
        self.is_whole = False
        self._thread = 0

    def __enter__(self) -> Recording:
        global current
        if current is None:  # else another thread is at it, and this call goes without
            self._thread, self.is_whole, current = get_ident(), True, self
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        global current
        if current is self:
            current = None
        self.is_whole &= kind is None and bool(self.launches)

    @property
    def is_mine(self) -> bool:
        """Whether it is this thread's."""
        return self._thread == get_ident()


# The one that is being made. Hot paths compare it with None, and nearly always that is all.
current: Recording | None = None


def add_launch(launch: Any, params: bytes) -> None:
    """A launch with this struct."""
    recording = current
    if recording is not None and recording.is_mine:
        recording.launches.append((launch, params))


def keep(owner: object) -> None:
    """The owner of memory that launches use."""
    recording = current
    if recording is not None and recording.is_mine:
        recording.kept.append(owner)


def spoil() -> None:
    """This thread does what no launch repeats: it checks arguments, makes arrays, or copies."""
    recording = current
    if recording is not None and recording.is_mine:
        recording.is_whole = False
