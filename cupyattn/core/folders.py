"""The folders of this user in which kernels are kept."""

from __future__ import annotations

import functools
import os
import stat
import tempfile
from pathlib import Path


def user_cache_folder() -> Path | None:
    """$XDG_CACHE_HOME/cupyattn, or ~/.cache/cupyattn; None for a user without a home folder."""
    for base in (os.environ.get("XDG_CACHE_HOME", ""), os.path.join(_home(), ".cache")):
        # The XDG specification: a relative path is to be ignored.
        if os.path.isabs(base):
            return Path(base) / "cupyattn"
    return None


def _home() -> str:
    home = os.environ.get("HOME", "")
    if os.path.isabs(home):
        return home
    try:
        import pwd

        return pwd.getpwuid(os.getuid()).pw_dir
    except (ImportError, KeyError):  # Windows, or a user that only a container knows
        return ""


def temporary_folder() -> Path:
    """<tmp>/cupyattn-<uid>, or a folder of this process alone if somebody else owns that name.

    Raises OSError where there is no temporary folder, and where users have no numbers (Windows).
    """
    if not hasattr(os, "getuid"):
        raise OSError("users have no numbers on this system")
    folder = Path(tempfile.gettempdir()) / f"cupyattn-{os.getuid()}"
    try:
        status = folder.lstat()
    except OSError:
        return folder
    # Anyone may create names in a shared temporary folder, and a kernel from there would be run.
    private = stat.S_ISDIR(status.st_mode) and not status.st_mode & 0o022
    return folder if private and status.st_uid == os.getuid() else _process_folder()


@functools.cache
def _process_folder() -> Path:
    return Path(tempfile.mkdtemp(prefix="cupyattn-"))


def is_writable(folder: Path) -> bool:
    """Whether files could be stored in `folder`, which need not exist; nothing is created."""
    while not os.path.lexists(folder) and folder != folder.parent:
        folder = folder.parent
    return folder.is_dir() and os.access(folder, os.W_OK | os.X_OK)
