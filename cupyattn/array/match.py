"""Symbolic shape matching: a spec says the wanted shape, and errors are sentences.

dims = Dims()
match(q, "Lq Hq Dqk", dims, "q")
match(k, "Lkv Hkv Dqk", dims, "k")   # Dqk must be q's; Lkv and Hkv are bound here
dims["Hq"] // dims["Hkv"]
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence

from ..core.dtypes import DType
from ..errors import ArgumentError
from .memory import byte_range
from .views import ArrayView

_ANY = "_"


class Dims(dict[str, int]):
    """Symbol -> extent. `source` remembers which argument gave each, for messages."""

    __slots__ = ("source",)

    def __init__(self, **known: int) -> None:
        super().__init__(known)
        self.source: dict[str, str] = {}


@functools.lru_cache(maxsize=256)
def _parse(spec: str) -> tuple[str | int, ...]:
    return tuple(int(word) if word.isdigit() else word for word in spec.split())


def match(v: ArrayView, spec: str, dims: dict[str, int], name: str) -> None:
    """Check v's shape against a spec such as "Lq Hq 128 _", binding symbols not yet in `dims`.

    A word is a symbol, a number, or `_` for any extent. Raises ArgumentError naming the argument,
    the dimension, what came and what is wanted. A plain dict works for `dims`; `Dims` also says
    which argument a wanted extent is from.
    """
    words = _parse(spec)
    shape = v.shape
    if len(shape) != len(words):
        raise ArgumentError(
            f"{name}: shape {list(shape)} has {len(shape)} dimension{'s' * (len(shape) != 1)}; "
            f"wanted {len(words)}: [{', '.join(map(str, words))}]"
        )
    for axis, word in enumerate(words):
        extent = shape[axis]
        if isinstance(word, int):
            if extent != word:
                raise _wrong_extent(name, shape, axis, words, str(word))
        elif word in dims:
            if extent != dims[word]:
                raise _wrong_extent(name, shape, axis, words, _describe_extent(dims, word))
        elif word != _ANY:
            dims[word] = extent
            if isinstance(dims, Dims):
                dims.source[word] = name


def _describe_extent(dims: dict[str, int], symbol: str) -> str:
    source = dims.source.get(symbol) if isinstance(dims, Dims) else None
    return f"{dims[symbol]}, the {symbol} of {source}" if source else f"{symbol} = {dims[symbol]}"


def _wrong_extent(
    name: str, shape: Sequence[int], axis: int, words: Sequence[str | int], wanted: str
) -> ArgumentError:
    layout = ", ".join(map(str, words))
    return ArgumentError(
        f"{name}: dimension {axis} of shape {list(shape)} is {shape[axis]}; wanted {wanted} "
        f"({name} is [{layout}])"
    )


def require_dtype(
    v: ArrayView, wanted: DType | Sequence[DType], name: str, remedy: str = "cast it"
) -> None:
    """ArgumentError unless v's dtype is `wanted`, or one of them."""
    allowed = (wanted,) if isinstance(wanted, DType) else wanted
    if v.dtype not in allowed:
        names = " or ".join(d.name for d in allowed)
        raise ArgumentError(f"{name}: dtype is {v.dtype}; wanted {names}, {remedy}")


def require_same_dtype(v: ArrayView, name: str, other: ArrayView, other_name: str) -> None:
    """ArgumentError unless two arrays have one dtype."""
    if v.dtype is not other.dtype:
        raise ArgumentError(
            f"{name}: dtype is {v.dtype} but {other_name} is {other.dtype}; wanted the same"
        )


_CONTIGUOUS = {
    "torch": "{}.contiguous()",
    "cupy": "cupy.ascontiguousarray({})",
    "numpy": "numpy.ascontiguousarray({})",
}


