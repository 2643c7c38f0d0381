"""Rank 0 of a group whose other ranks are not there: its kernels can be timed on one GPU."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

from cupyattn.core.cupy_module import as_stream
from cupyattn.distributed import Group
from cupyattn.distributed.transport import Transport, Window


def lone_group(size: int, on_gpu: bool) -> Group:
    """The group. What comes from other ranks is what this one gave at the first call."""
    return Group(_LoneTransport(size, on_gpu))


class _LoneTransport(Transport):
    """Carries nothing, so that nothing is waited for."""

    name = "ranks that are not there"
    rank = 0
    can_capture = True

    def __init__(self, size: int, on_gpu: bool) -> None:
        self.size, self.on_gpu, self.hosts = size, on_gpu, [0] * size
        self._filled: set[int] = set()

    def all_to_all(self, out: Any, given: Any, stream: int | None) -> None:
        """What comes is what is given, at the first call for this memory."""
        self._fill(out, [given], stream)

    def all_gather(self, out: Any, given: Any, stream: int | None) -> None:
        """Likewise."""
        self._fill(out, [given] * self.size, stream)

    def reduce_scatter(self, out: Any, given: Any, stream: int | None) -> None:
        """Likewise."""
        self._fill(out, [given[: out.size]], stream)

    def _fill(self, out: Any, parts: Sequence[Any], stream: int | None) -> None:
        address = out.data.ptr if self.on_gpu else out.ctypes.data
        if address in self._filled:
            return
        self._filled.add(address)
        begin = 0
        with as_stream(stream or 0) if self.on_gpu else contextlib.nullcontext():
            for part in parts:
                out[begin : begin + part.size] = part
                begin += part.size

    def barrier(self, stream: int | None) -> None:
        """A lone rank waits for no other."""

    def share_bytes(self, data: bytes) -> list[bytes]:
        """All others say the same."""
        return [data] * self.size

    def window(self, nbytes: int) -> Window | None:
        """No peer has memory."""
        return None

    def split(self, members: Sequence[int]) -> Transport:
        """The transport of a part."""
        return _LoneTransport(len(members), self.on_gpu)

    def failure(self) -> str | None:
        """A lone rank has no peers that fail."""
        return None

    def abort(self, reason: str) -> None:
        """A lone rank has no peers that wait."""

    def close(self) -> None:
        """Nothing is held."""
