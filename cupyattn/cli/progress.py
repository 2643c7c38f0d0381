"""How far a long job is: a bar on a terminal, and elsewhere lines."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TextIO

# Lines come after so many seconds, or when another such share is done.
SECONDS, SHARES = 10.0, 10


class Progress:
    """Steps of known weights; the rest is estimated from the weight done so far.

    weights: what each step takes, in any unit. now: the clock, in seconds. unit: what is counted.
    """

    def __init__(
        self,
        count: int,
        weight: float,
        stream: TextIO,
        now: Callable[[], float] = time.monotonic,
        unit: str = "kernels",
    ) -> None:
        self._unit = unit
        self._count, self._left, self._stream, self._now = count, weight, stream, now
        self._done, self._worked, self._bytes, self._label = 0, 0.0, 0, ""
        self._start = self._said = now()
        self._is_terminal = stream.isatty()

    def step(self, label: str, weight: float, was_work: bool = True, nbytes: int = 0) -> None:
        """One step is done, and left `nbytes`. was_work: False if it took no time."""
        shares = SHARES * self._done // self._count
        self._done += 1
        self._left = max(0.0, self._left - weight)
        self._worked += weight * was_work
        self._bytes += nbytes
        self._label = label
        self.tick(SHARES * self._done // self._count > shares)

    def tick(self, is_due: bool = False) -> None:
        """Say it again if enough time has passed, or if `is_due`."""
        now = self._now()
        if self._is_terminal:
            filled = 30 * self._done // self._count
            bar = "#" * filled + "." * (30 - filled)
            text = f"[{bar}] {self._text(now)}; {self._label}"
            print(f"\r{text[:99]:<99}", end="", file=self._stream, flush=True)
        elif is_due or now - self._said >= SECONDS:
            self._said = now
            print(self._text(now), file=self._stream, flush=True)

    def close(self) -> None:
        if self._is_terminal:
            print(file=self._stream)

    def _text(self, now: float) -> str:
        elapsed = now - self._start
        size = f", {self._bytes / 2**20:.1f} MiB," if self._bytes else ""
        text = f"{self._done}/{self._count} {self._unit}{size} in {duration(elapsed)}"
        if self._done == self._count or not self._worked:
            return text
        return f"{text}, about {duration(elapsed * self._left / self._worked)} left"


def duration(seconds: float) -> str:
    """Whole seconds, and minutes and hours where there are some."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes} min"
    return f"{minutes} min {rest} s" if minutes else f"{rest} s"