def require_contiguous_last(v: ArrayView, name: str) -> None:
    """ArgumentError unless neighbours in the last dimension are neighbours in memory."""
    if v.strides and v.strides[-1] != 1 and v.shape[-1] > 1 and 0 not in v.shape:
        remedy = _CONTIGUOUS.get(v.framework, "a row-major copy of {}").format(name)
        raise ArgumentError(
            f"{name}: the last dimension has stride {v.strides[-1]} (shape {list(v.shape)}, strides"
            f" {list(v.strides)}, in elements); wanted 1, pass {remedy}"
        )


def is_contiguous(v: ArrayView) -> bool:
    """Whether v is row-major without gaps."""
    step = 1
    for extent, stride in zip(reversed(v.shape), reversed(v.strides), strict=True):
        if extent > 1 and stride != step and 0 not in v.shape:
            return False
        step *= extent
    return True


def require_contiguous(v: ArrayView, name: str) -> None:
    """ArgumentError unless v is row-major without gaps."""
    if not is_contiguous(v):
        remedy = _CONTIGUOUS.get(v.framework, "a row-major copy of {}").format(name)
        raise ArgumentError(
            f"{name}: shape {list(v.shape)} has strides {list(v.strides)}, in elements; wanted "
            f"rows one after another, pass {remedy}"
        )


def match_array(
    v: ArrayView,
    spec: str,
    wanted: DType | Sequence[DType],
    name: str,
    dims: dict[str, int] | None = None,
) -> None:
    """ArgumentError unless v has this shape (see `match`), dtype, and contiguous rows."""
    match(v, spec, {} if dims is None else dims, name)
    require_dtype(v, wanted, name)
    require_contiguous_last(v, name)


def match_contiguous(v: ArrayView, spec: str, dims: dict[str, int], name: str) -> None:
    """`match`, and ArgumentError unless rows are contiguous."""
    match(v, spec, dims, name)
    require_contiguous_last(v, name)


def match_output(
    v: ArrayView | None,
    shape: tuple[int, ...],
    wanted: DType | Sequence[DType],
    name: str,
    remedy: str = "pass such an array, or none",
    /,
    **others: ArrayView | None,
) -> None:
    """ArgumentError unless v, if it is given, has this shape and dtype and may be written.

    remedy: of another dtype.
    """
    if v is None:
        return
    if tuple(v.shape) != shape:
        raise ArgumentError(f"{name}: shape is {list(v.shape)}; wanted {list(shape)}")
    require_dtype(v, wanted, name, remedy)
    require_output(v, name, **others)


def require_output(v: ArrayView, name: str, /, **others: ArrayView | None) -> None:
    """ArgumentError unless v may be written: not read-only, no address twice, clear of `others`.

    Arrays are compared by the range of bytes they span; None is skipped.
    """
    if v.readonly:
        what = "a JAX array" if v.framework == "jax" else "a read-only array"
        raise ArgumentError(f"{name}: {what} cannot be written; pass a writable one, or none")
    if _repeats_addresses(v):
        raise ArgumentError(
            f"{name}: shape {list(v.shape)} with strides {list(v.strides)} may address an element "
            "more than once; pass an array that is neither broadcast nor overlaid on itself"
        )
    low, high = byte_range(v)
    for other, x in others.items():
        if x is not None and x.device == v.device:
            other_low, other_high = byte_range(x)
            # An empty array spans no byte.
            if max(low, other_low) < min(high, other_high):
                raise ArgumentError(f"{name}: overlaps {other} in memory; pass an array of its own")


def _repeats_addresses(v: ArrayView) -> bool:
    if 0 in v.shape:
        return False
    reach = 0
    for stride, extent in sorted(zip(map(abs, v.strides), v.shape, strict=True)):
        if extent > 1:
            if stride <= reach:
                return True
            reach += stride * (extent - 1)
    return False


def are_rows_aligned(pointers: int, strides: Iterable[tuple[Sequence[int], DType]]) -> bool:
    """True if all these addresses (or-ed together) and strides are multiples of 16 bytes, and no
    stride is negative, which neither vectors nor copy engines are made for."""
    offsets = pointers
    for elements, dtype in strides:
        for stride in elements:
            offsets |= stride * dtype.itemsize
    return offsets & 15 == 0 <= offsets
