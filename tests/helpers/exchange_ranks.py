"""Exchanges on GPUs, over and over: what a rank does, as a thread or as a process of its own.

    python -m helpers.exchange_ranks replay FOLDER RANK SIZE [NUMBER]

Ranks find each other in FOLDER; rank i has GPU i. The last line that a rank prints is JSON.

replay  a CUDA graph with a stall of random length, new states, an exchange and a check of all of it
kill    rank 1 ends in the middle; the others say when and how they noticed
late    rank 1 comes 3 s late
time    microseconds of an exchange in a graph, by windows and by the group's all-to-all
"""

from __future__ import annotations

import functools
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from cupyattn import CupyAttnError
from cupyattn.distributed import Group, StateExchange

ROOT = Path(__file__).parents[2]
_CODE = r"""
__device__ unsigned mix(unsigned x) {
  x ^= x >> 16; x *= 0x7feb352du; x ^= x >> 15; x *= 0x846ca68bu; return x ^ x >> 16;
}
// A rank is late by 200 us at one step of 50, and by 5 ms at one of 1,000.
extern "C" __global__ void stall(const unsigned* step, int rank) {
  const unsigned drawn = mix(*step * 31u + rank);
  const long long wait = drawn % 1000 == 0 ? 5000000 : drawn % 50 == 0 ? 200000 : 0;
  long long begin, now;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(begin));
  do {
    if (wait != 0) asm volatile("nanosleep.u32 1000;");
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
  } while (now - begin < wait);
}
__device__ float state(unsigned step, int row, int head, int column, int rank) {
  return (step + 3u * row + 5u * head + column / 4) % 61u + 2.0f * rank;
}
__device__ bool has_keys(unsigned step, int row, int rank) {
  return rank == 0 || (step + row + rank) % 5u != 0;
}
extern "C" __global__ void fill(const unsigned* step, float* o, float* lse, int rows, int heads,
                                int dim, int rank) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= rows * heads * dim) return;
  const int column = i % dim, head = i / dim % heads, row = i / dim / heads;
  const bool has = has_keys(*step, row, rank);
  o[i] = has ? state(*step, row, head, column, rank) : __int_as_float(0x7fffffff);
  if (column == 0) lse[row * heads + head] = has ? 0.0f : __int_as_float(0xff800000);
}
extern "C" __global__ void check(const unsigned* step, const float* out, const float* lse, int rows,
                                 int heads, int dim, int rank, int size, unsigned* errors) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  const int own = heads / size;
  if (i >= rows * own * dim) return;
  const int column = i % dim, head = i / dim % own, row = i / dim / own;
  float sum = 0.0f, count = 0.0f;
  for (int r = 0; r < size; ++r) {
    if (!has_keys(*step, row, r)) continue;
    sum += state(*step, row, rank * own + head, column, r);
    count += 1.0f;
  }
  const bool is_right = fabsf(out[i] - sum / count) < 1e-3f &&
                        fabsf(lse[row * own + head] - log2f(count)) < 1e-3f;
  if (!is_right) atomicAdd(errors, 1u);
}
extern "C" __global__ void advance(unsigned* step) { ++*step; }
"""


@functools.cache
def _kernels() -> Any:
    import cupy

    return cupy.RawModule(code=_CODE)


class Loop:
    """A rank's states and answers of one shape, and the steps that they go through."""

    def __init__(self, group: Group, rows: int, heads: int, dim: int, **options: Any) -> None:
        import cupy

        self.group, self.shape = group, (rows, heads, dim)
        self.exchange = StateExchange(group, rows, heads, dim, out_dtype="float32", **options)
        own = heads // group.size
        self.o = cupy.zeros((rows, heads, dim), np.float32)
        self.lse = cupy.zeros((rows, heads), np.float32)
        self.out = cupy.zeros((rows, own, dim), np.float32)
        self.lse_out = cupy.zeros((rows, own), np.float32)
        self.counts = cupy.zeros(2, np.uint32)  # step, errors
        # A kernel's first launch may wait for the GPU, on which another rank of the process waits.
        self.step(exchanges=False)
        self.counts[...] = 0
        cupy.cuda.get_current_stream().synchronize()
        group.share_bytes(b"")

    def step(self, *, exchanges: bool = True) -> None:
        """Launch one on the current stream."""
        rank, size = np.int32(self.group.rank), np.int32(self.group.size)
        sizes = [np.int32(x) for x in self.shape]
        step, errors = self.counts[:1], self.counts[1:]
        _launch("stall", 1, step, rank)
        _launch("fill", self.o.size, step, self.o, self.lse, *sizes, rank)
        if exchanges:
            self.run()
        _launch("check", self.out.size, step, self.out, self.lse_out, *sizes, rank, size, errors)
        _launch("advance", 1, step)

    def run(self) -> None:
        self.exchange.run(self.o, self.lse, self.out, self.lse_out, return_lse=True)

    def captured(self, work: Callable[[], None]) -> Any:
        """The graph of what `work` launches, which is launched once before."""
        import cupy

        stream = cupy.cuda.get_current_stream()
        work()
        stream.synchronize()
        stream.begin_capture(cupy.cuda.runtime.streamCaptureModeThreadLocal)
        work()
        graph = stream.end_capture()
        self.group.share_bytes(b"")
        return graph

    def errors(self) -> tuple[int, int]:
        """(steps, wrong numbers) so far."""
        steps, errors = self.counts.get().tolist()
        return int(steps), int(errors)


