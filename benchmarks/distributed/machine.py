"""What ranks measure on: GPUs, by CUDA graphs, or the CPU, to try the program without any."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

Step = Callable[[], Any]


class Machine(NamedTuple):
    """Where arrays lie, of which dtype they are, and how often a step is made.

    layers   of a graph; visits   of a graph that count, behind two that do not
    """

    device: str
    dtype: torch.dtype
    layers: int
    visits: int

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

    def times(self, step: Step, layers: int, meet: Step | None = None) -> list[float]:
        """µs of a step at each visit. Ranks that wait for each other `meet` before a visit."""
        replay = captured(step, layers) if self.on_gpu else _repeated(step, layers)
        clock = _gpu_time if self.on_gpu else _cpu_time
        found = []
        for _ in range(2 + self.visits):
            if meet is not None:
                # Hosts come here at times that differ by more than a step takes. The first replay
                # ends on all ranks at one time, and is not counted.
                meet()
                replay()
            found.append(clock(replay) / layers)
        return found[2:]


GPU = Machine("cuda", torch.bfloat16, layers=10, visits=10)
CPU = Machine("cpu", torch.float32, layers=1, visits=1)


def captured(step: Step, layers: int) -> Step:
    """Replays a graph of so many steps."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(3):
            step()
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
            for _ in range(layers):
                step()
    graph.replay()
    torch.cuda.synchronize()
    return graph.replay


def _repeated(step: Step, layers: int) -> Step:
    def replay() -> None:
        for _ in range(layers):
            step()

    return replay


def _gpu_time(call: Step) -> float:
    """µs of a call on the GPU."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    call()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) * 1e3


def _cpu_time(call: Step) -> float:
    """µs of a call on the host."""
    begin = time.perf_counter()
    call()
    return (time.perf_counter() - begin) * 1e6
