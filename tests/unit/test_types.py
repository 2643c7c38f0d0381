"""What type checkers, inspect and help() say of the public names."""

from __future__ import annotations

import inspect
import json
import os
import pydoc
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import cupyattn
from cupyattn import typing
from docs.tools import overloads

ROOT = Path(__file__).parents[2]
SAMPLE = Path(__file__).with_name("typing_sample.py")
CALLS = Path(__file__).with_name("typing_calls.py")
CLASSES = [
    value
    for value in (getattr(cupyattn, name) for name in cupyattn.__all__)
    if inspect.isclass(value) and not issubclass(value, Exception)
]


def run(*command: str) -> str:
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_sample_programs_pass_mypy(tmp_path: Path) -> None:
    pytest.importorskip("mypy")
    # Nothing of our own settings, as in another project; its mistakes have to be found as well.
    options = ["--strict", "--follow-imports=silent", f"--config-file={tmp_path / 'none'}"]
    (tmp_path / "none").write_text("[mypy]\n")
    options.append(f"--cache-dir={tmp_path}")
    run(sys.executable, "-m", "mypy", *options, str(SAMPLE), str(CALLS))


def test_the_sample_programs_pass_pyright(tmp_path: Path) -> None:
    pytest.importorskip("pyright")
    # A mistake that it does not find leaves a comment that ignores nothing. Paths that are not
    # relative would be left out, without an error.
    settings = {
        "include": [os.path.relpath(x, tmp_path) for x in (SAMPLE, CALLS)],
        "extraPaths": [str(ROOT)],
        "reportUnnecessaryTypeIgnoreComment": "error",
    }
    (tmp_path / "pyrightconfig.json").write_text(json.dumps(settings))
    options = ["--stats", "--pythonpath", sys.executable, "--project", str(tmp_path)]
    said = run(sys.executable, "-m", "pyright", *options)
    assert "Total files checked: 2\n" in said


def test_there_are_sixty_calls() -> None:
    lines = CALLS.read_text("utf-8").splitlines()
    wrong = [line for line in lines if "type: ignore" in line and "`" not in line]
    right = [line for line in lines if line.strip().startswith("assert_type(")]
    assert len(wrong) >= 30 and len(right) >= 30


def test_overloads_are_those_of_the_functions() -> None:
    written = overloads.PAGE.read_text("utf-8")
    assert written == overloads.page(), "run python -m docs.tools"
    names = [name for name, _ in overloads.functions()]
    assert len(set(names)) == len(names)


def test_the_sample_program_uses_every_public_name() -> None:
    text = SAMPLE.read_text("utf-8")
    names = [f"cupyattn.{name}" for name in cupyattn.__all__]
    assert [name for name in (*names, *typing.__all__) if name not in text] == []


# --- signatures and help ---


def test_xqa_has_the_signature_of_the_function() -> None:
    from cupyattn.xqa import xqa

    assert [*inspect.signature(cupyattn.xqa).parameters][:2] == ["q", "k_cache"]
    assert inspect.signature(cupyattn.xqa) == inspect.signature(xqa)
    code = "import cupyattn, inspect; assert inspect.isfunction(cupyattn.xqa)"
    run(sys.executable, "-c", code)
    assert "xqa(q" in pydoc.render_doc(cupyattn.xqa, renderer=pydoc.plaintext)


@pytest.mark.parametrize(
    ("function", "like", "changed"),
    [
        (
            cupyattn.single_prefill_with_kv_cache_return_lse,
            cupyattn.single_prefill_with_kv_cache,
            {"return_lse"},
        ),
        (
            cupyattn.BatchAttentionWithAttentionSinkWrapper.plan,
            cupyattn.BatchPrefillWithPagedKVCacheWrapper.plan,
            set(),
        ),
    ],
)
def test_functions_that_pass_arguments_on_say_which(
    function: Callable[..., Any], like: Callable[..., Any], changed: set[str]
) -> None:
    own, others = inspect.signature(function).parameters, inspect.signature(like).parameters
    assert [*own] == [*others]
    assert {name for name in own if own[name] != others[name]} == changed


def test_every_call_has_a_signature_and_a_docstring() -> None:
    for cls in CLASSES:
        methods = inspect.getmembers(cls, inspect.isfunction)
        for name, method in methods:
            if name == "__init__" or not name.startswith("_"):
                assert inspect.signature(method).parameters, f"{cls.__name__}.{name}"
                doc = inspect.getdoc(method)
                assert doc and "See help(type(self))" not in doc, f"{cls.__name__}.{name}"
    for name in cupyattn.__all__:
        value = getattr(cupyattn, name)
        assert isinstance(value, str) or inspect.getdoc(value), name


def test_help_says_that_return_lse_is_a_bool() -> None:
    shown = []
    for name in cupyattn.__all__:
        value = getattr(cupyattn, name)
        if inspect.isclass(value):
            shown += [f for _, f in inspect.getmembers(value, inspect.isfunction)]
        elif callable(value):
            shown.append(value)
    found = [inspect.signature(f).parameters.get("return_lse") for f in shown]
    kinds = {str(x.annotation) for x in found if x is not None}
    assert kinds == {"bool"}


def test_help_of_the_package_begins_with_what_users_call() -> None:
    text = pydoc.render_doc(cupyattn, renderer=pydoc.plaintext)
    before, contents, _ = text.partition("PACKAGE CONTENTS")
    assert contents
    missing = [name for name in cupyattn.__all__ if name not in before]
    assert missing == ["__version__"]
