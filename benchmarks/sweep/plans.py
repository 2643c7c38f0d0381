"""The plans of drawn cases, made on the host as for an H100 or H200: no GPU is needed."""

from __future__ import annotations

import multiprocessing
import struct
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from typing import Any

from cupyattn.bench.tiles.plans import Planned
from cupyattn.bench.tiles.plans import plan_of as batch_plan

from ..batch.case import BatchCase

_PLANLESS = ("varlen", "kvcache")
_EXECUTABLE = 4  # SHF_EXECINSTR of a section


def plan_of(case: BatchCase) -> Planned | None:
    """The plan of a case; None of those of several kinds of requests, of latent attention, and
    where no plan is made."""
    return None if case.op in _PLANLESS or case.api in ("mla", "lists") else batch_plan(case)


def instances(cases: Iterable[BatchCase]) -> list[tuple[str, Any]]:
    """(entry name, Config) of the kernels that our runs of these cases launch, once each."""
    from cupyattn.launch.attention import merge_splits

    result: dict[tuple[str, Any], None] = {}
    for case in cases:
        planned = plan_of(case)
        if planned is None:
            continue
        launcher, _ = planned
        for kernel in launcher.kernels():
            tiles = kernel.loaded.tiles
            result[tiles.name, tiles.config] = None
            if not launcher.problem.is_wide:
                merges = merge_splits.configs(launcher.problem, kernel.kinds[0])
                result |= dict.fromkeys(("merge_splits", config) for config in merges)
    return list(result)


def code_bytes(case: BatchCase, arch: str) -> int:
    """Bytes of the instructions of the attention kernels that our run of a case launches, merges of
    splits aside. They are compiled, if the cache has them not."""
    from cupyattn import jit

    kernels = [kernel for kernel in instances([case]) if kernel[0] != "merge_splits"]
    builds = [jit.build(name, config, arch) for name, config in kernels]
    return sum(text_bytes(build.path.read_bytes()) for build in builds)


def text_bytes(cubin: bytes) -> int:
    """Bytes of the sections of a 64-bit ELF file that hold instructions."""
    (offset,) = struct.unpack_from("<Q", cubin, 0x28)
    size, count = struct.unpack_from("<HH", cubin, 0x3A)
    total = 0
    for place in range(offset, offset + size * count, size):
        flags, _, _, num_bytes = struct.unpack_from("<QQQQ", cubin, place + 8)
        total += num_bytes if flags & _EXECUTABLE else 0
    return total


def compile_ahead(cases: Iterable[BatchCase], jobs: int) -> float:
    """Compile these kernels in so many processes, those in the cache aside; returns the seconds.

    A kernel that is refused is left to the run that needs it, whose row then says so.
    """
    start = time.perf_counter()
    compile_instances(instances(cases), jobs)
    return time.perf_counter() - start


def compile_instances(result: Sequence[tuple[str, Any]], jobs: int) -> None:
    """Compile kernels, those in the cache aside."""
    with ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn")) as pool:
        list(pool.map(_compile, *zip(*result, strict=True)))


def _compile(name: str, config: Any) -> bool:
    from cupyattn import jit
    from cupyattn.core.device import device_props
    from cupyattn.errors import CupyAttnError

    try:
        jit.build(name, config, device_props(0).arch)
    except CupyAttnError:
        return False
    return True
