"""What a rank knows of all ranks: their facts, their hosts, and whether all are still there."""

from __future__ import annotations

import contextlib
import secrets
import threading
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from .._version import __version__
from ..core import parse
from ..core.cupy_module import cupy_module
from ..errors import ArgumentError, DeviceError, DistributedError
from . import handshake, liveness
from .channels import Channel

_T = TypeVar("_T")
_LEAST = -(2**31)
# What may not differ, by the words that a message has for it.
_SAME = ("cupyattn version", "size", "library")


class Ranks:
    """The ranks of a group that have met over a channel.

    hosts     for every rank, the number of its host, counted from 0
    reason    why the group cannot go on, in a sentence; None while it can
    """

    def __init__(self, channel: Channel, facts: dict[str, Any], seconds: float) -> None:
        self.rank, self.size = channel.rank, channel.size
        self.seconds = seconds
        self.reason: str | None = None
        self.on_failure: list[Callable[[], None]] = []
        self.ask: Callable[[], str | None] = lambda: None
        self.channel = channel
        # CUDA's current device is one of each thread; work in another one is for this one's.
        self._device = cupy_module().cuda.Device() if facts.get("gpu") else None
        self._lock = threading.Lock()
        self._watch: liveness.Watch | None = None
        self._note: liveness.Note | None = None
        own = {"cupyattn version": __version__, "size": channel.size, **facts}
        own |= {"token": secrets.token_hex(16), **liveness.own_facts()}
        self.facts = [handshake.unpacked(x) for x in self.share("start", handshake.packed(own))]
        self._compare()
        names = list(dict.fromkeys(facts["host"] for facts in self.facts))
        self.hosts: Sequence[int] = [names.index(facts["host"]) for facts in self.facts]
        self._note = note = liveness.Note(self.facts[0]["token"])
        self._watch = liveness.Watch(self._to_watch(), lambda: note.read() or self.ask(), self.fail)

    def share(self, what: str, data: bytes, seconds: float | None = None) -> list[bytes]:
        """What all ranks have given to the call `what`; DistributedError if one is in another call.

        Where one does not come, the ranks are out of step: failed.
        """
        self.check()
        seconds = self.seconds if seconds is None else seconds
        own = what.encode() + b":" + data
        try:
            shared = self.channel.share(own, self.check, seconds)
        except DeviceError as error:
            self.fail(str(error))
            raise
        places = [x.index(b":") for x in shared]
        calls = [x[:place].decode() for x, place in zip(shared, places, strict=True)]
        if found := handshake.out_of_step(calls, self.rank):
            raise DistributedError(found)
        return [x[place + 1 :] for x, place in zip(shared, places, strict=True)]

    def part(self, members: Sequence[int]) -> Channel:
        return self.channel.part(members)

    def check(self) -> None:
        if self.reason is not None:
            raise DeviceError(self.reason)

    def fail(self, reason: str, tell: bool = False) -> None:
        """From here on `check` raises. The first reason counts; from any thread.

        `tell` where the others of this host cannot notice it by themselves.
        """
        with self._lock:
            if self.reason is not None:
                return
            self.reason = reason
        if tell and self._note is not None:
            self._note.leave(reason)
        for call in self.on_failure:
            call()

    def in_time(self, what: str, work: Callable[[], _T], seconds: float | None = None) -> _T:
        """What `work()` returns. It may wait for other ranks in a library, so a thread does it.

        DeviceError if a rank ends meanwhile, or after the time that ranks are given.
        """
        seconds = self.seconds if seconds is None else seconds
        return in_time(what, work, seconds, check=self.check, device=self._device)

    def stop(self) -> None:
        if self._watch is not None:
            self._watch.stop()
        if self._note is not None:
            self._note.remove()

    def _compare(self) -> None:
        of_ranks = [{name: facts.get(name) for name in _SAME} for facts in self.facts]
        if found := handshake.differences(of_ranks):
            raise DistributedError(f"{found}; start all {self.size} ranks alike")
        cards: dict[tuple[str, str], int] = {}
        for rank, facts in enumerate(self.facts):
            if not facts.get("gpu"):
                continue
            first = cards.setdefault((facts["host"], facts["gpu"]), rank)
            if first != rank:
                raise DistributedError(
                    f"ranks {first} and {rank} have the same GPU ({facts['gpu']}); give each rank "
                    "its own: cupy.cuda.Device(local_rank).use() before the group is made"
                )

    def _to_watch(self) -> dict[int, tuple[int, str]]:
        own = self.facts[self.rank]
        return {
            rank: (facts["process"], facts["started"])
            for rank, facts in enumerate(self.facts)
            if (facts["host"], facts["namespace"]) == (own["host"], own["namespace"])
            and facts["process"] != own["process"]
        }


def in_time(
    what: str,
    work: Callable[[], _T],
    seconds: float,
    *,
    check: Callable[[], None] = lambda: None,
    device: Any = None,
) -> _T:
    """`Ranks.in_time` before there are ranks, on a device of CuPy's if it is given one."""
    answers: list[_T] = []
    errors: list[BaseException] = []
    done = threading.Event()

    def run() -> None:
        try:
            with device or contextlib.nullcontext():
                answers.append(work())
        except BaseException as error:
            errors.append(error)
        done.set()

    liveness.started_thread(run, "cupyattn-wait")
    for _ in range(max(1, int(seconds / 0.05))):
        if done.wait(0.05):
            break
        check()
    if errors:
        raise errors[0]
    if not done.is_set():
        raise DeviceError(f"{what} was not done within {seconds:g} s; not all ranks came to it")
    return answers[0]


def check_rank(rank: int, size: int) -> None:
    size = parse.require_int(size, "size", _LEAST)
    if size < 1:
        raise ArgumentError(f"size: got {size}; wanted the number of ranks, 1 or more")
    if not 0 <= parse.require_int(rank, "rank", _LEAST) < size:
        raise ArgumentError(f"rank: got {rank} of {size} ranks; wanted 0 to {size - 1}")
