"""Readers: an array of any framework becomes an ArrayView, in the cheapest way it has.

torch, CuPy and NumPy arrays are read through their own attributes, because that costs well under a
microsecond; JAX and every other array come in through their DLPack capsule. Nothing is copied, and
no framework is imported on behalf of an array: whoever made it has imported it.
"""

from __future__ import annotations

import ctypes
import functools
import operator
import re
import sys
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from ..core import dtypes
from ..core.cupy_module import cupy_module
from ..core.dtypes import DType
from ..errors import ArgumentError, DeviceError
from . import dlpack


class Device(NamedTuple):
    """Where an array lives. `kind` is "cpu" or "cuda"; `index` is CUDA's ordinal, 0 for the CPU."""

    kind: str
    index: int  # type: ignore[assignment]  # hides tuple.index, which no device needs

    def __str__(self) -> str:
        return "cpu" if self.kind == "cpu" else f"cuda:{self.index}"


CPU = Device("cpu", 0)
_CUDA: Sequence[Device] = tuple(Device("cuda", index) for index in range(64))


class _NoGpus(Sequence[Device]):
    """What a process has that was forked after the first launch."""

    def __len__(self) -> int:
        return 0

    def __getitem__(self, index: Any) -> Any:
        raise DeviceError(
            "this process was forked from one that had used the GPU, and CUDA does not work in "
            "such a process; start it with multiprocessing's 'spawn' or 'forkserver'"
        )


def refuse_gpus() -> None:
    """Let every GPU array from here on raise DeviceError."""
    global _CUDA
    _CUDA = _NoGpus()


class ArrayView:
    """What a kernel needs to know about an array, whoever made it.

    ptr        address of element [0, 0, ...]
    shape      extents: a tuple, torch.Size for torch
    strides    in elements, of either sign; 0 where an extent is broadcast
    dtype      row of `dtypes`
    device     where `ptr` points
    framework  "torch", "cupy", "numpy", "jax" or "dlpack" (anything else with `__dlpack__`)
    readonly   True if nothing may be written through `ptr`
    owner      the caller's array: the memory lives as long as this view does
    """

    __slots__ = (
        "_memory",
        "device",
        "dtype",
        "framework",
        "owner",
        "ptr",
        "readonly",
        "shape",
        "strides",
    )

    _memory: dlpack.Memory  # set for "jax" and "dlpack" only

    def __init__(
        self,
        ptr: int,
        shape: tuple[int, ...],
        strides: tuple[int, ...],
        dtype: DType,
        device: Device,
        framework: str,
        readonly: bool,
        owner: Any,
    ) -> None:
        self.ptr = ptr
        self.shape = shape
        self.strides = strides
        self.dtype = dtype
        self.device = device
        self.framework = framework
        self.readonly = readonly
        self.owner = owner

    def __repr__(self) -> str:
        return (
            f"ArrayView({self.framework} {self.dtype}{list(self.shape)} on {self.device}, "
            f"strides {list(self.strides)}{', read-only' if self.readonly else ''})"
        )


def view(x: object, name: str) -> ArrayView:
    """The view of an array: torch, CuPy, NumPy, JAX, or anything with `__dlpack__`.

    `name` is the argument's name for messages. JAX and unknown GPU arrays are made ready on CuPy's
    current stream. Raises ArgumentError for what is not an array, has an unknown dtype, requires
    grad, or has no memory (freed, deleted, traced); DeviceError if a foreign GPU array needs CuPy
    and it is missing.
    """
    reader = _READERS.get(type(x))
    if reader is None:
        reader = _find_reader(x, name)
    return reader(x, name)


_Reader = Callable[[Any, str], ArrayView]
_READERS: dict[type, _Reader] = {ArrayView: lambda v, name: v}

# dtype object -> (row, itemsize - 1): the mask tells a misaligned pointer or stride in one `&`.
_NUMPY_DTYPES: dict[Any, tuple[DType, int]] = {d.numpy: (d, d.itemsize - 1) for d in dtypes.ALL}
_TORCH_DTYPES: dict[Any, tuple[DType, int]] = {}

# What arguments want whose dtype does not depend on the call, by words in their names.
_USUAL_DTYPES = (
    (re.compile("packed.*mask|workspace"), "uint8"),
    (re.compile("mask|^x$"), "bool"),
    (re.compile("indptr|indices|_idx|len|table|positions|offset|slot|semaphore"), "int32"),
    (re.compile("ranges|_sz|seqused|leftpad|^lists$|^counts$"), "int32"),
    (re.compile("sink|scale|lse|slopes|^s(_|$)"), "float32"),
)

# A smaller torch pointer may be null, or null plus an offset: torch is asked. Most memory is above,
# but for that of pools which the driver maps.
LOWEST_ADDRESS = 1 << 40

# PyArrayInterface.data, what `__array_struct__` points to (numpy's array interface, C side).
_ARRAY_STRUCT_DATA = 40
_pointer_at = ctypes.c_void_p.from_address


