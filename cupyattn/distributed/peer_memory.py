"""Rows to all ranks: by copies into the peers' memory where it can be written, else by all_gather.

Copy engines carry the bytes without an SM, several times as fast as NCCL's all_gather on a pair of
H100s (results by `benchmarks.distributed`). NCCL keeps the order: peers' memory is written only
after a barrier behind what has read it, and read only after one behind the copies.
"""

from __future__ import annotations

from typing import Any

from ..core.cupy_module import cupy_module
from .exchanged_rows import ExchangedRows
from .group import Group
from .transport import Window

_ANY_DIRECTION = 4  # cudaMemcpyDefault


class PeerMemory:
    """Memory of every rank that all ranks write, which grows as plans need it."""

    def __init__(self, group: Group) -> None:
        self._group = group
        self._window: Window | None = None
        self._is_absent = False

    @property
    def local(self) -> Any:
        """This rank's, uint8 [nbytes]."""
        assert self._window is not None
        return self._window.local

    def reserve(self, nbytes: int) -> bool:
        """Whether there are at least so many bytes. All ranks call it, with the same number; those
        of the call before must not be in use."""
        if self._is_absent or self._group.size == 1:
            return False
        if self._window is not None and self._window.nbytes >= nbytes:
            return True
        self.close()
        self._window = self._group.window(max(nbytes, 1))
        self._is_absent = self._window is None
        return not self._is_absent

    def close(self) -> None:
        """Give it back, on all ranks. Nothing of a captured graph may use it any more."""
        if self._window is not None:
            if self._group.on_gpu:
                cupy_module().cuda.runtime.deviceSynchronize()
            self._group.share_bytes(b"")
            self._window.close()
            self._window = None

    def begin(self, stream: int | None) -> None:
        """Wait until every rank has read what the last call wrote."""
        self._group.barrier(stream)

    def send(self, own: ExchangedRows, first: int, count: int, offset: int, stream: Any) -> None:
        """Bring rows to every other rank's memory, those of rank r behind those of rank r - 1 from
        `offset` on, and wait until those of all other ranks are here."""
        window, group = self._window, self._group
        assert window is not None
        rows = own.bytes(first, count)
        begin = offset + group.rank * rows.size
        for step in range(1, group.size):  # so that ranks do not write to one at a time
            peer = (group.rank + step) % group.size
            if group.on_gpu:
                copy = cupy_module().cuda.runtime.memcpyAsync
                place = int(window.peers[peer]) + begin
                copy(place, rows.data.ptr, rows.size, _ANY_DIRECTION, stream)
            else:
                assert window.memories is not None
                window.memories[peer][begin : begin + rows.size] = rows
        group.barrier(stream)
