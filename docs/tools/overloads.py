"""cupyattn/core/overloads.pyi: types of calls whose flags decide what they return.

Each function that has a decorator of `overloads` is read, and written with an overload for each
result, with all of its arguments: a misspelt name is an error whatever the flags are.
"""

from __future__ import annotations

import ast
import copy
from collections.abc import Iterator
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[2] / "cupyattn"
PAGE = PACKAGE / "core" / "overloads.pyi"
_FLAGS = "return_lse", "return_residual", "return_softmax_lse", "return_attn_probs"
# What functions are called that always return it, and pass their arguments on.
_ALWAYS = "_return_lse"
_ANY, _NUMPY = ("ArrayT", "ArrayT"), ("NDArray[_T]", "NDArray[np.float32]")
_HEAD = '''# docs/tools/overloads.py writes this file: make written-docs.
# mypy: disable-error-code="overload-overlap, overload-cannot-match"
# pyright: reportOverlappingOverload=false
"""Decorators that give functions their types, by the values of their flags."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, Protocol, TypeVar, overload

import numpy as np
from numpy.typing import NDArray

from ..typing import Array, ArrayT, Pages, Scale

_T = TypeVar("_T", bound=np.generic)
'''


def page() -> str:
    """The file as it should be."""
    parts = [_HEAD]
    every = [*functions()]
    known = {function.name: function for _, function in every}
    for name, function in every:
        function = _as(function, known.get(function.name.removesuffix(_ALWAYS)))
        overloads = "\n".join(
            f"    @overload\n    def __call__(self, {ast.unparse(arguments)}) -> {result}: ..."
            for arguments, result in _overloads(function)
        )
        cls = f"_{name}"
        parts.append(f"class {cls}(Protocol):\n{overloads}\n")
        parts.append(f"def {name}(function: Callable[..., Any]) -> {cls}: ...\n")
    return "\n".join(parts)


def _as(function: ast.FunctionDef, other: ast.FunctionDef | None) -> ast.FunctionDef:
    """A function of (q, *args, **kwargs) with the arguments of the one that it calls."""
    if other is function or other is None or function.args.kwarg is None or _is_method(function):
        return function
    result = copy.copy(function)
    result.args = other.args
    return result


def _is_method(function: ast.FunctionDef) -> bool:
    return function.args.args[0].arg == "self"


def functions() -> Iterator[tuple[str, ast.FunctionDef]]:
    """(name of its decorator, function) of all that have one."""
    for path in sorted(PACKAGE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if not isinstance(node, ast.FunctionDef):
                continue
            for decorator in node.decorator_list:
                if isinstance(decorator, ast.Attribute) and _is_overloads(decorator.value):
                    yield decorator.attr, node


def _is_overloads(x: ast.expr) -> bool:
    return isinstance(x, ast.Name) and x.id == "overloads"


def _overloads(function: ast.FunctionDef) -> Iterator[tuple[ast.arguments, str]]:
    """(arguments, result) by what the flags are; what NumPy's arrays give ahead of others'."""
    names = [x.arg for x in (*function.args.args, *function.args.kwonlyargs)]
    flags = [name for name in _FLAGS if name in names]
    # FlashAttention-2 returns a third array with the probabilities' flag, and 3 takes it for a name
    # of the LSE's. Packed functions have no other flag.
    is_triple = flags[-1:] == ["return_attn_probs"] and "dropout_p" in names[:11]
    always = dict.fromkeys(flags, "Literal[True]")
    if not flags or function.name.endswith(_ALWAYS):
        yield from (
            (_of(function, always, None, kinds[0]), _pair(kinds)) for kinds in (_NUMPY, _ANY)
        )
        return
    yield _of(function, dict.fromkeys(flags, "Literal[False]"), None, "ArrayT"), "ArrayT"
    for flag in flags:
        is_third = is_triple and flag == "return_attn_probs"
        asked = {name: "Literal[True]" if name == flag else "bool" for name in flags}
        if is_triple and not is_third:
            asked["return_attn_probs"] = "Literal[False]"
        for kinds in (_NUMPY, _ANY):
            result = _triple(kinds) if is_third else _pair(kinds)
            yield _of(function, asked, flag, kinds[0]), result
    for kinds in (_NUMPY, _ANY):
        results = [kinds[0], _pair(kinds), *([_triple(kinds)] if is_triple else [])]
        yield _of(function, dict.fromkeys(flags, "bool"), None, kinds[0]), " | ".join(results)


def _pair(kinds: tuple[str, str]) -> str:
    return f"tuple[{kinds[0]}, {kinds[1]}]"


def _triple(kinds: tuple[str, str]) -> str:
    return f"tuple[{kinds[0]}, {kinds[1]}, {kinds[0]}]"


def _of(
    function: ast.FunctionDef, flags: dict[str, str], needed: str | None, first: str
) -> ast.arguments:
    """The function's arguments: flags of these types, of which one is needed, by its name; the
    first array of this type."""
    own = copy.deepcopy(function.args)
    if _is_method(function):
        del own.args[0]
    own.args[0].annotation = ast.Name(first)
    for argument in (*own.args, *own.kwonlyargs):
        if argument.arg in flags:
            argument.annotation = ast.Name(flags[argument.arg])
    ellipsis = ast.Constant(...)
    own.defaults = [ellipsis for _ in own.defaults]
    own.kw_defaults = [None if x is None else ellipsis for x in own.kw_defaults]
    at = next((i for i, x in enumerate(own.args) if x.arg == needed), None)
    if at is not None:
        # By name from there on: an argument without a default follows some that have one.
        moved, count = own.args[at:], len(own.args) - at
        defaults: list[ast.expr | None] = [None] * (len(own.args) - len(own.defaults))
        defaults += own.defaults
        own.args, own.defaults = own.args[:at], own.defaults[: max(0, len(own.defaults) - count)]
        own.kwonlyargs, own.kw_defaults = (
            [*moved, *own.kwonlyargs],
            [*defaults[at:], *own.kw_defaults],
        )
    for i, argument in enumerate(own.kwonlyargs):
        if argument.arg == needed:
            own.kw_defaults[i] = None
    return own
