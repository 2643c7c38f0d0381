"""Arrays set into a larger poisoned buffer, so that reading or writing outside them shows.

A buffer holds guard bands before and after the array, and whatever its strides skip. Every
element the array does not own is a NaN with a payload no arithmetic makes (integers: an absurd
value; bools: True): a stray read contaminates the answer, a stray write is found bit by bit.

    p = poison.embed(array, strides=(…), xp=cupy)   # p.array: the view to pass to the kernel
    p.assert_intact("k")                            # guards and gaps untouched

The same call serves NumPy, CuPy and torch: buffers are built in NumPy and uploaded as raw bits.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import numpy as np

from cupyattn import array as arrays

GUARD = 256

_PAYLOADS = {
    "float16": 0x7ED5,
    "bfloat16": 0x7FD5,
    "float32": 0x7FD5A5A5,
    "float64": 0x7FF8_D5A5_A5A5_A5A5,
    "float8_e4m3fn": 0x7F,
    "float8_e5m2": 0x7D,
    "int32": 2_147_480_000,
    "int64": 9_007_199_254_740_000,
    "uint8": 0xFF,
    "int8": 0x80,
    "bool": 1,
}


@dataclass(frozen=True)
class Poisoned:
    """`array` is the view inside `buffer`, the flat poisoned array; both belong to `xp`.

    `owned` bool [buffer size] marks the elements of the view; strides and offset are in elements.
    """

    array: Any
    buffer: Any
    owned: np.ndarray
    offset: int
    strides: tuple[int, ...]
    dtype: np.dtype

    def assert_intact(self, what: str) -> None:
        """Fail, with the place, if an element outside the view is no longer the poison."""
        bits = _download(self.buffer, self.dtype).view(_bits(self.dtype))
        touched = ~self.owned & (bits != _pattern(self.dtype))
        if touched.any():
            first = int(np.flatnonzero(touched)[0])
            raise AssertionError(
                f"{what}: {touched.sum()} elements outside the array were written; the first is "
                f"{first - self.offset} elements from its start, now bits {int(bits[first]):#x}"
            )

    def clear(self) -> None:
        """Make the array itself poison again."""
        pattern = np.array(_pattern(self.dtype))
        raw(self.array)[...] = int(pattern.view(f"i{self.dtype.itemsize}"))

    def values(self) -> np.ndarray:
        """The array's present content, a C-contiguous NumPy copy."""
        flat = _download(self.buffer, self.dtype)
        return _strided(flat, self.array.shape, self.strides, self.offset, np).copy()


def embed(
    array: np.ndarray,
    strides: Sequence[int] | None = None,
    *,
    offset: int = 0,
    guard: int = GUARD,
    xp: ModuleType = np,
    device: str = "cuda",
) -> Poisoned:
    """A poisoned buffer that holds a copy of `array` at `strides` (elements; default C order).

    offset moves the start by that many elements, to break alignment; guard is the number of
    poisoned elements on either side. xp: numpy, cupy or torch (then on `device`).
    """
    shape = array.shape
    steps = tuple(strides) if strides is not None else _c_strides(shape)
    index = _element_index(shape, steps) + guard + offset
    flat = np.full(guard + offset + _extent(shape, steps) + guard, _pattern(array.dtype))
    owned = np.zeros(flat.size, np.bool_)
    owned[index] = True
    assert owned.sum() == array.size, f"strides {steps} let elements of shape {shape} overlap"
    flat = flat.view(array.dtype)
    flat[index] = array
    buffer = _upload(flat, xp, device)
    view = _strided(buffer, shape, steps, guard + offset, xp)
    return Poisoned(view, buffer, owned, guard + offset, steps, array.dtype)


def blank(
    shape: Sequence[int], dtype: np.dtype, strides: Sequence[int] | None = None, **where: Any
) -> Poisoned:
    """Like `embed`, for an output: the array itself is poison too, so unwritten elements show."""
    pattern = np.full(tuple(shape), _pattern(np.dtype(dtype)))
    return embed(pattern.view(dtype), strides, **where)


