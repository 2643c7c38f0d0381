"""Strings to a cubin to a kernel. Knows nothing about attention.

`build(name, config, arch)` needs no GPU; `load(name, config, device_index, arch)` puts the result
on a device. A kernel `name` is the file kernels/entry/<name>.cu with the symbol `cupyattn_<name>`.
"""

from __future__ import annotations

from .compiler import PtxasReport, nvrtc_version
from .module import Build, BuildInfo, Kernel, build, load
from .source import Config, kernels_dir

__all__ = [
    "Build",
    "BuildInfo",
    "Config",
    "Kernel",
    "PtxasReport",
    "build",
    "kernels_dir",
    "load",
    "nvrtc_version",
]
