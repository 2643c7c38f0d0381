"""What a group needs of the library that carries its bytes, and the memory its peers can write."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np


class Window:
    """Zeroed memory of this rank that every peer can write, and where a rank sees each peer's.

    Attributes
    ----------
    nbytes
        Its size on every rank.
    local
        This rank's own, [nbytes] of uint8, a CuPy array or a NumPy one.
    peers
        uint64 [size], NumPy: the address at which this rank sees each rank's window, its own among
        them.
    table
        The same addresses where kernels read them: in device memory, or `peers` itself.
    memories
        Every rank's array where all are in this process (simulated ranks); None otherwise.
    source
        What gave it, such as "CUDA IPC" or "simulated".
    """

    def __init__(
        self,
        local: Any,
        peers: np.ndarray,
        *,
        source: str,
        table: Any = None,
        memories: Sequence[Any] | None = None,
        release: Callable[[], None] | None = None,
    ) -> None:
        self.nbytes = int(local.nbytes)
        self.local = local
        self.peers = peers
        self.table = peers if table is None else table
        self.memories = memories
        self.source = source
        self._release = release

    def close(self) -> None:
        """Give the memory back. No peer may write it any more; closing twice does nothing."""
        release, self._release = self._release, None
        self.local = self.table = self.memories = None
        if release is not None:
            release()


class Transport(Protocol):
    """What carries bytes between the ranks of a group.

    Arrays are contiguous ones of uint8 (`reduce_scatter`: of float32), CuPy's where `on_gpu` and
    NumPy's otherwise. `stream` is the handle of a CUDA stream as an integer; the CPU has none. All
    ranks make the same calls in the same order. A call that cannot go on because another rank
    ended, raised or called something else raises DeviceError, or DistributedError; none hangs.

    name         in words, for `Group.describe()`
    hosts        for every rank, the number of its host, counted from 0
    can_capture  whether a CUDA graph may hold the collectives
    """

    @property
    def name(self) -> str: ...

    hosts: Sequence[int]
    rank: int
    size: int
    on_gpu: bool
    can_capture: bool

    def all_to_all(self, out: Any, given: Any, stream: int | None) -> None:
        """Equal parts, of which part i goes to rank i; part j of `out` came from rank j."""

    def all_gather(self, out: Any, given: Any, stream: int | None) -> None:
        """`out` is what every rank has given, in rank order."""

    def reduce_scatter(self, out: Any, given: Any, stream: int | None) -> None:
        """`out` is this rank's part of the sum over ranks, in float32."""

    def barrier(self, stream: int | None) -> None:
        """No rank's work behind it begins before every rank's before it is done."""

    def share_bytes(self, data: bytes) -> list[bytes]:
        """What every rank has given, on the host, in rank order."""

    def window(self, nbytes: int) -> Window | None:
        """Memory that peers can write; None where there is none."""

    def split(self, members: Sequence[int]) -> Transport:
        """The transport of these ranks, of which this one is one, in this order. All ranks call it,
        each with the part that it is in."""

    def failure(self) -> str | None:
        """Why the transport is of no use any more, in a sentence; None while it is."""

    def abort(self, reason: str) -> None:
        """Let whatever waits for a peer, on the host and on the GPU, end soon. From any thread."""

    def close(self) -> None:
        """Give back what the transport made itself. Closing twice does nothing."""
