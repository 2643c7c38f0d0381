"""`cupyattn compile`: kernels ahead of time."""

from __future__ import annotations

import argparse
import contextlib
import functools
import logging
import math
import os
import sys
import time
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .. import jit
from ..core import env
from ..core.cupy_module import cupy_module
from ..core.device import ARCHS, check_arch, device_props
from ..core.folders import is_writable
from ..errors import ArgumentError, CupyAttnError, UnsupportedError
from ..jit import cache, compiler
from ..launch.instances import instances
from . import pool, select
from .costs import Cost, cost
from .progress import Progress, duration

_MIB = 2**20

Task = tuple[str, jit.Config, str]


def add_parser(commands: Any) -> None:
    """Add the command to the parser's `commands`."""
    parser = commands.add_parser(
        "compile",
        help="compile kernels ahead; needs no GPU",
        description="Compile kernels ahead of the calls that need them. Needs CuPy and NVRTC, no "
        "GPU. Ctrl-C ends it; what is done stays, and the same command goes on from there.",
    )
    parser.add_argument(
        "--arch",
        action="extend",
        type=lambda text: [part.strip() for part in text.split(",")],
        default=[],
        help=f"of {', '.join(ARCHS)}; several with commas (default: those of the GPUs here)",
    )
    select.add_arguments(parser)
    parser.add_argument(
        "--cache-dir", type=Path, help=f"where to put them (default: {env.CACHE_DIR.name})"
    )
    parser.add_argument("--jobs", type=int, default=cores(), help="processes (default: cores)")
    parser.add_argument(
        "--dry-run", action="store_true", help="only say how many kernels, seconds and bytes"
    )
    parser.set_defaults(run=run)


def cores() -> int:
    """The cores that this process may use, where the system tells."""
    allowed = getattr(os, "sched_getaffinity", None)
    return len(allowed(0)) if allowed else os.cpu_count() or 1


def run(args: argparse.Namespace) -> int:
    """Compile them; 1 if a kernel fails, 2 if nothing can be done, 128 + n after signal n."""
    try:
        archs = [check_arch(arch) for arch in dict.fromkeys(args.arch)] or _archs_here()
        tasks = _tasks(args, archs)
        if args.dry_run:
            print("\n".join(_estimate(tasks)))
            return 0
        folder = args.cache_dir.expanduser().absolute() if args.cache_dir else cache.folders()[0]
        _check(archs, folder)
    except CupyAttnError as error:
        print(f"cupyattn compile: {error}", file=sys.stderr)
        return 2
    outcome = _Outcome(archs, folder)
    try:
        _compile(tasks, outcome, max(1, min(args.jobs, len(tasks))))
    except pool.Stopped as stopped:
        print(
            f"cupyattn compile: {stopped} after {outcome.count} of {len(tasks)} kernels, which are "
            f"in {folder}; the same command does the rest",
            file=sys.stderr,
        )
        return 128 + stopped.signum
    outcome.print()
    return 1 if outcome.failures else 0


def _tasks(args: argparse.Namespace, archs: Sequence[str]) -> list[Task]:
    """The kernels to compile. The longest come first, so that all processes end together."""
    if not archs:
        raise ArgumentError("no GPU found here; name --arch")
    chosen = select.selections(args)
    # Tiles depend on a GPU's shared memory, so each architecture has instances of its own.
    tasks = [(*each, arch) for arch in archs for each in instances(chosen, arch)]
    return sorted(tasks, key=lambda task: (-_cost(task).seconds, str(task)))


def _cost(task: Task) -> Cost:
    name, _, arch = task
    return cost(name, arch)


def _archs_here() -> list[str]:
    try:
        count = cupy_module().cuda.runtime.getDeviceCount()
    except RuntimeError:  # no CuPy, or no driver
        return []
    result: dict[str, None] = {}
    for index in range(count):
        with contextlib.suppress(UnsupportedError):
            result[device_props(index).arch] = None
    return list(result)


def _estimate(tasks: Iterable[Task]) -> list[str]:
    """A line for each kernel and architecture, and one for all."""
    counts = Counter((arch, name) for name, _, arch in tasks)
    row = "{:8} {:28} {:>7} {:>7} {:>9}"
    lines = [row.format("arch", "kernel", "count", "CPU s", "MiB")]
    total = Cost(0.0, 0.0)
    for (arch, name), count in sorted(counts.items()):
        seconds, size = (count * x for x in cost(name, arch))
        lines.append(row.format(arch, name, count, f"{seconds:.0f}", f"{size / _MIB:.1f}"))
        total = Cost(total.seconds + seconds, total.bytes + size)
    return [*lines, f"all: {_about(counts.total(), total)} (estimates, from averages)"]


def _about(count: int, total: Cost) -> str:
    return f"{count} kernels, {duration(total.seconds)} of CPU time, {total.bytes / _MIB:.0f} MiB"