def _is_instance(x: object, module: str, attribute: str) -> bool:
    cls: Any = sys.modules.get(module)
    for part in attribute.split("."):
        cls = getattr(cls, part, None)
    return cls is not None and isinstance(x, cls)


def _find_reader(x: object, name: str) -> _Reader:
    """Choose the reader for a type seen for the first time, and remember it."""
    if _is_instance(x, "torch", "Tensor"):
        torch = sys.modules["torch"]
        plain: Any = torch.Tensor
        # Tensors that intercept dispatch (FakeTensor, DTensor, jagged) own no plain memory.
        if type(x).__torch_dispatch__ != plain.__torch_dispatch__:  # type: ignore[attr-defined]
            raise ArgumentError(
                f"{name}: a {type(x).__name__} has no plain memory of its own; pass the "
                "torch.Tensor inside it (a DTensor's to_local(), a nested tensor's values()); what "
                "torch traces or exports has to call torch.ops.cupyattn, which importing "
                "cupyattn.integrations.torch makes"
            )
        for row in dtypes.ALL:
            torch_dtype = getattr(torch, row.name, None)
            if torch_dtype is not None:
                _TORCH_DTYPES[torch_dtype] = row, row.itemsize - 1
        reader: _Reader = _read_torch
    elif _is_instance(x, "cupy", "ndarray"):
        reader = _read_cupy
    elif isinstance(x, np.ma.MaskedArray):
        raise ArgumentError(f"{name}: a masked array would lose its mask; pass {name}.filled()")
    elif isinstance(x, np.ndarray):
        reader = _read_numpy
    elif _is_instance(x, "jax", "core.Tracer"):
        raise ArgumentError(
            f"{name}: a JAX tracer ({type(x).__name__}) has no memory yet; call cupyattn outside "
            "of jax.jit and vmap, or use the functions of cupyattn.integrations.jax there"
        )
    elif _is_instance(x, "jax", "Array"):
        reader = _read_jax
    elif hasattr(type(x), "__dlpack__"):
        return _read_dlpack
    else:
        raise ArgumentError(
            f"{name}: got {type(x).__name__}, which is not an array; wanted a torch, CuPy, NumPy "
            "or JAX array, or any object with __dlpack__"
        )
    _READERS[type(x)] = reader
    return reader


def _unknown_dtype(name: str, dtype: object) -> ArgumentError:
    native = dtype.newbyteorder("=") if isinstance(dtype, np.dtype) else dtype
    if native != dtype and native in _NUMPY_DTYPES:
        return ArgumentError(
            f"{name}: dtype {dtype} has its bytes in the other order; pass "
            f"{name}.astype('{native}')"
        )
    is_number = not str(dtype).removeprefix("torch.").startswith(("float", "complex"))
    wanted = "the dtype that" if is_number else "float16, bfloat16, or float32 where that"
    wanted = next((x for words, x in _USUAL_DTYPES if words.search(name)), f"{wanted} is asked for")
    return ArgumentError(f"{name}: dtype {dtype} is not supported; cast it to {wanted}")


def _misaligned(name: str, itemsize: int) -> ArgumentError:
    return ArgumentError(
        f"{name}: its address or strides are not multiples of the item size, {itemsize} bytes; "
        f"pass a copy"
    )


def _read_torch(x: Any, name: str) -> ArrayView:
    try:
        ptr = x.data_ptr()
        strides = x.stride()
        shape = x.shape
        dtype, mask = _TORCH_DTYPES[x.dtype]
    except (KeyError, RuntimeError):
        raise _unreadable_torch(x, name) from None
    if x.is_cuda:
        device = _CUDA[x.get_device()]
    elif x.is_cpu:
        device = CPU
    else:
        raise ArgumentError(f"{name}: is on torch device {x.device}; move it to cpu or cuda")
    if ptr < LOWEST_ADDRESS or ptr & mask or x.requires_grad or x.is_neg():
        _check_torch(x, name, ptr & mask)
    return ArrayView(ptr, shape, strides, dtype, device, "torch", False, x)


def _unreadable_torch(x: Any, name: str) -> ArgumentError:
    torch = sys.modules["torch"]
    if x.layout is not torch.strided or x.is_nested:
        layout = "nested" if x.is_nested else str(x.layout).removeprefix("torch.")
        return ArgumentError(
            f"{name}: its layout is {layout}; wanted a strided tensor, such as {name}.to_dense() "
            "or the packed values of a nested tensor"
        )
    if x.dtype not in _TORCH_DTYPES:
        return _unknown_dtype(name, x.dtype)
    return ArgumentError(
        f"{name}: the tensor has no memory to read; call outside of torch.func transforms "
        "(vmap, grad, functionalize)"
    )


