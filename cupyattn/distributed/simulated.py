"""Ranks that are threads of one process, over arrays of NumPy or of CuPy.

What several GPUs do is tried on one machine so: each rank's thread makes its calls, and the calls
meet here. `simulate` starts the threads; a rank that raises lets the others raise too.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ..core import parse
from ..core.cupy_module import as_stream, cupy_module
from ..errors import ArgumentError, DeviceError, DistributedError
from . import handshake
from .transport import Transport, Window

_ALIGNMENT = 256


class Meeting:
    """Where the ranks of one process wait for each other, and put what the others take.

    devices   the CUDA device of each rank; None: arrays are NumPy's
    hosts     the host of each rank, for programs of several hosts
    timeout   seconds after which a rank that has not come counts as lost
    """

    def __init__(
        self, size: int, devices: Sequence[int] | None, hosts: Sequence[int], timeout: float
    ) -> None:
        self.size = size
        self.devices = devices
        self.hosts = hosts
        self.timeout = timeout
        self.reason: str | None = None
        self.parts: list[Meeting] = []
        self._posted: list[Any] = [None] * size
        self._here: set[int] = set()
        self._round = 0  # how often all have come
        self._changed = threading.Condition()

    def meet(self, rank: int, what: str, value: Any) -> list[Any]:
        """What every rank has brought to the same call. `leave` must follow."""
        self._posted[rank] = (what, value)
        self._wait(rank)
        posted = list(self._posted)
        found = handshake.out_of_step([name for name, _ in posted], rank)
        if found:
            self.leave(rank)
            raise DistributedError(found)
        return [value for _, value in posted]

    def leave(self, rank: int) -> None:
        """Wait until every rank has taken what it came for."""
        self._wait(rank)

    def stop(self, reason: str) -> None:
        with self._changed:
            self.reason = self.reason or reason
            self._changed.notify_all()

    def _wait(self, rank: int) -> None:
        """Until all have come, which counts even where one of them has closed the group since."""
        with self._changed:
            this = self._round
            self._here.add(rank)
            if len(self._here) == self.size and not self.reason:
                self._here.clear()
                self._round += 1
                self._changed.notify_all()
            self._changed.wait_for(lambda: self._round > this or self.reason, self.timeout)
            if self._round > this:
                return
            absent = sorted(set(range(self.size)) - self._here)
            self.reason = self.reason or (
                f"rank {', '.join(map(str, absent))} did not come within {self.timeout:g} s"
            )
            self._changed.notify_all()
            raise DeviceError(self.reason)


class SimulatedTransport:
    """One rank of a `Meeting`."""

    can_capture = False

    def __init__(self, meeting: Meeting, rank: int) -> None:
        self.rank, self.size = rank, meeting.size
        self.hosts: Sequence[int] = meeting.hosts
        self.on_gpu = meeting.devices is not None
        self.name = "threads of one process" + (", over GPUs" if self.on_gpu else ", in NumPy")
        self._meeting = meeting

    def all_to_all(self, out: Any, given: Any, stream: int | None) -> None:
        part = given.size // self.size
        mine = slice(self.rank * part, (self.rank + 1) * part)
        self._collect("all_to_all", given, stream, lambda arrays: self._copy(out, arrays, mine))

    def all_gather(self, out: Any, given: Any, stream: int | None) -> None:
        self._collect("all_gather", given, stream, lambda arrays: self._copy(out, arrays))

    def reduce_scatter(self, out: Any, given: Any, stream: int | None) -> None:
        mine = slice(self.rank * out.size, (self.rank + 1) * out.size)

        def add(arrays: list[Any]) -> None:
            out[...] = self._here(arrays[0][mine])
            for array in arrays[1:]:  # in rank order, so that the sums are the same every time
                out[...] += self._here(array[mine])

        self._collect("reduce_scatter", given, stream, add)

    def barrier(self, stream: int | None) -> None:
        self._collect("barrier", np.empty(0, np.uint8), stream, lambda arrays: None)

    def share_bytes(self, data: bytes) -> list[bytes]:
        shared = self._meeting.meet(self.rank, "share_bytes", bytes(data))
        self._meeting.leave(self.rank)
        return shared

    def window(self, nbytes: int) -> Window | None:
        if len(set(self.hosts)) > 1:
            return None
        if self.on_gpu:
            with cupy_module().cuda.Device(self._device()):
                local = cupy_module().zeros(nbytes, np.uint8)
                cupy_module().cuda.get_current_stream().synchronize()
        else:
            local = _zeros(nbytes)
        reached = not self.on_gpu or self._reaches_peers()
        brought = self._meeting.meet(self.rank, f"window of {nbytes} bytes", (local, reached))
        self._meeting.leave(self.rank)
        if not all(reached for _, reached in brought):
            return None
        memories = [memory for memory, _ in brought]
        peers = np.array([_address(memory) for memory in memories], np.uint64)
        table = None
        if self.on_gpu:
            with cupy_module().cuda.Device(self._device()):
                table = cupy_module().asarray(peers)
        return Window(local, peers, source="simulated", table=table, memories=memories)

    def split(self, members: Sequence[int]) -> Transport:
        devices, hosts = self._meeting.devices, self._meeting.hosts
        own = Meeting(
            len(members),
            None if devices is None else [devices[rank] for rank in members],
            [hosts[rank] for rank in members],
            self._meeting.timeout,
        )
        # The first of a part brings what its ranks meet in.
        brought = self._meeting.meet(self.rank, "split", own)
        self._meeting.leave(self.rank)
        part = brought[members[0]]
        self._meeting.parts.append(part)
        return SimulatedTransport(part, members.index(self.rank))

    def failure(self) -> str | None:
        return self._meeting.reason

    def abort(self, reason: str) -> None:
        for meeting in (self._meeting, *self._meeting.parts):
            meeting.stop(reason)

    def close(self) -> None:
        self._meeting.stop(f"rank {self.rank} closed its group")

    def _device(self) -> int:
        assert self._meeting.devices is not None
        return self._meeting.devices[self.rank]

    def _reaches_peers(self) -> bool:
        """Let this rank's GPU write the memory of the others; whether it can."""
        assert self._meeting.devices is not None
        runtime, own = cupy_module().cuda.runtime, self._device()
        for device in set(self._meeting.devices) - {own}:
            if not runtime.deviceCanAccessPeer(own, device):
                return False
            with cupy_module().cuda.Device(own):
                try:
                    runtime.deviceEnablePeerAccess(device)
                except runtime.CUDARuntimeError as error:
                    if "already enabled" not in str(error):
                        return False
        return True

    def _collect(
        self, name: str, given: Any, stream: int | None, take: Callable[[list[Any]], None]
    ) -> None:
        what = f"{name} of {given.nbytes} bytes"
        if not self.on_gpu:
            take(self._meeting.meet(self.rank, what, given))
            self._meeting.leave(self.rank)
            return
        with cupy_module().cuda.Device(self._device()), as_stream(stream or 0) as current:
            current.synchronize()  # what is given is ready before another rank reads it
            take(self._meeting.meet(self.rank, what, given))
            current.synchronize()
        self._meeting.leave(self.rank)

    def _copy(self, out: Any, arrays: list[Any], part: slice = slice(None)) -> None:
        size = out.size // self.size
        for rank, array in enumerate(arrays):
            out[rank * size : (rank + 1) * size] = self._here(array[part])

    def _here(self, array: Any) -> Any:
        """The array, in memory of this rank's GPU."""
        if not self.on_gpu or array.device.id == self._device():
            return array
        cupy = cupy_module()
        here = cupy.empty(array.shape, array.dtype)
        stream = cupy.cuda.get_current_stream()
        here.data.copy_from_device_async(array.data, array.nbytes, stream)
        return here


