"""`cupyattn info`: what was found on this machine."""

from __future__ import annotations

import argparse
import os
import platform
from typing import Any

from .. import jit
from .._version import __version__
from ..core import env
from ..core.cupy_module import cupy_module
from ..core.device import device_props
from ..core.folders import is_writable
from ..errors import CupyAttnError, DeviceError
from ..jit import cache
from ..launch.tiles import sm90

_MIB = 2**20


def add_parser(commands: Any) -> None:
    """Add the command to the parser's `commands`."""
    parser = commands.add_parser(
        "info", help="what was found: GPU, CuPy, NVRTC, kernel cache, environment"
    )
    parser.set_defaults(run=run)


def run(_: argparse.Namespace) -> int:
    """Print it; 0."""
    print("\n".join(info_lines()))
    return 0


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
    lines += _cache_lines()
    lines += ["environment"]
    for variable in env.ALL:
        value = os.environ.get(variable.name)
        shown = "not set" if value is None else f"= {value}"
        lines += [f"  {variable.name} {shown}: {variable.doc}"]
    return lines


def _cache_lines() -> list[str]:
    try:
        places = cache.places()
    except CupyAttnError as error:
        return [f"cache        {error}"]
    lines = []
    for place in places:
        count, nbytes = cache.contents(place)
        access = cache.problem(place) or ("writable" if is_writable(place.path) else "read-only")
        label = "fallback" if place.is_private else "cache"
        lines += [f"{label:12} {place.path} ({access}): {count} kernels, {nbytes / _MIB:.1f} MiB"]
    return lines or ["cache        none: no folder can be written"]


def _gpu_lines() -> list[str]:
    try:
        cupy = cupy_module()
    except DeviceError as error:
        return [
            f"CuPy         {str(error).removeprefix('CuPy ')}",
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
