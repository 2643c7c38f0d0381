"""torch.distributed's process groups: NCCL over CuPy's memory and streams, gloo over NumPy's."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import numpy as np

from ..core.cupy_module import cupy_module
from ..core.packages import needs
from ..errors import ArgumentError, UnsupportedError
from . import windows
from .channels import Channel, StoreChannel, TorchStore
from .ranks import Ranks, in_time


class TorchCalls:
    """Collectives of a process group: `Calls` for `LibraryTransport`.

    The group is its program's, so nothing here destroys it unless `is_ours`; `abort` ends what
    waits in it.
    """

    def __init__(self, group: Any, ranks: Ranks, is_ours: bool = False) -> None:
        import torch
        import torch.distributed as distributed

        self._torch, self._distributed = torch, distributed
        self.group = group
        self.rank, self.size = distributed.get_rank(group), distributed.get_world_size(group)
        self.on_gpu = is_nccl(group)
        self.can_capture = self.on_gpu
        name = "NCCL" if self.on_gpu else str(distributed.get_backend(group))
        self.library = f"{name} by torch {torch.__version__}"
        self._ranks, self._is_ours = ranks, is_ours
        self._device = torch.cuda.current_device() if self.on_gpu else None

    def all_to_all(self, out: Any, given: Any, stream: int | None) -> None:
        self._do(self._distributed.all_to_all_single, out, given, stream)

    def all_gather(self, out: Any, given: Any, stream: int | None) -> None:
        self._do(self._distributed.all_gather_into_tensor, out, given, stream)

    def reduce_scatter(self, out: Any, given: Any, stream: int | None) -> None:
        if self.on_gpu:
            self._do(self._distributed.reduce_scatter_tensor, out, given, stream)
            return
        # gloo adds in an order of its own; in rank order the sums are the same every time.
        parts = np.empty_like(given)
        self.all_to_all(parts, given, stream)
        out[...] = 0
        for part in parts.reshape(self.size, -1):
            out += part

    def part(
        self, members: Sequence[int], ranks: Ranks
    ) -> tuple[Callable[[Ranks], TorchCalls], Channel]:
        distributed = self._distributed
        names = [distributed.get_global_rank(self.group, rank) for rank in members]
        backend = distributed.get_backend(self.group)
        group = distributed.new_group(names, backend=backend, use_local_synchronization=True)
        return lambda part: TorchCalls(group, part, is_ours=True), channel_of(group)

    def failure(self) -> str | None:
        return None  # torch's own watch raises in the calls

    def abort(self) -> None:
        if not self.on_gpu:
            return  # connections end with their process
        group = self.group
        backend = group._get_backend(self._torch.device("cuda", self._device))
        for owner in (group, backend):
            if hasattr(owner, "abort"):
                owner.abort()
                return
        self._distributed.distributed_c10d._abort_process_group(group)

    def close(self) -> None:
        if self._is_ours:
            self._distributed.destroy_process_group(self.group)

    def symmetric(self) -> windows.Source | None:
        return TorchSource(self.group, self._device) if self.on_gpu else None

    def _do(self, call: Callable[..., Any], out: Any, given: Any, stream: int | None) -> None:
        torch = self._torch
        if self.on_gpu:
            with self._on(stream or 0):
                call(self._tensor(out), self._tensor(given), group=self.group)
            return
        given = given if given.flags.writeable else given.copy()  # torch warns of others
        tensors = torch.from_numpy(out), torch.from_numpy(given)
        work = call(tensors[0], tensors[1], group=self.group, async_op=True)
        end = time.monotonic() + self._ranks.seconds
        while not work.is_completed():
            self._ranks.check()
            if time.monotonic() > end:
                self._ranks.fail(f"a rank did not come within {self._ranks.seconds:g} s")
            time.sleep(0.0002)
        work.wait()  # raises what went wrong

    def _tensor(self, array: Any) -> Any:
        """CuPy's memory, without an order between streams: they are the same one."""
        return self._torch.utils.dlpack.from_dlpack(array.__dlpack__(stream=-1))

    def _on(self, stream: int) -> AbstractContextManager[Any]:
        return self._torch.cuda.stream(_stream(stream, self._device))


class TorchSource:
    """torch's symmetric memory: the addresses of every rank's, as torch's own kernels use them."""

    name = "torch symmetric memory"

    def __init__(self, group: Any, device: int | None) -> None:
        self._group, self._device = group, device
        self._memory: Any = None

    def offer(self, nbytes: int) -> bytes:
        import torch
        import torch.distributed._symmetric_memory as symmetric

        device = torch.device("cuda", self._device)
        self._memory = symmetric.empty(nbytes, dtype=torch.uint8, device=device)
        self._memory.zero_()
        torch.cuda.synchronize(device)
        return b""

    def open(self, offers: Sequence[bytes], rank: int) -> tuple[int, list[int]]:
        import torch.distributed._symmetric_memory as symmetric

        handle = symmetric.rendezvous(self._memory, self._group.group_name)
        peers = [int(pointer) for pointer in handle.buffer_ptrs]
        return peers[rank], peers

    def close(self, all_closed: Callable[[], bool]) -> None:
        all_closed()
        self._memory = None


@functools.lru_cache(maxsize=64)
def _stream(pointer: int, device: int | None) -> Any:
    import torch

    if pointer == 0:
        return torch.cuda.default_stream(device)
    return torch.cuda.ExternalStream(pointer, device=device)


def is_nccl(group: Any) -> bool:
    import torch
    import torch.distributed as distributed

    return "cuda:nccl" in str(distributed.get_backend_config(group)) and torch.cuda.is_available()


def channel_of(group: Any) -> Channel:
    """Bytes go through the group's own store, where waiting for them can be given up."""
    import torch.distributed as distributed

    store = TorchStore(distributed.distributed_c10d._get_process_group_store(group))
    rank, size = distributed.get_rank(group), distributed.get_world_size(group)
    # A group that is closed and made anew must not find the keys of the one before.
    number = store.count(f"cupyattn/made/{rank}")
    return StoreChannel(store, rank, size, f"cupyattn/{number}")


@needs("torch")
def calls_and_ranks(group: Any, device: int | None, seconds: float) -> tuple[TorchCalls, Ranks]:
    """The ranks of a process group; its own one of all ranks by default."""
    import torch
    import torch.distributed as distributed

    if not distributed.is_available() or not distributed.is_initialized():
        raise ArgumentError(
            "process_group: torch.distributed has none yet; call "
            "torch.distributed.init_process_group(...) first, or Group.from_environment()"
        )
    group = distributed.group.WORLD if group is None else group
    if distributed.get_rank(group) < 0:
        raise ArgumentError("process_group: this rank is not one of the group's")
    if not is_nccl(group) and "gloo" not in str(distributed.get_backend_config(group)):
        raise UnsupportedError(
            f"process_group: got backend {distributed.get_backend(group)}; wanted nccl or gloo"
        )
    if is_nccl(group):
        device = torch.cuda.current_device() if device is None else device
        torch.cuda.set_device(device)
        cupy_module().cuda.Device(device).use()
    facts = {"library": "torch", **gpu_facts(device if is_nccl(group) else None)}
    channel = in_time("asking torch's store", lambda: channel_of(group), seconds)
    ranks = Ranks(channel, facts, seconds)
    return TorchCalls(group, ranks), ranks


def gpu_facts(device: int | None) -> dict[str, Any]:
    """What must differ between ranks of one host: the bus address of the GPU."""
    if device is None:
        return {"gpu": ""}
    return {"gpu": cupy_module().cuda.runtime.deviceGetPCIBusId(device)}
