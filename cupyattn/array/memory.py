"""The array layer: views of any framework's arrays, its streams, and results as its own arrays."""

from __future__ import annotations

import functools
import math
import sys
import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ..core import dtypes, recording
from ..core.cupy_module import cupy_module
from ..core.dtypes import DType
from ..errors import ArgumentError, UnsupportedError
from .dlpack import Memory
from .views import ArrayView, Device, cupy_stream, view

# --- streams ---


def current_stream(v: ArrayView) -> int:
    """The raw cudaStream_t on which v's framework works now, on v's device; v is a CUDA array.

    JAX has no current stream, nor have unknown frameworks: for them it is CuPy's.
    """
    return stream_reader(v)()


def stream_reader(v: ArrayView) -> Callable[[], int]:
    """`current_stream` of arrays like v as a function, which does not keep v."""
    if v.framework == "torch":
        read = sys.modules["torch"]._C._cuda_getCurrentRawStream
        return functools.partial(read, v.device.index)
    return functools.partial(cupy_stream, v.device.index)


# Memory of JAX and unknown frameworks that a launch may still use, with the event that ends it.
_IN_USE: deque[tuple[Any, Memory]] = deque()
_IN_USE_LOCK = threading.Lock()


def acquire(like: ArrayView, *views: ArrayView) -> None:
    """Before a launch on like's stream: make it wait for views whose framework uses another one.

    Costs nothing if all arrays are of one framework. Inside a CUDA graph capture it does nothing:
    what a graph reads must be ready before each replay, and memory must outlive the graph.
    """
    recording.spoil()
    foreign = [v for v in views if v.framework != like.framework]
    if not foreign:
        return
    ours = current_stream(like)
    with cupy_module().cuda.Device(like.device.index):
        if not _is_capturing(ours):
            for v in foreign:
                _wait(ours, current_stream(v))


def release(like: ArrayView, *views: ArrayView) -> None:
    """After a launch on like's stream: keep the memory of the views until the launch is done.

    torch and CuPy reuse memory in the order of their streams, so theirs is made to wait; JAX and
    unknown frameworks do not know our stream, so their memory is kept until the launch is over.
    Costs nothing if all arrays are torch's, or all CuPy's; does nothing inside a graph capture.
    """
    borrowed = [v for v in views if v.framework in ("jax", "dlpack")]
    foreign = [v for v in views if v.framework != like.framework]
    if not (borrowed or foreign):
        return
    ours = current_stream(like)
    with cupy_module().cuda.Device(like.device.index):
        if _is_capturing(ours):
            return
        for v in foreign:
            _wait(current_stream(v), ours)
        if borrowed:
            _keep_until_done(_record(ours), [v._memory for v in borrowed])


def _keep_until_done(event: Any, memories: list[Memory]) -> None:
    with _IN_USE_LOCK:
        while _IN_USE and _IN_USE[0][0].done:
            _IN_USE.popleft()
        _IN_USE.extend((event, memory) for memory in memories)


def _is_capturing(stream: int) -> bool:
    return cupy_module().cuda.runtime.streamIsCapturing(stream)


def _record(stream: int) -> Any:
    event = cupy_module().cuda.Event(disable_timing=True)
    cupy_module().cuda.runtime.eventRecord(event.ptr, stream)
    return event


def _wait(stream: int, producer: int) -> None:
    if stream != producer:
        event = _record(producer)  # must outlive the call: destroying it frees the handle
        cupy_module().cuda.runtime.streamWaitEvent(stream, event.ptr)


# --- arrays for results ---


def empty(shape: Sequence[int], dtype: DType, like: ArrayView) -> Any:
    """An uninitialised C-contiguous array on like's device, to be passed through `deliver`.

    torch and CuPy allocate their own, ordered on their current stream. JAX and unknown frameworks
    cannot hand out writable memory: theirs is NumPy's on the CPU and CuPy's on a GPU.
    """
    return allocator(dtype, like)(shape)


def allocator(dtype: DType, like: ArrayView) -> Callable[[Sequence[int]], Any]:
    """`empty` of a dtype as a function of the shape, which does not keep `like`."""
    if like.framework == "torch":
        torch = sys.modules["torch"]
        dtype_torch = getattr(torch, dtype.name)
        return functools.partial(torch.empty, dtype=dtype_torch, device=like.owner.device)
    if like.device.kind == "cpu":
        return functools.partial(np.empty, dtype=dtype.numpy)
    return functools.partial(_empty_cupy, dtype.numpy, like.device.index)


