"""What makes a function hard to read, counted in a file's syntax tree.

Lines: those of a function's body, without signature and docstring, nested functions included.
Complexity: McCabe's, as ruff's C901 counts it: 1, and 1 more for every way that control can take.
Star arguments: calls that pass several named arguments by place in one word (`f(*facts)`), so that
one must count to see which is which; `f(*(a, b), *(c, d))` is always one. Not meant are calls of
what takes any number of arguments (`zip(*rows)`), of a function that was given or found, whose
arguments the caller cannot name (`function(*task)`), and of a wrapper with its own `*args`.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

MAX_LINES = 60
MAX_COMPLEXITY = 15

Function = ast.FunctionDef | ast.AsyncFunctionDef

# Of Python and of other libraries: what takes any number of arguments that are alike.
_TAKE_ANY = {
    *("max", "min", "zip", "map", "print", "format", "reshape", "expand", "pack", "pack_into"),
    *("lcm", "gcd", "itemgetter", "bind", "partial", "broadcast"),
}


class Unreadable(NamedTuple):
    """A function or a call that breaks a rule."""

    kind: str  # "lines", "complexity", "star arguments"
    path: str  # of the file, below the root
    name: str  # of the function (that calls), with those around it
    line: int
    size: int  # how many lines or ways; 1 for a call


def unreadable(root: Path, paths: Iterable[Path]) -> list[Unreadable]:
    trees = {path: ast.parse(path.read_text("utf-8")) for path in paths}
    takes_any = _variadic(trees.values())
    found = []
    for path, tree in trees.items():
        place = path.relative_to(root).as_posix()
        for name, node in _functions(tree):
            for kind, size, most in (
                ("lines", _num_lines(node), MAX_LINES),
                ("complexity", complexity(node), MAX_COMPLEXITY),
            ):
                if size > most:
                    found.append(Unreadable(kind, place, name, node.lineno, size))
        for name, call in star_calls(tree, takes_any):
            found.append(Unreadable("star arguments", place, name, call.lineno, 1))
    return found


def _functions(tree: ast.AST, around: str = "") -> Iterator[tuple[str, Function]]:
    for node in ast.iter_child_nodes(tree):
        name = around
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            name = f"{around}.{node.name}".lstrip(".")
            if not isinstance(node, ast.ClassDef):
                yield name, node
        yield from _functions(node, name)


def _num_lines(function: Function) -> int:
    body = function.body[1 if ast.get_docstring(function) is not None else 0 :]
    return (body[-1].end_lineno or 0) - body[0].lineno + 1 if body else 0


def complexity(function: Function) -> int:
    return 1 + _branches(function.body)


def _branches(body: Iterable[ast.stmt]) -> int:
    """Decisions of statements. Those of conditional expressions and comprehensions do not count."""
    count = 0
    for node in body:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            count += 1 + _branches(node.body)
        elif isinstance(node, (ast.If, ast.For, ast.AsyncFor, ast.While)):
            count += 1 + _branches(node.body) + _branches(node.orelse)  # `elif`: an If in `else`
        elif isinstance(node, ast.Try):
            count += len(node.handlers) + bool(node.orelse)
            for handler in node.handlers:
                count += _branches(handler.body)
            count += _branches([*node.body, *node.orelse, *node.finalbody])
        elif isinstance(node, ast.Match):
            count += sum(1 + _branches(case.body) for case in node.cases)
            last = node.cases[-1]
            is_default = isinstance(last.pattern, ast.MatchAs) and last.pattern.pattern is None
            count -= is_default and last.guard is None
        elif isinstance(node, (ast.With, ast.AsyncWith, ast.ClassDef)):
            count += _branches(node.body)
    return count


def star_calls(tree: ast.AST, elsewhere: dict[str, bool]) -> Iterator[tuple[str, ast.Call]]:
    """The calls that pass named arguments by place in one word, and the functions they stand in.

    `elsewhere`: whether what other files define by a name takes any number of arguments.
    """
    takes_any = elsewhere | _variadic([tree], is_own=True) | dict.fromkeys(_TAKE_ANY, True)

    def search(node: ast.AST, around: str, own: _Own) -> Iterator[tuple[str, ast.Call]]:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            around = f"{around}.{node.name}".lstrip(".")
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
            own = own.inside(node)
        if isinstance(node, ast.Call) and _is_by_place(node, own, takes_any):
            yield around, node
        for inner in ast.iter_child_nodes(node):
            yield from search(inner, around, own)

    yield from search(tree, "", _Own(frozenset(), frozenset()))


class _Own(NamedTuple):
    """Names of the functions around a call."""

    args: frozenset[str]  # `*args`
    values: frozenset[str]  # arguments and variables

    def inside(self, function: Function | ast.Lambda) -> _Own:
        variadic = {function.args.vararg.arg} if function.args.vararg else set()
        nodes = [*ast.walk(function)]
        values = {x.arg for x in nodes if isinstance(x, ast.arg)}
        values |= {x.id for x in nodes if isinstance(x, ast.Name) and isinstance(x.ctx, ast.Store)}
        return _Own(self.args | variadic, self.values | values)


def _is_by_place(call: ast.Call, own: _Own, takes_any: dict[str, bool]) -> bool:
    starred = [arg.value for arg in call.args if isinstance(arg, ast.Starred)]
    if any(isinstance(x, (ast.Tuple, ast.List)) for x in starred):
        return True
    match call.func:
        case ast.Name(id=name) if name in own.values:
            return False
        case ast.Name(id=name) | ast.Attribute(attr=name) if takes_any.get(name, False):
            return False
        case ast.Name() | ast.Attribute():
            return any(not _is_own(x, own.args) for x in starred)
    return False  # what an expression finds


def _is_own(value: ast.expr, own: frozenset[str]) -> bool:
    """Whether a value is `args`, or a slice of it, of the function around it."""
    while isinstance(value, ast.Subscript):
        value = value.value
    return isinstance(value, ast.Name) and value.id in own


def _variadic(trees: Iterable[ast.AST], is_own: bool = False) -> dict[str, bool]:
    """By names of functions and classes: whether all that are defined by a name take `*args`.

    is_own: of a file's own, which sees what stands within its functions too.
    """
    takes: dict[str, bool] = {}
    for tree in trees:
        for name, function in _definitions(tree, is_own):
            takes[name] = takes.get(name, True) and function.args.vararg is not None
    return takes


def _definitions(tree: ast.AST, enters: bool) -> Iterator[tuple[str, Function]]:
    """Functions, and classes by how they are made."""
    for node in ast.iter_child_nodes(tree):
        is_function = isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
        if is_function:
            yield node.name, node
        if isinstance(node, ast.ClassDef):
            inside = (x for x in node.body if isinstance(x, ast.FunctionDef))
            yield from ((node.name, x) for x in inside if x.name == "__init__")
        if enters or not is_function:
            yield from _definitions(node, enters)
