"""The content-addressed folder of compiled kernels, shared by any number of processes.

An entry is a folder `<name>.<arch>.<tag>.<digest>` with kernel.cu, kernel.cubin and build.json. It
is written under `.work/` and renamed into place, so an entry exists whole or not at all. A lock per
digest keeps two processes from compiling the same kernel; correctness never depends on the lock.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import hashlib
import json
import os
import shutil
import stat
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..core import env
from ..errors import CompileError

SOURCE, CUBIN, BUILD = "kernel.cu", "kernel.cubin", "build.json"
_WORK, _FAILED = ".work", ".failed"
_ELF = b"\x7fELF"

_swept: set[Path] = set()
_said: set[Path] = set()


@dataclass(frozen=True, slots=True)
class Entry:
    """One compiled kernel in the cache: its folder, its build.json, and whether it was there."""

    folder: Path
    build: dict[str, Any]
    cached: bool

    @property
    def cubin(self) -> Path:
        return self.folder / CUBIN


class Product:
    """What a compile hands to the cache: the source, the cubin, and the facts for build.json."""

    def __init__(self, source: str, cubin: bytes, facts: Mapping[str, Any]) -> None:
        size = {"cubin_bytes": len(cubin), "cubin_sha256": hashlib.sha256(cubin).hexdigest()}
        self.build = {**facts, **size}
        # build.json goes last: it vouches for the files before it.
        self.files = {
            SOURCE: source.encode(),
            CUBIN: cubin,
            BUILD: (json.dumps(self.build, indent=1) + "\n").encode(),
        }


def folders() -> list[Path]:
    """Where kernels are looked for, and stored if the folder can be written: the user's or the
    shipped cache first, then a private folder for when that one is read-only."""
    chosen = env.CACHE_DIR.get()
    found = []
    with contextlib.suppress(RuntimeError):  # there is no home folder
        found.append(Path(chosen or "~/.cache/cupyattn").expanduser().absolute())
    with contextlib.suppress(OSError):  # there is no temporary folder: a wholly read-only machine
        found.append(_fallback())
    return found


def _fallback() -> Path:
    """<tmp>/cupyattn-<uid>, or a folder of this process alone if somebody else owns that name."""
    folder = Path(tempfile.gettempdir()) / f"cupyattn-{os.getuid()}"
    try:
        found = folder.lstat()
    except OSError:
        return folder
    # Anyone may create names in a shared temporary folder, and a kernel from there would be run.
    private = stat.S_ISDIR(found.st_mode) and not found.st_mode & 0o022
    return folder if private and found.st_uid == os.getuid() else _private_folder()


@functools.cache
def _private_folder() -> Path:
    return Path(tempfile.mkdtemp(prefix="cupyattn-"))


def is_writable(folder: Path) -> bool:
    """Whether kernels could be stored in `folder`, which need not exist; nothing is created."""
    while not os.path.lexists(folder) and folder != folder.parent:
        folder = folder.parent
    return folder.is_dir() and os.access(folder, os.W_OK | os.X_OK)


def contents(folder: Path) -> tuple[int, int]:
    """The number of kernels in `folder` and the bytes of their cubins; (0, 0) without a folder."""
    sizes = [path.stat().st_size for path in folder.glob(f"*/{CUBIN}")]
    return len(sizes), sum(sizes)


def find(name: str) -> Entry | None:
    """The entry called `name` from the first folder that has it intact."""
    for folder in folders():
        entry = _read(folder / name)
        if entry is not None:
            return entry
    return None


def add(name: str, make: Callable[[], Product]) -> Entry:
    """Store the product of `make` as the entry `name` in the first folder that can be written.

    `name` ends in `.<digest>`. `make` runs at most once, and not at all if another process stores
    the entry meanwhile. Raises what `make` raises, and CompileError if no folder can be written.
    """
    digest = name.rpartition(".")[2]
    product = None
    problems = []
    for folder in folders():
        try:
            _prepare(folder)
            with _lock(folder, digest):
                entry = _read(folder / name)
                if entry is not None:
                    return entry
                product = product or make()
                return _store(folder, name, digest, product)
        except OSError as error:
            reason = error.strerror or str(error)
            problems.append(f"{folder} ({reason})")
            _say_fallback(folder, reason)
    raise CompileError(
        f"cache: no folder can be written: {'; '.join(problems)}; set {env.CACHE_DIR.name} to one "
        "that can"
    )


def keep_failure(name: str, source: str, log: str) -> Path | None:
    """Keep the source and log of a failed compile for reading; the source's path, or None."""
    for folder in folders():
        with contextlib.suppress(OSError):
            place = folder / _FAILED / name
            _mkdir(place)
            (place / "nvrtc.log").write_text(log, encoding="utf-8")
            (place / SOURCE).write_text(source, encoding="utf-8")
            return place / SOURCE
    return None


