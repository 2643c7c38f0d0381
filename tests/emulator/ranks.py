"""Several emulated GPUs whose kernels run at the same time, one in a thread for each rank."""

from __future__ import annotations

import contextlib
import functools
import shutil
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.patching import replace

from cupyattn.array import memory
from cupyattn.distributed import Group, exchange, simulate
from cupyattn.distributed.simulated import SimulatedTransport
from cupyattn.distributed.transport import Window
from cupyattn.engine import staging

from . import gpu, library

_this_thread = threading.local()


class RankedGpu(gpu.EmulatedGpu):
    """The GPUs of all ranks. A library has one machine, so each rank has a copy of it."""

    def _launch(
        self, kernel: library.Library, rest: Sequence[int], cluster: int, is_early: bool = False
    ) -> None:
        own = _copy_of(kernel.path, kernel.name, _this_thread.rank)
        super()._launch(own, rest, cluster, is_early)

    def alloc_pinned(self, num_words: int) -> tuple[np.ndarray, object]:
        words = np.zeros(num_words, np.int32)
        self.register(words.ctypes.data, words.nbytes, words)
        return words, words


@functools.cache
def _copy_of(path: Path, name: str, rank: int) -> library.Library:
    copy = path.with_name(f"rank{rank}.so")
    if not copy.exists():
        part = copy.with_name(f"{copy.name}.{threading.get_native_id()}")
        shutil.copy(path, part)
        part.replace(copy)
    return library.Library(copy, name)


class _OnGpu(SimulatedTransport):
    """Simulated ranks whose windows NumPy has, which counts as a GPU's memory here."""

    def __init__(self, inner: SimulatedTransport, emulated: gpu.EmulatedGpu) -> None:
        self.__dict__.update(inner.__dict__)
        self._inner, self._gpu, self.on_gpu = inner, emulated, True

    def all_to_all(self, out: Any, given: Any, stream: int | None) -> None:
        self._inner.all_to_all(out, given, None)

    def split(self, members: Sequence[int]) -> _OnGpu:
        return _OnGpu(self._inner.split(members), self._gpu)

    def window(self, nbytes: int) -> Window | None:
        window = self._inner.window(nbytes)
        if window is None:
            return None
        self._gpu.register(window.local.ctypes.data, nbytes, window.local)
        self._inner.barrier(None)
        return window


@contextlib.contextmanager
def plugged_in(**facts: Any) -> Iterator[RankedGpu]:
    with gpu.plugging_in(RankedGpu(**facts)) as emulated, pytest.MonkeyPatch.context() as patch:
        replace(patch, staging.alloc_pinned, emulated.alloc_pinned)
        # What is packed for the group's collectives, NumPy packs.
        replace(patch, memory.as_cupy, lambda v, dtype=None: v.owner)
        patch.setattr(exchange, "as_stream", lambda stream: contextlib.nullcontext())
        patch.setattr(Group, "_bytes", lambda self, x, name: x.reshape(-1).view(np.uint8))
        yield emulated


def on_ranks(
    emulated: RankedGpu,
    size: int,
    work: Callable[[Group], Any],
    hosts: Sequence[int] | None = None,
) -> list[Any]:
    """What `work(group)` returns on each rank, whose group is one of GPUs."""

    def run(group: Group) -> Any:
        assert isinstance(group.transport, SimulatedTransport)
        _this_thread.rank = group.rank
        return work(Group(_OnGpu(group.transport, emulated)))

    return simulate(size, run, hosts=hosts)
