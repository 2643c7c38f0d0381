"""fp8 arrays in 16 bits, which hold all their values."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np

from .. import array
from ..array import ArrayView
from ..core import dtypes
from ..core.dtypes import DType
from .workspace import on_device


def widened(v: ArrayView, dtype: DType, name: str) -> Any:
    """A new array of the same fp8 numbers as float16 or bfloat16, made on the device."""
    if v.device.kind == "cpu":
        return array.from_numpy(array.as_numpy(v).astype(dtype.numpy), v)
    if v.framework == "torch":
        return v.owner.to(getattr(sys.modules["torch"], dtype.name))
    with on_device(v.device.index):
        bits = widened_bits(array.as_cupy(v, np.dtype(np.uint8)), v.dtype, dtype)
        made = bits.view(dtype.numpy)
    array.release(array.view(made, name), v)
    return array.deliver(made, v)


def widened_bits(x: Any, dtype: DType, wide: DType) -> Any:
    """The bits of fp8 numbers, uint8, as those of the same numbers in 16 bits: for CuPy, which has
    no fp8 of its own."""
    is_e4m3 = dtype is dtypes.float8_e4m3fn
    magnitude = x & 0x7F
    bits = ((x & 0x80).astype(np.uint16) << 8) | (magnitude.astype(np.uint16) << 8 - is_e4m3)
    if is_e4m3:
        # Their exponent is 8 less than float16's with the same bits; the largest is no number.
        nan = (magnitude == 0x7F).astype(np.uint16) * np.uint16(0x7FFF)
        bits = (bits.view(np.float16) * np.float16(256)).view(np.uint16) | nan
    if wide is dtypes.float16:
        return bits
    return (bits.view(np.float16).astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
