"""Helpers that are run as programs, whose folder Python then looks into first."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

HELPERS = Path(__file__).parents[2] / "helpers"


def test_no_helper_hides_a_standard_module() -> None:
    names = {path.stem for path in HELPERS.iterdir()}
    assert not names & set(sys.stdlib_module_names)


@pytest.mark.parametrize("name", ["precompile", "sanitize"])
def test_programs_start(name: str) -> None:
    command = [sys.executable, str(HELPERS / f"{name}.py"), "--help"]
    assert "usage: " in subprocess.check_output(command, text=True)
