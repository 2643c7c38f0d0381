"""NCCL, and what of CuPy groups of GPUs use, over NumPy's memory and threads for ranks.

`install` puts them in place of CuPy. Addresses are real ones of this process, so that a handle of
memory opens as the memory itself. Every call is noted in `calls`.
"""

from __future__ import annotations

import contextlib
import ctypes
import sys
import threading
from collections.abc import Callable, Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

from cupyattn.distributed import nccl, ranks, simulated, starts, torch, windows
from cupyattn.distributed.channels import Check
from cupyattn.distributed.ranks import Ranks


class Array(np.ndarray):
    """NumPy's, with what CuPy's arrays have besides."""

    @property
    def data(self) -> Any:  # type: ignore[override]
        return SimpleNamespace(ptr=self.ctypes.data)


class Runtime:
    CUDARuntimeError = RuntimeError
    memcpyHostToDevice, memcpyDeviceToHost = 1, 2

    def __init__(self, calls: list[str]) -> None:
        self._calls = calls
        self._memory: dict[int, np.ndarray] = {}
        self.open_fails_on: Callable[[], bool] = lambda: False
        self.capturing: set[int] = set()

    def getDeviceCount(self) -> int:
        return 4

    def getDevice(self) -> int:
        return Device().id

    def streamIsCapturing(self, stream: int) -> bool:
        return stream in self.capturing

    def deviceGetPCIBusId(self, device: int) -> str:
        return f"0000:{device:02x}:00.0"

    def malloc(self, size: int) -> int:
        memory = np.full(size, 7, np.uint8)
        self._memory[memory.ctypes.data] = memory
        return int(memory.ctypes.data)

    def free(self, address: int) -> None:
        self._calls.append("free")
        del self._memory[address]

    def memset(self, address: int, value: int, size: int) -> None:
        ctypes.memset(address, value, size)

    def memcpy(self, to: int, source: int, size: int, kind: int) -> None:
        ctypes.memmove(to, source, size)

    def deviceSynchronize(self) -> None:
        pass

    def ipcGetMemHandle(self, address: int) -> bytes:
        return address.to_bytes(64, "little")

    def ipcOpenMemHandle(self, handle: bytes) -> int:
        if self.open_fails_on():
            raise RuntimeError("invalid device context")
        self._calls.append(f"open on {Device().id}")
        return int.from_bytes(handle, "little")

    def ipcCloseMemHandle(self, address: int) -> None:
        self._calls.append("close")


class Stream:
    ptr, done = 0x51, True

    def __init__(self, non_blocking: bool = True) -> None:
        pass

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def synchronize(self) -> None:
        pass


_CURRENT = threading.local()


class Device:
    """CUDA's current device is one of each thread, and 0 in a new one."""

    def __init__(self, index: int | None = None) -> None:
        self.id = getattr(_CURRENT, "device", 0) if index is None else index
        self._before: list[int] = []

    def use(self) -> None:
        _CURRENT.device = self.id

    def __enter__(self) -> Device:
        self._before.append(Device().id)
        self.use()
        return self

    def __exit__(self, *error: object) -> None:
        _CURRENT.device = self._before.pop()


class NcclError(RuntimeError):
    pass


class Library:
    """The functions of `cupy.cuda.nccl`; what is sent meets in threads.

    takes_tuples  whether an id is a tuple of signed characters, as in older releases
    """

    NCCL_UINT8, NCCL_FLOAT32, NCCL_SUM = 1, 7, 0
    available = True

    def __init__(self, calls: list[str], takes_tuples: bool = False) -> None:
        self.calls = calls
        self.takes_tuples = takes_tuples
        self.error: str | None = None
        self._meetings: dict[tuple[bytes, int], simulated.Meeting] = {}
        self._lock = threading.Lock()
        self._grouped = threading.local()
        self._made = 0

    def get_version(self) -> int:
        return 22809

    def get_unique_id(self) -> Any:
        with self._lock:
            self._made += 1
            identity = bytes([255 - self._made, *range(127)])
        return tuple(x - 256 if x > 127 else x for x in identity) if self.takes_tuples else identity

    def NcclCommunicator(self, size: int, identity: Any, rank: int) -> Any:
        if isinstance(identity, tuple) is not self.takes_tuples:
            raise TypeError("Argument 'commId' has incorrect type")
        assert len(identity) == 128
        self.calls.append(f"communicator on {Device().id}")
        key = bytes(x & 255 for x in identity), size
        with self._lock:
            meeting = self._meetings.setdefault(key, simulated.Meeting(size, None, [0] * size, 10))
        communicator = Communicator(self, meeting, rank)
        meeting.meet(rank, "init", None)
        meeting.leave(rank)
        return communicator

    def groupStart(self) -> None:
        self._grouped.sent, self._grouped.wanted = {}, {}

    def groupEnd(self) -> None:
        communicator, sent, wanted = self._grouped.owner, self._grouped.sent, self._grouped.wanted
        everyone = communicator.meeting.meet(communicator.rank, "group", sent)
        for peer, (address, count) in wanted.items():
            source, size = everyone[peer][communicator.rank]
            assert size == count
            ctypes.memmove(address, source, count)
        communicator.meeting.leave(communicator.rank)


