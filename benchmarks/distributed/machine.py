"""What ranks measure on: GPUs, by CUDA graphs, or the CPU, to try the program without any."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

Step = Callable[[], Any]


class Machine(NamedTuple):
    """Where arrays lie, of which dtype they are, and how often a step is made.

    layers   of a graph
    visits   of a graph that count
    settled  seconds of work before them: a GPU whose power is capped clocks lower by then, by a
             tenth and more, and does so for the rest of a serving engine's day
    """

    device: str
    dtype: torch.dtype
    layers: int
    visits: int
    settled: float

    @property
    def on_gpu(self) -> bool:
        """Whether times are those of a GPU."""
        return self.device == "cuda"

    def randn(self, *shape: int, seed: int) -> torch.Tensor:
        """Normal numbers, the same on all ranks."""
        made = torch.empty(shape, dtype=self.dtype, device=self.device)
        generator = torch.Generator(made.device).manual_seed(seed)
        # By parts: normal_ counts a tensor of more than 2**31 elements in pieces of its own.
        for part in made.split(max(1, shape[0] // 16)):
            part.normal_(generator=generator)
        return made

    def empty(self, *shape: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        """An array to write; of the machine's dtype by default."""
        return torch.empty(shape, dtype=dtype or self.dtype, device=self.device)

    def stream(self) -> int | None:
        """The current stream's handle; none on the CPU."""
        return torch.cuda.current_stream().cuda_stream if self.on_gpu else None

    def times(
        self, steps: Sequence[Step], layers: int, agree: Callable[[float], float] = float
    ) -> list[float]:
        """µs of a step at each visit of a graph of so many layers, which take the steps in turn.

        agree   what ranks that wait for each other make of a number, so that it is the same
        """
        replay = captured(steps, layers) if self.on_gpu else _repeated(steps, layers)
        clock = _gpu_times if self.on_gpu else _cpu_times
        longest = agree(max(clock(replay, 1)))
        for _ in range(math.ceil(self.settled * 1e6 / longest)):
            replay()
        return [us / layers for us in clock(replay, self.visits)]


GPU = Machine("cuda", torch.bfloat16, layers=10, visits=10, settled=0.3)
CPU = Machine("cpu", torch.float32, layers=1, visits=1, settled=0.0)


def captured(steps: Sequence[Step], layers: int) -> Step:
    """Replays a graph of so many layers."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(3):
            _make(steps, max(1, len(steps)))
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
            _make(steps, layers)
    graph.replay()
    torch.cuda.synchronize()
    return graph.replay


def _repeated(steps: Sequence[Step], layers: int) -> Step:
    return lambda: _make(steps, layers)


def _make(steps: Sequence[Step], layers: int) -> None:
    for layer in range(layers):
        steps[layer % len(steps)]()


def _gpu_times(call: Step, visits: int) -> list[float]:
    """µs of calls on the GPU, which come one behind another."""
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(visits + 1)]
    for mark in marks[:-1]:
        mark.record()
        call()
    marks[-1].record()
    marks[-1].synchronize()
    return [begin.elapsed_time(end) * 1e3 for begin, end in itertools.pairwise(marks)]


def _cpu_times(call: Step, visits: int) -> list[float]:
    """µs of calls on the host."""
    marks = [time.perf_counter()]
    for _ in range(visits):
        call()
        marks.append(time.perf_counter())
    return [(end - begin) * 1e6 for begin, end in itertools.pairwise(marks)]
