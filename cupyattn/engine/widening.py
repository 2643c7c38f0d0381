"""fp8 arrays in 16 bits, which hold all their values."""

from __future__ import annotations

import sys
from typing import Any

from .. import array
from ..array import ArrayView
from ..core.dtypes import DType
from ..launch.ops import copy_rows


def widened(v: ArrayView, dtype: DType, name: str) -> Any:
    """A new array of the same fp8 numbers as float16 or bfloat16, made on the device."""
    if v.framework == "torch":
        return v.owner.to(getattr(sys.modules["torch"], dtype.name))
    return widened_pair((v,), dtype, name)[0]


def widened_pair(views: tuple[ArrayView, ...], dtype: DType, name: str) -> list[Any]:
    """The same of one or two arrays of up to four axes, by one launch."""
    like = views[0]
    if like.device.kind == "cpu":
        return [array.from_numpy(array.as_numpy(v).astype(dtype.numpy), v) for v in views]
    copies = [array.empty(tuple(v.shape), dtype, like) for v in views]
    targets = [array.view(x, name) for x in copies]
    array.acquire(targets[0], *views)
    copy_rows.launch(list(zip(views, targets, strict=True)), array.current_stream(targets[0]))
    array.release(targets[0], *views)
    return [array.deliver(x, like) for x in copies]
