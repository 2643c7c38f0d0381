"""How long a decode step or a prompt takes on 1 to 512 GPUs, from what few of them measured.

    python -m benchmarks.scale benchmarks/results/FOLDER          # a table
    python -m benchmarks.scale benchmarks/results/FOLDER --svg docs/pictures/scale.svg

A rank's kernels are measured on one GPU, over the share that it has in a group of any size: those
of the group's slowest GPU, since a step ends with its last rank. Exchanges between GPUs of a host
are measured too; from them come a latency and a rate. Hosts of `HOST_GPUS` are joined by a network,
whose figures are assumed: `NETWORK`. The last column compares what is foretold for groups that were
measured with what they took.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from .distributed.cases import DECODES, PROMPTS, SHARE_METHODS, Decode, Prompt

SIZES = tuple(2**n for n in range(10))
HOST_GPUS = 8


class Link(NamedTuple):
    """What a message costs: microseconds until the first byte, and GB/s that a GPU sends."""

    latency_us: float
    gb_per_s: float

    def time(self, nbytes: float) -> float:
        """Microseconds of a message of so many bytes; none for none."""
        return self.latency_us + nbytes / self.gb_per_s / 1e3 if nbytes > 0 else 0.0


# One adapter of 400 Gb/s for each GPU, and the latency of NCCL's small messages over it.
NETWORK = Link(20.0, 45.0)


class Figures(NamedTuple):
    """What was measured.

    shares     µs of a rank's kernels on one GPU, by case (of prompts: and method, `way`) and number
               of parts
    exchange   of states between GPUs of one host
    gather     of keys, likewise
    measured   µs by case and number of GPUs
    """

    shares: Mapping[str, Mapping[int, float]]
    exchange: Link
    gather: Link
    measured: Mapping[str, Mapping[int, float]]

    @staticmethod
    def of(rows: Iterable[Mapping[str, object]]) -> Figures:
        """From the rows of a result of `python -m benchmarks distributed`."""
        rows = [*rows]
        methods = _methods(rows)
        shares: dict[str, dict[int, float]] = {}
        measured: dict[str, dict[int, float]] = {}
        messages: dict[str, list[tuple[float, float]]] = {"exchange": [], "gather": []}
        for row in rows:
            kind, us = str(row["kind"]), float(str(row["us"]))
            if kind == "share":
                for name in _ways(row, methods):
                    shares.setdefault(name, {})[int(str(row["parts"]))] = us
            elif kind in messages:
                messages[kind].append((float(str(row["sent_bytes"])), us))
            elif kind in ("decode", "prompt"):
                best = measured.setdefault(str(row["case"]), {})
                world = int(str(row["world"]))
                best[world] = min(us, best.get(world, math.inf))
        links = {kind: fitted(sizes) for kind, sizes in messages.items()}
        return Figures(shares, links["exchange"], links["gather"], measured)

    def share(self, case: str, parts: float) -> float:
        """µs of a rank's kernels when the work of a case or `way` is cut into so many parts.

        Between measured numbers, and beyond them, times are powers of the number.
        """
        points = sorted(self.shares[case].items())
        if len(points) == 1:
            return points[0][1] / parts * points[0][0]
        x, y = (np.log([point[i] for point in points]) for i in (0, 1))
        at = math.log(parts)
        low = int(np.clip(np.searchsorted(x, at) - 1, 0, len(x) - 2))
        slope = min((y[low + 1] - y[low]) / (x[low + 1] - x[low]), 0.0)
        end = low + 1 if at > x[-1] else low
        return float(np.exp(y[end] + slope * (at - x[end])))


def way(case: str, method: str) -> str:
    """The name under which a prompt's shares by a method are kept."""
    return f"{case} by {method}"


def _ways(row: Mapping[str, object], methods: Mapping[str, set[str]]) -> Iterator[str]:
    """The names under which the row of a share is kept.

    methods  of each prompt that has been measured; a GPU alone has none, and is where each begins
    """
    case = str(row["case"])
    if case not in methods:
        yield case
        return
    for method in sorted(methods[case]):
        if row["parts"] == 1 or _method(row) == method:
            yield way(case, method)


def _methods(rows: Iterable[Mapping[str, object]]) -> dict[str, set[str]]:
    """The methods of each prompt whose shares have been measured."""
    found: dict[str, set[str]] = {}
    names = {case.name for case in PROMPTS}
    for row in rows:
        if row["kind"] == "share" and row["case"] in names and row["parts"] != 1:
            found.setdefault(str(row["case"]), set()).add(_method(row))
    return found


