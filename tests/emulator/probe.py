"""Runs the small kernels of probes/: arrays in, arrays out."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from . import build, library
from .library import Range

PROBES = Path(__file__).parent / "probes"


def launch(
    name: str,
    arrays: list[tuple[np.ndarray, bool]],
    numbers: tuple[int, ...],
    *,
    threads: int = 32,
    shared_bytes: int = 0,
    mode: str = "checked",
    arch: int = 900,
    seed: int = 0,
    others: Sequence[tuple[np.ndarray, bool]] = (),
) -> None:
    """One block of probes/<name>.cu. Its struct: the arrays' addresses, then 32-bit numbers.

    Arrays come with whether they may be written. others: what may be touched besides.
    """
    source = build.Source.of_file(PROBES / f"{name}.cu")
    kernel = library.load(build.build(source, mode, arch), name)
    unique = {a.ctypes.data: (a, writable) for a, writable in (*arrays, *others)}.values()
    ranges = [Range(a.ctypes.data, a.ctypes.data + a.nbytes, writable) for a, writable in unique]
    layout = f"<{len(arrays)}Q{len(numbers)}i"
    packed = struct.pack(layout, *(a.ctypes.data for a, _ in arrays), *numbers)
    params = np.frombuffer(packed.ljust(256, b"\0"), np.uint8)
    block = (threads, 1, 1)
    kernel.launch(params.ctypes.data, (1, 1, 1), block, shared_bytes, ranges, seed)
