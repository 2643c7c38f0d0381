"""fp8 arrays in 16 bits, which hold all their values, and whether queries need that."""

from __future__ import annotations

import sys
from typing import Any

from .. import array
from ..array import ArrayView
from ..core import dtypes
from ..core.dtypes import DType
from ..core.problem import AttentionProblem
from ..errors import ArgumentError, UnsupportedError
from ..launch.ops import copy_rows


def keeps_8bit(
    vq: ArrayView, vk: ArrayView, vv: ArrayView, page_size: int = 0, **options: Any
) -> bool:
    """Whether queries of 8 bits are served as they are: keys and values are of 8 bits as these want
    them, and such heads and options are supported. A call that also takes other fp8 queries widens
    them.

    options: fields of AttentionProblem.
    """
    dtype = vq.dtype
    if not dtype.is_8bit_query or vk.dtype is not dtype or vv.dtype is not dtypes.float8_e4m3fn:
        return False
    problem = AttentionProblem(
        dtype_q=dtype,
        dtype_kv=vv.dtype,
        dtype_o=dtype.of_output,
        head_dim_qk=vq.shape[-1],
        head_dim_vo=vv.shape[-1],
        paged=page_size > 0,
        **options,
    )
    try:
        problem.check_supported()
    except (ArgumentError, UnsupportedError):
        return False
    return True


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
