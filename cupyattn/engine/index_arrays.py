"""Lengths and offsets that a call makes itself: constants, and what follows from the caller's.

They stay where they are: on a GPU nothing is copied to the host, and a graph may capture it all.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from .. import array
from ..array import ArrayView
from ..core import dtypes
from ..launch.driver.enqueue import cuda
from .workspace import on_device

_MAX_KEPT = 1024
_kept: dict[tuple[Any, ...], Any] = {}
_lock = threading.Lock()


def progression(count: int, first: int, step: int, like: ArrayView) -> Any:
    """[first, first + step, ...], `count` of them, kept for later calls: nobody may write it.

    The first of each is a copy to the device, but not into a graph, which gets an array of its own.
    """
    key = like.framework, like.device, count, first, step
    kept = _kept.get(key)
    if kept is not None:
        return kept
    if like.device.kind == "cuda" and cuda().is_capturing(array.current_stream(like)):
        return fresh_progression(count, first, step, like)
    values = first + step * np.arange(count, dtype=np.int64)
    numbers = array.constant(values.astype(_dtype(count, first, step).numpy), like)
    with _lock:
        if len(_kept) >= _MAX_KEPT:
            _kept.clear()
        return _kept.setdefault(key, numbers)


def fresh_progression(count: int, first: int, step: int, like: ArrayView) -> Any:
    """The same for one call, made on the device."""
    dtype = _dtype(count, first, step)
    if like.framework == "torch":
        torch = sys.modules["torch"]
        options = {"dtype": getattr(torch, dtype.name), "device": like.owner.device}
        if step == 0:
            return torch.full((count,), first, **options)
        return torch.arange(count, **options) * step + first
    if like.device.kind == "cpu":
        return (first + step * np.arange(count, dtype=np.int64)).astype(dtype.numpy)
    from ..core.cupy_module import cupy_module

    with on_device(like.device.index):
        return cupy_module().arange(count, dtype=dtype.numpy) * step + first


def full(shape: Sequence[int], value: float, like: ArrayView) -> Any:
    """float32 numbers of one value, as of `array.empty`, written on the current stream."""
    result = array.empty(shape, dtypes.float32, like)
    if like.framework == "torch":
        result.fill_(value)
    elif like.device.kind == "cpu":
        result.fill(value)
    else:
        with on_device(like.device.index):
            result.fill(value)
    return result


def compute(function: Callable[..., Any], *views: ArrayView) -> Any:
    """function(elements of each), as torch, CuPy or NumPy arrays: what all three know.

    The result is an array of theirs on the same device, or a list of such.
    """
    like = views[0]
    if like.device.kind == "cpu":
        return function(*map(array.as_numpy, views))
    if all(v.framework == "torch" for v in views):
        return function(*(v.owner for v in views))
    array.same_device(**{f"index {index}": v for index, v in enumerate(views)})
    with on_device(like.device.index):
        result = function(*map(array.as_cupy, views))
    first = result[0] if isinstance(result, list) else result
    array.release(array.view(first, "result"), *views)
    return result


def steps_of(offsets: Any) -> Any:
    """Lengths from offsets [n + 1], for `compute`."""
    return offsets[1:] - offsets[:-1]


def _dtype(count: int, first: int, step: int) -> dtypes.DType:
    return dtypes.int32 if first + step * max(0, count - 1) < 2**31 else dtypes.int64
