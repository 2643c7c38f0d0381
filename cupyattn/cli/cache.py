"""`cupyattn cache`: the folders of compiled kernels."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from ..core import env
from ..core.folders import is_writable
from ..errors import CupyAttnError
from ..jit import cache
from ..jit.cache import CacheFolder

_MIB = 2**20


def add_parser(commands: Any) -> None:
    """Add the command to the parser's `commands`."""
    parser = commands.add_parser(
        "cache",
        help="list, verify or clear the compiled kernels, or tell their folder",
        description="Look after compiled kernels. Nothing but what cupyattn made is ever touched.",
    )
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    for name, does, text in (
        ("list", _list, "the kernels, the least recently used first"),
        ("verify", _verify, "the kernels that would not be used, and what is wrong with them"),
        ("clear", _clear, "remove all kernels"),
        ("path", None, "the folder that new kernels go to"),
    ):
        action = actions.add_parser(name, help=text)
        action.add_argument(
            "--cache-dir",
            type=Path,
            help=f"this folder alone (default: {env.CACHE_DIR.name}, and the temporary one that "
            "stands in for it)",
        )
        action.set_defaults(run=run, does=does)


def run(args: argparse.Namespace) -> int:
    """Do it; 1 if a kernel is damaged, 2 if a folder cannot be used."""
    try:
        folders = cache.cache_folders()
    except CupyAttnError as error:
        return _fail(str(error))
    if args.cache_dir is not None:
        path = args.cache_dir.expanduser().absolute()
        folders = [CacheFolder(path, is_shared=env.CACHE_SHARED.flag())]
    if args.does is None:
        return _print_path(folders)
    return max((_do(args.does, folder) for folder in folders), default=0)


def _do(does: Callable[[CacheFolder], int], folder: CacheFolder) -> int:
    try:
        return does(folder)
    except BrokenPipeError:
        raise
    except OSError as error:
        return _fail(f"{folder.path}: {error.strerror or error}")


def _fail(message: str) -> int:
    print(f"cupyattn cache: {message}", file=sys.stderr)
    return 2


def _list(folder: CacheFolder) -> int:
    entries = cache.entries(folder)
    size = sum(entry.nbytes for entry in entries) / _MIB
    print(f"{folder.path}: {len(entries)} kernels, {size:.1f} MiB")
    for entry in entries:
        used = time.strftime("%Y-%m-%d", time.localtime(entry.last_used))
        print(f"  {used} {entry.nbytes / 1024:7.0f} KiB  {entry.name}")
    return 0


def _verify(folder: CacheFolder) -> int:
    count, faults = len(cache.entries(folder)), cache.verify(folder)
    print(f"{folder.path}: {count - len(faults)} of {count} kernels are as they were written")
    for name, fault in faults:
        print(f"  {name}: {fault}")
    return 1 if faults else 0


def _clear(folder: CacheFolder) -> int:
    count, size = cache.clear(folder)
    print(f"{folder.path}: removed {count} kernels, {size / _MIB:.1f} MiB")
    return 0


def _print_path(folders: Sequence[CacheFolder]) -> int:
    for folder in folders:
        if is_writable(folder.path) and not cache.problem(folder):
            print(folder.path)
            return 0
    return _fail("no folder can be written")
