"""`python -m benchmarks sweep`: draw, check, time, report."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from ..cli import names_of, supervise
from ..peers import IMPLEMENTATIONS
from ..results import FILE_NAME
from ..timing import random_order
from ..worker import PROGRESS_NAME
from .draw import draw_cases
from .groups import BY_NAME, GROUPS, MAX_CODE_BYTES, PROMPT_OF_1K
from .plans import code_bytes, compile_ahead
from .profiles import FILE_NAME as PROFILES_NAME
from .summary import summarise_sweep, table

SUMMARY_NAME = "sweep.json"
TABLE_NAME = "sweep.txt"
_PEERS = (
    *("ours", "fa3", "flashinfer_fa2", "flashinfer_fa3", "flashinfer_xqa", "sdpa_cudnn"),
    "fa4",
    "flashmla",
    "ours_16bit",
    "fa3_fp8",
    "cudnn_fp8",
    "triton",
    "gather",
    "deepgemm",
)
_PROFILE_SECONDS = 90.0
_PREHEAT_SECONDS = 0.05  # a case; the one before has just kept the GPU busy


def main(given: Sequence[str]) -> int:
    """Run a sweep; `given` begins with "sweep". Returns the exit status."""
    args = parse(given[1:])
    if args.list:
        for case in args.cases:
            print(f"{case.name:64}{case.flops / 1e9:12.1f} GFLOP{case.bytes / 1e6:10.1f} MB")
        return 0
    args.out.mkdir(parents=True, exist_ok=True)
    if args.worker:
        from .. import worker

        return worker.run(args)
    for name in (FILE_NAME, PROGRESS_NAME, PROFILES_NAME):
        (args.out / name).unlink(missing_ok=True)
    if args.jobs:
        seconds = compile_ahead(args.cases, args.jobs)
        print(f"kernels compiled in {seconds:.1f} s", flush=True)
    status = supervise(args, given)
    if not (args.out / FILE_NAME).exists():
        return status or 1
    if args.groups:
        args.code_bytes = _code_bytes()
    summary = write(args)
    if args.profiles and summary["worst"]:
        _profile(args)
        summary = write(args)
    print(table(summary), end="")
    return status


def _code_bytes() -> int:
    from cupyattn.core.device import device_props

    return code_bytes(PROMPT_OF_1K, device_props(0).arch)


def _profile(args: argparse.Namespace) -> None:
    """Profile the worst shapes in a process of their own: what it does not get to is left out."""
    command = [sys.executable, "-m", "benchmarks.sweep.profiles", str(args.out.resolve())]
    root = Path(__file__).resolve().parents[2]
    try:
        subprocess.run(
            [*command, "--most", str(args.profiles)],
            cwd=root,
            timeout=_PROFILE_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired:
        print(f"profiles: ended after {_PROFILE_SECONDS:g} s", flush=True)


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """The options and the drawn cases; argparse ends the process on bad ones."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks sweep",
        description="Draw shapes of real models; check and time cupyattn beside its peers.",
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", type=int, default=200, help="shapes (default 200)")
    parser.add_argument("--skip", type=int, default=0, help="leave the first shapes out")
    parser.add_argument(
        "--groups", type=names_of("group", [*GROUPS, "all"]), default=[],
        help=f"draw from these alone, in turn: {','.join(GROUPS)}; or all",
    )  # fmt: skip
    parser.add_argument(
        "--seconds", type=float, default=400.0, help="budget; later shapes are skipped"
    )
    parser.add_argument(
        "--peers", type=names_of("implementation", IMPLEMENTATIONS), default=list(_PEERS),
        help=",".join(IMPLEMENTATIONS),
    )  # fmt: skip
    parser.add_argument(
        "--no-build", action="store_true",
        help="leave out FlashInfer's modules that are not built yet",
    )  # fmt: skip
    parser.add_argument(
        "--jobs", type=int, default=os.cpu_count() or 1,
        help="processes that compile our kernels ahead; 0: each at its first use",
    )  # fmt: skip
    parser.add_argument(
        "--profiles", type=int, default=10, help="of the worst shapes (default 10; 0: none)"
    )
    parser.add_argument("--rounds", type=int, default=5, help="rounds a shape (default 5)")
    parser.add_argument("--out", type=Path, help=f"folder of {SUMMARY_NAME} and {TABLE_NAME}")
    parser.add_argument("--commit", default=os.environ.get("CUPYATTN_BENCH_COMMIT"))
    parser.add_argument("--list", action="store_true", help="print the drawn shapes and stop")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--deadline", type=float, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.count < 1 or args.rounds < 1 or args.skip < 0:
        parser.error("--count and --rounds: wanted 1 or more; --skip: wanted 0 or more")
    if "ours" not in args.peers:
        args.peers.insert(0, "ours")
    if "all" in args.groups:
        args.groups = [name for name in GROUPS if name not in BY_NAME]
    if args.out is None:
        args.out = Path(f"sweep-{args.seed}")
    if args.deadline is None:
        args.deadline = time.time() + args.seconds
    args.cases = draw_cases(args.seed, args.skip + args.count, args.groups)[args.skip :]
    args.build, args.preheat = not args.no_build, _PREHEAT_SECONDS
    args.code_bytes = None
    args.order = partial(_order, args.seed)
    return args


def _order(seed: int, case: str) -> Any:
    return random_order(f"{seed} {case}")


def write(args: argparse.Namespace) -> dict[str, Any]:
    """Summarise what a run has left in `args.out` and write it there, as JSON and as a table."""
    results = json.loads((args.out / FILE_NAME).read_text())
    summary = {
        "seed": args.seed,
        "header": results.get("header"),
        **summarise_sweep(args.cases, results),
    }
    if args.code_bytes is not None:
        met = args.code_bytes <= MAX_CODE_BYTES
        summary["code"] = {"bytes": args.code_bytes, "wanted": MAX_CODE_BYTES, "met": met}
    if (args.out / PROFILES_NAME).exists():
        summary["profiles"] = json.loads((args.out / PROFILES_NAME).read_text())
    (args.out / SUMMARY_NAME).write_text(json.dumps(summary, indent=1))
    (args.out / TABLE_NAME).write_text(table(summary))
    return summary
