"""Statistics of an array's elements, for which the GPU is waited for."""

from __future__ import annotations

import math

import numpy as np

from .. import array
from ..array import ArrayView
from ..launch.driver import enqueue

# Of a larger array only so many elements are read.
_MAX_ELEMENTS = 1 << 24


def is_capturing(view: ArrayView) -> bool:
    """Whether a graph is captured on the stream of an array on a GPU, where nothing can be read."""
    if view.device.kind == "cpu":
        return False
    return bool(enqueue.cuda().is_capturing(array.current_stream(view)))


def statistics(view: ArrayView) -> str:
    """Example: "-3.2 to 3.4, mean 0.01, 2 NaN"."""
    if is_capturing(view):
        return "no statistics while a graph is captured"
    part, about = _begin(view)
    numbers = array.to_host(part)
    if not numbers.size:
        return "no elements"
    if numbers.dtype.kind == "b":
        return f"{np.count_nonzero(numbers):,} of {numbers.size:,} true{about}"
    if numbers.dtype.kind in "iu":
        return f"{numbers.min():,} to {numbers.max():,}{about}"
    return _of_floats(numbers.astype(np.float32)) + about


def _begin(view: ArrayView) -> tuple[ArrayView, str]:
    """An array, or as much of a large one as is read."""
    if math.prod(view.shape) <= _MAX_ELEMENTS:
        return view, ""
    row = math.prod(view.shape[1:])
    rows = max(1, _MAX_ELEMENTS // row)
    part = array.as_strided(view, (rows, *view.shape[1:]), tuple(view.strides))
    return part, f", of the first {rows:,} of {view.shape[0]:,} along the first axis"


def _of_floats(numbers: np.ndarray) -> str:
    is_finite = np.isfinite(numbers)
    finite = numbers[is_finite]
    parts = []
    if finite.size:
        mean = finite.mean(dtype=np.float64)
        parts.append(f"{finite.min():.4g} to {finite.max():.4g}, mean {mean:.4g}")
    if finite.size < numbers.size:
        nans = int(np.count_nonzero(np.isnan(numbers)))
        counts = (nans, "NaN"), (numbers.size - finite.size - nans, "infinite")
        parts += [f"{count:,} {what}" for count, what in counts if count]
    return ", ".join(parts)
