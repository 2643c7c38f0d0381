"""Modules for packages that an engine imports and does not need here: servers, grammars, images."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import sys
from typing import Any, ClassVar
from unittest import mock


class _Base:
    """What a class gets in place of a base that is not there."""

    def __init_subclass__(cls, **_: Any) -> None:
        pass

    @classmethod
    def __get_pydantic_core_schema__(cls, *_: Any) -> Any:
        from pydantic_core import core_schema

        return core_schema.any_schema()


class _Absent(mock.MagicMock):
    """A module or anything in it: is called, asked for names, derived from and annotated with."""

    __path__: ClassVar[list[str]] = []

    def __mro_entries__(self, bases: tuple[Any, ...]) -> tuple[type, ...]:
        first = next(x for x in bases if isinstance(x, _Absent))
        return (_Base,) if first is self else ()

    def __get_pydantic_core_schema__(self, *_: Any) -> Any:
        return _Base.__get_pydantic_core_schema__()


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def __init__(self, names: set[str]) -> None:
        self.names = names

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name.partition(".")[0] in self.names:
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec: Any) -> Any:
        made: Any = _Absent(name=spec.name)
        made.__spec__, made.__name__, made.__file__ = spec, spec.name, "absent"
        made.__version__, made.__all__ = "9.9.9", []
        return made

    def exec_module(self, module: Any) -> None:
        pass


def install(*names: str) -> None:
    """Stand in for those of these packages that are not installed."""
    # They look at what is installed, and are to see it as it is.
    import torch._dynamo
    import torch._functorch.aot_autograd
    import torch._inductor
    import torch.utils.flop_counter  # noqa: F401

    sys.meta_path.append(_Finder({x for x in names if importlib.util.find_spec(x) is None}))
