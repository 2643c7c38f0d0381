"""Memory whose rows ranks exchange, seen as heads by kernels and as bytes by a group."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from .. import array
from ..array import ArrayView
from ..core import dtypes
from ..core.dtypes import DType
from ..launch.ops import copy_rows


class ExchangedRows:
    """[num_rows, columns] elements in memory of the framework of `like`, and parts of it.

    At least one row is there, so that every part has an address.

    memory   bytes to use instead of new ones, CuPy's or NumPy's, which hold one row at least
    """

    def __init__(
        self, num_rows: int, columns: int, dtype: DType, like: ArrayView, memory: Any = None
    ) -> None:
        self.num_rows, self.columns = max(1, num_rows), columns
        if memory is None:
            self.whole = array.empty((self.num_rows, columns), dtype, like)
        else:
            size = self.num_rows * columns * dtype.itemsize
            elements = memory[:size]
            if like.framework == "torch":
                elements = sys.modules["torch"].from_dlpack(elements)
            kind = _element_type(dtype, like.framework)
            self.whole = elements.view(kind).reshape(self.num_rows, columns)
        self.view = array.view(self.whole, "exchanged rows")

    def heads(self, column: int, num_heads: int, head_dim: int) -> Any:
        """[num_rows, num_heads, head_dim]: columns from this one on."""
        shape, strides = (self.num_rows, num_heads, head_dim), (self.columns, head_dim, 1)
        return array.restride(self.whole, "rows", shape, strides, column)

    def strided(
        self,
        column: int,
        shape: tuple[int, ...],
        strides: tuple[int, ...],
        dtype: DType | None = None,
    ) -> ArrayView:
        """A view from a column of the first row on; strides count elements of its own dtype."""
        own = self.view
        dtype = own.dtype if dtype is None else dtype
        address = own.ptr + column * own.dtype.itemsize
        return ArrayView(address, shape, strides, dtype, own.device, "dlpack", False, own.owner)

    def seen_as(self, dtype: DType) -> Any:
        """[num_rows, 1, columns]: the bytes of all rows as elements of another dtype."""
        kind = _element_type(dtype, self.view.framework)
        return self.whole.view(kind).reshape(self.num_rows, 1, -1)

    def bytes(self, first: int, count: int) -> Any:
        """The bytes of so many rows, as the array that a group takes."""
        own = self.view
        size = self.columns * own.dtype.itemsize
        row_bytes = ArrayView(
            own.ptr + first * size,
            (count * size,),
            (1,),
            dtypes.uint8,
            own.device,
            "dlpack",
            False,
            own.owner,
        )
        return array.as_numpy(row_bytes) if own.device.kind == "cpu" else array.as_cupy(row_bytes)


def _element_type(dtype: DType, framework: str) -> Any:
    return getattr(sys.modules["torch"], dtype.name) if framework == "torch" else dtype.numpy


def copy(pairs: Sequence[tuple[ArrayView, ArrayView]], stream: int | None) -> None:
    """Copy sources to targets of their shape, at most two pairs of one dtype in a launch.

    Axes, of which there are up to four, may have any strides but for a contiguous last one.
    """
    if pairs[0][0].device.kind == "cuda":
        copy_rows.launch(pairs, stream or 0)
        return
    for source, target in pairs:
        array.as_numpy(target)[...] = array.as_numpy(source)
