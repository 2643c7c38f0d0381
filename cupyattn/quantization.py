"""Packing of boolean masks into bits."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from . import array, reference
from .array import ArrayView
from .array.match import Dims, match, match_array, require_dtype
from .core import dtypes, parse
from .core.names import refuse_names
from .core.tracing import untraced
from .typing import Array, ArrayT

__all__ = ["packbits", "segment_packbits"]

if not TYPE_CHECKING:
    __getattr__ = refuse_names(__name__)


@untraced
def packbits(x: ArrayT, bitorder: str = "big") -> ArrayT:
    """Pack booleans into bits, eight to a byte; the last byte is filled up with zeros.

    Parameters
    ----------
    x
        bool [n], any framework, CPU or GPU.
    bitorder
        "big" (the first element is the highest bit of its byte, as numpy.packbits) or "little" (the
        lowest: what attention masks use).

    Returns
    -------
    result
        uint8 [ceil(n / 8)] in x's framework and device.

    Raises
    ------
    CupyAttnError
        ArgumentError for another rank, dtype or bitorder.

    Notes
    -----
    Semantics: numpy.packbits.

    Examples
    --------
    >>> import numpy as np
    >>> import cupyattn
    >>> cupyattn.packbits(np.array([True, False, False, True]), bitorder="little")
    array([9], dtype=uint8)
    """
    vx = _view_bits(x, bitorder)
    if vx.device.kind == "cpu":
        return array.from_numpy(reference.packbits(array.as_numpy(vx), bitorder), vx)  # type: ignore[arg-type]
    out = array.empty((-(-vx.shape[0] // 8),), dtypes.uint8, vx)
    _launch(vx, array.view(out, "out"), None, None, bitorder)
    return array.deliver(out, vx)


@untraced
def segment_packbits(x: ArrayT, indptr: Array, bitorder: str = "big") -> tuple[ArrayT, ArrayT]:
    """Pack each segment x[indptr[b]:indptr[b + 1]] on its own, so that each starts on a byte.

    Parameters
    ----------
    x
        bool [n].
    indptr
        int32 or int64 [B + 1], offsets into x that never fall; on a GPU it is copied to the host,
        since it decides the size of the result.
    bitorder
        As in `packbits`.

    Returns
    -------
    tuple of arrays
        (uint8 [new_indptr[B]], new_indptr int32 [B + 1]), offsets in bytes, in x's framework and
        device.

    Raises
    ------
    CupyAttnError
        ArgumentError for other ranks and dtypes, or offsets that fall or leave x.

    Notes
    -----
    Semantics: FlashInfer's segment_packbits.

    Examples
    --------
    >>> import numpy as np
    >>> import cupyattn
    >>> mask = np.array([True, True, False, True, True])
    >>> cupyattn.segment_packbits(mask, np.array([0, 2, 5]), bitorder="little")
    (array([3, 6], dtype=uint8), array([0, 1, 2], dtype=int32))
    """
    vx = _view_bits(x, bitorder)
    vi = array.view(indptr, "indptr")
    match(vi, "n", Dims(), "indptr")
    require_dtype(vi, (dtypes.int32, dtypes.int64), "indptr")
    host = array.to_host(vi)
    if vx.device.kind == "cpu":
        packed, new = reference.segment_packbits(array.as_numpy(vx), host, bitorder)  # type: ignore[arg-type]
        return array.from_numpy(packed, vx), array.from_numpy(new, vx)
    offsets, new = reference.segment_offsets(host, vx.shape[0])
    out = array.empty((int(new[-1]),), dtypes.uint8, vx)
    bit_indptr = array.view(array.from_numpy(offsets, vx), "indptr")
    packed_indptr = array.view(array.from_numpy(new, vx), "indptr")
    _launch(vx, array.view(out, "out"), bit_indptr, packed_indptr, bitorder)
    return array.deliver(out, vx), array.from_numpy(new.astype(np.int32), vx)


def _view_bits(x: Any, bitorder: str) -> ArrayView:
    parse.choice(bitorder, ("big", "little"), "bitorder")
    vx = array.view(x, "x")
    match_array(vx, "n", dtypes.bool_, "x")
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
