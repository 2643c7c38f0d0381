"""NCCL's collectives by the packages that bind it: nccl4py, CuPy itself, or cupyx.distributed.

The library under all of them is the same libnccl, which CuPy's, torch's and JAX's wheels bring.
"""

from __future__ import annotations

import sys
import threading
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ..core.cupy_module import as_stream, cupy_module
from ..errors import ArgumentError, DeviceError, MissingPackageError
from . import windows
from .channels import Channel, Check
from .ranks import Ranks, in_time

UNIQUE_ID_BYTES = 128
_IN_PROGRESS = 7  # ncclInProgress, which is no error


class Binding:
    """A package that makes NCCL's communicators.

    unique_id()                         128 bytes, which all ranks of a new communicator need
    communicator(unique_id, rank, size) waits until all ranks have come
    """

    def unique_id(self) -> bytes:
        raise NotImplementedError

    def communicator(self, unique_id: bytes, rank: int, size: int) -> NcclCalls:
        raise NotImplementedError


class NcclCalls:
    """A communicator of NCCL: `Calls` for `LibraryTransport`."""

    on_gpu = True
    can_capture = True
    library = "NCCL"

    def __init__(self, binding: Binding | None, rank: int, size: int) -> None:
        self.rank, self.size = rank, size
        self._binding = binding
        self._is_over = False
        self._looking = threading.Lock()

    def all_to_all(self, out: Any, given: Any, stream: int | None) -> None:
        raise NotImplementedError

    def all_gather(self, out: Any, given: Any, stream: int | None) -> None:
        raise NotImplementedError

    def reduce_scatter(self, out: Any, given: Any, stream: int | None) -> None:
        raise NotImplementedError

    def part(
        self, members: Sequence[int], ranks: Ranks
    ) -> tuple[Callable[[Ranks], NcclCalls], Channel]:
        binding = self._binding or binding_here()
        is_first = members[0] == ranks.rank
        ids = ranks.share("split", binding.unique_id() if is_first else b"")
        calls = binding.communicator(ids[members[0]], members.index(ranks.rank), len(members))
        is_alone = isinstance(ranks.channel, NcclChannel)
        channel = NcclChannel(calls) if is_alone else ranks.channel.part(members)
        return lambda part: calls, channel

    def failure(self) -> str | None:
        with self._looking:
            return None if self._is_over else self._noticed()

    def abort(self) -> None:
        self._end(self._abort)

    def close(self) -> None:
        self._end(self._destroy)

    def _noticed(self) -> str | None:
        """NCCL's asynchronous error, in words."""
        return None

    def _abort(self) -> None:
        pass

    def _destroy(self) -> None:
        pass

    def _end(self, end: Callable[[], None]) -> None:
        """Once, and while no other thread looks for errors of what is freed here."""
        with self._looking:
            was_over, self._is_over = self._is_over, True
        if not was_over:
            end()

    def symmetric(self) -> windows.Source | None:
        return None


class CupyNccl(Binding):
    """`cupy.cuda.nccl`: in every wheel of CuPy, and in need of libnccl alone."""

    def __init__(self) -> None:
        self._nccl = _cupy_nccl()

    def unique_id(self) -> bytes:
        return bytes(value & 255 for value in self._nccl.get_unique_id())

    def communicator(self, unique_id: bytes, rank: int, size: int) -> NcclCalls:
        try:
            comm = self._nccl.NcclCommunicator(size, unique_id, rank)
        except TypeError:  # releases that take C's signed characters
            signed = tuple(value - 256 if value > 127 else value for value in unique_id)
            comm = self._nccl.NcclCommunicator(size, signed, rank)
        return CupyCalls(self._nccl, comm, self, rank, size)


class CupyCalls(NcclCalls):
    def __init__(self, nccl: Any, comm: Any, binding: Binding, rank: int, size: int) -> None:
        super().__init__(binding, rank, size)
        self.library = f"NCCL {_words(nccl.get_version())} by CuPy"
        self._nccl, self._comm = nccl, comm

    def all_to_all(self, out: Any, given: Any, stream: int | None) -> None:
        nccl, comm, part = self._nccl, self._comm, given.size // self.size
        to, source = out.data.ptr, given.data.ptr
        nccl.groupStart()
        try:
            for peer in range(self.size):
                comm.send(source + peer * part, part, nccl.NCCL_UINT8, peer, stream or 0)
                comm.recv(to + peer * part, part, nccl.NCCL_UINT8, peer, stream or 0)
        finally:
            nccl.groupEnd()

    def all_gather(self, out: Any, given: Any, stream: int | None) -> None:
        uint8 = self._nccl.NCCL_UINT8
        self._comm.allGather(given.data.ptr, out.data.ptr, given.size, uint8, stream or 0)

    def reduce_scatter(self, out: Any, given: Any, stream: int | None) -> None:
        float32, add = self._nccl.NCCL_FLOAT32, self._nccl.NCCL_SUM
        source, to = given.data.ptr, out.data.ptr
        self._comm.reduceScatter(source, to, out.size, float32, add, stream or 0)

    def symmetric(self) -> windows.Source | None:
        """nccl4py's, over the same communicator, where it is installed."""
        try:
            import nccl.core
        except Exception:  # it is not installed, or not for this library
            return None
        return NcclSource(nccl.core, nccl.core.Communicator(self._comm.comm), self.size)

    def _noticed(self) -> str | None:
        try:
            self._comm.check_async_error()
        except Exception as error:
            return f"NCCL: {error}"
        return None

    def _abort(self) -> None:
        self._comm.abort()

    def _destroy(self) -> None:
        self._comm.destroy()


