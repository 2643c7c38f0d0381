"""Decorators that give functions their types: what they return by their flags. overloads.pyi has
the types, which `make written-docs` writes from the functions themselves.

When the package runs they return the function as it is.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def _unchanged(function: Any) -> Any:
    return function


def __getattr__(name: str) -> Callable[[Any], Any]:
    if name.startswith("_"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return _unchanged
