"""Boolean masks as bits. Attention reads little-endian bits: key j of row i is bit i*kv_len + j."""

from __future__ import annotations

from typing import Literal

import numpy as np

from ..errors import ArgumentError, UnsupportedError

BitOrder = Literal["big", "little"]
_MAX_OFFSETS = 2**31 - 1


def packbits(x: np.ndarray, bitorder: BitOrder = "big") -> np.ndarray:
    """uint8 [ceil(n/8)]: eight of x bool [n] to a byte, the last byte filled up with zeros.

    bitorder "big": the first element is the byte's highest bit; "little": its lowest.

    Raises
    ------
    CupyAttnError
        ArgumentError for another bitorder, or x that is not bool and one-dimensional.
    """
    _check_bits(x, bitorder)
    return np.packbits(x, bitorder=bitorder)


def segment_packbits(
    x: np.ndarray, indptr: np.ndarray, bitorder: BitOrder = "big"
) -> tuple[np.ndarray, np.ndarray]:
    """Pack each segment x[indptr[b]:indptr[b+1]] on its own, so that each starts on a byte.

    x bool [n], indptr integer [B+1].

    Returns
    -------
    tuple of arrays
        (uint8 [new_indptr[-1]], new_indptr int32 [B+1]), the new offsets in bytes.

    Raises
    ------
    CupyAttnError
        ArgumentError if indptr is not a rising list of offsets into x.
    """
    _check_bits(x, bitorder)
    offsets, new_indptr = segment_offsets(indptr, x.size)
    lengths = np.diff(offsets)
    spread = np.zeros(8 * int(new_indptr[-1]), np.bool_)
    shift = np.repeat(8 * new_indptr[:-1] - offsets[:-1], lengths)
    spread[np.arange(offsets[0], offsets[-1]) + shift] = x[offsets[0] : offsets[-1]]
    return np.packbits(spread, bitorder=bitorder), new_indptr.astype(np.int32)


def segment_offsets(indptr: np.ndarray, size: int) -> tuple[np.ndarray, np.ndarray]:
    """int64 offsets [B+1] of segments of `size` elements, and of their packed bytes.

    Raises
    ------
    CupyAttnError
        ArgumentError if indptr is not a rising list of offsets into the elements.
    """
    indptr = np.asarray(indptr)
    if indptr.ndim != 1 or indptr.size == 0 or not np.issubdtype(indptr.dtype, np.integer):
        raise ArgumentError(
            f"indptr: got {indptr.dtype} {list(indptr.shape)}; wanted integers [B+1]"
        )
    if indptr.size > _MAX_OFFSETS:
        raise UnsupportedError(f"indptr: holds {indptr.size} offsets; at most {_MAX_OFFSETS}")
    offsets = indptr.astype(np.int64)
    if offsets[0] < 0 or offsets[-1] > size or (offsets[1:] < offsets[:-1]).any():
        raise ArgumentError(
            f"indptr: wanted offsets that never fall, from 0 to the {size} elements of x; got "
            f"first {offsets[0]}, last {offsets[-1]}"
        )
    lengths = np.diff(offsets)
    new_indptr = np.zeros(indptr.size, np.int64)
    np.cumsum((lengths + 7) // 8, out=new_indptr[1:])
    return offsets, new_indptr


def unpack_mask(packed: np.ndarray, qo_len: int, kv_len: int) -> np.ndarray:
    """bool [qo_len, kv_len] from the little-endian bits uint8 [>= ceil(qo_len*kv_len/8)].

    Raises
    ------
    CupyAttnError
        ArgumentError if `packed` has another dtype or rank, or is too short.
    """
    count = qo_len * kv_len
    if packed.dtype != np.uint8 or packed.ndim != 1 or packed.size < (count + 7) // 8:
        raise ArgumentError(
            f"packed_custom_mask: got {packed.dtype} {list(packed.shape)}; wanted uint8 "
            f"[{(count + 7) // 8}], the bits of a [{qo_len}, {kv_len}] mask (packbits, little)"
        )
    bits = np.unpackbits(packed, count=count, bitorder="little")
    return bits.view(np.bool_).reshape(qo_len, kv_len)


def _check_bits(x: np.ndarray, bitorder: str) -> None:
    if bitorder not in ("big", "little"):
        raise ArgumentError(f"bitorder: got {bitorder!r}; wanted 'big' or 'little'")
    if x.ndim != 1 or x.dtype != np.bool_:
        raise ArgumentError(
            f"x: got {x.dtype} {list(x.shape)}; wanted bool [n]; flatten and compare with 0 first"
        )
