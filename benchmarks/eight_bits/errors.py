"""The errors of ways to use 8 bits, over inputs and numbers of keys."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np

from .attention import Way, attend, exact
from .inputs import INPUTS, drawn

FIGURES = Path(__file__).parent / "errors.json"
KERNEL = Way()
WAYS = {
    "kernel": KERNEL,
    "never_flushed": replace(KERNEL, flush_tiles=0, is_exact=True),
    "flush_1": replace(KERNEL, flush_tiles=1),
    "flush_8": replace(KERNEL, flush_tiles=8),
    "exact_maximum": replace(KERNEL, is_exact=True),
    "rounded_sum": replace(KERNEL, sums_rounded=True),
    "low_power": replace(KERNEL, is_exact=True, top_power=3),
    "blocks": replace(KERNEL, block=64),
    "smoothed": replace(KERNEL, smooths=True),
    "rotated": replace(KERNEL, rotates=True),
    "smoothed_rotated": replace(KERNEL, smooths=True, rotates=True),
    "int8": replace(KERNEL, qk="int8"),
    "int8_blocks": replace(KERNEL, qk="int8", block=64),
    "int8_all": replace(KERNEL, qk="int8", block=64, smooths=True, rotates=True),
}
LENGTHS = 2048, 8192, 32768


def error(name: str, n: int, way: Way) -> float:
    """Root of the mean squared error over that of the answer to the original inputs."""
    inputs = drawn(name, n)
    wanted = exact(*inputs)
    squares = (attend(*inputs, way) - wanted) ** 2
    return float(np.sqrt(squares.mean() / (wanted**2).mean()))


def all_errors() -> dict[str, dict[str, dict[str, float]]]:
    """By inputs, way and number of keys; four digits."""
    return {
        name: {
            way: {str(n): float(f"{error(name, n, WAYS[way]):.4g}") for n in LENGTHS}
            for way in WAYS
        }
        for name in INPUTS
    }


def read() -> dict[str, dict[str, dict[str, float]]]:
    """The errors as they were written."""
    return json.loads(FIGURES.read_text("utf-8"))


def table(errors: dict[str, dict[str, dict[str, float]]]) -> str:
    """Rows of ways, columns of inputs, in percent; one table for each number of keys."""
    lines = []
    for n in LENGTHS:
        lines.append(f"{n} keys".ljust(20) + "".join(name.rjust(10) for name in errors))
        for way in WAYS:
            cells = (f"{100 * errors[name][way][str(n)]:.2f}".rjust(10) for name in errors)
            lines.append(way.ljust(20) + "".join(cells))
    return "\n".join(lines)
