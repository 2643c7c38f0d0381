"""Public calls, what their arguments may mean, and one changed call of them tried.

An Entry is a function, or a wrapper with its steps: made, planned and run. A call of it must end in
one of three ways. It raises one of the library's errors, and nothing has been written. It raises
TypeError for the names of its arguments. Or it answers, and then each argument means something
(wrong_values.py) and the answer is that of the plain call: of a second oracle where the entry has
one (plain_answers.py), or else of the library itself given plain values.
"""

from __future__ import annotations

import functools
import inspect
import warnings
from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np

from cupyattn.errors import CupyAttnError

from .wrong_rules import RULES, Rule
from .wrong_values import Rejected, ignored, makers_of, scalars

_BAND = 64
_SENTINEL = 0xA5
Arguments = dict[str, Any]
_NONE: Mapping[str, Any] = MappingProxyType({})


class Room(NamedTuple):
    """Memory around an array."""

    memory: np.ndarray
    begin: int
    end: int


_rooms: list[Room] = []


def guarded(x: np.ndarray) -> np.ndarray:
    """A copy between two bands that nobody may write."""
    size = x.nbytes
    memory = np.full(size + 2 * _BAND + 16, _SENTINEL, np.uint8)
    begin = _BAND + (-(memory.ctypes.data + _BAND) % 16)
    place = memory[begin : begin + size]
    place[:] = np.frombuffer(x.tobytes(), np.uint8)
    _rooms.append(Room(memory, begin, begin + size))
    return place.view(x.dtype).reshape(x.shape)


def _guard(x: Any) -> Any:
    if isinstance(x, np.ndarray) and x.nbytes < 10**6:
        return guarded(x)
    if isinstance(x, (list, tuple)) and any(isinstance(y, np.ndarray) for y in x):
        return type(x)(_guard(y) for y in x)
    return x


class Entry(NamedTuple):
    """A public call.

    steps    (prefix of its arguments, what is called, with the object of the steps before)
    base     arguments "step.name" of a good call
    samples  arrays for optional arguments of a good call
    answer   the oracle: arrays that the call gives, from all arguments in their plain form
    rules    what values of arguments mean that do not mean what RULES says, by name or "step.name"
    written  names of arguments that the call may write
    filled   names of those that a step may have written when a later one is refused
    gather   what the call gives, from its result and its arguments; by default the result
    """

    name: str
    steps: tuple[tuple[str, Callable[..., Any]], ...]
    base: Arguments
    samples: Mapping[str, Any] = _NONE
    answer: Callable[[Arguments], list[Any]] | None = None
    rules: Mapping[str, Rule | None] = _NONE
    written: tuple[str, ...] = ("out", "lse")
    gather: Callable[[Any, Arguments], Any] | None = None
    filled: tuple[str, ...] = ()

    def parameters(self) -> dict[str, Any]:
        """The default of each argument "step.name" by name; `empty` where there is none."""
        return _parameters(self.steps)

    def arguments(self) -> Arguments:
        _rooms.clear()
        return {name: _guard(x) for name, x in self.base.items()}

    def call(self, arguments: Arguments) -> Any:
        made: Any = None
        for index, (step, target) in enumerate(self.steps):
            own = {
                name.split(".")[1]: x for name, x in arguments.items() if name.split(".")[0] == step
            }
            if index == 0:
                made = result = target(**own)
            else:
                result = target(made, **own)
        return result if self.gather is None else self.gather(result, arguments)

    def rule(self, name: str) -> Rule | None:
        for rules in (self.rules, RULES):
            for known in (name, name.split(".")[1]):
                if known in rules:
                    return rules[known]
        return None

    def plain(self, arguments: Arguments) -> Arguments:
        """All arguments in their plain form, and names of those that plan() is given.

        Raises Rejected.
        """
        given = {n.split(".")[1] for n in arguments if n.split(".")[0] == "plan"}
        found: Arguments = {"given": given}
        for name, default in self.parameters().items():
            rule, is_given = self.rule(name), name in arguments
            value = arguments.get(name, default)
            if rule is None:
                continue
            if not is_given or (value is None and default is None):
                found[name] = None if value is inspect.Parameter.empty else value
                continue
            try:
                with np.errstate(all="ignore"):
                    found[name] = rule(value)
            except Rejected:
                raise Rejected(name) from None
            except Exception:  # values raise what they like
                raise Rejected(name) from None
        return found


def function(call: Any) -> tuple[tuple[str, Any], ...]:
    return (("run", call),)


def wrapper(cls: Any, run: str = "run") -> tuple[tuple[str, Any], ...]:
    return (("make", cls), ("plan", cls.plan), ("run", getattr(cls, run)))


def step(name: str, **arguments: Any) -> Arguments:
    return {f"{name}.{key}": x for key, x in arguments.items()}


@functools.cache
def _parameters(steps: tuple[tuple[str, Callable[..., Any]], ...]) -> dict[str, Any]:
    found = {}
    for step, target in steps:
        for name, p in inspect.signature(target).parameters.items():
            is_named = p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)
            if is_named and name not in ("self", "wrapper"):
                found[f"{step}.{name}"] = p.default
    return found


def flat(result: Any) -> list[np.ndarray]:
    """The arrays of a result."""
    if isinstance(result, (tuple, list)):
        return [x for part in result for x in flat(part)]
    return [] if result is None else [np.asarray(result)]


