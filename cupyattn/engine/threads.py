"""A wrapper that several threads share: one of them at a time, and none runs another's plan.

A thread that has planned expects its own plan to be run. Once another thread has planned, it has
been replaced, and running the new one would be a wrong answer. A thread that has never planned runs
whatever plan there is: some threads plan, others run.
"""

from __future__ import annotations

import contextlib
import os
import threading
from typing import Any
from weakref import WeakSet

from ..errors import PlanError


class Turns:
    """Whose turn it is to use a wrapper.

    planning   held while the wrapper changes
    running    held during a run: the same lock on a GPU, where runs share a workspace and read what
               plan() writes; none on the CPU, where a run needs only the plan that it began with
    is_shared  whether several threads have planned
    """

    def __init__(self, is_on_gpu: bool = False) -> None:
        self.is_shared = False
        self._planner: int | None = None
        self._thread = threading.local()
        # A signal handler may use the wrapper that it has interrupted.
        self.planning = threading.RLock()
        self.open(is_on_gpu)
        _all_turns.add(self)

    def open(self, is_on_gpu: bool) -> None:
        self._is_on_gpu = is_on_gpu
        self.running: Any = self.planning if is_on_gpu else contextlib.nullcontext()

    def renew(self) -> None:
        """Let go of a lock that no thread will."""
        self.planning = threading.RLock()
        self.open(self._is_on_gpu)

    def __reduce__(self) -> Any:
        return Turns, (self._is_on_gpu,)  # a copied wrapper has threads of its own

    def begin(self) -> object:
        """A sign, for a plan to bear, that it is this thread's."""
        thread = threading.get_ident()
        if self._planner != thread:
            self.is_shared = self.is_shared or self._planner is not None
            self._planner = thread
        self._thread.own = sign = object()
        return sign

    @property
    def own(self) -> object:
        """The sign of this thread's last plan; None if it has none, and runs any."""
        return getattr(self._thread, "own", None)

    @own.setter
    def own(self, sign: object) -> None:
        self._thread.own = sign

    def check(self, owner: object) -> None:
        """PlanError if this thread has a plan and it is another one."""
        if self.own is not None and self.own is not owner:
            raise PlanError(
                "run: another thread has planned this wrapper since this thread did; use a wrapper "
                "for each thread, or plan in threads that do not run it"
            )

    def end(self) -> None:
        """This thread runs plans of others from now on."""
        self.own = None


_all_turns: WeakSet[Turns] = WeakSet()


def _renew_all() -> None:
    for turns in [*_all_turns]:
        turns.renew()


# A fork copies locks as they are, and the threads that hold them are not there any more.
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_renew_all)
