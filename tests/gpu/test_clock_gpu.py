"""The clocks of the benchmarks on a GPU: what lies before a sample, and what is timed of it."""

from __future__ import annotations

import importlib
import time
from typing import Any

import pytest

pytestmark = pytest.mark.gpu


def _clock(framework: str) -> Any:
    if framework == "torch":
        pytest.importorskip("torch")
        return importlib.import_module("benchmarks.timing").Clock()
    return importlib.import_module("cupyattn.bench.clock").Clock()


@pytest.mark.parametrize("framework", ["cupy", "torch"])
def test_only_the_call_is_timed(framework: str) -> None:
    """A call that keeps the GPU busy for 300 us, among flushes, other code and holds."""
    watch = _clock(framework)
    visit = watch.visit(lambda: watch._hold(300.0), 5)
    watch.wait()
    assert all(295.0 < us < 330.0 for us in watch.read(visit))


@pytest.mark.parametrize("framework", ["cupy", "torch"])
def test_a_slow_host_is_not_timed(framework: str) -> None:
    """The host takes 400 us to enqueue a call of 20 us."""
    watch = _clock(framework)

    def call() -> None:
        stop = time.perf_counter() + 400e-6
        while time.perf_counter() < stop:
            pass
        watch._hold(20.0)

    watch.visit(call, 1)
    watch.wait()
    visit = watch.visit(call, 5)
    watch.wait()
    assert sorted(watch.read(visit))[2] < 60.0
