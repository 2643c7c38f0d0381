"""Libraries of kernels beside each other in one process."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.slow
def test_threads_launch_while_another_loads_libraries(tmp_path: Path) -> None:
    """Tables of thread-local memory change under a launch; some hundreds found none of theirs."""
    command = [sys.executable, "-m", "emulator.loads", str(tmp_path), "1500"]
    root = Path(__file__).parents[2]
    path = f"{root}:{root / 'tests'}"
    done = subprocess.run(command, env={**os.environ, "PYTHONPATH": path}, cwd=root, timeout=300)
    assert done.returncode == 0
