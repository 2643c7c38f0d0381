"""Prefill over several GPUs: simulated ranks on one GPU, and fresh processes of two."""

from __future__ import annotations

from pathlib import Path

import pytest
from helpers import prefill_ranks
from helpers.processes import run_ranks

from cupyattn.distributed import Group, simulate

pytestmark = pytest.mark.gpu

cupy = pytest.importorskip("cupy")

_FOLDER = """
import cupy as cp
from cupyattn.distributed import Group
cp.cuda.Device(rank).use()
group = Group.from_folder(folder, rank, size)
framework = "cupy"
"""
_TORCH = """
import torch
import torch.distributed as dist
torch.cuda.set_device(rank)
dist.init_process_group("nccl", init_method=f"file://{folder}/torch", rank=rank, world_size=size)
import cupy as cp
from cupyattn.distributed import Group
cp.cuda.Device(rank).use()
group = Group.from_torch()
framework = "torch"
"""
_CALLS = """
from helpers import prefill_ranks
prefill_ranks.check_all(group, framework)
if framework == "torch" and group.can_capture:
    for method in ("gather", "overlap", "ulysses"):
        prefill_ranks.check_graph(group, method)
print("done", group.describe(), flush=True)
group.close()
"""


@pytest.mark.parametrize("framework", ["cupy", "torch"])
@pytest.mark.parametrize("prompts", prefill_ranks.CASES, ids=str)
def test_ranks_of_one_gpu(framework: str, prompts: prefill_ranks.Prompts) -> None:
    pytest.importorskip(framework)

    def work(group: Group) -> None:
        cupy.cuda.Device(0).use()
        prefill_ranks.check(group, framework, prompts)

    simulate(2, work, devices=[0, 0])


@pytest.mark.parametrize("start", [_FOLDER, _TORCH], ids=["folder", "torch"])
def test_processes(start: str, tmp_path: Path) -> None:
    if cupy.cuda.runtime.getDeviceCount() < 2:
        pytest.skip("needs two GPUs")
    if start is _TORCH:
        pytest.importorskip("torch")
    for text in run_ranks(2, start + _CALLS, tmp_path, 130):
        assert "done" in text
