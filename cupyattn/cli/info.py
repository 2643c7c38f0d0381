"""`cupyattn info`: what was found on this machine."""

from __future__ import annotations

import argparse
import json
import os
import platform
from collections.abc import Callable
from dataclasses import asdict
from importlib import metadata
from typing import Any

from .. import jit
from .._version import __version__, build_version
from ..choose.card import known
from ..core import env
from ..core.cupy_module import cupy_module
from ..core.device import DeviceProps, device_props
from ..core.folders import is_writable
from ..errors import CupyAttnError, DeviceError
from ..jit import cache
from ..launch.tiles import prefill_sm90

_MIB = 2**20
_FRAMEWORKS = "numpy", "torch", "jax"


def add_parser(commands: Any) -> None:
    """Add the command to the parser's `commands`."""
    parser = commands.add_parser(
        "info", help="what was found: GPU, CuPy, NVRTC, kernel cache, environment"
    )
    parser.add_argument("--json", action="store_true", help="the same as JSON, for programs")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Print it; 0."""
    result = facts()
    print(json.dumps(result, indent=2) if args.json else "\n".join(_lines(result)))
    return 0


def facts() -> dict[str, Any]:
    """What this machine offers, as plain values. Works without a GPU and without CuPy.

    A part that could not be found out has an `error` in its place: what was said.
    """
    return {
        "cupyattn": __version__,
        "build": build_version(),
        "python": platform.python_version(),
        "platform": f"{platform.system()} {platform.machine()}",
        "frameworks": {x: version(x) for x in _FRAMEWORKS},
        **_gpu_facts(),
        "nvrtc": _told(jit.nvrtc_version),
        "kernels": _told(lambda: str(jit.kernels_dir())),
        "hopper_head_dims": list(prefill_sm90.HEAD_DIMS),
        "cache": _cache_facts(),
        "environment": {x.name: os.environ.get(x.name) for x in env.ALL},
    }


def version(name: str) -> str | None:
    """The version of a package that is installed, without importing it."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _told(find: Callable[[], str]) -> Any:
    try:
        return find()
    except CupyAttnError as error:
        return {"error": str(error)}


def _gpu_facts() -> dict[str, Any]:
    try:
        cupy = cupy_module()
    except DeviceError as error:
        return {"cupy": {"error": str(error)}, "driver": None, "gpus": []}
    runtime = cupy.cuda.runtime
    try:
        count = runtime.getDeviceCount()
        driver = runtime.driverGetVersion()
    except runtime.CUDARuntimeError as error:
        return {"cupy": cupy.__version__, "driver": {"error": str(error)}, "gpus": []}
    name = f"CUDA {driver // 1000}.{driver % 1000 // 10}"
    return {"cupy": cupy.__version__, "driver": name, "gpus": [_gpu(i) for i in range(count)]}


def _gpu(index: int) -> dict[str, Any]:
    try:
        props = device_props(index)
    except CupyAttnError as error:
        return {"index": index, "error": str(error)}
    return {**asdict(props), "times": _times(props)}


def _times(props: DeviceProps) -> dict[str, Any]:
    """By which card's times plans choose here, and where they come from."""
    card, file = known(props)
    return {
        "card": card.scaled_from or card.name,
        "from": "tuned" if file else "scaled" if card.scaled_from else "shipped",
        "measured": card.source or None,
        "file": str(file) if file else None,
    }


def _cache_facts() -> Any:
    try:
        folders = cache.cache_folders()
    except CupyAttnError as error:
        return {"error": str(error)}
    result = []
    for folder in folders:
        count, nbytes = cache.contents(folder)
        access = cache.problem(folder) or ("writable" if is_writable(folder.path) else "read-only")
        kind = "fallback" if folder.is_private else "cache"
        result.append(
            {
                "kind": kind,
                "path": str(folder.path),
                "access": access,
                "kernels": count,
                "bytes": nbytes,
            }
        )
    return result


def _lines(result: dict[str, Any]) -> list[str]:
    """The facts for readers, a line each."""
    lines = [
        f"cupyattn     {result['build']}",
        f"Python       {result['python']}, {result['platform']}",
        f"frameworks   {_frameworks(result['frameworks'])}",
    ]
    lines += _gpu_lines(result)
    dims = ", ".join(result["hopper_head_dims"])
    lines += [
        f"Hopper       prefill kernels of its own for head dims {dims}",
        f"NVRTC        {_shown(result['nvrtc'])}",
        f"kernels      {_shown(result['kernels'])}",
    ]
    lines += _cache_lines(result["cache"])
    lines += ["environment"]
    for variable in env.ALL:
        value = result["environment"][variable.name]
        shown = "(not set)" if value is None else f"= {value}"
        lines += [f"  {variable.name:24} {shown:9}  {variable.doc}"]
    return lines


def _shown(value: Any) -> str:
    return str(value["error"] if isinstance(value, dict) else value)


def _frameworks(result: dict[str, str | None]) -> str:
    return ", ".join(f"{name} {known}" for name, known in result.items() if known) or "none"


def _gpu_lines(result: dict[str, Any]) -> list[str]:
    nothing = "NumPy and other CPU arrays run on the reference"
    cupy, driver = result["cupy"], result["driver"]
    lines = [f"CuPy         {_shown(cupy).removeprefix('CuPy ')}"]
    if isinstance(cupy, dict):
        return [*lines, f"GPU          none without CuPy: {nothing}"]
    if isinstance(driver, dict):
        return [*lines, f"GPU          none usable ({driver['error']})", f"             {nothing}"]
    lines += [f"driver       {driver}"]
    for gpu in result["gpus"]:
        lines += [f"GPU {gpu['index']}        {_gpu_line(gpu)}"]
        lines += [f"  times      {_times_line(gpu['times'])}"] if "times" in gpu else []
    return lines if result["gpus"] else [*lines, "GPU          none"]


def _gpu_line(gpu: dict[str, Any]) -> str:
    if "error" in gpu:
        return str(gpu["error"])
    return (
        f"{gpu['name']}: {gpu['arch']}, {gpu['num_sms']} SMs, {gpu['max_smem_per_block'] // 1024} "
        f"KiB of shared memory a block, {gpu['l2_bytes'] / _MIB:.0f} MiB of L2"
    )


def _times_line(times: dict[str, Any]) -> str:
    measured = times["measured"] or "by measurements that are not recorded"
    if times["from"] == "tuned":
        return f"measured on this machine: {measured}, in {times['file']}"
    if times["from"] == "shipped":
        return f"of {times['card']}: {measured}"
    return f"of {times['card']}, scaled to this card; `cupyattn tune` measures its own"


def _cache_lines(result: Any) -> list[str]:
    if isinstance(result, dict):
        return [f"cache        {result['error']}"]
    lines = []
    for folder in result:
        size = f"{folder['kernels']} kernels, {folder['bytes'] / _MIB:.1f} MiB"
        lines += [f"{folder['kind']:12} {folder['path']} ({folder['access']}): {size}"]
    return lines or ["cache        none: no folder can be written"]
