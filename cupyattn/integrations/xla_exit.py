"""The end of a program of which XLA may still run calls.

A thread that asks for Python once the interpreter is being taken down never comes back. XLA's
client, whose last owner is often a global variable, then waits for that thread for ever. So the
results that are alive are waited for while Python still runs, and the clients are kept to the end:
what has no result that is alive, or begins too late, holds up nobody.
"""

from __future__ import annotations

import atexit
import ctypes
import os
import sys
import time
from collections.abc import Iterator
from types import CodeType
from typing import Any

_PERIOD = 0.001  # seconds between two looks


def settle_at_exit(codes: frozenset[CodeType]) -> None:
    """Before Python ends, settle calls: those of which threads are inside of one of `codes`.

    JAX must have been imported: what is registered last runs first.
    """
    atexit.register(_settle, codes, os.getpid())


def _settle(codes: frozenset[CodeType], process: int) -> None:
    for client in _clients():
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(client))
    if os.getpid() != process:
        return  # a fork has none of the threads that it could wait for
    for client in _clients():
        for x in client.live_arrays():
            while not _is_done(x):
                time.sleep(_PERIOD)
    while _is_running(codes):
        time.sleep(_PERIOD)


def _clients() -> Iterator[Any]:
    """XLA's clients, if there are any: to ask JAX for them would make some."""
    bridge: Any = sys.modules.get("jax._src.xla_bridge")
    is_ready = getattr(bridge, "backends_are_initialized", None)
    if is_ready is not None and is_ready():
        yield from bridge.backends().values()


def _is_done(x: Any) -> bool:
    try:
        return bool(x.is_deleted() or x.is_ready())
    except Exception:  # a computation that failed is over too
        return True


def _is_running(codes: frozenset[CodeType]) -> bool:
    """Whether a thread is inside of a function of theirs."""
    for frame in sys._current_frames().values():
        inner: Any = frame
        while inner is not None:
            if inner.f_code in codes:
                return True
            inner = inner.f_back
    return False
