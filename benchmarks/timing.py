"""How time is taken: cold L2, CUDA events around one call, implementations interleaved, medians.

The order of visits in a round is A B C, C B A, so a drift of clocks or temperature falls on all
alike. A sweep visits in random order, so nobody always follows the same neighbour. Nothing here
knows attention; `Clock` holds all that needs a GPU, so the loop is tested without one.
"""

from __future__ import annotations

import gc
import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

FLUSH_BYTES = 256 << 20  # four times the L2 of an H200
PREHEAT_SECONDS = 0.2
HOST_CALLS = 200  # far fewer than the driver's launch queue holds, so no call waits for the GPU
_VISIT_US = 2000.0
_MAX_CALLS_A_VISIT = 5


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
    repeats = [1] * len(calls)
    for i, visit in _visits(calls, timings, watch, repeats, range(len(calls))):
        repeats[i] = calls_a_visit(min(watch.read(visit)))
    for done in range(rounds):
        if done and now() > deadline:
            break
        for i, visit in _visits(calls, timings, watch, repeats, order(len(calls))):
            timings[i].samples += watch.read(visit)
    return timings


def _visits(
    calls: Sequence[Callable[[], Any]],
    timings: list[Timing],
    watch: Stopwatch,
    repeats: list[int],
    order: Sequence[int],
) -> Iterator[tuple[int, Any]]:
    visits = []
    for i in order:
        if timings[i].error is None:
            try:
                visits.append((i, watch.visit(calls[i], repeats[i])))
            except Exception as error:
                timings[i].error = describe(error)
                watch.check_alive()
    watch.wait()
    yield from visits


def calls_a_visit(us: float) -> int:
    """Short calls are repeated within a visit, so that they get more samples in the same time."""
    return max(1, min(_MAX_CALLS_A_VISIT, int(_VISIT_US / max(us, 1e-3))))


def measure_host(
    calls: Sequence[Callable[[], Any]],
    wait: Callable[[], None],
    check_alive: Callable[[], None],
    rounds: int,
) -> list[Timing]:
    """Host µs of one call: the mean over HOST_CALLS asynchronous calls, one sample a visit."""
    timings = [Timing() for _ in calls]
    gc.collect()
    gc.disable()
    try:
        for turn in range(rounds + 1):
            for i in round_order(len(calls)):
                if timings[i].error is not None:
                    continue
                try:
                    sample = _host_us(calls[i], wait)
                except Exception as error:
                    timings[i].error = describe(error)
                    check_alive()
                else:
                    if turn > 0:  # the first turn warms caches and allocators
                        timings[i].samples.append(sample)
    finally:
        gc.enable()
    return timings


def _host_us(call: Callable[[], Any], wait: Callable[[], None]) -> float:
    wait()
    start = time.perf_counter()
    for _ in range(HOST_CALLS):
        call()
    elapsed = time.perf_counter() - start
    wait()
    return elapsed / HOST_CALLS * 1e6


def describe(error: BaseException) -> str:
    """One line for a result file: the kind of the error and the start of its message."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    text = " | ".join(lines[:3]) or "no message"
    return f"{type(error).__name__}: {text}"[:400]


class Clock:
    """The stopwatch of one CUDA device, on torch's current stream."""

    def __init__(self) -> None:
        import torch

        self._torch = torch
        self._scratch = torch.empty(FLUSH_BYTES, dtype=torch.uint8, device="cuda")

    def visit(self, call: Callable[[], Any], calls: int) -> list[tuple[Any, Any]]:
        """Enqueue `calls` timed calls. The flush before each also hides the host's part of it."""
        event = self._torch.cuda.Event
        pairs = []
        for _ in range(calls):
            begin, end = event(enable_timing=True), event(enable_timing=True)
            self._scratch.zero_()
            begin.record()
            call()
            end.record()
            pairs.append((begin, end))
        return pairs

    def read(self, visit: list[tuple[Any, Any]]) -> list[float]:
        """µs of each call of a visit, after `wait`."""
        return [begin.elapsed_time(end) * 1e3 for begin, end in visit]

    def wait(self) -> None:
        try:
            self._torch.cuda.synchronize()
        except Exception as error:
            raise ContextLost(describe(error)) from error

    def check_alive(self) -> None:
        """Raise ContextLost if the device no longer answers; any other state is fine."""
        self.wait()
        try:
            answer = int(self._torch.ones(1, device="cuda").add_(1).item())
        except Exception as error:
            raise ContextLost(describe(error)) from error
        if answer != 2:
            raise ContextLost(f"1 + 1 came out as {answer} on the device")

    def preheat(self, seconds: float = PREHEAT_SECONDS) -> None:
        """Keep the matrix units busy until clocks have settled."""
        torch = self._torch
        a = torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16)
        stop = time.perf_counter() + seconds
        while time.perf_counter() < stop:
            for _ in range(10):
                a @ a
            self.wait()

    def ceilings(self) -> dict[str, float]:
        """Limits of this device, measured now: bf16 matrix TFLOP/s, copy GB/s (read + written)."""
        torch = self._torch
        n, copied = 8192, 2 << 30
        a = torch.randn(n, n, device="cuda", dtype=torch.bfloat16)
        b = torch.randn(n, n, device="cuda", dtype=torch.bfloat16)
        product = torch.empty_like(a)
        self.preheat()
        gemm = self._median(lambda: torch.matmul(a, b, out=product))
        source = torch.empty(copied, dtype=torch.uint8, device="cuda").random_()
        target = torch.empty_like(source)
        copy = self._median(lambda: target.copy_(source))
        return {"tflops": 2 * n**3 / gemm / 1e6, "gbps": 2 * copied / copy / 1e3}

    def _median(self, call: Callable[[], Any]) -> float:
        for _ in range(3):
            call()
        visit = self.visit(call, 10)
        self.wait()
        return float(np.median(self.read(visit)))
