"""XLA's foreign function interface in ctypes: how XLA calls a Python function with its buffers.

The structures are those of xla/ffi/api/c_api.h, version 0. Each begins with its size, and new
fields are only added behind; what is read here is in front, so later minor versions fit too.
"""

from __future__ import annotations

import ctypes
import functools
import struct
import threading
from collections.abc import Callable
from typing import Any, NamedTuple

_EXECUTE = 3
_METADATA = 1
_STRING = 4
_INVALID_ARGUMENT, _INTERNAL = 3, 13
_MAJOR = 0
_MAY_BE_RECORDED = 1  # XLA_FFI_HANDLER_TRAITS_COMMAND_BUFFER_COMPATIBLE

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


# Offsets of fields among words of 8 bytes: of a buffer, and of a call. The sizes of args, rets and
# attributes are followed by what is read of them.
_FRAME_WORDS = ctypes.sizeof(_CallFrame) // 8
_EXTENSION, _API, _CONTEXT, _STAGE = (
    getattr(_CallFrame, name).offset // 8 for name in ("extension_start", "api", "context", "stage")
)
_ARGS, _RETS = (
    (getattr(_CallFrame, name).offset + _Values.size.offset) // 8 for name in ("args", "rets")
)
_ATTRIBUTES = (_CallFrame.attributes.offset + _Attributes.size.offset) // 8
_INT = 0xFFFFFFFF  # what counts of a word that holds an int: padding is behind it
# All of this process, from address 0 on: struct reads from it at any address.
_MEMORY = (ctypes.c_char * (2**63 - 1)).from_address(0)
# XLA_FFI_STRUCT_SIZE ends with the last field, without padding behind it.
_ERROR_CREATE_SIZE = _ErrorCreate.code.offset + ctypes.sizeof(ctypes.c_int)
_create_error = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.POINTER(_ErrorCreate))
_get_stream = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p)
_Handler = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p)


class Buffer(NamedTuple):
    """Row-major memory of XLA's: address, shape, and a name of core.dtypes."""

    ptr: int
    shape: tuple[int, ...]
    dtype: str


class _Thread(threading.local):
    """What a thread of XLA's keeps from call to call: the struct by which it asks for its stream.

    Python forgets a thread that it did not start as soon as a callback returns: launch buffers,
    scratch memory and CuPy's state would be made anew in each call. A hold on the thread's state,
    which is never given up, keeps all that.
    """

    def __init__(self) -> None:
        ctypes.pythonapi.PyGILState_Ensure()
        self.asked = _StreamGet(ctypes.sizeof(_StreamGet), None, None, None)
        self.address = ctypes.addressof(self.asked)


_thread = _Thread()


class Frame:
    """One call: its buffers, and the text that the call site was compiled with.

    `words` are those of its struct. All is read where it lies: ctypes' structures take several
    times as long.
    """

    __slots__ = ("_words",)

    def __init__(self, words: tuple[Any, ...]) -> None:
        self._words = words

    def inputs(self) -> tuple[Buffer, ...]:
        return _buffers(self._words[_ARGS], self._words[_ARGS + 2])

    def outputs(self) -> tuple[Buffer, ...]:
        return _buffers(self._words[_RETS], self._words[_RETS + 2])

    def text(self) -> bytes:
        """The one attribute, a string."""
        count, types, _, attributes = self._words[_ATTRIBUTES : _ATTRIBUTES + 4]
        if count != 1 or _read_int(_MEMORY, types)[0] != _STRING:
            raise RuntimeError("XLA hands on other attributes than the call site has")
        address, length = _read_span(_MEMORY, _read_word(_MEMORY, attributes)[0])
        text: bytes = _reader(f"{length}s")(_MEMORY, address)[0]
        return text

    def kind(self) -> Any:
        """What tells calls on the same memory apart: the text, and dtypes and shapes unless the
        text ends with them."""
        text = self.text()
        if not text.endswith(OPEN_END):
            return text
        return text, tuple(x._replace(ptr=0) for x in (*self.inputs(), *self.outputs()))

    def addresses(self) -> tuple[int, ...]:
        """Those of all buffers."""
        words = self._words
        ins, outs = words[_ARGS], words[_RETS]
        pointers = _readers[ins](_MEMORY, words[_ARGS + 2]) if ins else ()
        if outs:
            pointers += _readers[outs](_MEMORY, words[_RETS + 2])
        return tuple([_read_ptr(_MEMORY, pointer)[0] for pointer in pointers])

    def stream(self) -> int:
        """XLA's CUDA stream."""
        words, thread = self._words, _thread
        asked = thread.asked
        asked.context = words[_CONTEXT]
        if _stream_getter(words[_API])(thread.address):
            raise RuntimeError("XLA gives no stream for this call")
        return asked.stream or 0