def _launch(name: str, count: int, *arguments: Any) -> None:
    blocks = -(-count // 256)
    _kernels().get_function(name)((blocks,), (min(count, 256),), arguments)


def replay(group: Group, number: int = 10_000, every: int = 100) -> dict[str, Any]:
    """Replays of a graph; the host waits for the GPU now and then, so that no queue is full."""
    import cupy

    with cupy.cuda.Stream(non_blocking=True) as stream:
        loop = Loop(group, 6, 4 * group.size, 128, timeout=10.0, uses_windows=True)
        graph = loop.captured(loop.step)
        for index in range(number):
            graph.launch(stream)
            if index % every == every - 1:
                stream.synchronize()
        stream.synchronize()
        group.check()
        steps, errors = loop.errors()
    return {"steps": steps, "errors": errors}


def kill(group: Group, number: int = 50) -> dict[str, Any]:
    import cupy

    with cupy.cuda.Stream(non_blocking=True) as stream:
        loop = Loop(group, 6, 4 * group.size, 128, uses_windows=True)
        graph = loop.captured(loop.step)
        for _ in range(number):
            graph.launch(stream)
        stream.synchronize()
        if group.rank == 1:
            print(json.dumps({"died": time.time()}), flush=True)
            os.kill(os.getpid(), signal.SIGKILL)
        try:
            while True:
                graph.launch(stream)
                stream.synchronize()
                loop.run()
        except CupyAttnError as error:
            return {"noticed": time.time(), "error": str(error), "kind": type(error).__name__}


def late(group: Group, seconds: float = 3.0) -> dict[str, Any]:
    import cupy

    with cupy.cuda.Stream(non_blocking=True) as stream:
        loop = Loop(group, 6, 4 * group.size, 128, uses_windows=True)
        loop.run()
        stream.synchronize()
        if group.rank == 1:
            time.sleep(seconds)
        begin = time.time()
        try:
            for _ in range(4):
                loop.run()
                stream.synchronize()
        except CupyAttnError as error:
            taken = time.time() - begin
            out = loop.out.get()
            return {"seconds": taken, "error": str(error), "has_nan": bool(np.isnan(out).any())}
    return {"seconds": time.time() - begin, "error": "", "has_nan": False}


_TIMED = ((1, 32, 128), (8, 32, 128), (64, 32, 128), (256, 32, 128), (8, 128, 512), (64, 128, 512))


def measure(group: Group, number: int = 200) -> dict[str, Any]:
    """Microseconds of one of `number` exchanges that follow each other in a graph: the median of 20
    replays, the slowest rank's."""
    import cupy

    found: dict[str, Any] = {"group": group.describe()}
    for rows, heads, dim in _TIMED:
        for name, uses_windows in (("windows", True), ("all_to_all", False)):
            with cupy.cuda.Stream(non_blocking=True) as stream:
                loop = Loop(group, rows, heads, dim, uses_windows=uses_windows)
                if not loop.exchange.can_capture:
                    continue
                graph = loop.captured(lambda loop=loop: [loop.run() for _ in range(number)])
                times = []
                for _ in range(25):
                    group.barrier(stream.ptr)
                    begin, end = cupy.cuda.Event(), cupy.cuda.Event()
                    begin.record()
                    graph.launch(stream)
                    end.record()
                    end.synchronize()
                    times.append(1e3 * cupy.cuda.get_elapsed_time(begin, end) / number)
                median = float(np.median(times[5:]))
                shared = group.share_bytes(json.dumps(median).encode())
                found[f"{rows}x{heads}x{dim} {name}"] = round(max(map(json.loads, shared)), 2)
                loop.exchange.close()
    return found


_MODES: dict[str, Callable[..., dict[str, Any]]] = {
    "replay": replay,
    "kill": kill,
    "late": late,
    "time": measure,
}


def start(
    mode: str, folder: Path, size: int, number: int | None = None
) -> list[subprocess.Popen[str]]:
    """The processes of all ranks, each fresh."""
    command = [sys.executable, "-m", "helpers.exchange_ranks", mode, str(folder)]
    paths = os.pathsep.join([str(ROOT), str(ROOT / "tests"), os.environ.get("PYTHONPATH", "")])
    more = [] if number is None else [str(number)]
    return [
        subprocess.Popen(
            [*command, str(rank), str(size), *more],
            env=os.environ | {"PYTHONPATH": paths},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(size)
    ]


def finish(processes: Sequence[subprocess.Popen[str]], seconds: float) -> list[dict[str, Any]]:
    """What each rank printed last, with its `code` and the end of what it said of errors."""
    end, found = time.monotonic() + seconds, []
    for process in processes:
        try:
            out, err = process.communicate(timeout=max(1.0, end - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            out, err = process.communicate()
        lines = [line for line in out.splitlines() if line.startswith("{")]
        said = json.loads(lines[-1]) if lines else {}
        found.append({**said, "code": process.returncode, "stderr": err[-2000:]})
    return found


def main(mode: str, folder: str, rank: str, size: str, number: str = "") -> None:
    group = Group.from_folder(folder, int(rank), int(size), device=int(rank))
    arguments = [int(number)] if number else []
    print(json.dumps(_MODES[mode](group, *arguments)), flush=True)
    if mode not in ("kill", "late"):
        group.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
