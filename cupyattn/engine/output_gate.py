"""Gates of the output as a run brings them: checked, and as kernels are told of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from .. import array
from ..array import ArrayView
from ..array.match import are_rows_aligned, require_contiguous_last, require_dtype
from ..core import dtypes
from ..core.expression import MAX_ARRAYS
from ..core.problem import AttentionProblem, OutputGate
from ..core.spec import AttentionSpec
from ..errors import ArgumentError, UnsupportedError
from ..launch.driver import params
from .views import merge_leading

NAME = "output_gate"


def view_gate(x: Any, leading: Sequence[int], spec: AttentionSpec) -> ArrayView | None:
    """The gates of so many rows, [rows, num_qo_heads] or [rows, num_qo_heads, head_dim_vo]; None
    for None.

    leading: the axes ahead of the heads, which become one. Raises ArgumentError, UnsupportedError.
    """
    if x is None:
        return None
    v = array.view(x, NAME)
    require_shape(v, (*leading, spec.num_qo_heads, spec.head_dim_vo))
    require_dtype(v, (spec.dtype_q.of_output, dtypes.float32), NAME)
    if spec.latent:
        raise UnsupportedError(
            f"{NAME}: latent attention has none, whose output is not yet multiplied by the values' "
            "weights; multiply the projected output"
        )
    if spec.logits is not None and len(spec.logits.arrays) == MAX_ARRAYS:
        raise UnsupportedError(
            f"{NAME}: is not supported beside {MAX_ARRAYS} arrays in logits_params; wanted at most "
            f"{MAX_ARRAYS - 1}: put several into one array, as rows of it"
        )
    num_axes = len(v.shape) - len(leading)
    if num_axes == 2:
        require_contiguous_last(v, NAME)
    if not leading:
        v = array.as_strided(v, (1, *v.shape), (0, *v.strides))
    return merge_leading(v, NAME, num_axes)


def require_shape(v: ArrayView, shape: Sequence[int]) -> None:
    """ArgumentError unless these are gates of the heads or the elements of an output of this
    shape."""
    of_elements = tuple(shape)
    if tuple(v.shape) not in (of_elements[:-1], of_elements):
        raise ArgumentError(
            f"{NAME}: shape is {list(v.shape)}; wanted {list(of_elements[:-1])}, a gate of each "
            f"head, or {list(of_elements)}, of each element of the output"
        )


def kind_of(gate: ArrayView | None) -> OutputGate | None:
    """What a kernel is compiled for."""
    return None if gate is None else OutputGate(gate.dtype, len(gate.shape) == 3)


def is_aligned(gate: ArrayView | None) -> bool:
    """Whether gates of elements start on 16-byte boundaries, row by row, as kernels want it of all
    rows or of none."""
    if gate is None or len(gate.shape) == 2:
        return True
    return are_rows_aligned(gate.ptr, [(gate.strides[:-1], gate.dtype)])


def gated(problem: AttentionProblem, gate: ArrayView | None) -> AttentionProblem:
    """The problem of a call with these gates."""
    if gate is None:
        return problem
    aligned = problem.aligned and is_aligned(gate)
    return replace(problem, aligned=aligned, output_gate=kind_of(gate))


def pack(logits_arrays: bytes, gate: ArrayView | None) -> bytes:
    """params.LOGITS_ARRAYS with the gates, which take the place of the last array."""
    if gate is None:
        return logits_arrays
    return params.with_output_gate(logits_arrays, gate.ptr, gate.strides)
