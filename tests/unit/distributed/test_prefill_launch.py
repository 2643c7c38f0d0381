"""Distributed prefill on a GPU that is not there: what is enqueued, where, and in which order."""

from __future__ import annotations

from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from helpers import fake_gpu, replayed_ranks
from helpers.fake_batch import Device
from helpers.patching import replace, replace_all

from cupyattn import array, reference
from cupyattn.distributed import (
    ContextParallelPrefill,
    Group,
    ZigZag,
    prefill,
    side_stream,
    ulysses,
)
from cupyattn.distributed.prefill_stage import StageWrapper
from cupyattn.distributed.side_stream import SideStream
from cupyattn.engine import run_batch

MAIN, SIDE = fake_gpu.STREAM, replayed_ranks.RecordedSide.handle
OFFSETS = np.array([0, 40, 40, 61])


@pytest.fixture
def log(
    device: Device, own_workspaces: Any, monkeypatch: pytest.MonkeyPatch
) -> list[tuple[Any, ...]]:
    """What ranks do, in order. Copies of rows are made by NumPy, in the order of the stream."""
    calls: list[tuple[Any, ...]] = []

    def on_host(x: Any) -> np.ndarray:
        v = array.view(x, "x")
        return array.as_numpy(
            array.ArrayView(v.ptr, v.shape, v.strides, v.dtype, array.CPU, "", False, v.owner)
        )

    def store(k: Any, v: Any, k_cache: Any, v_cache: Any, slots: Any) -> None:
        calls.append(("store_kv", MAIN))

        def job() -> None:
            places = on_host(slots)
            for source, target in ((k, k_cache), (v, v_cache)):
                on_host(target)[places[places >= 0]] = on_host(source)[places >= 0]

        device.stream.add(job)

    def copy(pairs: Any, stream: int | None) -> None:
        calls.append(("copy_rows", stream))

        def job() -> None:
            for source, target in pairs:
                on_host(target)[...] = on_host(source)

        device.stream.add(job)

    def merge(v: Any, s: Any, out: Any, lse: Any) -> None:
        calls.append(("merge_states", MAIN))

        def job() -> None:
            merged = reference.merge_states(on_host(v), on_host(s))
            on_host(out)[...] = merged[0]
            if lse is not None:
                on_host(lse)[...] = merged[1]

        device.stream.add(job)

    attend = StageWrapper.attend

    def attend_and_log(*args: Any) -> None:
        calls.append(("attention", MAIN))
        attend(*args)

    monkeypatch.setattr(array, "constant", lambda a, like: device.put(a))
    monkeypatch.setattr(prefill, "reshape_and_cache", store)
    monkeypatch.setattr(ulysses, "reshape_and_cache", store)
    monkeypatch.setattr(ulysses, "copy", copy)
    monkeypatch.setattr(prefill, "merge_states", merge)
    monkeypatch.setattr(StageWrapper, "attend", attend_and_log)
    monkeypatch.setattr(prefill, "SideStream", lambda place: replayed_ranks.RecordedSide(calls))
    return calls


def run(
    device: Device,
    log: list[tuple[Any, ...]],
    method: str,
    chunks: int | None,
    runs: int = 2,
    **options: Any,
) -> list[tuple[Any, ...]]:
    """Check the answers of all ranks; what the last run of the last one did."""
    rng = np.random.default_rng(3)
    whole = [rng.standard_normal((61, heads, 16)).astype(np.float16) for heads in (8, 2, 2)]
    share = ZigZag(OFFSETS, 2)
    done: list[tuple[Any, ...]] = []

    def work(group: Group) -> Any:
        own = [device.put(x[share.rows(group.rank)]) for x in whole]
        call = ContextParallelPrefill(group, method=method)
        call.plan(OFFSETS, 8, 2, 16, num_chunks=chunks, **options)
        for _ in range(runs):
            log.clear()
            answer = call.run(*own, return_lse=True)
            done[:] = log
            got = [device.get(x) for x in answer]
        return got

    wanted = []
    for begin, end in pairwise(OFFSETS):
        own = (x[begin:end].astype(np.float64) for x in whole)
        wanted.append(reference.attention(*own, **{"causal": True, **options}))
    out, lse = (np.concatenate(x) for x in zip(*wanted, strict=True))
    simulated = replayed_ranks.simulate(2, work, log, device.stream.add)
    for rank, (got, got_lse) in enumerate(simulated):
        rows = share.rows(rank)
        np.testing.assert_allclose(got.astype(np.float64), out[rows], atol=2e-3)
        np.testing.assert_allclose(got_lse, lse[rows], atol=1e-4)
    return done


def names(calls: list[tuple[Any, ...]]) -> list[str]:
    return [call[0] for call in calls]


def test_gather_in_one_launch(device: Device, log: list[tuple[Any, ...]]) -> None:
    calls = run(device, log, "gather", 1)
    row = 2 * (16 + 16) * 2
    assert calls == [
        ("enter", MAIN),
        ("store_kv", MAIN),  # to be sent
        ("begin", MAIN),
        ("all_gather", 31 * row, SIDE),
        ("mark", 0),
        ("store_kv", MAIN),  # the rank's own keys in their places, meanwhile
        ("wait", MAIN, 0),
        ("store_kv", MAIN),
        ("attention", MAIN),
        ("leave", MAIN),
    ]


