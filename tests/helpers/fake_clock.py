"""A clock for benchmarks on the CPU."""

from __future__ import annotations

from typing import Any


class FakeClock:
    """Says 100 µs of every call, which it makes."""

    def visit(self, call: Any, calls: int) -> list[float]:
        return [float(call() is not None) * 100 for _ in range(calls)]

    def read(self, visit: list[float]) -> list[float]:
        return visit

    def wait(self) -> None: ...

    def check_alive(self) -> None: ...

    def preheat(self, seconds: float) -> None: ...
