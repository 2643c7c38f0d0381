"""Types of the public calls: arrays of any framework, and results that depend on return_lse."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Concatenate, Literal, ParamSpec, Protocol, TypeAlias, TypeVar, overload

__all__ = ["Array", "ArrayT", "Pages", "Scale"]


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
# A paged cache: one array, or K and V.
Pages: TypeAlias = Array | tuple[Array, Array] | list[Array]
Scale: TypeAlias = float | Array | None

_P = ParamSpec("_P")


class _TakesQ(Protocol[_P]):
    """A function of q, and of _P, which has return_lse as Literal[False]."""

    @overload
    def __call__(self, q: ArrayT, *args: _P.args, **kwargs: _P.kwargs) -> ArrayT: ...
    @overload
    def __call__(
        self, q: ArrayT, *args: Any, return_lse: Literal[True], **kwargs: Any
    ) -> tuple[ArrayT, ArrayT]: ...
    @overload
    def __call__(
        self, q: ArrayT, *args: Any, return_lse: bool, **kwargs: Any
    ) -> ArrayT | tuple[ArrayT, ArrayT]: ...


class _TakesQuery(Protocol[_P]):
    """The same of `query`."""

    @overload
    def __call__(self, query: ArrayT, *args: _P.args, **kwargs: _P.kwargs) -> ArrayT: ...
    @overload
    def __call__(
        self, query: ArrayT, *args: Any, return_lse: Literal[True], **kwargs: Any
    ) -> tuple[ArrayT, ArrayT]: ...
    @overload
    def __call__(
        self, query: ArrayT, *args: Any, return_lse: bool, **kwargs: Any
    ) -> ArrayT | tuple[ArrayT, ArrayT]: ...


def _shown_as_bool(function: Any) -> Any:
    """Literal[False] is for type checkers, who see the overloads; help() has no other line."""
    function.__annotations__["return_lse"] = "bool"
    return function


def returns_lse(function: Callable[Concatenate[Any, _P], Any]) -> _TakesQ[_P]:
    """Type a function of q: it returns (out, lse) if return_lse. Returns the function itself."""
    return _shown_as_bool(function)


def query_returns_lse(function: Callable[Concatenate[Any, _P], Any]) -> _TakesQuery[_P]:
    """`returns_lse` of a function of `query`."""
    return _shown_as_bool(function)


def run_returns_lse(method: Callable[Concatenate[Any, Any, _P], Any]) -> _TakesQ[_P]:
    """`returns_lse` of a method of (self, q)."""
    return _shown_as_bool(method)
