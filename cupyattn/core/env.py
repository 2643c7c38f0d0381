"""Every environment variable the library reads: name, type, default, one line of documentation."""

from __future__ import annotations

import os
from dataclasses import dataclass


@dataclass(frozen=True)
class Variable:
    """One environment variable; `get()` reads it afresh, so tests may set it at any time."""

    name: str
    default: str
    doc: str

    def get(self) -> str:
        return os.environ.get(self.name, self.default)

    def flag(self) -> bool:
        return self.get().strip().lower() not in ("", "0", "false", "no", "off")


CACHE_DIR = Variable(
    "CUPYATTN_CACHE_DIR",
    "",
    "Folder of compiled kernels, an absolute path (default: $XDG_CACHE_HOME/cupyattn, or "
    "~/.cache/cupyattn).",
)
CACHE_SHARED = Variable(
    "CUPYATTN_CACHE_SHARED",
    "0",
    "1: that folder is shared: others may read and write it as the umask lets them, and kernels "
    "that they stored are run. Otherwise what is stored is private, and only kernels of this user "
    "or of root are run.",
)
CACHE_LIMIT = Variable(
    "CUPYATTN_CACHE_LIMIT_MIB",
    "4096",
    "MiB that kernels may take, 0 for no limit: the least recently used are removed.",
)
NO_COMPILE = Variable(
    "CUPYATTN_NO_COMPILE", "0", "1: a kernel missing from the cache is an error, never a compile."
)
DEBUG = Variable(
    "CUPYATTN_DEBUG",
    "0",
    "1: synchronise after every launch, and check ids of pages on a GPU (read at the first one).",
)
PORTABLE = Variable(
    "CUPYATTN_PORTABLE",
    "0",
    "1: only kernels that run on every architecture, none of Hopper's own (read at the first one).",
)
KERNELS_DIR = Variable(
    "CUPYATTN_KERNELS_DIR", "", "Folder of the CUDA sources (default: the ones shipped)."
)

ALL = (CACHE_DIR, CACHE_SHARED, CACHE_LIMIT, NO_COMPILE, DEBUG, PORTABLE, KERNELS_DIR)
