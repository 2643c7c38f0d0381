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
    "CUPYATTN_CACHE_DIR", "", "Folder of compiled kernels (default: ~/.cache/cupyattn)."
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
LAZY_MAXIMA = Variable(
    "CUPYATTN_LAZY_MAXIMA",
    "0",
    "1: on Hopper rows take a new maximum only where they must: faster, 2-4 % more rounding error "
    "(read at the first kernel).",
)
KERNELS_DIR = Variable(
    "CUPYATTN_KERNELS_DIR", "", "Folder of the CUDA sources (default: the ones shipped)."
)

ALL = (CACHE_DIR, NO_COMPILE, DEBUG, PORTABLE, LAZY_MAXIMA, KERNELS_DIR)