def _zeros(nbytes: int) -> np.ndarray:
    """NumPy's memory, aligned as that of a GPU is."""
    whole = np.zeros(nbytes + _ALIGNMENT, np.uint8)
    first = -whole.ctypes.data % _ALIGNMENT
    return whole[first : first + nbytes]


def _address(memory: Any) -> int:
    return int(memory.ctypes.data if isinstance(memory, np.ndarray) else memory.data.ptr)


def meeting(
    size: int, devices: Sequence[int] | None, hosts: Sequence[int] | None, timeout: float
) -> Meeting:
    size = parse.require_int(size, "size")
    timeout = parse.positive(timeout, "timeout", 60.0)
    if devices is not None and len(devices) != size:
        raise ArgumentError(
            f"devices: got {len(devices)} of them for {size} ranks; wanted one for each rank (the "
            "same one may be given several times)"
        )
    if hosts is not None and len(hosts) != size:
        raise ArgumentError(
            f"hosts: got {len(hosts)} of them for {size} ranks; wanted one for each"
        )
    return Meeting(size, devices, [0] * size if hosts is None else hosts, timeout)


def run_ranks(
    size: int,
    work: Callable[[int], Any],
    stop: Callable[[str], None],
    devices: Sequence[int] | None = None,
) -> list[Any]:
    """What `work(rank)` returns on each rank, run in a thread for each, on its device.

    The first rank that raises calls `stop` with a sentence, and its error is the one raised here.
    """
    answers: list[Any] = [None] * size
    errors: list[BaseException] = []
    lock = threading.Lock()

    def run(rank: int) -> None:
        try:
            if devices is not None:
                cupy_module().cuda.Device(devices[rank]).use()
            answers[rank] = work(rank)
        except BaseException as error:
            with lock:
                errors.append(error)
            stop(f"rank {rank} ended with {type(error).__name__}: {error}")

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return answers
