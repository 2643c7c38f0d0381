"""The array layer where it touches a device: pointers, streams, hand-over between frameworks."""

from __future__ import annotations

import gc
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from helpers.on_gpu import leaves_running

from cupyattn import array
from cupyattn.array import Device, as_cupy, current_stream, same_device, to_host, view
from cupyattn.array import memory as array_memory
from cupyattn.array.match import require_output
from cupyattn.core import dtypes
from cupyattn.core.dtypes import DType
from cupyattn.errors import ArgumentError

pytestmark = pytest.mark.gpu

cupy = pytest.importorskip("cupy")

GPU = Device("cuda", 0)
FRAMEWORKS = ("cupy", "torch", "jax")
ROWS = pytest.mark.parametrize("row", dtypes.ALL, ids=repr)

# Cycles of a kernel that only waits: some 50 ms, far longer than the host takes for the next call.
_LONG = 100_000_000


def _torch():
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("torch is here without CUDA")
    return torch


def _jax():
    jax = pytest.importorskip("jax")
    try:
        device = jax.devices("gpu")[0]
    except RuntimeError:
        pytest.skip("JAX is here without CUDA")
    return jax, device


def _need_cupy_arrays_of(row: DType) -> None:
    """Skip where CuPy makes no array of the dtype: an fp8 one."""
    try:
        cupy.empty(1, row.numpy)
    except ValueError as error:
        if not row.is_fp8:
            raise
        pytest.skip(f"CuPy {cupy.__version__}: {error}")


def _values(row: DType, shape: tuple[int, ...] = (2, 3, 4)) -> np.ndarray:
    return (np.arange(np.prod(shape)) % 7).reshape(shape).astype(row.numpy)


def _make(framework: str, a: np.ndarray):
    """An array on the first GPU with a's elements, made by the framework's own functions."""
    if framework == "cupy":
        x = cupy.empty(a.shape, a.dtype)
        x.set(a)
        return x
    if framework == "torch":
        torch = _torch()
        wide = a.astype(np.int64 if a.dtype.kind in "biu" else np.float64)
        return torch.tensor(wide).to("cuda", getattr(torch, a.dtype.name))
    jax, device = _jax()
    if a.dtype in (np.int64, np.uint64):
        pytest.skip("JAX has no 64-bit integers unless it is enabled for the whole process")
    return jax.device_put(a, device)


@ROWS
@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_every_framework_and_dtype(framework: str, row: DType) -> None:
    if framework == "cupy":
        _need_cupy_arrays_of(row)
    a = _values(row)
    x = _make(framework, a)
    v = view(x, "q")
    assert (tuple(v.shape), v.strides, v.dtype) == ((2, 3, 4), (12, 4, 1), row)
    assert (v.device, v.framework, v.readonly) == (GPU, framework, framework == "jax")
    pointer = {"cupy": lambda: x.data.ptr, "torch": lambda: x.data_ptr()}
    assert v.ptr == pointer.get(framework, lambda: x.unsafe_buffer_pointer())()
    assert to_host(v).tobytes() == a.tobytes()


@pytest.mark.parametrize("framework", ["cupy", "torch"])
def test_strides(framework: str) -> None:
    a = _values(dtypes.bfloat16, (4, 6, 8))
    x = _make(framework, a)
    cut = x[1:, ::2, 3:].swapaxes(0, 1)
    v = view(cut, "k")
    assert v.strides == (16, 48, 1)
    expected = a[1:, ::2, 3:].swapaxes(0, 1)
    np.testing.assert_array_equal(to_host(v), expected)
    # The same elements through nothing but the pointer and the strides.
    bits = as_cupy(v, np.dtype(np.uint16)).get()
    np.testing.assert_array_equal(bits.view(dtypes.bfloat16.numpy), expected)


