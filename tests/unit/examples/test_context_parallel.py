"""The examples of several ranks, as their first lines say they are started, on the CPU."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]


def _run(*arguments: str) -> str:
    env = os.environ | {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    env["PYTHONPATH"] = os.pathsep.join([str(ROOT), env.get("PYTHONPATH", "")])
    ended = subprocess.run(
        [sys.executable, *arguments], cwd=ROOT, env=env, capture_output=True, text=True, timeout=170
    )
    assert ended.returncode == 0, ended.stderr[-2000:]
    return ended.stdout


def test_nccl() -> None:
    pytest.importorskip("cupy")
    said = _run("examples/context_parallel_nccl.py")
    assert said.count("answers (4, 16, 128), at most 0.0000 from those of one") == 2


def test_torch() -> None:
    pytest.importorskip("torch")
    launcher = "-m", "torch.distributed.run", "--nproc-per-node", "2", "--rdzv-backend", "c10d"
    said = _run(*launcher, "--rdzv-endpoint", "localhost:0", "examples/context_parallel_torch.py")
    assert said.count("(4, 3, 16, 128), at most 0.0000 from one rank's answer") == 2