def empty_on(framework: str, device: Device, shape: Sequence[int], dtype: DType) -> Any:
    """The same of a framework by name: torch, which must be imported, or else CuPy or NumPy."""
    if framework == "torch":
        torch = sys.modules["torch"]
        return torch.empty(shape, dtype=getattr(torch, dtype.name), device=str(device))
    if device.kind == "cpu":
        return np.empty(shape, dtype.numpy)
    return _empty_cupy(dtype.numpy, device.index, shape)


def _empty_cupy(dtype: np.dtype, device_index: int, shape: Sequence[int]) -> Any:
    recording.spoil()
    cupy = cupy_module()
    with cupy.cuda.Device(device_index):
        try:
            return cupy.empty(shape, dtype)
        except ValueError as error:  # of fp8
            raise UnsupportedError(
                f"out: CuPy makes no arrays of {dtype}; pass `out` in memory that holds them, or "
                "ask for 16 bits"
            ) from error


def deliver(x: Any, like: ArrayView) -> Any:
    """What the caller gets for an array from `empty`: a JAX array for JAX, else x itself."""
    if like.framework != "jax":
        return x
    if like.device.kind == "cpu":
        return from_numpy(x, like)
    from_dlpack = sys.modules["jax"].dlpack.from_dlpack
    # CuPy orders JAX's stream behind the current stream of the current device.
    with cupy_module().cuda.Device(like.device.index):
        return from_dlpack(x)


def writable_copy(v: ArrayView) -> Any:
    """The elements in memory that may be written, to be passed through `deliver`."""
    array = empty(v.shape, v.dtype, v)
    copy, carrier = view(array, "a copy"), _carrier(v.dtype.numpy)
    if v.device.kind == "cpu":
        as_numpy(copy)[...] = as_numpy(v)
    else:
        with cupy_module().cuda.Device(v.device.index):
            as_cupy(copy, carrier)[...] = as_cupy(v, carrier)
        release(copy, v)
    return array


def row_major_view(v: ArrayView) -> ArrayView:
    """A view of the elements in row-major memory of their own."""
    if v.framework == "torch":
        return view(v.owner.contiguous(), "a copy")
    if not v.dtype.is_fp8 or v.device.kind == "cpu":
        return view(writable_copy(v), "a copy")
    # CuPy makes no fp8 arrays: these lie in an array of bytes.
    copy = view(writable_copy(_as_dtype(v, dtypes.uint8, v.readonly)), "a copy")
    return _as_dtype(copy, v.dtype, readonly=False)


def _as_dtype(v: ArrayView, dtype: DType, readonly: bool) -> ArrayView:
    """The same memory with elements of another dtype as wide."""
    return ArrayView(v.ptr, v.shape, v.strides, dtype, v.device, v.framework, readonly, v.owner)


def from_numpy(a: np.ndarray, like: ArrayView) -> Any:
    """A NumPy result as an array of like's framework on like's device.

    On the CPU it shares memory where the framework allows: torch always if `a` is writable with
    positive strides, JAX if it is suitably aligned. JAX narrows int64 unless x64 is enabled.
    """
    if like.framework == "torch":
        torch = sys.modules["torch"]
        torch_dtype = getattr(torch, dtypes.BY_NUMPY[a.dtype].name)
        if not a.flags.writeable or any(stride < 0 for stride in a.strides):
            a = a.copy()
        x = torch.from_numpy(a.view(_carrier(a.dtype))).view(torch_dtype)
        return x.to(like.owner.device)
    if like.device.kind == "cuda":
        x = empty(a.shape, dtypes.BY_NUMPY[a.dtype], like)
        x.set(np.ascontiguousarray(a))
        return deliver(x, like)
    if like.framework == "jax":
        # An uncommitted array in, an uncommitted array out: it still mixes with other devices'.
        return sys.modules["jax"].device_put(a, like.owner.device if like.owner.committed else None)
    return a


def constant(a: np.ndarray, like: ArrayView) -> Any:
    """The numbers of `a`, which nobody else holds, in an array that may be kept between calls:
    ready on every stream of the device, and the same whatever mode its framework is in.

    torch's mode of inference and its fake tensors mark what is made under them, and what JAX makes
    while it traces belongs to the trace: here both only look at memory of NumPy's or CuPy's, which
    is itself the array for JAX. On a GPU that also keeps it out of the CUDA graph that torch's
    compiler may be warming up. The copy has a stream of its own, so that nobody else's work is
    waited for. Not to be called while a stream is captured.
    """
    value: Any = a
    if like.device.kind == "cuda":
        cupy = cupy_module()
        with cupy.cuda.Device(like.device.index), _copy_stream(like.device.index) as stream:
            value = cupy.asarray(a)
            stream.synchronize()
    if like.framework != "torch":
        return value
    torch = sys.modules["torch"]
    with torch.inference_mode(False):
        return torch.from_dlpack(value)


