"""Scratch memory of launches: which launches share it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from cupyattn.launch.driver import scratch

PER_THREAD = 2


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """(device, stream) of all counters that were made; their address is the place in the list."""
    found: list[tuple[int, int]] = []

    def make(device: int, stream: int) -> tuple[int, object]:
        found.append((device, stream))
        return len(found), None

    api = SimpleNamespace(is_capturing=lambda stream: False)
    monkeypatch.setattr(scratch, "cuda", lambda: api)
    monkeypatch.setattr(scratch, "_make", make)
    monkeypatch.setattr(scratch, "_counters", {})
    monkeypatch.setattr(scratch, "_kept", scratch._Kept())
    return found


def refuse(num_bytes: int) -> tuple[int, object]:
    raise AssertionError("memory for one launch")


def counters(stream: int, device: int = 0) -> int:
    return scratch.counters(8, device, stream, refuse)[0]


def of_threads(call: Callable[[], Any], count: int = 2) -> list[Any]:
    """What threads find that are all there at once."""
    found: list[Any] = []
    barrier = threading.Barrier(count)

    def run() -> None:
        barrier.wait()
        found.append((call(), call()))
        barrier.wait()

    threads = [threading.Thread(target=run) for _ in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


@pytest.mark.parametrize("stream", [0, 1, 77])
def test_threads_share_counters_on_a_stream(made: list[Any], stream: int) -> None:
    own = counters(stream)
    assert {*of_threads(lambda: counters(stream))} == {(own, own)} and made == [(0, stream)]
    assert counters(stream, device=1) != own


def test_threads_share_no_counters_on_their_own_default_streams(made: list[Any]) -> None:
    """One handle stands for a stream of each thread, and their launches run at once."""
    own = counters(PER_THREAD)
    found = of_threads(lambda: counters(PER_THREAD))
    assert all(first == again != own for first, again in found) and len({*found}) == 2
    assert counters(PER_THREAD) == own and not scratch._counters
    other = counters(PER_THREAD, device=1)
    assert other != own and counters(PER_THREAD, device=1) == other
    assert made == [(0, PER_THREAD)] * 3 + [(1, PER_THREAD)]


def test_what_tells_streams_apart() -> None:
    assert scratch.identity(77) == 77 and scratch.identity(0) == 0
    own = scratch.identity(PER_THREAD)
    found = of_threads(lambda: scratch.identity(PER_THREAD))
    assert own == scratch.identity(PER_THREAD)
    assert len({own, *(x for pair in found for x in pair)}) == 3
