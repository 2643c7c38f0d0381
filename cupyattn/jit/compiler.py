"""NVRTC: a program and an architecture in, a cubin and what ptxas said of it out. Needs no GPU."""

from __future__ import annotations

import functools
import re
import time
from typing import Any, NamedTuple

from ..core.cupy_module import cupy_module
from ..core.device import check_arch
from ..errors import CompileError, CupyAttnError
from .build_info import PtxasReport
from .source import Program

_OPTIONS = ("-std=c++17", "--ptxas-options=-v")

_ENTRY = re.compile(r"Compiling entry function '([^']+)'")
_USED = re.compile(r"Used (\d+) registers(.*)")
_SMEM = re.compile(r"(\d+) bytes smem")
_CMEM = re.compile(r"(\d+) bytes cmem")
_FRAME = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
_REMARK = re.compile(r"^.*(?:\(C\d{4}\)|\): warning\b|^ptxas warning\b).*$", re.MULTILINE)


class NvrtcFailure(CupyAttnError):
    """NVRTC refused the program; `str()` is its log. The caller turns it into a CompileError."""


class Compiled(NamedTuple):
    """A cubin, NVRTC's log of it, and the wall-clock seconds it took."""

    cubin: bytes
    log: str
    seconds: float


@functools.cache
def _nvrtc() -> Any:
    cupy_module()
    from cupy_backends.cuda.libs import nvrtc

    return nvrtc


@functools.cache
def nvrtc_version() -> str:
    """The version of the NVRTC that loads here, as "13.0". The first call loads it (0.2 s).

    Raises DeviceError without CuPy, CompileError without NVRTC.
    """
    nvrtc = _nvrtc()
    try:
        major, minor = nvrtc.getVersion()
    except (ImportError, OSError, RuntimeError) as error:
        raise CompileError(
            f"jit: the NVRTC library cannot be loaded ({error}); it comes with cupyattn[cuda12x], "
            "cupyattn[cuda13x] or the CUDA toolkit"
        ) from error
    return f"{major}.{minor}"


@functools.cache
def _without_its_cache() -> tuple[str, ...]:
    """NVRTC 13 keeps binaries of its own, and has no report of ptxas for those."""
    return ("--no-cache",) if int(nvrtc_version().partition(".")[0]) >= 13 else ()


def options(arch: str) -> tuple[str, ...]:
    """The compiler options that are part of the cache key: all but the include folder."""
    return (f"-arch={arch}", *_OPTIONS)


def require_arch(arch: str) -> None:
    """Raise unless NVRTC is here and compiles for `arch`.

    UnsupportedError for an architecture no kernel is written for, CompileError if NVRTC is missing
    or does not know it, DeviceError without CuPy.
    """
    check_arch(arch)
    version = nvrtc_version()
    if int(arch.removeprefix("sm_").removesuffix("a")) not in _nvrtc().getSupportedArchs():
        raise CompileError(
            f"arch: NVRTC {version} does not know {arch}; install a newer CUDA "
            "(12.8 or later for sm_100a and sm_120a)"
        )


def compile_cubin(program: Program, arch: str, more: tuple[str, ...] = ()) -> Compiled:
    """Compile `program` for `arch`, with `more` options.

    Raises NvrtcFailure with the log if the program is refused, and what `require_arch` raises.
    """
    require_arch(arch)
    nvrtc = _nvrtc()
    # NVRTC only shows this path; one that cannot be encoded is refused with the options below.
    shown = str(program.entry_path).encode(errors="backslashreplace").decode()
    handle = nvrtc.createProgram(program.text, shown, (), ())
    start = time.perf_counter()
    try:
        nvrtc.compileProgram(
            handle, (*options(arch), *_without_its_cache(), *more, f"-I{program.root}")
        )
        # CuPy drops the last byte of the image, and tools that read the ELF then call it invalid.
        cubin = nvrtc.getCUBIN(handle) + b"\0"
        return Compiled(cubin, nvrtc.getProgramLog(handle), time.perf_counter() - start)
    except UnicodeEncodeError as error:
        raise CompileError(
            f"kernels: the path {str(program.root)!a} has characters that this locale cannot "
            "encode; set LC_ALL=C.UTF-8, or CUPYATTN_KERNELS_DIR to a path in ASCII"
        ) from error
    except nvrtc.NVRTCError as error:
        raise NvrtcFailure(nvrtc.getProgramLog(handle).strip() or str(error)) from None
    finally:
        nvrtc.destroyProgram(handle)


def parse_log(log: str, symbol: str) -> PtxasReport:
    """Read the `--ptxas-options=-v` log of a program whose kernel is `symbol`.

    A log without the kernel's numbers gives zeros and a warning that says so, never silence.
    """
    frames = [tuple(map(int, match.groups())) for match in _FRAME.finditer(log)]
    warnings = [line.strip() for line in _REMARK.findall(log)]
    registers, rest = 0, ""
    entry = next((match for match in _ENTRY.finditer(log) if match[1] == symbol), None)
    used = _USED.search(log, entry.end()) if entry else None
    if used is None or not frames:
        warnings.append(f"warning: the ptxas report of {symbol} is not in the log")
    else:
        registers, rest = int(used[1]), used[2]
    return PtxasReport(
        registers=registers,
        stack_bytes=max((frame[0] for frame in frames), default=0),
        spill_store_bytes=sum(frame[1] for frame in frames),
        spill_load_bytes=sum(frame[2] for frame in frames),
        smem_bytes=sum(map(int, _SMEM.findall(rest))),
        cmem_bytes=sum(map(int, _CMEM.findall(rest))),
        warnings=tuple(warnings),
    )
