"""The `cupyattn` command: `info`, `compile` and `demo`."""

from __future__ import annotations

import argparse
import concurrent.futures
import contextlib
import multiprocessing
import os
import platform
import sys
import time
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple, TextIO

from . import jit
from ._version import __version__
from .core import env
from .core.device import ARCHS, check_arch, device_props
from .errors import CupyAttnError, UnsupportedError
from .jit import cache
from .launch.tiles import sm90

_MIB = 2**20


def main(argv: Sequence[str] | None = None) -> int:
    """Run one subcommand; the exit status. `argv` defaults to the process's own arguments."""
    args = list(sys.argv[1:] if argv is None else argv)
    # argparse cannot hand options it does not know through to another parser.
    if args[:1] == ["demo"]:
        from .demo import main as demo

        return demo(args[1:]) or 0
    parsed = _parser().parse_args(args)
    if parsed.command == "info":
        print("\n".join(info_lines()))
        return 0
    try:
        return _compile(parsed)
    except CupyAttnError as error:
        print(f"cupyattn compile: {error}", file=sys.stderr)
        return 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="cupyattn", description="Attention on any DLPack tensors")
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("info", help="what was found: GPU, CuPy, NVRTC, kernel cache, environment")
    compiling = commands.add_parser("compile", help="compile every kernel ahead; needs no GPU")
    compiling.add_argument(
        "--arch",
        help=f"comma-separated, of {', '.join(ARCHS)} (default: those of the GPUs here)",
    )
    compiling.add_argument("--level", choices=("standard", "full"), default="standard")
    compiling.add_argument(
        "--cache-dir", type=Path, help=f"where to put them (default: {env.CACHE_DIR.name})"
    )
    compiling.add_argument(
        "--jobs", type=int, default=len(os.sched_getaffinity(0)), help="processes (default: cores)"
    )
    commands.add_parser("demo", help="the main job: a prefill and a decode loop, checked and timed")
    return parser


# --- info ---


def info_lines() -> list[str]:
    """What this machine offers, a line each. Works without a GPU and without CuPy."""
    lines = [f"cupyattn     {__version__}"]
    lines += [f"Python       {platform.python_version()}, {platform.system()} {platform.machine()}"]
    lines += _gpu_lines()
    lines += [f"prefill      {sm90.summary()}"]
    lines += [f"NVRTC        {_nvrtc()}"]
    try:
        lines += [f"kernels      {jit.kernels_dir()}"]
    except CupyAttnError as error:
        lines += [f"kernels      {error}"]
    for index, folder in enumerate(cache.folders()):
        count, nbytes = cache.contents(folder)
        access = "writable" if cache.is_writable(folder) else "read-only"
        label = "fallback" if index else "cache"
        lines += [f"{label:12} {folder} ({access}): {count} kernels, {nbytes / _MIB:.1f} MiB"]
    lines += ["environment"]
    for variable in env.ALL:
        value = os.environ.get(variable.name)
        shown = "not set" if value is None else f"= {value}"
        lines += [f"  {variable.name} {shown}: {variable.doc}"]
    return lines


def _gpu_lines() -> list[str]:
    try:
        import cupy
    except ImportError as error:
        return [
            f"CuPy         cannot be imported ({error}); install cupyattn[cuda12x] or [cuda13x]",
            "GPU          none without CuPy: NumPy and other CPU arrays run on the reference",
        ]
    lines = [f"CuPy         {cupy.__version__}"]
    runtime = cupy.cuda.runtime
    try:
        count = runtime.getDeviceCount()
        version = runtime.driverGetVersion()
        lines += [f"driver       CUDA {version // 1000}.{version % 1000 // 10}"]
    except runtime.CUDARuntimeError as error:
        lines += [f"GPU          none usable ({error})"]
        return [*lines, "             NumPy and other CPU arrays run on the reference"]
    for index in range(count):
        lines += [f"GPU {index}        {_gpu(index)}"]
    return lines or ["GPU          none"]


def _gpu(index: int) -> str:
    try:
        props = device_props(index)
    except CupyAttnError as error:
        return str(error)
    return (
        f"{props.name}: {props.arch}, {props.num_sms} SMs, {props.max_smem_per_block // 1024} KiB "
        f"of shared memory a block, {props.l2_bytes / _MIB:.0f} MiB of L2"
    )


def _nvrtc() -> str:
    try:
        return jit.nvrtc_version()
    except CupyAttnError as error:
        return str(error)


# --- compile ---


class _Outcome(NamedTuple):
    """What a worker sends back for one kernel; `error` is empty if it was built."""

    label: str
    build: jit.Build | None
    error: str


