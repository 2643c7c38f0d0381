"""Rounding to fp8: the reference, and the tests' own rounding, against a table of all values."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from helpers.page_cases import all_roundings, rounded

from cupyattn import reference
from cupyattn.core import dtypes
from cupyattn.core.dtypes import DType

FP8 = pytest.mark.parametrize("row", [dtypes.float8_e4m3fn, dtypes.float8_e5m2], ids=repr)


def nearest(x: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """Bits of the nearest finite fp8 by search in the list of all, ties to the even one."""
    codes = np.arange(128, dtype=np.uint8)
    values = codes.view(dtype).astype(np.float64)
    values, codes = values[np.isfinite(values)], codes[np.isfinite(values)]
    size = np.minimum(np.abs(np.where(np.isnan(x), 0, x)), values[-1]).astype(np.float64)
    above = np.searchsorted(values, size)
    below = np.maximum(above - 1, 0)
    up, down = values[above] - size, size - values[below]
    found = np.where((up < down) | ((up == down) & (codes[above] % 2 == 0)), above, below)
    bits = codes[found] | np.where(np.signbit(x), 0x80, 0).astype(np.uint8)
    return np.where(np.isnan(x), np.uint8(0x7F), bits)


@FP8
def test_the_reference_rounds_to_nearest(row: DType) -> None:
    x = all_roundings()
    got = reference.to_fp8(x, 1.0, row.numpy).view(np.uint8)
    np.testing.assert_array_equal(got, nearest(x, row.numpy))
    np.testing.assert_array_equal(got, rounded(x, 1.0, row.numpy).view(np.uint8))
    is_small = np.abs(x) <= float(ml_dtypes.finfo(row.numpy).max)
    np.testing.assert_array_equal(got[is_small], x[is_small].astype(row.numpy).view(np.uint8))


def test_scales_divide_once() -> None:
    x = np.array([1.0, -3.0, np.inf, np.nan, 1e30, -0.0], np.float32)
    got = reference.to_fp8(x, 0.1, dtypes.float8_e4m3fn.numpy)
    assert got.astype(np.float64)[:3].tolist() == [10.0, -30.0, 448.0]
    assert got.view(np.uint8)[3:].tolist() == [0x7F, 0x7E, 0x80]
