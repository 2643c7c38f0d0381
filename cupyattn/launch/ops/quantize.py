"""Launches the quantize kernel: rows of q, k and v to eight bits, into arrays or pages."""

from __future__ import annotations

import enum
import math
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import product

from ... import jit
from ...array import ArrayView
from ...core import dtypes
from ...core.device import device_props
from ...core.dtypes import DType
from ..driver import params, scratch
from ..driver.enqueue import Launch, enqueue

# kernels/cupyattn/params/quantize.cuh
PART = struct.Struct("<7Q 12q 8i f i")
SHARED = struct.Struct(f"<Q q Q 2Q 2q 2i Q q Q 2q 2Q 2i 3f 4x {4 * params.MAX_ROPE_PAIRS}s")
MAX_HEAD_DIM = 256
BLOCK_SIZES = (64, 128)
_CHUNK = 8  # elements of a lane
_THREADS = 256
_PLAIN_PASSES = 8
# As many blocks as keep an SM's memory busy while they wait: fewer tokens a block below it.
_MANY_BLOCKS = 1024
_NOTHING = bytes(PART.size)


class ScaleForm(enum.IntEnum):
    """ScaleForm of kernels/cupyattn/params/quantize.cuh."""

    NUMBER, GIVEN, OF_BLOCKS, OF_PAGE_BLOCKS, OF_HEADS, OF_TENSOR = range(6)


@dataclass(frozen=True)
class Part:
    """The queries, the keys or the values of a call.

    source          [n, heads, head_dim]; dtype: what is stored
    target          rows like those, or pages; its strides of a page, a slot or row, and a head
    copy            rows like those, of source's dtype: what is stored before it is scaled
    form            where scales are from; scales and their strides of a request, a row of blocks or
                    a page, of a block of a page, and of a head; scale: one number
    mean            float32 [requests, heads, head_dim], contiguous, to be subtracted
    weight          [head_dim] of an RMS norm
    offsets         int32 [batch_size + 1] rows of requests, or None where each has
                    rows_per_request
    """

    source: ArrayView
    dtype: DType
    target: ArrayView
    target_strides: tuple[int, ...]
    is_paged: bool = False
    copy: ArrayView | None = None
    form: ScaleForm = ScaleForm.NUMBER
    scale: float = 1.0
    scales: ArrayView | None = None
    scale_strides: tuple[int, int, int] = (0, 0, 0)
    block_size: int = 64
    mean: ArrayView | None = None
    weight: ArrayView | None = None
    offsets: ArrayView | None = None
    batch_size: int = 1
    rows_per_request: int = 0

    @property
    def is_aligned(self) -> bool:
        """Whether a lane may load and store its eight elements at once."""
        head_dim = self.source.shape[2]
        of_source = self.source.ptr, *(s * 2 for s in self.source.strides[:2])
        size = _CHUNK * self.dtype.itemsize
        of_target = self.target.ptr, *(s * self.dtype.itemsize for s in self.target_strides)
        copy = self.copy
        of_copy = () if copy is None else (copy.ptr, *(s * 2 for s in copy.strides[:2]))
        return (
            head_dim % _CHUNK == 0
            and all(x % 16 == 0 for x in (*of_source, *of_copy))
            and all(x % size == 0 for x in of_target)
        )


