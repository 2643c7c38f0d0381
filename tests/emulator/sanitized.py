"""Cases in builds for the compiler's own sanitizers, each run in a process of its own.

    python -m emulator.sanitized ubsan "causal, prefill" "mistakes/shift_too_far"

AddressSanitizer must be in a process from its start: `command` gives the environment for it. Arrays
of a call lie between guards; for as long as a kernel runs the guards are poison to it. Such a
process starts slowly, and a mistake ends it: with `--each` every case has a fork.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

TESTS = Path(__file__).resolve().parents[1]


class Done(NamedTuple):
    """How a case ended that had a fork of its own, and what was written meanwhile."""

    status: int
    text: str


def run_each(mode: str, *names: str) -> list[Done]:
    """As `run`, where one case may end its process and the next still runs."""
    done = run(mode, "--each", *names)
    assert done.returncode == 0, done.stdout + done.stderr
    return [Done(*x) for x in json.loads(done.stdout)]


def run(mode: str, *names: str) -> subprocess.CompletedProcess[str]:
    """Run cases of gpu_cases.ALONE, a cascade, or mistakes/<name>, under a sanitizer."""
    environment = {**os.environ, "PYTHONPATH": f"{TESTS}{os.pathsep}{TESTS.parent}"}
    environment["OMP_NUM_THREADS"] = "1"
    if mode == "asan":
        find = subprocess.run(
            ["g++", "-print-file-name=libasan.so"], capture_output=True, text=True
        )
        environment["LD_PRELOAD"] = find.stdout.strip()
        # Python keeps memory to its end, and fibers leave their stacks as they are.
        environment["ASAN_OPTIONS"] = "detect_leaks=0:detect_stack_use_after_return=0"
    environment["UBSAN_OPTIONS"] = "print_stacktrace=0"
    command = [sys.executable, "-m", "emulator.sanitized", mode, *names]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)


def main(mode: str, *names: str) -> None:
    os.environ.pop("LD_PRELOAD", None)  # of this process alone: compilers need no sanitizer
    sys.modules["torch"] = None  # type: ignore[assignment]  # ten seconds under AddressSanitizer
    if names[:1] == ("--each",):
        print(json.dumps([_forked(mode, name) for name in names[1:]]))
        return
    for name in names:
        _run_case(mode, name)
        print(name, "passed", flush=True)


def _forked(mode: str, name: str) -> Done:
    from . import test_mistakes as _  # noqa: F401  # once for all forks

    with tempfile.TemporaryFile() as file:
        child = os.fork()
        if child == 0:
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
            status = 1
            try:
                _run_case(mode, name)
                status = 0
            finally:
                os._exit(status)
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        file.seek(0)
        return Done(status, file.read().decode(errors="replace"))


def _run_case(mode: str, name: str) -> None:
    if name.startswith("mistakes/"):
        from . import test_mistakes

        test_mistakes.run(name.removeprefix("mistakes/"), mode)
    elif name == "cascade":
        from . import test_cascade

        test_cascade.run_case(test_cascade.BASE, mode=mode)
    else:
        from helpers import gpu_cases

        from . import run as cases

        cases.single(cases.small(gpu_cases.ALONE[name]), mode=mode).check()


if __name__ == "__main__":
    main(*sys.argv[1:])
