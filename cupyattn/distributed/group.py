"""A group of ranks that share the keys of requests, or one cache: who they are, and their calls."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

import numpy as np

from .._version import __version__
from ..core import parse
from ..core.cupy_module import cupy_module
from ..errors import ArgumentError, DeviceError, DistributedError
from . import handshake, simulated, starts
from .transport import Transport, Window

_T = TypeVar("_T")
_MAX_BYTES = 2**63 - 1


class Group:
    """The ranks that work together, as one of them sees them.

    Calls on a group are made by all of its ranks, in the same order. Where a rank ended, raised, or
    is late, the calls of all others raise DeviceError; a group that has failed stays so. Close it,
    and make a new one. Used in a `with` statement, it is closed at the end, and an error in the
    block makes the other ranks raise.

    Attributes
    ----------
    rank, size
        Who this rank is, and how many there are.
    hosts
        For every rank, the number of its host, counted from 0.
    transport
        What carries the bytes (see `Transport`).
    on_gpu
        Whether arrays are CuPy's; NumPy's otherwise.
    can_capture
        Whether CUDA graphs may hold the collectives.

    Examples
    --------
    >>> from cupyattn.distributed import simulate
    >>> simulate(2, lambda group: (group.rank, group.size))  # in threads
    [(0, 2), (1, 2)]
    """

    def __init__(self, transport: Transport) -> None:
        if not hasattr(transport, "share_bytes"):
            raise ArgumentError(
                f"transport: got {type(transport).__name__}; wanted a "
                "cupyattn.distributed.Transport, or Group.from_environment() and its like"
            )
        if not 0 <= transport.rank < transport.size:
            raise ArgumentError(
                f"rank: got {transport.rank} of {transport.size} ranks; wanted 0 to "
                f"{transport.size - 1}"
            )
        self.transport = transport
        self.rank, self.size = transport.rank, transport.size
        self.hosts = tuple(transport.hosts)
        self.on_gpu, self.can_capture = transport.on_gpu, transport.can_capture
        self._checks: list[Callable[[], str | None]] = []
        self._levels: tuple[Group, Group] | None = None
        self._failure: str | None = None
        self._closed = False

    @staticmethod
    def simulated(
        size: int,
        *,
        devices: Sequence[int] | None = None,
        hosts: Sequence[int] | None = None,
        timeout: float = 60.0,
    ) -> list[Group]:
        """A group of `size` ranks for threads of this process: one `Group` for each.

        Each is used by a thread of its own (`simulate` starts them). Arrays are NumPy's, or CuPy's
        where `devices` names a CUDA device for every rank, which may be the same one. `hosts` says
        on which host each rank shall seem to be: all on one by default. A rank that does not come
        to a call within `timeout` seconds counts as lost.
        """
        meeting = simulated.meeting(size, devices, hosts, timeout)
        return [Group(simulated.SimulatedTransport(meeting, rank)) for rank in range(size)]

    @classmethod
    def from_unique_id(
        cls,
        unique_id: bytes,
        rank: int,
        size: int,
        *,
        device: int | None = None,
        timeout: float = 60.0,
    ) -> Group:
        """A group over NCCL. One rank makes `unique_id` by `new_unique_id()`, for all of them.

        NCCL comes through CuPy, or through nccl4py where CuPy finds no libnccl. `device` is this
        rank's CUDA device, the current one by default; it becomes the current one. All ranks make
        this call; DeviceError where they do not all come within `timeout` seconds.
        """
        return cls(starts.from_unique_id(unique_id, rank, size, device, _seconds(timeout)))

    @classmethod
    def from_torch(
        cls, process_group: Any = None, *, device: int | None = None, timeout: float = 60.0
    ) -> Group:
        """A group over a process group of torch.distributed, by default the one of all ranks.

        A backend of NCCL serves CuPy's arrays on CUDA streams, gloo NumPy's arrays. The process
        group stays its program's; it is aborted if a rank of it ends.
        """
        return cls(starts.from_torch(process_group, device, _seconds(timeout)))

    @classmethod
    def from_cupyx(cls, comm: Any, *, timeout: float = 60.0) -> Group:
        """A group over what `cupyx.distributed.init_process_group(size, rank)` returns."""
        return cls(starts.from_cupyx(comm, _seconds(timeout)))

    @classmethod
    def from_mpi(
        cls,
        comm: Any = None,
        *,
        device: int | None = None,
        on_gpu: bool | None = None,
        timeout: float = 60.0,
    ) -> Group:
        """A group of the ranks of an mpi4py communicator, by default `MPI.COMM_WORLD`.

        MPI carries handshakes and NCCL's id, NCCL what lies on GPUs, so MPI need not know CUDA.
        With `on_gpu=False`, or where there is no GPU, arrays are NumPy's and MPI carries them.
        """
        return cls(starts.from_mpi(comm, device, _choice(on_gpu), _seconds(timeout)))

    @classmethod
    def from_jax(cls, *, on_gpu: bool | None = None, timeout: float = 60.0) -> Group:
        """A group of the processes that `jax.distributed.initialize` has brought together.

        JAX's coordinator carries handshakes and NCCL's id. Each process has one device.
        """
        return cls(starts.from_jax(_choice(on_gpu), _seconds(timeout)))

    @classmethod
    def from_folder(
        cls,
        folder: str | Path,
        rank: int,
        size: int,
        *,
        device: int | None = None,
        on_gpu: bool | None = None,
        timeout: float = 60.0,
    ) -> Group:
        """A group whose ranks find each other in a folder that all of them see.

        It needs no other library to start. The folder must be a new one for every start: files of
        an earlier one would be taken for those of ranks of this one.
        """
        return cls(
            starts.from_folder(folder, rank, size, device, _choice(on_gpu), _seconds(timeout))
        )

    @classmethod
    def from_environment(cls, *, on_gpu: bool | None = None, timeout: float = 60.0) -> Group:
        """A group by what has been started, or by what the launcher has set.

        In this order: torch.distributed or jax.distributed where the program has started them;
        `torchrun` (RANK, WORLD_SIZE, MASTER_ADDR); `mpirun`. Each rank takes the GPU of its place
        on its host, which becomes the current device.
        """
        return cls(starts.from_environment(_choice(on_gpu), _seconds(timeout)))

    def all_to_all(self, out: Any, given: Any, stream: int | None = None) -> None:
        """Part i of `given`, of `size` equal parts, goes to rank i; part j of `out` is from rank j.

        Both are contiguous arrays of as many bytes, of any dtypes.
        """
        out, given = self._bytes(out, "out"), self._bytes(given, "given")
        if out.size != given.size or given.size % self.size:
            raise ArgumentError(
                f"all_to_all: got {given.size} bytes to give and {out.size} to take, among "
                f"{self.size} ranks; wanted as many of both, a part of equal size for every rank"
            )
        self._call(self.transport.all_to_all, out, given, stream)

    def all_gather(self, out: Any, given: Any, stream: int | None = None) -> None:
        """`out` becomes what every rank has given, in rank order: `size` times as many bytes."""
        out, given = self._bytes(out, "out"), self._bytes(given, "given")
        if out.size != given.size * self.size:
            raise ArgumentError(
                f"all_gather: got {given.size} bytes to give and {out.size} to take, among "
                f"{self.size} ranks; wanted {given.size * self.size} bytes of `out`"
            )
        self._call(self.transport.all_gather, out, given, stream)

    def reduce_scatter(self, out: Any, given: Any, stream: int | None = None) -> None:
        """`out` becomes this rank's part of the sum of what all ranks have given, in float32."""
        pair = self._bytes(out, "out"), self._bytes(given, "given")
        for name, array in (("out", out), ("given", given)):
            if str(array.dtype) != "float32":
                raise ArgumentError(f"{name}: got dtype {array.dtype}; wanted float32")
        floats = [x.view(np.float32) for x in pair]
        if floats[0].size * self.size != floats[1].size:
            raise ArgumentError(
                f"reduce_scatter: got {floats[1].size} values to give and {floats[0].size} to "
                f"take, among {self.size} ranks; wanted {self.size} times as many to give"
            )
        self._call(self.transport.reduce_scatter, floats[0], floats[1], stream)

    def barrier(self, stream: int | None = None) -> None:
        """Let no rank's work on its stream go on before every rank's has come here."""
        self._guarded(self.transport.barrier, self._stream(stream))

    def share_bytes(self, data: bytes) -> list[bytes]:
        """What every rank has given, on the host, in rank order. It may wait for the others."""
        if not isinstance(data, (bytes, bytearray, memoryview)):
            raise ArgumentError(f"data: got {type(data).__name__}; wanted bytes")
        return self._guarded(self.transport.share_bytes, data)

    def window(self, nbytes: int) -> Window | None:
        """Zeroed memory that peers can write, of the same size on all ranks; None if there is none.

        All ranks get one, or none does.
        """
        nbytes = parse.require_int(nbytes, "nbytes", maximum=_MAX_BYTES)
        return self._guarded(self.transport.window, nbytes)

    def handshake(self, facts: Mapping[str, Any]) -> None:
        """Compare what ranks will call with, before the first call: raises DistributedError on all.

        `facts` are names and values (numbers, texts, dtypes, or lists of them) that all ranks must
        share; the version of this library is among them by itself. The message says which rank
        differs, and in what.
        """
        if not isinstance(facts, Mapping):
            raise ArgumentError(f"facts: got {type(facts).__name__}; wanted names and values")
        own = handshake.packed({"cupyattn version": __version__, **facts})
        found = handshake.differences([handshake.unpacked(x) for x in self.share_bytes(own)])
        if found:
            raise DistributedError(f"{found}; give all {self.size} ranks the same")

    def check_heads(self, num_heads: int, name: str = "num_qo_heads") -> int:
        """The heads that each rank has of so many; ArgumentError where they do not divide."""
        num_heads = parse.require_int(num_heads, name)
        if num_heads % self.size:
            raise ArgumentError(
                f"{name}: got {num_heads} heads for a group of {self.size} ranks; wanted a "
                f"multiple of {self.size}, or a group of fewer ranks"
            )
        return num_heads // self.size

    def split(self, part: int) -> Group:
        """The group of the ranks that give the same number as this one, in their order here.

        All ranks call it. What it makes is closed before this group is.
        """
        part = parse.require_int(part, "part", 0)
        parts = [int(data) for data in self.share_bytes(str(part).encode())]
        members = [rank for rank, other in enumerate(parts) if other == part]
        return Group(self._guarded(self.transport.split, members))

    def two_levels(self) -> tuple[Group, Group]:
        """The ranks of this host, and those that have this one's place on the other hosts.

        A group over several hosts has no windows; the first of these two has. They are the same two
        at every call, closed with this group, and a failure of one is a failure of this group.
        DistributedError where hosts have different numbers of ranks.
        """
        if self._levels is not None:
            return self._levels
        of_hosts = Counter(self.hosts)
        if len(set(of_hosts.values())) > 1:
            counts = ", ".join(f"{n} on host {host}" for host, n in sorted(of_hosts.items()))
            raise DistributedError(f"hosts: got {counts}; wanted as many ranks on every host")
        place = self.hosts[: self.rank].count(self.hosts[self.rank])
        self._levels = self.split(self.hosts[self.rank]), self.split(place)
        for part in self._levels:
            self.add_check(part.failure)
        return self._levels

    def add_check(self, check: Callable[[], str | None]) -> None:
        """Let `check()` ask this function too: a sentence that it returns is a failure."""
        self._checks.append(check)

    def drop_check(self, check: Callable[[], str | None]) -> None:
        """Ask a function of `add_check` no more, which has nothing to say."""
        if check in self._checks:
            self._checks.remove(check)

    def check(self) -> None:
        """Raise DeviceError if a peer ended, raised or is late. Costs no wait for the GPU."""
        if self._closed:
            raise DistributedError("this group is closed; make a new one")
        reason = self.failure()
        if reason is None:
            return
        if self._failure is None:
            self.fail(reason)
        raise DeviceError(self._advice())

    def failure(self) -> str | None:
        """Why the group cannot go on, in a sentence; None while it can, and once it is closed."""
        if self._closed or self._failure is not None:
            return None if self._closed else self._failure
        found = (check() for check in (self.transport.failure, *self._checks))
        return next((reason for reason in found if reason), None)

    def fail(self, reason: str) -> None:
        """Give the group up for this reason, so that neither this rank nor a peer waits on."""
        self._failure = self._failure or reason
        self.transport.abort(self._failure)

    def describe(self) -> str:
        """The group in a line: its rank, its size and what carries its bytes."""
        return f"rank {self.rank} of {self.size}: {self.transport.name}"

    def close(self) -> None:
        """Give everything back. No rank may call on the group any more; closing twice is one."""
        if not self._closed:
            self._closed = True
            for part in self._levels or ():
                part.close()
            self.transport.close()

    def __enter__(self) -> Group:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if kind is not None:
            self.fail(f"rank {self.rank} ended with {kind.__name__}: {error}")
        self.close()

    def __repr__(self) -> str:
        return f"<cupyattn.distributed.Group, {self.describe()}>"

    def _bytes(self, array: Any, name: str) -> Any:
        """A contiguous array as one of bytes, without a copy."""
        is_cupy = hasattr(getattr(array, "data", None), "ptr")
        if is_cupy is not self.on_gpu or not (is_cupy or isinstance(array, np.ndarray)):
            wanted = "a CuPy array" if self.on_gpu else "a NumPy array"
            raise ArgumentError(f"{name}: got {type(array).__name__}; wanted {wanted}")
        if array.dtype.hasobject:
            raise ArgumentError(f"{name}: got dtype {array.dtype}; wanted numbers")
        if name == "out" and not (is_cupy or array.flags.writeable):
            raise ArgumentError("out: is read-only; wanted an array to write")
        if not array.flags.c_contiguous:
            raise ArgumentError(f"{name}: got strides {array.strides}; wanted a contiguous array")
        return array.reshape(-1).view(np.uint8)

    def _call(self, call: Callable[..., None], out: Any, given: Any, stream: int | None) -> None:
        self._guarded(call, out, given, self._stream(stream))

    def _guarded(self, call: Callable[..., _T], *arguments: Any) -> _T:
        """A call that finds a rank gone fails the group, and says what to do."""
        self.check()
        try:
            return call(*arguments)
        except DeviceError as error:
            self.fail(str(error))
            raise DeviceError(self._advice()) from error

    def _advice(self) -> str:
        return f"{self._failure}; close this group and make a new one"

    def _stream(self, stream: int | None) -> int | None:
        """CuPy's current one, where a GPU's rank names none."""
        if stream is None and self.on_gpu:
            return int(cupy_module().cuda.get_current_stream().ptr)
        return stream


