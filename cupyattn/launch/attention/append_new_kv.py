"""Launches the append_new_kv kernel."""

from __future__ import annotations

import struct
from functools import lru_cache
from typing import NamedTuple

from ... import jit
from ...array import ArrayView
from ...core import dtypes
from ...core.device import device_props
from ...core.dtypes import DType
from ..driver import params
from ..driver.enqueue import Launch, enqueue
from ..ops.rows import COPIED, THREADS, Rows, lane_bits, num_blocks
from .plan_batch import IndexFormat

TABLE_DTYPES = dtypes.float32, dtypes.float16, dtypes.bfloat16
ROTATED_DTYPES = dtypes.float16, dtypes.bfloat16

# kernels/cupyattn/params/append_new_kv.cuh
_ROWS = f"2Q {params.APPENDED_ROWS.size}s"  # of K, and of V
_REST = struct.Struct("<64s 8q 12i")
_LENGTHS = slice(5, 11)  # of _REST, from the step of the table's rows on
_PARAMS = struct.Struct(f"<{_ROWS} {_ROWS} 10Q {_REST.size}s")


class Rotation(NamedTuple):
    """What keys and queries are rotated by.

    cosines, sines [positions, rotary_dim / 2]; begin: where each request begins to count; q and
    rotated_q [rows, heads, head_dim]; q_offsets of q's rows, or None where each request has q_len;
    q_moves: row i of q is i positions on.
    """

    cosines: ArrayView
    sines: ArrayView
    begin: ArrayView
    q: ArrayView
    rotated_q: ArrayView
    q_offsets: ArrayView | None
    q_len: int
    q_moves: bool
    is_interleaved: bool


class NewKeys(NamedTuple):
    """New rows of K and V, and where they go.

    k_offsets   of their rows [b + 1], or None where each request has k_len
    lens        [b] keys before; lens_after int32 [b], with the new ones, is written
    table       int32 [b, max_pages]
    """

    k: Rows
    v: Rows
    dtype: DType
    num_kv_heads: int
    num_rows: int
    k_offsets: ArrayView | None
    k_len: int
    lens: ArrayView
    lens_after: ArrayView
    table: ArrayView
    num_pages: int
    page_size: int


@lru_cache(maxsize=256)
def config(
    dtype: DType, dtype_table: DType | None, is_aligned: bool, dtype_q: DType | None = None
) -> jit.Config:
    """The kernel's Config; dtype_table None: nothing is rotated. dtype_q: of rotated queries,
    default that of the keys."""
    if dtype_table is None:
        dtype = COPIED[dtype.itemsize]
    values: dict[str, jit.Constant] = {
        "DType": dtype,
        "DTypeQ": dtype_q or dtype,
        "DTypeTable": dtype_table or dtypes.float32,
        "kAligned": is_aligned,
        "kRotary": dtype_table is not None,
        "kThreads": THREADS,
    }
    return jit.Config(values)


class _Rotated(NamedTuple):
    """What the kernel is told of a rotation; zeros: there is none.

    table_strides  of a row of cosines, and of sines
    extents        elements that rotate, and positions of the tables
    """

    q_strides: tuple[int, int] = (0, 0)
    table_strides: tuple[int, int] = (0, 0)
    extents: tuple[int, int] = (0, 0)
    q_rows: int = 0
    q_len: int = 0
    num_qo_heads: int = 0
    is_interleaved: bool = False
    q_moves: bool = False


_NOT_ROTATED = _Rotated()


def _told(rotation: Rotation) -> _Rotated:
    q, cosines, sines = rotation.q, rotation.cosines, rotation.sines
    return _Rotated(
        q_strides=(q.strides[0], q.strides[1]),
        table_strides=(cosines.strides[0], sines.strides[0]),
        extents=(2 * cosines.shape[1], min(cosines.shape[0], 2**31 - 1)),
        q_rows=q.shape[0],
        q_len=rotation.q_len,
        num_qo_heads=q.shape[1],
        is_interleaved=rotation.is_interleaved,
        q_moves=rotation.q_moves,
    )


def _are_queries_aligned(rotation: Rotation) -> bool:
    q = rotation.q
    _, num_heads, head_dim = q.shape
    strides, out = (q.strides[0], q.strides[1]), (num_heads * head_dim, head_dim, 0)
    rows = Rows(q.ptr, rotation.rotated_q.ptr, strides, out, head_dim)
    return rows.is_aligned(q.dtype, q.dtype)


