"""How a group starts: from an id of NCCL, torch, MPI, JAX, a folder, or what a launcher has set."""

from __future__ import annotations

import atexit
import importlib.util
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ..core import parse
from ..core.cupy_module import cupy_module
from ..core.packages import needs
from ..errors import ArgumentError, DeviceError, MissingPackageError
from . import nccl, torch, windows
from .channels import Channel, Folder, JaxStore, MpiChannel, StoreChannel, TorchStore
from .library import Calls, LibraryTransport
from .ranks import Ranks, check_rank, in_time

_jax_groups = iter(range(1 << 62))


class HostCalls:
    """Collectives of NumPy arrays over a channel: groups without a GPU, which tests are made of."""

    on_gpu = False
    can_capture = False

    def __init__(self, ranks: Ranks, library: str) -> None:
        self.library = library
        self._ranks = ranks

    def all_to_all(self, out: Any, given: Any, stream: int | None) -> None:
        rows = self._shared(given, "all_to_all").reshape(self._ranks.size, self._ranks.size, -1)
        out[...] = rows[:, self._ranks.rank].reshape(-1)

    def all_gather(self, out: Any, given: Any, stream: int | None) -> None:
        out[...] = self._shared(given, "all_gather")

    def reduce_scatter(self, out: Any, given: Any, stream: int | None) -> None:
        data = self._shared(given.view(np.uint8), "reduce_scatter").view(np.float32)
        rows = data.reshape(self._ranks.size, self._ranks.size, -1)[:, self._ranks.rank]
        out[...] = 0
        for row in rows:  # in rank order
            out += row

    def part(
        self, members: Sequence[int], ranks: Ranks
    ) -> tuple[Callable[[Ranks], Calls], Channel]:
        return lambda part: HostCalls(part, self.library), ranks.channel.part(members)

    def failure(self) -> str | None:
        return None

    def abort(self) -> None:
        pass

    def close(self) -> None:
        pass

    def symmetric(self) -> windows.Source | None:
        return None

    def _shared(self, given: np.ndarray, name: str) -> np.ndarray:
        what = f"{name} of {given.nbytes} bytes"
        return np.frombuffer(b"".join(self._ranks.share(what, given.tobytes())), np.uint8)


def from_channel(
    channel: Channel, library: str, device: int | None, on_gpu: bool | None, seconds: float
) -> LibraryTransport:
    """Ranks that have a way for bytes on the host: NCCL between GPUs, the same way on the CPU."""
    on_gpu = has_gpu() if on_gpu is None else on_gpu
    facts = {"library": f"{library}{' with GPUs' if on_gpu else ''}"}
    if not on_gpu:
        ranks = Ranks(channel, facts, seconds)
        return LibraryTransport(HostCalls(ranks, library), ranks)
    ranks = Ranks(channel, facts | torch.gpu_facts(use(device)), seconds)
    try:
        own = nccl.new_unique_id() if ranks.rank == 0 else b""
        identity = ranks.share("start", own)[0]
        calls = nccl.connected(identity, ranks.rank, ranks.size, seconds, ranks.check)
    except BaseException as error:
        ranks.fail(f"rank {ranks.rank} could not start NCCL ({error})", tell=True)
        ranks.stop()
        raise
    calls.library = f"{calls.library}, started by {library}"
    return LibraryTransport(calls, ranks)


def from_unique_id(
    unique_id: bytes, rank: int, size: int, device: int | None, seconds: float
) -> LibraryTransport:
    check_rank(rank, size)
    use(device)
    calls = nccl.connected(unique_id, rank, size, seconds)
    return _over_nccl(calls, seconds)


def from_cupyx(backend: Any, seconds: float) -> LibraryTransport:
    rank, size = getattr(backend, "rank", None), getattr(backend, "_n_devices", None)
    if rank is None or size is None or not hasattr(backend, "all_to_all"):
        raise ArgumentError(
            f"comm: got {type(backend).__name__}; wanted what "
            "cupyx.distributed.init_process_group(size, rank) returns"
        )
    return _over_nccl(nccl.CupyxCalls(backend, rank, size), seconds)


def from_torch(group: Any, device: int | None, seconds: float) -> LibraryTransport:
    calls, ranks = torch.calls_and_ranks(group, device, seconds)
    return LibraryTransport(calls, ranks)


def from_mpi(
    comm: Any, device: int | None, on_gpu: bool | None, seconds: float
) -> LibraryTransport:
    # A communicator of our own, so that no message of the program's is taken for one of ours.
    own = _mpi_world() if comm is None else comm
    for name in ("Dup", "Iallgather", "Iallgatherv", "Split"):
        if not hasattr(own, name):
            raise ArgumentError(
                f"comm: got {type(own).__name__}; wanted a communicator of mpi4py, such as "
                "MPI.COMM_WORLD"
            )
    return from_channel(MpiChannel(own.Dup()), "MPI", device, on_gpu, seconds)


def from_jax(on_gpu: bool | None, seconds: float) -> LibraryTransport:
    client, rank, size, device = _jax_client()
    channel = StoreChannel(JaxStore(client), rank, size, f"cupyattn/{next(_jax_groups)}")
    is_gpu = device is not None if on_gpu is None else on_gpu
    return from_channel(channel, "JAX", device, is_gpu, seconds)


def from_folder(
    folder: str | Path,
    rank: int,
    size: int,
    device: int | None,
    on_gpu: bool | None,
    seconds: float,
) -> LibraryTransport:
    check_rank(rank, size)
    if not isinstance(folder, (str, os.PathLike)) or Path(folder).is_file():
        raise ArgumentError(f"folder: got {folder!r}; wanted the path of a folder, new or empty")
    channel = StoreChannel(Folder(folder), rank, size, "cupyattn")
    return from_channel(channel, "a folder", device, on_gpu, seconds)


