"""Cases in builds for the compiler's own sanitizers, each run in a process of its own.

    python -m emulator.sanitized ubsan "causal, prefill" "mistakes/shift_too_far"

AddressSanitizer must be in a process from its start: `command` gives the environment for it. Arrays
of a call lie between guards; for as long as a kernel runs the guards are poison to it.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

TESTS = Path(__file__).resolve().parents[1]


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
    from helpers import gpu_cases

    from . import run as cases
    from . import test_cascade, test_mistakes

    for name in names:
        if name.startswith("mistakes/"):
            test_mistakes.run(name.removeprefix("mistakes/"), mode)
        elif name == "cascade":
            test_cascade.run_case(test_cascade.BASE, mode=mode)
        else:
            cases.single(cases.small(gpu_cases.ALONE[name]), mode=mode).check()
        print(name, "passed", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
