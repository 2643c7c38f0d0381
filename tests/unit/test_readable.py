"""Functions fit a screen, take few ways, and say by name what they pass."""

from __future__ import annotations

import ast
import re
from collections import Counter
from pathlib import Path

import pytest
from helpers.readable import complexity, star_calls, unreadable

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "cupyattn"

# What is still to be made simpler, and how large it is: sizes may only fall.
_LONG: dict[str, int] = {}
_MANY_WAYS: dict[str, int] = {}
# Calls in a file that pass several named arguments in one word.
_STAR_CALLS: dict[str, int] = {
    "cupyattn/engine/blocks.py": 1,
    "cupyattn/flash_mla.py": 1,
    "cupyattn/engine/call_cache.py": 2,
    "cupyattn/engine/planless_cache.py": 1,
    "cupyattn/engine/run_planless.py": 1,
    "cupyattn/engine/check_planless.py": 1,
    "cupyattn/engine/planless_reference.py": 1,
    "cupyattn/engine/views.py": 1,
    "cupyattn/engine/run_single.py": 3,
}


# Code of a file that is not laid out by `ruff format`.
_UNFORMATTED: dict[str, int] = {
    "cupyattn/flash_mla.py": 1,
    "cupyattn/mla.py": 1,
    "cupyattn/engine/prepared.py": 1,
}


def _found(kind: str) -> dict[str, int]:
    every = [x for x in unreadable(ROOT, sorted(PACKAGE.rglob("*.py"))) if x.kind == kind]
    return {f"{x.path}: {x.name}": x.size for x in every}


def test_bodies_of_functions_have_at_most_60_lines() -> None:
    assert _found("lines") == _LONG


def test_functions_have_at_most_15_ways() -> None:
    assert _found("complexity") == _MANY_WAYS


def test_arguments_are_passed_by_name_or_one_by_one() -> None:
    every = unreadable(ROOT, sorted(PACKAGE.rglob("*.py")))
    found = Counter(x.path for x in every if x.kind == "star arguments")
    assert dict(found) == _STAR_CALLS


def test_all_code_is_laid_out_alike() -> None:
    found = {
        path.relative_to(ROOT).as_posix(): len(re.findall("# fmt: (?:skip|off)", text))
        for path in sorted(PACKAGE.rglob("*.py"))
        if "# fmt:" in (text := path.read_text("utf-8"))
    }
    assert found == _UNFORMATTED


def _function(text: str) -> ast.FunctionDef:
    body = ast.parse(text).body[0]
    assert isinstance(body, ast.FunctionDef)
    return body


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ("return a and b if a else [x for x in a if x]", 1),
        ("if a: b()\n elif b: c()\n else: d()", 3),
        ("for x in a: b()\n else: c()", 2),
        ("while a:\n  if b: c()", 3),
        ("try: a()\n except A: b()\n except B: c()\n else: d()\n finally: e()", 4),
        ("match a:\n  case 1: b()\n  case 2: c()\n  case _: d()", 3),
        ("with a:\n  if b: c()", 2),
        ("def g():\n  if a: b()\n return g", 3),
    ],
)
def test_ways_are_counted(body: str, expected: int) -> None:
    """As ruff's C901 does."""
    assert complexity(_function(f"def f(a, b):\n {body}")) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("f(*facts)", 1),
        ("a.f(x, *facts, y=1)", 1),
        ("zip(*(rows, keys))", 1),
        ("zip(*rows)", 0),
        ("def f(*xs): ...\nf(*facts)", 0),
        ("class F:\n  def __init__(self, *xs): ...\nF(*facts)", 0),
        ("def f(x, y): ...\nf(*facts)", 1),
        ("def f(*args): g(*args)", 0),
        ("def f(*args): g(1, *args[1:])", 0),
        ("def f(args): g(*args)", 1),
        ("def f(function, args): function(*args)", 0),
        ("def f(args):\n  function = find()\n  function(*args)", 0),
        ("def f(args):\n  from x import g\n  g(*args)", 1),
        ("TABLE[name](*args)", 0),
    ],
)
def test_calls_by_place_are_found(text: str, expected: int) -> None:
    assert len(list(star_calls(ast.parse(text), {}))) == expected
