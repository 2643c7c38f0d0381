"""Copies from a GPU that is not there, of several arrays at a time."""

from __future__ import annotations

import ctypes
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from cupyattn import array
from cupyattn.array import ArrayView, Device, memory
from cupyattn.core import dtypes


class _Pinned(np.ndarray):
    """Bytes with an address, as CuPy's pinned memory is."""

    @property
    def ptr(self) -> int:
        return self.ctypes.data


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Streams that were waited for; copies take place then."""
    jobs: list[tuple[int, int, int]] = []
    waited: list[int] = []

    def wait(stream: int) -> None:
        for job in jobs:
            ctypes.memmove(*job)
        jobs.clear()
        waited.append(stream)

    runtime = SimpleNamespace(
        memcpyAsync=lambda target, source, size, kind, stream: jobs.append((target, source, size)),
        streamSynchronize=wait,
    )
    cuda = SimpleNamespace(
        runtime=runtime, alloc_pinned_memory=lambda size: np.empty(size, np.uint8).view(_Pinned)
    )
    monkeypatch.setattr(memory, "cupy_module", lambda: SimpleNamespace(cuda=cuda))
    monkeypatch.setattr(memory, "current_stream", lambda v: 5)
    monkeypatch.setattr(memory, "_landing", memory._Landing())
    return waited


def _on_gpu(x: np.ndarray) -> ArrayView:
    v = array.view(x, "x")
    dtype = dtypes.BY_NUMPY[x.dtype]
    return ArrayView(v.ptr, x.shape, v.strides, dtype, Device("cuda", 0), "cupy", False, x)


def test_several_arrays_cost_one_wait(waits: list[int]) -> None:
    arrays: list[Any] = [
        np.arange(5, dtype=np.int32), np.arange(3, dtype=np.int64) << 40, np.zeros(0, np.int32),
        np.arange(12, dtype=np.int32).reshape(3, 4),
    ]  # fmt: skip
    for count in range(3):
        found = array.to_host_together([_on_gpu(x + count) for x in arrays])
        for got, want in zip(found, arrays, strict=True):
            assert got.dtype == want.dtype
            np.testing.assert_array_equal(got, want + count)
    assert waits == [5, 5, 5]


def test_later_copies_leave_earlier_ones_alone(waits: list[int]) -> None:
    first = array.to_host_together([_on_gpu(np.arange(9, dtype=np.int32)) for _ in "ab"])
    array.to_host_together([_on_gpu(np.full(1 << 14, 7, np.int32)) for _ in "ab"])
    array.to_host_together([_on_gpu(np.full(9, 7, np.int32)) for _ in "ab"])
    for x in first:
        np.testing.assert_array_equal(x, np.arange(9))
