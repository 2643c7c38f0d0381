"""`python -m benchmarks distributed --out DIR`: starts a fresh process for each GPU."""

from __future__ import annotations

import argparse
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .. import scale
from ..machine import header
from ..results import FILE_NAME

_POLL_SECONDS = 0.2


def main(argv: Sequence[str]) -> int:
    """Measure, write results.json, and print what `benchmarks.scale` makes of it."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks distributed", description="Time attention over several GPUs."
    )
    parser.add_argument("--out", type=Path, required=True, help="folder of results.json")
    parser.add_argument("--ranks", type=int, default=2, help="GPUs of this host (default 2)")
    parser.add_argument("--seconds", type=float, default=240.0, help="budget")
    parser.add_argument("--case", default="", help="cases whose names start so")
    parser.add_argument("--commit", default=os.environ.get("CUPYATTN_BENCH_COMMIT"))
    args = parser.parse_args(argv)
    if args.ranks < 1:
        parser.error(f"--ranks: got {args.ranks}, wanted 1 or more")
    args.out.mkdir(parents=True, exist_ok=True)
    facts: dict[str, Any] = {"ranks": args.ranks, **header(args.commit)}
    with tempfile.TemporaryDirectory() as folder:
        rows = Path(folder) / "rows.json"
        status = run(args, rows)
        facts["rows"] = json.loads(rows.read_text("utf-8")) if rows.exists() else []
    (args.out / FILE_NAME).write_text(json.dumps(facts, indent=1), "utf-8")
    if {"exchange", "gather"} <= {row["kind"] for row in facts["rows"]}:
        print(scale.table(scale.points(scale.Figures.of(facts["rows"]))))
    return status


def run(args: argparse.Namespace, rows: Path) -> int:
    """The ranks, until all have ended. One that fails ends the others."""
    root = Path(__file__).resolve().parents[2]
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "benchmarks.distributed.rank", "--out", str(rows)]
    command += ["--seconds", str(args.seconds), "--case", args.case]
    ranks = []
    for rank in range(args.ranks):
        env = os.environ | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
        env |= {"WORLD_SIZE": str(args.ranks), "LOCAL_WORLD_SIZE": str(args.ranks)}
        env |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        ranks.append(subprocess.Popen(command, cwd=root, env=env))
    end = time.time() + args.seconds + 60
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
