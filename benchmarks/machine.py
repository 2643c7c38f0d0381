"""What a result was measured on: device, driver, clocks, versions, commit, date."""

from __future__ import annotations

import os
import platform
import sys
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from cupyattn.bench.machine import git_commit, guarded, run, smi, versions

_FOLDER = Path(__file__).resolve().parent
_IMPORT_PROBE = """
import sys, time
t = time.perf_counter()
import cupyattn
print((time.perf_counter() - t) * 1e3, *[m for m in ("cupy", "torch", "jax") if m in sys.modules])
"""


def _without_folders(arguments: list[str]) -> list[str]:
    """The arguments but for the folder of results, which concerns this machine alone."""
    kept, skip = [], False
    for argument in arguments:
        if skip:
            skip = False
        elif argument == "--out":
            skip = True
        elif not argument.startswith("--out="):
            kept.append(argument)
    return kept


def header(commit: str | None) -> dict[str, Any]:
    """Everything that names the machine and the software, each fact or the error that hid it."""
    return {
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "commit": commit or git_commit(_FOLDER),
        "arguments": _without_folders(sys.argv[1:]),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "device": guarded(_device),
        "smi": guarded(smi),
        "versions": versions(),
        "torch_cuda": guarded(_torch_cuda),
        "nvrtc": guarded(_nvrtc),
        "import_cupyattn": guarded(_import_probe),
    }


def gpu_state() -> dict[str, Any]:
    """SM clock (MHz), power (mW) and temperature (°C) now, without starting a process."""
    import torch

    reads = {
        "sm_mhz": torch.cuda.clock_rate,
        "power_mw": torch.cuda.power_draw,
        "celsius": torch.cuda.temperature,
    }
    return {name: guarded(read) for name, read in reads.items()}


def _device() -> dict[str, Any]:
    import torch

    result = torch.cuda.get_device_properties(0)
    return {
        "name": result.name,
        "capability": f"{result.major}.{result.minor}",
        "multiprocessors": result.multi_processor_count,
        "memory_bytes": result.total_memory,
        "l2_bytes": getattr(result, "L2_cache_size", None),
    }


def _torch_cuda() -> str | None:
    import torch

    return torch.version.cuda


def _nvrtc() -> str:
    from cupy_backends.cuda.libs import nvrtc  # type: ignore[import-not-found]

    return ".".join(map(str, nvrtc.getVersion()))


def _import_probe() -> dict[str, Any]:
    root = str(_FOLDER.parent)
    env = os.environ | {"PYTHONPATH": os.pathsep.join((root, os.environ.get("PYTHONPATH", "")))}
    runs = [run([sys.executable, "-c", _IMPORT_PROBE], env).split() for _ in range(5)]
    times = sorted(float(run[0]) for run in runs)
    return {"median_ms": times[len(times) // 2], "pulled_in": runs[0][1:]}
