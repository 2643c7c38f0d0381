"""Launches the widen_rows kernel ahead of attention: rows of 8 bits become those of 16, exactly.

Where kernels of 16-bit queries over 8-bit keys are done sooner than those that multiply 8 bits, or
those are all there are, queries are widened; where kernels of 16 bits are, so are keys and values,
or these alone beside queries of 16 bits (launch/tiles/forms.py). Scales keep their meaning.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

from ... import jit
from ...array.match import are_rows_aligned
from ...core import dtypes
from ...core.dtypes import DType
from ...core.problem import AttentionProblem
from ...core.spec import AttentionSpec
from ..driver import params
from ..driver.enqueue import Launch, enqueue, load_function

_THREADS = 256
_MAX_BLOCKS = 132 * 8  # kernels walk on
_VECTOR = 8
# kernels/cupyattn/params/widen_rows.cuh, behind the sources
_BEHIND = struct.Struct("<3Q Q 6q 10i")
_PARAMS = struct.Struct(f"<3Q {_BEHIND.size}s")
# Wide rows begin at a multiple of this, as all that lies in workspaces does.
_ALIGNMENT = 16


class Rows(NamedTuple):
    """Rows of q, k or v: how many, [heads, columns] of each, and elements from one to the next, and
    from head to head."""

    number: int
    heads: int
    columns: int
    row_stride: int
    head_stride: int

    @property
    def num_elements(self) -> int:
        return self.number * self.heads * self.columns

    @property
    def num_bytes(self) -> int:
        """What they take in 16 bits, up to the next boundary."""
        return -(-2 * self.num_elements // _ALIGNMENT) * _ALIGNMENT


_NO_ROWS = Rows(0, 0, 0, 0, 0)


class Widening(NamedTuple):
    """A launch with everything packed but the addresses of what it reads, and where it writes q, k
    and v: 0 for those that stay where they are."""

    step: Launch
    packed: bytes
    to: tuple[int, int, int]

    def launch(
        self, q: int, k: int, v: int, device_index: int, stream: int
    ) -> tuple[int, int, int]:
        """Enqueue it for arrays at these addresses; those of q, k and v as attention reads them."""
        arguments = params.this_thread.launch_buffer
        _PARAMS.pack_into(arguments.buffer, arguments.offset, q, k, v, self.packed)
        enqueue(self.step, arguments, device_index, stream)
        of_q, of_k, of_v = self.to
        return of_q or q, of_k or k, of_v or v


@lru_cache(maxsize=16)
def config(
    dtype: DType, dtype_v: DType, is_aligned: bool, dtype_wide: DType = dtypes.float16
) -> jit.Config:
    """The kernel's Config for queries, and keys, of an 8-bit dtype, and values of another.
    dtype_wide: what they become."""
    return jit.Config(
        {
            "DType": dtype,
            "DTypeV": dtype_v,
            "DTypeWide": dtype_wide,
            "kThreads": _THREADS,
            "kAligned": is_aligned,
        }
    )


def wide_dtype(dtype_q: DType) -> DType:
    """What arrays become beside queries of a dtype."""
    return dtypes.float16 if dtype_q.is_8bit_query else dtype_q


def widened_of(spec: AttentionSpec, problem: AttentionProblem) -> tuple[bool, bool]:
    """(whether queries, whether keys and values) are widened ahead where this problem serves what
    a caller asks for."""
    reads_bytes = problem.dtype_rows is not None
    of_q = problem.dtype_q is not spec.dtype_q and not reads_bytes
    return of_q, problem.dtype_kv is not spec.dtype_kv


def rows_of(
    spec: AttentionSpec,
    strides: bytes,
    num_rows: int,
    num_keys: int,
    widened: tuple[bool, bool] = (True, True),
) -> list[Rows]:
    """The rows of q, k and v that are widened, of arrays of these params.STRIDES; no heads where an
    array is not, and nothing behind q where it is the only one."""
    row, head, k_row, k_head, v_row, v_head, *_ = params.STRIDES.unpack(strides)
    dims, kv_heads = (spec.head_dim_qk, spec.head_dim_vo), spec.num_kv_heads
    of_q = Rows(num_rows, spec.num_qo_heads, dims[0], row, head) if widened[0] else _NO_ROWS
    if not widened[1]:
        return [of_q]
    return [
        of_q,
        Rows(num_keys, kv_heads, dims[0], k_row, k_head),
        Rows(num_keys, kv_heads, dims[1], v_row, v_head),
    ]


def num_bytes(spec: AttentionSpec, num_rows: int, num_keys: int, widened: tuple[bool, bool]) -> int:
    """The bytes that so many rows of queries, and of keys and values, take in 16 bits."""
    strides = bytes(params.STRIDES.size)
    return sum(x.num_bytes for x in rows_of(spec, strides, num_rows, num_keys, widened))


def widened_strides(spec: AttentionSpec, strides: bytes, widened: tuple[bool, bool]) -> bytes:
    """params.STRIDES with those of the wide arrays, which have no gaps."""
    values = [*params.STRIDES.unpack(strides)]
    for index, rows in enumerate(rows_of(spec, strides, 0, 0, widened)):
        if rows.heads:
            values[2 * index : 2 * index + 2] = rows.heads * rows.columns, rows.columns
    return params.STRIDES.pack(*values)


def prepare(
    spec: AttentionSpec, is_aligned: bool, rows: Sequence[Rows], to: int, index: int, count: int = 0
) -> Widening:
    """Make ready to widen `rows_of` arrays into the memory at `to`, on a device.

    is_aligned: all rows begin on 16-byte boundaries. count: the address of the number of rows of q,
    where a graph may be replayed with another; those given are then the most.
    """
    stored = spec.dtype_k, spec.dtype_k, spec.dtype_kv  # queries that are widened are as keys
    strides = [((x.row_stride, x.head_stride), y) for x, y in zip(rows, stored, strict=False)]
    are_whole = is_aligned and are_rows_aligned(0, strides)
    are_whole = are_whole and all(x.columns % _VECTOR == 0 for x in rows)
    built = config(spec.dtype_k, spec.dtype_kv, are_whole, wide_dtype(spec.dtype_q))
    function = load_function("widen_rows", built, index)
    vectors = max(x.num_elements for x in rows) // (_VECTOR if are_whole else 1)
    grid = max(1, min(-(-vectors // _THREADS), _MAX_BLOCKS)), len(rows), 1
    all_rows = [*rows, *[_NO_ROWS] * (3 - len(rows))]
    targets = []
    for x in all_rows:
        targets.append(to if x.heads else 0)
        to += x.num_bytes
    of_q, of_k, of_v = targets
    packed = _BEHIND.pack(
        *targets,
        count,
        *(x.row_stride for x in all_rows),
        *(x.head_stride for x in all_rows),
        *(x.number for x in all_rows),
        *(x.heads for x in all_rows),
        *(x.columns for x in all_rows),
        0,
    )
    return Widening(Launch(function, grid, _THREADS, 0), packed, (of_q, of_k, of_v))
