"""The emulator needs a C++ compiler: without one its tests are skipped, and say so."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from typing import Any

import pytest


@pytest.fixture(autouse=True, scope="session")
def _compiler() -> None:
    if shutil.which("g++") is None:
        pytest.skip("g++ is not installed; it builds the kernels for the host")


@pytest.fixture
def emulated() -> Iterator[Any]:
    """An emulated GPU, plugged in."""
    from emulator import gpu

    with gpu.plugged_in() as found:
        yield found
