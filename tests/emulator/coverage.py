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

from . import build
from .sanitized import TESTS

WANTED = 0.95


def run_cases() -> None:
    """The cases, in a process that gcov's counters are written by."""
    from helpers import gpu_cases

    from . import batches, run, test_attention, test_batch, test_mutations

    for case in gpu_cases.ALONE.values():
        run.single(run.small(case), mode="coverage").check()
    for name in ("e4m3 cache, prefill", "e4m3 cache, one row"):
        run.single(run.small(gpu_cases.ALONE[name]), mode="coverage", arch=800).check()
    for shape in ("split prefill", "split decode"):
        case = replace(test_attention.SMALL, **test_attention.SHAPES[shape], has_sinks=True)
        run.single(case, mode="coverage", num_sms=16).check()
    for name in test_batch.CLASSES:
        for page_size in (0, 16):
            for seed in (0, 1, 2):
                batch = batches.random_batch(seed, test_batch.base(name), page_size)
                batches.run(batch, mode="coverage").check()
    spoil = [(0, "v", (29, 0, 3), float("nan")), (0, "v", (29, 1, 62), float("nan"))]
    for dtype in ("bfloat16", "float8_e4m3fn"):
        case = replace(test_batch.SMALL, kv_dtype=dtype, causal=True, num_kv_heads=2, group=1)
        for qo_len in (5, 20):
            batch = batches.Batch(case, (qo_len,), (30,), 16)
            batches.run(batch, spoil, mode="coverage").check()
    for name in ("bad values", "packbits", "sparse mask"):
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
