"""How much of the long tests is run: in the ordinary suite, and when each step of theirs is slow.

CUPYATTN_TEST_SHARE=0.1 leaves a tenth of their repetitions and of every block of random cases.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from typing import Any

import pytest


def some(count: int) -> int:
    """`count`, or the chosen share of it, and at least 1."""
    return max(1, round(count * float(os.environ.get("CUPYATTN_TEST_SHARE", "1"))))


def slow_unless(
    is_ordinary: Callable[[Any], bool], values: Iterable[Any], *, is_several: bool = False
) -> list[Any]:
    """Values of a parameter, of which the ordinary suite runs some and the slow one the others.

    is_several: each value is a tuple, of one value for each of several parameters.
    """
    return [_param(value, is_ordinary(value), is_several) for value in values]


def one_of(
    count: int, values: Iterable[Any], first: int = 0, *, is_several: bool = False
) -> list[Any]:
    """As `slow_unless`, where one value of every `count` is ordinary, from index `first` on."""
    return [_param(x, index % count == first, is_several) for index, x in enumerate(values)]


def _param(value: Any, is_ordinary: bool, is_several: bool) -> Any:
    values = value if is_several else (value,)
    return pytest.param(*values, marks=() if is_ordinary else pytest.mark.slow)
