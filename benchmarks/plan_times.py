"""`python -m benchmarks plans`: host µs of plan() for lengths that change, without a GPU.

Our wrappers plan on the CPU as for an H100 or H200, to refuse there what a GPU refuses. What is
missing is the copy to the device, some 10 µs. Times of one machine compare with each other only.
"""

from __future__ import annotations

import argparse
import gc
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from . import peers
from .batch.case import BatchCase
from .batch.cases import BATCH_CASES
from .batch.inputs import BatchInputs
from .batch.steps import NUM_STEPS
from .batch.tables import page_tables


def main(argv: Sequence[str]) -> int:
    """Print a line a case. Returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks plans", description=__doc__)
    parser.add_argument("--rounds", type=int, default=3, help="times through all steps (default 3)")
    args = parser.parse_args(argv)
    print(f"{'case':28}{'median µs':>10}{'least tenth':>13}")
    for case in BATCH_CASES:
        is_plan = case.is_host and case.timed == "plan"
        if is_plan and case.arrays == ("torch_cpu" if case.api == "mla" else "numpy"):
            times = _times(_next_plan(case), args.rounds)
            median, minimum = np.percentile(times, (50, 10))
            print(f"{case.name:28}{median:10.1f}{minimum:13.1f}", flush=True)
    return 0


def _next_plan(case: BatchCase) -> Any:
    import torch

    q = torch.empty(0, case.num_qo_heads, case.head_dim_qk)
    pages = torch.empty(0, max(1, case.page_size), case.num_kv_heads, case.head_dim_qk)
    offsets = np.array(case.q_offsets, np.int32), np.array(case.kv_offsets, np.int32)
    tables = page_tables(case.kv_lens, case.page_size, 0) if case.is_paged else None
    inputs = BatchInputs(q, pages, pages, *offsets, tables)
    return peers.candidates("ours", case, inputs)[0].timed


def _times(plan: Any, rounds: int) -> list[float]:
    result = []
    gc.collect()
    gc.disable()
    try:
        for _ in range(rounds * NUM_STEPS):
            start = time.perf_counter()
            plan()
            result.append((time.perf_counter() - start) * 1e6)
    finally:
        gc.enable()
    return result
