"""Attention over keys that ranks share, on GPUs: streams of one, and a process for each of two."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers import parallel_ranks
from helpers.parallel_attention import Batch
from helpers.parallel_ranks import KINDS, check, run_kind

from cupyattn.distributed import simulate

pytestmark = pytest.mark.gpu

cupy = pytest.importorskip("cupy")

BATCH = Batch(kv_lens=(300, 5, 1200, 64), own_heads=4, kv_heads=2, head_dim=128, page_size=16)


@pytest.mark.parametrize("run", [1, 16])
@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("kind", KINDS)
def test_ranks_of_one_gpu(kind: str, size: int, run: int) -> None:
    """Not by windows: a kernel that is launched for the first time would wait for those that wait
    for another rank of this process."""
    batch = replace(BATCH, size=size, run=run, seed=size, **KINDS[kind])

    def work(group: Any) -> Any:
        with cupy.cuda.Stream(non_blocking=True):
            return run_kind(kind, batch, group, uses_windows=False)

    check(batch, simulate(size, work, devices=[0] * size))


def test_a_graph_holds_all_of_it() -> None:
    """Where queries are replicated, on one GPU: its ranks' collectives wait on the host."""
    found = simulate(2, parallel_ranks.replay, devices=[0, 0])
    assert found == [{"differing": 0, "replays": 50}] * 2


@pytest.mark.skipif(
    cupy.cuda.is_available() and cupy.cuda.runtime.getDeviceCount() < 2, reason="needs two GPUs"
)
def test_processes_of_two_gpus(tmp_path: Path) -> None:
    """Every kind, then a graph with the gathered queries."""
    found = parallel_ranks.finish(parallel_ranks.start(tmp_path, 2), 120.0)
    for rank in found:
        assert rank["code"] == 0, rank["stderr"]
    for kind in KINDS:
        batch = replace(BATCH, **KINDS[kind])
        arrays = [np.load(tmp_path / f"{kind}.{rank}.npz") for rank in range(2)]
        check(batch, [[(x["out"], x["lse"]), (x["again"], x["lse_again"])] for x in arrays])
    assert [rank["differing"] for rank in found] == [0, 0]
