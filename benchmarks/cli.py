"""The command line: `python -m benchmarks --op … --case … --peers … --out DIR`.

The work runs in a child process. A CUDA fault, a crash or a hang of one implementation ends that
child only: what it was doing is recorded as lost, and a fresh child goes on with the rest.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from . import report
from .batch.case import BatchCase
from .cases import OPS, AnyCase, select
from .peers import IMPLEMENTATIONS
from .results import FILE_NAME, Results
from .timing import PREHEAT_SECONDS, round_order
from .worker import PROGRESS_NAME

_MAX_RESTARTS = 8
_GRACE_SECONDS = 45.0  # past the budget, for the case in hand
_POLL_SECONDS = 0.25


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmarks. Returns the exit status: 0 unless no case could be worked on."""
    given = list(sys.argv[1:] if argv is None else argv)
    if given[:1] == ["sweep"]:
        from .sweep import cli as sweep

        return sweep.main(given)
    if given[:1] == ["tiles"]:
        from .tiles import cli as tiles

        return tiles.tiles(given[1:])
    if given[:1] == ["fit"]:
        from .tiles import cli as tiles

        return tiles.fitting(given[1:])
    if given[:1] == ["plans"]:
        from . import plan_times

        return plan_times.main(given[1:])
    if given[:1] == ["distributed"]:
        from .distributed import cli as ranks

        return ranks.main(given[1:])
    args = parse(given)
    if args.list:
        for case in args.cases:
            work = f"{case.flops / 1e9:12.1f} GFLOP {case.bytes / 1e6:10.1f} MB"
            print(f"{case.op:14}{case.name:28}{work}")
        return 0
    args.out.mkdir(parents=True, exist_ok=True)
    if args.worker:
        from . import worker

        return worker.run(args)
    for name in (FILE_NAME, PROGRESS_NAME):
        (args.out / name).unlink(missing_ok=True)
    status = supervise(args, given)
    report.write(args.out / FILE_NAME, args.out)
    return status


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """The options, with lists split and checked; argparse ends the process on bad ones."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks", description="Check and time cupyattn beside its peers."
    )
    parser.add_argument("--op", type=names_of("op", OPS), default=list(OPS), help=",".join(OPS))
    parser.add_argument("--case", type=_split, default=["*"], help="globs of case names, by comma")
    parser.add_argument(
        "--peers", type=names_of("implementation", IMPLEMENTATIONS), default=list(IMPLEMENTATIONS),
        help=",".join(IMPLEMENTATIONS),
    )  # fmt: skip
    parser.add_argument("--out", type=Path, help="folder of results.json, table.txt, chart.png")
    parser.add_argument(
        "--seconds", type=float, default=300.0, help="budget; later cases are skipped"
    )
    parser.add_argument(
        "--rounds", type=int, default=5, help="interleaved rounds a case (default 5)"
    )
    parser.add_argument("--commit", default=os.environ.get("CUPYATTN_BENCH_COMMIT"))
    parser.add_argument("--list", action="store_true", help="print the chosen cases and stop")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--deadline", type=float, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    args.cases = select(args.op, args.case)
    args.build, args.preheat, args.order = True, PREHEAT_SECONDS, lambda _: round_order
    if not args.cases:
        parser.error(f"--case: no case of {','.join(args.op)} matches; see --list")
    if args.rounds < 1:
        parser.error(f"--rounds: got {args.rounds}, wanted 1 or more")
    if args.out is None and not args.list:
        parser.error("--out: name a folder for the results")
    if args.deadline is None:
        args.deadline = time.time() + args.seconds
    return args


def _split(text: str) -> list[str]:
    return [part for part in (piece.strip() for piece in text.split(",")) if part]


def names_of(kind: str, known: Sequence[str]) -> Any:
    """A type of argparse: names by comma, each of them a known one."""

    def convert(text: str) -> list[str]:
        chosen = _split(text)
        unknown = [name for name in chosen if name not in known]
        if unknown or not chosen:
            wanted = ", ".join(known)
            raise argparse.ArgumentTypeError(f"unknown {kind} {unknown or text!r}; known: {wanted}")
        return chosen

    return convert


def supervise(args: argparse.Namespace, given: Sequence[str]) -> int:
    """Run workers until one finishes; each that dies leaves its culprit in the `lost` list."""
    command = [sys.executable, "-m", "benchmarks", *given, "--worker"]
    command += ["--deadline", repr(args.deadline), "--out", str(args.out.resolve())]
    root = Path(__file__).resolve().parent.parent
    for _ in range(_MAX_RESTARTS + 1):
        ended = _watch(command, root, args.out / PROGRESS_NAME, args.deadline + _GRACE_SECONDS)
        if ended is None:
            return 0
        culprit = _record_loss(args.out, ended, args.cases)
        print(f"worker ended ({ended}) at {culprit}", flush=True)
        if culprit is None or time.time() > args.deadline:
            return 1
    return 1


def _watch(command: list[str], root: Path, progress: Path, last: float) -> str | None:
    """Wait for a worker: None if it finished, else how it ended."""
    with subprocess.Popen(command, cwd=root) as child:
        try:
            while child.poll() is None:
                now = time.time()
                if now > last:
                    child.kill()
                    return "over the budget of seconds"
                if now > float(_read(progress).get("until", last)):
                    child.kill()
                    return "no progress within the limit of its stage"
                time.sleep(_POLL_SECONDS)
        except BaseException:
            child.kill()
            raise
        return None if child.returncode == 0 else f"exit status {child.returncode}"


def _record_loss(out: Path, ended: str, cases: Sequence[AnyCase]) -> str | None:
    """Put what the dead worker was doing on the `lost` list; None if it never got to a case."""
    progress = _read(out / PROGRESS_NAME)
    (out / PROGRESS_NAME).unlink(missing_ok=True)
    if not progress.get("case"):
        return None
    results = Results(out / FILE_NAME)
    # A library that cannot even be set up would fail in every case alike; but to build a batch's
    # candidate is to plan it, and that is of the case.
    batch = any(case.name == progress["case"] and isinstance(case, BatchCase) for case in cases)
    everywhere = progress["stage"] == "build" and not batch
    results.data["lost"].append(
        {
            "case": "*" if everywhere else progress["case"],
            "label": progress["label"],
            "stage": progress["stage"],
            "reason": ended,
        }
    )
    results.save()
    return f"{progress['case']} {progress['label']} ({progress['stage']})"


def _read(path: Path) -> dict[str, Any]:
    try:
        entry: dict[str, Any] = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return entry
