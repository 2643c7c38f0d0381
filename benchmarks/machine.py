"""What a result was measured on: device, driver, clocks, versions, commit, date."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from datetime import datetime, timezone
from importlib import metadata
from pathlib import Path
from typing import Any

from .timing import describe

_PACKAGES = (
    "torch", "cupy-cuda13x", "cupy-cuda12x", "numpy", "jax", "flashinfer-python", "triton",
)  # fmt: skip
_SMI_FIELDS = (
    "name", "driver_version", "clocks.sm", "clocks.mem", "clocks.max.sm", "power.draw",
    "power.limit", "temperature.gpu",
)  # fmt: skip
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
        "commit": commit or git_commit(),
        "arguments": _without_folders(sys.argv[1:]),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "device": _guarded(_device),
        "smi": _guarded(smi),
        "versions": {name: version for name in _PACKAGES if (version := _version(name))},
        "torch_cuda": _guarded(_torch_cuda),
        "nvrtc": _guarded(_nvrtc),
        "import_cupyattn": _guarded(_import_probe),
    }


def git_commit() -> str:
    """The commit of the checkout that this file lies in, marked if the tree differs from it."""
    root = Path(__file__).resolve().parent
    try:
        commit = _run(["git", "-C", str(root), "rev-parse", "HEAD"])
        dirty = _run(["git", "-C", str(root), "status", "--porcelain", "--untracked-files=no"])
    except (OSError, subprocess.SubprocessError):
        return "unknown"
    return commit + ("+changes" if dirty else "")


def smi() -> dict[str, str]:
    """Name, driver, clocks (MHz), power (W) and temperature (°C) as nvidia-smi reads them now."""
    query = f"--query-gpu={','.join(_SMI_FIELDS)}"
    line = _run(["nvidia-smi", query, "--format=csv,noheader,nounits", "--id=0"]).splitlines()[0]
    return dict(zip(_SMI_FIELDS, (part.strip() for part in line.split(",")), strict=True))


def gpu_state() -> dict[str, Any]:
    """SM clock (MHz), power (mW) and temperature (°C) now, without starting a process."""
    import torch

    reads = {
        "sm_mhz": torch.cuda.clock_rate,
        "power_mw": torch.cuda.power_draw,
        "celsius": torch.cuda.temperature,
    }
    return {name: _guarded(read) for name, read in reads.items()}


def _run(command: list[str], env: dict[str, str] | None = None) -> str:
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=30, check=True, env=env
    )  # fmt: skip
    return done.stdout.strip()


def _guarded(read: Any) -> Any:
    try:
        return read()
    except Exception as error:
        return {"error": describe(error)}


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _device() -> dict[str, Any]:
    import torch

    found = torch.cuda.get_device_properties(0)
    return {
        "name": found.name,
        "capability": f"{found.major}.{found.minor}",
        "multiprocessors": found.multi_processor_count,
        "memory_bytes": found.total_memory,
        "l2_bytes": getattr(found, "L2_cache_size", None),
    }


def _torch_cuda() -> str | None:
    import torch

    return torch.version.cuda


def _nvrtc() -> str:
    from cupy_backends.cuda.libs import nvrtc  # type: ignore[import-not-found]

    return ".".join(map(str, nvrtc.getVersion()))


def _import_probe() -> dict[str, Any]:
    root = str(Path(__file__).resolve().parent.parent)
    env = os.environ | {"PYTHONPATH": os.pathsep.join((root, os.environ.get("PYTHONPATH", "")))}
    runs = [_run([sys.executable, "-c", _IMPORT_PROBE], env).split() for _ in range(5)]
    times = sorted(float(run[0]) for run in runs)
    return {"median_ms": times[len(times) // 2], "pulled_in": runs[0][1:]}
