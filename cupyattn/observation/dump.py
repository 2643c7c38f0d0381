"""CUPYATTN_DUMP: the inputs of calls in files, and what the calls gave.

A call is saved as NAME.json and NAME.npz before it is made, so that they are there even if it ends
the process; behind it come NAME.result.json and NAME.result.npz. A run() of a wrapper is saved with
the steps that it follows: how the wrapper was made, and its last plan().
"""

from __future__ import annotations

import fnmatch
import functools
import itertools
import json
import logging
import os
import sys
import time
import weakref
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from .._version import build_version
from ..core import env
from ..core.folders import is_writable
from ..errors import ArgumentError
from .call import MADE_OF_CALLS, Call
from .encoding import TABLES, Encoder, TooLargeError
from .launches import Launched
from .statistics import is_capturing
from .words import all_leaves, is_array, view_of

SCHEMA = 1
_LOG = logging.getLogger("cupyattn")
_PLANS = "plan", "begin_forward", "fast_decode_plan"
_MIB = 1 << 20
_counter = itertools.count(1)


@functools.cache
def folder() -> Path | None:
    """Where calls are saved; None where nobody asks for it. Makes the folder.

    Raises ArgumentError for one that cannot be written, for limits that are no numbers, and for
    names of calls that are never saved.
    """
    name = env.DUMP.get()
    if not name:
        return None
    path = Path(name).expanduser().absolute()
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ArgumentError(
            f"{env.DUMP.name}: {path} cannot be made ({error}); name a folder that can be written"
        ) from error
    if not is_writable(path):
        raise ArgumentError(f"{env.DUMP.name}: {path} cannot be written; name another folder")
    for variable in (env.DUMP_CALLS, env.DUMP_LIMIT):
        _number(variable)
    for pattern in _patterns():
        if pattern.removeprefix("cupyattn.").partition(".")[0] in MADE_OF_CALLS:
            raise ArgumentError(
                f"{env.DUMP_NAMES.name}: {pattern}: calls of cupyattn.serving and "
                f"cupyattn.distributed are not saved; {env.LOG.name}=3 says what they are given"
            )
    return path


def _patterns() -> list[str]:
    return [x.strip() for x in env.DUMP_NAMES.get().split(",")]


def _number(variable: env.Variable) -> int:
    text = variable.get().strip()
    if not text.isdecimal():
        raise ArgumentError(f"{variable.name}: got {text!r}; wanted a whole number from 0 on")
    return int(text)


@dataclass
class _Step:
    """A call as its file has it, with the elements of its arrays and the page numbers in them."""

    facts: dict[str, Any]
    arrays: dict[str, np.ndarray]
    tables: list[np.ndarray] = field(default_factory=list)


@dataclass
class _Wrapper:
    """What made an object, what it planned last, and what before that."""

    made_by: _Step
    plan: _Step | None = None
    plan_before: _Step | None = None

    def steps(self) -> list[_Step]:
        return [self.made_by, *([] if self.plan is None else [self.plan])]


_wrappers: weakref.WeakKeyDictionary[Any, _Wrapper] = weakref.WeakKeyDictionary()


# --- before a call ---


def save(call: Call) -> Path | None:
    """Save the call, or remember it for calls that follow from it. Returns the file, if there is
    one."""
    name = call.name.rpartition(".")[2]
    if call.consists_of_calls:
        if _is_named(call):
            _say_once(call.name)
        return None
    if _is_captured(call):
        return None
    if name == "__init__":
        _wrappers[call.owner] = _Wrapper(_encode(call, 0, []))
        return None
    if name in _PLANS:
        known = _wrappers.get(_planned_by(call))
        if known is not None:
            known.plan_before, known.plan = known.plan, _encode(call, 1, [])
        return None
    if not _is_wanted(call):
        return None
    if call.owner is not None and not _is_wrapper(call.owner):
        why = "its wrapper was made while a graph was captured"
        _LOG.warning("cupyattn: call %d, %s, is not saved: %s", call.number, call.name, why)
        return None
    try:
        return _write(call)
    except TooLargeError:
        limit = env.DUMP_LIMIT
        size = f"more than {limit.get()} MiB; raise {limit.name}"
        _LOG.warning("cupyattn: call %d, %s, is not saved: %s", call.number, call.name, size)
        return None


@functools.cache
def _say_once(name: str) -> None:
    about = "calls of an engine's backend and of several GPUs are not; CUPYATTN_LOG=3 tells of them"
    _LOG.warning("cupyattn: %s is not saved: %s", name, about)


def _planned_by(call: Call) -> Any:
    """The wrapper that a call plans."""
    return call.argument("wrapper") if call.owner is None else call.owner


def _is_named(call: Call) -> bool:
    own = call.name.partition(".")[2]
    return any(fnmatch.fnmatchcase(x, p) for x in (own, call.name) for p in _patterns())


def _is_wanted(call: Call) -> bool:
    return _is_named(call) and next(_counter) <= _number(env.DUMP_CALLS)


def _is_captured(call: Call) -> bool:
    """Whether it belongs to a graph, for which nothing can be read."""
    views = (view_of(x, name) for name, x in all_leaves(call.arguments()) if is_array(x))
    return any(is_capturing(view) for view in views if view is not None)


