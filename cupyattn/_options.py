"""Checks of the scalar arguments that every attention call takes."""

from __future__ import annotations

import math
from numbers import Integral, Real

from .errors import ArgumentError
from .problem import KV_LAYOUTS, POS_ENCODING_MODES

_INT32_MAX = 2**31 - 1


def choice(value: object, allowed: tuple[str, ...], name: str) -> str:
    """`value` if it is one of the allowed strings."""
    if value not in allowed:
        raise ArgumentError(f"{name}: got {value!r}; wanted one of {', '.join(map(repr, allowed))}")
    return str(value)


def kv_layout(value: object) -> str:
    return choice(value, KV_LAYOUTS, "kv_layout")


def pos_encoding_mode(value: object) -> str:
    return choice(value, POS_ENCODING_MODES, "pos_encoding_mode")


def window_left(value: object) -> int:
    """A window: -1 for none, else the number of keys to the left of the row's own."""
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise ArgumentError(f"window_left: got {value!r}; wanted an integer, -1 for no window")
    if not -1 <= value <= _INT32_MAX:
        raise ArgumentError(
            f"window_left: got {value}; wanted -1 (no window) or 0 to {_INT32_MAX} keys"
        )
    return int(value)


def finite(value: object, name: str, default: float) -> float:
    """A finite float; None is the default."""
    if value is None:
        return default
    number = _real(value, name)
    if not math.isfinite(number):
        raise ArgumentError(f"{name}: got {value!r}; wanted a finite number")
    return number


def positive(value: object, name: str, default: float) -> float:
    """A finite float above zero; None is the default."""
    number = finite(value, name, default)
    if number <= 0.0:
        raise ArgumentError(f"{name}: got {value!r}; wanted a number above 0")
    return number


def soft_cap(value: object) -> float:
    """The logits soft cap; None and 0 mean none."""
    number = finite(value, "logits_soft_cap", 0.0)
    if number < 0.0:
        raise ArgumentError(f"logits_soft_cap: got {value!r}; wanted 0 (off) or a positive cap")
    return number


def flag(value: object, name: str) -> bool:
    """A bool, also as a 0/1 integer or a NumPy bool."""
    if isinstance(value, Integral) and value in (0, 1):
        return bool(value)
    if type(value).__name__ in ("bool", "bool_"):
        return bool(value)
    raise ArgumentError(f"{name}: got {value!r}; wanted True or False")


def _real(value: object, name: str) -> float:
    if isinstance(value, Real) and not isinstance(value, bool):
        return float(value)
    # One-element arrays of any framework, NumPy scalars of ml_dtypes.
    if getattr(value, "size", None) == 1 or getattr(value, "ndim", None) == 0:
        try:
            return float(value)  # type: ignore[arg-type]
        except (TypeError, ValueError):
            pass
    raise ArgumentError(f"{name}: got {value!r}; wanted a number")
