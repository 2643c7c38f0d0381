"""The cache of compiled kernels, shared by any number of processes: which folders it is in.

Kernels are looked for in the user's or the shipped folder first, then in a private temporary one,
and stored in the first that can be written. store.py has the rules within a folder.
"""

from __future__ import annotations

import contextlib
import os
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from ..core import env
from ..core.folders import temporary_folder, user_cache_folder
from ..errors import CompileError
from . import store
from .descriptors import Untrusted
from .store import Entry, Product, Store

_MIB = 2**20

_swept: set[Path] = set()
_said: set[Path] = set()


class CacheFolder(NamedTuple):
    """One folder of the cache.

    is_shared   other users may read and write it, and what they wrote is trusted
    is_private  it lies where anybody may make names, so it must belong to this user alone
    """

    path: Path
    is_shared: bool = False
    is_private: bool = False

    def opened(self, *, create: bool = False) -> contextlib.AbstractContextManager[Store]:
        return store.opened(
            self.path, shared=self.is_shared, private=self.is_private, create=create
        )


def cache_folders() -> list[CacheFolder]:
    """Where kernels are looked for and stored, in this order.

    Raises CompileError if CUPYATTN_CACHE_DIR is set to what is not an absolute path, and on
    Windows, which has no owners and descriptors of folders.
    """
    if not hasattr(os, "getuid"):
        raise CompileError(
            "kernels are compiled and kept on Linux only; CPU arrays need none of them"
        )
    result = []
    chosen = env.CACHE_DIR.get().strip()
    if chosen:
        path = Path(os.path.expanduser(chosen))
        if not path.is_absolute():
            raise CompileError(
                f"{env.CACHE_DIR.name}: got {chosen!r}; wanted an absolute path, or ~ for a home "
                "folder that there is"
            )
        result.append(CacheFolder(path, is_shared=env.CACHE_SHARED.flag()))
    elif (folder := user_cache_folder()) is not None:
        result.append(CacheFolder(folder, is_shared=env.CACHE_SHARED.flag()))
    with contextlib.suppress(OSError):  # there is no temporary folder: a wholly read-only machine
        result.append(CacheFolder(temporary_folder(), is_private=True))
    return result


def folders() -> list[Path]:
    """The paths of `cache_folders()`."""
    return [folder.path for folder in cache_folders()]


def contents(folder: CacheFolder) -> tuple[int, int]:
    """The number of kernels in `folder` and the bytes of their files; (0, 0) without a folder."""
    with contextlib.suppress(OSError):
        sizes = [entry.nbytes for entry in entries(folder)]
        return len(sizes), sum(sizes)
    return 0, 0


def problem(folder: CacheFolder) -> str:
    """Why kernels in `folder` cannot be used; empty if they can, or if there is no such folder."""
    try:
        with folder.opened():
            return ""
    except FileNotFoundError:
        return ""
    except OSError as error:
        return _reason(error)


def entries(folder: CacheFolder) -> list[store.Usage]:
    """The kernels in `folder`, the least recently used first; none without a folder."""
    try:
        with folder.opened() as opened:
            return opened.usage()
    except FileNotFoundError:
        return []


def verify(folder: CacheFolder) -> list[tuple[str, str]]:
    """The names of the kernels in `folder` that would not be used, each with what is wrong."""
    faults = []
    for entry in entries(folder):
        try:
            with folder.opened() as opened:
                opened.check(entry.name)
        except (OSError, ValueError) as error:
            faults.append((entry.name, str(error)))
    return faults


def clear(folder: CacheFolder) -> tuple[int, int]:
    """Remove all kernels in `folder`, and what failed compiles left; how many, and their bytes."""
    try:
        with folder.opened() as opened:
            return opened.clear()
    except FileNotFoundError:
        return 0, 0


def find(name: str) -> Entry | None:
    """The entry called `name` from the first folder that has it intact."""
    for folder in cache_folders():
        try:
            with folder.opened() as opened:
                entry = opened.read(name)
        except Untrusted as error:
            _say_unusable(folder, error)
            continue
        except OSError:
            continue
        if entry is not None:
            return entry
    return None


def add(name: str, make: Callable[[], Product]) -> Entry:
    """Store the product of `make` as the entry `name` in the first folder that can be written.

    `name` ends in `.<digest>`. `make` runs at most once, and not at all if another process stores
    the entry meanwhile. Raises what `make` raises, and CompileError if no folder can be written.
    """
    limit = _limit()
    product = None
    problems = []
    for folder in cache_folders():
        try:
            with folder.opened(create=True) as opened:
                _sweep_once(folder, opened)
                with opened.lock(name.rpartition(".")[2]):
                    entry = opened.read(name)
                    if entry is not None:
                        return entry
                    product = product or make()
                    entry = opened.write(name, product)
                if limit:
                    opened.evict(limit, keep=name)
                return entry
        except OSError as error:
            problems.append(f"{folder.path} ({_reason(error)})")
            _say_unusable(folder, error)
    raise CompileError(
        f"cache: no folder can be written: {'; '.join(problems)}; set {env.CACHE_DIR.name} to one "
        "that can"
    )


def keep_failure(name: str, source: str, log: str) -> Path | None:
    """Keep the source and log of a failed compile for reading; the source's path, or None."""
    for folder in cache_folders():
        with contextlib.suppress(OSError), folder.opened(create=True) as opened:
            return opened.keep_failure(name, source, log)
    return None


def _sweep_once(folder: CacheFolder, opened: Store) -> None:
    if folder.path not in _swept:
        _swept.add(folder.path)
        opened.sweep()


def _limit() -> int:
    value = env.CACHE_LIMIT.get().strip()
    if not value.isdecimal():
        raise CompileError(
            f"{env.CACHE_LIMIT.name}: got {value!r}; wanted a whole number of MiB, 0 for no limit"
        )
    return int(value) * _MIB


def _say_unusable(folder: CacheFolder, error: OSError) -> None:
    if folder.is_private or folder.path in _said:
        return
    _said.add(folder.path)
    remedy = f"Set {env.CACHE_DIR.name} to a folder that can be written"
    if isinstance(error, Untrusted):
        remedy += f", or {env.CACHE_SHARED.name}=1 to trust whoever can write this one"
    warnings.warn(
        f"cupyattn: the kernel cache {folder.path} cannot be used ({_reason(error)}); new kernels "
        f"go to {cache_folders()[-1].path}. {remedy}",
        RuntimeWarning,
        stacklevel=2,
    )


def _reason(error: OSError) -> str:
    return error.strerror or str(error)
