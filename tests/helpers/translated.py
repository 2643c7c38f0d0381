"""cupyattn for a program of one framework, with calls that get the arrays of another one."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from types import ModuleType
from typing import Any

import numpy as np
import pytest

import cupyattn
from cupyattn import array

# Where JAX arrays cannot be written, calls return what they would have written.
_WRITTEN = {"append_paged_kv_cache": [4], "merge_state_in_place": [0, 1]}


def converter(framework: str) -> Callable[[Any], Any]:
    """A function that makes arrays of the framework; it shares memory where it can."""
    if framework == "numpy":
        return lambda x: array.as_numpy(array.view(x, "x"))
    module = pytest.importorskip(framework)
    made = module.numpy if framework == "jax" else module
    like = array.view(made.zeros(1, dtype=made.float32), "like")
    return lambda x: array.from_numpy(array.as_numpy(array.view(x, "x")), like)


class Translated(ModuleType):
    """The module, with every array that goes in converted, and what comes out checked."""

    def __init__(self, framework: str) -> None:
        super().__init__("cupyattn")
        self._convert = converter(framework)
        made = self._convert(np.zeros(1, np.float32))
        self._kind, self._is_apart = type(made), array.view(made, "made").device.kind == "cuda"
        self.num_calls = 0

    def __getattr__(self, name: str) -> Any:
        value = getattr(cupyattn, name)
        if inspect.isclass(value) and not issubclass(value, Exception):
            return lambda *args, **named: _Wrapper(self, self.call(value, *args, **named))
        return functools.partial(self.call, value) if callable(value) else value

    def call(self, function: Callable[..., Any], *args: Any, **named: Any) -> Any:
        copies: dict[int, Any] = {}  # an array that is passed twice is one array there, too
        positional = [self._in(x, copies) for x in args]
        by_name = {name: self._in(x, copies) for name, x in named.items()}
        answer = function(*positional, **by_name)
        self.num_calls += 1
        if self._is_apart:
            # What a call has written is in copies on the GPU: the program looks at its own arrays.
            _write_back([*args, *named.values()], [*positional, *by_name.values()])
        places = _WRITTEN.get(getattr(function, "__name__", ""))
        if places and answer is not None:
            for place, new in zip(places, answer if len(places) > 1 else [answer], strict=True):
                array.as_numpy(array.view(args[place], "x"))[...] = np.asarray(new)
            return None
        first = next(filter(_is_array, (*args, *named.values())), None)
        return self._out(answer, first)

    def _in(self, x: Any, copies: dict[int, Any]) -> Any:
        if isinstance(x, (list, tuple)):
            return type(x)(self._in(y, copies) for y in x)
        if isinstance(x, dict):
            return {name: self._in(y, copies) for name, y in x.items()}
        if not _is_array(x):
            return x
        if id(x) not in copies:
            copies[id(x)] = self._convert(x)
        return copies[id(x)]

    def _out(self, x: Any, like: Any) -> Any:
        """The answer as an array of the program's framework, which `like` is of."""
        if isinstance(x, tuple):
            return tuple(self._out(y, like) for y in x)
        if not _is_array(x):
            return x
        assert type(x) is self._kind
        return array.from_numpy(np.array(_numpy(x)), array.view(like, "x"))


class _Wrapper:
    def __init__(self, module: Translated, wrapper: Any) -> None:
        self._module, self._wrapper = module, wrapper

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._wrapper, name)
        return functools.partial(self._module.call, value) if callable(value) else value


def _numpy(x: Any) -> np.ndarray:
    v = array.view(x, "x")
    return array.as_numpy(v) if v.device.kind == "cpu" else array.to_host(v)


def _write_back(own: Any, copy: Any) -> None:
    if isinstance(own, (list, tuple)):
        for one, other in zip(own, copy, strict=True):
            _write_back(one, other)
    elif isinstance(own, dict):
        _write_back([*own.values()], [*copy.values()])
    elif _is_array(own):
        host = array.as_numpy(array.view(own, "x"))
        if host.flags.writeable:
            host[...] = _numpy(copy)


def _is_array(x: Any) -> bool:
    return hasattr(type(x), "__dlpack__")
