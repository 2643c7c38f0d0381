"""Storing new rows in a paged cache, and the rounding to fp8 that it may take."""

from __future__ import annotations

import ml_dtypes
import numpy as np

FP8_NAN = 0x7F

Slots = tuple[np.ndarray, np.ndarray, np.ndarray]


def to_fp8(x: np.ndarray, scale: float | np.ndarray, dtype: np.dtype) -> np.ndarray:
    """x / scale, a float32 quotient, as fp8: to nearest, ties to even. A scale is a number, or an
    array that broadcasts with x.

    What is beyond the largest finite value, infinity included, becomes that value with its sign.
    Every NaN becomes 0x7f.
    """
    largest = np.float32(ml_dtypes.finfo(dtype).max)
    with np.errstate(over="ignore", invalid="ignore"):
        quotient = x.astype(np.float32) / np.asarray(scale, np.float32)
        rounded = np.clip(quotient, -largest, largest).astype(dtype)
    rounded.view(np.uint8)[np.isnan(quotient)] = FP8_NAN
    return rounded


def store_rows(
    x: np.ndarray, cache: np.ndarray, slots: Slots, scale: float | np.ndarray = 1.0
) -> None:
    """Write rows of x [nnz, H, D] to their slots in cache [P, page_size, H, D], in place.

    Parameters
    ----------
    slots
        (rows, page, offset), what `paging.slots` gives. Of two rows for a slot the last stays.
    """
    rows, page, offset = slots
    new = x[rows]
    if new.dtype != cache.dtype:
        new = to_fp8(new, scale, cache.dtype)
    # As integers: a copy then keeps every bit of a NaN.
    bits = np.dtype(f"u{cache.dtype.itemsize}")
    cache.view(bits)[page, offset] = new.view(bits)
