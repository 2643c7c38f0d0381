"""Head dims that no kernel has, 57 or 111: copies of q, k and v with columns of zeros behind; and
queries of values, which are columns of the queries' copy."""

from __future__ import annotations

from typing import Any, NamedTuple

from .. import array
from ..array import ArrayView
from ..array.match import match_output, require_contiguous_last
from ..core import dtypes
from ..core.problem import MAX_HEAD_DIM, WIDE_HEAD_DIMS
from ..engine.arrays import Arrays, MoreArrays
from ..engine.planless_cache import Append
from ..engine.prepared import Before
from ..errors import ArgumentError, UnsupportedError
from ..launch.ops import copy_rows
from .batch import Batch

# What kernels read at a time, in elements of 16 bits; and what wide heads are multiples of.
_STEP, _WIDE_STEP = 8, 64
_WIDE_VALUES = 256, 512


def needs_copies(batch: Batch, vq: ArrayView) -> bool:
    """Whether head dims are none of the kernels', but could be with columns of zeros; or queries
    are multiplied with values too, which are then columns of keys."""
    arrays = batch.arrays
    if batch.qv is not None:
        return True
    k, v = array.view(arrays.k, batch.names.k), array.view(arrays.v, batch.names.v)
    if not (k.shape and v.shape):
        return False  # which are refused behind this
    dims = vq.shape[-1], v.shape[-1]
    wanted = _kernel_dims(dims[0], dims[1])
    has_keys = k.shape[-1] == dims[0]
    return has_keys and wanted is not None and wanted != dims


def _kernel_dims(dim_qk: int, dim_vo: int) -> tuple[int, int] | None:
    """The smallest head dims of a kernel that fit these; None where there is none."""
    if min(dim_qk, dim_vo) < 1:
        return None
    if max(dim_qk, dim_vo) <= MAX_HEAD_DIM:
        return _rounded(dim_qk, _STEP), _rounded(dim_vo, _STEP)
    for values in _WIDE_VALUES:
        wanted = _rounded(dim_qk, _WIDE_STEP), values
        if dim_vo <= values and wanted in WIDE_HEAD_DIMS:
            return wanted
    return None


def copy_into_kernel_dims(batch: Batch, vq: ArrayView) -> None:
    """Let the batch go on with copies of q, k and v that a kernel has head dims for, and with an
    array for their output if there is one for the caller's.

    The copies are filled by `append`, once the call is checked and new keys are written. With `qv`
    they are [q, qv] and [k, v], whose products are the sums of both.
    """
    names, arrays, out = batch.names, batch.arrays, batch.arrays.out
    views = [vq, array.view(arrays.k, names.k), array.view(arrays.v, names.v)]
    inputs = dict(zip(("q", names.k, names.v), views, strict=True))
    dims = [v.shape[-1] for v in views]
    if batch.qv is not None:
        inputs["qv"] = _view_second(batch, views[0], views[1], views[2])
        dims[0], dims[1] = (dims[0] + dims[2],) * 2
    for name, v in inputs.items():
        require_contiguous_last(v, name)
    # The checks of the call say that there is no such kernel.
    wanted = _kernel_dims(dims[0], dims[2]) or (dims[0], dims[2])
    gate = arrays.output_gate
    if gate is not None and dims[2] != wanted[1] and len(gate.shape) == len(vq.shape):
        raise UnsupportedError(
            f"output_gate: gates of elements are not supported with a head_dim of {dims[2]}, for "
            f"which columns are copied; wanted one of {wanted[1]}, or a gate of each head"
        )
    if out is not None:
        vout = array.view(out, "out")
        match_output(vout, (*vq.shape[:-1], dims[2]), vout.dtype, "out", **inputs)
        batch.take(out=array.empty((*vq.shape[:-1], wanted[1]), vout.dtype, vq))
    copies = []
    for index, (role, columns) in enumerate(zip("qkv", (wanted[0], *wanted), strict=True)):
        v = views[index]
        if v.shape[-1] == columns:
            continue
        copy = _empty_of(v, columns)
        batch.take(**{role: copy})
        second = None
        if batch.qv is not None and index < 2:
            second = inputs["qv"] if index == 0 else views[2]
        copies.append((array.view(copy, "a copy"), v, second))
    batch.append = _Filling(copies, batch.append)
    batch.qv = None


