"""Wrappers that several threads share, and processes that are forked: right answers or refusals."""

from __future__ import annotations

import copy
import os
import pickle
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from helpers import fake_gpu
from helpers.batches import HKV, HQ, D
from helpers.fake_batch import Device
from helpers.poison import download
from helpers.shared_wrapper import (
    NUM_THREADS,
    SIZE,
    TYPES,
    decode_plan,
    in_threads,
    plan_and_run,
    pool,
    tables,
    wanted,
)

import cupyattn
from cupyattn.array import views
from cupyattn.core import dtypes
from cupyattn.engine.call_cache import Argument, CallCache
from cupyattn.engine.wrapper import BatchWrapper, planning
from cupyattn.errors import DeviceError, PlanError
from cupyattn.launch.driver import enqueue


@pytest.fixture(autouse=True)
def hurried_threads() -> Iterator[None]:
    """Threads take turns after few instructions, so that what may go wrong does."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


def mixed_plan(wrapper: Any, index: int) -> None:
    indptr, indices, last = tables(index)
    lengths = (np.diff(indptr) - 1) * SIZE + last
    rows = np.arange(4, dtype=np.int32)
    wrapper.plan(rows, indptr, indices, lengths, HQ, HKV, D, D, SIZE, **TYPES)


PLANS = {
    "BatchDecodeWithPagedKVCacheWrapper": decode_plan,
    "BatchAttention": mixed_plan,
}


def made(name: str, place: Any = None) -> Any:
    """A wrapper with a workspace of its own, on the CPU or in a workspace given."""
    cls = getattr(cupyattn, name)
    return cls(device="cpu" if place is None else place) if name == "BatchAttention" else cls(place)


def answer(run: Any) -> np.ndarray:
    return download(run[0] if isinstance(run, tuple) else run)


@pytest.mark.parametrize("name", PLANS)
def test_threads_that_plan_one_wrapper_never_get_a_wrong_answer(name: str) -> None:
    w, rounds, all_planned = made(name), 12, threading.Barrier(NUM_THREADS)
    for index in range(NUM_THREADS):
        wanted(index)  # cached

    def work(index: int) -> int:
        refused = 0
        for turn in range(rounds):
            PLANS[name](w, index)
            if turn % 3 == 0:
                all_planned.wait(30)
            try:
                got = answer(w.run(*pool()))
            except PlanError as error:
                assert "another thread has planned" in str(error)
                refused += 1
            else:
                np.testing.assert_array_equal(got, wanted(index))
        return refused

    refused = in_threads(work)
    assert all(isinstance(n, int) for n in refused), refused
    # Where all have planned before the first runs, only the last of them may.
    assert (NUM_THREADS - 1) * rounds // 3 <= sum(refused) < NUM_THREADS * rounds


def test_every_plan_excludes_other_threads() -> None:
    locked = planning(lambda wrapper: None).__code__
    classes = [getattr(cupyattn, name) for name in cupyattn.__all__ if name.endswith("Wrapper")]
    for cls in (*classes, cupyattn.BatchAttention):
        if issubclass(cls, BatchWrapper):
            assert cls.plan.__code__ is locked, cls
            assert getattr(cls, "begin_forward", cls.plan).__code__ is locked, cls


def test_runs_of_one_plan_in_threads_are_right() -> None:
    w = made("BatchDecodeWithPagedKVCacheWrapper")
    decode_plan(w, 0)

    def work(index: int) -> None:
        for _ in range(10):
            np.testing.assert_array_equal(w.run(*pool()), wanted(0))

    assert in_threads(work) == [None] * NUM_THREADS


def test_one_thread_plans_and_others_run() -> None:
    w = made("BatchDecodeWithPagedKVCacheWrapper")
    for index in range(3):
        assert in_threads(lambda _, index=index: decode_plan(w, index), 1) == [None]
        np.testing.assert_array_equal(w.run(*pool()), wanted(index))
    decode_plan(w, 0)
    in_threads(lambda _: decode_plan(w, 1), 1)
    with pytest.raises(PlanError, match="another thread has planned"):
        w.run(*pool())
    w.end_forward()
    np.testing.assert_array_equal(w.run(*pool()), wanted(1))


def test_options_of_forward_are_those_of_its_own_run() -> None:
    w = made("BatchDecodeWithPagedKVCacheWrapper")
    decode_plan(w, 0)
    scales = [0.1 * (index + 1) for index in range(NUM_THREADS)]
    expected = [w.forward(*pool(), sm_scale=scale) for scale in scales]
    change = w._change

    def change_slowly(**changes: Any) -> None:
        change(**changes)
        time.sleep(1e-3)

    w._change = change_slowly

    def work(index: int) -> None:
        for _ in range(3):
            got = w.forward(*pool(), sm_scale=scales[index])
            np.testing.assert_array_equal(got, expected[index])

    assert in_threads(work) == [None] * NUM_THREADS


def test_a_plan_that_waits_for_its_page_size_is_its_threads_own() -> None:
    w = cupyattn.BatchPrefillWithSharedPrefixPagedKVCacheWrapper()
    rows, (q, pages) = np.arange(4, dtype=np.int32), pool()
    shared = np.zeros((0, HKV, D), np.float16)
    w.plan(rows, *tables(0), HQ, HKV, D)
    in_threads(lambda _: w.plan(rows, *tables(1), HQ, HKV, D), 1)
    with pytest.raises(PlanError, match="another thread has planned"):
        w.run(q, shared, shared, pages)
    w.end_forward()
    for _ in range(2):
        np.testing.assert_array_equal(w.run(q, shared, shared, pages), wanted(1))


@pytest.mark.parametrize(
    "copied", [copy.copy, copy.deepcopy, lambda w: pickle.loads(pickle.dumps(w))]
)
def test_a_copy_has_threads_of_its_own(copied: Callable[[Any], Any]) -> None:
    w = made("BatchDecodeWithPagedKVCacheWrapper")
    decode_plan(w, 0)
    other = copied(w)
    in_threads(lambda _: decode_plan(other, 1), 1)
    np.testing.assert_array_equal(w.run(*pool()), wanted(0))
    np.testing.assert_array_equal(other.run(*pool()), wanted(1))


def test_launches_of_threads_do_not_mix(device: Device) -> None:
    """On a GPU a plan is copied to where the launches of the one before read theirs."""
    w = cupyattn.BatchDecodeWithPagedKVCacheWrapper(device.workspace())
    q, pages = map(device.put, pool())
    answers = plan_and_run(w, q, pages)
    device.stream.finish()
    for index, outs in enumerate(answers):
        assert isinstance(outs, list), outs
        for out in outs:
            np.testing.assert_allclose(download(out), wanted(index), rtol=2e-3, atol=2e-3)
    assert any(answers)


def test_a_cached_call_is_found_while_another_thread_finds_its_own(make: Any) -> None:
    calls: CallCache[str] = CallCache(Argument("q", 0))
    arrays = [make(n, 4) for n in (2, 3)]
    for x in arrays:
        calls.insert((x,), (), "checked", views.view(x, "q"), dtypes.float16, None, None)
    (group,) = calls._groups[tuple].values()
    found = [calls.lookup((x,), ())[0] for x in arrays]  # type: ignore[index]

    class Facts(list):  # type: ignore[type-arg]
        """While it is compared, another thread's call becomes the last."""

        def __ne__(self, other: object) -> bool:
            group.last = found[0]
            return list(self) != other

    group.last = found[1]
    found[1].facts = Facts(found[1].facts)
    again, _ = calls.lookup((arrays[0],), ())  # type: ignore[misc]
    assert again.lengths == [2]


