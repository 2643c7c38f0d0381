"""Threads that share a wrapper: each plans batches of the same shapes over pages of its own."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable
from typing import Any

import numpy as np

import cupyattn
from cupyattn.errors import PlanError

from .batches import HKV, HQ, D

NUM_THREADS, SIZE = 8, 4
TYPES = {"q_data_type": "float16", "kv_data_type": "float16"}


def in_threads(work: Callable[[int], Any], count: int = NUM_THREADS) -> list[Any]:
    """What each of the threads, which begin together, has returned or raised."""
    together, results = threading.Barrier(count), [None] * count

    def run(index: int) -> None:
        together.wait(30)
        try:
            results[index] = work(index)
        except Exception as error:
            results[index] = error

    threads = [threading.Thread(target=run, args=(index,)) for index in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


@functools.cache
def pool() -> tuple[np.ndarray, np.ndarray]:
    """q, and pages that are told apart by every answer."""
    rng = np.random.default_rng(0)
    shapes = (3, HQ, D), (12, 2, SIZE, HKV, D)
    q, pages = (rng.standard_normal(shape).astype(np.float16) for shape in shapes)
    return q, pages


def tables(index: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The same shapes for all threads, over pages in another order."""
    pages = np.random.default_rng(index).permutation(len(pool()[1]))[:6]
    return np.array([0, 2, 4, 6], np.int32), pages.astype(np.int32), np.array([3, 1, 4], np.int32)


def decode_plan(wrapper: Any, index: int) -> None:
    wrapper.plan(*tables(index), HQ, HKV, D, SIZE, **TYPES)


@functools.cache
def wanted(index: int) -> np.ndarray:
    w = cupyattn.BatchDecodeWithPagedKVCacheWrapper()
    decode_plan(w, index)
    return w.run(*pool())


def plan_and_run(wrapper: Any, q: Any, pages: Any) -> list[list[Any]]:
    """The answers that each thread got, of runs that were not refused."""
    for index in range(NUM_THREADS):
        wanted(index)

    def work(index: int) -> list[Any]:
        outs = []
        for _ in range(12):
            decode_plan(wrapper, index)
            with contextlib.suppress(PlanError):
                for _ in range(2):
                    outs.append(wrapper.run(q, pages))  # kept until the stream has written it
        return outs

    return in_threads(work)
