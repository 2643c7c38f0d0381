"""`python -m benchmarks tiles` times candidates; `... fit` makes the data of a card of them."""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Sequence
from pathlib import Path

from cupyattn.bench.machine import git_commit

from . import rows
from .draw import draw_cases
from .measure import compile_ahead, rows_of


def tiles(given: Sequence[str]) -> int:
    """Time every candidate of drawn batches; one JSON line a row."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks tiles",
        description="Time every way to serve drawn batches, by force: one JSON line a row.",
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", type=int, default=2000, help="batches, if there is time")
    parser.add_argument("--seconds", type=float, default=300.0, help="budget after compiling")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--commit", default=os.environ.get("CUPYATTN_BENCH_COMMIT"))
    parser.add_argument("--out", type=Path, default=Path("tiles.jsonl"))
    args = parser.parse_args(given)
    cases, start = draw_cases(args.seed, args.count), time.time()
    count = compile_ahead(cases, args.jobs) if args.jobs else 0
    print(f"{count} kernels compiled in {time.time() - start:.0f} s", flush=True)
    commit = args.commit or str(git_commit(Path(__file__).parent))
    made = rows_of(cases, commit, time.time() + args.seconds, args.seed)
    num_rows = 0
    with args.out.open("w", encoding="utf-8") as file:
        for row in made:
            file.write(rows.line(row) + "\n")
            num_rows += 1
    print(f"{num_rows} rows in {args.out}")
    return 0
