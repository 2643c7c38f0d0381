"""What the JIT hands out: a `Build` (a cubin on disk) and a `Kernel` (one loaded on a device)."""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import threading
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..core import env
from ..core.cupy_module import cupy_module
from ..core.device import check_arch
from ..errors import CompileError, DeviceError, UnsupportedError
from . import cache, compiler
from .build_info import BuildInfo
from .source import SCHEMA, Config, Constant, Program

ConfigLike = Mapping[str, Constant]

_LOG = logging.getLogger("cupyattn")

# What a launch gets without asking the driver for more.
_DEFAULT_SHARED_BYTES = 48 * 1024


@dataclass(frozen=True, slots=True)
class Build:
    """A compiled kernel: `path` of its kernel.cubin, the `symbol` in it, and the facts."""

    path: Path
    symbol: str
    info: BuildInfo


class Kernel:
    """A kernel loaded on one device.

    `function` is the integer handle that `cupy.cuda.driver.launchKernel` takes; it stays valid as
    long as this object lives.
    """

    __slots__ = ("_raw", "_shared_bytes", "build", "device_index", "function", "symbol")

    def __init__(self, build: Build, cubin: bytes, device_index: int) -> None:
        cupy = cupy_module()
        self.build = build
        self.symbol = build.symbol
        self.device_index = device_index
        self._shared_bytes = _DEFAULT_SHARED_BYTES
        with cupy.cuda.Device(device_index), _as_file(cubin) as path:
            try:
                self._raw = cupy.RawModule(path=path).get_function(build.symbol)
                self.function: int = self._raw.kernel.ptr
            except cupy.cuda.driver.CUDADriverError as error:
                raise DeviceError(
                    f"kernel {build.info.name}: the driver of GPU {device_index} refuses "
                    f"{build.path}, made for {build.info.arch} by NVRTC {build.info.nvrtc} "
                    f"({error}); a driver older than that CUDA needs an update"
                ) from error

    def set_shared_memory(self, nbytes: int) -> None:
        """Allow launches with `nbytes` of dynamic shared memory a block. Nothing to do up to 48 KB.

        Call it before a CUDA graph capture. Raises UnsupportedError if the device has less.
        """
        if nbytes <= self._shared_bytes:
            return
        cupy = cupy_module()
        with cupy.cuda.Device(self.device_index):
            try:
                self._raw.max_dynamic_shared_size_bytes = nbytes
            except cupy.cuda.driver.CUDADriverError as error:
                raise UnsupportedError(
                    f"kernel {self.build.info.name}: {nbytes} bytes of shared memory a block are "
                    f"more than GPU {self.device_index} allows ({error})"
                ) from error
        self._shared_bytes = nbytes


def build(name: str, config: ConfigLike, arch: str) -> Build:
    """The cubin of kernels/entry/<name>.cu for `config` and `arch`, from the cache or compiled now.

    Needs no GPU. Raises UnsupportedError for an unknown arch, DeviceError without CuPy, and
    CompileError if the source is refused, or is not in the cache while CUPYATTN_NO_COMPILE is set.
    """
    return _build(name, config if isinstance(config, Config) else Config(config), arch)[0]


def load(name: str, config: ConfigLike, device_index: int, arch: str) -> Kernel:
    """`build`, loaded on CUDA device `device_index`; a dict look-up from the second call on.

    Pass a `Config` made once: it hashes in no time, where a dict is converted on every call. The
    sources and the environment are read on the first call only. Raises what `build` raises, and
    DeviceError if the driver refuses the cubin.
    """
    try:
        return _kernels[name, config, device_index, arch]
    except (KeyError, TypeError):
        pass
    config = config if isinstance(config, Config) else Config(config)
    key = (name, config, device_index, arch)
    with _load_lock:
        if key not in _kernels:
            build, cubin = _build(name, config, arch)
            _kernels[key] = Kernel(build, cubin, device_index)
            _LOG.info("cupyattn: kernel %s loaded on device %d: %r", name, device_index, config)
        return _kernels[key]


_kernels: dict[tuple[str, ConfigLike, int, str], Kernel] = {}
_load_lock = threading.Lock()
_reported: set[Path] = set()


class _SourcesChanged(Exception):
    """The source files changed while they were compiled, so the cubin belongs to no known text."""


