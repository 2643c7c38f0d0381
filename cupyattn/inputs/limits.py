"""Limits that every call keeps to: lengths, and rows on 16-byte boundaries."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ..core.dtypes import DType

# Lengths are 32-bit in the kernels, which look up to a tile beyond the end.
MAX_LENGTH = 2**31 - 1 - 64


def are_rows_aligned(pointers: int, strides: Iterable[tuple[Sequence[int], DType]]) -> bool:
    """True if all these addresses (or-ed together) and strides are multiples of 16 bytes, and no
    stride is negative, which neither vectors nor copy engines are made for."""
    offsets = pointers
    for elements, dtype in strides:
        for stride in elements:
            offsets |= stride * dtype.itemsize
    return offsets & 15 == 0 <= offsets
