"""DLPack's exchange capsule read with ctypes: for arrays of frameworks not read directly.

The structures are those of dlpack.h, both the unversioned ("dltensor") and the 1.x layout
("dltensor_versioned"). Everything here raises BufferError, DLPack's own error; the array layer
adds the argument's name.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from itertools import accumulate
from operator import mul

CPU, CUDA, CUDA_HOST, CUDA_MANAGED = 1, 2, 3, 13

_UNVERSIONED, _USED_UNVERSIONED = b"dltensor", b"used_dltensor"
_VERSIONED, _USED_VERSIONED = b"dltensor_versioned", b"used_dltensor_versioned"
_MAJOR_VERSION = 1
_FLAG_READ_ONLY = 1


class _Tensor(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    )


class _Unversioned(ctypes.Structure):
    _fields_ = (
        ("tensor", _Tensor),
        ("context", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
    )


class _Versioned(ctypes.Structure):
    _fields_ = (
        ("major", ctypes.c_uint32),
        ("minor", ctypes.c_uint32),
        ("context", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
        ("flags", ctypes.c_uint64),
        ("tensor", _Tensor),
    )


# Own prototypes: setting argtypes on ctypes.pythonapi's functions would change them for everybody.
_Deleter = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
_is_valid = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.py_object, ctypes.c_char_p)(
    ("PyCapsule_IsValid", ctypes.pythonapi)
)
get_pointer = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.py_object, ctypes.c_char_p)(
    ("PyCapsule_GetPointer", ctypes.pythonapi)
)
_set_name = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.py_object, ctypes.c_char_p)(
    ("PyCapsule_SetName", ctypes.pythonapi)
)


class Memory:
    """A consumed capsule: owns the producer's memory and calls its deleter once, when collected.

    `shape` and `strides` are in elements; `code`, `bits`, `lanes`, `device_type` are DLPack's.
    """

    __slots__ = (
        "__weakref__",
        "_deleter",
        "_managed",
        "bits",
        "code",
        "device_id",
        "device_type",
        "lanes",
        "ptr",
        "readonly",
        "shape",
        "strides",
    )

    def __init__(self, capsule: object) -> None:
        self._deleter: Callable[[int | None], None] | None = None
        if _is_valid(capsule, _VERSIONED):
            self._managed = get_pointer(capsule, _VERSIONED)
            versioned = _Versioned.from_address(self._managed)
            self._own(capsule, _USED_VERSIONED, versioned.deleter)
            # Past a new major version only the deleter is where we expect it.
            if versioned.major > _MAJOR_VERSION:
                raise BufferError(
                    f"DLPack version {versioned.major}.{versioned.minor} is too new; wanted "
                    f"{_MAJOR_VERSION}.x"
                )
            self.readonly = bool(versioned.flags & _FLAG_READ_ONLY)
            self._read(versioned.tensor)
        elif _is_valid(capsule, _UNVERSIONED):
            self._managed = get_pointer(capsule, _UNVERSIONED)
            unversioned = _Unversioned.from_address(self._managed)
            self._own(capsule, _USED_UNVERSIONED, unversioned.deleter)
            self.readonly = False
            self._read(unversioned.tensor)
        else:
            raise BufferError(f"{capsule!r} is not an unused DLPack capsule")

    def _own(self, capsule: object, used_name: bytes, deleter: int | None) -> None:
        # From the new name on the capsule's destructor leaves the memory to us.
        _set_name(capsule, used_name)
        self._deleter = _Deleter(deleter) if deleter else None

    def _read(self, tensor: _Tensor) -> None:
        ndim = tensor.ndim
        self.ptr = (tensor.data or 0) + tensor.byte_offset
        self.shape: tuple[int, ...] = tuple(tensor.shape[:ndim]) if ndim else ()
        if not ndim:
            self.strides: tuple[int, ...] = ()
        elif tensor.strides:
            self.strides = tuple(tensor.strides[:ndim])
        else:
            self.strides = tuple(accumulate(self.shape[:0:-1], mul, initial=1))[::-1]
        self.code, self.bits, self.lanes = tensor.code, tensor.bits, tensor.lanes
        self.device_type, self.device_id = tensor.device_type, tensor.device_id

    def __del__(self) -> None:
        if self._deleter is not None:
            self._deleter(self._managed)


def export(x: object, stream: int | None) -> Memory:
    """Consume `x.__dlpack__(stream=stream)`, asking for version 1.0 where the producer knows of it.

    `stream` is None for memory the CPU reads, else the raw CUDA stream that will read the memory
    (1 for the default stream: DLPack forbids 0).
    """
    produce = x.__dlpack__  # type: ignore[attr-defined]
    try:
        capsule = produce(stream=stream, max_version=(1, 0))
    except TypeError:
        capsule = produce(stream=stream)
    return Memory(capsule)
