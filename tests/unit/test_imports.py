"""The rules about files: who may import whom, what importing costs, how long a file may be."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "cupyattn"

_LAYERS = {
    **dict.fromkeys(("errors", "env", "dtypes", "problem", "paging", "_version"), 0),
    **dict.fromkeys(("schedule", "reference"), 1),
    **dict.fromkeys(("array", "_readers", "_dlpack", "match", "device", "jit"), 2),
    "launch": 3,
    **dict.fromkeys(("serving", "integrations"), 5),
    **dict.fromkeys(("__init__", "__main__", "cli", "demo"), 6),
}
_PUBLIC_API = 4  # every other module
_SIBLINGS = {"schedule": "reference", "reference": "schedule"}
_FRAMEWORKS = {"cupy", "cupyx", "cupy_backends", "torch", "jax", "jaxlib"}
_MAY_USE_CUPY = {
    *("array", "_readers", "device", "jit", "launch"),
    *("_wrapper", "cli", "demo", "integrations"),
}


def _sources(folder: Path, *patterns: str) -> list[Path]:
    return sorted(path for pattern in patterns for path in folder.rglob(pattern))


def _unit(path: Path) -> str:
    """The module or subpackage a file belongs to, as the layers name it."""
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def _layer(unit: str) -> int:
    return _LAYERS.get(unit, _PUBLIC_API)


def _imports(path: Path) -> list[tuple[str, str, bool]]:
    """(top-level package, unit of cupyattn or "", inside a function) of every import in a file."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    deferred = {
        inner
        for outer in ast.walk(tree)
        if isinstance(outer, (ast.FunctionDef, ast.AsyncFunctionDef))
        for inner in ast.walk(outer)
    }
    package = ("cupyattn", *path.relative_to(PACKAGE).parent.parts)
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else ()
            module = ".".join((*base, *filter(None, [node.module])))
            names = [f"{module}.{alias.name}" for alias in node.names]
        else:
            continue
        for name in names:
            top, *rest = name.split(".")
            unit = rest[0] if top == "cupyattn" and rest else ""
            # `from . import x` in __init__.py may name a module or something defined there.
            if unit and not ((PACKAGE / unit).is_dir() or (PACKAGE / f"{unit}.py").exists()):
                unit = "__init__"
            found.append((top, unit, node in deferred))
    return found


@pytest.mark.parametrize("path", _sources(PACKAGE, "*.py"), ids=lambda p: str(p.relative_to(ROOT)))
def test_imports_only_go_down(path: Path) -> None:
    unit = _unit(path)
    for top, target, _ in _imports(path):
        if top == "cupyattn":
            rank, wanted = _layer(target), _layer(unit)
            # Any module may read a constant of the package itself, such as its version.
            assert rank <= wanted or not target, (
                f"{unit} (L{wanted}) imports {target} (L{rank}); dependencies only go down"
            )
            assert target != _SIBLINGS.get(unit), f"{unit} imports its sibling {target}"


@pytest.mark.parametrize("path", _sources(PACKAGE, "*.py"), ids=lambda p: str(p.relative_to(ROOT)))
def test_frameworks_are_imported_inside_functions_of_few_modules(path: Path) -> None:
    unit = _unit(path)
    for top, _, in_function in _imports(path):
        if top in _FRAMEWORKS:
            assert in_function, f"{unit} imports {top} when it is imported; do it inside a function"
            allowed = unit in _MAY_USE_CUPY if top.startswith("cupy") else _layer(unit) >= 5
            assert allowed, f"{unit} may not import {top}"


@pytest.mark.parametrize(
    "module",
    [
        "cupyattn",
        "cupyattn.array",
        "cupyattn.array.match",
        "cupyattn.schedule",
        "cupyattn.reference",
    ],
)
def test_importing_brings_no_framework(module: str) -> None:
    code = (
        f"import sys, {module}\n"
        f"found = sorted(set(sys.modules) & {_FRAMEWORKS!r})\n"
        "sys.exit(f'imported {found}' if found else 0)"
    )
    child = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert child.returncode == 0, child.stderr


def _too_long(paths: list[Path], budget: int) -> list[str]:
    lengths = {p: len(p.read_text(encoding="utf-8").splitlines()) for p in paths}
    return [f"{p.relative_to(ROOT)}: {n} > {budget}" for p, n in lengths.items() if n > budget]


def test_files_keep_to_the_line_budget() -> None:
    python = [
        p for name in ("cupyattn", "tests", "benchmarks") for p in _sources(ROOT / name, "*.py")
    ]
    kernels = _sources(ROOT / "kernels", "*.cuh", "*.cu")
    assert python and kernels
    assert not _too_long(python, 400) + _too_long(kernels, 600)


@pytest.mark.parametrize(
    ("file", "source", "expected"),
    [
        ("launch/x.py", "from ..jit import load", ("cupyattn", "jit", False)),
        ("launch/x.py", "from .. import array", ("cupyattn", "array", False)),
        ("array.py", "def f():\n    import cupy.cuda", ("cupy", "", True)),
        ("match.py", "from .array import view", ("cupyattn", "array", False)),
        ("demo.py", "import cupyattn", ("cupyattn", "", False)),
        ("cli.py", "from . import __version__", ("cupyattn", "__init__", False)),
    ],
)
def test_the_import_reader_sees(
    file: str, source: str, expected: tuple[str, str, bool], monkeypatch, tmp_path: Path
) -> None:
    """The rules above would pass on anything if the reader missed a form of import."""
    for existing in ("jit/__init__.py", "array.py", file):
        (tmp_path / existing).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / existing).write_text("")
    (tmp_path / file).write_text(source)
    monkeypatch.setattr(sys.modules[__name__], "PACKAGE", tmp_path)
    assert _imports(tmp_path / file) == [expected]
