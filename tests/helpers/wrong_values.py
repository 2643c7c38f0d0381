"""Values that callers get wrong, by kind of argument, and what those mean that may be meant.

A kind has a pool of values, most of them wrong, and a rule, `meant`: the plain value that a given
one stands for as the documentation has it. It raises Rejected where nothing is meant.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from decimal import Decimal
from fractions import Fraction
from numbers import Number
from typing import Any

import ml_dtypes
import numpy as np

HUGE = 10**400
FLOAT32_MAX = float(np.finfo(np.float32).max)
NAMES = {
    np.dtype(np.float16): ("float16", "half", "fp16"),
    np.dtype(ml_dtypes.bfloat16): ("bfloat16", "bf16"),
    np.dtype(np.float32): ("float32", "fp32", "float"),
    np.dtype(ml_dtypes.float8_e4m3fn): ("float8_e4m3fn", "e4m3", "fp8_e4m3", "float8_e4m3"),
    np.dtype(ml_dtypes.float8_e5m2): ("float8_e5m2", "e5m2", "fp8_e5m2"),
}


class Rejected(Exception):
    """The value means nothing: the library has to refuse it."""


# --- what values mean ---


def number(value: Any) -> float:
    """The float of a number of any type, or of an array of one; bools are no numbers."""
    if isinstance(value, np.ndarray):
        if value.ndim > 1 or value.size != 1:
            raise Rejected
        value = value.reshape(-1)[0].item()
    elif isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, bool) or not isinstance(value, Number):
        raise Rejected
    value = complex(value)  # type: ignore[call-overload]
    if value.imag or not abs(value.real) <= FLOAT32_MAX:
        raise Rejected
    return float(value.real)


def integer(value: Any, low: int = 1, high: int = 2**31 - 1) -> int:
    if isinstance(value, np.ndarray) or isinstance(value, (bool, np.bool_)):
        raise Rejected
    if not isinstance(value, Number) or (not isinstance(value, int) and complex(value).imag):  # type: ignore[call-overload]
        raise Rejected
    value = value if isinstance(value, int) else complex(value).real  # type: ignore[call-overload]
    if not low <= value <= high or value != int(value):
        raise Rejected
    return int(value)


def flag(value: Any) -> bool:
    if isinstance(value, (bool, np.bool_)):
        return bool(value)
    return bool(integer(value, 0, 1))


def dtype(value: Any) -> np.dtype:
    for found, names in NAMES.items():
        if isinstance(value, str):
            if value.removeprefix("torch.") in names:
                return found
        elif isinstance(value, np.dtype) or isinstance(value, type):
            if value == found or value is found.type:
                return found
    raise Rejected


def one_of(*allowed: Any) -> Callable[[Any], Any]:
    def meant(value: Any) -> Any:
        if isinstance(value, str) and value in allowed:
            return str(value)
        raise Rejected

    return meant


def whole(low: int, high: int = 2**31 - 1) -> Callable[[Any], int]:
    return lambda value: integer(value, low, high)


def above(least: float, is_open: bool = True) -> Callable[[Any], float]:
    def meant(value: Any) -> float:
        found = number(value)
        if found < least or (is_open and found == least):
            raise Rejected
        return found

    return meant


def array(*dtypes: Any) -> Callable[[Any], np.ndarray]:
    """Elements of one of these dtypes, wherever they are."""
    wanted = [np.dtype(x) for x in dtypes]

    def meant(value: Any) -> np.ndarray:
        is_plain = isinstance(value, np.ndarray) and not isinstance(value, np.ma.MaskedArray)
        if not is_plain or value.dtype not in wanted:
            raise Rejected
        value = value[:64] if value.size > 10**6 else value  # only a view has so many
        return value.copy()

    return meant


def integers(*dtypes: Any) -> Callable[[Any], np.ndarray]:
    elements = array(*(dtypes or (np.int32, np.int64)))
    return lambda value: elements(value).astype(np.int64)


def scale(value: Any) -> Any:
    """A number, or float32 numbers with one a head."""
    if isinstance(value, np.ndarray) and value.ndim == 1 and value.size != 1:
        found = array(np.float32)(value)
        if not np.isfinite(found).all():
            raise Rejected
        return found
    return number(value)


def nothing(value: Any) -> None:
    """What must be left out."""
    if value is not None and value is not False:
        raise Rejected


def ignored(value: Any) -> None:
    """What is accepted for compatibility, whatever it is."""


# --- what callers give ---


class Odd:
    """An object of no type that the library knows."""

    def __repr__(self) -> str:
        return "Odd()"


def _plain() -> list[Any]:
    return [
        *(None, True, False, np.True_, np.False_, 0, 1, -1, 2, 3, 5, 2**31, 2**63, -(2**63), HUGE),
        *(0.0, -0.0, 0.5, 1.0, -1.5, 3.0, 1e39, math.nan, math.inf, -math.inf, 1 + 0j, 1j),
        *("", "1", "nope", b"NHD", [], [1], (), (0.5,), {}, {"a": 1}, set(), Odd(), object),
        *(Decimal("0.5"), Decimal("NaN"), Fraction(1, 2), Fraction(3), range(3), print, ...),
        *(np.int8(2), np.uint8(3), np.int64(4), np.float32(0.5), np.float64(2.0)),
        *(ml_dtypes.bfloat16(0.5), np.complex64(1), np.str_("NHD"), np.datetime64("nat")),
        *(np.array(0.5), np.array([0.5]), np.array([0.5, 2.0]), np.array(3), np.array(True)),
        *(np.array("NHD"), np.array(["NHD"]), np.array(None), np.array([]), np.ones(4, np.float32)),
        *(np.ma.masked, np.ndarray, np.zeros((2, 3), bool), np.zeros(3, np.float16)),
    ]


@functools.cache
def scalars() -> list[Any]:
    """For arguments that are no arrays, whatever they are."""
    words = "NHD", "HND", "nhd", "ALIBI", "ROPE_LLAMA", "rope", "auto", "fa2", "little", "big", "ln"
    types = "float16", "bf16", "float32", "float64", "int8", "fp8_e4m3", "torch.float16"
    others = np.float16, np.dtype("float16"), np.float64, float, int, np.dtype(">f2"), np.float32
    return [*_plain(), *words, *types, *others]


def _strided(x: np.ndarray) -> np.ndarray:
    wide = np.zeros((*x.shape[:-1], 2 * x.shape[-1]), x.dtype)
    wide[..., ::2] = x
    return wide[..., ::2]


def _off_by_a_byte(x: np.ndarray) -> np.ndarray:
    room = np.zeros(x.nbytes + 1, np.uint8)
    room[1:] = np.frombuffer(x.tobytes(), np.uint8)
    return room[1:].view(x.dtype).reshape(x.shape)


def _read_only(x: np.ndarray) -> np.ndarray:
    x = x.copy()
    x.flags.writeable = False
    return x


def _padded(x: np.ndarray) -> np.ndarray:
    """Longer along the first axis."""
    return np.concatenate([x, x[:1]])


def _gapped(x: np.ndarray) -> np.ndarray:
    """With room between rows, which is fine."""
    wide = np.zeros((*x.shape[:-1], x.shape[-1] + 5), x.dtype)
    wide[..., : x.shape[-1]] = x
    return wide[..., : x.shape[-1]]


def _overlaid(x: np.ndarray) -> np.ndarray:
    """Its first rows in one place, which may be written."""
    return np.lib.stride_tricks.as_strided(x, x.shape, (0, *x.strides[1:]))


def _set(x: np.ndarray, value: int) -> np.ndarray:
    x = x.astype(np.int64)
    x.reshape(-1)[-1:] = value
    return x


_OF_ANY: list[Callable[[np.ndarray], Any]] = [
    *(lambda x: x.tolist(), lambda x: memoryview(x.view(np.uint8)), lambda x: x.tobytes()),
    *(lambda x: x.astype(np.float64), lambda x: x.astype(np.complex64)),
    *(lambda x: x.astype(np.float32), lambda x: x.astype(np.float16), lambda x: x.astype(np.int8)),
    *(lambda x: x.astype(bool), lambda x: x.astype(object), lambda x: x.astype(np.uint8)),
    *(lambda x: x.astype(x.dtype.newbyteorder(">")), lambda x: x.astype(ml_dtypes.bfloat16)),
    *(lambda x: x.astype(np.int32), lambda x: x.astype(np.int64), lambda x: x.astype(np.uint64)),
    *(_read_only, _off_by_a_byte, lambda x: x[None], lambda x: x[..., None], lambda x: x[:0]),
    *(lambda x: np.zeros((0,) * x.ndim, x.dtype), lambda x: x.reshape(-1), lambda x: x * 0),
    lambda x: np.ma.array(x, mask=False),
    lambda x: np.zeros((), x.dtype),
]
_OF_AXES: list[Callable[[np.ndarray], Any]] = [
    *(lambda x: x[0], lambda x: x[:-1], lambda x: x[1:], lambda x: x[..., :-1], _padded),
    *(lambda x: x[::-1], lambda x: x[..., ::-1], _strided, _gapped, np.asfortranarray),
    *(lambda x: np.broadcast_to(x[:1], x.shape), lambda x: x.swapaxes(0, -1), _overlaid),
    *(lambda x: np.broadcast_to(x[:1], (2**31, *x.shape[1:])), lambda x: x.swapaxes(0, -1).copy()),
]
_OF_SEVERAL_AXES: list[Callable[[np.ndarray], Any]] = [
    *(lambda x: x[:, :-1], lambda x: x[:, :0], lambda x: x.swapaxes(-3, -2).copy()),
    lambda x: np.concatenate([x, x], 1),
]
_OF_INTEGERS: list[Callable[[np.ndarray], Any]] = [
    *(lambda x: -x - 1, lambda x: x + 1, lambda x: x + 1000, lambda x: x.astype(np.int64) + 2**32),
    *(lambda x: _set(x, -1), lambda x: _set(x, 2**31 - 1), lambda x: _set(x, 2**40)),
    *(lambda x: _set(x, -(2**63)), lambda x: _set(x, 2**63 - 1), lambda x: _set(x, 0)),
]


def makers_of(x: np.ndarray) -> list[Callable[[np.ndarray], Any]]:
    """Functions that make of an array what may come in its place."""
    makers = list(_OF_ANY)
    if x.ndim and x.size:
        makers += _OF_AXES
    if x.ndim > 2 and x.size:
        makers += _OF_SEVERAL_AXES
    if x.dtype.kind in "iu" and x.size:
        makers += _OF_INTEGERS
    if x.dtype.kind not in "iub":
        makers.append(lambda x: x * np.float16("nan").astype(x.dtype))
    others: list[Any] = [None, 0.5, 3, "x", [], {}, np.ndarray, Odd()]
    return [*makers, *(functools.partial(_instead, other) for other in others), lambda x: x]


def _instead(other: Any, x: np.ndarray) -> Any:
    return other
