"""Checks of the scalar arguments that every attention call takes."""

from __future__ import annotations

import math
from collections.abc import Iterable
from numbers import Number

import numpy as np

from ..errors import ArgumentError
from .problem import KV_LAYOUTS, POS_ENCODING_MODES

_INT32_MAX = 2**31 - 1
_FLOAT32_MAX = (2 - 2**-23) * 2.0**127
_MAX_CHARACTERS = 100


def choice(value: object, allowed: tuple[str, ...], name: str) -> str:
    """`value` if it is one of the allowed strings."""
    if not isinstance(value, str) or value not in allowed:
        wanted = ", ".join(map(repr, allowed))
        raise ArgumentError(f"{name}: got {shown(value)}; wanted one of {wanted}")
    return str(value)


def kv_layout(value: object) -> str:
    return choice(value, KV_LAYOUTS, "kv_layout")


def other_layout(kv_layout: str) -> str:
    return "NHD" if kv_layout == "HND" else "HND"


def pos_encoding_mode(value: object) -> str:
    return choice(value, POS_ENCODING_MODES, "pos_encoding_mode")


def window(value: object, name: str) -> int:
    """One side of a window: -1 for none, else the number of keys beside the row's own."""
    keys = _integer(value)
    if keys is None or not -1 <= keys <= _INT32_MAX:
        raise ArgumentError(
            f"{name}: got {shown(value)}; wanted an integer, -1 for no window or 0 to {_INT32_MAX} "
            "keys"
        )
    return keys


def require_int(value: object, name: str, minimum: int = 1, maximum: int = _INT32_MAX) -> int:
    """An integer of the host's: an array of the device would have to be waited for."""
    number = _integer(value)
    if number is None or not minimum <= number <= maximum:
        limit = (
            f"at most {maximum}"
            if number is not None and number > maximum
            else f"{minimum} or more"
        )
        raise ArgumentError(f"{name}: got {shown(value)}; wanted an integer, {limit}")
    return number


def finite(value: object, name: str, default: float) -> float:
    """A finite float that float32 can hold; None is the default."""
    if value is None:
        return default
    number = _real(value)
    if number is None:
        raise ArgumentError(f"{name}: got {shown(value)}; wanted a number")
    if not abs(number) <= _FLOAT32_MAX:
        raise ArgumentError(f"{name}: got {shown(value)}; wanted a finite number that fits float32")
    return number


def positive(value: object, name: str, default: float) -> float:
    """A finite float above zero; None is the default."""
    number = finite(value, name, default)
    if number <= 0.0:
        raise ArgumentError(f"{name}: got {shown(value)}; wanted a number above 0")
    return number


def soft_cap(value: object) -> float:
    """The logits soft cap; None and 0 mean none."""
    number = finite(value, "logits_soft_cap", 0.0)
    if number < 0.0:
        raise ArgumentError(
            f"logits_soft_cap: got {shown(value)}; wanted 0 (off) or a positive cap"
        )
    return number


def flag(value: object, name: str) -> bool:
    """A bool, also NumPy's, or as a number 0 or 1."""
    if _is_bool(value):
        return bool(value)
    number = _integer(value)
    if number not in (0, 1):
        raise ArgumentError(f"{name}: got {shown(value)}; wanted True or False")
    return number == 1


def shown(value: object) -> str:
    """What a message says of a value: not the elements of an array, which may have to be waited
    for."""
    if hasattr(value, "shape") and not isinstance(value, type):
        if getattr(value, "shape", None) != () or not isinstance(value, Number):
            return f"an array, {type(value).__name__}"
    text = repr(value)
    return text if len(text) <= _MAX_CHARACTERS else text[:_MAX_CHARACTERS] + "..."


# Numbers go by their value, whatever their type: a cache of calls tells 2 and 2.0 apart no more
# than Python does. But bools are no numbers, so a cache has to look where one would be equal.


BOOLS = bool, np.bool_


def zeros_and_ones(scalars: Iterable[object]) -> list[int]:
    """The places of numbers 0 and 1, to which a bool would be equal."""
    return [i for i, x in enumerate(scalars) if x in (0, 1) and type(x) not in BOOLS]


def _is_bool(value: object) -> bool:
    return type(value).__name__ in ("bool", "bool_")


def _integer(value: object) -> int | None:
    """The integer that a number is equal to; None for all else."""
    if type(value) is int:
        return value
    if _is_bool(value) or not isinstance(value, Number):
        return None
    try:
        number = int(value.real)  # type: ignore[attr-defined]
        return number if number == value else None
    except (ArithmeticError, AttributeError, TypeError, ValueError):
        return None


def _real(value: object) -> float | None:
    """The float that a number is equal to, rounded; None for all else.

    One-element arrays of any framework and NumPy scalars of ml_dtypes are numbers too.
    """
    if not isinstance(value, Number):
        if getattr(value, "ndim", None) not in (0, 1):
            return None
        try:
            value = value.item()  # type: ignore[attr-defined]
        except (AttributeError, RuntimeError, TypeError, ValueError):
            return None
    if _is_bool(value) or not isinstance(value, Number):
        return None
    try:
        number = complex(value)  # type: ignore[call-overload]
    except OverflowError:
        return math.inf
    except (ArithmeticError, TypeError, ValueError):
        return None
    return None if number.imag else float(number.real)
