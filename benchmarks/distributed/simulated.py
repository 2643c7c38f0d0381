"""The same program on ranks that are threads of this process, over small cases on the CPU."""

from __future__ import annotations

import time
from pathlib import Path

from cupyattn.distributed import Group, simulate

from .cases import DECODES, EXCHANGES, PAGE_SIZE, PARTS, PROMPTS
from .machine import CPU
from .measure import measure
from .rank import Rank


def run_simulated(size: int, out: Path, seconds: float, prefix: str, alone: bool) -> None:
    """Measure on `size` ranks. Times say nothing of GPUs: what is tried is the program."""
    heads = 2 * size
    decodes = [
        case._replace(
            batch=min(case.batch, 2),
            keys=PAGE_SIZE * size,
            num_qo_heads=heads,
            num_kv_heads=min(case.num_kv_heads, size),
        )
        for case in DECODES
    ]
    prompts = [
        case._replace(tokens=8 * size, num_qo_heads=heads, num_kv_heads=size) for case in PROMPTS
    ]
    exchanges = [(min(rows, 2), heads, dim) for rows, _, dim in EXCHANGES]
    parts = [n for n in PARTS if n <= size] if alone else []
    deadline = time.time() + seconds

    def work(group: Group) -> None:
        measure(Rank(group, CPU, out, deadline, parts), prefix, decodes, prompts, exchanges)

    simulate(size, work)
