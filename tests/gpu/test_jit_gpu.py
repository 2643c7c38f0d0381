"""Loading and launching what the JIT builds, on a real device."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from helpers import tiny_kernels

from cupyattn import jit
from cupyattn.core import device
from cupyattn.errors import ArgumentError, DeviceError, UnsupportedError
from cupyattn.jit import module

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    tiny_kernels.write(tmp_path / "kernels")
    monkeypatch.setenv("CUPYATTN_KERNELS_DIR", str(tmp_path / "kernels"))
    monkeypatch.setenv("CUPYATTN_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(module, "_kernels", {})
    return tmp_path


def _load(scale: int = 3) -> jit.Kernel:
    return jit.load("tiny", {"kScale": scale}, 0, device.device_props(0).arch)


def _run(kernel: jit.Kernel, n: int, shared_bytes: int) -> np.ndarray:
    """What the kernel writes for `n` rows of 256-thread blocks; one float past them stays -1."""
    import cupy

    out = cupy.full(n + 1, -1, np.float32)
    pointer, count = np.array([out.data.ptr], np.uint64), np.array([n], np.int32)
    params = np.array([pointer.ctypes.data, count.ctypes.data], np.uint64)
    stream = cupy.cuda.get_current_stream().ptr
    blocks = -(-n // 256)
    cupy.cuda.driver.launchKernel(
        kernel.function, blocks, 1, 1, 256, 1, 1, shared_bytes, stream, params.ctypes.data, 0
    )
    return out.get()


@pytest.mark.parametrize("n", [1, 255, 256, 1000])
def test_launch_by_handle(n: int) -> None:
    out = _run(_load(scale=7), n, 1024)
    np.testing.assert_array_equal(out[:n], 7.0 * np.arange(n, dtype=np.float32))
    assert out[n] == -1


def test_load_is_memoised_per_config() -> None:
    assert _load(3) is _load(3)
    assert _load(3) is not _load(4)
    assert isinstance(_load(3).function, int) and _load(3).function


def test_large_shared_memory_needs_asking_and_is_given() -> None:
    import cupy

    limit = device.device_props(0).max_smem_per_block
    kernel = _load()
    with pytest.raises(cupy.cuda.driver.CUDADriverError):
        _run(kernel, 256, limit)
    kernel.set_shared_memory(limit)
    kernel.set_shared_memory(1024)
    assert _run(kernel, 256, limit)[5] == 15.0


def test_more_shared_memory_than_there_is() -> None:
    kernel = _load()
    with pytest.raises(UnsupportedError, match=r"kernel tiny: .* more than GPU 0 allows"):
        kernel.set_shared_memory(device.device_props(0).max_smem_per_block + 1024)
    assert _run(kernel, 10, 1024)[4] == 12.0


def test_foreign_cubin_is_a_device_error() -> None:
    here = device.device_props(0).arch
    foreign = "sm_80" if here.startswith("sm_9") else "sm_90a"
    with pytest.raises(DeviceError, match=f"kernel tiny: .* made for {foreign} by NVRTC"):
        jit.load("tiny", {"kScale": 3}, 0, foreign)


def test_device_props_are_plausible() -> None:
    props = device.device_props(0)
    assert props is device.device_props(0)
    assert props.index == 0 and props.name and props.arch in device.ARCHS
    assert 8 <= props.num_sms <= 1024
    assert 48 * 1024 <= props.max_smem_per_block <= props.smem_per_sm <= 2**20
    assert 2**20 <= props.l2_bytes <= 2**30


@pytest.mark.parametrize("index", [-4096, 4096])
def test_no_such_device(index: int) -> None:
    with pytest.raises(ArgumentError, match=f"got index {index}"):
        device.device_props(index)
