"""What tests of the command share: kernels of a few lines, and caches of their own."""

from __future__ import annotations

from pathlib import Path

import pytest
from helpers import tiny_kernels


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    tiny_kernels.write(tmp_path / "kernels")
    monkeypatch.setenv("CUPYATTN_KERNELS_DIR", str(tmp_path / "kernels"))
    monkeypatch.setenv("CUPYATTN_CACHE_DIR", str(tmp_path / "default-cache"))
    return tmp_path
