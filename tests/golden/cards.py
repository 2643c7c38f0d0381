"""GPUs that only write down what is launched on them, as large and fast as cards that exist.

Everything above the driver is the library's, as on the emulated GPU (emulator/gpu.py), whose stand-
ins these are. Kernels are neither compiled nor run, and memory is not there until it is written.
"""

from __future__ import annotations

import bisect
import contextlib
import ctypes
import itertools
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
from emulator import gpu as emulated
from helpers import device_tables, kernel_caches
from helpers.patching import replace_all

from cupyattn import array, jit
from cupyattn.array import memory, views
from cupyattn.core.device import NO_GPU, DeviceProps
from cupyattn.engine import call_cache
from cupyattn.launch.attention import read_tables
from cupyattn.launch.driver import params, scratch
from cupyattn.launch.tiles.config import TileConfig, min_blocks
from cupyattn.launch.tiles.mixed_sm80 import MixedConfig

from . import quick

# More than any code aligns addresses to, so that offsets do not depend on where memory is.
_ALIGN = 4096
# Structs may point so far behind memory that nobody reads.
_BEHIND = 1 << 21
_THREADS_OF_SM, _RESERVED_BYTES = 2048, 1 << 10

# Facts of cards, where they are not those of an H100.
CARDS: dict[str, dict[str, Any]] = {
    "h100": {"name": "NVIDIA H100 80GB HBM3", "memory_rate": 3352.0, "sm_clock": 1980.0},
    "h200": {"name": "NVIDIA H200", "memory_rate": 4800.0, "sm_clock": 1980.0},
    "h100 pcie": {
        "name": "NVIDIA H100 PCIe",
        "num_sms": 114,
        "memory_rate": 2000,
        "sm_clock": 1755,
    },
    "a100": {
        **{"name": "NVIDIA A100-SXM4-80GB", "arch": "sm_80", "num_sms": 108},
        **{"max_smem_per_block": 163 << 10, "smem_per_sm": 164 << 10, "l2_bytes": 40 << 20},
        **{"memory_rate": 2039, "sm_clock": 1410},
    },
    "rtx3090": {
        **{"name": "NVIDIA GeForce RTX 3090", "arch": "sm_86", "num_sms": 82},
        **{"max_smem_per_block": 99 << 10, "smem_per_sm": 100 << 10, "l2_bytes": 6 << 20},
        **{"memory_rate": 936, "sm_clock": 1695},
    },
    "l40s": {
        **{"name": "NVIDIA L40S", "arch": "sm_89", "num_sms": 142},
        **{"max_smem_per_block": 99 << 10, "smem_per_sm": 100 << 10, "l2_bytes": 96 << 20},
        **{"memory_rate": 864, "sm_clock": 2520},
    },
    "b200": {
        **{"name": "NVIDIA B200", "arch": "sm_100a", "num_sms": 148, "l2_bytes": 126 << 20},
        **{"memory_rate": 8000, "sm_clock": 1965},
    },
    "rtx5090": {
        **{"name": "NVIDIA GeForce RTX 5090", "arch": "sm_120a", "num_sms": 170},
        **{"max_smem_per_block": 99 << 10, "smem_per_sm": 100 << 10, "l2_bytes": 96 << 20},
        **{"memory_rate": 1792, "sm_clock": 2407},
    },
}


class _OnHost(np.ndarray):
    """An array of the host's: all others are on the card."""


def on_host(x: np.ndarray) -> np.ndarray:
    return x.view(_OnHost)


class _OfCupy(np.ndarray):
    """An array on the card that is taken for one of CuPy's: calls with such arrays are remembered,
    as those with NumPy's are not."""

    @property
    def data(self) -> Any:  # type: ignore[override]
        address = self.ctypes.data
        return SimpleNamespace(ptr=address, device_id=0, mem=SimpleNamespace(ptr=address))


def of_cupy(x: np.ndarray) -> np.ndarray:
    return x.view(_OfCupy)


def props_of(card: str) -> DeviceProps:
    return replace(NO_GPU, index=0, **CARDS[card])


class Kernel(NamedTuple):
    """A kernel that is not there: its entry, and the text of its Config."""

    name: str
    config: str


class Launch(NamedTuple):
    """One launch, with nothing in it that differs from run to run.

    shape   grid, block, bytes of shared memory; cluster, and whether it begins early
    params  the struct, with addresses as `places` has them
    places  (offset in the struct, what is there)
    words   what the host has written at those places
    """

    kernel: Kernel
    shape: tuple[int, ...]
    params: bytes
    places: tuple[tuple[int, str], ...]
    words: bytes