def _method(row: Mapping[str, object]) -> str:
    """The method of a prompt's share; older results have that of whole rows only."""
    return str(row.get("method", SHARE_METHODS[0]))


def fitted(points: Sequence[tuple[float, float]]) -> Link:
    """The link whose times are nearest to measured (bytes, µs), in ratios."""
    if not points:
        raise ValueError("a result without a message between GPUs tells no link")
    sizes, times = (np.array([point[i] for point in points], np.float64) for i in (0, 1))
    if len(points) == 1:
        return Link(float(times[0]), math.inf)
    terms = np.stack([np.ones_like(sizes), sizes], 1) / times[:, None]
    (latency, slope), *_ = np.linalg.lstsq(terms, np.ones_like(times), rcond=None)
    return Link(max(float(latency), 0.0), 1e-3 / slope if slope > 0 else math.inf)


def decode_step(case: Decode, world: int, figures: Figures) -> float:
    """µs of a layer's decode. A group has at most a rank for each query head; further GPUs are
    groups of their own, which divide the requests."""
    ranks = min(world, case.num_qo_heads)
    batch = math.ceil(case.batch / (world // ranks))
    kernels = figures.share(case.name, ranks * case.batch / batch)
    if ranks == 1:
        return kernels
    in_host = min(ranks, HOST_GPUS)
    hosts = ranks // in_host
    state_bytes = case.state_bytes * batch / case.batch
    inside = figures.exchange.time(state_bytes * (in_host - 1) / in_host)
    # The GPUs of a host have merged their states: each sends those of its heads.
    between = NETWORK.time(state_bytes / in_host * (hosts - 1) / hosts)
    return kernels + inside + between


def prompt(case: Prompt, world: int, figures: Figures) -> float:
    """µs of a layer's attention over a prompt, by the method that takes the least time.

    Keys that are gathered come before a rank's kernels. Those that come beside them cost no more
    than they take longer than the rank's work on its own tokens, which is one of `world` parts.
    """
    shares = {
        method: figures.share(way(case.name, method), world)
        for method in SHARE_METHODS
        if way(case.name, method) in figures.shares
    }
    if world == 1:
        return min(shares.values())
    in_host = min(world, HOST_GPUS)
    come = figures.gather.time(case.key_bytes * (in_host - 1) / world)
    if world > in_host:
        come += NETWORK.time(case.key_bytes * (world - in_host) / world)
    waits = {"gather": come}
    if "overlap" in shares:
        waits["overlap"] = max(come - shares["overlap"] / world, 0.0)
    return min(us + waits[method] for method, us in shares.items())


class Point(NamedTuple):
    """A case on so many GPUs: foretold, and measured or None."""

    case: str
    world: int
    us: float
    speedup: float
    measured: float | None


def points(figures: Figures, sizes: Sequence[int] = SIZES) -> Iterator[Point]:
    """Every case that has shares, on every number of GPUs."""
    for case in (*DECODES, *PROMPTS):
        names = {case.name, *(way(case.name, method) for method in SHARE_METHODS)}
        if names.isdisjoint(figures.shares):
            continue
        times = [
            decode_step(case, size, figures)
            if isinstance(case, Decode)
            else prompt(case, size, figures)
            for size in (1, *sizes)
        ]
        measured = figures.measured.get(case.name, {})
        alone = measured.get(1, times[0])
        for size, us in zip(sizes, times[1:], strict=True):
            yield Point(case.name, size, us, alone / us, measured.get(size))


def table(found: Iterable[Point]) -> str:
    """The points, a line each."""
    lines = [f"{'case':18}{'GPUs':>5}{'us':>10}{'speedup':>9}{'measured':>10}{'ratio':>7}"]
    for point in found:
        line = f"{point.case:18}{point.world:5}{point.us:10.1f}{point.speedup:9.2f}"
        if point.measured is not None:
            line += f"{point.measured:10.1f}{point.us / point.measured:7.3f}"
        lines.append(line)
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    """Print the table of a result, and draw it."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.scale", description=__doc__)
    parser.add_argument("folder", type=Path, help="of results.json")
    args = parser.parse_args(argv)
    rows = json.loads((args.folder / "results.json").read_text("utf-8"))["rows"]
    print(table(points(Figures.of(rows))))
    return 0


if __name__ == "__main__":
    sys.exit(main())
