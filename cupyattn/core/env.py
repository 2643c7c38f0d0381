"""Every environment variable the library reads: name, type, default, one line of documentation."""

from __future__ import annotations

import os
from dataclasses import dataclass


@dataclass(frozen=True)
class Variable:
    """One environment variable; `get()` reads it afresh, so tests may set it at any time.

    One that is empty counts as one that is not set.
    """

    name: str
    default: str
    doc: str

    def get(self) -> str:
        value = os.environ.get(self.name, "")
        return value if value.strip() else self.default

    def flag(self) -> bool:
        return self.get().strip().lower() not in ("", "0", "false", "no", "off")


CACHE_DIR = Variable(
    "CUPYATTN_CACHE_DIR",
    "",
    "folder of compiled kernels, an absolute path (default: $XDG_CACHE_HOME/cupyattn, or "
    "~/.cache/cupyattn)",
)
CACHE_SHARED = Variable(
    "CUPYATTN_CACHE_SHARED",
    "0",
    "1 shares that folder: the umask says who may read and write it, and kernels that others "
    "stored are run. Otherwise it is private, and only kernels of this user or of root are run",
)
CACHE_LIMIT = Variable(
    "CUPYATTN_CACHE_LIMIT_MIB",
    "4096",
    "MiB that kernels may take, beyond which the least recently used are removed; 0 for no limit",
)
NO_COMPILE = Variable(
    "CUPYATTN_NO_COMPILE", "0", "1 makes a kernel that the cache has not an error, never a compile"
)
DEBUG = Variable(
    "CUPYATTN_DEBUG",
    "0",
    "1 waits for every launch, and checks page numbers on a GPU (read at the first launch)",
)
PORTABLE = Variable(
    "CUPYATTN_PORTABLE",
    "0",
    "1 leaves out Hopper's own kernels, for those that run everywhere (read at the first launch)",
)
LOG = Variable(
    "CUPYATTN_LOG",
    "",
    "1: a line on stderr for each call, 3: its arguments and kernels too, 5: statistics of arrays "
    "too, which waits for the GPU (read as the package is first used); choices: a line for each "
    "new choice of kernels (read at the first plan)",
)
DUMP = Variable(
    "CUPYATTN_DUMP",
    "",
    "folder for the inputs of calls, which `cupyattn replay` runs again (read as the package is "
    "first used)",
)
DUMP_CALLS = Variable("CUPYATTN_DUMP_CALLS", "10", "how many calls of a process are saved there")
DUMP_NAMES = Variable(
    "CUPYATTN_DUMP_NAMES", "*", "which calls, by name: patterns as of a shell, with commas"
)
DUMP_LIMIT = Variable(
    "CUPYATTN_DUMP_LIMIT_MIB", "1024", "MiB of a call beyond which it is not saved"
)
TUNED = Variable(
    "CUPYATTN_TUNED",
    "1",
    "0 leaves out what `cupyattn tune` measured of this card (read at the first call)",
)
KERNELS_DIR = Variable(
    "CUPYATTN_KERNELS_DIR", "", "folder of the CUDA sources (default: those of the package)"
)
XLA_GRAPHS = Variable(
    "CUPYATTN_XLA_GRAPHS",
    "1",
    "0 keeps XLA from recording calls inside jax.jit in its CUDA graphs, which it does with JAX "
    "0.11 or later (read while JAX traces)",
)
SPARSE_MODELS = Variable(
    "CUPYATTN_SPARSE_MODELS",
    "0",
    "1 puts sparse.select and sparse.attend in place of vLLM's and SGLang's functions of "
    "MiniMax-M3 and QSA, where the engine loads cupyattn as a plug-in",
)
EIGHT_BIT_QUERIES = Variable(
    "CUPYATTN_8BIT_QUERIES",
    "0",
    "1: queries become e4m3 beside caches of e4m3, by vLLM, and in SGLang's backend; ours then "
    "multiply 8 bits where that is sooner (read as a layer or a backend is made)",
)

ALL = (
    CACHE_DIR,
    CACHE_SHARED,
    CACHE_LIMIT,
    NO_COMPILE,
    DEBUG,
    PORTABLE,
    SPARSE_MODELS,
    EIGHT_BIT_QUERIES,
    XLA_GRAPHS,
    LOG,
    DUMP,
    DUMP_CALLS,
    DUMP_NAMES,
    DUMP_LIMIT,
    TUNED,
    KERNELS_DIR,
)