@dataclass
class Card(emulated.EmulatedGpu):
    """A card of CARDS. `made` are the launches since `begin`, `loaded` the kernels that were asked
    for. is_cupy: outputs are CuPy's. has_8bit_queries: of what is drawn."""

    card: str = "h100"
    is_cupy: bool = False
    has_8bit_queries: bool = False
    made: list[Launch] = field(default_factory=list)
    loaded: dict[tuple[str, jit.Config], None] = field(default_factory=dict)
    names: dict[int, tuple[int, str]] = field(default_factory=dict)
    behind: dict[int, int] = field(default_factory=dict)
    written: dict[int, int] = field(default_factory=dict)
    num_scratch: int = 0
    kept: list[Any] = field(default_factory=list)

    def begin(self) -> None:
        """Forget everything about earlier calls."""
        kernel_caches.forget()
        params.this_thread.launch_buffer.clear()
        read_tables._tickets = itertools.count(1)
        scratch._counters.clear()
        scratch._kept = scratch._Kept()
        self.forget()
        for known in (self.made, self.loaded, self.names, self.behind, self.written, self.kept):
            known.clear()  # type: ignore[attr-defined]
        self.num_scratch = 0

    # --- memory ---

    def name(self, label: str, x: Any) -> None:
        """Call the memory of an array, or of all arrays in x, by this name in Params."""
        if isinstance(x, np.ndarray):
            reach = sum((n - 1) * s for n, s in zip(x.shape, x.strides, strict=True))
            size = reach + x.itemsize if x.size else 1
            self.names[x.ctypes.data] = size, label
            self.kept.append(x)
        elif isinstance(x, (tuple, list)):
            for index, part in enumerate(x):
                self.name(f"{label}[{index}]", part)
        elif isinstance(x, dict):
            for key, part in x.items():
                self.name(f"{label}.{key}" if label else str(key), part)

    def allocate(self, num_bytes: int) -> tuple[int, Any]:
        owner = np.zeros(num_bytes + _ALIGN + _BEHIND, np.uint8)
        address = -(-owner.ctypes.data // _ALIGN) * _ALIGN
        self.names[address] = max(num_bytes, 1), ""
        self.behind[address] = _BEHIND
        self.kept.append(owner)
        return address, owner

    def register(self, begin: int, num_bytes: int, owner: Any, is_writable: bool = True) -> None:
        if begin not in self.names and not self._place(begin):
            self.names[begin] = max(num_bytes, 1), ""
            self.kept.append(owner)

    def write(self, address: int, num_bytes: int) -> None:
        """The host has written there."""
        self.written[address] = max(num_bytes, self.written.get(address, 0))

    def upload(self, values: np.ndarray, like: Any = None) -> np.ndarray:
        x = super().upload(values)
        self.write(x.ctypes.data, x.nbytes)
        return x

    def copy_of(self, v: array.ArrayView) -> np.ndarray:
        """Room for a copy, which the card would make."""
        return self.empty(v.shape, v.dtype.numpy)

    def copy(self, target: int, source: int, num_bytes: int, *rest: int) -> None:
        ctypes.memmove(target, source, num_bytes)
        self.write(target, num_bytes)

    def empty(self, shape: Sequence[int], dtype: np.dtype) -> np.ndarray:
        x = super().empty(shape, dtype)
        self.kept.append(x)
        return of_cupy(x) if self.is_cupy else x

    def _place(self, address: int) -> str:
        """What is at an address, or ends before it: the name of its memory and the offset in it; ""
        if nothing is. Memory without a name gets one when it is first seen."""
        begins = sorted(self.names)
        at = bisect.bisect_right(begins, address) - 1
        near = [x for x in reversed(begins[max(0, at - 8) : at + 1])]
        held = [x for x in near if address < x + self.names[x][0]]
        ended = [x for x in near if address <= x + self.names[x][0] + self.behind.get(x, 0)]
        if not held + ended:
            return ""
        begin = (held + ended)[0]
        size, label = self.names[begin]
        if not label:
            self.num_scratch += 1
            label = f"scratch{self.num_scratch}"
            self.names[begin] = size, label
        return f"{label}+{address - begin}"

    def _written_at(self, address: int) -> bytes:
        for begin, size in self.written.items():
            if begin <= address < begin + size:
                return ctypes.string_at(address, begin + size - address)
        return b""

    # --- the driver ---

    def load(self, name: str, config: jit.Config, index: int, arch: str) -> SimpleNamespace:
        kernel = Kernel(name, config.text)
        self.loaded[name, config] = None
        return SimpleNamespace(function=kernel, set_shared_memory=lambda num_bytes: None)

    def launch(self, kernel: Any, *rest: int) -> None:
        self._write_down(kernel, rest, 1, False)

    def launch_early(self, kernel: Any, *rest: int) -> None:
        self._write_down(kernel, rest, 1, True)

    def launch_clusters(self, kernel: Any, *rest: int) -> None:
        *rest, cluster, is_dependent = rest
        self._write_down(kernel, rest, cluster, bool(is_dependent))

    def _write_down(
        self, kernel: Kernel, rest: Sequence[int], cluster: int, is_early: bool
    ) -> None:
        *sizes, shared_bytes, _stream, _arguments, _ = rest
        shape = (*sizes, shared_bytes, cluster, int(is_early))
        raw = bytearray(params.this_thread.launch_buffer.struct())
        numbers = np.frombuffer(raw, np.uint64)
        places, words = [], []
        for i in np.flatnonzero((numbers > 1 << 32) & (numbers < 1 << 48)).tolist():
            address = int(numbers[i])
            if place := self._place(address):
                places.append((8 * i, place))
                words.append(self._written_at(address))
        del numbers
        for offset, _ in places:
            raw[offset : offset + 8] = bytes(8)
        self.made.append(Launch(kernel, shape, bytes(raw), tuple(places), b"".join(words)))

    def props(self, index: int = 0) -> DeviceProps:
        return props_of(self.card)

    def num_slots(self, tiles: Any) -> int:
        """What fits an SM's shared memory and threads, or what registers are dealt out for."""
        props = self.props()
        fitting = min(
            props.smem_per_sm // (tiles.shared_bytes + _RESERVED_BYTES),
            _THREADS_OF_SM // tiles.threads,
        )
        if isinstance(tiles, (TileConfig, MixedConfig)) and "kMinBlocks" in tiles.config:
            fitting = min(fitting, max(1, min_blocks(tiles.config)))
        return max(1, fitting) * props.num_sms

    def forms_clusters(self, tiles: Any) -> bool:
        return tiles.name == "decode_sm80" and int(self.props().arch[3:].rstrip("a")) >= 90

    def api(self) -> SimpleNamespace:
        made = super().api()
        made.launch_early = self.launch_early
        made.runtime.memcpy = made.runtime.memcpyAsync = self.copy
        return made

    def read_cupy(self, x: np.ndarray, name: str) -> array.ArrayView:
        v = self.read(x, name)
        v.framework = "cupy"
        return v

    def read_tables(
        self, asked: Any, planner: Any, words: int, device: int, stream: int
    ) -> np.ndarray:
        """The kernel is launched, and what it leaves is computed."""
        _READ_TABLES(asked, planner, words, device, stream)
        numbers, made = device_tables.land(asked, planner)
        if made.size:
            self.copy(words, made.ctypes.data, made.nbytes)
        return numbers


_READ_TABLES = read_tables.read


def _raise(error: Exception) -> None:
    """For what the library reports instead."""
    raise error


@contextlib.contextmanager
def plugged_in(card: str) -> Iterator[Card]:
    """The library runs on this card."""

    def restride(x: Any, name: str, shape: Any, strides: Any, offset: int = 0) -> array.ArrayView:
        return array.as_strided(array.view(x, name), shape, strides, offset)

    with emulated.plugging_in(Card(card=card)) as gpu, pytest.MonkeyPatch.context() as patch:
        for name in (x for x in os.environ if x.startswith("CUPYATTN_")):
            patch.delenv(name)
        patch.setenv("CUPYATTN_TUNED", "0")  # what somebody measured of his card is not recorded
        quick.patch(patch)
        # NumPy's arrays stand for CuPy's here.
        replace_all(
            patch,
            (array.restride, restride),
            (_READ_TABLES, gpu.read_tables),
            (scratch._allocate_on, lambda num_bytes, *_: gpu.allocate(num_bytes)),
            (call_cache.report, _raise),
            (memory.acquire, lambda *_: None),
            (memory.release, lambda *_: None),
            (memory.constant, gpu.upload),
        )
        patch.setitem(views._READERS, _OfCupy, gpu.read_cupy)
        patch.setitem(views._READERS, _OnHost, views._read_numpy)
        yield gpu