def strides(shape: Sequence[int], is_aligned: bool, is_padded: bool) -> tuple[int, ...]:
    """Strides in elements: rows on 16-byte boundaries, or off them, with gaps or without."""
    pitch, gap = shape[-1], 48 if is_padded else 0
    if not is_aligned:
        pitch += 3
    elif is_padded:
        pitch = (pitch + 31) // 16 * 16
    steps = [1, pitch]
    for extent in shape[-2:0:-1]:
        steps.append(steps[-1] * max(extent, 1) + gap)
    return tuple(reversed(steps[: len(shape)]))


def gaps(
    kind: str, shape: tuple[int, ...], place: int = 0, *, is_s: bool = False
) -> tuple[int, ...] | None:
    """Strides in elements, other ones for each place; None for "packed".

    kind: "gaps" of whole 16 elements, "unaligned" ones, or "transposed", where the first axes are
    in reverse order. is_s: the array has no head dim.
    """
    if kind == "packed":
        return None
    gap = 1 + place if kind == "unaligned" else 16 * (1 + place)
    order = list(reversed(range(len(shape))))
    if kind == "transposed":
        order = order if is_s else order[1:]
        order = [*([] if is_s else [len(shape) - 1]), *reversed(order)]
    strides, reach = [0] * len(shape), 1
    for axis in order:
        strides[axis] = reach
        reach = reach * max(1, shape[axis]) + (gap if axis != order[-1] else 0)
    return tuple(strides)


def raw(x: Any) -> Any:
    """The same memory as integers: bf16 and fp8 are no dtypes for CuPy's own kernels."""
    name = f"int{8 * x.dtype.itemsize}"
    if type(x).__module__ == "torch":
        import torch

        return x.view(getattr(torch, name))
    return x.view(name)


def upload(values: np.ndarray, xp: ModuleType) -> Any:
    """A plain copy of `values` on the device."""
    return embed(values, guard=0, xp=xp).array


def download(x: Any) -> np.ndarray:
    """A copy of an array of the device."""
    return arrays.to_host(arrays.view(x, "x")).copy()


def _bits(dtype: np.dtype) -> np.dtype:
    return np.dtype(f"u{dtype.itemsize}")


def _pattern(dtype: np.dtype) -> np.unsignedinteger[Any]:
    absurd = int.from_bytes(b"\xd5" * dtype.itemsize, "little")
    return _bits(dtype).type(_PAYLOADS.get(dtype.name, absurd))


def _c_strides(shape: Sequence[int]) -> tuple[int, ...]:
    return tuple(math.prod(shape[i + 1 :]) for i in range(len(shape)))


def _element_index(shape: Sequence[int], strides: Sequence[int]) -> np.ndarray:
    """Flat place of every element, [*shape]."""
    grids = np.indices(shape, dtype=np.int64)
    return sum((g * s for g, s in zip(grids, strides, strict=True)), np.zeros(shape, np.int64))


def _extent(shape: Sequence[int], strides: Sequence[int]) -> int:
    if 0 in shape:
        return 0
    return 1 + sum((n - 1) * s for n, s in zip(shape, strides, strict=True))


def _upload(flat: np.ndarray, xp: ModuleType, device: str) -> Any:
    if xp.__name__ == "numpy":
        return flat.copy()
    # As plain integers: neither framework takes NumPy arrays of ml_dtypes.
    bits = flat.view(np.dtype(f"i{flat.dtype.itemsize}"))
    if xp.__name__ == "torch":
        return xp.from_numpy(bits.copy()).to(device).view(getattr(xp, flat.dtype.name))
    return xp.asarray(bits).view(flat.dtype)


def _download(buffer: Any, dtype: np.dtype) -> np.ndarray:
    module = type(buffer).__module__.partition(".")[0]
    if module == "torch":
        return raw(buffer).cpu().numpy().view(dtype)
    if module == "cupy":
        return raw(buffer).get().view(dtype)
    return buffer


def _strided(
    flat: Any, shape: Sequence[int], strides: Sequence[int], offset: int, xp: ModuleType
) -> Any:
    if xp.__name__ == "torch":
        return xp.as_strided(flat, tuple(shape), tuple(strides), offset)
    size = flat.dtype.itemsize
    steps = tuple(s * size for s in strides)
    if xp.__name__ == "cupy":
        return xp.lib.stride_tricks.as_strided(flat[offset:], tuple(shape), steps)
    # NumPy's own as_strided fails on ml_dtypes' float8_e5m2.
    return np.ndarray(tuple(shape), flat.dtype, flat.view(np.uint8), offset * size, steps)
