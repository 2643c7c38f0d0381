"""The rules about files: who may import whom, and what importing costs."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

import cupyattn

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "cupyattn"

# Every room of the package and its rank: a room imports only rooms of lower rank, and itself.
_RANKS = {
    room: rank
    for rank, rooms in enumerate(
        (
            ("errors", "typing", "_version"),
            ("core", "paging", "schedule"),
            ("array", "jit", "reference"),
            ("launch/driver",),
            ("launch/ops", "launch/tiles"),
            ("choose",),
            ("launch/attention",),
            ("engine", "launch/instances"),
            ("page", "quantization", "shares"),
            ("quantize", "slots"),
            ("quantize_pages",),
            ("wrappers",),
            (
                *("attention", "cascade", "decode", "mla", "prefill", "pod", "sparse"),
                *("cudnn", "flash_attn", "flash_mla", "trtllm", "xqa"),
            ),
            ("dot_product", "dsa_indexer", "flash_attn_interface", "msa_ops", "paged_mqa", "topk"),
            ("distributed",),
            ("bench", "demo", "explanation", "observation", "serving"),
            ("integrations",),
            ("cli",),
            ("__init__", "__main__"),
        )
    )
    for room in rooms
}
_FRAMEWORKS = {"cupy", "cupyx", "cupy_backends", "torch", "transformers", "jax", "jaxlib"}
_FRAMEWORKS |= {"minisgl", "mpi4py", "nccl", "sglang", "vllm"}
# Rooms that talk to the device; schedule, reference, paging and most of core never do.
_MAY_IMPORT_CUPY = {
    *("array", "jit", "launch/driver", "launch/attention", "launch/ops", "engine"),
    *("bench", "cli", "demo", "distributed", "integrations"),
}
# Rooms that call other libraries: bridges to them, what carries bytes between ranks, and the peers
# of a benchmark.
_MAY_IMPORT_TORCH = {"bench", "distributed", "integrations"}


def _sources(folder: Path, *patterns: str) -> list[Path]:
    return sorted(path for pattern in patterns for path in folder.rglob(pattern))


def _room(module: str) -> str:
    """The folder, or the module of the top level, that a module (`a.b.c`) stands in."""
    first, *rest = module.split(".")
    return f"{first}/{rest[0]}" if first == "launch" and rest else first


def _module(path: Path) -> str:
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(parts[:-1] if len(parts) > 1 and parts[-1] == "__init__" else parts)


def _imports(path: Path) -> list[tuple[str, str, bool]]:
    """(top-level package, module of cupyattn or "", inside a function) of a file's imports."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    deferred, unread = set(), set()
    for outer in ast.walk(tree):
        if isinstance(outer, (ast.FunctionDef, ast.AsyncFunctionDef)):
            deferred.update(ast.walk(outer))
        if isinstance(outer, ast.If) and ast.unparse(outer.test) == "TYPE_CHECKING":
            unread.update(ast.walk(outer))  # names for type checkers, which nothing runs
    package = ("cupyattn", *path.relative_to(PACKAGE).parent.parts)
    found = []
    for node in set(ast.walk(tree)) - unread:
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else ()
            module = ".".join((*base, *filter(None, [node.module])))
            names = [f"{module}.{alias.name}" for alias in node.names]
        else:
            continue
        for name in names:
            top, _, inner = name.partition(".")
            # The last part may name a module or something that is defined in one.
            while inner and top == "cupyattn":
                place = PACKAGE / inner.replace(".", "/")
                if place.is_dir() or place.with_suffix(".py").exists():
                    break
                inner = inner.rpartition(".")[0]
            is_own = top == "cupyattn"
            found.append((top, (inner or "__init__") if is_own else "", node in deferred))
    return found


def test_every_room_has_a_rank() -> None:
    rooms = {_room(_module(path)) for path in _sources(PACKAGE, "*.py")}
    assert rooms - {"launch"} <= set(_RANKS)  # launch/__init__.py has no code


def test_contributors_find_every_room_on_the_map() -> None:
    text = (ROOT / "docs" / "CONTRIBUTING.md").read_text("utf-8")
    places = text[text.index("In `cupyattn/`, from") : text.index("To follow one call")]
    named = set(re.findall(r"\w+", places))
    rooms = {_room(_module(path)).rpartition("/")[2] for path in _sources(PACKAGE, "*.py")}
    assert rooms - {"__init__", "__main__", "_version"} <= named


@pytest.mark.parametrize("path", _sources(PACKAGE, "*.py"), ids=lambda p: str(p.relative_to(ROOT)))
def test_imports_only_go_down(path: Path) -> None:
    own = _room(_module(path))
    for top, module, _ in _imports(path):
        # Any module may read a constant of the package itself, such as its version.
        if top == "cupyattn" and module != "__init__" and _room(module) != own:
            target = _room(module)
            assert _RANKS[target] < _RANKS[own], (
                f"{own} ({_RANKS[own]}) imports {target} ({_RANKS[target]}); imports only go down"
            )
            assert (own, target) != ("reference", "schedule")


