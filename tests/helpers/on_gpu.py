"""What tests of batches on a GPU share: frameworks in turn, workspaces, captures."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from cupyattn.core import env
from cupyattn.launch.attention import load_kernels

from . import compare, kernel_caches
from .calls import run_and_check
from .poison import download, upload
from .share import some

_workspaces: dict[str, Any] = {}


def framework(index: int) -> ModuleType:
    """CuPy and torch in turn; CuPy alone where torch is missing."""
    import cupy

    try:
        import torch
    except ImportError:
        return cupy
    return torch if index % 2 and torch.cuda.is_available() else cupy


def workspace(xp: ModuleType, size: int = 128 << 20) -> Any:
    """One for all wrappers of the suite: their launches follow each other on one stream."""
    key = f"{xp.__name__} {size}"
    if key not in _workspaces:
        where = {"device": "cuda"} if xp.__name__ == "torch" else {}
        _workspaces[key] = xp.full((size,), 255, dtype=xp.uint8, **where)
    return _workspaces[key]


def try_random(
    first: int, count: int, make: Callable[[int, ModuleType], Any], turn: int = 1
) -> None:
    """Run and check make(seed, xp) for `count` seeds, and tell all that fail.

    xp changes after `turn` seeds. CUPYATTN_TEST_SHARE leaves fewer seeds.
    """
    failures = []
    for seed in range(first, first + some(count)):
        try:
            run_and_check(make(seed, framework(seed // turn)))
        except AssertionError as error:
            failures.append(f"seed {seed}: {error}")
    assert not failures, f"{len(failures)} of {count} failed:\n" + "\n".join(failures[:5])


@contextmanager
def kernels(is_portable: bool) -> Iterator[None]:
    """Kernels are chosen and loaded anew, those of every architecture alone or the device's best.

    What has run is looked at afterwards, because a kernel that was kept would be run again.
    """
    names: list[str] = []
    load = load_kernels.LoadedKernel.__init__

    def note(self: Any, tiles: Any, device_index: int) -> None:
        names.append(tiles.name)
        load(self, tiles, device_index)

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(env.PORTABLE.name, str(int(is_portable)))
        patch.setattr(load_kernels.LoadedKernel, "__init__", note)
        kernel_caches.forget()
        yield
    kernel_caches.forget()
    assert names, "no kernel was loaded"
    assert not (is_portable and any("sm90" in name for name in names)), names


def ints(xp: Any, count: int) -> Any:
    return upload(np.zeros(count, np.int32), xp)


def scratch(xp: Any, size: int = 128 << 20) -> Any:
    where = {"device": "cuda"} if xp.__name__ == "torch" else {}
    return xp.zeros((size,), dtype=xp.uint8, **where)


def same(got: Any, wanted: Any, what: object) -> None:
    compare.assert_bitwise_equal(download(got), download(wanted), what)


def capture(torch: Any, xp: Any, run: Callable[[], Any]) -> Callable[[], None]:
    """A replay on the current stream of what `run` launches."""
    if xp is torch:
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            run()
        return graph.replay
    import cupy

    stream = cupy.cuda.Stream(non_blocking=True)
    cupy.cuda.Device().synchronize()
    with stream:
        run()  # the pool has what the capture will ask for
        stream.synchronize()
        stream.begin_capture()
        run()
        captured = stream.end_capture()
    return lambda: captured.launch(cupy.cuda.get_current_stream())


def leaves_running(torch: Any, call: Callable[[], Any]) -> bool:
    """Whether `call` returns while a kernel ahead of it on the stream spins.

    Where other processes delay the host by more than the kernel takes, a longer one is tried.
    """
    for cycles in (100_000_000, 400_000_000, 1_600_000_000):
        torch.cuda.synchronize()
        torch.cuda._sleep(cycles)
        end = torch.cuda.Event()
        end.record()
        call()
        if not end.query():
            torch.cuda.synchronize()
            return True
    return False
