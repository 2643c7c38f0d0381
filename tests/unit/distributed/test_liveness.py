"""The thread that notices ends of processes, and notes that ranks leave."""

from __future__ import annotations

import os
import secrets
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from cupyattn.distributed import liveness


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"]) as process:
        yield process
        process.kill()


@pytest.mark.parametrize("has_descriptors", [True, False])
def test_an_end_is_noticed_within_a_second(
    has_descriptors: bool, sleeper: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    if not has_descriptors:
        monkeypatch.setattr(liveness, "_descriptor", lambda process: None)
    told: list[str] = []
    since = liveness.started(sleeper.pid)
    assert since
    watch = liveness.Watch({3: (sleeper.pid, since)}, lambda: None, told.append)
    time.sleep(0.3)
    assert told == []
    sleeper.kill()  # not waited for: what a parent has not asked about is ended all the same
    end = time.monotonic() + 1
    while not told and time.monotonic() < end:
        time.sleep(0.01)
    assert told == [f"rank 3 (process {sleeper.pid}) ended"]
    watch.stop()


def test_a_number_that_another_process_has_now_is_an_end(
    sleeper: subprocess.Popen[bytes],
) -> None:
    told: list[str] = []
    watch = liveness.Watch({1: (sleeper.pid, "12345")}, lambda: None, told.append)
    time.sleep(0.4)
    watch.stop()
    assert told == [f"rank 1 (process {sleeper.pid}) ended"]


def test_what_the_library_says_is_told_once_and_nothing_after_the_stop() -> None:
    said: list[str | None] = [None]
    told: list[str] = []
    watch = liveness.Watch({}, lambda: said[0], told.append)
    said[0] = "NCCL: unhandled system error"
    time.sleep(0.4)
    assert told == ["NCCL: unhandled system error"]
    watch.stop()
    said[0] = None
    late = liveness.Watch({}, lambda: said[0], told.append)
    late.stop()
    said[0] = "late"
    time.sleep(0.3)
    assert len(told) == 1


def test_watches_leave_no_descriptors_and_no_threads(sleeper: subprocess.Popen[bytes]) -> None:
    since = liveness.started(sleeper.pid)
    descriptors = Path("/proc/self/fd")
    before = len([*descriptors.iterdir()]), threading.active_count()
    for _ in range(5):
        liveness.Watch({1: (sleeper.pid, since)}, lambda: None, print).stop()
    assert (len([*descriptors.iterdir()]), threading.active_count()) == before


def test_a_program_s_end_waits_some_moments_for_what_a_library_does() -> None:
    """Python ends daemon threads where they are, which C++ does not survive."""
    source = """
import time
from cupyattn.distributed import liveness
from cupyattn.distributed.ranks import in_time
def work():
    time.sleep(0.5)
    print("done", flush=True)
watch = liveness.Watch({}, lambda: None, print)
try:
    in_time("aborting", work, 0.1)
except Exception as error:
    print(error)
raise SystemExit
"""
    child = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True)
    assert child.stdout.splitlines()[-1] == "done" and not child.stderr, child


def test_the_first_note_counts_and_its_rank_removes_it() -> None:
    token = secrets.token_hex(8)
    first, second = liveness.Note(token), liveness.Note(token)
    assert first.read() is None
    first.leave("rank 1 ended with KeyError")
    second.leave("rank 0 ended with DeviceError")
    assert second.read() == first.read() == "rank 1 ended with KeyError"
    second.remove()
    assert second.read() is not None
    first.remove()
    assert second.read() is None


def test_facts_of_a_process() -> None:
    facts = liveness.own_facts()
    assert facts["process"] == os.getpid() and facts["started"] == liveness.started(os.getpid())
    assert facts["host"] and liveness.started(2**22 + 1) == ""
