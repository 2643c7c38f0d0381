"""What timing needs beside `cupyattn.bench.timing`: host times, and a clock on torch's stream."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from cupyattn.bench.between import Between
from cupyattn.bench.event_clock import FLUSH_BYTES, EventClock
from cupyattn.bench.timing import PREHEAT_SECONDS, ContextLost, Timing
from cupyattn.bench.timing import describe as describe
from cupyattn.bench.timing import measure as measure
from cupyattn.bench.timing import random_order as random_order
from cupyattn.bench.timing import round_order as round_order
from cupyattn.core.cupy_module import cupy_module

HOST_CALLS = 200  # far fewer than the driver's launch queue holds, so no call waits for the GPU


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


class Clock(EventClock):
    """The stopwatch of one CUDA device, on torch's current stream."""

    def __init__(self) -> None:
        import torch

        super().__init__()
        self._torch = torch
        self._scratch = torch.empty(FLUSH_BYTES, dtype=torch.uint8, device="cuda")
        self._between = Between()
        self._streams: dict[int, Any] = {}  # CuPy's of torch's handles

    def _event(self) -> Any:
        return self._torch.cuda.Event(enable_timing=True)

    def _flush(self) -> None:
        self._scratch.zero_()

    def _run_other_code(self) -> None:
        self._between.run_code(self._current())

    def _hold(self, us: float) -> None:
        self._between.hold(us, self._current())

    def _current(self) -> Any:
        """Torch's current stream as one of CuPy's."""
        handle = self._torch.cuda.current_stream().cuda_stream
        if handle not in self._streams:
            cuda = cupy_module().cuda
            self._streams[handle] = cuda.ExternalStream(handle) if handle else cuda.Stream.null
        return self._streams[handle]

    def _has_passed(self, event: Any) -> bool:
        return bool(event.query())

    def _us_between(self, begin: Any, end: Any) -> float:
        return float(begin.elapsed_time(end)) * 1e3

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
