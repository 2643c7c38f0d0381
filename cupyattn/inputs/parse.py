"""Checks of the scalar arguments that every attention call takes."""

from __future__ import annotations

import math
from numbers import Integral, Real

from ..core.problem import KV_LAYOUTS, POS_ENCODING_MODES
from ..errors import ArgumentError

_INT32_MAX = 2**31 - 1
_FLOAT32_MAX = (2 - 2**-23) * 2.0**127


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
    window = int(value)
    if not -1 <= window <= _INT32_MAX:
        raise ArgumentError(
            f"window_left: got {window}; wanted -1 (no window) or 0 to {_INT32_MAX} keys"
        )
    return window


def finite(value: object, name: str, default: float) -> float:
    """A finite float that float32 can hold; None is the default."""
    if value is None:
        return default
    number = _real(value, name)
    if not abs(number) <= _FLOAT32_MAX:
        raise ArgumentError(f"{name}: got {value!r}; wanted a finite number that fits float32")
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
    # One-element arrays of any framework and NumPy scalars of ml_dtypes are numbers too.
    if isinstance(value, Real) or getattr(value, "ndim", None) in (0, 1):
        try:
            if not isinstance(value, bool):
                return float(value if isinstance(value, Real) else value.item())  # type: ignore[attr-defined]
        except OverflowError:
            return math.inf
        except (AttributeError, RuntimeError, TypeError, ValueError):
            pass
    raise ArgumentError(f"{name}: got {value!r}; wanted a number")
