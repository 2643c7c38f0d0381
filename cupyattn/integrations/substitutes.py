"""Functions of ours in place of an engine's, in the modules that define them.

A module that is not loaded yet is changed as soon as it is, before others take names from it. Calls
that we refuse with UnsupportedError go the engine's own way.
"""

from __future__ import annotations

import functools
import importlib.machinery
import importlib.util
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import ModuleType
from typing import Any

from ..errors import UnsupportedError

# Makes of an engine's function, and ours of this name, what stands in its place.
Join = Callable[[Any, Any], Any]


def either(ours: Any, theirs: Any) -> Any:
    """Ours, or theirs where ours is refused. `theirs` is at its attribute `of_engine`."""

    @functools.wraps(ours)
    def call(*args: Any, **named: Any) -> Any:
        try:
            return ours(*args, **named)
        except UnsupportedError:
            return theirs(*args, **named)

    call.of_engine = theirs  # type: ignore[attr-defined]
    return call


def substitute(
    functions: Mapping[str, Iterable[Any]], joins: Mapping[str, Join] | None = None
) -> None:
    """Put functions in the place of those of the same name, by the name of their module.

    Parameters
    ----------
    joins
        By a function's name, instead of `either`. A second time changes nothing.
    """
    wanted = {name: tuple(own) for name, own in functions.items() if name not in _asked}
    _asked.update(wanted)
    own_joins = joins or {}
    for name in wanted:
        module = sys.modules.get(name)
        if module is not None:
            _change(module, wanted[name], own_joins)
    waiting = {name: own for name, own in wanted.items() if name not in sys.modules}
    if waiting:
        sys.meta_path.insert(0, _Finder(waiting, own_joins))


_asked: dict[str, tuple[Any, ...]] = {}


def _change(module: ModuleType, functions: Iterable[Any], joins: Mapping[str, Join]) -> None:
    for ours in functions:
        theirs = getattr(module, ours.__name__, None)
        if theirs is None or hasattr(theirs, "of_engine"):
            continue  # another release of the engine
        joined = joins.get(ours.__name__, either)(ours, theirs)
        # Modules that have taken the name from this one.
        for other in [x for x in sys.modules.values() if isinstance(x, ModuleType)]:
            if vars(other).get(ours.__name__) is theirs:
                setattr(other, ours.__name__, joined)


class _Finder:
    """Finds the modules that wait to be changed, as all others would."""

    def __init__(self, waiting: Mapping[str, tuple[Any, ...]], joins: Mapping[str, Join]) -> None:
        self._waiting, self._joins = dict(waiting), joins

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        functions = self._waiting.pop(name, None)
        if functions is None:
            return None
        spec = importlib.util.find_spec(name)
        load = getattr(spec and spec.loader, "exec_module", None)
        if load is None:
            return spec

        def exec_module(module: ModuleType) -> None:
            load(module)
            _change(module, functions, self._joins)

        spec.loader.exec_module = exec_module  # type: ignore[union-attr, method-assign]
        return spec
