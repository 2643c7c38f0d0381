"""Tensor maps: rows of q, k or v as the copy engine of sm_90 sees them."""

from __future__ import annotations

import ctypes
import functools
import math
from typing import Any

from ...errors import DeviceError, UnsupportedError

BYTES = 128
_MAX_COORDINATE = 2**31 - 1
# Rows of the pattern in which lines are swizzled; a copy brings whole patterns.
_PATTERN_ROWS = 8
# Columns of 16 bits of a panel (kernels/cupyattn/tile/warpgroup_tile.cuh), and its bytes.
PANEL, PANEL_BYTES = 64, 128

# cuda.h: CU_TENSOR_MAP_DATA_TYPE_UINT8 and UINT16 (bits move as they are), INTERLEAVE_NONE,
# L2_PROMOTION_L2_128B and L2_256B, FLOAT_OOB_FILL_NONE (zeros).
_UINTS = {1: 0, 2: 1}
_NO_INTERLEAVE, _PROMOTION_128, _PROMOTION_256, _ZEROS = 0, 2, 3, 0
# SWIZZLE_NONE and SWIZZLE_128B: whole rows land one after another, panels as they are multiplied.
_NO_SWIZZLE, _SWIZZLE_128B = 0, 3


def box_rows(page_size: int, tile_kv: int) -> int:
    """Keys that one copy brings: a tile, or of pages what divides both. 0: pages are unsuitable."""
    rows = math.gcd(page_size, tile_kv) if page_size else tile_kv
    return rows if rows % _PATTERN_ROWS == 0 else 0


def tail_columns(head_dim: int, itemsize: int = 2) -> int:
    """The columns of a box of the last panel, of which products take 32 bytes at a time; 0 if they
    are all."""
    step = 32 // itemsize
    return -(-head_dim // step) * step % (PANEL_BYTES // itemsize)


def of_rows(
    address: int,
    dims: tuple[int, int, int, int],
    strides: tuple[int, int, int],
    box: tuple[int, int, int],
    itemsize: int = 2,
    columns: int = PANEL,
) -> bytes:
    """The map of a tensor, innermost dimension first, copied in whole rows (columns 0), which land
    one after another, or in panels of rows. A box has whole panels, or rows of whole 16 bytes: what
    the tensor lacks of them is zeros.

    strides  in elements, of all dimensions but the innermost: multiples of 16 bytes
    box      what one copy brings of these dimensions
    columns  in a box
    """
    # A dimension without entries, or with one, has no stride to speak of.
    sizes = tuple(max(1, n) for n in dims)
    in_bytes = tuple(
        itemsize * stride if n > 1 else 16 for n, stride in zip(sizes[1:], strides, strict=True)
    )
    swizzle = _SWIZZLE_128B if columns else _NO_SWIZZLE
    columns = columns or -(-sizes[0] // 16) * 16
    return encode(address, sizes, in_bytes, (columns, *box), itemsize, swizzle)


def of_pages(
    address: int,
    head_dim: int,
    sizes: tuple[int, int, int],
    strides: tuple[int, int, int],
    rows: int,
    itemsize: int = 2,
    columns: int = PANEL,
) -> tuple[bytes, tuple[int, int]]:
    """The map of pages of rows, and how far it is from a page to the next, and from a head to the
    next, along its last dimension: the driver allows five, and rows of whole panels, all of which
    one copy brings, take six. Where the last panel is a part, a copy brings one panel.

    sizes    rows of a page (a multiple of 8), heads, pages
    strides  in elements, of a row, a head and a page: multiples of 16 bytes
    rows     of one copy
    columns  of one copy, where it is no whole panels; 0: rows, as of_rows
    """
    page_rows, num_heads, num_pages = sizes
    row, head, page = strides
    head, page = head if num_heads > 1 else 0, page if num_pages > 1 else 0
    unit = math.gcd(head, page) or 8
    by_page, by_head = page // unit, head // unit
    count = max(0, num_pages - 1) * by_page + (num_heads - 1) * by_head + 1
    if count > _MAX_COORDINATE:
        raise UnsupportedError(
            f"paged_kv_cache: strides of {page} elements a page and {head} a head, over "
            f"{num_pages} pages, are beyond the copy engine's coordinates; use a contiguous cache"
        )
    if itemsize == 1 or head_dim % PANEL:
        sizes_of_rows, steps = (head_dim, page_rows, count, 1), (row, unit, 0)
        by_rows = of_rows(address, sizes_of_rows, steps, (rows, 1, 1), itemsize, columns)
        return by_rows, (by_page, by_head)
    panels = head_dim // PANEL
    dims = PANEL, _PATTERN_ROWS, panels, page_rows // _PATTERN_ROWS, count
    in_bytes = 2 * row, 2 * PANEL, 2 * _PATTERN_ROWS * row, 2 * unit
    box = PANEL, _PATTERN_ROWS, panels, rows // _PATTERN_ROWS, 1
    return encode(address, dims, in_bytes, box, itemsize, _SWIZZLE_128B), (by_page, by_head)


@functools.lru_cache(maxsize=8192)
def encode(
    address: int,
    dims: tuple[int, ...],
    strides: tuple[int, ...],
    box: tuple[int, ...],
    itemsize: int,
    swizzle: int,
) -> bytes:
    """The driver's CUtensorMap: dimensions innermost first, strides in bytes of all but that.

    Maps are remembered: the driver takes longer for one than all else that a new shape costs.
    """
    rank = len(dims)
    memory = ctypes.create_string_buffer(BYTES + 64)
    target = -(-ctypes.addressof(memory) // 64) * 64
    status = _driver().cuTensorMapEncodeTiled(
        ctypes.c_void_p(target),
        _UINTS[itemsize],
        rank,
        ctypes.c_void_p(address),
        (ctypes.c_uint64 * rank)(*dims),
        (ctypes.c_uint64 * (rank - 1))(*strides),
        (ctypes.c_uint32 * rank)(*box),
        (ctypes.c_uint32 * rank)(*(1,) * rank),
        _NO_INTERLEAVE,
        swizzle,
        # Rows that end within 256 bytes would bring much of the next head's.
        _PROMOTION_128 if dims[0] * itemsize % 128 else _PROMOTION_256,
        _ZEROS,
    )
    if status:
        raise DeviceError(
            f"q, k, v: the driver refuses a tensor map (error {status}) of dimensions {dims}, "
            f"strides {strides} bytes, boxes {box} at {address:#x}"
        )
    return ctypes.string_at(target, BYTES)


@functools.cache
def _driver() -> Any:
    """The CUDA driver, which CuPy has loaded but whose tensor maps it does not offer."""
    return ctypes.CDLL("libcuda.so.1")
