"""Rows of a latent cache of fp8 with scales of their own, as FlashMLA's programs keep them.

656 bytes a token: 512 e4m3, 4 float32 scales (one for each 128 of them), 64 bfloat16 rope columns.
"""

from __future__ import annotations

import numpy as np

from ..core import dtypes
from ..errors import ArgumentError

NUM_BYTES = 656
_LATENT, _GROUP, _ROPE = 512, 128, 64


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
