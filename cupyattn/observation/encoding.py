"""Arguments as JSON, with the elements of arrays apart; and arguments from these again."""

from __future__ import annotations

import contextlib
import enum
import importlib.util
import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np

from .. import array
from ..array import ArrayView
from ..core import dtypes, parse
from ..core.cupy_module import cupy_module
from ..errors import ArgumentError, CupyAttnError
from .words import is_array

# Memory that a call writes, or works in: its elements mean nothing before.
_WITHOUT_ELEMENTS = "out", "lse", "output"
_WORKSPACE = "workspace"
# Of page pools beyond so many bytes only pages are saved that these arguments name.
_MAX_WHOLE_POOL = 64 << 20
_POOLS = (
    *("kv_cache", "paged_kv_cache", "k_cache", "v_cache", "key", "value", "k", "v"),
    *("ckv_cache", "kpe_cache", "paged_ckv_cache", "paged_kpe_cache"),
)
TABLES = (
    *("block_table", "block_tables", "page_table"),
    *("indices", "paged_kv_indices", "kv_indices", "kv_page_indices"),
)
_PACKAGE = __name__.partition(".")[0]
# Objects that hold nothing a call depends on: a new one stands for any.
_FRESH = ("FlashMLASchedMeta",)
_PLAIN = type(None), bool, int, str
# Where memory of a GPU begins.
_ALIGNMENT = 256
# Memory is a multiple of it, so that it may be seen as elements of any dtype.
_PADDING = 16


class TooLargeError(Exception):
    """The elements take more bytes than there may be."""


class NotSavedError(ArgumentError):
    """A call needs what no file holds."""


