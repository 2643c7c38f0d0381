"""Strings to a cubin to a kernel. Knows nothing about attention.

`build(name, config, arch)` needs no GPU; `load(name, config, device_index, arch)` puts the result
on a device. A kernel `name` is the file kernels/entry/<name>.cu with the symbol `cupyattn_<name>`.
"""

from __future__ import annotations

from .build_info import BuildInfo as BuildInfo
from .build_info import PtxasReport as PtxasReport
from .compiler import nvrtc_version as nvrtc_version
from .module import Build as Build
from .module import Kernel as Kernel
from .module import build as build
from .module import load as load
from .source import Config as Config
from .source import Constant as Constant
from .source import Members as Members
from .source import kernels_dir as kernels_dir
