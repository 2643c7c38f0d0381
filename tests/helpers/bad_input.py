"""Tables of bad input: each row changes arguments of a good call, which must then be refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest

from cupyattn import errors
from cupyattn.core import dtypes
from cupyattn.errors import ArgumentError, PlanError


class Row(NamedTuple):
    """A bad call, and the words of its error.

    call     the function, or the wrapper
    step     of a wrapper: "make", "plan" or "run"
    changes  replace arguments of a good call; a function makes its own from these arguments
    args     positional arguments after the arrays
    """

    call: str
    step: str
    what: str
    error: type[Exception]
    words: tuple[str, ...]
    changes: dict[str, Any]
    args: tuple[Any, ...] = ()


def rows_of(call: str, step: str = "") -> Callable[..., Row]:
    """make(what, words, error, **changes): rows of one call; " | " separates the words."""

    def make(what: str, words: str, error: type[Exception] = ArgumentError, **changes: Any) -> Row:
        return Row(call, step, what, error, tuple(words.split(" | ")), changes)

    return make


def by_row(rows: list[Row]) -> pytest.MarkDecorator:
    """One test for each row; no two rows say the same."""
    names = [f"{' '.join(filter(None, row[:2]))}: {row.what}" for row in rows]
    assert len(set(names)) == len(names)
    return pytest.mark.parametrize("row", rows, ids=names)


def of(dtype: str, *shape: int) -> np.ndarray:
    return np.zeros(shape, dtypes.parse(dtype).numpy)


def ints(*values: int, dtype: str = "int32") -> np.ndarray:
    return np.array(values, dtype)


def read_only(x: np.ndarray) -> np.ndarray:
    x.flags.writeable = False
    return x


def misaligned(num_bytes: int) -> np.ndarray:
    x = np.zeros(num_bytes + 32, np.uint8)
    return x[(-x.ctypes.data % 16) + 8 :][:num_bytes]


def refuse(row: Row, call: Callable[..., Any], arguments: dict[str, Any]) -> None:
    """The changed call raises the row's error twice, and writes no argument."""
    for name, value in row.changes.items():
        is_made = callable(value) and not isinstance(value, type)
        arguments[name] = value(arguments) if is_made else value
    before = _content(arguments)
    for _ in range(2):
        with pytest.raises(row.error) as caught:
            call(**arguments)
        kinds = [x for x in type(caught.value).__mro__ if x.__module__ == errors.__name__]
        assert (kinds or [type(caught.value)])[0] is row.error
        message = str(caught.value)
        assert not [word for word in row.words if word not in message], message
    assert _content(arguments) == before, "an argument was written"


def step_before(row: Row, cls: Any, good: Callable[[str, str], dict[str, Any]]) -> Any:
    """What the step of a row calls: the class, or plan or run of a wrapper that is ready for it."""
    if row.step == "make":
        return cls
    wrapper = cls(**good(row.call, "make"))
    plan = getattr(wrapper, "plan", None) or wrapper.begin_forward
    if row.step == "plan":
        return plan
    plan(**good(row.call, "plan"))
    return getattr(wrapper, "run", None) or wrapper.forward


def check_good_steps(classes: dict[str, Any], good: Callable[[str, str], dict[str, Any]]) -> None:
    """The calls that rows change succeed, and write the outputs, which held 7."""
    for name, cls in classes.items():
        wrapper = cls(**good(name, "make"))
        with pytest.raises(PlanError, match=r"run\(\) was called before plan\(\)"):
            wrapper.run(**good(name, "run"))
        wrapper.plan(**good(name, "plan"))
        arguments = good(name, "run")
        wrapper.run(**arguments)
        assert np.isfinite(arguments["out"]).all() and (arguments["lse"] != 7).all()


def _content(x: Any) -> list[bytes]:
    """The bytes of all arrays, but of those that only claim to be large."""
    if isinstance(x, dict):
        return [part for value in x.values() for part in _content(value)]
    if isinstance(x, (list, tuple)):
        return [part for value in x for part in _content(value)]
    return [x.tobytes()] if isinstance(x, np.ndarray) and x.size < 10**6 else []
