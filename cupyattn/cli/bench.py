"""`cupyattn bench`: how fast this GPU is, beside what else is installed."""

from __future__ import annotations

import argparse
import fnmatch
import secrets
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..array import Device
from ..bench import machine, peers, report
from ..bench.cases import CASES, Case
from ..bench.clock import Clock
from ..bench.inputs import Arrays
from ..bench.run import OURS, Settings, rows
from ..bench.timing import ContextLost
from ..core.device import device_props
from ..errors import ArgumentError, CupyAttnError, DeviceError

_INDEX = 0
_REMEDY = "it measures a GPU: `cupyattn demo` runs without one, `cupyattn info` says what is here"


def add_parser(commands: Any) -> None:
    """Add the command to the parser's `commands`."""
    parser = commands.add_parser(
        "bench",
        help="a benchmark of a minute: decode, prefill, append and MLA on this GPU",
        description="Measure decode, prefill, append and latent attention on the first GPU, beside "
        "what is installed of torch's SDPA, FlashInfer and flash-attn. Every answer is checked "
        "first. FlashInfer may compile for minutes at its first run; leave it out by --peers.",
    )
    parser.add_argument(
        "--case", default="*", help="cases, with commas and wildcards; --case '' lists them"
    )
    parser.add_argument(
        "--peers", default=",".join(peers.NAMES), help="default: %(default)s; '' for none"
    )
    parser.add_argument(
        "--seconds", type=float, default=60.0, help="begin no case after them (default: 60)"
    )
    parser.add_argument("--seed", type=int, help="of the inputs (default: a new one)")
    parser.add_argument(
        "--out", type=Path, default=Path("cupyattn-bench"), help="folder (default: %(default)s)"
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Measure; 1 if an answer of ours is wrong or missing, 2 if nothing can be measured."""
    if not args.case:
        print("\n".join(f"{case.name:16} {case.about}" for case in CASES))
        return 0
    try:
        settings = _settings(args)
        props = device_props(_INDEX)
        clock = Clock()
    except CupyAttnError as error:
        remedy = f"; {_REMEDY}" if isinstance(error, DeviceError) else ""
        print(f"cupyattn bench: {error}{remedy}", file=sys.stderr)
        return 2
    data: dict[str, Any] = {**machine.header(_INDEX), "seed": settings.seed, "rows": []}
    data["copy_gbps"] = clock.copy_gbps()
    print(report.heading(data) + "\n")
    try:
        arrays = Arrays("cupy", Device("cuda", props.index), settings.seed)
        for found in rows(settings, arrays, clock):
            print(report.table(found, with_head=not data["rows"]), flush=True)
            data["rows"] += found
    except ContextLost as error:
        data["lost"] = str(error)
        print(f"cupyattn bench: the GPU stopped answering: {error}", file=sys.stderr)
    return _finish(data, settings, args.out)


def _settings(args: argparse.Namespace) -> Settings:
    names = [name.strip() for name in args.peers.split(",") if name.strip()]
    for name in names:
        if name not in peers.NAMES:
            raise ArgumentError(
                f"--peers: got {name!r}; wanted some of {', '.join(peers.NAMES)}, with commas"
            )
    seed = secrets.randbelow(2**31) if args.seed is None else args.seed
    return Settings(_cases(args.case), names, seed, time.time() + args.seconds)


def _cases(patterns: str) -> Sequence[Case]:
    found = [
        case
        for case in CASES
        if any(fnmatch.fnmatch(case.name, part.strip()) for part in patterns.split(","))
    ]
    if not found:
        raise ArgumentError(
            f"--case: nothing is called {patterns!r}; wanted some of "
            f"{', '.join(case.name for case in CASES)}"
        )
    return found


def _finish(data: dict[str, Any], settings: Settings, folder: Path) -> int:
    """Write what there is; the exit status."""
    measured = {row["case"] for row in data["rows"]}
    left = [case.name for case in settings.cases if case.name not in measured]
    if left:
        print(f"\nnot measured: {', '.join(left)}; give more --seconds")
    print("\n" + "\n".join(report.write(data, folder)))
    mine = [row["status"] == "timed" for row in data["rows"] if row["name"] == OURS]
    return 0 if mine and all(mine) and "lost" not in data else 1