def _view_second(batch: Batch, vq: ArrayView, vk: ArrayView, vv: ArrayView) -> ArrayView:
    """qv, checked: [.., heads, head_dim of v], and k and v that can be columns of one array."""
    names = batch.names
    second = array.view(batch.qv, "qv")
    if tuple(second.shape) != (*vq.shape[:-1], vv.shape[-1]):
        raise ArgumentError(
            f"qv: shape is {list(second.shape)}; wanted {[*vq.shape[:-1], vv.shape[-1]]}, that of "
            f"q with {names.v}'s head_dim"
        )
    if tuple(vk.shape[:-1]) != tuple(vv.shape[:-1]) or vk.shape[-1] != vq.shape[-1]:
        raise ArgumentError(
            f"{names.k}, {names.v}: shapes are {list(vk.shape)} and {list(vv.shape)} beside q of "
            f"{list(vq.shape)}; wanted the same but for head_dim, which {names.k} has of q"
        )
    kinds = {v.dtype for v in (vq, second, vk, vv)}
    if len(kinds) > 1 or vk.dtype.is_fp8:
        of_q = "fp8" if batch.is_fp8_q else vq.dtype
        raise UnsupportedError(
            f"qv: is of {second.dtype} beside q of {of_q}, {names.k} of {vk.dtype} and "
            f"{names.v} of {vv.dtype}; wanted float16 or bfloat16 of all four"
        )
    array.same_device(q=vq, qv=second, **{names.k: vk, names.v: vv})
    return second


def narrowed(output: Any, dim: int, like: ArrayView, out: Any) -> Any:
    """The first `dim` columns of an output, as the caller's `out`, or as an array like the
    caller's."""
    v = array.view(output, "out")
    if out is not None:
        copy_columns([(v, array.view(out, "out"))])
        return out
    if like.framework != "jax":
        return output[..., :dim]
    return array.deliver(array.row_major(output[..., :dim], "out"), like)


def _rounded(dim: int, step: int) -> int:
    return -(-dim // step) * step


def _empty_of(v: ArrayView, columns: int) -> Any:
    shape = (*v.shape[:-1], columns)
    if not v.dtype.is_fp8 or v.framework == "torch" or v.device.kind == "cpu":
        return array.empty(shape, v.dtype, v)
    # CuPy makes no fp8 arrays: these lie in an array of bytes.
    raw = array.view(array.empty(shape, dtypes.uint8, v), "a copy")
    return ArrayView(
        raw.ptr,
        raw.shape,
        raw.strides,
        v.dtype,
        raw.device,
        raw.framework,
        raw.readonly,
        raw.owner,
    )


class _Filling(NamedTuple):
    """What fills copies with the columns of one or two arrays, and then zeros, once new keys are
    written. Each call has copies of its own, so that none is like another."""

    copies: list[tuple[ArrayView, ArrayView, ArrayView | None]]
    append: Append | None

    def __call__(self) -> None:
        if self.append is not None:
            self.append()
        pairs = []
        for copy, first, second in self.copies:
            if second is None:
                pairs.append((first, copy))
                continue
            dim, end = first.shape[-1], copy.shape[-1]
            pairs.append((first, _columns(copy, 0, dim)))
            pairs.append((second, _columns(copy, dim, end)))
        for begin in range(0, len(pairs), 2):
            copy_columns(pairs[begin : begin + 2])

    def roles(self, arrays: Arrays, more: MoreArrays, read: Arrays) -> frozenset[str]:
        return frozenset()

    def before(self) -> Before:
        raise NotImplementedError


def _columns(v: ArrayView, begin: int, end: int) -> ArrayView:
    return array.as_strided(v, (*v.shape[:-1], end - begin), v.strides, begin)


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
        values = array.as_numpy(target)
        values[..., :dim] = array.as_numpy(source)[..., :dim]
        values[..., dim:] = 0
