"""XLA's foreign function interface in ctypes: how XLA calls a Python function with its buffers.

The structures are those of xla/ffi/api/c_api.h, version 0. Each begins with its size, and new
fields are only added behind; what is read here is in front, so later minor versions fit too.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any, NamedTuple

_EXECUTE = 3
_METADATA = 1
_STRING = 4
_INVALID_ARGUMENT, _INTERNAL = 3, 13
_MAJOR = 0

# XLA_FFI_DataType -> a name of core.dtypes.
_DTYPES = {
    **{1: "bool", 2: "int8", 4: "int32", 5: "int64", 6: "uint8", 7: "uint16", 8: "uint32"},
    **{9: "uint64", 10: "float16", 11: "float32", 16: "bfloat16"},
    **{19: "float8_e5m2", 20: "float8_e4m3fn"},
}


class _Extension(ctypes.Structure):
    _fields_ = (
        ("struct_size", ctypes.c_size_t),
        ("type", ctypes.c_int),
        ("next", ctypes.c_void_p),
    )


class _Version(ctypes.Structure):
    _fields_ = (
        ("struct_size", ctypes.c_size_t),
        ("extension_start", ctypes.c_void_p),
        ("major", ctypes.c_int),
        ("minor", ctypes.c_int),
    )


class _Metadata(ctypes.Structure):
    _fields_ = (
        ("struct_size", ctypes.c_size_t),
        ("api_version", _Version),
        ("traits", ctypes.c_uint32),
    )


class _MetadataExtension(ctypes.Structure):
    _fields_ = (("base", _Extension), ("metadata", ctypes.POINTER(_Metadata)))


class _Api(ctypes.Structure):
    """Its first functions."""

    _fields_ = (
        ("struct_size", ctypes.c_size_t),
        ("extension_start", ctypes.c_void_p),
        ("api_version", _Version),
        ("internal_api", ctypes.c_void_p),
        ("error_create", ctypes.c_void_p),
        ("error_get_message", ctypes.c_void_p),
        ("error_destroy", ctypes.c_void_p),
        ("handler_register", ctypes.c_void_p),
        ("stream_get", ctypes.c_void_p),
    )


class _Buffer(ctypes.Structure):
    _fields_ = (
        ("struct_size", ctypes.c_size_t),
        ("extension_start", ctypes.c_void_p),
        ("dtype", ctypes.c_int),
        ("data", ctypes.c_void_p),
        ("rank", ctypes.c_int64),
        ("dims", ctypes.POINTER(ctypes.c_int64)),
    )


class _Span(ctypes.Structure):
    _fields_ = (("ptr", ctypes.c_void_p), ("len", ctypes.c_size_t))


class _Values(ctypes.Structure):
    """XLA_FFI_Args and XLA_FFI_Rets."""

    _fields_ = (
        ("struct_size", ctypes.c_size_t),
        ("extension_start", ctypes.c_void_p),
        ("size", ctypes.c_int64),
        ("types", ctypes.POINTER(ctypes.c_int)),
        ("values", ctypes.POINTER(ctypes.POINTER(_Buffer))),
    )


class _Attributes(ctypes.Structure):
    _fields_ = (
        ("struct_size", ctypes.c_size_t),
        ("extension_start", ctypes.c_void_p),
        ("size", ctypes.c_int64),
        ("types", ctypes.POINTER(ctypes.c_int)),
        ("names", ctypes.POINTER(ctypes.POINTER(_Span))),
        ("attributes", ctypes.POINTER(ctypes.c_void_p)),
    )


class _CallFrame(ctypes.Structure):
    _fields_ = (
        ("struct_size", ctypes.c_size_t),
        ("extension_start", ctypes.POINTER(_Extension)),
        ("api", ctypes.POINTER(_Api)),
        ("context", ctypes.c_void_p),
        ("stage", ctypes.c_int),
        ("args", _Values),
        ("rets", _Values),
        ("attributes", _Attributes),
    )


class _ErrorCreate(ctypes.Structure):
    _fields_ = (
        ("struct_size", ctypes.c_size_t),
        ("extension_start", ctypes.c_void_p),
        ("message", ctypes.c_char_p),
        ("code", ctypes.c_int),
    )


class _StreamGet(ctypes.Structure):
    _fields_ = (
        ("struct_size", ctypes.c_size_t),
        ("extension_start", ctypes.c_void_p),
        ("context", ctypes.c_void_p),
        ("stream", ctypes.c_void_p),
    )


# XLA_FFI_STRUCT_SIZE ends with the last field, without padding behind it.
_ERROR_CREATE_SIZE = _ErrorCreate.code.offset + ctypes.sizeof(ctypes.c_int)
_create_error = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.POINTER(_ErrorCreate))
_get_stream = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.POINTER(_StreamGet))
_Handler = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.POINTER(_CallFrame))


class Buffer(NamedTuple):
    """Row-major memory of XLA's: address, shape, and a name of core.dtypes."""

    ptr: int
    shape: tuple[int, ...]
    dtype: str