# --- fork ---


def in_fork(work: Callable[[], None]) -> int:
    """The exit status of a forked process that does this."""
    child = os.fork()
    if not child:
        status = 1
        try:
            signal.alarm(10)  # rather than wait for a lock forever
            work()
            status = 0
        finally:
            os._exit(status)
    return os.waitpid(child, 0)[1]


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::RuntimeWarning")
def test_a_forked_process_goes_on_with_cpu_arrays() -> None:
    w = made("BatchDecodeWithPagedKVCacheWrapper")
    decode_plan(w, 0)
    held, done = threading.Event(), threading.Event()

    def hold() -> None:
        with w._turns.planning:
            held.set()
            done.wait()

    thread = threading.Thread(target=hold)
    thread.start()
    held.wait()

    def work() -> None:
        np.testing.assert_array_equal(w.run(*pool()), wanted(0))
        decode_plan(w, 1)
        np.testing.assert_array_equal(w.run(*pool()), wanted(1))

    try:
        assert in_fork(work) == 0
    finally:
        done.set()
        thread.join()


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::RuntimeWarning")
def test_a_forked_process_is_refused_gpu_arrays(device: Device, gpu: fake_gpu.Gpu) -> None:
    w = cupyattn.BatchDecodeWithPagedKVCacheWrapper(device.workspace())
    q, pages = map(device.put, pool())
    decode_plan(w, 0)
    for _ in range(2):
        w.run(q, pages)

    def work() -> None:
        views.refuse_gpus()
        for call in (w.run, lambda q, _: cupyattn.single_decode_with_kv_cache(q[0], q, q)):
            with pytest.raises(DeviceError, match="was forked"):
                call(q, pages)

    assert in_fork(work) == 0
    w.run(q, pages)


def test_the_first_launch_says_what_a_fork_may_not_do(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("cupy")
    registered = []
    monkeypatch.setattr(os, "register_at_fork", lambda **hooks: registered.append(hooks))
    enqueue.cuda.__wrapped__()
    assert registered == [{"after_in_child": views.refuse_gpus}]
