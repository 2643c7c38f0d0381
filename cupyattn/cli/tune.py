"""`cupyattn tune`: the times of this machine's card, by which plans choose from then on."""

from __future__ import annotations

import argparse
import secrets
import sys
import time
from collections import Counter
from collections.abc import Iterable, Mapping
from datetime import datetime, timezone
from pathlib import Path

from .._version import __version__
from ..array import Device
from ..bench import machine
from ..bench.clock import Clock
from ..bench.inputs import Arrays
from ..bench.tiles.case import TileCase
from ..bench.tiles.draw import draw_cases
from ..bench.tiles.judge import MIN_BATCHES, Verdict, judge
from ..bench.tiles.measure import Instance, instances, rows_of
from ..bench.tiles.rows import Row
from ..bench.timing import ContextLost, Stopwatch
from ..choose import tuned
from ..choose.card import Card, known
from ..choose.fit import text_of
from ..core import env
from ..core.device import DeviceProps, device_props, imagine
from ..core.folders import is_writable
from ..errors import CupyAttnError, DeviceError
from . import compile as compiling
from . import pool
from .progress import Progress

_INDEX = 0
_CASES_A_SECOND = 16  # no GPU measures more of them
_REMEDY = "`cupyattn info` says what is here"


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command to the parser's `commands`."""
    parser = commands.add_parser(
        "tune",
        help="measure this GPU for some minutes, so that plans choose by its own times",
        description="Time every way to serve drawn batches on the first GPU, fit the card's times "
        "to them, and keep these in the folder of compiled kernels if they are better than those "
        "that plans choose by now, on batches that were held out.",
    )
    parser.add_argument(
        "--seconds",
        type=float,
        default=90.0,
        help="of measuring (default: 90); compiling before takes as long again at most, where "
        "kernels are not in the cache, and fitting after it some seconds",
    )
    parser.add_argument(
        "--out", type=Path, help="write the times to this file, which nothing uses by itself"
    )
    parser.add_argument("--seed", type=int, help="of the batches (default: a new one)")
    parser.add_argument(
        "--jobs",
        type=int,
        default=compiling.cores(),
        help="processes that compile (default: cores)",
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Measure and keep; 1 if what is better could not be kept or too little was measured, 2 if
    nothing can be measured, 128 + n after signal n."""
    try:
        props = device_props(_INDEX)
        file = _Place(props, args.out)
        clock = Clock()
    except CupyAttnError as error:
        return _fail(f"{error}; {_REMEDY}" if isinstance(error, DeviceError) else str(error), 2)
    card = known(props).card
    seed = secrets.randbelow(2**31) if args.seed is None else args.seed
    print(f"{props.name}: plans choose by {_told(card)}; seed {seed}", flush=True)
    if fault := file.fault():
        print(f"Its times will not be kept: {fault}", flush=True)
    try:
        rows = _measure(args, seed, props, clock)
    except pool.Stopped as stopped:
        return _fail(f"{stopped}: nothing is changed", 128 + stopped.signum)
    except ContextLost as error:
        return _fail(f"the GPU stopped answering: {error}", 1)
    count = len({row.case.name for row in rows})
    if count < MIN_BATCHES:
        return _fail(
            f"{count} batches were measured, which are too few; wanted {MIN_BATCHES}: give more "
            "--seconds",
            1,
        )
    print(f"fitting {count} batches, {len(rows)} times ...", flush=True)
    verdict = judge(card, rows, props, _source(count, seed))
    print("\n".join(verdict.lines()))
    return _keep(verdict, file)


def _fail(message: str, status: int) -> int:
    print(f"cupyattn tune: {message}", file=sys.stderr)
    return status


def _told(card: Card) -> str:
    if card.scaled_from:
        return f"the times of {card.scaled_from}, scaled"
    return f"times of {card.name}" + (f" ({card.source})" if card.source else "")


def _source(count: int, seed: int) -> str:
    commit = machine.git_commit(Path(machine.__file__).parent)
    version = f"cupyattn {__version__}" if commit == "unknown" else commit[:12]
    day = datetime.now(timezone.utc).date().isoformat()
    return f"{count} batches of seed {seed}, {day} at {version}"


# --- measuring ---


def _measure(args: argparse.Namespace, seed: int, props: DeviceProps, clock: Clock) -> list[Row]:
    drawn = draw_cases(seed, max(1, round(_CASES_A_SECOND * args.seconds)))
    # CuPy has no arrays of fp8: their times stay those of the card that tuning began with.
    cases = [case for case in drawn if not case.kv_dtype.startswith("float8")]
    needed = instances(cases, imagine(props))
    there = _compile(needed, props.arch, args.jobs, args.seconds)
    cases = [case for case in cases if needed[case.name] <= there]
    arrays = Arrays("cupy", Device("cuda", props.index), seed)
    clock.preheat()
    return _timed(cases, arrays, clock, args.seconds)


def _compile(
    needed: Mapping[str, frozenset[Instance]], arch: str, jobs: int, seconds: float
) -> set[Instance]:
    """Compile what batches need, the most frequent ones first; what was done in time."""
    ordered = [x for kernels, _ in Counter(needed.values()).most_common() for x in kernels]
    tasks = [(*instance, arch) for instance in dict.fromkeys(ordered)]
    there = set()
    deadline = time.monotonic() + seconds
    print(f"compiling {len(tasks)} kernels, where the cache has them not", flush=True)
    for (name, config, _), build, message in compiling.compiled(
        tasks, max(1, min(jobs, len(tasks))), None, deadline
    ):
        if build is None:
            print(f"\n{name}: {message}", file=sys.stderr)
        else:
            there.add((name, config))
    return there


def _timed(
    cases: Iterable[TileCase], arrays: Arrays, clock: Stopwatch, seconds: float
) -> list[Row]:
    """The rows of as many batches as there is time for, with a bar."""
    start, count = time.time(), max(1, round(seconds))
    progress, steps = Progress(count, seconds, sys.stderr, unit="seconds"), 0
    result: list[Row] = []
    built = rows_of(cases, arrays, clock, "", start + seconds)
    try:
        for number, rows in enumerate(built, 1):
            result += rows
            label = f"{number} batches, {len(result)} times"
            while steps < min(count, int(time.time() - start)):
                progress.step(label, 1.0)
                steps += 1
    finally:
        progress.close()
    return result


# --- keeping ---


class _Place:
    """Where the times go: a file that the user names, or the folder of kernels."""

    def __init__(self, props: DeviceProps, out: Path | None) -> None:
        self._name, self._out = props.name, out
        self.path = out or tuned.path_of(props.name)

    def fault(self) -> str:
        """Why they cannot be kept, as far as it can be seen before; empty if they can."""
        if self.path is None:
            return f"this user has no folder for kernels; {self.remedy()}"
        if not is_writable(self.path.parent):
            return f"{self.path} cannot be written; {self.remedy()}"
        return ""

    def write(self, text: str) -> Path:
        """Raises OSError, and CompileError where there is no folder."""
        if self._out is None:
            return tuned.write(self._name, text)
        self._out.write_text(text, "utf-8")
        return self._out

    def use(self) -> str:
        """What becomes of what was written."""
        if self._out is not None:
            return ""
        if not env.TUNED.flag():
            return f", and not used where {env.TUNED.name} is 0, as here"
        return ", and used from now on"

    def remedy(self) -> str:
        if self._out is not None:
            return "name another file"
        return f"give --out FILE, or set {env.CACHE_DIR.name} to a folder that can be written"


def _keep(verdict: Verdict, file: _Place) -> int:
    if not verdict.is_better:
        print("Nothing is written: the times by which plans choose now are as good.")
        return 0
    try:
        path = file.write(text_of(verdict.card))
    except (OSError, CupyAttnError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        where = f"{file.path} cannot be written ({reason})" if file.path else reason
        return _fail(f"the times are better, and are not kept: {where}; {file.remedy()}", 1)
    print(f"{path}: written{file.use()}")
    return 0