@functools.lru_cache(maxsize=64)
def _copy_stream(device_index: int) -> Any:
    with cupy_module().cuda.Device(device_index):
        return cupy_module().cuda.Stream(non_blocking=True)


# --- host access and comparisons ---


def _carrier(dtype: np.dtype) -> np.dtype:
    """A plain NumPy dtype of the same size for the ml_dtypes, which other libraries do not know."""
    return dtype if dtype.isbuiltin == 1 else np.dtype(f"u{dtype.itemsize}")


class _HostMemory:
    """Lets NumPy adopt a view's memory and keep the view alive for as long as it does."""

    def __init__(self, v: ArrayView) -> None:
        self.view = v
        self.__array_interface__ = {
            "version": 3,
            "data": (v.ptr, v.readonly),
            "shape": v.shape,
            "strides": tuple(stride * v.dtype.itemsize for stride in v.strides),
            "typestr": _carrier(v.dtype.numpy).str,
        }


def as_numpy(v: ArrayView) -> np.ndarray:
    """The view's elements as a NumPy array (bf16 and fp8 as ml_dtypes), without a copy.

    It is read-only if the view is. Raises ArgumentError for CUDA arrays: `to_host` copies those.
    """
    if v.device.kind != "cpu":
        raise ArgumentError(f"an array on {v.device} cannot be read by the CPU; copy it to the CPU")
    if v.framework == "numpy":
        return v.owner.view(np.ndarray)
    return np.asarray(_HostMemory(v)).view(v.dtype.numpy)


def as_strided(
    v: ArrayView, shape: tuple[int, ...], strides: tuple[int, ...], offset: int = 0
) -> ArrayView:
    """The memory of v from element `offset` on, seen with another shape and strides (in elements).

    All of it must lie within v.
    """
    ptr = v.ptr + offset * v.dtype.itemsize
    strided = ArrayView(ptr, shape, strides, v.dtype, v.device, v.framework, v.readonly, v.owner)
    if v.framework == "numpy":
        owner = np.asarray(_HostMemory(strided)).view(v.dtype.numpy)
        return ArrayView(ptr, shape, strides, v.dtype, v.device, "numpy", v.readonly, owner)
    if v.framework in ("jax", "dlpack"):
        strided._memory = v._memory
    return strided


def restride(
    x: Any, name: str, shape: tuple[int, ...], strides: tuple[int, ...], offset: int = 0
) -> Any:
    """`as_strided` of a caller's array: an array of torch, CuPy or NumPy, of others a view."""
    v = view(x, name)
    if v.framework == "torch":
        return x.as_strided(shape, strides, x.storage_offset() + offset)
    strided = as_strided(v, shape, strides, offset)
    if v.framework == "cupy":
        return _as_cupy(strided, v.dtype.numpy)
    return strided.owner if v.framework == "numpy" else strided


def adjoined(first: Any, second: Any, name: str) -> Any:
    """One array of the rows of two, if those of `second` follow those of `first` in one allocation
    of torch, CuPy or NumPy; else None."""
    a, b = view(first, name), view(second, name)
    if (a.framework, a.dtype, a.device, a.strides, a.shape[1:]) != (
        *(b.framework, b.dtype, b.device, b.strides, b.shape[1:]),
    ):
        return None
    if not a.shape or b.ptr != a.ptr + a.shape[0] * a.strides[0] * a.dtype.itemsize:
        return None
    base = _ALLOCATIONS.get(a.framework)
    if base is None or base(first) != base(second):
        return None
    shape = a.shape[0] + b.shape[0], *a.shape[1:]
    return restride(first, name, shape, tuple(a.strides))


def _numpy_allocation(x: np.ndarray) -> int:
    while isinstance(x.base, np.ndarray):
        x = x.base
    return id(x if x.base is None else x.base)


# What two arrays share if they are in one allocation.
_ALLOCATIONS: dict[str, Callable[[Any], int]] = {
    "torch": lambda x: x.untyped_storage().data_ptr(),
    "cupy": lambda x: x.data.mem.ptr,
    "numpy": _numpy_allocation,
}


def row_major(x: Any, name: str) -> Any:
    """A row-major copy of an array of torch, CuPy or NumPy, on its current stream."""
    v = view(x, name)
    if v.framework == "torch":
        return x.contiguous()
    if v.framework == "numpy":
        return np.ascontiguousarray(x)
    if v.framework == "cupy":
        carrier = as_cupy(v, _carrier(v.dtype.numpy))
        return cupy_module().ascontiguousarray(carrier).view(v.dtype.numpy)
    raise ArgumentError(f"{name}: strides are {list(v.strides)}; pass a row-major copy")


