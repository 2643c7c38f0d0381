"""`python -m benchmarks distributed --out DIR`: starts a fresh process for each GPU."""

from __future__ import annotations

import argparse
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .. import scale
from ..machine import header
from ..results import FILE_NAME

_POLL_SECONDS = 0.2
_ROOT = Path(__file__).resolve().parents[2]


def main(argv: Sequence[str]) -> int:
    """Measure, write results.json, and print what `benchmarks.scale` makes of it."""
    args = _arguments(argv)
    args.out.mkdir(parents=True, exist_ok=True)
    facts: dict[str, Any] = {"ranks": args.sizes, "simulated": args.simulated}
    facts |= {**header(args.commit), "rows": []}
    end, status = time.time() + args.seconds, 0
    # Every rank of a larger group has answered alone.
    sizes = [size for size in args.sizes if size > 1] or [1]
    for index, size in enumerate(sizes):
        # The first, which measures one GPU's kernels too, has twice as much to do as another.
        weight = 2 if index == 0 else 1
        seconds = (end - time.time()) * weight / (len(sizes) - index + weight - 1)
        rows = args.out / f"rows_{size}.json"
        rows.unlink(missing_ok=True)
        status |= run(args, size, rows, seconds, alone=index == 0)
        facts["rows"] += json.loads(rows.read_text("utf-8")) if rows.exists() else []
        (args.out / FILE_NAME).write_text(json.dumps(facts, indent=1), "utf-8")
        rows.unlink(missing_ok=True)
    if {"exchange", "gather"} <= {row["kind"] for row in facts["rows"]}:
        table = scale.table(scale.points(scale.Figures.of(facts["rows"])))
        (args.out / "table.txt").write_text(f"{table}\n", "utf-8")
        print(table)
    return status


def _arguments(argv: Sequence[str]) -> argparse.Namespace:
    """The arguments, and `sizes`: how many ranks each group has, the largest first."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks distributed", description="Time attention over several GPUs."
    )
    parser.add_argument("--out", type=Path, required=True, help="folder of results.json")
    parser.add_argument(
        "--ranks", default="2", help="GPUs of this host, or several numbers by comma (default 2)"
    )
    parser.add_argument("--seconds", type=float, default=400.0, help="budget of all groups")
    parser.add_argument("--case", default="", help="cases whose names start so")
    parser.add_argument("--commit", default=os.environ.get("CUPYATTN_BENCH_COMMIT"))
    parser.add_argument(
        "--simulated",
        action="store_true",
        help="threads and small cases on the CPU, to try it",
    )
    args = parser.parse_args(argv)
    sizes = [int(size) for size in args.ranks.split(",") if size.isdecimal()]
    if not sizes or min(sizes) < 1 or len(sizes) != args.ranks.count(",") + 1:
        parser.error(f"--ranks: got {args.ranks}, wanted numbers of 1 or more")
    args.sizes = sorted(set(sizes), reverse=True)
    if not args.simulated and args.sizes[0] > (count := num_gpus()):
        parser.error(
            f"--ranks: got {args.ranks}, and this machine has {count} GPUs; --simulated tries the "
            "program without"
        )
    return args


def num_gpus() -> int:
    """The GPUs that ranks can have here."""
    import torch

    return torch.cuda.device_count()


def run(args: argparse.Namespace, size: int, rows: Path, seconds: float, *, alone: bool) -> int:
    """Let `size` ranks measure for so many seconds; `alone`: one GPU's kernels too."""
    if not args.simulated:
        return _run_processes(args, size, rows, seconds, alone)
    from .simulated import run_simulated

    run_simulated(size, rows, seconds, args.case, alone)
    return 0


def _run_processes(
    args: argparse.Namespace, size: int, rows: Path, seconds: float, alone: bool
) -> int:
    """`size` ranks, until all have ended. One that fails ends the others."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "benchmarks.distributed.measure"]
    command += ["--out", str(rows.resolve()), "--seconds", str(seconds), "--case", args.case]
    command += ["--alone"] if alone else []
    ranks = []
    for rank in range(size):
        env = os.environ | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
        env |= {"WORLD_SIZE": str(size), "LOCAL_WORLD_SIZE": str(size)}
        env |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        ranks.append(subprocess.Popen(command, cwd=_ROOT, env=env))
    end = time.time() + seconds + 60
    try:
        while any(child.poll() is None for child in ranks):
            if time.time() > end or any(child.poll() for child in ranks):
                time.sleep(5)  # for what the others say of it
                return 1
            time.sleep(_POLL_SECONDS)
    finally:
        for child in ranks:
            child.kill()
    return max(abs(child.returncode) for child in ranks)
