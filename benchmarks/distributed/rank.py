"""One rank among those that measure, and the rows that they have measured.

Every rank makes the same keys of a case by a seed, and uses its own pages of them, so that it can
also answer alone. Of the ranks' times the longest counts: a step ends when its last rank does.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from cupyattn.distributed import Group

from .machine import Machine, Step


class Rank:
    """This rank of the group. The first one writes the rows to a file, and prints them."""

    def __init__(
        self, group: Group, machine: Machine, out: Path, deadline: float, parts: Sequence[int]
    ) -> None:
        self.group, self.machine = group, machine
        self.out, self.deadline = out, deadline
        self.parts = parts  # numbers of ranks whose shares are measured on one GPU; none: neither
        self.rows: list[dict[str, Any]] = []

    def add(self, kind: str, case: str, us: float, **facts: Any) -> None:
        """Keep a row, and write all."""
        self.rows.append({"kind": kind, "case": case, "us": round(us, 2), **facts})
        if self.group.rank == 0:
            print(json.dumps(self.rows[-1]), flush=True)
            self.out.write_text(json.dumps(self.rows), "utf-8")

    def add_alone(self, kind: str, case: str, step: Step, layers: int) -> None:
        """A step that every GPU makes by itself: the median of GPUs, and as the share of one."""
        of_ranks = self.time_alone([step], layers)
        self.add(kind, case, float(np.median(of_ranks)), world=1, path="one", ranks=of_ranks)
        self.add("share", case, max(of_ranks), parts=1)

    def add_share(self, case: str, steps: Sequence[Step], layers: int, **facts: Any) -> None:
        """The kernels of a rank of a group, on every GPU by itself: those of the slowest."""
        self.add("share", case, max(self.time_alone(steps, layers)), **facts)

    def time_alone(self, steps: Sequence[Step], layers: int) -> list[float]:
        """µs of a step, on each rank's GPU by itself."""
        own = float(np.median(self.machine.times(steps, layers)))
        return [round(float(x), 2) for x in self.group.share_bytes(repr(own).encode())]

    def time_step(self, step: Step, layers: int, settled: float | None = None) -> float:
        """µs of a step that all ranks make: the median over visits of the longest time.

        Hosts come here at times that differ by more than a step takes, but ranks wait for each
        other in the replays that are not counted: for so many seconds, the machine's by default.
        """
        machine = self.machine if settled is None else self.machine._replace(settled=settled)
        times = machine.times([step], layers, self.greatest)
        shared = self.group.share_bytes(json.dumps(times).encode())
        return float(np.median(np.max([json.loads(x) for x in shared], axis=0)))

    def greatest(self, value: float) -> float:
        """The greatest of all ranks' values."""
        return max(float(x) for x in self.group.share_bytes(repr(value).encode()))

    def has_time(self, seconds: float) -> bool:
        """Whether all ranks have so many seconds left: rank 0 says."""
        left = self.deadline - time.time()
        return float(self.group.share_bytes(repr(left).encode())[0]) > seconds
