"""What a result was measured on: device, driver, versions, commit, date."""

from __future__ import annotations

import platform
import subprocess
from datetime import datetime, timezone
from importlib import metadata
from pathlib import Path
from typing import Any

from .. import jit
from .._version import __version__
from ..core.cupy_module import cupy_module
from ..core.device import device_props
from .timing import describe

PACKAGES = (
    *("torch", "cupy-cuda13x", "cupy-cuda12x", "numpy", "jax", "triton"),
    *("flashinfer-python", "flash-attn", "flash-attn-3"),
)
_SMI_FIELDS = (
    *("name", "driver_version", "clocks.sm", "clocks.mem", "clocks.max.sm", "power.draw"),
    *("power.limit", "temperature.gpu"),
)


def header(device_index: int = 0) -> dict[str, Any]:
    """Everything that names the machine and the software, each fact or the error that hid it."""
    return {
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "cupyattn": __version__,
        "commit": git_commit(Path(__file__).resolve().parent),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "device": guarded(lambda: _device(device_index)),
        "smi": guarded(lambda: smi(device_index)),
        "cuda_driver": guarded(lambda: cupy_module().cuda.runtime.driverGetVersion()),
        "nvrtc": guarded(jit.nvrtc_version),
        "versions": versions(),
    }


def git_commit(folder: Path) -> str:
    """The commit of the checkout that a folder is part of, marked if the tree differs from it.

    An installed package may lie inside some other project's checkout, whose commit is not ours.
    """
    try:
        run(["git", "-C", str(folder), "ls-files", "--error-unmatch", "__init__.py"])
        commit = run(["git", "-C", str(folder), "rev-parse", "HEAD"])
        status = ["git", "-C", str(folder), "status", "--porcelain", "--untracked-files=no"]
        return commit + ("+changes" if run(status) else "")
    except (OSError, subprocess.SubprocessError):
        return "unknown"


def smi(device_index: int = 0) -> dict[str, str]:
    """Name, driver, clocks (MHz), power (W) and temperature (°C) as nvidia-smi reads them now."""
    query = f"--query-gpu={','.join(_SMI_FIELDS)}"
    form = "--format=csv,noheader,nounits"
    line = run(["nvidia-smi", query, form, f"--id={device_index}"]).splitlines()[0]
    return dict(zip(_SMI_FIELDS, (part.strip() for part in line.split(",")), strict=True))


def versions() -> dict[str, str]:
    """The installed ones of PACKAGES."""
    result = {}
    for name in PACKAGES:
        try:
            result[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return result


def run(command: list[str], env: dict[str, str] | None = None) -> str:
    """What a command prints. Raises OSError or SubprocessError if it fails."""
    done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True, env=env)
    return done.stdout.strip()


def guarded(read: Any) -> Any:
    """What `read()` returns, or its error as {"error": text}."""
    try:
        return read()
    except Exception as error:
        return {"error": describe(error)}


def _device(index: int) -> dict[str, Any]:
    props = device_props(index)
    return {
        "name": props.name,
        "arch": props.arch,
        "multiprocessors": props.num_sms,
        "l2_bytes": props.l2_bytes,
    }
