"""Memory of a GPU that many test processes share."""

from __future__ import annotations

import contextlib
import fcntl
import gc
import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

# What the pools of a process may keep from one test to the next.
KEPT = 1 << 30


@contextlib.contextmanager
def one_at_a_time() -> Iterator[None]:
    """No other process of this user is in here meanwhile."""
    path = Path(tempfile.gettempdir()) / f"cupyattn-large-tests-{os.getuid()}.lock"
    with path.open("w") as file:  # the kernel unlocks it, should the process die
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def free() -> int:
    """Bytes that the card has left."""
    import cupy

    return int(cupy.cuda.runtime.memGetInfo()[0])


def give_back(above: int = 0) -> None:
    """Free what CuPy's and torch's pools keep unused, if one of them has more than `above` bytes.

    Only frameworks that the process has loaded are asked.
    """
    cupy, torch = (sys.modules.get(name) for name in ("cupy", "torch"))
    unused = [0]
    if cupy is not None:
        unused.append(cupy.get_default_memory_pool().free_bytes())
    if has_torch := torch is not None and torch.cuda.is_initialized():
        unused.append(torch.cuda.memory_reserved() - torch.cuda.memory_allocated())
    if above and max(unused) <= above:
        return
    gc.collect()
    if cupy is not None:
        cupy.get_default_memory_pool().free_all_blocks()
    if has_torch:
        torch.cuda.empty_cache()
