"""The arrays of a step, viewed and checked: lengths, slots and masks of drafts."""

from __future__ import annotations

import math
from typing import Any

from .. import array
from ..array import ArrayView
from ..array.match import is_contiguous, require_dtype
from ..core import dtypes
from ..errors import ArgumentError
from ..launch.ops.serving_metadata import FLAT, SQUARE, WORDS

_INDEX = (dtypes.int32, dtypes.int64)
_BOOLS = (dtypes.bool_, dtypes.uint8)


def view_index(x: Any, name: str, count: int | None = None) -> ArrayView:
    v = array.view(x, name)
    require_dtype(v, _INDEX, name)
    if len(v.shape) != 1 or (count is not None and v.shape[0] != count):
        wanted = "n" if count is None else count
        raise ArgumentError(f"{name}: shape is {list(v.shape)}; wanted [{wanted}]")
    if not is_contiguous(v):
        raise ArgumentError(f"{name}: is not contiguous; pass a contiguous array")
    return v


def view_flat(x: Any, name: str) -> ArrayView:
    """An index array of any shape in one axis."""
    v = array.view(x, name)
    require_dtype(v, _INDEX, name)
    if not is_contiguous(v):
        raise ArgumentError(f"{name}: is not contiguous; pass a contiguous array")
    return array.as_strided(v, (math.prod(v.shape),), (1,))


def view_tree(x: Any, bs: int, rows: int) -> tuple[ArrayView, int]:
    """A mask of draft tokens, and its form."""
    if x is None:
        raise ArgumentError("tree_mask: got None; wanted what each draft token sees")
    v = array.view(x, "tree_mask")
    require_dtype(v, (*_BOOLS, dtypes.uint64, dtypes.int64), "tree_mask")
    shape = tuple(v.shape)
    is_flat = len(shape) == 1 and v.dtype in _BOOLS
    is_square = shape in ((bs, rows, rows), (bs * rows, rows)) and v.dtype in _BOOLS
    is_words = shape in ((bs, rows), (bs * rows,)) and v.dtype not in _BOOLS and rows <= 64
    if not (is_flat or is_square or is_words):
        words = f" or words of 64 bits [{bs}, {rows}]" if rows <= 64 else ""
        raise ArgumentError(
            f"tree_mask: {v.dtype} of shape {list(shape)}; wanted bools [{bs}, {rows}, {rows}], "
            f"flat bools, each request's [{rows}, seq_len + {rows}]{words}"
        )
    if not is_contiguous(v):
        raise ArgumentError("tree_mask: is not contiguous; pass a contiguous array")
    return v, FLAT if is_flat else SQUARE if is_square else WORDS
