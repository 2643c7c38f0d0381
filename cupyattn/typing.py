"""Types of the public calls: arrays of any framework."""

from __future__ import annotations

from typing import Any, Protocol, TypeAlias, TypeVar

__all__ = ["Array", "ArrayT", "LseT", "Pages", "Scale"]


class Array(Protocol):
    """A torch, CuPy, NumPy or JAX array, or another object with `__dlpack__`.

    That method is no part of the type: NumPy and JAX declare it in ways that exclude each other.
    """

    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def dtype(self) -> Any: ...


# The result is an array of the caller's framework. NumPy's types also name a dtype, which the
# result need not have.
ArrayT = TypeVar("ArrayT", bound=Array)
# LSEs that a call takes and gives back, whose dtype is not that of outputs.
LseT = TypeVar("LseT", bound=Array)
# A paged cache: one array, or K and V.
Pages: TypeAlias = Array | tuple[Array, Array] | list[Array]
Scale: TypeAlias = float | Array | None