@ROWS
@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_answers_come_back_in_the_framework(framework: str, row: DType) -> None:
    like = view(_make(framework, _values(dtypes.float32)), "q")
    if framework == "jax" and (row.is_fp8 or row in (dtypes.int64, dtypes.uint64)):
        pytest.skip("no answer has this dtype, and CuPy or JAX cannot hand it over")
    if framework == "cupy":
        _need_cupy_arrays_of(row)
    a = _values(row, (5, 3))
    out = array.empty(a.shape, row, like)
    written = view(out, "out")
    require_output(written, "out", q=like)
    assert (tuple(written.shape), written.strides, written.dtype) == ((5, 3), (3, 1), row)
    bits = np.dtype(f"u{row.itemsize}")
    as_cupy(written, bits).set(a.view(bits))
    for answer in (array.deliver(out, like), array.from_numpy(a, like)):
        assert type(answer) is type(like.owner)
        v = view(answer, "o")
        assert (v.framework, v.device, v.dtype) == (framework, GPU, row)
        assert to_host(v).tobytes() == a.tobytes()


def test_delivery_to_jax_copies_nothing() -> None:
    jax, _ = _jax()
    like = view(_make("jax", _values(dtypes.float32)), "q")
    out = array.empty((64, 128), dtypes.bfloat16, like)
    pointer = out.data.ptr
    answer = array.deliver(out, like)
    assert isinstance(answer, jax.Array)
    assert view(answer, "o").ptr == pointer


def test_current_streams() -> None:
    x = view(cupy.zeros(3, np.float32), "q")
    assert current_stream(x) == cupy.cuda.get_current_stream().ptr
    with cupy.cuda.Stream(non_blocking=True) as stream:
        assert current_stream(x) == stream.ptr != 0
    torch = _torch()
    t = view(torch.zeros(3, device="cuda"), "q")
    assert current_stream(t) == torch.cuda.current_stream().cuda_stream
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        assert current_stream(t) == side.cuda_stream != 0


def test_acquire_waits_for_the_other_framework() -> None:
    torch = _torch()
    ours = cupy.cuda.Stream(non_blocking=True)
    like = view(cupy.zeros(1, np.float32), "q")
    t = torch.zeros(1 << 20, device="cuda")
    copy = cupy.zeros(1 << 20, np.float32)
    cupy.cuda.Device().synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        torch.cuda._sleep(_LONG)
        t.fill_(7)
        v = view(t, "k")
        with ours:
            array.acquire(like, v)
            source = as_cupy(v)
            copy.data.copy_from_device_async(source.data, source.nbytes, ours)
    ours.synchronize()
    assert float(copy.min()) == 7


def test_release_keeps_the_other_framework_from_overwriting() -> None:
    torch = _torch()
    ours = torch.cuda.Stream()
    x = cupy.full(1 << 20, 3, np.float32)
    v = view(x, "k")
    cupy.cuda.Device().synchronize()
    with torch.cuda.stream(ours):
        like = view(torch.zeros(1, device="cuda"), "q")
        torch.cuda._sleep(_LONG)
        target = torch.empty(1 << 20, device="cuda")
        copy = as_cupy(view(target, "out"))
        copy.data.copy_from_device_async(x.data, x.nbytes, SimpleNamespace(ptr=ours.cuda_stream))
    with cupy.cuda.Stream(non_blocking=True) as theirs:
        with torch.cuda.stream(ours):
            array.release(like, v)
        x.fill(9)
        theirs.synchronize()
    ours.synchronize()
    assert float(target.max()) == 3


def test_release_keeps_foreign_memory_until_the_launch_is_over() -> None:
    jax, _ = _jax()
    torch = _torch()
    like = view(torch.zeros(1, device="cuda"), "q")
    array_memory._IN_USE.clear()
    v = view(_make("jax", _values(dtypes.float32)), "k")
    torch.cuda._sleep(_LONG)
    array.release(like, v)
    memory = v._memory
    del v
    gc.collect()
    assert [kept for _, kept in array_memory._IN_USE] == [memory]
    torch.cuda.synchronize()
    array.release(like, view(jax.numpy.zeros(3), "k"))
    assert memory not in [kept for _, kept in array_memory._IN_USE]


