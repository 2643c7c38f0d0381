"""Where CUPYATTN_LOG and CUPYATTN_DUMP take hold: the mark that all public calls have.

`tracing.untraced` hands every function that users call to `observed`, as its module is imported.
Where neither variable asks about calls the function comes back as it is, so that a call costs what
it did. Else each call goes by `observation`, which is imported at the first one.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from types import FunctionType
from typing import Any, TypeVar

from . import env, log

_PACKAGE = __name__.partition(".")[0]
_T = TypeVar("_T")


def is_asked() -> bool:
    """Whether the environment asks about calls."""
    return bool(env.DUMP.get()) or any(word != log.CHOICES for word in log.words())


# Read once: functions are what they are from their import on.
IS_ON = is_asked()


def observed(function: _T) -> _T:
    """The function as users are to call it."""
    return watched(function) if IS_ON and isinstance(function, FunctionType) else function


def watched(function: Any) -> Any:
    """The function, with each call told to `observation`."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        return _observe()(function, args, kwargs)

    call.is_observed = True  # type: ignore[attr-defined]
    return call


class Observed:
    """Lets the methods of its subclasses that users call be observed: those without an underscore,
    and __init__."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if IS_ON:
            watch_methods(cls)


def watch_methods(cls: type) -> None:
    """Let the public methods that a class defines be observed."""
    for name, member in [*vars(cls).items()]:
        if hasattr(member, "is_observed") or not isinstance(member, FunctionType):
            continue
        if name == "__init__" or not name.startswith("_"):
            setattr(cls, name, watched(member))


@functools.cache
def _observe() -> Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]:
    module = importlib.import_module(f"{_PACKAGE}.observation.calls")
    observe: Callable[..., Any] = module.observe
    return observe
