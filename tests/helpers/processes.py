"""Ranks that are fresh processes: what a test of a group of them starts, waits for and kills."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]


class Ended(NamedTuple):
    """How a rank ended: its exit code (negative: by a signal), what it printed, after how long."""

    code: int
    text: str
    seconds: float


class Ranks:
    """`size` processes that run `source`, which finds `rank`, `size` and `folder` as variables.

    `folder` is empty and common to all. `environment` adds to this process's.
    """

    def __init__(
        self, size: int, source: str, folder: Path, environment: dict[str, str] | None = None
    ) -> None:
        self.size = size
        self._logs = [folder / f"log.{rank}" for rank in range(size)]
        common = folder / "common"
        common.mkdir()
        self._processes = []
        for rank in range(size):
            head = f"rank, size, folder = {rank}, {size}, {str(common)!r}\n"
            path = folder / f"rank{rank}.py"
            path.write_text(head + source)
            paths = os.pathsep.join([str(ROOT), str(ROOT / "tests")])
            self._processes.append(
                subprocess.Popen(
                    [sys.executable, "-u", str(path)],
                    env={**os.environ, "PYTHONPATH": paths, **(environment or {})},
                    stdout=self._logs[rank].open("w"),
                    stderr=subprocess.STDOUT,
                )
            )

    def text(self, rank: int) -> str:
        return self._logs[rank].read_text()

    def wait_for(self, rank: int, words: str, seconds: float) -> None:
        """Until a rank has printed something."""
        end = time.monotonic() + seconds
        while words not in self.text(rank):
            assert time.monotonic() < end, f"rank {rank} has not printed {words}: {self.all_text()}"
            assert self._processes[rank].poll() is None, self.all_text()
            time.sleep(0.01)

    def kill(self, rank: int) -> None:
        self._processes[rank].send_signal(signal.SIGKILL)
        self._processes[rank].wait()

    def ended(self, seconds: float) -> list[Ended]:
        """How all ended; those that have not after so long are killed, and the test fails."""
        start = time.monotonic()
        found: dict[int, Ended] = {}
        while len(found) < self.size and time.monotonic() < start + seconds:
            for rank, process in enumerate(self._processes):
                if rank not in found and (code := process.poll()) is not None:
                    found[rank] = Ended(code, self.text(rank), time.monotonic() - start)
            time.sleep(0.01)
        late = [rank for rank in range(self.size) if rank not in found]
        for rank in late:
            self.kill(rank)
        assert not late, f"ranks {late} did not end within {seconds} s: {self.all_text()}"
        return [found[rank] for rank in range(self.size)]

    def all_text(self) -> str:
        return "\n".join(f"rank {rank}: {self.text(rank)}" for rank in range(self.size))


def run_ranks(
    size: int,
    source: str,
    folder: Path,
    seconds: float,
    environment: dict[str, str] | None = None,
) -> list[str]:
    """What each rank has printed; all must end well."""
    ranks = Ranks(size, source, folder, environment)
    ended = ranks.ended(seconds)
    assert all(rank.code == 0 for rank in ended), ranks.all_text()
    return [rank.text for rank in ended]
