"""Calls as XLA makes them: the structs that a handler reads, of given arrays and text."""

from __future__ import annotations

import ctypes
import json
from collections.abc import Sequence
from typing import Any

from cupyattn.array import view
from cupyattn.integrations import xla_ffi


def _give_stream(asked: Any) -> None:
    asked.contents.stream = asked.contents.context


# XLA's API: one for all calls, as XLA's is. It has no function but the one that gives the stream.
_API, _GIVE_STREAM = (
    xla_ffi._Api(),
    ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.POINTER(xla_ffi._StreamGet))(_give_stream),
)
_API.stream_get = ctypes.cast(_GIVE_STREAM, ctypes.c_void_p)
_CODES = {name: code for code, name in xla_ffi._DTYPES.items()}


class XlaCall:
    """The frame of one call on the memory of these arrays; `address` is where it is."""

    def __init__(
        self,
        name: str,
        inputs: dict[str, Any],
        outputs: Sequence[Any],
        constants: dict[str, Any],
        stream: int,
        *,
        says_shapes: bool = True,
    ) -> None:
        self._kept: list[Any] = [*inputs.values(), *outputs]
        shapes = [[list(view(x, "x").shape), str(x.dtype)] for x in (*inputs.values(), *outputs)]
        text = json.dumps([name, [*inputs], constants, shapes if says_shapes else None]).encode()
        rows = ctypes.create_string_buffer(text)
        span = self._keep(xla_ffi._Span(ctypes.addressof(self._keep(rows)), len(text)))
        attributes = xla_ffi._Attributes(
            ctypes.sizeof(xla_ffi._Attributes),
            None,
            1,
            self._keep((ctypes.c_int * 1)(xla_ffi._STRING)),
            None,
            self._keep((ctypes.c_void_p * 1)(ctypes.addressof(span))),
        )

        self._frame = xla_ffi._CallFrame(
            struct_size=ctypes.sizeof(xla_ffi._CallFrame),
            api=ctypes.pointer(_API),
            context=stream,
            stage=xla_ffi._EXECUTE,
            args=self._values([*inputs.values()]),
            rets=self._values(outputs),
            attributes=attributes,
        )
        self.address = ctypes.addressof(self._frame)

    def frame(self) -> xla_ffi.Frame:
        """What a handler's function gets."""
        return xla_ffi.Frame(xla_ffi._read_frame(xla_ffi._MEMORY, self.address))

    def _keep(self, x: Any) -> Any:
        self._kept.append(x)
        return x

    def _values(self, arrays: Sequence[Any]) -> xla_ffi._Values:
        places = self._keep((ctypes.POINTER(xla_ffi._Buffer) * len(arrays))())
        for index, x in enumerate(arrays):
            v = view(x, "a buffer")
            extents = self._keep((ctypes.c_int64 * len(v.shape))(*v.shape))
            buffer = xla_ffi._Buffer(
                struct_size=ctypes.sizeof(xla_ffi._Buffer),
                dtype=_CODES[v.dtype.name],
                data=v.ptr,
                rank=len(v.shape),
                dims=ctypes.cast(extents, ctypes.POINTER(ctypes.c_int64)),
            )
            places[index] = ctypes.pointer(self._keep(buffer))
        return xla_ffi._Values(size=len(arrays), values=places)