def _encode(call: Call, number: int, tables: list[np.ndarray]) -> _Step:
    encoder = Encoder(_number(env.DUMP_LIMIT) * _MIB, lambda x: 0 if _is_wrapper(x) else None)
    encoder.tables = [*tables]
    if not call.argument("sparse_mla_top_k"):
        for name, x in call.arguments():
            view = view_of(x, name) if name in TABLES and is_array(x) else None
            if view is not None and view.dtype.name in ("int32", "int64"):
                key = f"{number}.{name}"
                encoder.encode(name, x, key)
                encoder.tables.append(encoder.arrays[key].view(view.dtype.name))
    function = call.function
    facts = {
        "name": call.name,
        "module": function.__module__,
        "function": function.__qualname__,
        "class": None if call.owner is None else _class_path(call.owner),
        "positional": [
            [name, encoder.encode(name, x, f"{number}.{name}")] for name, x in call.positional
        ],
        "by_name": {
            name: encoder.encode(name, x, f"{number}.{name}") for name, x in call.by_name.items()
        },
    }
    encoder.join()
    return _Step(facts, encoder.arrays, encoder.tables[len(tables) :])


def _is_wrapper(x: Any) -> bool:
    try:
        return x in _wrappers
    except TypeError:  # no weak reference to it
        return False


def _class_path(x: Any) -> str:
    return f"{type(x).__module__}:{type(x).__qualname__}"


def _write(call: Call, error: BaseException | None = None) -> Path:
    owner = _planned_by(call)
    known = _wrappers.get(owner) if owner is not None else None
    before = [] if known is None else known.steps()
    tables = [table for step in before for table in step.tables]
    is_plan = call.name.rpartition(".")[2] in _PLANS
    steps = before if is_plan else [*before, _encode(call, len(before), tables)]
    arrays = {key: x for step in steps for key, x in step.arrays.items()}
    facts = {
        "schema": SCHEMA,
        "cupyattn": build_version(),
        "call": call.number,
        "time": time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime()),
        "steps": [step.facts for step in steps],
    }
    where = folder()
    assert where is not None
    own = call.name.partition(".")[2]
    path = _new_file(where / f"{own}-{os.getpid()}-{call.number}.json", json.dumps(facts, indent=1))
    _save_arrays(path.with_suffix(".npz"), arrays)
    return path


def _new_file(path: Path, text: str) -> Path:
    """Write a file that was not there; its path, which has a number if the name was taken."""
    for number in itertools.count(1):
        name = path if number == 1 else path.with_stem(f"{path.stem}-{number}")
        try:
            with name.open("x", encoding="utf-8") as file:
                file.write(text)
        except FileExistsError:
            continue
        return name
    raise AssertionError


def _save_arrays(path: Path, arrays: dict[str, np.ndarray]) -> None:
    with path.open("xb") as file:
        np.savez(file, **arrays)  # type: ignore[arg-type]
        file.flush()
        os.fsync(file.fileno())


# --- behind a call ---


def save_error(call: Call, saved: Path | None, error: BaseException) -> None:
    """Save which error a call raised. A plan() that fails is saved as a call of its own, unless a
    graph is captured, where every plan() fails."""
    if saved is None and _is_captured(call):
        return
    known = _wrappers.get(_planned_by(call)) if _is_wrapper(_planned_by(call)) else None
    if saved is None and known is not None and call.name.rpartition(".")[2] in _PLANS:
        saved = _write(call) if _is_wanted(call) else None
        known.plan = known.plan_before  # which stays in force
    if saved is not None:
        device = _device_of(call.arguments())
        facts = {"error": type(error).__name__, "message": str(error), "device": device}
        _new_file(saved.with_suffix(".result.json"), json.dumps(facts, indent=1))


def save_result(call: Call, saved: Path | None, result: Any, launches: list[Launched]) -> None:
    """Save what a call gave and launched, once the device is done."""
    if saved is None:
        return
    encoder = Encoder(_number(env.DUMP_LIMIT) * _MIB, lambda x: None)
    facts: dict[str, Any] = {"result": None, "written": {}}
    try:
        facts["result"] = encoder.encode("", result, "result")
        if result is None:  # it has written arguments
            facts["written"] = {
                name: encoder.encode("", x, f"written.{name}") for name, x in call.arguments()
            }
    except TooLargeError:
        encoder.arrays.clear()
    about = {
        **facts,
        "device": _device_of([("result", result)]) or _device_of(call.arguments()),
        "launches": [[str(launch), launch.constants] for launch in launches],
    }
    _new_file(saved.with_suffix(".result.json"), json.dumps(about, indent=1))
    _save_arrays(saved.with_suffix(".result.npz"), encoder.arrays)
    _LOG.info("cupyattn: call %d, %s, is saved as %s", call.number, call.name, saved)


def _device_of(arguments: Iterable[tuple[str, Any]]) -> str | None:
    """The name of the GPU that has an array of these, "cpu" without one, None without arrays."""
    views = [view_of(x, name) for name, x in all_leaves(arguments) if is_array(x)]
    indices = [x.device.index for x in views if x is not None and x.device.kind != "cpu"]
    if not indices or "cupy" not in sys.modules:
        return "cpu" if views else None
    from ..core.device import device_props

    return device_props(indices[0]).name
