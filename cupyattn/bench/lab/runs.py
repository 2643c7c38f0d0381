"""Times of the notebooks: measured on this GPU, or what one of ours took.

A notebook measures in a function that it gives to `measured`. With a GPU the function runs. Without
one the notebook shows what the function returned in the run that the package brings
(`measured/NAME.json`). `SAVE` names a folder to which a run writes such files.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

from .. import machine
from ..clock import Clock
from ..timing import Timing, measure, random_order
from . import batches

KEPT = Path(__file__).resolve().parent / "measured"
SAVE = "CUPYATTN_NOTEBOOKS_SAVE"


def measured(name: str, run: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """What `run()` returns on this GPU, or returned in the run that the package brings.

    Empty where there is neither. It must be plain JSON. The key "on" is added: the GPU, the date,
    the version and the commit.
    """
    gpu, path = batches.GPU, KEPT / f"{name}.json"
    if not gpu and not path.exists():
        print("Not measured: there is no GPU here, and the package brings no run of this.")
        return {}
    if not gpu:
        return measured_before(name)
    result = machine.header(0)
    on = f"{gpu.name}, {result['date'][:10]}, cupyattn {result['cupyattn']}"
    commit = os.environ.get("CUPYATTN_BENCH_COMMIT") or result["commit"]
    text = json.dumps({"on": on if commit == "unknown" else f"{on} ({commit[:7]})", **run()})
    data: dict[str, Any] = json.loads(text)  # as another run will read it: keys are strings
    if folder := os.environ.get(SAVE):
        Path(folder).mkdir(parents=True, exist_ok=True)
        (Path(folder) / path.name).write_text(text + "\n", "utf-8")
    print(f"Measured on {data['on']}")
    return data


def measured_before(name: str) -> dict[str, Any]:
    """What the package brings of a run, with or without a GPU here."""
    kept: dict[str, Any] = json.loads((KEPT / f"{name}.json").read_text("utf-8"))
    print(f"Measured before, on {kept['on']}")
    return kept


@cache
def peers(name: str) -> dict[str, Any]:
    """What the package brings of a run beside other libraries.

    name: of the library that the run had beside cupyattn and cuDNN: "fa3" or "flashinfer".
    Returns "on" (GPU, date, commit), "ceilings" ("tflops" of a large product, "gbps" of a copy)
    and "rows": {case: {library: {"us", "tflops", "gbps"}}}, of each library its fastest form.
    Source: `python -m benchmarks.notebooks --rows NAME FOLDER`.
    """
    data: dict[str, Any] = json.loads((KEPT / f"rows_{name}.json").read_text("utf-8"))
    return data


def beside(name: str, case: str) -> dict[str, dict[str, float]]:
    """The rows of one case in the run `peers(name)`: {library: {"us", "tflops", "gbps"}}."""
    rows: dict[str, dict[str, float]] = peers(name)["rows"][case]
    return rows


def clock() -> Clock:
    """The stopwatch of this GPU, its clocks settled."""
    built = Clock()
    built.preheat()
    return built


def times(
    calls: dict[str, Callable[[], Any]], watch: Clock | None = None, rounds: int = 8
) -> dict[str, float]:
    """Median µs of each call: cold L2, other code before it, events around it, random order."""
    for call in calls.values():
        call()  # compiles
    order = random_order(0)
    result = measure(list(calls.values()), watch or clock(), rounds, math.inf, order=order)
    return {name: _median(timing) for name, timing in zip(calls, result, strict=True)}


def _median(timing: Timing) -> float:
    if timing.error:
        raise RuntimeError(timing.error)
    return round(timing.percentile(50), 2)