def _seconds(timeout: Any) -> float:
    return parse.positive(timeout, "timeout", 60.0)


def _choice(on_gpu: Any) -> bool | None:
    return None if on_gpu is None else parse.flag(on_gpu, "on_gpu")


def checked_group(group: Any) -> Group:
    """The argument `group` of a class or a call; ArgumentError where it is none."""
    if not isinstance(group, Group):
        raise ArgumentError(
            f"group: got {type(group).__name__}; wanted a cupyattn.distributed.Group"
        )
    return group


def simulate(
    size: int,
    work: Callable[[Group], Any],
    *,
    devices: Sequence[int] | None = None,
    hosts: Sequence[int] | None = None,
    timeout: float = 60.0,
) -> list[Any]:
    """What `work(group)` returns on each of `size` simulated ranks, run in a thread for each.

    The groups are `Group.simulated(size)`. Where a rank raises, the others do so too, within
    moments, and the first rank's error is raised here::

        >>> import numpy as np
        >>> from cupyattn.distributed import simulate
        >>> def work(group):
        ...     given = np.arange(2, dtype=np.float32) + 10 * group.rank
        ...     out = np.empty_like(given)
        ...     group.all_to_all(out, given)
        ...     return out.tolist()
        >>> simulate(2, work)
        [[0.0, 10.0], [1.0, 11.0]]
    """
    if not callable(work):
        raise ArgumentError(f"work: got {type(work).__name__}; wanted a function of a Group")
    groups = Group.simulated(size, devices=devices, hosts=hosts, timeout=timeout)
    return simulated.run_ranks(size, lambda rank: work(groups[rank]), groups[0].fail, devices)
