"""Head dims that no kernel has, 57 or 111: copies of q, k and v with columns of zeros behind."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from .. import array
from ..array import ArrayView
from ..array.match import match_output, require_contiguous_last
from ..core import dtypes
from ..core.problem import MAX_HEAD_DIM
from ..launch.ops import copy_rows
from .batch import Batch

# What kernels read at a time, in elements of 16 bits.
_STEP = 8


def needs_padding(batch: Batch, vq: ArrayView) -> bool:
    """Whether head dims are none of the kernels', but could be with columns of zeros."""
    dim_qk = vq.shape[-1]
    dim_vo = array.view(batch.v, batch.names.v).shape[-1]
    if not (dim_qk % _STEP or dim_vo % _STEP):
        return False
    fits = 0 < min(dim_qk, dim_vo) and max(dim_qk, dim_vo) <= MAX_HEAD_DIM
    return fits and array.view(batch.k, batch.names.k).shape[-1] == dim_qk


def pad_columns(batch: Batch, vq: ArrayView, out: Any) -> tuple[Batch, Any]:
    """The batch with padded copies, and an array for their answer, or None.

    The copies are filled by `append`, once the call is checked and new keys are written.
    out: the caller's array, to which `narrowed` copies the answer.
    """
    names = batch.names
    views = [vq, array.view(batch.k, names.k), array.view(batch.v, names.v)]
    inputs = dict(zip(("q", names.k, names.v), views, strict=True))
    for name, v in inputs.items():
        require_contiguous_last(v, name)
    target, dim = None, views[2].shape[-1]
    if out is not None:
        vout = array.view(out, "out")
        match_output(vout, (*vq.shape[:-1], dim), vout.dtype, "out", **inputs)
        target = array.empty((*vq.shape[:-1], _padded(dim)), vout.dtype, vq)
    given, copies = [batch.q, batch.k, batch.v], []
    for place, v in enumerate(views):
        if v.shape[-1] % _STEP:
            given[place] = made = _empty_padded(v)
            copies.append((made, v))
    append = _filling(copies, batch.append)
    q, k, v = given
    return replace(batch, q=q, k=k, v=v, append=append), target


def narrowed(made: Any, dim: int, like: ArrayView, out: Any) -> Any:
    """The first `dim` columns of an answer, as the caller's `out`, or as an array like the
    caller's."""
    v = array.view(made, "out")
    if out is not None:
        copy_columns([(v, array.view(out, "out"))])
        return out
    if like.framework != "jax":
        return made[..., :dim]
    return array.deliver(array.row_major(made[..., :dim], "out"), like)


def _padded(dim: int) -> int:
    return -(-dim // _STEP) * _STEP


def _empty_padded(v: ArrayView) -> Any:
    shape = (*v.shape[:-1], _padded(v.shape[-1]))
    if not v.dtype.is_fp8 or v.framework == "torch" or v.device.kind == "cpu":
        return array.empty(shape, v.dtype, v)
    # CuPy makes no fp8 arrays: these lie in an array of bytes.
    made = array.view(array.empty(shape, dtypes.uint8, v), "a copy")
    rest = made.device, made.framework, made.readonly, made.owner
    return ArrayView(made.ptr, made.shape, made.strides, v.dtype, *rest)


def _filling(
    copies: list[tuple[Any, ArrayView]], append: Callable[[], None] | None
) -> Callable[[], None]:
    def fill() -> None:
        if append is not None:
            append()
        for begin in range(0, len(copies), 2):
            copy_columns([(v, array.view(x, "a copy")) for x, v in copies[begin : begin + 2]])

    return fill


def copy_columns(pairs: list[tuple[ArrayView, ArrayView]]) -> None:
    """Columns of at most two arrays into arrays of other numbers of columns, on the stream of the
    first of these; those that a source does not have become zeros."""
    like = pairs[0][1]
    if like.device.kind == "cuda":
        views = [v for pair in pairs for v in pair]
        array.acquire(like, *views)
        copy_rows.launch(pairs, array.current_stream(like))
        array.release(like, *views)
        return
    for source, target in pairs:
        dim = min(source.shape[-1], target.shape[-1])
        made = array.as_numpy(target)
        made[..., :dim] = array.as_numpy(source)[..., :dim]
        made[..., dim:] = 0
