"""Launches the widen_rows kernel ahead of attention: 8-bit queries become float16, which is exact.

Where no kernel multiplies 8 bits under the options of a call, the kernels of 16-bit queries over
8-bit keys do; scales keep their meaning.
"""

from __future__ import annotations

import struct
from functools import lru_cache
from typing import NamedTuple

from ... import jit
from ...array.match import are_rows_aligned
from ...core.dtypes import DType
from ...core.spec import AttentionSpec
from ..driver import params
from ..driver.enqueue import Launch, enqueue, load_function

_THREADS = 256
_MAX_BLOCKS = 132 * 8  # kernels walk on
_VECTOR = 16
# kernels/cupyattn/params/widen_rows.cuh, behind the source
_BEHIND = struct.Struct("<2Q 2q 4i")
_PARAMS = struct.Struct(f"<Q {_BEHIND.size}s")
# Wide queries begin at a multiple of this, as all that lies in workspaces does.
_ALIGNMENT = 16


class Widening(NamedTuple):
    """A launch with everything packed but the address of the queries, and where it writes."""

    step: Launch
    packed: bytes
    to: int

    def launch(self, q: int, device_index: int, stream: int) -> int:
        """Enqueue it for queries at address `q`; the address of the wide ones."""
        arguments = params.this_thread.launch_buffer
        _PARAMS.pack_into(arguments.buffer, arguments.offset, q, self.packed)
        enqueue(self.step, arguments, device_index, stream)
        return self.to


@lru_cache(maxsize=16)
def config(dtype: DType, is_aligned: bool) -> jit.Config:
    """The kernel's Config for queries of an 8-bit dtype."""
    return jit.Config({"DType": dtype, "kThreads": _THREADS, "kAligned": is_aligned})


def num_bytes(spec: AttentionSpec, num_rows: int) -> int:
    """The bytes that so many rows of queries take in 16 bits, up to the next boundary."""
    size = 2 * num_rows * spec.num_qo_heads * spec.head_dim_qk
    return -(-size // _ALIGNMENT) * _ALIGNMENT


def widened_strides(spec: AttentionSpec, strides: bytes) -> bytes:
    """params.STRIDES with those of the wide queries, which have no gaps."""
    _, _, *others = params.STRIDES.unpack(strides)
    return params.STRIDES.pack(spec.num_qo_heads * spec.head_dim_qk, spec.head_dim_qk, *others)


def prepare(
    spec: AttentionSpec,
    is_aligned: bool,
    strides: bytes,
    num_rows: int,
    to: int,
    device_index: int,
    row_count: int = 0,
) -> Widening:
    """Make ready to widen queries of these params.STRIDES into the memory at `to`.

    is_aligned: all rows begin on 16-byte boundaries. row_count: the address of the number of rows,
    where a graph may be replayed with another; num_rows is then the most.
    """
    row, head, *_ = params.STRIDES.unpack(strides)
    dim, heads = spec.head_dim_qk, spec.num_qo_heads
    are_whole = is_aligned and dim % _VECTOR == 0
    are_whole = are_whole and are_rows_aligned(0, [((row, head), spec.dtype_q)])
    function = load_function("widen_rows", config(spec.dtype_q, are_whole), device_index)
    vectors = num_rows * heads * dim // (_VECTOR if are_whole else 1)
    grid = max(1, min(-(-vectors // _THREADS), _MAX_BLOCKS)), 1, 1
    packed = _BEHIND.pack(to, row_count, row, head, num_rows, heads, dim, 0)
    return Widening(Launch(function, grid, _THREADS, 0), packed, to)
