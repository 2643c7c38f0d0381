"""A GPU made of the host: while it is plugged in, NumPy arrays are on it and kernels run there.

    with gpu.plugged_in(mode="checked") as emulated:
        out = cupyattn.single_prefill_with_kv_cache(q, k, v, causal=True)

All above the driver is the library's own: checks, plans, Params structs, launch code. Replaced are
the compiler (build.py), the driver's launch, and what is asked about the device. A kernel may touch
only the arrays of the call it serves; those that are read-only in NumPy it may not write.
"""

from __future__ import annotations

import contextlib
import ctypes
import struct
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, TypeVar

import numpy as np
import pytest
from helpers import kernel_caches
from helpers.patching import replace_all

from cupyattn import array, jit
from cupyattn.array import ArrayView, Device, memory, views
from cupyattn.core import device
from cupyattn.engine import index_arrays, staging, workspace
from cupyattn.launch.attention import load_kernels, read_tables
from cupyattn.launch.driver import enqueue, scratch, tensor_map
from cupyattn.launch.tiles import prefill_sm90, wide_decode_sm90, wide_sm90
from cupyattn.launch.tiles.config import TileConfig

from . import build, library
from .library import Range

MAX_SHARED = 227 * 1024
STREAM = 7
# Bytes around what is allocated for a kernel: not its own, and no numbers.
_GUARD = 256
_GUARD_BYTE = 0xFF


@dataclass(frozen=True)
class Launched:
    """One launch that has run."""

    name: str
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    cluster: int = 1


