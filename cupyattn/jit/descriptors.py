"""Files and folders by descriptor: no link is followed, and what is checked is what is used.

A path can come to mean another file between a check and its use, where others may write a folder
above it. A descriptor cannot. `Untrusted` is raised for whatever another user could have written.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Iterable, Iterator

_OPEN_FOLDER = getattr(os, "O_DIRECTORY", 0) | getattr(os, "O_CLOEXEC", 0)
_NOFOLLOW = getattr(os, "O_NOFOLLOW", 0)
# A pipe planted in place of a file would block whoever opens it.
_OPEN_FILE = _NOFOLLOW | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_NONBLOCK", 0)
_WRITABLE_BY_OTHERS = 0o022


class Untrusted(OSError):
    """Another user owns a file or folder, or may write it."""

    def __init__(self, reason: str) -> None:
        super().__init__(errno.EPERM, reason)


@contextlib.contextmanager
def folder(
    name: str, parent: int | None = None, *, follow: bool = False, trusting: bool = False
) -> Iterator[int]:
    """The descriptor of the folder `name` in the folder `parent`, for a `with` statement.

    Raises Untrusted unless this user or root owns the folder; `trusting` leaves that out.
    """
    flags = _OPEN_FOLDER | (0 if follow else _NOFOLLOW)
    descriptor = os.open(name, os.O_RDONLY | flags, dir_fd=parent)
    try:
        if not trusting:
            check_owner(os.fstat(descriptor))
        yield descriptor
    finally:
        os.close(descriptor)


def check_owner(status: os.stat_result) -> None:
    """Raise Untrusted unless this user or root owns what `found` describes."""
    if status.st_uid not in (os.getuid(), 0):
        raise Untrusted(f"it belongs to user {status.st_uid}")


def check_private(status: os.stat_result) -> None:
    """`check_owner`, and raise Untrusted if anybody but the owner may write there."""
    check_owner(status)
    if status.st_mode & _WRITABLE_BY_OTHERS:
        raise Untrusted(f"other users may write it (mode {stat.S_IMODE(status.st_mode):o})")


def make_folder(name: str, parent: int, mode: int) -> None:
    """Make the folder `name` unless something has that name already."""
    with contextlib.suppress(FileExistsError):
        os.mkdir(name, mode, dir_fd=parent)


def open_file(name: str, parent: int, flags: int, mode: int = 0o600) -> int:
    """The descriptor of the plain file `name`. Raises OSError for anything else of that name."""
    descriptor = os.open(name, flags | _OPEN_FILE, mode, dir_fd=parent)
    if stat.S_ISREG(os.fstat(descriptor).st_mode):
        return descriptor
    os.close(descriptor)
    raise OSError(errno.EINVAL, f"{name} is not a plain file")


def read_file(name: str, parent: int, *, trusting: bool = False) -> bytes:
    """The content of the file `name`. Raises Untrusted if another user could have written it."""
    with os.fdopen(open_file(name, parent, os.O_RDONLY), "rb") as file:
        if not trusting:
            check_private(os.fstat(file.fileno()))
        return file.read()


def write_file(name: str, parent: int, data: bytes, mode: int) -> None:
    """Write the new file `name`, down to the disk. Raises FileExistsError if the name is taken."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
    with os.fdopen(open_file(name, parent, flags, mode), "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def exists(name: str, parent: int) -> bool:
    """Whether there is anything called `name`, a link that leads nowhere too."""
    try:
        os.lstat(name, dir_fd=parent)
    except FileNotFoundError:
        return False
    return True


def remove(name: str, parent: int, files: Iterable[str]) -> None:
    """Remove `name` from `parent`: a file, a link itself, or a folder of nothing but `files`.

    A folder that holds anything else keeps that, and stays. Nothing is raised.
    """
    with contextlib.suppress(OSError):
        os.unlink(name, dir_fd=parent)
        return
    with contextlib.suppress(OSError), folder(name, parent) as opened:
        for file in files:
            with contextlib.suppress(OSError):
                os.unlink(file, dir_fd=opened)
    with contextlib.suppress(OSError):
        os.rmdir(name, dir_fd=parent)