class Nccl4py(Binding):
    """nccl4py, NCCL's own package."""

    def __init__(self) -> None:
        import nccl.core

        self._nccl: Any = nccl.core

    def unique_id(self) -> bytes:
        return bytes(self._nccl.get_unique_id().as_bytes)

    def communicator(self, unique_id: bytes, rank: int, size: int) -> NcclCalls:
        identity = self._nccl.UniqueId.from_bytes(unique_id)
        comm = self._nccl.Communicator.init(size, rank, identity)
        return Nccl4pyCalls(self._nccl, comm, self, rank, size)


class Nccl4pyCalls(NcclCalls):
    def __init__(self, nccl: Any, comm: Any, binding: Binding | None, rank: int, size: int) -> None:
        super().__init__(binding, rank, size)
        self._nccl, self.comm = nccl, comm
        release = _nccl4py_release()
        self.library = f"NCCL {_words(release)} by nccl4py"
        self._has_all_to_all = release >= 22800

    def all_to_all(self, out: Any, given: Any, stream: int | None) -> None:
        if self._has_all_to_all:
            self.comm.alltoall(given, out, stream=stream or 0)
            return
        part = given.size // self.size
        with self._nccl.group():
            for peer in range(self.size):
                mine = slice(peer * part, (peer + 1) * part)
                self.comm.send(given[mine], peer, stream=stream or 0)
                self.comm.recv(out[mine], peer, stream=stream or 0)

    def all_gather(self, out: Any, given: Any, stream: int | None) -> None:
        self.comm.allgather(given, out, stream=stream or 0)

    def reduce_scatter(self, out: Any, given: Any, stream: int | None) -> None:
        self.comm.reduce_scatter(given, out, self._nccl.SUM, stream=stream or 0)

    def _noticed(self) -> str | None:
        state = int(self.comm.get_async_error())
        return None if state in (0, _IN_PROGRESS) else f"NCCL: {self.comm.get_last_error()}"

    def _abort(self) -> None:
        self.comm.abort()

    def _destroy(self) -> None:
        self.comm.destroy()

    def symmetric(self) -> windows.Source | None:
        return NcclSource(self._nccl, self.comm, self.size)


class CupyxCalls(NcclCalls):
    """`cupyx.distributed.NCCLBackend`, which its program made and keeps."""

    library = "NCCL by cupyx.distributed"

    def __init__(self, backend: Any, rank: int, size: int) -> None:
        super().__init__(None, rank, size)
        self._backend = backend

    def all_to_all(self, out: Any, given: Any, stream: int | None) -> None:
        shape = self.size, -1
        self._backend.all_to_all(given.reshape(shape), out.reshape(shape), as_stream(stream or 0))

    def all_gather(self, out: Any, given: Any, stream: int | None) -> None:
        self._backend.all_gather(given, out, given.size, as_stream(stream or 0))

    def reduce_scatter(self, out: Any, given: Any, stream: int | None) -> None:
        self._backend.reduce_scatter(given, out, out.size, "sum", as_stream(stream or 0))

    def _abort(self) -> None:
        # No public function ends what waits; without it a dead rank would hold the stream.
        communicator = getattr(self._backend, "_comm", None)
        if communicator is not None:
            communicator.abort()


class NcclSource:
    """Windows that NCCL registers, with a peer's addresses asked for on the host: NCCL 2.29.2."""

    name = "NCCL windows"

    def __init__(self, nccl: Any, comm: Any, size: int) -> None:
        self._nccl, self._comm, self._size = nccl, comm, size
        self._memory: Any = None
        self._window: Any = None

    def offer(self, nbytes: int) -> bytes:
        # A release that lacks it says so here, before any rank begins what all must do.
        if not hasattr(self._nccl.RegisteredWindowHandle, "get_peer_device_pointer"):
            raise MissingPackageError("nccl4py knows no get_peer_device_pointer")
        release = _nccl4py_release()
        if release < 22902:
            raise MissingPackageError(f"NCCL {_words(release)}; wanted 2.29.2 or newer")
        from nccl.core.interop import cupy as memory

        self._memory = memory.empty(nbytes, np.uint8)
        self._memory[...] = 0
        cupy_module().cuda.get_current_stream().synchronize()
        return b""

    def open(self, offers: Sequence[bytes], rank: int) -> tuple[int, list[int]]:
        flag = self._nccl.WindowFlag.COLL_SYMMETRIC
        self._window = self._comm.register_window(self._memory, flag)
        peers = [self._window.get_peer_device_pointer(peer) for peer in range(self._size)]
        if None in peers:
            raise DeviceError(f"NCCL reaches no memory of ranks {_absent(peers)} directly")
        return int(self._memory.data.ptr), [int(peer) for peer in peers]

    def close(self, all_closed: Callable[[], bool]) -> None:
        all_closed()
        window, self._window = self._window, None
        if window is not None:
            window.close()
        self._memory = None


