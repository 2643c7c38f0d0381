"""The kernels that a call launches: their names, constants and grids."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from ..jit import module
from ..launch.driver import enqueue


@dataclass(frozen=True)
class Launched:
    """A launch. `constants` are those that its kernel was compiled for."""

    kernel: str
    constants: str
    grid: tuple[int, int, int]
    threads: int
    cluster: int = 1

    def __str__(self) -> str:
        grid = " x ".join(map(str, self.grid))
        cluster = f" in clusters of {self.cluster}" if self.cluster > 1 else ""
        return f"{self.kernel}, {grid} blocks of {self.threads} threads{cluster}"


class _Thread(threading.local):
    launches: list[Launched] | None = None


_thread = _Thread()
_WATCHED = "launches_are_watched"


@contextmanager
def watched(is_on_gpu: bool) -> Iterator[list[Launched]]:
    """A list to which launches of this thread are added meanwhile. is_on_gpu: there may be some."""
    if is_on_gpu or "cupy" in sys.modules:
        _watch(enqueue.cuda())
    before, _thread.launches = _thread.launches, []
    try:
        yield _thread.launches
    finally:
        _thread.launches = before


def _watch(api: Any) -> None:
    """Let the driver's functions tell of launches, once."""
    if hasattr(api, _WATCHED):
        return
    setattr(api, _WATCHED, True)
    api.launch_kernel, api.launch_early = (
        _telling(launch, lambda args: 1) for launch in (api.launch_kernel, api.launch_early)
    )
    api.launch_clusters = _telling(api.launch_clusters, lambda args: args[11])


def _telling(launch: Any, cluster_of: Callable[[tuple[Any, ...]], int]) -> Any:
    def telling(*args: Any) -> Any:
        launches = _thread.launches
        if launches is not None:
            function, x, y, z, threads = args[:5]
            kernel, constants = _kernel(function)
            launches.append(Launched(kernel, constants, (x, y, z), threads, cluster_of(args)))
        return launch(*args)

    return telling


def _kernel(function: Any) -> tuple[str, str]:
    """The name and the constants of a loaded kernel, by its handle."""
    for (name, config, _, _), kernel in [*module._kernels.items()]:
        if kernel.function == function:
            return name, getattr(config, "tag", "")
    return str(getattr(function, "name", function)), ""
