"""Packages that only some functions need."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TypeVar

from ..errors import MissingPackageError

_F = TypeVar("_F", bound=Callable[..., object])


def needs(package: str) -> Callable[[_F], _F]:
    """A decorator: MissingPackageError where the function cannot import what it wants of one."""

    def decorate(function: _F) -> _F:
        @functools.wraps(function)
        def checked(*args: object, **named: object) -> object:
            try:
                return function(*args, **named)
            except ImportError as error:
                name = error.name or ""
                if isinstance(error, MissingPackageError) or name.partition(".")[0] != package:
                    raise
                if name == package and isinstance(error, ModuleNotFoundError):
                    what = f"needs {package}, which is not installed here; install it"
                else:
                    what = (
                        f"does not know this release of {package} ({error}); "
                        "docs/integrations.md says which were tried"
                    )
                raise MissingPackageError(
                    f"{function.__module__}: {what}", name=error.name
                ) from error

        return checked  # type: ignore[return-value]

    return decorate