@dataclass(frozen=True)
class Shared:
    """What the parts of a call have in common; addresses come from the arrays.

    slots     [n] page * page_size + offset; else batch_indices, kv_indices and kv_indptr say where
    cos_sin   [num_positions, rotary_dim], or rope_steps where there is no table
    """

    slots: ArrayView | None = None
    batch_indices: ArrayView | None = None
    kv_indices: ArrayView | None = None
    kv_indptr: ArrayView | None = None
    num_pages: int = 0
    page_size: int = 1
    positions: ArrayView | None = None
    cos_sin: ArrayView | None = None
    rotary_dim: int = 0
    rope_steps: bytes = b""
    is_interleaved: bool = False
    epsilon: float = 0.0
    weight_bias: float = 0.0
    uses_hadamard: bool = False

    def pack(self, head_dim: int, amax: int = 0, arrivals: int = 0) -> bytes:
        """The struct; amax, arrivals: addresses of what a launch that finds scales works with."""

        def at(v: ArrayView | None) -> int:
            return 0 if v is None else v.ptr

        def is_wide(v: ArrayView | None) -> int:
            return int(v is not None and v.dtype is dtypes.int64)

        table = self.cos_sin
        return SHARED.pack(
            at(self.slots),
            is_wide(self.slots),
            at(self.batch_indices),
            at(self.kv_indices),
            at(self.kv_indptr),
            0 if self.kv_indices is None else self.kv_indices.shape[0],
            self.num_pages,
            0 if self.kv_indptr is None else self.kv_indptr.shape[0] - 1,
            self.page_size,
            at(self.positions),
            is_wide(self.positions),
            at(table),
            0 if table is None else table.strides[0],
            0 if table is None else table.shape[0],
            amax,
            arrivals,
            self.rotary_dim,
            self.is_interleaved,
            self.epsilon,
            self.weight_bias,
            1.0 / math.sqrt(head_dim) if head_dim else 0.0,
            self.rope_steps,
        )


@lru_cache(maxsize=1024)
def config(
    dtype: DType,
    targets: tuple[DType, DType, DType],
    *,
    is_aligned: bool,
    tile: tuple[int, int, int],
    dtype_weight: DType | None = None,
    dtype_table: DType | None = None,
    has_steps: bool = False,
    hadamard: bool = False,
    has_mean: bool = False,
    finds: bool = False,
    finds_runs: bool = False,
    copies: bool = False,
    measures: bool = False,
    swaps: bool = False,
) -> jit.Config:
    """The kernel's Config; tile: threads, lanes of a row, passes. dtype_weight None: no norm.
    swaps: rows that a Hadamard matrix rotates are as wide as their lanes. measures: the launch
    ahead, which finds scales of all rows."""
    threads, lanes, passes = tile
    values: dict[str, jit.Constant] = {
        "DType": dtype,
        "DTypeWeight": dtype_weight or dtype,
        "DTypeTable": dtype_table or dtypes.float32,
        "DTypeQ": targets[0],
        "DTypeK": targets[1],
        "DTypeV": targets[2],
        "kAligned": is_aligned,
        "kNorm": dtype_weight is not None,
        "kHadamard": hadamard,
        "kSwaps": swaps,
        "kMean": has_mean,
        "kFinds": finds,
        "kFindsRuns": finds_runs,
        "kCopies": copies,
        "kMeasures": measures,
        "kRope": 1 if dtype_table is not None else 2 if has_steps else 0,
        "kThreads": threads,
        "kLanes": lanes,
        "kPasses": passes,
    }
    return jit.Config(values)


def configs(dtype: DType, dtype_cache: DType, head_dim: int) -> Iterator[jit.Config]:
    """The Configs of ordinary calls: blocks of an array to e4m3, and rows behind a norm or none,
    rotated by a table, to a cache."""
    lanes, e4m3 = lanes_of(head_dim), dtypes.float8_e4m3fn
    for block_size in BLOCK_SIZES:
        tile = choose_tile(lanes, block_size, 0, is_plain=True)
        yield config(dtype, (e4m3, e4m3, e4m3), is_aligned=True, tile=tile, finds=True)
    for num_rows, norm, table in product((0, 2**31), (None, dtype), (dtypes.float32, dtype)):
        yield config(
            dtype,
            (dtype, dtype_cache, dtype_cache),
            is_aligned=True,
            tile=choose_tile(lanes, 0, num_rows),
            dtype_weight=norm,
            dtype_table=table,
        )


