"""Line coverage of kernels/ by gcov, over small cases of every option.

    python -m emulator.coverage            # from tests/, or: make coverage-kernels

A line of a template counts if any instance of it runs. Lines no instance has compiled (a discarded
`if constexpr`) are not lines to gcov: the cases below have each option on and off.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections import defaultdict
from dataclasses import replace
from pathlib import Path

import numpy as np

import cupyattn

from . import build
from .sanitized import TESTS

WANTED = 0.95


def run_cases() -> None:
    """The cases, in a process that gcov's counters are written by."""
    from helpers import (
        batch_cases,
        cascade_calls,
        device_plans,
        gpu_cases,
        merge_calls,
        page_cases,
        planless_calls,
        slot_cases,
    )
    from helpers.calls import run_and_check
    from helpers.page_cases import Append

    from . import (
        gpu,
        run,
        test_attention,
        test_batch,
        test_cascade,
        test_mutations,
        test_plan_batch,
        test_planless,
    )

    facts = {"mode": "coverage"}
    for case in (*gpu_cases.ALONE.values(), replace(gpu_cases.ALONE["alibi, prefill"], group=3)):
        run.single(run.small(case), **facts).check()
    for name in ("e4m3 cache, prefill", "e4m3 cache, one row"):
        run.single(run.small(gpu_cases.ALONE[name]), arch=800, **facts).check()
    for shape in ("split prefill", "split decode"):
        case = replace(test_attention.SMALL, **test_attention.SHAPES[shape], has_sinks=True)
        run.single(case, num_sms=16, **facts).check()
    for seed in range(60):
        run.batch(batch_cases.random_case(seed), **facts).check()
    for seed in range(12):
        test_cascade.run_case(cascade_calls.random_case(seed), **facts)
    spoil = [(0, "v", (29, 0, 3), float("nan")), (0, "v", (29, 1, 62), float("nan"))]
    for dtype in ("bfloat16", "float8_e4m3fn"):
        problem = replace(test_batch.BASE.problem, kv_dtype=dtype)
        for qo_len in (5, 20):
            case = replace(test_batch.BASE, problem=problem, qo_len=(qo_len,), kv_len=(30,))
            run.batch(case, spoil, **facts).check()
    for seed in range(40):
        with gpu.plugged_in(arch=(900, 800)[seed % 2], **facts):
            Append(page_cases.random_case(seed), np).run_and_check()
    for seed in range(40):
        with gpu.plugged_in(**facts):
            run_and_check(merge_calls.Call(merge_calls.random_case(seed), np))
    with gpu.plugged_in(**facts):
        table = np.array([0, 2, 2, 3], np.int32)
        lengths = cupyattn.get_seq_lens(table, np.array([1, 0, 3], np.int32), 4)
        cupyattn.get_batch_indices_positions(np.array([0, 2, 2, 5], np.int32), lengths, 7)
    for seed in range(20):
        with gpu.plugged_in(**facts):
            slot_cases.Case(seed).run()
    for seed in range(40):
        test_planless.run(planless_calls.random_case(seed), **facts)
    for seed in range(20):
        with gpu.plugged_in(**facts) as emulated:
            test_plan_batch.check(emulated, device_plans.random_batch(seed))
    names = (
        *("bad values", "packbits", "sparse mask", "verify", "verify many", "items"),
        *(
            "device plans",
            "many requests",
            "tables",
            "bad tables",
            "list without room",
            "slots",
            "wide values",
            "serving",
        ),
    )
    for name in names:
        test_mutations.CATCHERS[name](mode="coverage")


def measure() -> dict[str, dict[int, int]]:
    """File below kernels/ -> line -> how often it ran."""
    with tempfile.TemporaryDirectory() as counters:
        environment = {**os.environ, "GCOV_PREFIX": counters, "GCOV_PREFIX_STRIP": "99"}
        environment["PYTHONPATH"] = f"{TESTS}{os.pathsep}{TESTS.parent}"
        code = "from emulator import coverage; coverage.run_cases()"
        subprocess.run([sys.executable, "-c", code], env=environment, check=True)
        found: dict[str, dict[int, int]] = defaultdict(dict)
        for data in sorted(Path(counters).glob("*.gcda")):
            _read(data, found)
    return dict(found)


def _read(data: Path, found: dict[str, dict[int, int]]) -> None:
    (notes,) = build.folder().glob(f"*/{data.stem}.gcno")
    shutil.copy(notes, data.parent)
    command = ["gcov", "--json-format", "--stdout", data.name]
    done = subprocess.run(command, cwd=data.parent, capture_output=True, text=True, check=True)
    for report in map(json.loads, done.stdout.splitlines()):
        for file in report["files"]:
            _, is_kernel, name = file["file"].rpartition("/kernels/")
            if not is_kernel:
                continue
            counts = found[name]
            for line in file["lines"]:
                number = line["line_number"]
                counts[number] = counts.get(number, 0) + line["count"]


def summarise(found: dict[str, dict[int, int]]) -> tuple[float, str]:
    """The share of lines that ran, and a table with the lines that did not."""
    rows, ran, total = [], 0, 0
    for name, counts in sorted(found.items()):
        missed = sorted(number for number, count in counts.items() if count == 0)
        ran += len(counts) - len(missed)
        total += len(counts)
        share = 100 * (1 - len(missed) / len(counts))
        rows.append(f"{share:6.1f} %  {name}  {', '.join(map(str, missed))}".rstrip())
    share = ran / max(1, total)
    return share, "\n".join([*rows, f"{100 * share:6.1f} %  of {total} lines"])


def main() -> None:
    share, table = summarise(measure())
    print(table)
    sys.exit(share < WANTED)


if __name__ == "__main__":
    main()