class Addresses(NamedTuple):
    """Addresses of the arrays of a launch, 0 for none; `begin` is `lens` where nothing else says
    where rotation begins."""

    new_k: int
    k_cache: int
    new_v: int
    v_cache: int
    q: int
    rotated_q: int
    cosines: int
    sines: int
    lens: int
    begin: int
    q_offsets: int
    k_offsets: int
    lens_after: int
    table: int


class Bound(NamedTuple):
    """A launch with everything packed but the addresses of its arrays."""

    launch: Launch
    k_rows: bytes
    v_rows: bytes
    rest: bytes
    device: int

    def of_lengths(
        self,
        table_step: int,
        num_pages: int,
        q_rows: int,
        num_rows: int,
        batch_size: int,
        table_width: int,
    ) -> Bound:
        """The launch of arrays of these lengths, whose other strides and extents are the same."""
        facts = [*_REST.unpack(self.rest)]
        facts[_LENGTHS] = table_step, num_pages, q_rows, num_rows, batch_size, table_width
        *_, num_qo_heads, num_kv_heads, _, _, _, _, bits = facts
        # Lengths are written without rows too.
        maximum = max(num_rows * num_kv_heads, q_rows * num_qo_heads, 1)
        blocks = num_blocks(maximum, bits)
        launch = self.launch._replace(grid=(blocks, *self.launch.grid[1:]))
        return self._replace(launch=launch, rest=_REST.pack(*facts))

    def enqueue(self, addresses: Addresses, stream: int) -> None:
        arguments = params.this_thread.launch_buffer
        new_k, k_cache, new_v, v_cache, *others = addresses
        keys = new_k, k_cache, self.k_rows, new_v, v_cache, self.v_rows
        _PARAMS.pack_into(arguments.buffer, arguments.offset, *keys, *others, self.rest)
        enqueue(self.launch, arguments, self.device, stream)


def bind(new: NewKeys, rotation: Rotation | None, device: int) -> Bound:
    """The launch of such arrays, wherever they are as far aligned."""
    dtype = new.dtype
    is_aligned = all(rows.is_aligned(dtype, dtype) for rows in (new.k, new.v))
    dtype_table, dtype_q, rotated = None, None, _NOT_ROTATED
    if rotation is not None:
        dtype_table, dtype_q = rotation.cosines.dtype, rotation.q.dtype
        rotated = _told(rotation)
        is_aligned = is_aligned and _are_queries_aligned(rotation) and not dtype.is_fp8
    kernel = jit.load(
        "append_new_kv",
        config(dtype, dtype_table, is_aligned, dtype_q),
        device,
        device_props(device).arch,
    )
    bits = lane_bits(max(new.k.head_dim, new.v.head_dim), dtype, is_aligned)
    rest = _REST.pack(
        _formats(new, rotation),
        *rotated.q_strides,
        *rotated.table_strides,
        *(0,) * 6,  # lengths
        new.page_size,
        rotated.q_len,
        new.k_len,
        rotated.num_qo_heads,
        new.num_kv_heads,
        *rotated.extents,
        rotated.is_interleaved,
        rotated.q_moves,
        bits,
    )
    launch = Launch(kernel.function, (0, 2 if rotation is None else 3, 1), THREADS, 0)
    bound = Bound(launch, new.k.pack(), new.v.pack(), rest, device)
    step, (batch_size, width) = new.table.strides[0], (new.lens.shape[0], new.table.shape[1])
    return bound.of_lengths(step, new.num_pages, rotated.q_rows, new.num_rows, batch_size, width)


def addresses_of(new: NewKeys, rotation: Rotation | None) -> Addresses:
    """Where the arrays are."""

    def address(v: ArrayView | None) -> int:
        return 0 if v is None else v.ptr

    q = rotated_q = cosines = sines = begin = q_offsets = None
    if rotation is not None:
        cosines, sines, begin, q, rotated_q, q_offsets, *_ = rotation
    return Addresses(
        new.k.source,
        new.k.cache,
        new.v.source,
        new.v.cache,
        address(q),
        address(rotated_q),
        address(cosines),
        address(sines),
        lens=new.lens.ptr,
        begin=address(new.lens if begin is None else begin),
        q_offsets=address(q_offsets),
        k_offsets=address(new.k_offsets),
        lens_after=new.lens_after.ptr,
        table=new.table.ptr,
    )


def _formats(new: NewKeys, rotation: Rotation | None) -> bytes:
    """How lengths before, the rotation's begin, and offsets of q and k lie."""
    begin = new.lens if rotation is None else rotation.begin
    q_offsets = None if rotation is None else rotation.q_offsets
    return b"".join(
        (IndexFormat() if v is None else IndexFormat(v.strides[0], v.dtype)).pack()
        for v in (new.lens, begin, q_offsets, new.k_offsets)
    )
