"""How time is taken: cold L2, other code before each sample, CUDA events around one call,
implementations interleaved, medians.

A visit is one call. In a model other kernels lie between two calls of one: what follows itself, its
instructions still in the caches, is not what is asked for. The order of visits in a round is A B C,
C B A, so a drift of clocks or temperature falls on all alike. In random order nobody always follows
the same neighbour. Nothing here knows attention or a device: what needs a GPU is a `Stopwatch`, so
the loop is tested without one.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

PREHEAT_SECONDS = 0.2


class ContextLost(Exception):
    """The CUDA context is unusable (an illegal access, say): only a fresh process can go on."""


@dataclass
class Timing:
    """Samples of one implementation in µs, or the error that stopped it."""

    samples: list[float] = field(default_factory=list)
    error: str | None = None

    def percentile(self, q: float) -> float:
        return float(np.percentile(self.samples, q))


class Stopwatch(Protocol):
    """What the measuring loop needs of a device."""

    def visit(self, call: Callable[[], Any], calls: int) -> Any: ...
    def read(self, visit: Any) -> list[float]: ...
    def wait(self) -> None: ...
    def check_alive(self) -> None: ...


def round_order(n: int) -> list[int]:
    """0, 1, …, n-1, n-1, …, 1, 0."""
    return [*range(n), *reversed(range(n))]


def random_order(seed: int | str) -> Callable[[int], list[int]]:
    """Orders in which each of n calls is visited twice a round, shuffled anew each round."""
    generator = random.Random(seed)

    def order(n: int) -> list[int]:
        return [*generator.sample(range(n), n), *generator.sample(range(n), n)]

    return order


def measure(
    calls: Sequence[Callable[[], Any]],
    watch: Stopwatch,
    rounds: int,
    deadline: float,
    now: Callable[[], float] = time.time,
    order: Callable[[int], Sequence[int]] = round_order,
) -> list[Timing]:
    """Samples of every call over `rounds` interleaved rounds, each visited as `order` says.

    Stops between rounds, after at least one, when `now()` passes `deadline`. A call that raises
    keeps its error and drops out; ContextLost is the only exception that leaves.
    """
    timings = [Timing() for _ in calls]
    for _ in _visits(calls, timings, watch, range(len(calls))):
        pass  # the first call of each sets it up
    for done in range(rounds):
        if done and now() > deadline:
            break
        for i, visit in _visits(calls, timings, watch, order(len(calls))):
            timings[i].samples += watch.read(visit)
    return timings


def _visits(
    calls: Sequence[Callable[[], Any]],
    timings: list[Timing],
    watch: Stopwatch,
    order: Sequence[int],
) -> Iterator[tuple[int, Any]]:
    visits = []
    for i in order:
        if timings[i].error is None:
            try:
                visits.append((i, watch.visit(calls[i], 1)))
            except Exception as error:
                timings[i].error = describe(error)
                watch.check_alive()
    watch.wait()
    yield from visits


def describe(error: BaseException) -> str:
    """One line for a result file: the kind of the error and the start of its message."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    text = " | ".join(lines[:3]) or "no message"
    return f"{type(error).__name__}: {text}"[:400]
