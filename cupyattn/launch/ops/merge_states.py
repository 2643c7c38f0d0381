"""Launches the merge_states kernel."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import NamedTuple

from ... import jit
from ...array import ArrayView
from ...core import dtypes
from ...core.device import device_props
from ...core.dtypes import DType
from ..driver import params
from ..driver.enqueue import Launch, enqueue

# Rows, their elements and their states are counted in 32 bits, up to a chunk a lane beyond the end.
MAX_COUNT = 2**31 - 4096
_THREADS = 256
_MAX_LANE_BITS = 5
# Places in params.MERGE_LOOK.
_NUM_ROWS, _NUM_STATES = 0, 9


class States(NamedTuple):
    """Views of states and their LSE, and strides of both: row, state of a row, head."""

    v: ArrayView
    s: ArrayView
    v_strides: tuple[int, int, int]
    s_strides: tuple[int, int, int]


class Merge(NamedTuple):
    """A merge of arrays of one look, wherever they are: what `params.MERGE_LOOK` packs.

    rows_a_block  heads of rows that a block merges
    """

    launch: Launch
    look: bytes
    device_index: int
    rows_a_block: int

    def of_lengths(self, num_rows: int, num_states: int) -> Merge:
        """The merge of arrays of so many rows of heads, whose strides are the same."""
        look = [*params.MERGE_LOOK.unpack(self.look)]
        look[_NUM_ROWS], look[_NUM_STATES] = num_rows, num_states
        launch = self.launch._replace(grid=(-(-num_rows // self.rows_a_block), 1, 1))
        return self._replace(launch=launch, look=params.MERGE_LOOK.pack(*look))

    def enqueue(self, stream: int, addresses: Sequence[int]) -> None:
        """Launch on arrays at these addresses, 0 for those that are not there: v_a, v_b, s_a, s_b,
        out, lse, indptr, mask, out_scale."""
        arguments = params.this_thread.launch_buffer
        params.MERGE_STATES.pack_into(arguments.buffer, arguments.offset, *addresses, self.look)
        enqueue(self.launch, arguments, self.device_index, stream)


@lru_cache(maxsize=256)
def config(
    dtype: DType,
    dtype_s: DType,
    dtype_o: DType,
    *,
    is_pair: bool,
    is_aligned: bool,
    is_one_chunk: bool,
) -> jit.Config:
    """The kernel's Config; `is_one_chunk`: a row has no more chunks than it gets threads."""
    types: dict[str, jit.Constant] = {"DType": dtype, "DTypeS": dtype_s, "DTypeO": dtype_o}
    flags = {"kPairs": is_pair, "kAligned": is_aligned, "kOneChunk": is_one_chunk}
    return jit.Config({**types, **flags, "kThreads": _THREADS})


def configs(dtype: DType, head_dim: int, is_aligned: bool) -> Iterator[jit.Config]:
    """The Configs of merges that convert nothing; aligned rows start on 16-byte boundaries."""
    is_aligned = is_aligned and head_dim * dtype.itemsize % 16 == 0
    is_one_chunk = is_aligned and _count_chunks(head_dim, dtype, is_aligned) <= 2**_MAX_LANE_BITS
    for is_pair in (True, False):
        yield config(
            dtype,
            dtypes.float32,
            dtype,
            is_pair=is_pair,
            is_aligned=is_aligned,
            is_one_chunk=is_one_chunk,
        )


def prepare(
    states: States,
    others: States | None,
    out: ArrayView,
    lse: ArrayView,
    num_states: int,
    *,
    has_offsets: bool,
    base_on_e: bool,
    out_factor: float = 1.0,
) -> Merge:
    """The merge of `num_states` states a row (with indptr: of all rows), or of pairs with `others`.

    out [n, H, D] has a contiguous last dimension, lse is [n, H]; none of n, H and D is 0.
    out_factor: of an fp8 `out`.
    """
    n, num_heads, head_dim = out.shape
    second = states if others is None else others
    # Two states of one array are a pair as well.
    is_pair = others is not None or (num_states == 2 and not has_offsets)
    is_aligned = all(_is_aligned(x, head_dim) for x in (states.v, second.v, out))
    chunks = _count_chunks(head_dim, states.v.dtype, is_aligned)
    lane_bits = min((chunks - 1).bit_length(), _MAX_LANE_BITS)
    device = out.device.index
    chosen = config(
        states.v.dtype,
        states.s.dtype,
        out.dtype,
        is_pair=is_pair,
        is_aligned=is_aligned,
        is_one_chunk=is_aligned and chunks <= 2**lane_bits,
    )
    kernel = jit.load("merge_states", chosen, device, device_props(device).arch)
    num_rows = n * num_heads
    look = params.MERGE_LOOK.pack(
        num_rows,
        head_dim,
        lane_bits,
        *((math.log2(math.e), math.log(2.0)) if base_on_e else (1.0, 1.0)),
        num_heads,
        *params.divisor(num_heads),
        out_factor,
        num_states,
        *states.v_strides,
        *second.v_strides,
        *states.s_strides,
        *second.s_strides,
        out.strides[0],
        out.strides[1],
        *lse.strides,
    )
    rows_a_block = _THREADS >> lane_bits
    grid = -(-num_rows // rows_a_block), 1, 1
    return Merge(Launch(kernel.function, grid, _THREADS, 0), look, device, rows_a_block)


def _count_chunks(head_dim: int, dtype: DType, is_aligned: bool) -> int:
    return -(-head_dim // (16 // dtype.itemsize if is_aligned else 1))


def _is_aligned(v: ArrayView | None, head_dim: int) -> bool:
    """True if all rows are whole chunks of 16 bytes, on 16-byte boundaries."""
    if v is None:
        return True
    offsets = v.ptr
    for stride in (*v.strides[:-1], head_dim):
        offsets |= stride * v.dtype.itemsize
    return offsets & 15 == 0
