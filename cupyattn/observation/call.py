"""One public call: its name as users write it, and its arguments by name."""

from __future__ import annotations

import functools
import inspect
from dataclasses import dataclass
from typing import Any

import cupyattn

from .words import all_leaves, is_array, view_of

_PACKAGE = __name__.partition(".")[0]
_MADE_OF_CALLS = "serving", "distributed"


@dataclass(frozen=True)
class Call:
    """A public call.

    number     counts the calls of the process that were observed, from 1 on
    function   that of the library, with `owner`, the object whose method it is, or None
    arguments  by name, those that differ from their defaults; `more` are positional ones without a
               name
    """

    number: int
    name: str
    function: Any
    owner: Any
    arguments: dict[str, Any]
    more: tuple[Any, ...] = ()

    @property
    def consists_of_calls(self) -> bool:
        """Whether it is one of an engine's backend or of several GPUs, which make public calls."""
        return self.function.__module__.split(".")[1] in _MADE_OF_CALLS

    def named(self) -> list[tuple[str, Any]]:
        """All arguments, by names for people."""
        return [*self.arguments.items(), *((f"argument {i}", x) for i, x in enumerate(self.more))]

    def device_kinds(self) -> set[str]:
        """Where its arrays are: "cpu", "cuda"."""
        views = (view_of(x, name) for name, x in all_leaves(self.named()) if is_array(x))
        return {view.device.kind for view in views if view is not None}


def call_of(number: int, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
    """The call of a function of the library with these arguments."""
    is_method = "." in function.__qualname__
    owner, rest = (args[0], args[1:]) if is_method and args else (None, args)
    arguments, more = _by_name(function, is_method, rest, kwargs)
    return Call(number, _name(function, owner), function, owner, arguments, more)


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


def _by_name(
    function: Any, is_method: bool, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[dict[str, Any], tuple[Any, ...]]:
    """(arguments by name, positional ones without a name). Those that no parameter has are kept:
    the call itself is going to refuse them."""
    result: dict[str, Any] = {}
    parameters = _parameters(function, is_method)
    by_position = [x for x in parameters if x.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD]
    for parameter, x in zip(by_position, args, strict=False):
        result[parameter.name] = x
    defaults = {x.name: x.default for x in parameters}
    result |= kwargs
    result = {name: x for name, x in result.items() if not _is(x, defaults.get(name, x is None))}
    return result, args[len(by_position) :]


def _is(x: Any, default: Any) -> bool:
    """Whether an argument is its default; arrays are compared with nothing."""
    plain = bool, int, float, str, type(None)
    return x is default or (isinstance(x, plain) and type(x) is type(default) and x == default)