class Encoder:
    """Encodes the arguments of calls.

    arrays     elements by key, copies on the host
    wrapper_of  the number of an object that stands for itself, None for others
    tables     page numbers, by which pools are cut
    """

    def __init__(self, max_bytes: int, wrapper_of: Callable[[Any], int | None]) -> None:
        self.arrays: dict[str, np.ndarray] = {}
        self.tables: list[np.ndarray] = []
        self._bytes_left, self._wrapper_of = max_bytes, wrapper_of
        # Addresses [low, high) of arrays, and what is said of them.
        self._spans: list[tuple[int, int, dict[str, Any]]] = []

    def encode(self, name: str, x: Any, key: str) -> Any:
        """The argument of this name; elements of its arrays go by keys that begin with `key`."""
        if isinstance(x, str) and (name == "device" or _WORKSPACE in name):
            return {"device": x}
        if isinstance(x, _PLAIN) and not isinstance(x, enum.Enum):
            return x
        if isinstance(x, float):
            return x if math.isfinite(x) else {"float": str(x)}
        if isinstance(x, np.generic):
            return self.encode(name, x.item(), key)
        if isinstance(x, tuple) and hasattr(x, "_fields") and _is_own(type(x)):
            fields = [
                self.encode(field, part, f"{key}.{field}")
                for field, part in zip(x._fields, x, strict=True)
            ]
            return {"record": type(x).__qualname__, "module": type(x).__module__, "fields": fields}
        if isinstance(x, (list, tuple)):
            items = [self.encode(name, part, f"{key}.{at}") for at, part in enumerate(x)]
            return items if isinstance(x, list) else {"tuple": items}
        if isinstance(x, dict):
            items = [[at, self.encode(name, x[at], f"{key}.{at}")] for at in x]
            return {"dict": items}
        if is_array(x):
            return self._array(name, x, key)
        return self._other(x)

    def _other(self, x: Any) -> Any:
        if _is_own(type(x)) and type(x).__qualname__ in _FRESH:
            return {"fresh": type(x).__qualname__, "module": type(x).__module__}
        number = self._wrapper_of(x)
        if number is not None:
            return {"wrapper": number}
        if type(x).__name__ in ("device", "Device"):
            return {"device": str(x)}
        try:
            return {"dtype": dtypes.parse(x).name}
        except CupyAttnError:
            return {"other": parse.shown(x)}

    def _array(self, name: str, x: Any, key: str) -> Any:
        try:
            view = array.view(x, name)
        except CupyAttnError as error:
            return self._foreign(x, key, error)
        low, high = array.byte_range(view)
        result = {
            "array": key,
            "framework": view.framework,
            "dtype": view.dtype.name,
            "shape": list(view.shape),
            "strides": list(view.strides),
            "offset": low % _ALIGNMENT,
            "device": str(view.device),
        }
        self._spans.append((low, high, result))
        if name in _WITHOUT_ELEMENTS or _WORKSPACE in name:
            return self._said(result, "none")
        pages = self._pages(name, view)
        if pages is not None:
            self.arrays[f"{key}.pages"] = pages
        self.arrays[key] = self._elements(view, pages)
        return self._said(result, "whole" if pages is None else "pages")

    @staticmethod
    def _said(result: dict[str, Any], elements: str) -> dict[str, Any]:
        result["elements"] = elements
        return result

    def join(self) -> None:
        """Say of arrays which of them lie in one piece of memory: those that overlap or touch, such
        as keys and values of one cache."""
        groups: list[list[tuple[int, int, dict[str, Any]]]] = []
        end = -1
        for span in sorted(self._spans, key=lambda span: span[:2]):
            if span[0] > end:
                groups.append([])
            groups[-1].append(span)
            end = max(end, span[1])
        for number, group in enumerate(groups):
            begin, end = group[0][0], max(high for _, high, _ in group)
            for low, _, about in group:
                about["offset"] = begin % _ALIGNMENT
                about["memory"] = [number, low - begin, end - begin]

    def _foreign(self, x: Any, key: str, error: CupyAttnError) -> Any:
        """An array that calls refuse, such as one of float64."""
        try:
            elements = np.array(x)
        except Exception:
            return {"other": f"an array that cannot be read: {error}"}
        if elements.dtype.kind not in "biufc" or elements.nbytes > self._bytes_left:
            return {"other": f"an array that cannot be read: {error}"}
        self._bytes_left -= elements.nbytes
        self.arrays[key] = elements
        return {"numpy": key}

    def _pages(self, name: str, view: ArrayView) -> np.ndarray | None:
        """The pages of a large pool that tables name; None for all of it."""
        size = math.prod(view.shape) * view.dtype.itemsize
        if not self.tables or name not in _POOLS or size <= _MAX_WHOLE_POOL:
            return None
        ids = np.unique(np.concatenate([table.reshape(-1) for table in self.tables]))
        ids = ids[ids >= 0]
        # Numbers beyond the pool are no pages: of tokens, say, or what lies behind a table's end.
        return ids if ids.size and ids[-1] < view.shape[0] else None

    def _elements(self, view: ArrayView, pages: np.ndarray | None) -> np.ndarray:
        # Of an axis that is broadcast one element says all.
        shape = [
            min(extent, 1) if stride == 0 else extent
            for extent, stride in zip(view.shape, view.strides, strict=True)
        ]
        elements = math.prod(shape) if pages is None else pages.size * math.prod(shape[1:])
        self._bytes_left -= elements * view.dtype.itemsize
        if self._bytes_left < 0:
            raise TooLargeError
        view = array.as_strided(view, tuple(shape), tuple(view.strides))
        carrier = np.dtype(f"u{view.dtype.itemsize}")
        if pages is None:
            return np.array(array.to_host(view), order="C").view(carrier).reshape(shape)
        parts = [
            np.array(array.to_host(array.as_strided(view, (1, *shape[1:]), strides, at)), order="C")
            for strides, at in (
                (tuple(view.strides), int(page) * view.strides[0]) for page in pages
            )
        ]
        return np.concatenate(parts).view(carrier).reshape(pages.size, *shape[1:])


