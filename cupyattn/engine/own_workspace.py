"""The float workspace of a wrapper that is not given one: where it is, and whose memory it is."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any

from .. import array
from ..array import ArrayView, Device
from ..core import dtypes, parse
from ..core.device import device_props
from ..errors import ArgumentError
from ..launch.driver.enqueue import cuda
from .workspace import view_workspace

_FIRST_BYTES = 32 << 20
_NAME = "float_workspace_buffer"


def read_workspace(x: Any) -> tuple[ArrayView | None, Device | None]:
    """(workspace of the caller's, device of one of the wrapper's own), as far as they are given.

    A JAX array cannot be written, so it only says which device is meant.
    """
    if x is None:
        return None, None
    if isinstance(x, str) or type(x).__name__ == "device":
        return None, parse_device(x, _NAME)
    v = array.view(x, _NAME)
    return (None, v.device) if v.framework == "jax" else (view_workspace(x), None)


def parse_device(device: Any, name: str) -> Device:
    """The device of a name, or of a torch.device; index -1 where it does not say which GPU."""
    kind, _, index = str(device).partition(":")
    if kind not in ("cuda", "cpu") or not (index or "0").isdecimal():
        got = parse.shown(device)
        raise ArgumentError(f"{name}: got {got}; wanted 'cuda', 'cuda:<index>' or 'cpu'")
    if kind == "cpu":
        return Device("cpu", 0)
    return Device("cuda", int(index) if index else -1)


def make_workspace(device: Device | None, arguments: Iterable[Any]) -> tuple[ArrayView, bool]:
    """On this device, or where the arrays among the arguments of plan() are: on their GPU, if one
    is on a GPU. It is torch's if one of them is torch's, else CuPy's or NumPy's.

    And whether the arrays of a run may say better where it is to be, or whose: nobody has named a
    device, and tables of the host say nothing of it; nor do they say whose memory of a GPU it is.
    """
    is_named = device is not None
    views = [*_views(arguments)]
    gpus = [v.device for v in views if v.device.kind == "cuda"]
    if device is None:
        device = gpus[0] if gpus else Device("cpu", 0)
    if device.kind == "cuda":
        device_props(max(0, device.index))  # raises DeviceError without CuPy or a GPU
        if device.index < 0:
            device = gpus[0] if gpus else Device("cuda", cuda().get_device())
    framework = "torch" if any(v.framework == "torch" for v in views) else "cupy"
    memory = array.empty_on(framework, device, (_FIRST_BYTES,), dtypes.uint8)
    is_open = not (gpus or framework == "torch") if device.kind == "cuda" else not is_named
    return view_workspace(memory), is_open


def enlarge(workspace: ArrayView, need: int) -> ArrayView:
    """One of `need` bytes, or twice as large as this one if that is more."""
    size = max(need, 2 * workspace.shape[0])
    return view_workspace(array.empty((size,), dtypes.uint8, workspace))


def _views(arguments: Iterable[Any]) -> Iterator[ArrayView]:
    for x in arguments:
        if isinstance(x, (list, tuple)):
            yield from _views(x)
        elif hasattr(type(x), "__dlpack__"):
            # plan() says what is wrong with its arguments, by their names.
            with contextlib.suppress(ArgumentError):
                yield array.view(x, "plan")