def _compile(args: argparse.Namespace) -> int:
    archs = [check_arch(a.strip()) for a in args.arch.split(",")] if args.arch else _archs_here()
    folder = args.cache_dir.expanduser().absolute() if args.cache_dir else cache.folders()[0]
    if not archs:
        print("cupyattn compile: no GPU found here; name --arch", file=sys.stderr)
        return 2
    if not cache.is_writable(folder):
        print(f"cupyattn compile: the cache folder {folder} cannot be written", file=sys.stderr)
        return 2
    from .launch.instances import instances

    # Tiles depend on a GPU's shared memory, so each architecture has instances of its own.
    tasks = [
        (*key, arch)
        for arch in dict.fromkeys(archs)
        for key in sorted(
            {(name, jit.Config(config)) for name, config in instances(args.level, arch)}, key=str
        )
    ]
    start = time.perf_counter()
    outcomes = _run(tasks, folder, max(1, min(args.jobs, len(tasks))))
    _summarise(outcomes, archs, folder, time.perf_counter() - start)
    return 1 if any(outcome.error for outcome in outcomes) else 0


def _archs_here() -> list[str]:
    try:
        import cupy

        count = cupy.cuda.runtime.getDeviceCount()
    except (ImportError, RuntimeError):  # no CuPy, or no driver
        return []
    found = []
    for index in range(count):
        with contextlib.suppress(UnsupportedError):
            found.append(device_props(index).arch)
    return found


def _run(tasks: Sequence[tuple[str, jit.Config, str]], folder: Path, jobs: int) -> list[_Outcome]:
    # NVRTC serialises inside a process, and a forked CUDA library is undefined: hence spawn.
    pool = concurrent.futures.ProcessPoolExecutor(
        jobs, multiprocessing.get_context("spawn"), _start_worker, (str(folder),)
    )
    progress = _Progress(len(tasks), sys.stderr)
    outcomes = []
    with pool:
        futures = {pool.submit(_build_one, *task): task for task in tasks}
        for future in concurrent.futures.as_completed(futures):
            name, _, arch = futures[future]
            failure = future.exception()
            outcome = (
                _Outcome(f"{name} {arch}", None, f"the worker failed: {failure!r}")
                if failure
                else future.result()
            )
            outcomes.append(outcome)
            progress.step(outcome.label)
    progress.close()
    return outcomes


def _start_worker(folder: str) -> None:
    os.environ[env.CACHE_DIR.name] = folder
    os.environ[env.NO_COMPILE.name] = "0"
    # The summary says what the warnings would.
    warnings.simplefilter("ignore", RuntimeWarning)


def _build_one(name: str, config: jit.Config, arch: str) -> _Outcome:
    label = f"{name} {arch}"
    try:
        return _Outcome(label, jit.build(name, config, arch), "")
    except CupyAttnError as error:
        return _Outcome(label, None, f"{error}\n  {config!r}")


def _summarise(
    outcomes: Sequence[_Outcome], archs: Sequence[str], folder: Path, seconds: float
) -> None:
    builds = [outcome.build for outcome in outcomes if outcome.build is not None]
    cold = [build.info for build in builds if not build.info.cached]
    nbytes = sum(build.info.cubin_bytes for build in builds)
    print(
        f"{len(builds)} kernels for {', '.join(archs)} in {seconds:.1f} s: {len(cold)} compiled, "
        f"{len(builds) - len(cold)} already there; {nbytes / _MIB:.1f} MiB in {folder}"
    )
    if cold:
        slowest = max(cold, key=lambda info: info.compile_seconds)
        peak = max(info.process_peak_rss_bytes for info in cold)
        print(
            f"slowest: {slowest.name} {slowest.arch}, {slowest.compile_seconds:.2f} s; largest "
            f"process: {peak / _MIB:.0f} MiB"
        )
    spilled = [build for build in builds if build.info.ptxas.spills]
    print(f"spills: {len(spilled) or 'none'}")
    for build in spilled:
        ptxas = build.info.ptxas
        print(
            f"  {ptxas.spill_store_bytes} bytes stored, {ptxas.registers} registers: {build.path}"
        )
    for build in builds:
        for line in build.info.ptxas.lost_performance:
            print(f"  {build.path}: {line}")
    for outcome in outcomes:
        if outcome.error:
            print(f"FAILED {outcome.label}: {outcome.error}", file=sys.stderr)


class _Progress:
    """A bar on a terminal, and elsewhere a line for every tenth of the work."""

    def __init__(self, total: int, stream: TextIO) -> None:
        self._total, self._done, self._stream = total, 0, stream
        self._tty = stream.isatty()

    def step(self, label: str) -> None:
        before, self._done = self._done, self._done + 1
        share = 10 * self._done // self._total
        if self._tty:
            filled = 40 * self._done // self._total
            bar = "#" * filled + "." * (40 - filled)
            text = f"\r[{bar}] {self._done}/{self._total} {label}"
            print(f"{text[:100]:<100}", end="", file=self._stream, flush=True)
        elif share > 10 * before // self._total:
            print(f"{self._done}/{self._total} kernels", file=self._stream, flush=True)

    def close(self) -> None:
        if self._tty:
            print(file=self._stream)
