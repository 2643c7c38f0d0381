"""A GPU that is not there: CPU arrays that claim to be on it, and a record of what is launched.

Everything above the driver is real, except that kernels are not compiled.
"""

from __future__ import annotations

import contextlib
import ctypes
import re
import struct
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from dataclasses import replace as with_fields
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import cupyattn
from cupyattn import array, jit
from cupyattn.array import memory, views
from cupyattn.core import device, dtypes
from cupyattn.engine import call_cache
from cupyattn.engine import prepared as planless
from cupyattn.engine import run_single as run
from cupyattn.launch.attention import load_kernels
from cupyattn.launch.driver import enqueue, params, scratch
from cupyattn.launch.tiles import decode_sm80, prefill_sm80, wide_sm80, wide_sm90
from cupyattn.launch.tiles.config import HOPPER, Target, TileConfig
from cupyattn.launch.tiles.mixed_sm80 import mixed_config
from cupyattn.launch.tiles.row_classes import LARGE, PERSISTENT

from .patching import replace, replace_all

_BEHIND = 256  # bytes behind the struct of attention kernels that tests look at
STREAM, COUNTERS, SLOTS, MAX_SHARED = 77, 3 << 40, 264, 227 * 1024
HEADER = Path(__file__).parents[2] / "kernels/cupyattn/params/attention.cuh"


@dataclass(frozen=True)
class Launched:
    """One launch. `kernel` is the TileConfig of an attention kernel, the name of any other. behind:
    what lies behind the struct of attention kernels."""

    kernel: Any
    grid: tuple[int, ...]
    block: tuple[int, ...]
    shared_bytes: int
    stream: int
    params: bytes
    device: int
    behind: bytes = field(default=b"", compare=False)


class Gpu:
    """The driver and what else is asked about a GPU, recorded.

    has_clusters  blocks of decode form clusters where there are few
    """

    has_clusters = False

    def __init__(self) -> None:
        self.launches: list[Launched] = []
        self.log: list[tuple[Any, ...]] = []
        self.scratch: list[tuple[int, int]] = []
        self.current, self.is_capturing = 0, False
        self.api = SimpleNamespace(
            Device=self._device,
            alloc=self._alloc,
            get_device=lambda: self.current,
            is_capturing=lambda stream: self.is_capturing,
            is_debugging=False,
            launch_clusters=self._launch,
            is_idle=lambda stream: False,
            launch_early=self._launch,
            launch_kernel=self._launch,
            runtime=SimpleNamespace(
                setDevice=lambda *a: self.log.append(("setDevice", *a)),
                memsetAsync=lambda *a: self.log.append(("memset", *a)),
            ),
        )

    def attentions(self) -> list[Launched]:
        """The launches of attention kernels."""
        return [launch for launch in self.launches if isinstance(launch.kernel, TileConfig)]

    def _launch(self, function: Any, *rest: int) -> None:
        *sizes, shared_bytes, stream, arguments, _ = rest[:10]
        address = ctypes.c_uint64.from_address(arguments).value
        self.launches.append(
            Launched(
                function,
                tuple(sizes[:3]),
                tuple(sizes[3:]),
                shared_bytes,
                stream,
                ctypes.string_at(address, params.ATTENTION.size),
                self.current,
                ctypes.string_at(address + params.ATTENTION.size, _BEHIND),
            )
        )

    def lengths(self) -> tuple[int, int, int, int]:
        """Where what was launched reads qo_lens, kv_lens, qo_offsets and kv_offsets: the planner,
        or blocks that find their items."""
        for launch in self.launches:
            if launch.kernel == "plan_batch":
                return struct.unpack_from("<4Q", launch.params)
        told = params.DEVICE_LENGTHS.unpack_from(self.attentions()[-1].behind)
        qo_offsets, qo_lens, kv_offsets, kv_lens = told
        return qo_lens, kv_lens, qo_offsets, kv_offsets

    def num_requests(self) -> tuple[int, int]:
        """How many requests and rows they were told of."""
        for launch in self.launches:
            if launch.kernel == "plan_batch":
                count, _, rows = struct.unpack_from("<3i", launch.params, 96 + 80)
                return count, rows
        behind = self.attentions()[-1].behind
        count, _, rows, *_ = params.FINDER.unpack_from(behind, params.DEVICE_LENGTHS.size)
        return count, rows

    @contextlib.contextmanager
    def _device(self, index: int) -> Iterator[None]:
        before, self.current = self.current, index
        yield
        self.current = before

    def _alloc(self, num_bytes: int) -> SimpleNamespace:
        memory = np.empty(num_bytes, np.uint8)
        return SimpleNamespace(ptr=memory.ctypes.data, memory=memory)


