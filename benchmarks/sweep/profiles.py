"""What ours and the best peer launch in the worst shapes of a sweep, and the time of each kernel.

    python -m benchmarks.sweep.profiles results/sweep7      # a sweep does so at its end

Kernels are timed by torch's profiler, on a cold L2, each on its own: gaps between launches are the
rest of a call's time. A shape that cannot be profiled has the reason instead.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from ..peers import candidates
from ..timing import Clock, describe
from .draw import draw_case

FILE_NAME = "profiles.json"
_SUMMARY_NAME = "sweep.json"
_CALLS = 5
_LONGEST_NAME = 60
_FLUSH = "FillFunctor"  # zeroes what empties L2


class Kernel(NamedTuple):
    """A kernel of a call: µs of all its launches in one call, their number, blocks and threads."""

    name: str
    us: float
    launches: float
    blocks: int
    threads: int


def kernels_of(trace: dict[str, Any], calls: int) -> list[Kernel]:
    """The kernels of a trace of so many calls, in the order of their first launch."""
    result: dict[tuple[str, int, int], list[float]] = {}
    events = [event for event in trace["traceEvents"] if event.get("cat") == "kernel"]
    for event in sorted(events, key=lambda event: event["ts"]):
        if _FLUSH in event["name"]:
            continue
        grid, block = (_product(event["args"][name]) for name in ("grid", "block"))
        result.setdefault((_short(event["name"]), grid, block), []).append(event["dur"])
    return [
        Kernel(name, sum(times) / calls, len(times) / calls, blocks, threads)
        for (name, blocks, threads), times in result.items()
    ]


def _product(extents: Sequence[int]) -> int:
    x, y, z = extents
    return x * y * z


def _short(name: str) -> str:
    name = name.removeprefix("void ").replace("(anonymous namespace)::", "")
    return name if len(name) <= _LONGEST_NAME else name[: _LONGEST_NAME - 3] + "..."


def profile(call: Callable[[], Any], clock: Clock) -> list[Kernel]:
    """The kernels of one call, by torch's profiler."""
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as torch_profile

    clock.visit(call, 2)
    clock.wait()
    with torch_profile(activities=[ProfilerActivity.CUDA]) as recorded:
        clock.visit(call, _CALLS)
        clock.wait()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        recorded.export_chrome_trace(str(path))
        return kernels_of(json.loads(path.read_text()), _CALLS)


def profile_shape(entry: dict[str, Any], seed: int, clock: Clock) -> dict[str, Any]:
    """The kernels of ours and of the best peer of one of the worst shapes."""
    from ..worker import problem

    case = draw_case(seed, int(entry["case"].split("_")[1]), entry["schedule"])
    inputs, _ = problem(case)
    result: dict[str, Any] = {}
    for label in ("ours", entry["best_peer"]):
        name = label.partition(":")[0]
        offered = candidates(name, case, inputs, build=False)
        chosen = [x for x in offered if label in (name, x.label)]
        if chosen:
            result[label] = [kernel._asdict() for kernel in profile(chosen[0].call, clock)]
    return result


def lines_of(profiles: dict[str, Any]) -> list[str]:
    """Profiles as text: a line for each kernel."""
    lines = []
    for case, by_label in profiles.items():
        lines.append(case)
        if "error" in by_label:
            lines.append(f"  not profiled: {by_label['error']}")
            continue
        for label, kernels in by_label.items():
            for kernel in kernels:
                launches = "" if kernel["launches"] == 1 else f" in {kernel['launches']:g} launches"
                size = f"{kernel['blocks']:6} x {kernel['threads']:4}"
                lines.append(
                    f"  {label:20}{kernel['us']:9.1f} us{size}  {kernel['name']}{launches}"
                )
    return lines


def main(argv: Sequence[str] | None = None) -> int:
    """Profile the worst shapes of the sweep in a folder, and write them there. Returns 0."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.sweep.profiles")
    parser.add_argument("folder", type=Path, help=f"with {_SUMMARY_NAME}")
    parser.add_argument("--most", type=int, default=10, help="shapes (default 10)")
    args = parser.parse_args(argv)
    summary = json.loads((args.folder / _SUMMARY_NAME).read_text())
    clock, result = Clock(), {}
    for entry in summary["worst"][: args.most]:
        try:
            result[entry["case"]] = profile_shape(entry, summary["seed"], clock)
        except Exception as error:
            result[entry["case"]] = {"error": describe(error)}
        (args.folder / FILE_NAME).write_text(json.dumps(result, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
