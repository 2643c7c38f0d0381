"""What is wanted of latent attention and of head dims beyond 256, beside what a run measured.

    python -m benchmarks.musts DIR [DIR ...]

Rows are the cases of DIR/results.json that are held to the fastest peer of their process or to
another case of ours (`BatchCase.goals`, `against_goal`). The error is that of our answer over the
fastest peer's, both against float64 on the same rows; it must be at most 1.05.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from .peers import OURS
from .report import align
from .results import FILE_NAME

MOST_ERROR = 1.05
_HEAD = (
    *("case", "ours us", "TFLOP/s", "GB/s", "floor us", "best peer", "its us"),
    *("ratio", "error", "wanted", "met"),
)


class Must(NamedTuple):
    """One case: our row, the fastest correct peer's (None: no peer serves it), the ratio that is
    wanted and the one measured, and of what."""

    case: str
    ours: dict[str, Any]
    best: dict[str, Any] | None
    wanted: float | None
    ratio: float | None
    of: str

    @property
    def error(self) -> float | None:
        """Our error over the fastest peer's."""
        return self.best and self.ours["relative_error"] / self.best["relative_error"]

    @property
    def is_met(self) -> bool | None:
        """None: nothing is wanted of this case, or what it is held to was not timed."""
        met = None if self.wanted is None or self.ratio is None else self.ratio >= self.wanted
        return False if self.error is not None and self.error > MOST_ERROR else met


def musts(data: dict[str, Any]) -> Iterator[Must]:
    """One for each case of a result file that is held to something, and for each latent one."""
    timed = [row for row in data["rows"] if row["status"] == "timed"]
    for name, case in data["cases"].items():
        rows = [row for row in timed if row["case"] == name]
        ours = _fastest([row for row in rows if row["peer"] == "ours"])
        best = _fastest([row for row in rows if row["peer"] not in OURS])
        wanted = next(
            (goal["factor"] for goal in case["goals"] if goal.get("peer") == "best"), None
        )
        if ours is None or (wanted is None and case["op"] != "mla"):
            continue
        ratio = best and best["us"] / ours["us"]
        yield Must(name, ours, best, wanted, ratio, "best peer")
        if case.get("against_goal"):
            other = _fastest(
                [row for row in timed if row["case"] == case["against"] and row["peer"] == "ours"]
            )
            ratio = other and other["us"] / ours["us"]
            yield Must(name, ours, None, case["against_goal"], ratio, case["against"])


def _fastest(rows: list[dict[str, Any]]) -> dict[str, Any] | None:
    return min(rows, key=lambda row: row["us"], default=None)


def table(result: Sequence[Must]) -> str:
    """The musts as text, a line each."""
    return align([_HEAD, *map(_line, result)])


def _line(must: Must) -> tuple[str, ...]:
    ours, best = must.ours, must.best
    wanted = "" if must.wanted is None else f">= {must.wanted:.2f} of {must.of}"
    met = {True: "met", False: "MISSED", None: ""}[must.is_met]
    return (
        must.case,
        f"{ours['us']:.1f}",
        f"{ours['tflops']:.0f}",
        f"{ours['gbps']:.0f}",
        f"{ours['floor_us']:.1f}",
        "" if best is None else f"{best['peer']}:{best['variant']}",
        "" if best is None else f"{best['us']:.1f}",
        "" if must.ratio is None else f"{must.ratio:.2f}",
        "" if must.error is None else f"{must.error:.3f}",
        wanted,
        met,
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Print the table of each folder. Returns 0, or 1 if something that is wanted was missed."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.musts")
    parser.add_argument("folders", type=Path, nargs="+", help=f"with {FILE_NAME}")
    args = parser.parse_args(argv)
    missed = False
    for folder in args.folders:
        result = list(musts(json.loads((folder / FILE_NAME).read_text())))
        print(f"{folder.name}\n{table(result)}\n")
        missed = missed or any(must.is_met is False for must in result)
    return int(missed)


if __name__ == "__main__":
    sys.exit(main())
