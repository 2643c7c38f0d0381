"""Rows of a latent cache of fp8 with scales of their own, as FlashMLA's programs keep them.

656 bytes a token: 512 e4m3, 4 float32 scales (one for each 128 of them), 64 bfloat16 rope columns.

584 bytes a token, of DeepSeek-V4, in pages: 448 e4m3 and 64 bfloat16 rope columns of each token;
behind those of all tokens of a page 8 bytes of each, exponents of 7 scales (one for each 64 e4m3)
and one that is not read. All 512 columns are the value too.
"""

from __future__ import annotations

import numpy as np

from ..core import dtypes
from ..errors import ArgumentError

NUM_BYTES = 656
_LATENT, _GROUP, _ROPE = 512, 128, 64
PAGED_BYTES, PAGED_COLUMNS = 584, 512
_PAGED_LATENT, _PAGED_GROUP = 448, 64
_PAGED_ROW = _PAGED_LATENT + 2 * _ROPE


def unpack_rows(rows: np.ndarray) -> np.ndarray:
    """float32 [..., 576] of uint8 [..., 656]: latent columns times their scales, then rope."""
    if rows.dtype != np.uint8 or rows.shape[-1] != NUM_BYTES:
        raise ArgumentError(
            f"rows: got {rows.dtype} {list(rows.shape)}; wanted uint8 [..., {NUM_BYTES}]"
        )
    rows = np.ascontiguousarray(rows)
    scales_end = _LATENT + 4 * (_LATENT // _GROUP)
    latent = rows[..., :_LATENT].view(dtypes.float8_e4m3fn.numpy).astype(np.float32)
    scales = np.ascontiguousarray(rows[..., _LATENT:scales_end]).view(np.float32)
    rope = np.ascontiguousarray(rows[..., scales_end:]).view(dtypes.bfloat16.numpy)
    latent *= np.repeat(scales, _GROUP, axis=-1)
    return np.concatenate((latent, rope.astype(np.float32)), -1)


def pack_rows(rows: np.ndarray) -> np.ndarray:
    """uint8 [..., 656] of float32 [..., 576], with scales that are powers of two."""
    shape = *rows.shape[:-1], _LATENT // _GROUP, _GROUP
    groups = rows[..., :_LATENT].reshape(shape).astype(np.float32)
    largest = np.abs(groups).max(-1, keepdims=True)
    with np.errstate(divide="ignore"):
        power = np.ceil(np.log2(largest / 448.0))
    scales = np.exp2(np.where(largest > 0.0, power, 0.0)).astype(np.float32)
    latent = (groups / scales).astype(dtypes.float8_e4m3fn.numpy)
    parts = (
        latent.reshape(*rows.shape[:-1], _LATENT).view(np.uint8),
        np.ascontiguousarray(scales[..., 0]).view(np.uint8),
        rows[..., _LATENT:].astype(dtypes.bfloat16.numpy).view(np.uint8),
    )
    return np.concatenate(parts, -1)


def unpack_pages(pages: np.ndarray) -> np.ndarray:
    """float32 [pages, page_size, 512] of uint8 [pages, page_size, 584]."""
    if pages.dtype != np.uint8 or pages.ndim != 3 or pages.shape[-1] != PAGED_BYTES:
        raise ArgumentError(
            f"pages: got {pages.dtype} {list(pages.shape)}; wanted uint8 [pages, page_size, "
            f"{PAGED_BYTES}]"
        )
    count, size, _ = pages.shape
    whole = np.ascontiguousarray(pages).reshape(count, size * PAGED_BYTES)
    rows = whole[:, : size * _PAGED_ROW].reshape(count, size, _PAGED_ROW)
    exponents = whole[:, size * _PAGED_ROW :].reshape(count, size, -1)[..., :7].astype(np.int32)
    scales = np.where(exponents == 255, np.nan, np.ldexp(np.float32(1.0), exponents - 127))
    latent = np.ascontiguousarray(rows[..., :_PAGED_LATENT]).view(dtypes.float8_e4m3fn.numpy)
    rope = np.ascontiguousarray(rows[..., _PAGED_LATENT:]).view(dtypes.bfloat16.numpy)
    values = latent.astype(np.float32) * np.repeat(scales, _PAGED_GROUP, axis=-1)
    return np.concatenate((values.astype(np.float32), rope.astype(np.float32)), -1)


def pack_pages(pages: np.ndarray) -> np.ndarray:
    """uint8 [pages, page_size, 584] of float32 [pages, page_size, 512]."""
    count, size, _ = pages.shape
    groups = pages[..., :_PAGED_LATENT].reshape(count, size, -1, _PAGED_GROUP).astype(np.float32)
    largest = np.abs(groups).max(-1, keepdims=True)
    with np.errstate(divide="ignore"):
        power = np.ceil(np.log2(largest / 448.0))
    power = np.where(largest > 0.0, power, 0.0).clip(-127, 127)
    latent = (groups / np.exp2(power)).astype(dtypes.float8_e4m3fn.numpy)
    exponents = np.zeros((count, size, 8), np.uint8)
    exponents[..., :7] = power[..., 0] + 127
    rope = pages[..., _PAGED_LATENT:].astype(dtypes.bfloat16.numpy).view(np.uint8)
    latent_bytes = latent.reshape(count, size, _PAGED_LATENT).view(np.uint8)
    rows = np.concatenate((latent_bytes, rope), -1).reshape(count, -1)
    whole = np.concatenate((rows, exponents.reshape(count, -1)), -1)
    return whole.reshape(count, size, PAGED_BYTES)
