"""The float workspace of a call, checked, and copies and conversions on its device."""

from __future__ import annotations

import contextlib
import math
from typing import Any

import numpy as np

from .. import array
from ..array import ArrayView
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
    if low != v.ptr or high - low != math.prod(v.shape) * v.dtype.itemsize:
        raise WorkspaceError(
            f"{name}: shape {list(v.shape)} with strides {list(v.strides)} is not contiguous; pass "
            "a flat array of bytes"
        )
    if v.ptr & 15:
        raise WorkspaceError(
            f"{name}: its address is {v.ptr & 15} bytes past a 16-byte boundary; pass a whole "
            "allocation, or a slice that starts at a multiple of 16 bytes"
        )
    return v


def require_workspace(v: ArrayView, need: int, what: str) -> None:
    """WorkspaceError unless the float workspace has `need` bytes."""
    have = math.prod(v.shape) * v.dtype.itemsize
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
                "move one of them"
            )


def refuse_capture(stream: int, what: str, remedy: str) -> None:
    """PlanError if the stream is being captured: what it copies would be copied by each replay."""
    if cuda().is_capturing(stream):
        raise PlanError(f"{what} cannot be part of a CUDA graph; {remedy}")


def on_device(index: int) -> contextlib.AbstractContextManager[Any]:
    """CUDA calls inside go to device `index`."""
    api = cuda()
    return contextlib.nullcontext() if api.get_device() == index else api.Device(index)


def copy_on_device(target: int, source: int, num_bytes: int, device: int, stream: int) -> None:
    """Enqueue a copy between two addresses on one device."""
    if num_bytes and target != source:
        with on_device(device):
            cuda().runtime.memcpyAsync(target, source, num_bytes, _DEVICE_TO_DEVICE, stream)


def int32_on_device(v: ArrayView, name: str) -> ArrayView:
    """A contiguous int32 view of a 1-D integer array on the GPU, converted if it is int64."""
    if v.dtype is dtypes.int32:
        return v
    if v.framework == "torch":
        return array.view(v.owner.int(), name)
    with on_device(v.device.index):
        return array.view(array.as_cupy(v).astype(np.int32), name)
