"""Builds kernels for the host: an entry file unchanged, its Config, and the emulator's runtime.

A kernel becomes a shared library, kept by the hash of all that goes into it in `host/` below the
kernel cache. In `ptx/` the twins beside this file are found first: that is the whole switch.
"""

from __future__ import annotations

import fcntl
import functools
import hashlib
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from cupyattn.jit import Config, cache
from cupyattn.jit.source import Program, kernels_dir

HERE = Path(__file__).resolve().parent
_INCLUDE, _RUNTIME = HERE / "include", HERE / "runtime"

_COMMON = (
    *("-std=c++20", "-fPIC", "-fno-exceptions", "-fno-rtti", "-fno-extern-tls-init"),
    "-fno-omit-frame-pointer",
    *("-fvisibility=hidden", "-Wall", "-Wextra", "-Wno-unknown-pragmas", "-Wno-unused-parameter"),
    # Positions in a kernel are 32-bit ints by design; comparing them with sizeof is fine.
    *("-Wno-sign-compare", "-Wno-attributes", "-Wno-maybe-uninitialized"),
)
_UNDEFINED = ("-fsanitize=undefined", "-fno-sanitize=vptr,object-size")
# The kinds that cost little to compile; the hooks check pointers themselves.
_ARITHMETIC = (
    "-fsanitize=shift,signed-integer-overflow,integer-divide-by-zero,bounds,bool,alignment",
)


@dataclass(frozen=True)
class Mode:
    """How kernels are built: flags of the kernel and of the runtime, and the size of a stack."""

    kernel: tuple[str, ...]
    runtime: tuple[str, ...] = ("-O2", "-g1")
    link: tuple[str, ...] = ()
    stack_bytes: int = 128 * 1024
    is_checked: bool = False


MODES = {
    "plain": Mode(("-O2", "-g1")),
    # Every load and store goes through runtime/hooks.cpp, and so does undefined behaviour. Local
    # variables start as garbage that is the same every time. Not optimised, for a kernel of a test
    # takes longer to compile than to run, here too.
    "checked": Mode(
        ("-O0", "-g1", "-fsanitize=thread", *_ARITHMETIC, "-ftrivial-auto-var-init=pattern"),
        stack_bytes=512 * 1024,
        is_checked=True,
    ),
    "asan": Mode(
        ("-O0", "-g1", "-fsanitize=address"),
        ("-O0", "-g1", "-fsanitize=address"),
        ("-fsanitize=address",),
        stack_bytes=512 * 1024,
    ),
    "ubsan": Mode(
        ("-O0", "-g1", *_UNDEFINED, "-fno-sanitize-recover=all"),
        ("-O0", "-g1"),
        link=("-fsanitize=undefined",),
        stack_bytes=256 * 1024,
    ),
    "coverage": Mode(("-O0", "--coverage"), link=("--coverage",), stack_bytes=512 * 1024),
    "debug": Mode(("-O0", "-g"), ("-O0", "-g"), stack_bytes=512 * 1024),
}

_FOOTER = """
template <typename Params>
void emulator_call(void (*kernel)(Params), const void* params) {{
  kernel(*static_cast<const Params*>(params));
}}
extern "C" void emulator_call_kernel(const void* params) {{ emulator_call(&{symbol}, params); }}
extern "C" const char* emulator_kernel_name() {{ return "{name}"; }}
"""


class BuildError(Exception):
    """The compiler refused a kernel; the text is what it said."""


@dataclass(frozen=True)
class Source:
    """A kernel to build: `text` is its own file, `path` where that is, `others` all it includes."""

    name: str
    path: Path
    text: str
    root: Path
    others: tuple[str, ...]
    config: Config | None = None

    @classmethod
    def of_kernel(cls, name: str, config: Config) -> Source:
        program = Program.read(name, config)
        own = f"entry/{name}.cu"
        others = tuple(x for pair in sorted(program.includes.items()) for x in pair)
        path, text = program.entry_path, program.includes[own]
        return cls(name, path, text, program.root, others, config)

    @classmethod
    def of_file(cls, path: Path) -> Source:
        """A file outside the kernels' folder, without a Config; it may include any of them."""
        root = kernels_dir()
        headers = sorted((root / "cupyattn").rglob("*.cuh"))
        others = tuple(header.read_text(encoding="utf-8") for header in headers)
        return cls(path.stem, path, path.read_text(encoding="utf-8"), root, others)


def build_kernel(name: str, config: Config, mode: str, arch: int = 900) -> Path:
    """`build` of a kernel. Its files are read once, for they stay as they are during a run."""
    return _build_kernel(name, config, mode, arch, kernels_dir())


@functools.cache
def _build_kernel(name: str, config: Config, mode: str, arch: int, root: Path) -> Path:
    return build(Source.of_kernel(name, config), mode, arch)


def build(source: Source, mode: str = "plain", arch: int = 900) -> Path:
    """The shared library of a kernel; `arch` is what it sees as __CUDA_ARCH__."""
    flags = (*_COMMON, *MODES[mode].kernel, f"-D__CUDA_ARCH__={arch}")
    config = "" if source.config is None else source.config.text
    parts = [*flags, source.name, config, str(source.path), str(source.root), source.text]
    digest = digest_of([*parts, *source.others, _runtime_digest(mode)])
    path = folder() / f"{source.name}.{mode}.{digest}" / "kernel.so"
    # gcov's files are named after the object: a name of its own keeps kernels apart.
    unit = f"{source.name}.{digest}"
    return once(path, lambda scratch: _compile(source, mode, flags, scratch, unit))


