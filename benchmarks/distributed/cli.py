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
    parser.add_argument(
        "--ranks", default="2", help="GPUs of this host, or several numbers by comma (default 2)"
    )
    parser.add_argument("--seconds", type=float, default=240.0, help="budget of each group")
    parser.add_argument("--case", default="", help="cases whose names start so")
    parser.add_argument("--commit", default=os.environ.get("CUPYATTN_BENCH_COMMIT"))
    args = parser.parse_args(argv)
    sizes = [int(size) for size in args.ranks.split(",") if size.isdecimal()]
    if not sizes or min(sizes) < 1 or len(sizes) != args.ranks.count(",") + 1:
        parser.error(f"--ranks: got {args.ranks}, wanted numbers of 1 or more")
    args.out.mkdir(parents=True, exist_ok=True)
    facts: dict[str, Any] = {"ranks": sizes, **header(args.commit), "rows": []}
    status = 0
    for size in sizes:
        with tempfile.TemporaryDirectory() as folder:
            rows = Path(folder) / "rows.json"
            status |= run(args, size, rows, size == sizes[0])
            facts["rows"] += json.loads(rows.read_text("utf-8")) if rows.exists() else []
    (args.out / FILE_NAME).write_text(json.dumps(facts, indent=1), "utf-8")
    if {"exchange", "gather"} <= {row["kind"] for row in facts["rows"]}:
        table = scale.table(scale.points(scale.Figures.of(facts["rows"])))
        (args.out / "table.txt").write_text(f"{table}\n", "utf-8")
        print(table)
    return status


def run(args: argparse.Namespace, size: int, rows: Path, is_first: bool) -> int:
    """`size` ranks, until all have ended. One that fails ends the others."""
    root = Path(__file__).resolve().parents[2]
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "benchmarks.distributed.rank", "--out", str(rows)]
    command += ["--seconds", str(args.seconds), "--case", args.case]
    command += ["--alone"] if is_first else []
    ranks = []
    for rank in range(size):
        env = os.environ | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
        env |= {"WORLD_SIZE": str(size), "LOCAL_WORLD_SIZE": str(size)}
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
