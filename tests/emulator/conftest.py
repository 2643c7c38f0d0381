"""The emulator needs a C++ compiler: without one its tests are skipped, and say so."""

from __future__ import annotations

import shutil

import pytest


@pytest.fixture(autouse=True, scope="session")
def _compiler() -> None:
    if shutil.which("g++") is None:
        pytest.skip("g++ is not installed; it builds the kernels for the host")