def lanes_of(head_dim: int) -> int:
    """The lanes of a row, eight elements each."""
    return max(8, 1 << max(-(-head_dim // _CHUNK) - 1, 0).bit_length())


def choose_tile(
    lanes: int, block_size: int, num_rows: int, *, is_plain: bool = False
) -> tuple[int, int, int]:
    """(threads, lanes, passes) for blocks of so many tokens whose scale is found, 0 for none, and
    rows of all heads. Passes are over the tokens of a block, or over heads where none is found.

    is_plain: nothing is done to rows before, which then are held as they were read: many a thread.
    """
    if block_size and is_plain:
        return block_size * lanes // _PLAIN_PASSES, lanes, _PLAIN_PASSES
    if block_size:
        passes = block_size * lanes // _THREADS
        return (_THREADS, lanes, passes) if passes <= 4 else (2 * _THREADS, lanes, passes // 2)
    rows = _THREADS // lanes
    return _THREADS, lanes, 4 if num_rows >= _MANY_BLOCKS * 4 * rows else 1


def launch(parts: Sequence[Part | None], shared: Shared, stream: int) -> None:
    """Write what becomes of q, k and v; None for one that there is not."""
    parts = _with_scales(parts, shared, stream)
    present = [part for part in parts if part is not None and _has_work(part)]
    if not present:
        return
    first = present[0]
    device = first.source.device.index
    lanes = lanes_of(max(part.source.shape[2] for part in present))
    sizes = [x.block_size for x in present if x.form >= ScaleForm.OF_BLOCKS]
    num_rows = sum(part.source.shape[0] * part.source.shape[1] for part in present)
    weights = [part.weight.dtype for part in present if part.weight is not None]
    is_aligned = all(part.is_aligned for part in present)
    has_mean = any(part.mean is not None for part in present)
    finds_runs = any(part.form is ScaleForm.OF_PAGE_BLOCKS for part in present)
    changes = weights or shared.cos_sin is not None or shared.rope_steps or shared.uses_hadamard
    is_plain = is_aligned and not (changes or has_mean or finds_runs)
    tile = choose_tile(lanes, max(sizes, default=0), num_rows, is_plain=is_plain)
    filled = [part or first for part in parts]
    chosen = config(
        first.source.dtype,
        (filled[0].dtype, filled[1].dtype, filled[2].dtype),
        is_aligned=is_aligned,
        tile=tile,
        dtype_weight=weights[0] if weights else None,
        dtype_table=None if shared.cos_sin is None else shared.cos_sin.dtype,
        has_steps=bool(shared.rope_steps),
        hadamard=shared.uses_hadamard,
        has_mean=has_mean,
        finds=bool(sizes),
        finds_runs=finds_runs,
        copies=any(part.copy is not None for part in present),
        swaps=_swaps(parts, shared, lanes),
    )
    packed, blocks = [], 0
    for part in parts:
        if part is None or not _has_work(part):
            packed.append(_NOTHING)
            continue
        tiles, rows = _tiles_of(part, tile)
        packed.append(_pack(part, tiles, rows))
        heads = part.source.shape[1]
        blocks += tiles * (heads if part.form >= ScaleForm.OF_BLOCKS else -(-heads // tile[2]))
    if not blocks:
        return
    kernel = jit.load("quantize", chosen, device, device_props(device).arch)
    arguments = params.this_thread.launch_buffer
    head_dim = max((part.source.shape[2] for part in parts[:2] if part is not None), default=0)
    arguments.write(b"".join(packed) + shared.pack(head_dim))
    enqueue(Launch(kernel.function, (blocks, 1, 1), tile[0], 0), arguments, device, stream)


def _with_scales(parts: Sequence[Part | None], shared: Shared, stream: int) -> list[Part | None]:
    """The same parts with scales that are given: those of heads and tensors, by a launch ahead."""
    measured = [
        part if part is not None and part.form >= ScaleForm.OF_HEADS else None for part in parts
    ]
    present = [part for part in measured if part is not None]
    if not present:
        return list(parts)
    first = present[0]
    device = first.source.device.index
    tile = _THREADS, lanes_of(max(part.source.shape[2] for part in present)), 4
    filled = [part or first for part in measured]
    chosen = config(
        first.source.dtype,
        (filled[0].dtype, filled[1].dtype, filled[2].dtype),
        is_aligned=all(part.is_aligned for part in present),
        tile=tile,
        hadamard=shared.uses_hadamard,
        has_mean=any(part.mean is not None for part in present),
        measures=True,
        swaps=_swaps(measured, shared, tile[1]),
    )
    # As many tiles as fill the GPU, of whole passes.
    step = _THREADS // tile[1] * tile[2]
    num_rows = sum(part.source.shape[0] * part.source.shape[1] for part in present)
    tile_rows = -(-num_rows // (2 * _MANY_BLOCKS) // step) * step or step
    packed, blocks = [], 0
    for part in measured:
        if part is None:
            packed.append(_NOTHING)
            continue
        n, heads = part.source.shape[:2]
        tiles = max(1, -(-n // tile_rows))  # scales of no rows are written too
        packed.append(_pack(part, tiles, tile_rows))
        blocks += tiles * heads
    if blocks:
        allocate = scratch.allocator(first.source)
        amax, owner = scratch.workspace(4 * blocks, device, stream, allocate)
        arrivals, counters = scratch.counters(1, device, stream, allocate)
        kernel = jit.load("quantize", chosen, device, device_props(device).arch)
        arguments = params.this_thread.launch_buffer
        head_dim = max((x.source.shape[2] for x in measured[:2] if x is not None), default=0)
        arguments.write(b"".join(packed) + shared.pack(head_dim, amax, arrivals))
        enqueue(Launch(kernel.function, (blocks, 1, 1), tile[0], 0), arguments, device, stream)
        del owner, counters  # the launch is enqueued
    return [
        part if scales is None else replace(scales, form=ScaleForm.GIVEN)
        for part, scales in zip(parts, measured, strict=True)
    ]


def _swaps(parts: Sequence[Part | None], shared: Shared, lanes: int) -> bool:
    """Whether rows of q and k are rotated, and as wide as their lanes."""
    dims = {part.source.shape[2] for part in parts[:2] if part is not None}
    return shared.uses_hadamard and dims == {lanes * _CHUNK}


def _has_work(part: Part) -> bool:
    """Whether there are rows, or places of scales that no block has."""
    n, heads = part.source.shape[:2]
    return heads > 0 and (n > 0 or part.form is ScaleForm.OF_BLOCKS)


def _tiles_of(part: Part, tile: tuple[int, int, int]) -> tuple[int, int]:
    """(blocks of the grid for some heads, tokens that each of them looks at)."""
    n = part.source.shape[0]
    if part.form is ScaleForm.OF_BLOCKS:
        if part.offsets is None:
            blocks = -(-part.rows_per_request // part.block_size)
            return part.batch_size * blocks, part.block_size
        return -(-n // part.block_size) + part.batch_size, part.block_size
    if part.form is ScaleForm.OF_PAGE_BLOCKS:
        # Tokens of blocks of their own are written at a time, as many as a pass has rows.
        rows = min(tile[0] // tile[1], part.block_size)
        return -(-n // rows), rows
    rows = tile[0] // tile[1]
    return -(-n // rows), rows


def _pack(part: Part, num_tiles: int, tile_rows: int) -> bytes:
    source, copy = part.source, part.copy
    arrays = (part.target, copy, part.scales, part.mean, part.weight, part.offsets)
    n, heads, head_dim = source.shape
    return PART.pack(
        source.ptr,
        *(0 if v is None else v.ptr for v in arrays),
        n,
        *source.strides[:2],
        *part.target_strides,
        *((0, 0) if copy is None else copy.strides[:2]),
        *part.scale_strides,
        0 if part.mean is None or part.mean.shape[0] == 1 else heads * head_dim,
        heads,
        head_dim,
        num_tiles,
        tile_rows,
        part.batch_size,
        part.rows_per_request,
        part.block_size.bit_length() - 1,
        part.is_paged,
        part.scale,
        part.form,
    )
