"""The same program on ranks that are threads of this process, over small cases on the CPU."""

from __future__ import annotations

import time
from pathlib import Path

from cupyattn.distributed import Group, simulate

from .cases import DECODES, EXCHANGES, PAGE_SIZE, PROMPTS
from .machine import CPU
from .measure import measure
from .rank import Rank


def run_simulated(size: int, out: Path, seconds: float, prefix: str, alone: bool) -> None:
    """Measure on `size` ranks. Times say nothing of GPUs: what is tried is the program."""
    keys = PAGE_SIZE * size
    decodes = [case._replace(batch=min(case.batch, 2), keys=keys) for case in DECODES]
    prompts = [case._replace(tokens=16 * size) for case in PROMPTS]
    exchanges = [(min(rows, 2), heads, dim) for rows, heads, dim in EXCHANGES]
    deadline = time.time() + seconds

    def work(group: Group) -> None:
        rank = Rank(group, CPU, out, deadline, alone)
        measure(rank, prefix, decodes, prompts, exchanges)

    simulate(size, work)
