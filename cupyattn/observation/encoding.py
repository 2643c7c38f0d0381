"""Arguments as JSON, with the elements of arrays apart; and arguments from these again."""

from __future__ import annotations

import enum
import importlib.util
import math
from collections.abc import Callable, Iterable
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
_PLAIN = type(None), bool, int, str
# Where memory of a GPU begins.
_ALIGNMENT = 256


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

    def encode(self, name: str, x: Any, key: str) -> Any:
        """The argument of this name; elements of its arrays go by keys that begin with `key`."""
        if isinstance(x, _PLAIN) and not isinstance(x, enum.Enum):
            return x
        if isinstance(x, float):
            return x if math.isfinite(x) else {"float": str(x)}
        if isinstance(x, np.generic):
            return self.encode(name, x.item(), key)
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
        result = {
            "array": key,
            "framework": view.framework,
            "dtype": view.dtype.name,
            "shape": list(view.shape),
            "strides": list(view.strides),
            "offset": array.byte_range(view)[0] % _ALIGNMENT,
            "device": str(view.device),
        }
        if name in _WITHOUT_ELEMENTS or _WORKSPACE in name:
            return {**result, "elements": "none"}
        pages = self._pages(name, view)
        if pages is not None:
            self.arrays[f"{key}.pages"] = pages
        self.arrays[key] = self._elements(view, pages)
        return {**result, "elements": "whole" if pages is None else "pages"}

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


def decode(x: Any, arrays: Any, wrappers: list[Any], device_of: Callable[[str], str]) -> Any:
    """The argument again. device_of: where what was on a device is to be, "cpu" or "cuda".

    Raises NotSavedError for what only the process had that wrote it.
    """
    if not isinstance(x, (list, dict)):
        return x
    if isinstance(x, list):
        return [decode(part, arrays, wrappers, device_of) for part in x]
    if "tuple" in x:
        return tuple(decode(x["tuple"], arrays, wrappers, device_of))
    if "dict" in x:
        return {key: decode(part, arrays, wrappers, device_of) for key, part in x["dict"]}
    if "float" in x:
        return float(x["float"])
    if "array" in x:
        return _array(x, arrays, device_of(x["device"]))
    if "numpy" in x:
        return arrays[x["numpy"]]
    if "dtype" in x:
        return x["dtype"]
    if "device" in x:
        return device_of(x["device"])
    if "wrapper" in x:
        return wrappers[x["wrapper"]]
    raise NotSavedError(
        f"the call had {x.get('other')}, which no file holds; it cannot be run again"
    )


def _array(about: dict[str, Any], arrays: Any, device: str) -> Any:
    """An array with the elements, strides and alignment of the one that was saved."""
    shape, strides = tuple(about["shape"]), tuple(about["strides"])
    dtype = dtypes.BY_NAME[about["dtype"]]
    low, high = _span(shape, strides)
    memory = np.zeros(about["offset"] + (high - low) * dtype.itemsize, np.uint8)
    offset = about["offset"] - low * dtype.itemsize
    carrier = np.dtype(f"u{dtype.itemsize}")
    steps = tuple(stride * dtype.itemsize for stride in strides)
    target = np.ndarray(shape, carrier, memory.data, offset, steps) if memory.size else None
    if target is not None and about["elements"] == "whole":
        target[...] = arrays[about["array"]]
    elif target is not None and about["elements"] == "pages":
        target[arrays[f"{about['array']}.pages"]] = arrays[about["array"]]
    if about["framework"] == "torch" and importlib.util.find_spec("torch") is not None:
        return _torch_array(memory, dtype.name, (shape, strides, offset // dtype.itemsize), device)
    if device == "cpu":
        return np.ndarray(shape, dtype.numpy, memory.data, offset, steps)
    return _cupy_array(memory, dtype.numpy, shape, steps, offset)


def _span(shape: Iterable[int], strides: Iterable[int]) -> tuple[int, int]:
    """The elements [low, high) that an array spans, counted from its first one."""
    low = high = 0
    for extent, stride in zip(shape, strides, strict=True):
        if extent == 0:
            return 0, 0
        low += min(0, (extent - 1) * stride)
        high += max(0, (extent - 1) * stride)
    return low, high + 1


def _torch_array(memory: np.ndarray, dtype: str, layout: tuple[Any, Any, int], device: str) -> Any:
    torch = importlib.import_module("torch")
    shape, strides, offset = layout
    itemsize = dtypes.BY_NAME[dtype].itemsize
    whole = torch.from_numpy(memory[: memory.size // itemsize * itemsize]).to(device)
    return whole.view(getattr(torch, dtype)).as_strided(shape, strides, offset)


def _cupy_array(
    memory: np.ndarray, dtype: np.dtype, shape: tuple[int, ...], steps: tuple[int, ...], at: int
) -> Any:
    cupy = cupy_module()
    whole = cupy.asarray(memory)
    return cupy.ndarray(shape, dtype, whole.data + at, steps)