def _build(name: str, config: Config, arch: str) -> tuple[Build, bytes]:
    """The build, and the very bytes that were checked to be its cubin."""
    check_arch(arch)
    for _ in range(5):
        program = Program.read(name, config)
        try:
            entry = _entry(program, arch)
        except _SourcesChanged:
            continue
        build = Build(entry.path, program.symbol, entry.info)
        _report(build)
        return build, entry.cubin
    raise CompileError(f"kernel {name}: its sources change faster than it can be compiled")


def _entry(program: Program, arch: str) -> cache.Entry:
    nvrtc = compiler.nvrtc_version()
    digest = program.digest(compiler.options(arch), nvrtc, arch)
    tag = f".{program.config.tag}" if program.config.tag else ""
    name = f"{program.name}.{arch}{tag}.{digest}"
    entry = cache.find(name)
    if entry is None and env.NO_COMPILE.flag():
        raise CompileError(_missing(program, arch, nvrtc))
    return entry or cache.add(name, lambda: _compile(program, arch, nvrtc, name))


_loads = itertools.count(1)


@contextlib.contextmanager
def _as_file(cubin: bytes) -> Iterator[str]:
    """A path to `cubin` in memory. On disk the file could have changed since it was checked.

    RawModule keeps what it has loaded by its path, and descriptors are used again. So the path
    spells the number of this load between its slashes, where it means nothing.
    """
    with os.fdopen(os.memfd_create("cupyattn", os.MFD_CLOEXEC), "wb", buffering=0) as file:
        file.write(cubin)
        spelled = format(next(_loads), "b").replace("0", "/").replace("1", "./")
        yield f"/proc/self/fd/{spelled}{file.fileno()}"


def _compile(program: Program, arch: str, nvrtc: str, name: str) -> cache.Product:
    import resource

    try:
        compiled = compiler.compile_cubin(program, arch)
    except compiler.NvrtcFailure as failure:
        kept = cache.keep_failure(name, program.text, str(failure))
        raise CompileError(
            f"kernel {program.name}: NVRTC {nvrtc} refuses it for {arch}; the source is in "
            f"{kept or 'no folder, since none can be written'}\n{failure}"
        ) from None
    if Program.read(program.name, program.config).includes != program.includes:
        raise _SourcesChanged
    # A warning, since only those are seen by default: the call took seconds, and later ones do not.
    _LOG.warning(
        "cupyattn: kernel %s compiled for %s in %.1f s; kept for later calls",
        program.name,
        arch,
        compiled.seconds,
    )
    facts: dict[str, Any] = {
        "schema": SCHEMA,
        "name": program.name,
        "symbol": program.symbol,
        "arch": arch,
        "config": program.config.as_json(),
        "options": compiler.options(arch),
        "nvrtc": nvrtc,
        "sources": sorted(program.includes),
        "compile_seconds": round(compiled.seconds, 4),
        "process_peak_rss_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "ptxas": compiler.parse_log(compiled.log, program.symbol).as_json(),
    }
    return cache.Product(program.text, compiled.cubin, facts)


def _missing(program: Program, arch: str, nvrtc: str) -> str:
    looked = [(folder.path, cache.problem(folder)) for folder in cache.cache_folders()]
    where = " and ".join(f"{path} ({why})" if why else str(path) for path, why in looked)
    return (
        f"kernel {program.name}: {env.NO_COMPILE.name} is set and no copy for {arch} (NVRTC "
        f"{nvrtc}) with {program.config!r} is in {where}; run `cupyattn compile --arch {arch}` "
        f"(--help: for other dtypes, head dims and options than the usual) with the same "
        f"{env.CACHE_DIR.name}, or unset {env.NO_COMPILE.name}"
    )


def _report(built: Build) -> None:
    """Warn, once per kernel and process, of a binary that is slower than its source."""
    ptxas = built.info.ptxas
    if built.path in _reported or not (ptxas.spills or ptxas.lost_performance):
        return
    _reported.add(built.path)
    notes = list(ptxas.lost_performance)
    if ptxas.spills:
        notes.insert(
            0,
            f"{ptxas.registers} registers were too few: it spills {ptxas.spill_store_bytes} bytes "
            f"and reads {ptxas.spill_load_bytes} back",
        )
    warnings.warn(
        f"cupyattn: kernel {built.info.name} for {built.info.arch} ({built.path.parent.name}) will "
        f"be slow: {'; '.join(notes)}",
        RuntimeWarning,
        stacklevel=3,
    )
