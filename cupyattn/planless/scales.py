"""Scales of a call without a plan: numbers, or one number each in memory."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np

from .. import array
from ..array import ArrayView
from ..array.match import require_dtype
from ..core import dtypes
from ..errors import ArgumentError
from ..inputs import parse

# Where the scales of q, k and v are among what not every call has (Arrays from qo_lens on); -1 for
# none.
_SCALE_Q, _SCALE_K, _SCALE_V, _NO_SCALE = 6, 7, 8, -1


class Scales(NamedTuple):
    """Numbers for logits and output; views of what is in device memory, of q, k and v.

    places       of those among what not every call has
    is_constant  whether the numbers are those of all calls that look like this one
    """

    logits: float
    output: float
    views: tuple[ArrayView | None, ...]
    places: tuple[int, int, int]
    is_constant: bool


def number_or_array(scale: Any) -> tuple[Any, Any]:
    """A scale as (number, array of one element or None)."""
    if type(scale) is float:
        return scale, None
    if scale is None:
        return 1.0, None
    if isinstance(scale, (int, float, np.generic)) or not hasattr(scale, "shape"):
        return scale, None
    return 1.0, scale


def view_scales(
    arrays: tuple[Any, ...],
    numbers: tuple[Any, Any, Any],
    names: tuple[str, str, str],
    head_dim: int,
    is_fp8: bool,
) -> Scales:
    """Checked: arrays and numbers of (logits, keys and values, output).

    Without a number for keys and values the first two scale the logits. With one they do so where
    keys are fp8, times 1 / sqrt(head_dim), and then it scales the output too (as xqa has it).
    """
    places = _SCALE_Q, _SCALE_K, _SCALE_V
    found = [None if x is None else _view(x, name) for x, name in zip(arrays, names, strict=True)]
    logits = parse.finite(numbers[0], names[0], 1.0)
    output = parse.finite(numbers[2], names[2], 1.0)
    if numbers[1] is not None:
        logits /= math.sqrt(max(1, head_dim))
        kv_scale = parse.finite(numbers[1], names[1], 1.0)
        if is_fp8:
            logits, output = logits * kv_scale, output * kv_scale
            places, found[2] = (_SCALE_Q, _SCALE_K, _SCALE_K), found[1]
        else:
            places, found[1] = (_SCALE_Q, _NO_SCALE, _NO_SCALE), None
    # What is in the host's memory is read, for that waits for nothing.
    on_host = [v is not None and v.device.kind == "cpu" for v in found]
    of_q, of_k, of_v = (
        float(array.as_numpy(v).ravel()[0]) if is_host and v is not None else 1.0
        for v, is_host in zip(found, on_host, strict=True)
    )
    return Scales(
        parse.finite(logits * of_q * of_k, names[0], 1.0),
        parse.finite(output * of_v, names[2], 1.0),
        tuple(None if is_host else v for v, is_host in zip(found, on_host, strict=True)),
        places,
        not any(on_host),
    )


def _view(x: Any, name: str) -> ArrayView:
    v = array.view(x, name)
    if math.prod(v.shape) != 1:
        raise ArgumentError(
            f"{name}: shape is {list(v.shape)}; wanted a number, or an array of one element"
        )
    require_dtype(v, dtypes.float32, name)
    return v
