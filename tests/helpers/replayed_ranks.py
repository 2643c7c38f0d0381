"""Ranks of a group on one GPU that is not there, one after another in one thread.

Each rank makes its calls alone. What it gives to a collective is kept, and passes over all ranks
are repeated until every collective of the last one had what all ranks give.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from cupyattn import array
from cupyattn.distributed import Group

from . import fake_batch


class ReplayedTransport:
    """One rank. `kept` are the bytes that each rank has given to each collective so far."""

    name, on_gpu, can_capture = "replayed", True, False

    def __init__(
        self,
        rank: int,
        kept: list[list[np.ndarray]],
        enqueue: Callable[[Callable[[], None]], Any],
        log: list[tuple[Any, ...]],
    ) -> None:
        self.rank, self.size, self.hosts = rank, len(kept), [0] * len(kept)
        self._kept, self._enqueue, self._log = kept, enqueue, log
        self._count = 0
        self.is_whole = True

    def all_gather(self, out: Any, given: Any, stream: int | None) -> None:
        self._log.append(("all_gather", given.size, stream))
        self._exchange(out, given, lambda parts: parts)

    def all_to_all(self, out: Any, given: Any, stream: int | None) -> None:
        self._log.append(("all_to_all", given.size, stream))
        size = given.size // self.size
        mine = slice(self.rank * size, (self.rank + 1) * size)
        self._exchange(out, given, lambda parts: [part[mine] for part in parts])

    def _exchange(self, out: Any, given: Any, choose: Callable[[Any], Any]) -> None:
        index, own = self._count, self._kept[self.rank]
        self._count += 1

        def job() -> None:
            own[index:] = [_numbers(given).copy()]
            if any(len(x) <= index for x in self._kept):
                self.is_whole = False
                _numbers(out)[...] = 0
                return
            _numbers(out)[...] = np.concatenate(choose([x[index] for x in self._kept]))

        self._enqueue(job)

    def share_bytes(self, data: bytes) -> list[bytes]:
        return [data] * self.size

    def window(self, nbytes: int) -> None:
        return None

    def failure(self) -> None:
        return None

    def abort(self, reason: str) -> None:
        raise AssertionError(reason)

    def close(self) -> None:
        pass


def _numbers(x: Any) -> np.ndarray:
    return fake_batch.memory(array.view(x, "bytes").ptr, np.dtype(np.uint8), x.size)


class RecordedSide:
    """A side stream whose calls are written down."""

    handle = 99

    def __init__(self, log: list[tuple[Any, ...]]) -> None:
        self._log, self._used = log, 0

    def begin(self, stream: int | None) -> None:
        self._used = 0
        self._log.append(("begin", stream))

    def mark(self) -> int:
        self._log.append(("mark", self._used))
        self._used += 1
        return self._used - 1

    def wait(self, stream: int | None, mark: int) -> None:
        self._log.append(("wait", stream, mark))

    def enter(self, stream: int | None) -> None:
        self._log.append(("enter", stream))

    def leave(self, stream: int | None) -> None:
        self._log.append(("leave", stream))


def simulate(
    size: int,
    work: Callable[[Group], Any],
    log: list[tuple[Any, ...]],
    enqueue: Callable[[Callable[[], None]], Any] = lambda job: job(),
) -> list[Any]:
    """What work(group) returns on each rank. It has waited for the GPU by then."""
    kept: list[list[np.ndarray]] = [[] for _ in range(size)]
    for _ in range(8):
        transports = [ReplayedTransport(rank, kept, enqueue, log) for rank in range(size)]
        log.clear()
        answers = [work(Group(transport)) for transport in transports]
        if all(transport.is_whole for transport in transports):
            return answers
    raise AssertionError("ranks do not make the same calls")