@functools.cache
def _stream_getter(api: int) -> Any:
    return _get_stream(_Api.from_address(api).stream_get)


@functools.cache
def _reader(fields: str) -> Callable[[Any, int], tuple[Any, ...]]:
    """A function from _MEMORY and an address to what is there, in struct's language."""
    return struct.Struct(f"<{fields}").unpack_from


_read_frame = _reader(f"{_FRAME_WORDS}Q")
_read_span, _read_word, _read_int = _reader("2Q"), _reader("Q"), _reader("i")
# dtype, address, rank, and where the extents are.
_read_buffer = _reader(f"{_Buffer.dtype.offset}x I 4x Q Q Q")
_read_ptr = _reader(f"{_Buffer.data.offset}x Q")
# How a text ends that does not say dtypes and shapes.
OPEN_END = b", null]"
# By the number of words.
_readers = [_reader(f"{count}Q") for count in range(257)]
# By the rank of an array; none that a call takes has nearly as many axes.
_EXTENTS = [_reader(f"{rank}Q") for rank in range(65)]


def _buffers(count: int, pointers: int) -> tuple[Buffer, ...]:
    buffers = []
    for pointer in _reader(f"{count}Q")(_MEMORY, pointers) if count else ():
        code, ptr, rank, dims = _read_buffer(_MEMORY, pointer)
        dtype = _DTYPES.get(code)
        if dtype is None:
            raise ValueError(f"an array has XLA's dtype {code}, which is not supported")
        shape = _EXTENTS[rank](_MEMORY, dims) if rank else ()
        buffers.append(Buffer(ptr, shape, dtype))
    return tuple(buffers)


def handler(function: Callable[[Frame], None], *, may_be_recorded: bool = False) -> Any:
    """A C function that XLA may call, which must be kept alive: it runs `function` on each call.

    What it raises becomes XLA's error with that text. may_be_recorded: XLA may record what the call
    launches in command buffers, and replay it on the same memory without a call.
    """
    traits = _MAY_BE_RECORDED if may_be_recorded else 0

    def handle(address: int) -> int | None:
        words = _read_frame(_MEMORY, address)
        if words[_EXTENSION] and _Extension.from_address(words[_EXTENSION]).type == _METADATA:
            _describe(_CallFrame.from_address(address), traits)
            return None
        if words[_STAGE] & _INT != _EXECUTE:
            return None
        try:
            function(Frame(words))
        except Exception as error:  # nothing may pass through C
            code = _INVALID_ARGUMENT if isinstance(error, ValueError) else _INTERNAL
            text = f"{type(error).__name__}: {error}".encode()
            arguments = _ErrorCreate(_ERROR_CREATE_SIZE, None, text, code)
            create = _create_error(_Api.from_address(words[_API]).error_create)
            failure: int | None = create(ctypes.byref(arguments))
            return failure
        return None

    return _Handler(handle)


def _describe(frame: Any, traits: int) -> None:
    """Tell XLA, which asks, the version that the handler was written for, and its traits."""
    extension = ctypes.cast(frame.extension_start, ctypes.POINTER(_MetadataExtension))
    metadata = extension.contents.metadata.contents
    metadata.api_version.major = _MAJOR
    # The structures are those of every minor version.
    metadata.api_version.minor = frame.api.contents.api_version.minor if frame.api else 1
    metadata.traits = traits
