"""Memory of one host's GPUs that every rank can write: sources, tried in order until one serves.

A source counts where every rank could open it and a word that each rank wrote into each window was
read there, so that what a kernel does later is known to work.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np

from ..core.cupy_module import cupy_module
from ..errors import CupyAttnError
from .ranks import Ranks
from .transport import Window

_PAGE = 2 << 20  # an export shares whole pages of this size, so that a window has its own


class Source(Protocol):
    """One way to a window. `offer` waits for nobody; `open` is called where all ranks could.

    name   as `Window.source` has it
    """

    name: str

    def offer(self, nbytes: int) -> bytes:
        """Make this rank's memory, zeroed, and say what the others need to open it."""

    def open(self, offers: Sequence[bytes], rank: int) -> tuple[int, list[int]]:
        """The address of this rank's memory, and every rank's as seen from here."""

    def close(self, all_closed: Callable[[], bool]) -> None:
        """Undo what was done. `all_closed` waits until no rank has this one's memory open."""


class IpcSource:
    """CUDA's handles of another process's memory, by CuPy's runtime: it needs nothing installed."""

    name = "CUDA IPC"

    def __init__(self) -> None:
        self._runtime = cupy_module().cuda.runtime
        self._own = 0
        self._opened: list[int] = []

    def offer(self, nbytes: int) -> bytes:
        self._own = self._runtime.malloc(nbytes)  # the pool would hand out parts of a larger piece
        self._runtime.memset(self._own, 0, nbytes)
        self._runtime.deviceSynchronize()
        return bytes(self._runtime.ipcGetMemHandle(self._own))

    def open(self, offers: Sequence[bytes], rank: int) -> tuple[int, list[int]]:
        peers = []
        for peer, handle in enumerate(offers):
            if peer != rank:
                self._opened.append(self._runtime.ipcOpenMemHandle(handle))
            peers.append(self._own if peer == rank else self._opened[-1])
        return self._own, peers

    def close(self, all_closed: Callable[[], bool]) -> None:
        while self._opened:
            self._runtime.ipcCloseMemHandle(self._opened.pop())
        own, self._own = self._own, 0
        # Memory that a peer may still have open is kept: to free it would be undefined.
        if all_closed() and own:
            self._runtime.free(own)


def opened(ranks: Ranks, own: Source | None, nbytes: int) -> tuple[Window | None, str]:
    """A window of the first source that serves all ranks, and in words which, or why none does."""
    ranks.share(f"window of {nbytes} bytes", b"")
    if len(set(ranks.hosts)) > 1:
        return None, "none between hosts"
    if len({facts["process"] for facts in ranks.facts}) != ranks.size:
        return None, "none between ranks of one process"
    reasons = []
    for source in (IpcSource(), *([own] if own is not None else [])):
        window, why = _opened_by(source, ranks, -(-nbytes // _PAGE) * _PAGE, nbytes)
        if window is not None:
            return window, source.name
        reasons.append(f"{source.name}: {why}")
    return None, f"none ({'; '.join(reasons)})"


def _opened_by(source: Source, ranks: Ranks, size: int, nbytes: int) -> tuple[Window | None, str]:
    """All ranks go through the same steps, and give up together."""
    offer, why = _tried(lambda: source.offer(size))
    answers = _shared(ranks, offer, why)
    if not (why := _first_reason(answers)):
        offers = [answer for answer, _ in answers]
        found, why = _tried(
            lambda: ranks.in_time(
                f"opening windows by {source.name}", lambda: source.open(offers, ranks.rank)
            )
        )
        if not (why := _first_reason(_shared(ranks, None, why))) and found is not None:
            address, peers = found
            if not (why := _not_reached(ranks, address, peers)):
                return _window(source, ranks, found, nbytes), ""
    source.close(lambda: _all_closed(ranks))
    return None, why


def _tried(step: Callable[[], Any]) -> tuple[Any, str]:
    try:
        return step(), ""
    except CupyAttnError:
        raise  # a rank ended
    except Exception as error:
        return None, f"{type(error).__name__}: {error}"


def _shared(ranks: Ranks, value: bytes | None, why: str) -> list[tuple[bytes, str]]:
    pairs: list[tuple[bytes, str]] = []
    for data in ranks.share("window", why.encode() + b"-" if why else (value or b"") + b"+"):
        pairs.append((data[:-1], "") if data.endswith(b"+") else (b"", data[:-1].decode()))
    return pairs


def _first_reason(answers: Sequence[tuple[bytes, str]]) -> str:
    return next((f"on rank {i}: {why}" for i, (_, why) in enumerate(answers) if why), "")


def _not_reached(ranks: Ranks, address: int, peers: Sequence[int]) -> str:
    """Each rank writes a word into each window; why one has not arrived, or nothing."""
    runtime = cupy_module().cuda.runtime
    word = np.array([0x6370000 + ranks.rank], np.uint64)

    def write() -> None:
        for peer in peers:
            place = peer + 8 * ranks.rank
            runtime.memcpy(place, word.ctypes.data, 8, runtime.memcpyHostToDevice)
        runtime.deviceSynchronize()

    _, why = _tried(write)
    if why := _first_reason(_shared(ranks, None, why)):
        return why
    got = np.zeros(ranks.size, np.uint64)
    runtime.memcpy(got.ctypes.data, address, got.nbytes, runtime.memcpyDeviceToHost)
    wanted = np.arange(ranks.size, dtype=np.uint64) + np.uint64(0x6370000)
    absent = np.flatnonzero(got != wanted).tolist()
    runtime.memset(address, 0, got.nbytes)
    runtime.deviceSynchronize()
    why = f"what ranks {absent} wrote did not arrive" if absent else ""
    return _first_reason(_shared(ranks, None, why))


def _window(source: Source, ranks: Ranks, found: tuple[int, list[int]], nbytes: int) -> Window:
    cupy = cupy_module()
    address, peers = found
    memory = cupy.cuda.UnownedMemory(address, nbytes, source)
    local = cupy.ndarray((nbytes,), np.uint8, cupy.cuda.MemoryPointer(memory, 0))
    table = np.array(peers, np.uint64)
    return Window(
        local,
        table,
        source=source.name,
        table=cupy.asarray(table),
        release=lambda: source.close(lambda: _all_closed(ranks)),
    )


def _all_closed(ranks: Ranks) -> bool:
    try:
        ranks.share("closing a window", b"", 2.0)
    except CupyAttnError:
        return False
    return True
