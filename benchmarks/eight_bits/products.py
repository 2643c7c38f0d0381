"""Products of e4m3 as Hopper's tensor cores sum them."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]

STEP = 32  # elements of k that an instruction takes
FRACTION_BITS = 13
_NONE = -1000


def _powers(x: Floats) -> NDArray[np.int32]:
    """Powers of two of e4m3 numbers; subnormals have that of the smallest normal one."""
    return np.where(x == 0, _NONE, np.maximum(np.frexp(x)[1] - 1, -6)).astype(np.int32)


def add_product(total: Floats, a: Floats, b: Floats) -> Floats:
    """total [m, n] + a [m, k] @ b [n, k].T, where a and b hold e4m3 numbers; k is a multiple of 32.

    32 products and the sum so far are aligned to the largest power of two among them. Each is cut
    to 13 bits behind that one's point, and so is their sum. (arXiv 2511.10909, 2512.07004; the
    emulator's `CutSums` is the same in C++.)
    """
    a_powers, b_powers = _powers(a), _powers(b)
    for first in range(0, a.shape[1], STEP):
        step = slice(first, first + STEP)
        products = a[:, None, step] * b[None, :, step]  # exact
        largest = (a_powers[:, None, step] + b_powers[None, :, step]).max(-1)
        largest = np.maximum(largest, np.where(total == 0, _NONE, np.frexp(total)[1] - 1))
        largest = np.where(largest < _NONE // 2, 0, largest).astype(np.int32)
        up = np.ldexp(np.float32(1), FRACTION_BITS - largest)
        np.trunc(products * up[..., None], out=products)
        units = products.sum(-1, dtype=np.float32) + np.trunc(total * up)  # exact: below 2^24
        lost = np.maximum(np.frexp(units)[1] - 1 - FRACTION_BITS, 0)
        kept = np.ldexp(np.trunc(np.ldexp(units, -lost)), lost)
        total = np.ldexp(kept, largest - FRACTION_BITS).astype(np.float32)
    return total
