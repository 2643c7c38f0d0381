"""How far a long job is said to be."""

from __future__ import annotations

import io

import pytest

from cupyattn.cli.progress import Progress, duration


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class Clock:
    """A clock that goes on when it is told to."""

    seconds = 0.0

    def __call__(self) -> float:
        return self.seconds


def test_on_a_terminal_it_is_one_line() -> None:
    stream = Terminal()
    progress = Progress(4, 4.0, stream, Clock())
    for index in range(4):
        progress.step(f"kernel{index}", 1.0)
    progress.close()
    shown = stream.getvalue()
    assert shown.count("\n") == 1 and shown.count("\r") == 4
    assert f"[{'#' * 7}{'.' * 23}] 1/4 kernels in 0 s, about 0 s left; kernel0" in shown
    assert f"[{'#' * 30}] 4/4 kernels in 0 s; kernel3" in shown


def test_it_says_how_much_is_there() -> None:
    stream = io.StringIO()
    progress = Progress(2, 2.0, stream, Clock())
    progress.step("kernel", 1.0, nbytes=3 << 19)
    progress.step("kernel", 1.0, nbytes=1 << 19)
    assert stream.getvalue().splitlines() == [
        "1/2 kernels, 1.5 MiB, in 0 s, about 0 s left",
        "2/2 kernels, 2.0 MiB, in 0 s",
    ]


def test_elsewhere_it_is_a_line_for_each_tenth() -> None:
    stream, clock = io.StringIO(), Clock()
    progress = Progress(95, 95.0, stream, clock)
    for _ in range(95):
        clock.seconds += 0.08
        progress.step("kernel", 1.0)
    progress.close()
    lines = stream.getvalue().splitlines()
    assert len(lines) == 10 and lines[-1] == "95/95 kernels in 8 s"
    assert lines[4] == "48/95 kernels in 4 s, about 4 s left"


def test_elsewhere_it_is_a_line_every_ten_seconds_at_least() -> None:
    stream, clock = io.StringIO(), Clock()
    progress = Progress(100, 100.0, stream, clock)
    for _ in range(25):
        clock.seconds += 1.0
        progress.tick()
    progress.step("kernel", 1.0)
    clock.seconds += 5.0
    progress.tick()
    assert stream.getvalue().splitlines() == [
        "0/100 kernels in 10 s",
        "0/100 kernels in 20 s",
        "1/100 kernels in 30 s, about 49 min 30 s left",
    ]


def test_the_rest_counts_weights_and_not_what_was_there_already() -> None:
    stream, clock = io.StringIO(), Clock()
    progress = Progress(3, 100.0, stream, clock)
    progress.step("found", 50.0, was_work=False)
    clock.seconds = 10.0
    progress.step("compiled", 40.0)
    assert stream.getvalue().splitlines()[-1] == "2/3 kernels in 10 s, about 2 s left"


@pytest.mark.parametrize(
    ("seconds", "text"), [(9.4, "9 s"), (61, "1 min 1 s"), (3600 * 7 - 300, "6 h 55 min")]
)
def test_duration(seconds: float, text: str) -> None:
    assert duration(seconds) == text
