"""Tensor maps of latent keys for wide_sm90: what follows params.LATENT in its struct."""

from __future__ import annotations

import struct
from typing import NamedTuple

from ..driver import tensor_map

TILE_KV = 64
# kernels/cupyattn/params/wide_sm90.cuh: maps of k and k_rope, box_rows, box_shift.
_PARAMS = struct.Struct("<128s 128s 2i 56x")


class Rows(NamedTuple):
    """One part of latent keys: its address, its columns, and its strides in elements."""

    address: int
    columns: int
    stride_n: int
    stride_page: int


def pack(latent: Rows, rope: Rows, page_size: int, num_pages: int) -> bytes:
    """What follows params.LATENT. page_size: a multiple of 8."""
    box = tensor_map.box_rows(page_size, TILE_KV)
    maps = [
        tensor_map.of_rows(
            part.address,
            (part.columns, page_size, num_pages, 1),
            (part.stride_n, part.stride_page, 0),
            (box, 1, 1),
        )
        for part in (latent, rope)
    ]
    return _PARAMS.pack(*maps, box, (TILE_KV // box).bit_length() - 1)
