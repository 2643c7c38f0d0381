"""Collectives that wait for a rank which lives and does not come, over stand-ins of NCCL."""

from __future__ import annotations

import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from helpers.fake_nccl import Array, Writes, alloc_pinned, installed

from cupyattn import DeviceError
from cupyattn.distributed import Group, new_unique_id, progress, simulated

_INSIDE, _OUTSIDE = progress._INSIDE, progress._OUTSIDE


def _in_threads(size: int, work: Callable[[int], Any]) -> list[Any]:
    return simulated.run_ranks(size, work, lambda reason: None)


def _array(count: int) -> Array:
    return np.zeros(count, np.float32).view(Array)


@pytest.mark.parametrize("stalled", [0, 1, 2])
@pytest.mark.parametrize("call", ["all_to_all", "all_gather", "reduce_scatter", "barrier"])
def test_a_rank_that_stalls_is_an_error_on_all_others(call: str, stalled: int) -> None:
    with installed() as (_, _, calls):
        identity = new_unique_id()
        taken: dict[int, float] = {}

        def collective(group: Group) -> None:
            size = group.size
            gives = {"all_to_all": (size, size), "all_gather": (size, 1)}.get(call, (1, size))
            arrays = [] if call == "barrier" else [_array(n) for n in gives]
            getattr(group, call)(*arrays)

        def work(rank: int) -> None:
            group = Group.from_unique_id(identity, rank, 3, device=rank, timeout=0.5)
            for _ in range(3):
                collective(group)
            start = time.monotonic()
            if rank == stalled:
                time.sleep(1.5)
                with pytest.raises(DeviceError):
                    collective(group)
            else:
                with pytest.raises(DeviceError, match=r"make a new one"):
                    collective(group)
                taken[rank] = time.monotonic() - start
                with pytest.raises(DeviceError, match=r"not done within 0\.5 s|aborted"):
                    group.check()
            group.close()

        _in_threads(3, work)
        assert len(taken) == 2 and all(0.4 < x < 2.5 for x in taken.values()), taken
        assert any(x.startswith("abort") for x in calls)


def test_a_group_whose_ranks_come_late_but_in_time_goes_on() -> None:
    with installed() as (library, _, calls):
        identity = new_unique_id()

        def work(rank: int) -> None:
            group = Group.from_unique_id(identity, rank, 2, device=rank, timeout=1.0)
            for step in range(4):
                if rank == step % 2:
                    time.sleep(0.4)
                group.barrier(0x77)
            time.sleep(1.3)  # outside of a collective nobody waits
            group.check()
            group.close()

        _in_threads(2, work)
        assert not any(x.startswith("abort") for x in calls)
        marks = [value for stream, value in library.writes.values if stream == 0x77]
        assert marks.count(_INSIDE) == marks.count(_OUTSIDE) == 8


def test_a_single_rank_writes_no_marks() -> None:
    with installed() as (library, _, _):
        group = Group.from_unique_id(new_unique_id(), 0, 1, timeout=10)
        group.barrier()
        assert library.writes.values == []
        group.close()


def test_a_gpu_without_such_writes_goes_without_marks() -> None:
    with installed() as (library, _, _):
        library.writes.is_working = False
        identity = new_unique_id()

        def work(rank: int) -> None:
            with Group.from_unique_id(identity, rank, 2, device=rank, timeout=10) as group:
                group.barrier()

        _in_threads(2, work)
        assert library.writes.values == []


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> progress.Progress:
    monkeypatch.setattr(progress, "alloc_pinned", alloc_pinned)
    monkeypatch.setattr(progress, "_kept", [])
    return progress.Progress(Writes(), 1)  # type: ignore[arg-type]


def test_replays_that_write_the_same_marks_are_progress(made: progress.Progress) -> None:
    """Whoever looks may find a stream inside every time."""
    made.begin(5)
    for _ in range(4):
        assert not made.is_stuck(0.1)
        time.sleep(0.06)
        made.end(5), made.begin(5)
    assert not made.is_stuck(0.1)
    time.sleep(0.2)
    assert made.is_stuck(0.1)


def test_marks_of_a_stream_are_its_own(made: progress.Progress) -> None:
    made.begin(5)
    made.is_stuck(0.1)
    time.sleep(0.2)
    made.begin(None), made.end(None)
    assert made.is_stuck(0.1)
    made.end(5)
    assert not made.is_stuck(0.0) and not made.is_stuck(0.0)


def test_more_streams_than_words_take_turns(made: progress.Progress) -> None:
    for stream in range(200):
        made.begin(stream), made.end(stream)
        assert not made.is_stuck(0.0)


def test_a_thread_without_a_context_gets_one(
    made: progress.Progress, monkeypatch: pytest.MonkeyPatch
) -> None:
    devices: list[int] = []
    runtime = SimpleNamespace(setDevice=devices.append)
    cupy = SimpleNamespace(cuda=SimpleNamespace(runtime=runtime))
    monkeypatch.setattr(progress, "cupy_module", lambda: cupy)
    writes = made._driver
    writes.codes = [201]  # type: ignore[attr-defined]
    made.begin(5)
    assert devices == [1] and writes.values == [(5, _INSIDE)]  # type: ignore[attr-defined]


def test_where_graphs_hold_no_marks_none_are_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "alloc_pinned", alloc_pinned)
    monkeypatch.setattr(progress, "_kept", [])
    monkeypatch.setattr(
        progress, "cuda", lambda: SimpleNamespace(is_capturing=lambda stream: stream == 5)
    )
    writes = Writes()
    writes.can_capture = lambda address: False  # type: ignore[method-assign]
    made = progress.Progress(writes, 0)  # type: ignore[arg-type]
    made.begin(5), made.begin(6)
    assert writes.values == [(6, _INSIDE)]
