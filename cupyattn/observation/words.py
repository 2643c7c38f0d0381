"""Arguments and results in words for people."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from .. import array
from ..array import ArrayView
from ..core import parse
from ..errors import CupyAttnError

_INDENT = "  "


def is_array(x: Any) -> bool:
    """Whether it has a shape and a dtype, and is no number and no type of NumPy's."""
    is_like_one = hasattr(x, "shape") and hasattr(x, "dtype")
    return is_like_one and not isinstance(x, (type, np.generic))


def view_of(x: Any, name: str) -> ArrayView | None:
    """The view of an array; None for what has no memory, as while a framework traces."""
    try:
        return array.view(x, name)
    except CupyAttnError:
        return None


def leaves(name: str, x: Any) -> list[tuple[str, Any]]:
    """The argument's arrays and other values, by names such as "kv_cache[0]"."""
    if isinstance(x, dict):
        return [leaf for key, part in x.items() for leaf in leaves(f"{name}[{key!r}]", part)]
    if isinstance(x, (tuple, list)) and any(is_array(part) for part in x):
        return [leaf for at, part in enumerate(x) for leaf in leaves(f"{name}[{at}]", part)]
    return [(name, x)]


def all_leaves(arguments: Iterable[tuple[str, Any]]) -> list[tuple[str, Any]]:
    """The leaves of all arguments."""
    return [leaf for name, x in arguments for leaf in leaves(name, x)]


def described(name: str, x: Any) -> str:
    """Example: "torch bfloat16 [64, 32, 128] on cuda:0, strides [4096, 128, 1]"."""
    if not is_array(x):
        return parse.shown(x)
    view = view_of(x, name)
    if view is None:
        kind = type(x).__name__
        return f"{kind} {x.dtype} {list(x.shape)}, without memory that can be read"
    about = f"{view.framework} {view.dtype} {list(view.shape)} on {view.device}"
    return f"{about}, strides {list(view.strides)}"


def lines_of(arguments: list[tuple[str, Any]]) -> list[str]:
    """A line for each array and other value."""
    parts = all_leaves(arguments)
    width = max((len(name) for name, _ in parts), default=0)
    return [f"{_INDENT}{name:{width}}  {described(name, x)}" for name, x in parts]