class Frame:
    """One call: its buffers, and the text that the call site was compiled with."""

    def __init__(self, frame: Any) -> None:
        self._frame = frame

    def inputs(self) -> list[Buffer]:
        return _buffers(self._frame.args)

    def outputs(self) -> list[Buffer]:
        return _buffers(self._frame.rets)

    def text(self) -> bytes:
        """The one attribute, a string."""
        attributes = self._frame.attributes
        if attributes.size != 1 or attributes.types[0] != _STRING:
            raise RuntimeError("XLA hands on other attributes than the call site has")
        span = _Span.from_address(attributes.attributes[0])
        return ctypes.string_at(span.ptr, span.len)

    def stream(self) -> int:
        """XLA's CUDA stream."""
        asked = _StreamGet(ctypes.sizeof(_StreamGet), None, self._frame.context, None)
        error = _get_stream(self._frame.api.contents.stream_get)(ctypes.byref(asked))
        if error:
            raise RuntimeError("XLA gives no stream for this call")
        return asked.stream or 0


def _buffers(values: _Values) -> list[Buffer]:
    found = []
    for index in range(values.size):
        buffer = values.values[index].contents
        dtype = _DTYPES.get(buffer.dtype)
        if dtype is None:
            raise ValueError(f"an array has XLA's dtype {buffer.dtype}, which is not supported")
        shape = tuple(buffer.dims[: buffer.rank]) if buffer.rank else ()
        found.append(Buffer(buffer.data or 0, shape, dtype))
    return found


def handler(function: Callable[[Frame], None]) -> Any:
    """A C function that XLA may call, which must be kept alive: it runs `function` on each call.

    What it raises becomes XLA's error with that text. XLA records no such call in command buffers,
    since memory that a call takes from elsewhere would not outlive one.
    """

    def handle(pointer: Any) -> int | None:
        frame = pointer.contents
        if frame.extension_start and frame.extension_start.contents.type == _METADATA:
            _describe(frame)
            return None
        if frame.stage != _EXECUTE:
            return None
        try:
            function(Frame(frame))
        except Exception as error:  # nothing may pass through C
            code = _INVALID_ARGUMENT if isinstance(error, ValueError) else _INTERNAL
            text = f"{type(error).__name__}: {error}".encode()
            made = _ErrorCreate(_ERROR_CREATE_SIZE, None, text, code)
            return _create_error(frame.api.contents.error_create)(ctypes.byref(made))
        return None

    return _Handler(handle)


def _describe(frame: Any) -> None:
    """Answer XLA's question for the version that the handler was written for, and its traits."""
    extension = ctypes.cast(frame.extension_start, ctypes.POINTER(_MetadataExtension))
    metadata = extension.contents.metadata.contents
    metadata.api_version.major = _MAJOR
    # The structures are those of every minor version.
    metadata.api_version.minor = frame.api.contents.api_version.minor if frame.api else 1
    metadata.traits = 0
