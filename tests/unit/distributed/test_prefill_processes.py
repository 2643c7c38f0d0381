"""Prefill in fresh processes on the CPU, over a folder and over torch's gloo."""

from __future__ import annotations

from pathlib import Path

import pytest
from helpers.processes import run_ranks

_FOLDER = """
from cupyattn.distributed import Group
group = Group.from_folder(folder, rank, size, on_gpu=False, timeout=60)
"""
_GLOO = """
import torch.distributed as dist
from cupyattn.distributed import Group
dist.init_process_group("gloo", init_method=f"file://{folder}/torch", rank=rank, world_size=size)
group = Group.from_torch()
"""
_CALLS = """
import numpy as np
from cupyattn import reference
from cupyattn.distributed import ContextParallelPrefill, ZigZag
rng = np.random.default_rng(5)
offsets = np.array([0, 61, 61, 70])
whole = [rng.standard_normal((70, heads, 16)).astype(np.float16) for heads in (4, 2, 2)]
parts = [[x[a:b].astype(float) for x in whole] for a, b in ((0, 61), (61, 70))]
wanted = np.concatenate([reference.attention(*part, causal=True)[0] for part in parts])
share = ZigZag(offsets, size)
own = [share.cut(x, rank) for x in whole]
for method in ("gather", "overlap", "ulysses"):
    prefill = ContextParallelPrefill(group, method=method)
    prefill.plan(offsets, 4, 2, 16)
    out = prefill.run(*own)
    assert (out == prefill.run(*own)).all()
    assert np.abs(out - share.cut(wanted, rank)).max() < 2e-3, method
print("done", flush=True)
group.close()
"""


@pytest.mark.parametrize("start", [_FOLDER, _GLOO], ids=["folder", "gloo"])
def test_processes(start: str, tmp_path: Path) -> None:
    if start is _GLOO:
        pytest.importorskip("torch")
    for text in run_ranks(2, start + _CALLS, tmp_path, 120):
        assert "done" in text
