"""One public call: its name as users write it, and its arguments by name."""

from __future__ import annotations

import functools
import inspect
from dataclasses import dataclass
from typing import Any

import cupyattn

from .words import all_leaves, is_array, view_of

_PACKAGE = __name__.partition(".")[0]
MADE_OF_CALLS = "serving", "distributed"
_NONE = object()


@dataclass(frozen=True)
class Call:
    """A public call.

    number      counts the calls of the process that were observed, from 1 on
    function    that of the library, with `owner`, the object whose method it is, or None
    positional  (name, argument) in the order in which they were passed, and `by_name`, the others
    """

    number: int
    name: str
    function: Any
    owner: Any
    positional: tuple[tuple[str, Any], ...]
    by_name: dict[str, Any]

    @property
    def consists_of_calls(self) -> bool:
        """Whether it is one of an engine's backend or of several GPUs, which make public calls."""
        return self.function.__module__.split(".")[1] in MADE_OF_CALLS

    def arguments(self) -> list[tuple[str, Any]]:
        """All arguments with their names."""
        return [*self.positional, *self.by_name.items()]

    def unusual(self) -> list[tuple[str, Any]]:
        """Those that are not their defaults."""
        defaults = {x.name: x.default for x in _parameters(self.function, self.owner is not None)}
        return [(name, x) for name, x in self.arguments() if not _is(x, defaults.get(name, _NONE))]

    def argument(self, name: str) -> Any:
        """The argument of a name, None if there is none."""
        return dict(self.arguments()).get(name)

    def device_kinds(self) -> set[str]:
        """Where its arrays are: "cpu", "cuda"."""
        views = (view_of(x, name) for name, x in all_leaves(self.arguments()) if is_array(x))
        return {view.device.kind for view in views if view is not None}


def call_of(number: int, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
    """The call of a function of the library with these arguments."""
    is_method = "." in function.__qualname__ and bool(args)
    owner, rest = (args[0], args[1:]) if is_method else (None, args)
    parameters = _parameters(function, is_method)
    names = [x.name for x in parameters if x.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD]
    names += [f"argument {at}" for at in range(len(names), len(rest))]
    positional = tuple(zip(names, rest, strict=False))
    return Call(number, _name(function, owner), function, owner, positional, kwargs)


def _name(function: Any, owner: Any) -> str:
    """Example: "cupyattn.BatchAttention.run", "cupyattn.flash_attn.flash_attn_func"."""
    path = function.__qualname__ if owner is None else f"{type(owner).__name__}.{_last(function)}"
    module = (function if owner is None else type(owner)).__module__.split(".")
    public = path.partition(".")[0] in cupyattn.__all__
    return ".".join([_PACKAGE, *([] if public else module[1:2]), path])


def _last(function: Any) -> str:
    return str(function.__qualname__.rpartition(".")[2])


@functools.lru_cache(maxsize=1024)
def _parameters(function: Any, is_method: bool) -> tuple[inspect.Parameter, ...]:
    parameters = tuple(inspect.signature(function).parameters.values())
    return parameters[1:] if is_method else parameters


def _is(x: Any, default: Any) -> bool:
    """Whether an argument is its default; arrays are compared with nothing."""
    plain = bool, int, float, str, type(None)
    return x is default or (isinstance(x, plain) and type(x) is type(default) and x == default)