def _check_torch(x: Any, name: str, misaligned: int) -> None:
    """What the fast path cannot tell apart; returns for no_grad inference and empty tensors."""
    if x.requires_grad and sys.modules["torch"].is_grad_enabled():
        raise ArgumentError(
            f"{name}: requires grad, and cupyattn has no backward pass; pass {name}.detach() or "
            "call inside torch.no_grad()"
        )
    if x.is_neg():
        raise ArgumentError(f"{name}: is a lazily negated view; pass {name}.resolve_neg()")
    if x.numel() and not has_storage(x):
        raise ArgumentError(
            f"{name}: the tensor has no memory: its storage was freed or never allocated; pass it "
            "before it is resized away"
        )
    if misaligned:
        raise _misaligned(name, x.element_size())


def has_storage(x: Any) -> bool:
    """Whether a tensor has memory."""
    try:
        return x.untyped_storage().data_ptr() != 0
    except RuntimeError:  # torch's lazy zeros: a tensor without even an empty storage
        return False


def _read_numpy(x: Any, name: str) -> ArrayView:
    try:
        dtype, mask = _NUMPY_DTYPES[x.dtype]
    except KeyError:
        raise _unknown_dtype(name, x.dtype) from None
    struct = dlpack.get_pointer(x.__array_struct__, None)
    ptr = _pointer_at(struct + _ARRAY_STRUCT_DATA).value or 0
    strides = _element_strides(x.strides, mask)
    if strides is None or ptr & mask:
        raise _misaligned(name, mask + 1)
    return ArrayView(ptr, x.shape, strides, dtype, CPU, "numpy", not x.flags.writeable, x)


@functools.lru_cache(maxsize=4096)
def _element_strides(byte_strides: tuple[int, ...], mask: int) -> tuple[int, ...] | None:
    if any(stride & mask for stride in byte_strides):
        return None
    return tuple(stride // (mask + 1) for stride in byte_strides)


def _read_cupy(x: Any, name: str) -> ArrayView:
    try:
        dtype, mask = _NUMPY_DTYPES[x.dtype]
    except KeyError:
        raise _unknown_dtype(name, x.dtype) from None
    data = x.data
    ptr = data.ptr
    if not data.mem.ptr and x.size:
        raise ArgumentError(f"{name}: the memory of the CuPy array was freed; keep it until used")
    strides = _element_strides(x.strides, mask)
    if strides is None or ptr & mask:
        raise _misaligned(name, mask + 1)
    return ArrayView(ptr, x.shape, strides, dtype, _CUDA[data.device_id], "cupy", False, x)


def _read_jax(x: Any, name: str) -> ArrayView:
    if x.is_deleted():
        raise ArgumentError(
            f"{name}: the JAX array was deleted or donated; pass an array that still has its buffer"
        )
    return _read_dlpack(x, name, "jax")


def _read_dlpack(x: Any, name: str, framework: str = "dlpack") -> ArrayView:
    try:
        kind, index = map(operator.index, x.__dlpack_device__())
    except Exception as error:  # producers raise what they like
        raise _refused_export(x, name, error) from error
    if kind in (dlpack.CUDA, dlpack.CUDA_MANAGED) and not 0 <= index < len(_CUDA):
        raise ArgumentError(f"{name}: is on CUDA device {index}, which there is not; move it")
    if kind in (dlpack.CUDA, dlpack.CUDA_MANAGED):
        device = _CUDA[index]
        try:
            stream: int | None = cupy_stream(index) or 1
        except DeviceError:
            raise
        except Exception as error:  # no driver, or no such device
            raise DeviceError(
                f"{name}: is on CUDA device {index}, which cannot be used ({error})"
            ) from error
    elif kind in (dlpack.CPU, dlpack.CUDA_HOST):
        device, stream = CPU, None
        if framework == "jax":
            x.block_until_ready()
    else:
        raise ArgumentError(f"{name}: is on DLPack device type {kind}; move it to CPU or CUDA")
    try:
        memory = dlpack.export(x, stream)
    except Exception as error:
        raise _refused_export(x, name, error) from error
    dtype = dtypes.BY_DLPACK.get((memory.code, memory.bits))
    if dtype is None or memory.lanes != 1:
        dlpack_dtype = f"(code {memory.code}, {memory.bits} bits, {memory.lanes} lanes)"
        raise _unknown_dtype(name, getattr(x, "dtype", dlpack_dtype))
    if memory.ptr % dtype.itemsize:
        raise _misaligned(name, dtype.itemsize)
    # Unversioned capsules cannot say "read-only", and JAX arrays always are.
    readonly = memory.readonly or framework == "jax"
    v = ArrayView(memory.ptr, memory.shape, memory.strides, dtype, device, framework, readonly, x)
    v._memory = memory
    return v


def _refused_export(x: object, name: str, error: Exception) -> ArgumentError:
    return ArgumentError(
        f"{name}: {type(x).__name__} could not be read through DLPack: {error}; pass an array on "
        "one device, with memory of its own"
    )


def cupy_stream(index: int) -> int:
    return cupy_module().cuda.get_current_stream(index).ptr