class Decoder:
    """Makes arguments again, of one call.

    step      the call as its file has it, with the elements `arrays` by key
    wrappers  what stands for objects by number
    device_of  where what was on a device is to be, "cpu" or "cuda"
    """

    def __init__(
        self, step: Any, arrays: Any, wrappers: list[Any], device_of: Callable[[str], str]
    ) -> None:
        self._arrays, self._wrappers, self._device_of = arrays, wrappers, device_of
        # Pieces of memory by number, or by the key of an array that has one of its own.
        self._host: dict[Any, np.ndarray] = {}
        self._elsewhere: dict[Any, Any] = {}
        for about in _arrays_in(step):
            self._fill(about)

    def decode(self, x: Any) -> Any:
        """The argument again. Raises NotSavedError for what only the process had that wrote it."""
        if isinstance(x, list):
            return [self.decode(part) for part in x]
        if not isinstance(x, dict):
            return x
        if "tuple" in x:
            return tuple(self.decode(x["tuple"]))
        if "dict" in x:
            return {key: self.decode(part) for key, part in x["dict"]}
        if "float" in x:
            return float(x["float"])
        if "array" in x:
            return self._array(x, self._device_of(x["device"]))
        if "numpy" in x:
            return self._arrays[x["numpy"]]
        return self._other(x)

    def _other(self, x: dict[str, Any]) -> Any:
        if "record" in x:
            cls = _own_class(x["module"], x["record"])
            return cls._make(self.decode(x["fields"]))
        if "fresh" in x and x["fresh"] in _FRESH:
            return _own_class(x["module"], x["fresh"])()
        if "dtype" in x:
            return x["dtype"]
        if "device" in x:
            return self._device_of(x["device"])
        if "wrapper" in x:
            return self._wrappers[x["wrapper"]]
        raise NotSavedError(
            f"the call had {x.get('other')}, which no file holds; it cannot be run again"
        )

    def _fill(self, about: dict[str, Any]) -> None:
        """Put the elements of an array into its piece of memory."""
        _, _, size = _memory(about)
        num_bytes = -(-(about["offset"] + size) // _PADDING) * _PADDING
        memory = self._host.setdefault(_memory(about)[0], np.zeros(num_bytes, np.uint8))
        if not math.prod(about["shape"]) or about["elements"] == "none":
            return
        carrier = np.dtype(f"u{dtypes.BY_NAME[about['dtype']].itemsize}")
        shape, steps, at = _layout(about)
        target = np.ndarray(shape, carrier, memory.data, at, steps)
        if about["elements"] == "pages":
            target[self._arrays[f"{about['array']}.pages"]] = self._arrays[about["array"]]
        else:
            target[...] = self._arrays[about["array"]]

    def _array(self, about: dict[str, Any], device: str) -> Any:
        """An array with the elements, strides and alignment of the one that was saved."""
        key, dtype = _memory(about)[0], dtypes.BY_NAME[about["dtype"]]
        memory, (shape, steps, at) = self._host[key], _layout(about)
        if about["framework"] == "torch" and importlib.util.find_spec("torch") is not None:
            torch = importlib.import_module("torch")
            piece = key, "torch", device
            if piece not in self._elsewhere:
                self._elsewhere[piece] = torch.from_numpy(memory).to(device)
            whole = self._elsewhere[piece].view(getattr(torch, dtype.name))
            return whole.as_strided(shape, tuple(about["strides"]), at // dtype.itemsize)
        if device == "cpu":
            return np.ndarray(shape, dtype.numpy, memory.data, at, steps)
        cupy = cupy_module()
        if (key, "cupy") not in self._elsewhere:
            self._elsewhere[key, "cupy"] = cupy.asarray(memory)
        return cupy.ndarray(shape, dtype.numpy, self._elsewhere[key, "cupy"].data + at, steps)


def _is_own(cls: type) -> bool:
    return cls.__module__.partition(".")[0] == _PACKAGE


def _own_class(module: str, name: str) -> Any:
    """A record of this package, or one of _FRESH, by its name. Raises NotSavedError."""
    cls: Any = None
    if module.partition(".")[0] == _PACKAGE:
        with contextlib.suppress(ImportError):
            cls = getattr(importlib.import_module(module), name, None)
    if isinstance(cls, type) and _is_own(cls) and (hasattr(cls, "_make") or name in _FRESH):
        return cls
    raise NotSavedError(f"{module}.{name}: is no record of this cupyattn")


def _arrays_in(x: Any) -> Iterator[dict[str, Any]]:
    """What is said of each array in a call or a result."""
    if isinstance(x, dict) and "array" in x:
        yield x
    elif isinstance(x, (dict, list)):
        for part in x.values() if isinstance(x, dict) else x:
            yield from _arrays_in(part)


def _memory(about: dict[str, Any]) -> tuple[Any, int, int]:
    """(number, first byte of the array, bytes) of the memory that an array lies in."""
    if "memory" in about:
        number, begin, size = about["memory"]
        return number, begin, size
    low, high = _span(about["shape"], about["strides"])
    return about["array"], 0, (high - low) * dtypes.BY_NAME[about["dtype"]].itemsize


def _layout(about: dict[str, Any]) -> tuple[tuple[int, ...], tuple[int, ...], int]:
    """(shape, strides in bytes, byte of the first element) of an array in its memory."""
    itemsize = dtypes.BY_NAME[about["dtype"]].itemsize
    steps = tuple(stride * itemsize for stride in about["strides"])
    low, _ = _span(about["shape"], about["strides"])
    return tuple(about["shape"]), steps, about["offset"] + _memory(about)[1] - low * itemsize


def _span(shape: Iterable[int], strides: Iterable[int]) -> tuple[int, int]:
    """The elements [low, high) that an array spans, counted from its first one."""
    low = high = 0
    for extent, stride in zip(shape, strides, strict=True):
        if extent == 0:
            return 0, 0
        low += min(0, (extent - 1) * stride)
        high += max(0, (extent - 1) * stride)
    return low, high + 1
