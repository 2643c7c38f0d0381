"""What happens around each public call: lines before and behind it, and its inputs in a file."""

from __future__ import annotations

import contextlib
import functools
import itertools
import logging
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

from ..core import log, recording
from . import dump
from .call import Call, call_of
from .launches import Launched, watched
from .statistics import statistics
from .words import all_leaves, described, is_array, leaves, lines_of, view_of

_LOG = logging.getLogger("cupyattn")
_LOGGER = "cupyattn.calls"


class _Thread(threading.local):
    """Whether this thread is in an observed call, and how many calls it is in that consist of
    others."""

    is_inside, depth = False, 0


_thread = _Thread()
_numbers = itertools.count(1)


@functools.cache
def level() -> int:
    """Which lines are asked for, read at the first call. Raises ArgumentError."""
    return log.level()


def observe(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The call itself, told of where it is asked for. Calls inside of it are not told of, but for
    those of an engine's backend and of several GPUs."""
    if _thread.is_inside or _is_traced():
        return function(*args, **kwargs)
    recording.spoil()  # a launch that XLA repeats would not be told of
    wanted, saves = level(), dump.folder() is not None
    call = saved = None
    is_on_gpu = False
    with _harmless(function):
        call = call_of(next(_numbers), function, args, kwargs)
        saved = dump.save(call) if saves else None
        _say_arguments(call, wanted)
        is_on_gpu = "cuda" in call.device_kinds()
    if call is None:
        return function(*args, **kwargs)
    started = time.perf_counter()
    with _inside(call), watched(is_on_gpu) as launches:
        try:
            result = function(*args, **kwargs)
        except BaseException as error:
            with _harmless(function):
                _say(wanted, f"call {call.number}: {type(error).__name__}: {error}")
                if saves:
                    dump.save_error(call, saved, error)
            raise
        seconds = time.perf_counter() - started
    with _harmless(function):
        _say_result(call, wanted, (result, launches, seconds))
        if saves:
            dump.save_result(call, saved, result, launches)
    return result


@contextlib.contextmanager
def _harmless(function: Any) -> Iterator[None]:
    """Whatever is said or saved of a call goes wrong, the call goes on."""
    try:
        yield
    except Exception as error:
        name = function.__qualname__
        _LOG.warning("cupyattn: a call of %s cannot be told of or saved: %r", name, error)


def _is_traced() -> bool:
    """Whether torch traces or exports, where arrays have no memory: calls of the graph are told of
    as it runs."""
    torch = sys.modules.get("torch")
    asks = getattr(getattr(torch, "compiler", None), "is_compiling", None)
    return asks is not None and bool(asks())


@contextlib.contextmanager
def _inside(call: Call) -> Iterator[None]:
    consists_of_calls = call.consists_of_calls
    before = _thread.is_inside, _thread.depth
    _thread.is_inside, _thread.depth = not consists_of_calls, before[1] + consists_of_calls
    try:
        yield
    finally:
        _thread.is_inside, _thread.depth = before


# --- lines ---


def _say(wanted: int, text: str) -> None:
    if wanted:
        log.logger(_LOGGER).info("cupyattn: %s%s", "  " * _thread.depth, text)


def _say_arguments(call: Call, wanted: int) -> None:
    if not wanted:
        return
    lines = [f"call {call.number}: {call.name}"]
    if wanted >= log.ARGUMENTS:
        if call.owner is not None and not call.function.__qualname__.endswith("__init__"):
            lines.append(f"  of {call.owner!r}")
        lines += lines_of(call.unusual())
    if wanted >= log.STATISTICS:
        lines += _statistics(call.arguments())
    _say(wanted, "\n".join(lines))


def _say_result(call: Call, wanted: int, outcome: tuple[Any, list[Launched], float]) -> None:
    if wanted < log.ARGUMENTS:
        return
    result, launches, seconds = outcome
    lines = [f"call {call.number}: done in {seconds * 1e6:,.0f} us of the host"]
    if result is not None:
        lines += [f"  gives {described(name, x)}" for name, x in leaves("result", result)]
    lines += [f"  launched {launch}" for launch in launches] or ["  launched nothing"]
    lines += [f"    {launch.constants}" for launch in launches[:1] if launch.constants]
    if wanted >= log.STATISTICS and result is not None:
        lines += _statistics([("result", result)])
    _say(wanted, "\n".join(lines))


def _statistics(arguments: list[tuple[str, Any]]) -> list[str]:
    """Lines of all arrays with memory, for which the GPU is waited for."""
    lines = []
    for name, x in all_leaves(arguments):
        view = view_of(x, name) if is_array(x) else None
        if view is not None and "workspace" not in name:
            lines.append(f"  {name}: {statistics(view)}")
    return ["  elements, for which the device was waited for:", *lines] if lines else []
