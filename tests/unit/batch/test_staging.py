"""Pinned blocks in turn, and what a run costs: apart from any wrapper, and by counting calls."""

from __future__ import annotations

import gc
from typing import Any

import numpy as np
import pytest
from helpers import batches, fake_batch, fake_gpu
from helpers.batches import HKV, HQ, D
from helpers.fake_gpu import count_functions

import cupyattn
from cupyattn.engine import staging as wrapper


@pytest.fixture
def staging(stream: fake_batch.Stream) -> wrapper.Staging:
    return wrapper.Staging(0)


def target(count: int) -> np.ndarray:
    return np.zeros(count, np.int32)


def test_blocks_take_turns_and_wait_for_their_copy(
    stream: fake_batch.Stream, staging: wrapper.Staging
) -> None:
    targets = [target(10) for _ in range(7)]
    for step, x in enumerate(targets):
        block = staging.block(10)
        block[:10] = step + 1
        staging.send([(0, 10, x.ctypes.data)], fake_gpu.STREAM)
        assert stream.waits == max(0, step - 1)
    stream.finish()
    assert [x.tolist() for x in targets] == [[step + 1] * 10 for step in range(7)]


def test_a_block_that_grows_waits_too(stream: fake_batch.Stream, staging: Any) -> None:
    small, large = target(10), target(50_000)
    for _ in range(2):
        staging.block(10)[:10] = 3
        staging.send([(0, 10, small.ctypes.data)], fake_gpu.STREAM)
    block = staging.block(50_000)
    assert stream.waits == 1 and block.size >= 50_000
    block[:50_000] = 4
    staging.send([(0, 50_000, large.ctypes.data)], fake_gpu.STREAM)
    stream.finish()
    assert (small == 3).all() and (large == 4).all()


def test_a_copy_that_is_not_in_flight_is_not_waited_for(
    stream: fake_batch.Stream, staging: Any
) -> None:
    x = target(4)
    for _ in range(6):
        staging.block(4)[:4] = 1
        staging.send([(0, 4, x.ctypes.data)], fake_gpu.STREAM)
        stream.finish()
    assert stream.waits == 0


def test_blocks_outlive_their_copies(stream: fake_batch.Stream) -> None:
    x = target(8)
    gone = wrapper.Staging(0)
    gone.block(8)[:8] = 5
    gone.send([(0, 8, x.ctypes.data)], fake_gpu.STREAM)
    del gone
    gc.collect()
    assert stream.waits == 1 and (x == 5).all()


def test_the_event_is_recorded_though_a_copy_fails(
    stream: fake_batch.Stream, staging: Any, gpu: Any
) -> None:
    x = target(8)
    staging.block(8)[:8] = 5
    real = gpu.api.runtime.memcpyAsync
    sent: list[int] = []

    def second_fails(*a: Any) -> None:
        sent.append(1)
        if len(sent) == 2:
            raise RuntimeError("no")
        real(*a)

    gpu.api.runtime.memcpyAsync = second_fails
    with pytest.raises(RuntimeError):
        staging.send([(0, 4, x.ctypes.data), (4, 4, x.ctypes.data)], fake_gpu.STREAM)
    staging.block(8), staging.block(8)
    assert stream.waits == 1 and x[:4].tolist() == [5] * 4


# --- what it costs ---


def test_a_plan_reads_no_request_by_itself(device: fake_batch.Device) -> None:
    """As many Python functions for 400 requests as for 4."""
    w = cupyattn.BatchDecodeWithPagedKVCacheWrapper(device.workspace())
    counts = []
    for count in (4, 400, 4, 400):
        b = batches.make([1] * count, [1, 5, 9, 20] * (count // 4), 4)
        counts.append(count_functions(lambda b=b: w.plan(*b.table, HQ, HKV, D, 4)))
    assert abs(counts[2] - counts[3]) <= 30, counts