class Communicator:
    comm = 0x2B

    def __init__(self, library: Library, meeting: simulated.Meeting, rank: int) -> None:
        self.library, self.meeting, self.rank = library, meeting, rank
        self.is_over = False

    def send(self, address: int, count: int, kind: int, peer: int, stream: int) -> None:
        self._note("send", kind, peer, stream)
        self.library._grouped.owner = self
        self.library._grouped.sent[peer] = address, count

    def recv(self, address: int, count: int, kind: int, peer: int, stream: int) -> None:
        self._note("recv", kind, peer, stream)
        self.library._grouped.wanted[peer] = address, count

    def allGather(self, given: int, out: int, count: int, kind: int, stream: int) -> None:
        self._note("allGather", kind, "", stream)
        for rank, source in enumerate(self.meeting.meet(self.rank, "allGather", given)):
            ctypes.memmove(out + rank * count, source, count)
        self.meeting.leave(self.rank)

    def reduceScatter(
        self, given: int, out: int, count: int, kind: int, op: int, stream: int
    ) -> None:
        self._note("reduceScatter", kind, op, stream)
        size = self.meeting.size
        total = np.zeros(count, np.float32)
        for source in self.meeting.meet(self.rank, "reduceScatter", given):
            values = (ctypes.c_float * (size * count)).from_address(source)
            total += np.array(values, np.float32)[self.rank * count : (self.rank + 1) * count]
        ctypes.memmove(out, total.ctypes.data, total.nbytes)
        self.meeting.leave(self.rank)

    def check_async_error(self) -> None:
        assert not self.is_over, "an error is asked for of a communicator that was freed"
        if self.library.error:
            raise NcclError(self.library.error)

    def abort(self) -> None:
        self.library.calls.append(f"abort {self.rank}")
        self.is_over = True
        self.meeting.stop("NCCL_ERROR_UNHANDLED_CUDA_ERROR: aborted")

    def destroy(self) -> None:
        self.library.calls.append(f"destroy {self.rank}")
        self.is_over = True

    def _note(self, name: str, kind: int, more: Any, stream: int) -> None:
        self.library.calls.append(f"{name} {kind} {more} on {stream}".replace("  ", " "))


def fake_cupy(calls: list[str]) -> Any:
    def ndarray(shape: tuple[int], dtype: Any, pointer: Any) -> Array:
        memory = (ctypes.c_uint8 * shape[0]).from_address(pointer.address)
        return np.frombuffer(memory, dtype).view(Array)

    cuda = SimpleNamespace(
        runtime=Runtime(calls),
        Stream=Stream,
        Device=Device,
        UnownedMemory=lambda address, size, owner: SimpleNamespace(address=address, owner=owner),
        MemoryPointer=lambda memory, offset: SimpleNamespace(address=memory.address + offset),
        get_current_stream=Stream,
    )
    return SimpleNamespace(
        cuda=cuda,
        asarray=lambda x: np.array(x).view(Array),
        asnumpy=lambda x: np.array(x),
        empty=lambda shape, dtype: np.empty(shape, dtype).view(Array),
        zeros=lambda shape, dtype: np.zeros(shape, dtype).view(Array),
        ndarray=ndarray,
    )


@contextlib.contextmanager
def installed(takes_tuples: bool = False) -> Iterator[tuple[Library, Any, list[str]]]:
    """The stand-ins of NCCL and CuPy, and the list of calls, while the block runs."""
    calls: list[str] = []
    library, cupy = Library(calls, takes_tuples), fake_cupy(calls)
    with pytest.MonkeyPatch.context() as patch:
        for module in (nccl, ranks, starts, torch, windows):
            if hasattr(module, "cupy_module"):
                patch.setattr(module, "cupy_module", lambda: cupy)
        from cupyattn.distributed import group
        from cupyattn.distributed import library as transports

        for module in (group, transports):
            patch.setattr(module, "cupy_module", lambda: cupy)
        patch.setattr(nccl, "_cupy_nccl", lambda: library)
        patch.setattr(nccl, "as_stream", lambda pointer: SimpleNamespace(ptr=pointer))
        patch.setitem(sys.modules, "nccl", None)  # nccl4py is not installed
        yield library, cupy, calls


class ThreadChannel:
    """A channel between threads of one process."""

    def __init__(self, meeting: simulated.Meeting, rank: int) -> None:
        self.rank, self.size = rank, meeting.size
        self._meeting = meeting

    def share(self, data: bytes, check: Check, seconds: float) -> list[bytes]:
        shared = self._meeting.meet(self.rank, "share", data)
        self._meeting.leave(self.rank)
        return shared

    def part(self, members: Any) -> Any:
        raise NotImplementedError


def seem_processes(found: Ranks) -> Ranks:
    """Let ranks that are threads be taken for processes, which windows are for."""
    for rank, facts in enumerate(found.facts):
        facts["process"] = 1000 + rank
    return found


def module(name: str, **names: Any) -> ModuleType:
    found = ModuleType(name)
    vars(found).update(names)
    return found