def from_environment(on_gpu: bool | None, seconds: float) -> LibraryTransport:
    """By what is there already, then by what the launcher has set."""
    modules = sys.modules
    if "torch" in modules and _has_process_group(modules["torch"]):
        return from_torch(None, _local_device(on_gpu), seconds)
    if "jax" in modules and modules["jax"].distributed.is_initialized():
        return from_jax(on_gpu, seconds)
    environment = os.environ
    if "MASTER_ADDR" in environment and "RANK" in environment and "WORLD_SIZE" in environment:
        if importlib.util.find_spec("torch") is None:
            return from_cupyx(_cupyx_backend(seconds), seconds)
        channel = in_time("starting torch's store", _torchrun_channel, seconds)
        return from_channel(channel, "torchrun", _local_device(on_gpu), on_gpu, seconds)
    if any(name in environment for name in ("OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK")):
        return from_mpi(None, _local_device(on_gpu), on_gpu, seconds)
    raise ArgumentError(
        "from_environment: neither RANK, WORLD_SIZE and MASTER_ADDR (torchrun) nor what mpirun "
        "sets is in the environment, and neither torch.distributed nor jax.distributed has been "
        "started; start the program with torchrun or mpirun, or name the way: Group.from_folder, "
        "Group.from_unique_id"
    )


def has_gpu() -> bool:
    try:
        return bool(cupy_module().cuda.runtime.getDeviceCount() > 0)
    except Exception:  # no CuPy, no driver, or no card
        return False


def use(device: int | None) -> int:
    """Make the device the current one of this thread; the current one by default."""
    if device is not None:
        device = parse.require_int(device, "device", -(2**31))
    runtime = cupy_module().cuda.runtime
    try:
        count = runtime.getDeviceCount()
    except runtime.CUDARuntimeError as error:
        raise DeviceError(f"device: the CUDA driver reports no usable GPU ({error})") from error
    if device is None:
        return int(runtime.getDevice())
    if not 0 <= device < count:
        raise ArgumentError(f"device: got index {device}, and this machine has {count} GPU(s)")
    cupy_module().cuda.Device(device).use()
    return device


def _over_nccl(calls: nccl.NcclCalls, seconds: float) -> LibraryTransport:
    facts = {"library": calls.library, **torch.gpu_facts(use(None))}
    return LibraryTransport(calls, Ranks(nccl.NcclChannel(calls), facts, seconds))


def _local_device(on_gpu: bool | None) -> int | None:
    """The GPU of this rank's place on its host, as launchers number them."""
    if on_gpu is False or not has_gpu():
        return None
    names = ("LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID", "SLURM_LOCALID")
    name = next((name for name in names if name in os.environ), None)
    text = "0" if name is None else os.environ[name]
    if not text.isdecimal():
        raise ArgumentError(f"{name}: got {text!r} in the environment; wanted 0 or more")
    return int(text) % int(cupy_module().cuda.runtime.getDeviceCount())


def _has_process_group(module: Any) -> bool:
    return bool(module.distributed.is_available() and module.distributed.is_initialized())


@needs("torch")
def _torchrun_channel() -> Channel:
    """torchrun's own store, or the one that rank 0 keeps for other launchers of its kind."""
    import torch.distributed as distributed

    store, rank, size = next(iter(distributed.rendezvous("env://")))
    keys = TorchStore(store)
    number = keys.count(f"cupyattn/made/{rank}")
    return StoreChannel(keys, rank, size, f"cupyattn/{number}")


def _cupyx_backend(seconds: float) -> Any:
    """CuPy's own store and NCCL, for launchers of torchrun's kind where there is no torch."""
    device = _local_device(True)
    if device is None:
        raise MissingPackageError(
            "from_environment: MASTER_ADDR is set, and there is neither torch nor a GPU here; "
            "install torch, or use Group.from_folder",
            name="torch",
        )
    use(device)
    environment = os.environ

    def start() -> Any:
        import cupyx.distributed

        return cupyx.distributed.init_process_group(
            int(environment["WORLD_SIZE"]),
            int(environment["RANK"]),
            host=environment["MASTER_ADDR"],
            port=int(environment.get("MASTER_PORT", "13333")),
        )

    own = cupy_module().cuda.Device()
    backend = in_time("starting cupyx.distributed", start, seconds, device=own)
    # Its store is a process that Python would wait for at the program's end.
    atexit.register(backend.stop)
    return backend


@needs("mpi4py")
def _mpi_world() -> Any:
    from mpi4py import MPI

    return MPI.COMM_WORLD


@needs("jax")
def _jax_client() -> tuple[Any, int, int, int | None]:
    """The coordinator's client, this process among all, and its GPU if it has one."""
    import jax
    from jax._src import distributed

    if not jax.distributed.is_initialized():
        raise ArgumentError(
            "from_jax: jax.distributed has not been started; call jax.distributed.initialize(...) "
            "first"
        )
    local = jax.local_devices()
    if len(local) != 1:
        raise ArgumentError(
            f"from_jax: this process has {len(local)} devices; wanted one process for each GPU "
            "(jax.distributed.initialize(..., local_device_ids=[i])), or Group.simulated(size, "
            "devices=...) for several GPUs of one process"
        )
    is_gpu = local[0].platform in ("gpu", "cuda")
    device = int(local[0].local_hardware_id) if is_gpu else None
    return distributed.global_state.client, jax.process_index(), jax.process_count(), device