def folder() -> Path:
    """Where libraries are kept."""
    return cache.folders()[0] / "host"


def _compile(source: Source, mode: str, flags: Sequence[str], scratch: Path, name: str) -> None:
    head = ""
    if source.config is not None:
        head = '#define CUPYATTN_CONFIG\n#include "cupyattn/common/types.cuh"\n\n'
        head += source.config.text
    foot = _FOOTER.format(symbol=f"cupyattn_{source.name}", name=source.name)
    text = f'{head}\n#line 1 "{source.path}"\n{source.text}\n#line 1 "emulator"\n{foot}'
    unit, compiled = scratch / "kernel.cpp", scratch / f"{name}.o"
    unit.write_text(text, encoding="utf-8")
    include = ("-include", str(_prefix(tuple(flags))), f"-I{_INCLUDE}", f"-I{source.root}")
    _run(["g++", *flags, *include, "-c", str(unit), "-o", str(compiled)])
    _link(mode, [compiled, *_runtime(mode)], scratch)
    compiled.unlink()


@functools.cache
def _prefix(flags: tuple[str, ...]) -> Path:
    """emulator/cuda.h, read once for all kernels of these flags: a third of a kernel's time."""
    texts = (path.read_text(encoding="utf-8") for path in sorted(_INCLUDE.rglob("*.h")))
    place = folder() / f"prefix.{digest_of([compiler_version(), *flags, *texts])}"

    def make(scratch: Path) -> None:
        header = scratch / "prefix.h"
        header.write_text('#include "emulator/cuda.h"\n', encoding="utf-8")
        made = str(scratch / "prefix.h.gch")
        _run(["g++", *flags, f"-I{_INCLUDE}", "-x", "c++-header", str(header), "-o", made])

    return once(place / "prefix.h.gch", make).with_name("prefix.h")


def _link(mode: str, objects: Iterable[Path], scratch: Path) -> None:
    names = map(str, objects)
    link = ("-Wl,-Bsymbolic", *_linker(), *MODES[mode].link)
    _run(["g++", "-shared", *link, *names, "-o", str(scratch / "kernel.so")])


@functools.cache
def _linker() -> tuple[str, ...]:
    """gold takes a third of the time of the usual one, a twelfth of a kernel's."""
    return ("-fuse-ld=gold",) if shutil.which("ld.gold") else ()


@functools.cache
def _runtime_digest(mode: str) -> str:
    files = sorted([*_RUNTIME.iterdir(), *(p for p in _INCLUDE.rglob("*") if p.is_file())])
    texts = [part for path in files for part in (path.name, path.read_text(encoding="utf-8"))]
    return digest_of([compiler_version(), repr(MODES[mode]), *_COMMON, *_linker(), *texts])


@functools.cache
def _runtime(mode: str) -> tuple[Path, ...]:
    """The runtime's objects, in the folder of the hash of its sources."""
    place = folder() / f"runtime.{mode}.{_runtime_digest(mode)}"
    sources = sorted(_RUNTIME.glob("*.cpp"))
    made = once(place / "machine.o", lambda scratch: _compile_runtime(mode, sources, scratch))
    return tuple(made.with_name(f"{source.stem}.o") for source in sources)


def _compile_runtime(mode: str, sources: Sequence[Path], scratch: Path) -> None:
    chosen = MODES[mode]
    facts = (
        f"-DEMULATOR_STACK_BYTES={chosen.stack_bytes}",
        f"-DEMULATOR_CHECKED={int(chosen.is_checked)}",
    )
    for source in sources:
        target = str(scratch / f"{source.stem}.o")
        include = f"-I{_INCLUDE}"
        _run(["g++", *_COMMON, *chosen.runtime, *facts, include, "-c", str(source), "-o", target])


def once(path: Path, make: Callable[[Path], None]) -> Path:
    """`path`, after `make(scratch)` has filled its folder, unless it has been there before."""
    if path.exists():
        return path
    place = path.parent
    place.parent.mkdir(parents=True, exist_ok=True)
    # Locks stay: removing one would let a third process lock another file of the same name.
    with place.with_name(f"{place.name}.lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        if not path.exists():
            with tempfile.TemporaryDirectory(dir=place.parent) as scratch:
                inner = Path(scratch) / "made"
                inner.mkdir()
                make(inner)
                inner.rename(place)
    return path


def _run(command: Sequence[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise BuildError(f"{' '.join(command)}\n{done.stderr[-6000:]}")


@functools.cache
def compiler_version() -> str:
    return subprocess.run(["g++", "--version"], capture_output=True, text=True, check=True).stdout


def digest_of(parts: Iterable[str]) -> str:
    hasher = hashlib.sha256()
    for part in parts:
        hasher.update(b"%d:" % len(part.encode()) + part.encode())
    return hasher.hexdigest()[:24]
