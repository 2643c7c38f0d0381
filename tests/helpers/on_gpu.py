"""What tests of batches on a GPU share: frameworks in turn, workspaces, captures."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import numpy as np

from . import compare
from .gpu_calls import download, upload

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
        stream.begin_capture()
        run()
        captured = stream.end_capture()
    return lambda: captured.launch(cupy.cuda.get_current_stream())