def _say_fallback(folder: Path, reason: str) -> None:
    fallback = folders()[-1]
    if folder == fallback or folder in _said:
        return
    _said.add(folder)
    warnings.warn(
        f"cupyattn: the kernel cache {folder} cannot be written ({reason}); new kernels go to "
        f"{fallback}. Set {env.CACHE_DIR.name} to a folder that can be written",
        RuntimeWarning,
        stacklevel=2,
    )


def _read(folder: Path) -> Entry | None:
    """The entry in `folder` if it is there and its cubin is the one that was written."""
    try:
        build = json.loads((folder / BUILD).read_bytes())
        cubin = (folder / CUBIN).read_bytes()
        intact = (
            cubin.startswith(_ELF)
            and len(cubin) == build["cubin_bytes"]
            and hashlib.sha256(cubin).hexdigest() == build["cubin_sha256"]
        )
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return Entry(folder, build, cached=True) if intact else None


def _store(folder: Path, name: str, digest: str, product: Product) -> Entry:
    """Write the entry beside its final place and rename it there, unless another process won."""
    final = folder / name
    temporary = _temporary(folder, digest)
    try:
        for file, data in product.files.items():
            _write(temporary / file, data)
        try:
            temporary.rename(final)
        except OSError:
            winner = _read(final)
            if winner is not None:
                return winner
            if not os.path.lexists(final):
                raise
            # A damaged entry is in the way: move it aside, which is atomic too.
            broken = _temporary(folder, digest)
            final.rename(broken / "broken")
            shutil.rmtree(broken, ignore_errors=True)
            temporary.rename(final)
        return Entry(final, product.build, cached=False)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _temporary(folder: Path, digest: str) -> Path:
    # Not mkdtemp: its mode 0700 would survive the rename and hide a shipped cache from its users.
    path = folder / _WORK / f"{digest}-{os.getpid()}-{os.urandom(4).hex()}"
    path.mkdir()
    return path


def _write(path: Path, data: bytes) -> None:
    with path.open("xb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def _mkdir(folder: Path) -> None:
    with contextlib.suppress(OSError):
        fallback = _fallback()
        if folder.is_relative_to(fallback):
            fallback.mkdir(mode=0o700, exist_ok=True)
    folder.mkdir(parents=True, exist_ok=True)


def _prepare(folder: Path) -> None:
    _mkdir(folder / _WORK)
    if folder not in _swept:
        _swept.add(folder)
        _sweep(folder)


def _sweep(folder: Path) -> None:
    """Remove what killed processes left: every digest in `.work` whose lock nobody holds."""
    work = folder / _WORK
    leftovers = {path.name.split("-")[0].removesuffix(".lock") for path in work.iterdir()}
    for digest in leftovers:
        with _lock(folder, digest, wait=False) as held:
            if held:
                for path in work.glob(f"{digest}-*"):
                    shutil.rmtree(path, ignore_errors=True)


@contextlib.contextmanager
def _lock(folder: Path, digest: str, *, wait: bool = True) -> Iterator[bool]:
    """Hold the lock of `digest`; yields False if it is not held. The kernel frees a dead holder's.

    Filesystems without flock yield False: then two processes may compile the same kernel, and the
    rename decides.
    """
    path = folder / _WORK / f"{digest}.lock"
    descriptor = _acquire(path, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
    try:
        yield descriptor is not None
    finally:
        if descriptor is not None:
            with contextlib.suppress(OSError):
                path.unlink()
            os.close(descriptor)


def _acquire(path: Path, operation: int) -> int | None:
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            fcntl.flock(descriptor, operation)
        except OSError:  # held by another, or no locks on this filesystem
            os.close(descriptor)
            return None
        # The holder before us removed the file: whoever comes next would lock another one.
        try:
            if os.path.samestat(os.fstat(descriptor), path.stat()):
                return descriptor
        except FileNotFoundError:
            pass
        os.close(descriptor)