def test_a_torch_graph_capture_survives_the_array_layer() -> None:
    torch = _torch()
    q = torch.full((8,), 2.0, device="cuda")
    table = cupy.arange(8, dtype=np.int32)
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        like, indices = view(q, "q"), view(table, "indices")
        array.acquire(like, indices)
        out = array.empty((8,), dtypes.float32, like)
        torch.add(q, 1, out=out)
        array.release(like, indices)
    q.fill_(5)
    graph.replay()
    torch.cuda.synchronize()
    assert out.tolist() == [6.0] * 8


def test_freed_cupy_memory_is_refused() -> None:
    x = cupy.zeros(1024, np.float32)
    x.data.mem.free()
    with pytest.raises(ArgumentError, match="q: the memory of the CuPy array was freed"):
        view(x, "q")
    assert view(cupy.zeros((0, 4), np.float32), "q").shape == (0, 4)


def test_freed_torch_storage_is_refused() -> None:
    torch = _torch()
    x = torch.zeros(4, 5, device="cuda")
    cut = x[2:]
    x.untyped_storage().resize_(0)
    for freed in (x, cut):
        with pytest.raises(ArgumentError, match=r"q: .*storage was freed"):
            view(freed, "q")


def test_any_dlpack_producer() -> None:
    class Wrapped:
        def __init__(self, x):
            self.x = x

        def __dlpack_device__(self):
            return self.x.__dlpack_device__()

        def __dlpack__(self, **request):
            assert request["stream"] != 0
            return self.x.__dlpack__(**request)

    x = cupy.arange(12, dtype=np.float32).reshape(3, 4)
    v = view(Wrapped(x), "q")
    assert (v.ptr, v.shape, v.device, v.framework) == (x.data.ptr, (3, 4), GPU, "dlpack")
    assert isinstance(array.empty((2,), dtypes.float16, v), cupy.ndarray)
    np.testing.assert_array_equal(to_host(v), x.get())


def test_devices_are_told_apart() -> None:
    x = view(cupy.zeros(3, np.float32), "q")
    with pytest.raises(ArgumentError, match="mask: is on cpu but q is on cuda:0"):
        same_device(q=x, mask=view(np.zeros(3, bool), "mask"))


def test_a_second_gpu_is_read_without_switching_to_it() -> None:
    if cupy.cuda.runtime.getDeviceCount() < 2:
        pytest.skip("one GPU only")
    torch = _torch()
    first = view(torch.zeros(3, device="cuda:0"), "q")
    x = torch.arange(3, device="cuda:1", dtype=torch.int32)
    v = view(x, "k")
    assert (v.device, v.ptr) == (Device("cuda", 1), x.data_ptr())
    assert array.empty((2,), dtypes.float16, v).device == x.device
    assert to_host(v).tolist() == [0, 1, 2]
    with cupy.cuda.Device(1):
        y = view(cupy.zeros(3, np.float32), "v")
    assert view(array.empty((2,), dtypes.float16, y), "out").device == Device("cuda", 1)
    with pytest.raises(ArgumentError, match="k: is on cuda:1 but q is on cuda:0"):
        same_device(q=first, k=v)


def test_constants_take_no_memory_of_torch() -> None:
    """What torch allocates may belong to a CUDA graph of its compiler, and must not be kept."""
    torch = _torch()
    like = view(torch.zeros(1, device="cuda"), "like")
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    made: list[Any] = []
    make = lambda: made.append(array.constant(np.arange(5000, dtype=np.int32), like))  # noqa: E731
    assert leaves_running(torch, make)
    assert all(x.is_cuda for x in made) and torch.cuda.memory_allocated() == before
    with torch.cuda.stream(torch.cuda.Stream()):
        assert torch.equal(made[-1].cpu(), torch.arange(5000, dtype=torch.int32))
