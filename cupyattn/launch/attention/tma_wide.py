"""Tensor maps of latent keys for wide_sm90: what follows params.LATENT in its struct."""

from __future__ import annotations

import struct
from typing import NamedTuple

from ...core.dtypes import DType, float8_e4m3fn
from ..driver import params, tensor_map
from ..tiles import wide_sm90

TILE_KV = 64
# kernels/cupyattn/params/wide_sm90.cuh, aligned: maps of k and k_rope, box_rows, box_shift.
_PADDING = -(params.ATTENTION.size + params.LATENT.size) % 64
_PARAMS = struct.Struct(f"<{_PADDING}x 128s 128s 2i 56x")


class Boxes(NamedTuple):
    """Pages of latent keys whose two parts lie as `columns` and `strides` (row, page) say, in
    elements of these sizes."""

    columns: tuple[int, int]
    strides: tuple[tuple[int, int], tuple[int, int]]
    itemsizes: tuple[int, int]
    page_size: int
    num_pages: int

    def pack(self, latent: int, rope: int) -> bytes:
        """What follows params.LATENT for parts at these addresses."""
        # Another instance serves parts off 16-byte boundaries, for which there are no maps.
        if latent % 16 or rope % 16:
            return b""
        rows = tensor_map.box_rows(self.page_size, TILE_KV)
        maps = [
            tensor_map.of_rows(
                address,
                (columns, self.page_size, self.num_pages, 1),
                (stride_n, stride_page, 0),
                (rows, 1, 1),
                itemsize,
                tensor_map.PANEL if itemsize == 2 else 0,  # rows of 8 bits are converted
            )
            for address, columns, (stride_n, stride_page), itemsize in zip(
                (latent, rope), self.columns, self.strides, self.itemsizes, strict=True
            )
        ]
        return _PARAMS.pack(*maps, rows, (TILE_KV // rows).bit_length() - 1)


def boxes(
    dtype: DType,
    columns: tuple[int, int],
    latent: tuple[int, int],
    rope: tuple[int, int],
    pages: tuple[int, int],
) -> Boxes | None:
    """None unless an instance of wide_sm90 may copy boxes of such pages.

    latent, rope  strides of a row and a page in elements
    pages         keys of a page, and how many pages there are
    """
    page_size, num_pages = pages
    has_dims = (sum(columns), columns[0]) == wide_sm90.LATENT
    has_dtype = dtype.is_float16 or dtype is float8_e4m3fn
    in_bytes = [dtype.itemsize * stride for stride in (*latent, *rope)]
    if not (has_dims and has_dtype) or any(n % 16 for n in in_bytes):
        return None
    if not (num_pages and wide_sm90.has_boxes(page_size)):
        return None
    # Latent columns of fp8 are swizzled as pairs, which are elements of 16 bits. Their rope columns
    # are half a line, which a box that is swizzled would fill up: rows land one after another.
    of_latent = columns[0] * dtype.itemsize // 2
    row, page = (n // 2 for n in in_bytes[:2])
    itemsizes = 2, dtype.itemsize
    return Boxes((of_latent, columns[1]), ((row, page), rope), itemsizes, page_size, num_pages)
