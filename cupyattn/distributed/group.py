"""A group of ranks that share the keys of requests, or one cache: who they are, and their calls."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Any

import numpy as np

from .._version import __version__
from ..errors import ArgumentError, DeviceError, DistributedError
from . import handshake, simulated
from .transport import Transport, Window


class Group:
    """The ranks that work together, as one of them sees them.

    Calls on a group are made by all of its ranks, in the same order. Where a rank ended, raised, or
    is late, the calls of all others raise DeviceError; a group that has failed stays so. Close it,
    and make a new one. Used in a `with` statement, it is closed at the end, and an error in the
    block makes the other ranks raise.

    rank, size   who this rank is, and how many there are
    transport    what carries the bytes (see `Transport`)
    on_gpu       whether arrays are CuPy's; NumPy's otherwise
    can_capture  whether CUDA graphs may hold the collectives
    """

    def __init__(self, transport: Transport) -> None:
        if not 0 <= transport.rank < transport.size:
            raise ArgumentError(
                f"rank: got {transport.rank} of {transport.size} ranks; wanted 0 to "
                f"{transport.size - 1}"
            )
        self.transport = transport
        self.rank, self.size = transport.rank, transport.size
        self.on_gpu, self.can_capture = transport.on_gpu, transport.can_capture
        self._checks: list[Callable[[], str | None]] = []
        self._failure: str | None = None
        self._closed = False

    @staticmethod
    def simulated(
        size: int, *, devices: Sequence[int] | None = None, timeout: float = 60.0
    ) -> list[Group]:
        """A group of `size` ranks for threads of this process: one `Group` for each.

        Each is used by a thread of its own (`simulate` starts them). Arrays are NumPy's, or CuPy's
        where `devices` names a CUDA device for every rank, which may be the same one. A rank that
        does not come to a call within `timeout` seconds counts as lost.
        """
        meeting = simulated.meeting(size, devices, timeout)
        return [Group(simulated.SimulatedTransport(meeting, rank)) for rank in range(size)]

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
        for name, array in (("out", out), ("given", given)):
            if str(array.dtype) != "float32":
                raise ArgumentError(f"{name}: got dtype {array.dtype}; wanted float32")
        floats = [self._bytes(array, "array").view(np.float32) for array in (out, given)]
        if floats[0].size * self.size != floats[1].size:
            raise ArgumentError(
                f"reduce_scatter: got {floats[1].size} values to give and {floats[0].size} to "
                f"take, among {self.size} ranks; wanted {self.size} times as many to give"
            )
        self._call(self.transport.reduce_scatter, floats[0], floats[1], stream)

    def barrier(self, stream: int | None = None) -> None:
        """Let no rank's work on its stream go on before every rank's has come here."""
        self.check()
        self.transport.barrier(stream)

    def share_bytes(self, data: bytes) -> list[bytes]:
        """What every rank has given, on the host, in rank order. It may wait for the others."""
        self.check()
        return self.transport.share_bytes(data)

    def window(self, nbytes: int) -> Window | None:
        """Zeroed memory that peers can write, of the same size on all ranks; None if there is none.

        All ranks get one, or none does.
        """
        if nbytes < 1:
            raise ArgumentError(f"nbytes: got {nbytes}; wanted the bytes of a window, 1 or more")
        self.check()
        return self.transport.window(nbytes)

    def handshake(self, facts: Mapping[str, Any]) -> None:
        """Compare what ranks will call with, before the first call: raises DistributedError on all.

        `facts` are names and values (numbers, texts, dtypes, or lists of them) that all ranks must
        share; the version of this library is among them by itself. The message says which rank
        differs, and in what.
        """
        own = handshake.packed({"cupyattn version": __version__, **facts})
        found = handshake.differences([handshake.unpacked(x) for x in self.share_bytes(own)])
        if found:
            raise DistributedError(f"{found}; give all {self.size} ranks the same")

    def check_heads(self, num_heads: int, name: str = "num_qo_heads") -> int:
        """The heads that each rank has of so many; ArgumentError where they do not divide."""
        if num_heads % self.size:
            raise ArgumentError(
                f"{name}: got {num_heads} heads for a group of {self.size} ranks; wanted a "
                f"multiple of {self.size}, or a group of fewer ranks"
            )
        return num_heads // self.size

    def add_check(self, check: Callable[[], str | None]) -> None:
        """Let `check()` ask this function too: a sentence that it returns is a failure."""
        self._checks.append(check)

    def check(self) -> None:
        """Raise DeviceError if a peer ended, raised or is late. Costs no wait for the GPU."""
        if self._closed:
            raise DistributedError("this group is closed; make a new one")
        if self._failure is None:
            found = (check() for check in (self.transport.failure, *self._checks))
            reason = next((reason for reason in found if reason), None)
            if reason is None:
                return
            self.fail(reason)
        raise DeviceError(f"{self._failure}; close this group and make a new one")

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
        if not hasattr(array, "flags") or isinstance(array, np.ndarray) is self.on_gpu:
            wanted = "a CuPy array" if self.on_gpu else "a NumPy array"
            raise ArgumentError(f"{name}: got {type(array).__name__}; wanted {wanted}")
        if not array.flags.c_contiguous:
            raise ArgumentError(f"{name}: got strides {array.strides}; wanted a contiguous array")
        return array.reshape(-1).view(np.uint8)

    def _call(self, call: Callable[..., None], out: Any, given: Any, stream: int | None) -> None:
        self.check()
        call(out, given, stream)


def simulate(
    size: int,
    work: Callable[[Group], Any],
    *,
    devices: Sequence[int] | None = None,
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
    groups = Group.simulated(size, devices=devices, timeout=timeout)
    return simulated.run_ranks(size, lambda rank: work(groups[rank]), groups[0].fail)
