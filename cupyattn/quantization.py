"""Packing of boolean masks into bits."""

from __future__ import annotations

from typing import Any

import numpy as np

from . import array, reference
from .array import ArrayView
from .array.match import Dims, match, require_contiguous_last, require_dtype
from .core import dtypes
from .errors import ArgumentError
from .inputs import parse

__all__ = ["packbits", "segment_packbits"]


def packbits(x: Any, bitorder: str = "big") -> Any:
    """Pack booleans into bits, eight to a byte; the last byte is filled up with zeros.

    x  bool [n], any framework, CPU or GPU.  bitorder  "big" (the first element is the highest bit
    of its byte, as numpy.packbits) or "little" (the lowest: what attention masks use).

    Returns uint8 [ceil(n / 8)] in x's framework and device. Raises ArgumentError for another rank,
    dtype or bitorder. Semantics: numpy.packbits.
    """
    vx = _view_bits(x, bitorder)
    if vx.device.kind == "cpu":
        return array.from_numpy(reference.packbits(array.as_numpy(vx), bitorder), vx)  # type: ignore[arg-type]
    out = array.empty((-(-vx.shape[0] // 8),), dtypes.uint8, vx)
    _launch(vx, array.view(out, "out"), None, None, bitorder)
    return array.deliver(out, vx)


def segment_packbits(x: Any, indptr: Any, bitorder: str = "big") -> tuple[Any, Any]:
    """Pack each segment x[indptr[b]:indptr[b + 1]] on its own, so that each starts on a byte.

    x  bool [n].  indptr  int32 or int64 [B + 1], offsets into x that never fall; on a GPU it is
    copied to the host, since it decides the size of the answer.  bitorder  as `packbits`.

    Returns (uint8 [new_indptr[B]], new_indptr int32 [B + 1]), offsets in bytes, in x's framework
    and device. Raises ArgumentError for other ranks and dtypes, or offsets that fall or leave x.
    """
    vx = _view_bits(x, bitorder)
    vi = array.view(indptr, "indptr")
    match(vi, "n", Dims(), "indptr")
    require_dtype(vi, (dtypes.int32, dtypes.int64), "indptr")
    host = np.ascontiguousarray(array.to_host(vi)).astype(np.int64)
    if vx.device.kind == "cpu":
        packed, new = reference.segment_packbits(array.as_numpy(vx), host, bitorder)  # type: ignore[arg-type]
        return array.from_numpy(packed, vx), array.from_numpy(new, vx)
    lengths = np.diff(host)
    if host.size == 0 or host[0] < 0 or host[-1] > vx.shape[0] or (lengths < 0).any():
        raise ArgumentError(
            f"indptr: wanted offsets that never fall, within the {vx.shape[0]} elements of x"
        )
    new = np.zeros(host.size, np.int64)
    np.cumsum((lengths + 7) // 8, out=new[1:])
    out = array.empty((int(new[-1]),), dtypes.uint8, vx)
    bit_indptr = array.view(array.from_numpy(host, vx), "indptr")
    packed_indptr = array.view(array.from_numpy(new, vx), "indptr")
    _launch(vx, array.view(out, "out"), bit_indptr, packed_indptr, bitorder)
    return array.deliver(out, vx), array.from_numpy(new.astype(np.int32), vx)


def _view_bits(x: Any, bitorder: str) -> ArrayView:
    parse.choice(bitorder, ("big", "little"), "bitorder")
    vx = array.view(x, "x")
    match(vx, "n", Dims(), "x")
    require_dtype(vx, dtypes.bool_, "x")
    require_contiguous_last(vx, "x")
    return vx


def _launch(
    vx: ArrayView,
    out: ArrayView,
    bit_indptr: ArrayView | None,
    packed_indptr: ArrayView | None,
    bitorder: str,
) -> None:
    from .launch.ops import packbits as launcher

    stream = array.current_stream(vx)
    launcher.launch(vx, out, bit_indptr, packed_indptr, bitorder == "little", stream)
    array.release(vx, vx)