Maker = Callable[[Any], Any]
_OF_LISTS: list[Maker] = [
    *(list, tuple, lambda x: x[:1], lambda x: [*x, x[0]], lambda x: x[0], lambda x: [*x[::-1]]),
    *(lambda x: [], lambda x: None, lambda x: [None, None], lambda x: 3, lambda x: {}),
]


def _is_list(x: Any) -> bool:
    return isinstance(x, (list, tuple)) and any(isinstance(y, np.ndarray) for y in x)


def pool(entry: Entry, name: str) -> list[Maker]:
    """Functions that make of an argument, or of a good one where none is given, another one."""
    base = entry.base.get(name)
    if base is None:
        base = entry.samples.get(name, entry.samples.get(name.split(".")[1]))
    if isinstance(base, np.ndarray) and base.nbytes < 10**6:
        return makers_of(base)
    if _is_list(base):
        return [*(functools.partial(_with_first, make) for make in makers_of(base[0])), *_OF_LISTS]
    return [functools.partial(_instead, x) for x in scalars()]


def _with_first(make: Maker, x: Any) -> Any:
    return type(x)([make(x[0]), *x[1:]])


def _instead(other: Any, x: Any) -> Any:
    return other


def change(entry: Entry, arguments: Arguments, name: str, make: Maker) -> bool:
    """Change one of these arguments; False if it has no such variant."""
    base = arguments.get(name)
    if base is None:
        base = _guard(entry.samples.get(name, entry.samples.get(name.split(".")[1])))
    try:
        with np.errstate(all="ignore"):
            arguments[name] = make(base)
    except Exception:  # what stands there is no array any more, or has no such variant
        return False
    return True


class Outcome(NamedTuple):
    """How a call ended; `wrong` says what is the matter."""

    kind: str
    wrong: str = ""


def attempt(entry: Entry, arguments: Arguments) -> Outcome:
    """Make a call and judge it."""
    before = _contents(arguments)
    try:
        plain, meaningless = entry.plain(arguments), ""
    except Rejected as rejected:
        plain, meaningless = {}, f"accepted {rejected}, which means nothing"
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            result = entry.call(arguments)
    except CupyAttnError as error:
        written = _written(entry, before, arguments, entry.filled)
        message = str(error)
        if len(message) < 10 or len(message) > 1500:
            return Outcome("refused", f"a message of {len(message)} characters")
        return Outcome("refused", f"refused ({error}), but wrote {written}" if written else "")
    except Exception as error:
        return Outcome("untyped", f"{type(error).__name__}: {error}"[:300])
    if written := _written(entry, before, arguments, entry.written):
        return Outcome("answered", f"wrote {written}")
    if meaningless:
        return Outcome("answered", meaningless)
    return Outcome("answered", _difference(entry, plain, arguments, result))


def _difference(entry: Entry, plain: Arguments, arguments: Arguments, result: Any) -> str:
    got = flat(result)
    try:
        with np.errstate(all="ignore"):
            if entry.answer is not None:
                wanted = flat(entry.answer(plain))
            else:
                given = {n: x for n, x in plain.items() if n in arguments and x is not None}
                wanted = flat(entry.call(entry.arguments() | given))
    except Exception as error:
        return f"answered, but the plain call has no answer: {type(error).__name__}: {error}"[:300]
    if len(got) != len(wanted):
        return f"gave {len(got)} arrays, not {len(wanted)}"
    for i, (x, y) in enumerate(zip(got, wanted, strict=True)):
        if x.shape != y.shape:
            return f"answer {i} has shape {x.shape}, not {y.shape}"
        tolerance = max(_tolerance(x), 0.0 if entry.answer else _tolerance(y))
        with np.errstate(all="ignore"):
            x, y = (np.asarray(a).astype(x.dtype).astype(np.float64) for a in (x, y))
        if not np.allclose(x, y, rtol=tolerance, atol=tolerance, equal_nan=True):
            return f"answer {i} is wrong by {np.nanmax(np.abs(x - y))}"
    return ""


def _tolerance(x: np.ndarray) -> float:
    if x.dtype.kind in "iub":
        return 0.0
    return {4: 1e-4, 2: 2e-2, 1: 0.2}[x.dtype.itemsize]


def _arrays_of(x: Any) -> Iterator[np.ndarray]:
    if isinstance(x, np.ma.MaskedArray):
        return
    if isinstance(x, np.ndarray):
        if x.size < 10**6 and x.dtype.kind != "O":
            yield x
    elif isinstance(x, (list, tuple)):
        for part in x:
            yield from _arrays_of(part)


def _contents(arguments: Arguments) -> dict[str, list[bytes]]:
    return {name: [a.tobytes() for a in _arrays_of(x)] for name, x in arguments.items()}


def _written(
    entry: Entry, before: dict[str, list[bytes]], arguments: Arguments, allowed: tuple[str, ...]
) -> list[str]:
    """Arguments that were written and may not be, and bands around arrays."""
    filled, own, names = set(), set(), []
    for name, x in arguments.items():
        if name.split(".")[1] in entry.filled:
            filled.add(id(x))
        elif name.split(".")[1] in allowed:
            own.add(id(x))
    for name, x in arguments.items():
        is_ignored = entry.rule(name) in (None, ignored)
        may_be = name.split(".")[1] in allowed or id(x) in filled or (is_ignored and id(x) in own)
        if not may_be and [a.tobytes() for a in _arrays_of(x)] != before[name]:
            names.append(name)
    for memory, begin, end in _rooms:
        if (memory[:begin] != _SENTINEL).any() or (memory[end:] != _SENTINEL).any():
            names.append(f"around an array of {end - begin} bytes")
    return names
