"""`cupyattn bench`: how fast this GPU is, beside what else is installed."""

from __future__ import annotations

import argparse
import fnmatch
import secrets
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from ..array import Device
from ..bench import machine, peers, report, trial
from ..bench.cases import CASES, Case
from ..bench.clock import Clock
from ..bench.event_clock import BETWEEN
from ..bench.inputs import Arrays
from ..bench.run import OURS, Settings, rows
from ..bench.timing import ContextLost
from ..core.device import device_props
from ..errors import ArgumentError, CupyAttnError, DeviceError

_INDEX = 0
_ALIASES = {"torch": "sdpa", "flash-attn": "flash_attn"}
_REMEDY = "`cupyattn demo` runs without a GPU, and `cupyattn info` says what is here"


def add_parser(commands: Any) -> None:
    """Add the command to the parser's `commands`."""
    parser = commands.add_parser(
        "bench",
        help="a benchmark of a minute: decode, prefill, append and MLA on this GPU",
        description="Measure decode, prefill, append and latent attention on the first GPU, first "
        "alone and then beside what is installed of torch's SDPA, flash-attn and FlashInfer. Every "
        "output is checked before it is timed.",
    )
    parser.add_argument(
        "--case", default="*", help="cases, with commas and wildcards; --case '' lists them"
    )
    parser.add_argument(
        "--peers", default=",".join(peers.NAMES), help="default: %(default)s; '' for none"
    )
    parser.add_argument(
        "--compile-seconds",
        type=float,
        default=15.0,
        help="how long FlashInfer may compile where it is not prebuilt (default: 15); what it has "
        "compiled stays, and the next run goes on from there",
    )
    parser.add_argument(
        "--seconds", type=float, default=45.0, help="begin no case after them (default: 45)"
    )
    parser.add_argument("--seed", type=int, help="of the inputs (default: a new one)")
    parser.add_argument(
        "--out", type=Path, default=Path("cupyattn-bench"), help="folder (default: %(default)s)"
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Measure; 1 if an output of ours is wrong or missing, 2 if nothing can be measured."""
    if not args.case:
        print("\n".join(f"{case.name:16} {case.about}" for case in CASES))
        return 0
    try:
        settings = _settings(args)
        props = device_props(_INDEX)
        clock = Clock()
    except CupyAttnError as error:
        remedy = f".\n{_REMEDY}" if isinstance(error, DeviceError) else ""
        print(f"cupyattn bench: {error}{remedy}", file=sys.stderr)
        return 2
    record = report.Record(
        args.out, {**machine.header(_INDEX), "seed": settings.seed, "between": BETWEEN}
    )
    record.data["copy_gbps"] = clock.copy_gbps()
    print(report.heading(record.data), flush=True)
    try:
        arrays = Arrays("cupy", Device("cuda", props.index), settings.seed)
        _measure(record, settings, arrays, clock, args.compile_seconds)
    except ContextLost as error:
        record.data["stopped"] = str(error)
        print(f"cupyattn bench: the GPU stopped answering: {error}", file=sys.stderr)
    except KeyboardInterrupt:
        record.data["stopped"] = "interrupted"
    return _finish(record, settings)


def _measure(
    record: report.Record, settings: Settings, arrays: Arrays, clock: Clock, seconds: float
) -> None:
    """Ours alone, so that its rows are there whatever a peer does, and then again beside peers."""
    for result in rows(replace(settings, peer_names=()), arrays, clock):
        record.add(result)
    absent = {name: peers.absence(name) for name in settings.peer_names}
    names = [name for name, reason in absent.items() if not reason]
    if any(absent.values()):
        print("\n" + "; ".join(dict.fromkeys(filter(None, absent.values()))), flush=True)
    if not names:
        return
    record.draw()
    start = settings.now()
    tried = {name: _try(name, settings, seconds) for name in peers.COMPILES if name in names}
    deadline = settings.deadline + settings.now() - start
    beside = replace(settings, peer_names=names, tried=tried, deadline=deadline)
    print("\nThe same again, beside peers:", flush=True)
    left = [case.name for case in settings.cases]
    for result in rows(beside, arrays, clock):
        record.add(result)
        left.remove(result[0]["case"])
    if left:
        print(f"\nwithout peers: {', '.join(left)}; give more --seconds")


def _try(name: str, settings: Settings, seconds: float) -> trial.Outcomes:
    """What a peer that compiles can compute."""
    title = peers.TITLES[name]
    print(f"\n{title} has {seconds:.0f} s to compile what is not prebuilt ...", flush=True)
    outcomes = trial.run(name, list(dict.fromkeys(case.kind for case in settings.cases)), seconds)
    if not all(set(result) - {""} for result in outcomes.values()):
        print(f"{title} has not answered for all cases; --compile-seconds 600 gives it time")
    return outcomes


def _settings(args: argparse.Namespace) -> Settings:
    asked = [name.strip() for name in args.peers.split(",") if name.strip()]
    names = [_ALIASES.get(name, name) for name in asked]
    for name in names:
        if name not in peers.NAMES:
            raise ArgumentError(
                f"--peers: got {name!r}; wanted some of {', '.join(peers.NAMES)}, with commas"
            )
    seed = secrets.randbelow(2**31) if args.seed is None else args.seed
    return Settings(_cases(args.case), names, seed, time.time() + args.seconds)


def _cases(patterns: str) -> Sequence[Case]:
    result = [
        case
        for case in CASES
        if any(fnmatch.fnmatch(case.name, part.strip()) for part in patterns.split(","))
    ]
    if not result:
        raise ArgumentError(
            f"--case: nothing is called {patterns!r}; wanted some of "
            f"{', '.join(case.name for case in CASES)}"
        )
    return result


def _finish(record: report.Record, settings: Settings) -> int:
    """Write what there is; the exit status."""
    left = [case.name for case in settings.cases if case.name not in record.blocks]
    if left:
        print(f"\nnot measured: {', '.join(left)}; give more --seconds")
    print("\n" + "\n".join([record.save(), record.draw()]))
    mine = [row["status"] == "timed" for row in record.rows if row["name"] == OURS]
    return 0 if mine and all(mine) and "stopped" not in record.data else 1