@dataclass
class EmulatedGpu:
    """The driver's side of the library.

    num_sms, blocks_per_sm   decide when planners split keys
    seed                     0, or one of many orders of blocks, warps and lanes
    is_portable              the kernels of one architecture stay out of it
    has_clusters             few blocks of decode form clusters
    begins_early             a launch that may begin early does: until one of its threads waits,
                             memory is as the launch before it found it
    """

    mode: str = "checked"
    num_sms: int = 4
    blocks_per_sm: int = 1
    seed: int = 0
    arch: int = 900
    is_portable: bool = False
    has_clusters: bool = False
    begins_early: bool = False
    launches: list[Launched] = field(default_factory=list)
    _ahead: tuple[library.Ahead, list[tuple[int, bytes]]] | None = None
    _memory: dict[int, tuple[Range, Any]] = field(default_factory=dict)

    def register(self, begin: int, num_bytes: int, owner: Any, is_writable: bool = True) -> None:
        """Let kernels touch `num_bytes` bytes from `begin` on, until `forget`."""
        if num_bytes:
            known = self._memory.get(begin)
            if known is not None and known[0].end >= begin + num_bytes:
                if known[0].is_writable or not is_writable:
                    return
            self._memory[begin] = Range(begin, begin + num_bytes, is_writable), owner

    def forget(self) -> None:
        """Forget all memory: what the next call does not name, its kernels may not touch."""
        self._memory.clear()

    def ranges(self) -> list[Range]:
        """What kernels may touch, overlaps merged, in order."""
        merged: list[Range] = []
        for range_, _ in sorted(self._memory.values(), key=lambda pair: pair[0]):
            last = merged[-1] if merged else None
            if last is not None and range_.begin < last.end:
                is_writable = last.is_writable or range_.is_writable
                merged[-1] = Range(last.begin, max(last.end, range_.end), is_writable)
            else:
                merged.append(range_)
        return merged

    def guards(self) -> list[Range]:
        """The rest of the memory that arrays here are parts of."""
        ranges, found = self.ranges(), []
        for low, high in sorted({_whole(owner) for _, owner in self._memory.values()}):
            for r in ranges:
                if low < r.end and r.begin < high:
                    found.append(Range(low, max(low, r.begin), False))
                    low = min(r.end, high)
            found.append(Range(low, high, False))
        return [r for r in found if r.begin < r.end]

    def allocate(self, num_bytes: int) -> tuple[int, Any]:
        """Memory of its own between guards, full of NaN: its address and owner."""
        owner = np.full(num_bytes + 2 * _GUARD + 16, _GUARD_BYTE, np.uint8)
        address = -(-(owner.ctypes.data + _GUARD) // 16) * 16
        self.register(address, num_bytes, owner)
        return address, owner

    def empty(self, shape: Sequence[int], dtype: np.dtype) -> np.ndarray:
        """An array of such memory."""
        count = int(np.prod(shape, dtype=np.int64))
        address, owner = self.allocate(count * dtype.itemsize)
        return np.ndarray(tuple(shape), dtype, owner, address - owner.ctypes.data)

    # --- the driver ---

    def num_slots(self, tiles: Any) -> int:
        """The blocks of a kernel of attention that run at a time."""
        return self.num_sms * self.blocks_per_sm

    def forms_clusters(self, tiles: Any) -> bool:
        return self.has_clusters and tiles.name == "decode_sm80"

    def load(self, name: str, config: jit.Config, index: int, arch: str) -> SimpleNamespace:
        kernel = library.load(build.build_kernel(name, config, self.mode, self.arch), name)
        return SimpleNamespace(function=kernel, set_shared_memory=lambda num_bytes: None)

    def launch(self, kernel: library.Library, *rest: int) -> None:
        self._launch(kernel, rest, 1)

    def launch_early(self, kernel: library.Library, *rest: int) -> None:
        self._launch(kernel, rest, 1, is_early=True)

    def launch_clusters(self, kernel: library.Library, *rest: int) -> None:
        *rest, cluster, is_early = rest
        self._launch(kernel, rest, cluster, is_early=bool(is_early))

    def _launch(
        self, kernel: library.Library, rest: Sequence[int], cluster: int, is_early: bool = False
    ) -> None:
        x, y, z, threads, threads_y, threads_z, shared_bytes, _stream, arguments, _ = rest
        params = ctypes.c_uint64.from_address(arguments).value
        block = (threads, threads_y, threads_z)
        guards = self.guards() if self.mode == "asan" else ()
        place = self.ranges(), self.seed, guards, cluster
        before = self._written() if self.begins_early else []
        ahead = self._begin_early() if is_early else None
        request = kernel.launch(params, (x, y, z), block, shared_bytes, *place, ahead=ahead)
        if self.begins_early:
            self._ahead = library.Ahead(kernel, request), before
        self.launches.append(Launched(kernel.name, (x, y, z), block, cluster))

    def _written(self) -> list[tuple[int, bytes]]:
        """What is in memory that kernels may write."""
        return [
            (r.begin, ctypes.string_at(r.begin, r.end - r.begin))
            for r in self.ranges()
            if r.is_writable
        ]

    def _begin_early(self) -> library.Ahead | None:
        """The launch before, undone: the next one runs it again where it waits."""
        if self._ahead is None:
            return None
        launched, before = self._ahead
        for begin, content in before:
            ctypes.memmove(begin, content, len(content))
        return launched

    def has_launched(self, name: str) -> bool:
        return any(launch.name == name for launch in self.launches)

    def alloc_landing(self) -> np.ndarray:
        return self.empty((read_tables.MAX_NUMBERS,), np.dtype(np.int64))

    def read(self, x: np.ndarray, name: str) -> ArrayView:
        """The view of a NumPy array, which is on this GPU."""
        v = views._read_numpy(x, name)
        v.device = Device("cuda", 0)
        low, high = array.byte_range(v)
        self.register(low, high - low, x, not v.readonly)
        return v

    def upload(self, values: np.ndarray, like: ArrayView | None = None) -> np.ndarray:
        x = self.empty(values.shape, values.dtype)
        x[...] = values
        return x

    def copy_of(self, v: ArrayView) -> np.ndarray:
        x = self.empty(v.shape, v.dtype.numpy)
        x[...] = _to_host(v).view(x.dtype)
        return x

    def narrow(self, v: ArrayView, name: str) -> ArrayView:
        """The int32 copy of an array of integers."""
        return self.read(self.upload(v.owner.astype(np.int32)), name)

    def steps(self, v: ArrayView, unit: int, name: str) -> ArrayView:
        return self.read(self.upload(np.diff(_to_host(v)) // unit), name)

    def compute(self, function: Callable[..., Any], *given: ArrayView) -> Any:
        found = function(*(v.owner for v in given))
        if isinstance(found, list):
            return [self.upload(np.asarray(x)) for x in found]
        return self.upload(found)

    def progression(self, count: int, first: int, step: int, like: ArrayView) -> Any:
        return self.upload(first + step * np.arange(count, dtype=np.int32))

    def api(self) -> SimpleNamespace:
        """What launch/enqueue.py asks CuPy for."""
        return SimpleNamespace(
            Device=lambda index: contextlib.nullcontext(),
            alloc=lambda num_bytes: SimpleNamespace(
                **dict(zip(("ptr", "memory"), self.allocate(num_bytes), strict=True))
            ),
            get_device=lambda: 0,
            is_capturing=lambda stream: False,
            is_debugging=False,
            launch_clusters=self.launch_clusters,
            is_idle=lambda stream: False,
            launch_early=self.launch_early,
            launch_kernel=self.launch,
            runtime=SimpleNamespace(
                setDevice=lambda index: None,
                eventRecord=lambda event, stream: None,
                memcpy=_copy,
                memcpyAsync=_copy,
                memsetAsync=lambda address, value, size, stream: ctypes.memset(
                    address, value, size
                ),
                streamSynchronize=lambda stream: None,
            ),
        )

    def props(self, index: int = 0) -> device.DeviceProps:
        return device.DeviceProps(
            index=0,
            name="the host",
            arch="sm_90a",
            num_sms=self.num_sms,
            max_smem_per_block=MAX_SHARED,
            smem_per_sm=MAX_SHARED + 1024,
            l2_bytes=1 << 20,
        )


@contextlib.contextmanager
def plugged_in(**facts: Any) -> Iterator[EmulatedGpu]:
    """The library runs on an EmulatedGpu of these facts."""
    with plugging_in(EmulatedGpu(**facts)) as gpu:
        yield gpu


Gpu = TypeVar("Gpu", bound=EmulatedGpu)


@contextlib.contextmanager
def plugging_in(gpu: Gpu) -> Iterator[Gpu]:
    """The library runs on this GPU."""
    counters: dict[str, Any] = {}

    class Loaded:
        """attention.LoadedKernel, with the occupancy that the GPU is said to have."""

        def __init__(self, tiles: TileConfig, index: int) -> None:
            props = gpu.props(index)
            self.function = jit.load(tiles.name, tiles.config, index, props.arch).function
            self.num_slots = gpu.num_slots(tiles)
            self.num_sms = props.num_sms
            self.tiles = tiles
            self.has_clusters = gpu.forms_clusters(tiles)

        def max_clusters(self, cluster: int) -> int:
            return self.num_slots // cluster

    def make_counters(index: int, stream: int) -> tuple[int, Any]:
        if not counters:
            counters["owner"] = np.zeros(scratch._CAPACITY, np.uint32)
        owner = counters["owner"]
        gpu.register(owner.ctypes.data, owner.nbytes, owner)
        return owner.ctypes.data, owner

    api = gpu.api()
    with pytest.MonkeyPatch.context() as patch:
        kernel_caches.forget()
        replace_all(
            patch,
            (jit.load, gpu.load),
            (device.device_props, gpu.props),
            (enqueue.cuda, lambda: api),
            (load_kernels.LoadedKernel, Loaded),
            (scratch._make, make_counters),
            (scratch._allocate_on, lambda num_bytes, *_: gpu.allocate(num_bytes)),
            (tensor_map.encode, encode_tensor_map),
            (views.cupy_stream, lambda index: STREAM),
            (memory._empty_cupy, lambda dtype, index, shape: gpu.empty(shape, dtype)),
            (memory.writable_copy, gpu.copy_of),
            (staging.alloc_pinned, _alloc_pinned),
            (staging._make_event, _make_event),
            (read_tables._alloc_pinned, gpu.alloc_landing),
            (workspace.int32_on_device, lambda v, name: gpu.narrow(v, name)),
            (workspace.steps, gpu.steps),
            (index_arrays.compute, gpu.compute),
            (index_arrays.progression, gpu.progression),
            (index_arrays.fresh_progression, gpu.progression),
            (array.scaled, _scaled),
            (array.to_host, _to_host),
            (array.to_host_together, lambda views: [_to_host(v) for v in views]),
            (array.from_numpy, gpu.upload),
        )
        if gpu.is_portable:
            for kernel in (prefill_sm90, wide_decode_sm90, wide_sm90):
                patch.setattr(kernel, "refusal", lambda *_: "this GPU is portable")
        patch.setitem(views._READERS, np.ndarray, gpu.read)
        patch.setattr(read_tables, "_idle", _NeverIdle())
        patch.setattr(scratch, "_counters", {})
        patch.setattr(scratch, "_kept", scratch._Kept())
        yield gpu
        if counters:
            assert not counters["owner"].any(), "a launch left arrival counters that are not zero"
    kernel_caches.forget()


def encode_tensor_map(
    address: int,
    dims: Sequence[int],
    strides: Sequence[int],
    box: Sequence[int],
    itemsize: int,
    swizzle: int,
) -> bytes:
    """emulator/hopper.h, TensorMap: elements of one or two bytes."""

    def five(numbers: Sequence[int]) -> tuple[int, ...]:
        return (*numbers, *[0] * (5 - len(numbers)))

    return struct.pack(
        "<5Q 10I 3I 36x",
        address,
        *five(strides)[:4],
        *five(dims),
        *five(box),
        len(dims),
        itemsize,
        swizzle,
    )


class _NeverIdle(list[Any]):
    """Keeps no memory of a launch for the next one, which may not touch it."""

    def append(self, x: Any) -> None:
        pass


def _whole(x: np.ndarray) -> tuple[int, int]:
    """The addresses of the memory that an array is a part of."""
    while isinstance(x.base, np.ndarray):
        x = x.base
    return x.ctypes.data, x.ctypes.data + x.nbytes


def _copy(target: int, source: int, num_bytes: int, *rest: int) -> None:
    ctypes.memmove(target, source, num_bytes)


def _alloc_pinned(num_words: int) -> tuple[np.ndarray, object]:
    words = np.full(num_words, -1, np.int32)
    return words, words


def _make_event() -> SimpleNamespace:
    return SimpleNamespace(ptr=0, synchronize=lambda: None)


def _to_host(v: ArrayView) -> np.ndarray:
    return v.owner


def _scaled(x: np.ndarray, factor: float) -> np.ndarray:
    x *= np.float32(factor)
    return x
