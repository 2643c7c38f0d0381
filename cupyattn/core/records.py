"""Records that are made at every call."""

from __future__ import annotations

from types import MethodType
from typing import Any, TypeVar, cast

_T = TypeVar("_T", bound=tuple[Any, ...])


def maker(record: type[_T]) -> type[_T]:
    """What makes records of a NamedTuple, in half of the time that calling the class takes: without
    `type.__call__`, which packs keywords and unpacks them again."""
    return cast(type[_T], MethodType(record.__new__, record))
