"""Processes that work through tasks: answers, failures, and that none is left behind."""

from __future__ import annotations

import operator
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from cupyattn.cli import pool

# Longer than a test waits.
_PATIENCE = 600.0  # after which something hangs


class Deadly:
    """Ends the process that unpickles it."""

    def __reduce__(self) -> tuple:
        return os._exit, (3,)


def test_every_task_is_answered_once() -> None:
    tasks = [(n, 2) for n in range(7)]
    done = [x for x in pool.work(operator.mul, tasks, 3, _PATIENCE) if x is not None]
    assert sorted(x.task for x in done) == tasks
    assert all(x.result == x.task[0] * 2 and not x.failure for x in done)


def test_a_task_that_raises_or_kills_its_process_fails_alone() -> None:
    tasks = [(1, 0), (Deadly(), 1), (6, 3)]
    done = [x for x in pool.work(operator.floordiv, tasks, 1, _PATIENCE) if x is not None]
    assert [x.result for x in done] == [None, None, 2]
    assert "ZeroDivisionError" in done[0].failure
    assert done[1].failure == "its process ended with status 3"


def test_it_says_when_nothing_happens() -> None:
    assert next(pool.work(time.sleep, [(600,)], 1, 0.1)) is None


def _is_alive(group: int) -> bool:
    """Whether a process of the group runs; one that nobody has waited for yet does not."""
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, _, found, *_ = path.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(found) == group and state not in "ZX":
            return True
    return False


def _until_nothing_is_alive(group: int) -> None:
    end = time.monotonic() + _PATIENCE
    while _is_alive(group):
        assert time.monotonic() < end
        time.sleep(0.05)


@pytest.mark.parametrize(
    ("sent", "to_all", "status"),
    [
        (signal.SIGINT, True, 130),
        (signal.SIGTERM, False, 143),
        (signal.SIGTERM, True, 143),
        (signal.SIGKILL, False, -9),
    ],
)
def test_a_signal_ends_it_and_its_processes(sent: int, to_all: bool, status: int) -> None:
    code = """
import sys, time
from cupyattn.cli import pool
try:
    for done in pool.work(time.sleep, [(0,), (600,), (600,), (600,)], 2, 600):
        print("one", flush=True)
except pool.Stopped as stopped:
    sys.exit(128 + stopped.signum)
"""
    started = subprocess.Popen(
        [sys.executable, "-c", code],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
        # A shell starts jobs in the background with Ctrl-C ignored.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL) and None,
    )
    assert started.stdout is not None and started.stdout.readline() == "one\n"
    (os.killpg if to_all else os.kill)(started.pid, sent)
    # The pipe ends when the last process that has it does.
    rest, _ = started.communicate(timeout=_PATIENCE)
    assert (started.returncode, rest) == (status, "")
    _until_nothing_is_alive(started.pid)


def test_what_is_ignored_stays_ignored() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        working = pool.work(time.sleep, [(600,)], 1, 0.1)
        next(working)
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
        working.close()
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)
