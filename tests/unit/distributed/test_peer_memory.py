"""Rows copied to peers: where they go, between which barriers, and how memory grows."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from cupyattn.distributed import Group, peer_memory, simulate
from cupyattn.distributed.peer_memory import PeerMemory

SIDE = 99


def test_copies_are_between_barriers(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[Any, ...]] = []
    runtime = SimpleNamespace(memcpyAsync=lambda *a: calls.append(("copy", *a)))
    cupy = SimpleNamespace(cuda=SimpleNamespace(runtime=runtime))
    monkeypatch.setattr(peer_memory, "cupy_module", lambda: cupy)
    peers = np.array([1000, 2000, 3000], np.uint64)
    group: Any = SimpleNamespace(
        rank=1,
        size=3,
        on_gpu=True,
        barrier=lambda stream: calls.append(("barrier", stream)),
        window=lambda nbytes: SimpleNamespace(nbytes=nbytes, peers=peers),
    )
    own: Any = SimpleNamespace(
        bytes=lambda first, count: SimpleNamespace(
            size=10 * count, data=SimpleNamespace(ptr=7000 + 10 * first)
        )
    )
    memory = PeerMemory(group)
    assert memory.reserve(500)
    memory.begin(SIDE)
    memory.send(own, 2, 4, 120, SIDE)
    assert calls == [
        ("barrier", SIDE),
        ("copy", 3000 + 120 + 40, 7020, 40, 4, SIDE),
        ("copy", 1000 + 120 + 40, 7020, 40, 4, SIDE),
        ("barrier", SIDE),
    ]


def test_memory_grows_and_is_given_back() -> None:
    def work(group: Group) -> None:
        memory = PeerMemory(group)
        assert memory.reserve(100)
        first = memory.local
        assert memory.reserve(60) and memory.local is first
        assert memory.reserve(200) and memory.local.size == 200
        memory.close()
        memory.close()
        assert memory.reserve(10) and memory.local.size == 10

    simulate(3, work)


def test_there_is_none_between_hosts_or_for_one_rank() -> None:
    assert simulate(2, lambda group: PeerMemory(group).reserve(8), hosts=[0, 1]) == [False, False]
    assert simulate(1, lambda group: PeerMemory(group).reserve(8)) == [False]