def pretend(monkeypatch: pytest.MonkeyPatch) -> Gpu:
    """Put a GPU under the library."""
    fake = Gpu()

    def load_kernel(
        problem: Any,
        rows: str,
        device_index: int,
        is_batch: bool = False,
        page_size: int = 0,
        finds: str = "",
    ) -> SimpleNamespace:
        # The portable tile for many rows stands for the one of prefill_sm90.
        row_class = LARGE if rows == PERSISTENT else rows
        asked = problem, row_class, Target(HOPPER, MAX_SHARED, is_batch=is_batch)
        # Scales of keys are Hopper's alone.
        portable = (wide_sm90,) if problem.key_scales else (decode_sm80, prefill_sm80, wide_sm80)
        tiles = next(x for x in portable if x.refusal(*asked) is None).tiles(*asked)
        tiles = tiles.finding(finds)
        return SimpleNamespace(
            function=tiles,
            tiles=tiles,
            num_slots=SLOTS,
            num_sms=SLOTS // 2,
            has_clusters=fake.has_clusters and tiles.name == "decode_sm80",
            max_clusters=lambda cluster: SLOTS // 2 // cluster,
        )

    def load_mixed(
        problem: Any, large: str, small: str, device_index: int
    ) -> SimpleNamespace | None:
        tiles = mixed_config(problem, large, small, MAX_SHARED)
        return tiles and SimpleNamespace(
            function=tiles,
            tiles=tiles,
            num_slots=SLOTS,
            num_sms=SLOTS // 2,
            has_clusters=False,
        )

    real_allocator = scratch.allocator

    def allocator(like: array.ArrayView) -> scratch.Allocate:
        real = real_allocator(like)

        def allocate(num_bytes: int) -> tuple[int, object]:
            address, owner = real(num_bytes)
            fake.scratch.append((address, num_bytes))
            return address, owner

        return allocate

    props = with_fields(device.NO_GPU, index=0, max_smem_per_block=MAX_SHARED)
    replace_all(
        monkeypatch,
        (load_kernels.load_kernel, load_kernel),
        (load_kernels.load_mixed, load_mixed),
        (enqueue.cuda, lambda: fake.api),
        (real_allocator, allocator),
        (memory.constant, memory.from_numpy),
        (device.device_props, lambda index: props),
        (call_cache.report, _raise),
    )
    monkeypatch.setattr(scratch, "_make", lambda device, stream: (COUNTERS, None))
    monkeypatch.setattr(scratch, "_kept", scratch._Kept())

    def allocate_on(num_bytes: int, *_: int) -> tuple[int, object]:
        owner = fake.api.alloc(num_bytes)
        fake.scratch.append((owner.ptr, num_bytes))
        return owner.ptr, owner

    monkeypatch.setattr(scratch, "_allocate_on", allocate_on)
    # torch gives its CPU tensors the index -1.
    monkeypatch.setattr(views, "_CUDA", (array.Device("cuda", 0),) * 2)
    loaded = {"set_shared_memory": lambda num_bytes: None}
    monkeypatch.setattr(jit, "load", lambda name, *_: SimpleNamespace(function=name, **loaded))
    return fake


def _raise(error: Exception) -> None:
    """For what the library reports instead."""
    raise error


def forget() -> None:
    """Forget every call."""
    run._entries.clear()
    run._launchers.clear()
    call_cache.clear_all()
    planless.plan_of.cache_clear()


def maker(framework: str, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """A function that makes a torch or CuPy array, of zeros, that claims to be on the GPU."""
    if framework == "torch":
        torch = pytest.importorskip("torch")
        monkeypatch.setattr(torch.Tensor, "is_cuda", True, raising=False)
        current = {0: STREAM}.__getitem__
        monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", current, raising=False)
        return lambda *shape, dtype="bfloat16": torch.zeros(shape, dtype=getattr(torch, dtype))
    cupy = pytest.importorskip("cupy")
    stream = SimpleNamespace(ptr=STREAM)
    monkeypatch.setattr(cupy.cuda, "get_current_stream", lambda index: stream)

    def make_cupy(*shape: int, dtype: str = "bfloat16") -> Any:
        host = np.zeros(shape, dtypes.parse(dtype).numpy)
        address, size = host.ctypes.data, max(1, host.nbytes)
        memory = cupy.cuda.UnownedMemory(address, size, host, device_id=0)
        return cupy.ndarray(shape, host.dtype, cupy.cuda.MemoryPointer(memory, 0))

    def empty(dtype: np.dtype, index: int, shape: tuple[int, ...]) -> Any:
        return make_cupy(*shape, dtype=dtype.name)

    replace(monkeypatch, memory._empty_cupy, empty)
    return make_cupy


def fields() -> list[tuple[str, str]]:
    """(format, name) of every field of the kernels' struct, as its header has them."""
    body = HEADER.read_text().split("struct AttentionParams {")[1].split("};")[0]
    formats = {"int64_t": "q", "int32_t": "i", "float": "f", "uint32_t": "I"}
    # Arrays are bytes here, but for the last one.
    blocks = {"steps": "16s", "logits_arrays": "96s", "logits_numbers": "32s", "rope_step": "128I"}
    found = []
    for kind, names in re.findall(r"^\s*(?:const )?(\w+\*?) ([^;/]*);", body, re.MULTILINE):
        for name in names.split(", "):
            name = name.split("[")[0]
            code = blocks.get(name) or ("Q" if kind.endswith("*") else formats[kind])
            found.append((code, name))
    return found


def unpack(raw: bytes) -> dict[str, Any]:
    known = fields()
    values = struct.unpack("<" + "".join(code for code, _ in known), raw)
    # Blocks of user-written logits that are empty are 0, as pointers are.
    values = tuple(0 if isinstance(x, bytes) and not any(x) else x for x in values)
    named = dict(zip((name for _, name in known), values, strict=False))
    return named | {"rope_step": values[len(known) - 1 :]}


def pointer(x: Any) -> int:
    return array.view(x, "x").ptr


def count_functions(call: Callable[[], Any]) -> int:
    """The functions of the library written in Python that a call runs. Comprehensions are none."""
    package = str(Path(cupyattn.__file__).parent)
    counted = 0

    def count(frame: Any, event: str, argument: Any) -> None:
        nonlocal counted
        code = frame.f_code
        is_function = event == "call" and not code.co_name.startswith("<")
        counted += is_function and code.co_filename.startswith(package)

    sys.setprofile(count)
    try:
        call()
    finally:
        sys.setprofile(None)
    return counted
