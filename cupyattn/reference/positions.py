"""Position encodings applied inside attention: rotary embedding and ALiBi slopes."""

from __future__ import annotations

import numpy as np

from ..errors import ArgumentError


def rope(
    x: np.ndarray, positions: np.ndarray, *, rope_scale: float = 1.0, rope_theta: float = 1e4
) -> np.ndarray:
    """Rotate x [L, ..., D] to `positions` [L] (may be negative); the answer is float64.

    Half-split (NeoX) pairing: element i turns with element i + D/2, by the angle
    position * rope_theta**(-2i/D) / rope_scale; a larger rope_scale turns more slowly.
    Raises ArgumentError if D is odd.
    """
    head_dim = x.shape[-1]
    if head_dim % 2:
        raise ArgumentError(f"rope: head dim {head_dim} is odd; wanted an even one to form pairs")
    half = head_dim // 2
    frequencies = rope_theta ** (-2.0 * np.arange(half) / head_dim) / rope_scale
    angles = np.asarray(positions, np.float64)[:, None] * frequencies
    angles = angles.reshape(angles.shape[0], *(1,) * (x.ndim - 2), half)
    cos, sin = np.cos(angles), np.sin(angles)
    low, high = x[..., :half].astype(np.float64), x[..., half:].astype(np.float64)
    return np.concatenate([low * cos - high * sin, high * cos + low * sin], axis=-1)


def alibi_slopes(num_heads: int) -> np.ndarray:
    """float64 [num_heads]: 2**(-8(h+1)/n) for the first n heads, n the largest power of two.

    The heads beyond n take every other slope of the sequence for 2n heads.
    """
    n = 1 << (num_heads.bit_length() - 1)
    head = np.arange(num_heads)
    return np.where(
        head < n, 2.0 ** (-8.0 * (head + 1) / n), 2.0 ** (-4.0 * (2 * (head - n) + 1) / n)
    )