class NcclChannel:
    """Bytes on the host by NCCL itself, where a group has a communicator and nothing else."""

    def __init__(self, calls: NcclCalls) -> None:
        self.rank, self.size = calls.rank, calls.size
        self._calls = calls
        self._stream = cupy_module().cuda.Stream(non_blocking=True)

    def share(self, data: bytes, check: Check, seconds: float) -> list[bytes]:
        own = np.array([len(data)], np.int64).view(np.uint8)
        lengths = self._gathered(own, check, seconds).view(np.int64)
        padded = np.zeros(max(1, int(lengths.max())), np.uint8)
        padded[: len(data)] = np.frombuffer(data, np.uint8)
        rows = self._gathered(padded, check, seconds).reshape(self.size, -1)
        return [row[:length].tobytes() for row, length in zip(rows, lengths.tolist(), strict=True)]

    def part(self, members: Sequence[int]) -> Channel:
        raise NotImplementedError  # NcclCalls.part makes the channel of its new communicator

    def _gathered(self, data: np.ndarray, check: Check, seconds: float) -> np.ndarray:
        cupy, stream = cupy_module(), self._stream
        with stream:
            given = cupy.asarray(data)
            out = cupy.empty(data.nbytes * self.size, np.uint8)
            self._calls.all_gather(out, given, stream.ptr)
            end = time.monotonic() + seconds
            while not stream.done:
                check()
                if time.monotonic() > end:
                    raise DeviceError(f"a rank did not come within {seconds:g} s")
                time.sleep(0.0002)
            return cupy.asnumpy(out)


def binding_here() -> Binding:
    """CuPy's binding, whose calls take the host a third of nccl4py's time; nccl4py without it."""
    try:
        return CupyNccl()
    except MissingPackageError:
        try:
            return Nccl4py()
        except Exception:  # it is not installed, or finds no library, or not the one it is for
            pass
        raise


def new_unique_id() -> bytes:
    """128 bytes for `Group.from_unique_id`: one rank makes them and hands them to all others."""
    return binding_here().unique_id()


def connected(
    unique_id: bytes, rank: int, size: int, seconds: float, check: Check = lambda: None
) -> NcclCalls:
    """The communicator of all ranks; DeviceError where they do not all come."""
    if not isinstance(unique_id, (bytes, bytearray)):
        raise ArgumentError(
            f"unique_id: got {type(unique_id).__name__}; wanted bytes of new_unique_id()"
        )
    if len(unique_id) != UNIQUE_ID_BYTES:
        raise ArgumentError(
            f"unique_id: got {len(unique_id)} bytes; wanted {UNIQUE_ID_BYTES}, as new_unique_id() "
            "makes them on one rank for all"
        )
    binding = binding_here()
    return in_time(
        "making NCCL's communicator",
        lambda: binding.communicator(unique_id, rank, size),
        seconds,
        check=check,
        device=cupy_module().cuda.Device(),
    )


def _cupy_nccl() -> Any:
    """CuPy's binding. CuPy looks for libnccl once, when it is imported, so we look again."""
    cupy_module()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from cupy.cuda import nccl
    if nccl.available:
        return nccl
    _load_library()
    try:
        from cupy_backends.cuda.libs import nccl as binding
    except ImportError as error:
        raise MissingPackageError(
            f"NCCL cannot be loaded ({error}); install nvidia-nccl-cu13 or nvidia-nccl-cu12, "
            "whichever CUDA version CuPy is for",
            name="nccl",
        ) from error
    return binding


def _load_library() -> None:
    """libnccl of NVIDIA's wheel, where torch has not loaded it yet."""
    import ctypes

    for folder in filter(None, sys.path):
        for path in sorted(Path(folder).glob("nvidia/*/lib/libnccl.so.2")):
            try:
                ctypes.CDLL(str(path), ctypes.RTLD_GLOBAL)
            except OSError:
                continue
            return


def _nccl4py_release() -> int:
    """The library's number, as NCCL_VERSION_CODE has it."""
    from nccl.bindings import nccl

    return int(nccl.get_version())


def _words(version: int) -> str:
    return f"{version // 10000}.{version // 100 % 100}.{version % 100}"


def _absent(peers: Sequence[int | None]) -> list[int]:
    return [rank for rank, peer in enumerate(peers) if peer is None]
