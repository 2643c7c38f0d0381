"""The float workspace of a call, checked, and copies and conversions on its device."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from .. import array
from ..array import ArrayView
from ..array.match import is_contiguous
from ..core import dtypes
from ..errors import ArgumentError, PlanError, WorkspaceError
from ..launch.driver.enqueue import cuda

_DEVICE_TO_DEVICE = 3


def view_workspace(x: Any, name: str = "float_workspace_buffer") -> ArrayView:
    """The view of a float workspace, checked: contiguous, writable, on a 16-byte boundary."""
    v = array.view(x, name)
    if v.readonly:
        raise WorkspaceError(
            f"{name}: it cannot be written (JAX arrays never can); pass a CuPy, torch or NumPy "
            "array of bytes"
        )
    low, high = array.byte_range(v)
    if low != v.ptr or high - low != num_bytes(v):
        raise WorkspaceError(
            f"{name}: shape {list(v.shape)} with strides {list(v.strides)} is not contiguous; pass "
            "a flat array of bytes"
        )
    require_alignment(v, name)
    return v


def require_alignment(v: ArrayView, name: str) -> None:
    """WorkspaceError unless a workspace begins on a 16-byte boundary."""
    if v.ptr & 15:
        raise WorkspaceError(
            f"{name}: its address is {v.ptr & 15} bytes past a 16-byte boundary; {name} must be "
            "16-byte aligned, pass a whole allocation, or a slice from a multiple of 16 bytes on"
        )


def num_bytes(v: ArrayView) -> int:
    """What the elements of an array take."""
    return math.prod(v.shape) * v.dtype.itemsize


def require_workspace(v: ArrayView, need: int, what: str) -> None:
    """WorkspaceError unless the float workspace has `need` bytes."""
    have = num_bytes(v)
    if need > have:
        raise WorkspaceError(
            f"float_workspace_buffer: {what} needs {need} bytes and it has {have}; pass a larger "
            "one (workspace_size() of the same arguments tells), or disable_split_kv=True"
        )


def same_device(workspace: ArrayView, **views: ArrayView | None) -> None:
    """ArgumentError unless all arrays are where the float workspace is."""
    for name, v in views.items():
        if v is not None and v.device != workspace.device:
            raise ArgumentError(
                f"{name}: is on {v.device} but float_workspace_buffer is on {workspace.device}; "
                f"move one of them, or pass '{v.device}' for a workspace of the wrapper's own there"
            )


def meets(workspace: ArrayView, address: int, size: int) -> bool:
    """Whether bytes are among those of the float workspace."""
    return address < workspace.ptr + num_bytes(workspace) and workspace.ptr < address + size


def clear_of(workspace: ArrayView, sizes: Sequence[int]) -> tuple[int, ...]:
    """(end, *lows): an array of sizes[i] bytes has some of the workspace's just if its address is
    above lows[i] and below end."""
    begin = workspace.ptr
    end = begin + math.prod(workspace.shape) * workspace.dtype.itemsize
    return end, *[begin - size for size in sizes]


def require_apart(workspace: ArrayView, **views: ArrayView | None) -> None:
    """ArgumentError if an array has memory in the float workspace, which every run overwrites."""
    for name, v in views.items():
        if v is None or v.device != workspace.device or 0 in v.shape:
            continue
        low, high = array.byte_range(v)
        if meets(workspace, low, high - low):
            raise ArgumentError(
                f"{name}: overlaps float_workspace_buffer in memory, which every run overwrites; "
                "pass an array of its own"
            )


def refuse_capture(stream: int, what: str, remedy: str) -> None:
    """PlanError if the stream is being captured: what it copies would be copied by each replay."""
    if cuda().is_capturing(stream):
        raise PlanError(f"{what} cannot be part of a CUDA graph; {remedy}")


def on_device(index: int) -> contextlib.AbstractContextManager[Any]:
    """CUDA calls inside go to device `index`."""
    api = cuda()
    return contextlib.nullcontext() if api.get_device() == index else api.Device(index)


def copy_on_device(target: int, source: int, size: int, device: int, stream: int) -> None:
    """Enqueue a copy of `size` bytes between two addresses on one device."""
    if size and target != source:
        with on_device(device):
            cuda().runtime.memcpyAsync(target, source, size, _DEVICE_TO_DEVICE, stream)


def steps(v: ArrayView, unit: int, name: str) -> ArrayView:
    """What lies between each two of offsets [n], in units: [n - 1] on their device."""
    if v.device.kind == "cpu":
        lengths: Any = np.diff(array.as_numpy(v).astype(np.int64)) // unit
    elif v.framework == "torch":
        x = v.owner.reshape(-1).long()
        lengths = (x[1:] - x[:-1]) // unit
    else:
        with on_device(v.device.index):
            x = array.as_cupy(v).astype(np.int64)
            lengths = (x[1:] - x[:-1]) // unit
    view = array.view(lengths, name)
    if v.device.kind == "cuda":
        array.release(view, v)
    return view


def int32_on_device(v: ArrayView, name: str) -> ArrayView:
    """A contiguous int32 view of an int32 or int64 array on the GPU, a copy where it must be one.

    Numbers beyond 32 bits become the nearest that fits, which names no page and no request.
    """
    is_int32 = v.dtype is dtypes.int32
    if is_int32 and is_contiguous(v):
        return v
    minimum, maximum = -(2**31), 2**31 - 1
    if v.framework == "torch":
        x = v.owner if is_int32 else v.owner.clamp(minimum, maximum)
        return array.view(x.int().contiguous(), name)
    with on_device(v.device.index):
        x = array.as_cupy(v)
        x = x if is_int32 else x.clip(minimum, maximum)
        view = array.view(x.astype(np.int32, order="C"), name)
    array.release(view, v)
    return view