def test_no_modules_import_each_other_in_a_circle() -> None:
    below = {
        _module(path): {m for top, m, _ in _imports(path) if top == "cupyattn"} - {_module(path)}
        for path in _sources(PACKAGE, "*.py")
        if path.name != "__init__.py"
    }
    done: set[str] = set()
    while ready := {m for m in below if m not in done and not (below[m] & set(below)) - done}:
        done |= ready
    assert not set(below) - done, f"a circle among {sorted(set(below) - done)}"


@pytest.mark.parametrize("path", _sources(PACKAGE, "*.py"), ids=lambda p: str(p.relative_to(ROOT)))
def test_frameworks_are_imported_inside_functions_of_few_modules(path: Path) -> None:
    module = _module(path)
    for top, _, in_function in _imports(path):
        if top in _FRAMEWORKS:
            assert in_function, f"{module} imports {top} when it is imported; do it in a function"
            room = _room(module)
            allowed = (
                room in _MAY_IMPORT_CUPY if top.startswith("cupy") else room in _MAY_IMPORT_TORCH
            )
            allowed = allowed or module in ("core.device", "core.cupy_module")
            assert allowed, f"{module} may not import {top}"


@pytest.mark.parametrize(
    "module",
    [
        "cupyattn",
        "cupyattn.array",
        "cupyattn.array.match",
        "cupyattn.distributed",
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


def test_cpu_calls_need_nothing_that_windows_has_not() -> None:
    """No module of Unix alone, and no function of os that is there alone."""
    code = """if True:
        import os, sys
        sys.modules.update(dict.fromkeys(("fcntl", "resource", "pwd", "grp", "termios")))
        for name in "getuid geteuid getgid fork register_at_fork fchmod O_NOFOLLOW".split():
            vars(os).pop(name, None)
        import numpy as np
        import cupyattn, cupyattn.cli
        q, lse = np.zeros((2, 2, 16), np.float16), np.zeros((2, 2), np.float32)
        one, two = np.array([0, 1], np.int32), np.array([2], np.int32)
        pool = np.zeros((1, 2, 2, 2, 16), np.float16)
        cupyattn.single_prefill_with_kv_cache(q, q, q)
        w = cupyattn.BatchDecodeWithPagedKVCacheWrapper(np.zeros(1 << 20, np.uint8))
        w.plan(one, one[:1], two, 2, 2, 16, 2)
        w.run(q[:1], pool)
        cupyattn.merge_state(q, lse, q, lse)
        cupyattn.get_seq_lens(one, two, 2)
        cupyattn.trtllm_batch_decode_with_kv_cache(q[:1], pool, None, one[None, :1], two, 2)
        assert cupyattn.cli.main(["info"]) == 0
    """
    child = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert child.returncode == 0, child.stderr
    assert "cache        kernels are compiled and kept on Linux only" in child.stdout


def test_type_checkers_see_every_public_name() -> None:
    tree = ast.parse((PACKAGE / "__init__.py").read_text(encoding="utf-8"))
    blocks = [n for n in tree.body if isinstance(n, ast.If)]
    typed = {
        alias.asname
        for block in blocks
        for node in block.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    exported = set(cupyattn.__all__) - {"__version__"}
    assert exported <= typed
    assert typed - exported <= set(cupyattn._MODULES)
    assert (PACKAGE / "py.typed").exists()


@pytest.mark.parametrize(
    ("file", "source", "expected"),
    [
        ("launch/x.py", "from ..jit import load", ("cupyattn", "jit", False)),
        ("launch/x.py", "from .. import jit", ("cupyattn", "jit", False)),
        ("launch/ops/x.py", "from ...array.views import f", ("cupyattn", "array.views", False)),
        ("paging.py", "def f():\n    import cupy.cuda", ("cupy", "", True)),
        ("paging.py", "from .array.views import view", ("cupyattn", "array.views", False)),
        ("demo.py", "import cupyattn", ("cupyattn", "__init__", False)),
        ("cli.py", "from . import __version__", ("cupyattn", "__init__", False)),
    ],
)
def test_the_import_reader_sees(
    file: str, source: str, expected: tuple[str, str, bool], monkeypatch, tmp_path: Path
) -> None:
    """The rules above would pass on anything if the reader missed a form of import."""
    for existing in ("jit/__init__.py", "array/views.py", file):
        (tmp_path / existing).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / existing).write_text("")
    (tmp_path / file).write_text(source)
    monkeypatch.setattr(sys.modules[__name__], "PACKAGE", tmp_path)
    assert _imports(tmp_path / file) == [expected]