def test_gather_in_two_launches(device: Device, log: list[tuple[Any, ...]]) -> None:
    """The second half of the keys is waited for behind the launch over the first half."""
    calls = run(device, log, "gather", 2, window_left=9)
    assert names(calls) == [
        *("enter", "store_kv", "begin", "all_gather", "mark", "all_gather", "mark", "store_kv"),
        *("wait", "store_kv", "attention", "wait", "store_kv", "attention", "leave"),
    ]
    assert [call[2] for call in calls if call[0] == "wait"] == [0, 1]
    assert all(call[2] == SIDE for call in calls if call[0] == "all_gather")


def test_overlap(device: Device, log: list[tuple[Any, ...]]) -> None:
    """Own keys are attended to before any chunk is waited for, and each chunk before the next."""
    calls = run(device, log, "overlap", 2)
    assert names(calls) == [
        *("enter", "store_kv", "begin", "all_gather", "mark", "all_gather", "mark"),
        "attention",
        *("wait", "store_kv", "attention") * 2,
        *("merge_states", "leave"),
    ]


def test_ulysses(device: Device, log: list[tuple[Any, ...]]) -> None:
    calls = run(device, log, "ulysses", None, causal=False)
    assert names(calls) == [
        *("copy_rows", "copy_rows", "all_to_all", "store_kv", "attention"),
        *("store_kv", "all_to_all", "copy_rows", "copy_rows"),
    ]
    assert {call[-1] for call in calls} == {MAIN}


@pytest.mark.parametrize("method", ["gather", "overlap", "ulysses"])
def test_later_runs_are_known(
    device: Device, log: list[tuple[Any, ...]], monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    """From the third run on every launch of attention is found in the call cache. (The first one
    says whose memory a wrapper works in, and plans there.)"""
    checked = run_batch._run_checked

    def checked_and_logged(*args: Any) -> Any:
        log.append(("checked",))
        return checked(*args)

    replace(monkeypatch, checked, checked_and_logged)
    assert "attention" in names(run(device, log, method, None, runs=3))
    assert "checked" not in names(log)


# --- the side stream itself ---


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Any:
    """CuPy's part of it, whose calls are written down."""
    calls: list[tuple[Any, ...]] = []
    events = iter(range(100, 200))

    class Place:
        def __init__(self, index: int) -> None:
            calls.append(("device", index))

        def __enter__(self) -> None: ...

        def __exit__(self, *_: object) -> None: ...

    def stream(**options: Any) -> Any:
        assert options["non_blocking"] and options["priority"] < 0
        return SimpleNamespace(ptr=SIDE)

    capturing: set[int] = set()
    fake = SimpleNamespace(
        Device=Place,
        Stream=stream,
        Event=lambda **options: SimpleNamespace(ptr=next(events)),
        runtime=SimpleNamespace(
            eventRecord=lambda event, raw: calls.append(("record", event, raw)),
            streamWaitEvent=lambda raw, event: calls.append(("wait", raw, event)),
            streamIsCapturing=lambda raw: raw in capturing,
        ),
    )
    replace_all(monkeypatch, (side_stream.cupy_module, lambda: SimpleNamespace(cuda=fake)))
    return SimpleNamespace(calls=calls, capturing=capturing)


def test_events_order_both_streams(cuda: Any) -> None:
    side = SideStream(array.Device("cuda", 1))
    assert cuda.calls == [("device", 1)]
    for _ in range(2):
        cuda.calls.clear()
        side.begin(5)
        marks = [side.mark(), side.mark()]
        side.wait(5, marks[0])
        side.wait(5, marks[1])
        calls = [call for call in cuda.calls if call[0] != "device"]
        (_, begin, _), _, (_, first, _), (_, second, _) = calls[:4]
        assert calls == [
            ("record", begin, 5),
            ("wait", SIDE, begin),
            ("record", first, SIDE),
            ("record", second, SIDE),
            ("wait", 5, first),
            ("wait", 5, second),
        ]
        assert len({begin, first, second}) == 3


def test_a_call_on_another_stream_waits_for_the_one_before(cuda: Any) -> None:
    side = SideStream(array.Device("cuda", 0))
    cuda.calls.clear()
    side.enter(5)
    side.leave(5)
    side.enter(5)
    ((_, end, _),) = cuda.calls
    side.enter(6)
    assert cuda.calls[1:] == [("wait", 6, end)]
    cuda.calls.clear()
    cuda.capturing.add(7)
    side.enter(7)
    side.leave(7)
    assert not cuda.calls


def test_the_cpu_has_no_stream() -> None:
    side = SideStream(array.CPU)
    side.enter(None)
    side.begin(None)
    assert side.handle is None and [side.mark(), side.mark()] == [0, 1]
    side.wait(None, 1)
    side.leave(None)