def as_cupy(v: ArrayView, dtype: np.dtype | None = None) -> Any:
    """The elements of a CUDA view as a CuPy array, without a copy; `dtype` reinterprets them."""
    recording.spoil()  # CuPy is going to compute with it
    return _as_cupy(v, dtype or v.dtype.numpy)


def _as_cupy(v: ArrayView, dtype: np.dtype) -> Any:
    cupy = cupy_module()
    low, high = byte_range(v)
    memory = cupy.cuda.UnownedMemory(low, high - low, v, v.device.index)
    pointer = cupy.cuda.MemoryPointer(memory, v.ptr - low)
    strides = tuple(stride * v.dtype.itemsize for stride in v.strides)
    return cupy.ndarray(v.shape, dtype, pointer, strides)


def to_host(v: ArrayView) -> np.ndarray:
    """The elements as a NumPy array: a view of CPU memory, or a copy once the GPU is done."""
    if v.device.kind == "cpu":
        return as_numpy(v)
    if v.framework == "torch":
        x = v.owner.detach()
        if tuple(x.shape) != tuple(v.shape) or x.data_ptr() != v.ptr:  # a part of the tensor
            offset = x.storage_offset() + (v.ptr - x.data_ptr()) // v.dtype.itemsize
            x = x.as_strided(v.shape, v.strides, offset)
        return as_numpy(view(x.cpu(), "a copy on the CPU"))
    with cupy_module().cuda.Device(v.device.index):
        return as_cupy(v, _carrier(v.dtype.numpy)).get().view(v.dtype.numpy)


class _Landing(threading.local):
    """Pinned memory of one thread, which copies from a GPU land in."""

    def __init__(self) -> None:
        self.raw = np.empty(0, np.uint8)
        self.address = 0

    def reserve(self, num_bytes: int) -> None:
        if num_bytes > self.raw.size:
            size = max(1 << 14, 1 << (num_bytes - 1).bit_length())
            memory = cupy_module().cuda.alloc_pinned_memory(size)
            self.raw, self.address = np.frombuffer(memory, np.uint8, size), memory.ptr


_landing = _Landing()
_DEVICE_TO_HOST = 2


def to_host_together(views: Sequence[ArrayView]) -> list[np.ndarray]:
    """Copies of contiguous arrays of one GPU and one framework, torch or CuPy.

    As `to_host` of each, but the GPU is waited for once.
    """
    runtime, stream = cupy_module().cuda.runtime, current_stream(views[0])
    slots, total = [], 0
    for v in views:
        size = math.prod(v.shape) * v.dtype.itemsize
        slots.append((total, size))
        total += -(-size // 16) * 16
    landing = _landing
    landing.reserve(total)
    address, raw = landing.address, landing.raw
    for v, (offset, size) in zip(views, slots, strict=True):
        if size:
            runtime.memcpyAsync(address + offset, v.ptr, size, _DEVICE_TO_HOST, stream)
    runtime.streamSynchronize(stream)
    copies = []
    for v, (offset, size) in zip(views, slots, strict=True):
        copy = raw[offset : offset + size].copy().view(v.dtype.numpy)
        copies.append(copy if len(v.shape) == 1 else copy.reshape(v.shape))
    return copies


def scaled(x: Any, factor: float) -> Any:
    """x times a number, on the current stream of its framework: x itself, but for JAX, whose arrays
    cannot be written."""
    v = view(x, "x")
    if v.framework == "jax":
        return x * factor
    if v.framework == "torch":
        return x.mul_(factor)
    numbers = as_numpy(v) if v.device.kind == "cpu" else as_cupy(v)
    numbers *= factor
    return x


def same_device(**views: ArrayView | None) -> Device:
    """The one device of all arrays (None is skipped); ArgumentError names two that differ."""
    first = None
    for name, v in views.items():
        if v is None:
            continue
        if first is None:
            first, device = name, v.device
        elif v.device != device:
            raise ArgumentError(
                f"{name}: is on {v.device} but {first} is on {device}; move one of them, all "
                "arrays of a call must be on one device"
            )
    if first is None:
        raise ArgumentError("no array was given; wanted at least one")
    return device


def byte_range(v: ArrayView) -> tuple[int, int]:
    """The addresses [low, high) that hold every element; low == high for an empty array."""
    low = high = 0
    for extent, stride in zip(v.shape, v.strides, strict=True):
        if extent == 0:
            return v.ptr, v.ptr
        if stride >= 0:
            high += (extent - 1) * stride
        else:
            low += (extent - 1) * stride
    itemsize = v.dtype.itemsize
    return v.ptr + low * itemsize, v.ptr + (high + 1) * itemsize