def _check(archs: Sequence[str], folder: Path) -> None:
    """Raise what every kernel would fail with."""
    for arch in archs:
        compiler.require_arch(arch)
    jit.kernels_dir()
    fault = cache.problem(cache.CacheFolder(folder, is_shared=env.CACHE_SHARED.flag()))
    if fault or not is_writable(folder):
        raise ArgumentError(f"the cache folder {folder} cannot be written {fault}".rstrip())


@dataclass
class _Outcome:
    """What came of the kernels so far."""

    archs: Sequence[str]
    folder: Path
    builds: list[jit.Build] = field(default_factory=list)
    failures: dict[str, list[str]] = field(default_factory=dict)
    start: float = field(default_factory=time.perf_counter)

    @property
    def count(self) -> int:
        return len(self.builds)

    def fail(self, task: Task, message: str) -> None:
        """Kernels that share what is wrong differ in the first of several lines."""
        name, config, arch = task
        first, _, rest = message.partition("\n")
        result = self.failures.setdefault(rest or first, [])
        result.append(f"{name} {arch}: {message}\n  {config!r}")

    def print(self) -> None:
        seconds = time.perf_counter() - self.start
        cold = [build.info for build in self.builds if not build.info.cached]
        nbytes = sum(build.info.cubin_bytes for build in self.builds)
        print(
            f"{self.count} kernels for {', '.join(self.archs)} in {seconds:.1f} s: {len(cold)} "
            f"compiled, {self.count - len(cold)} already there; {nbytes / _MIB:.1f} MiB in "
            f"{self.folder}"
        )
        if cold:
            slowest = max(cold, key=lambda info: info.compile_seconds)
            peak = max(info.process_peak_rss_bytes for info in cold)
            print(
                f"slowest: {slowest.name} {slowest.arch}, {slowest.compile_seconds:.2f} s; largest "
                f"process: {peak / _MIB:.0f} MiB"
            )
        self._print_faults()

    def _print_faults(self) -> None:
        spilled = [build for build in self.builds if build.info.ptxas.spills]
        print(f"spills: {len(spilled) or 'none'}")
        for build in spilled:
            ptxas = build.info.ptxas
            print(
                f"  {ptxas.spill_store_bytes} bytes stored, {ptxas.registers} registers: "
                f"{build.path}"
            )
        for build in self.builds:
            for line in build.info.ptxas.lost_performance:
                print(f"  {build.path}: {line}")
        for messages in self.failures.values():
            more = f"\n  and {len(messages) - 1} more like it" if len(messages) > 1 else ""
            print(f"FAILED {messages[0]}{more}", file=sys.stderr)


def _compile(tasks: Sequence[Task], outcome: _Outcome, jobs: int) -> None:
    total = Cost(sum(_cost(x).seconds for x in tasks), sum(_cost(x).bytes for x in tasks))
    print(
        f"{', '.join(outcome.archs)}: about {_about(len(tasks), total)}, in {jobs} processes, to "
        f"{outcome.folder}",
        file=sys.stderr,
        flush=True,
    )
    for task, build, message in compiled(tasks, jobs, outcome.folder):
        if build is None:
            outcome.fail(task, message)
        else:
            outcome.builds.append(build)


def compiled(
    tasks: Sequence[Task], jobs: int, folder: Path | None, deadline: float = math.inf
) -> Iterator[tuple[Task, jit.Build | None, str]]:
    """Compile kernels in so many processes, with a bar: each as it is done, or why it failed.

    folder: where to; None: as calls do. Ends at the deadline, a time of `time.monotonic`, with what
    is done. Raises pool.Stopped.
    """
    progress = Progress(len(tasks), sum(_cost(x).seconds for x in tasks), sys.stderr)
    build = functools.partial(_build, "" if folder is None else str(folder))
    work = pool.work(build, tasks, jobs, 1.0)
    try:
        with contextlib.closing(work) as finished:
            for done in finished:
                if done is None:
                    progress.tick()
                else:
                    name, _, arch = done.task
                    built, message = done.result or (None, done.failure)
                    was_work = built is None or not built.info.cached
                    nbytes = built.info.cubin_bytes if built else 0
                    progress.step(f"{name} {arch}", _cost(done.task).seconds, was_work, nbytes)
                    yield done.task, built, message
                if time.monotonic() > deadline:
                    return
    finally:
        progress.close()


def _build(folder: str, name: str, config: jit.Config, arch: str) -> tuple[jit.Build | None, str]:
    """A kernel, or why it failed; in a process of its own."""
    if folder:
        os.environ[env.CACHE_DIR.name] = folder
    os.environ[env.NO_COMPILE.name] = "0"
    # The summary says what warnings would.
    logging.getLogger("cupyattn").setLevel(logging.ERROR)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        try:
            return jit.build(name, config, arch), ""
        except CupyAttnError as error:
            return None, str(error)
