"""A kernel built for the host: loads its library, launches it, tells what went wrong and where."""

from __future__ import annotations

import ctypes
import functools
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path


class EmulatorError(Exception):
    """A kernel did what no kernel may do; the text names kernel, block, thread and source line."""


class _Range(ctypes.Structure):
    _fields_ = [
        ("begin", ctypes.c_uint64),
        ("end", ctypes.c_uint64),
        ("is_writable", ctypes.c_uint64),
    ]


class _Request(ctypes.Structure):
    _fields_ = [
        ("params", ctypes.c_void_p),
        ("grid", ctypes.c_uint32 * 3),
        ("block", ctypes.c_uint32 * 3),
        ("shared_bytes", ctypes.c_uint32),
        ("num_ranges", ctypes.c_uint32),
        ("ranges", ctypes.POINTER(_Range)),
        ("guards", ctypes.POINTER(_Range)),
        ("num_guards", ctypes.c_uint64),
        ("seed", ctypes.c_uint64),
        ("cluster", ctypes.c_uint64),
    ]


class _Report(ctypes.Structure):
    _fields_ = [
        ("message", ctypes.c_char * 2048),
        ("code_offset", ctypes.c_uint64),
        ("other_code_offset", ctypes.c_uint64),
        ("callers", ctypes.c_uint64 * 8),
        ("block", ctypes.c_uint32 * 3),
        ("thread", ctypes.c_int32),
    ]


@dataclass(frozen=True, order=True)
class Range:
    """Global memory [begin, end) that a launch may read, and write if `is_writable`."""

    begin: int
    end: int
    is_writable: bool


class Library:
    """A kernel that can be launched."""

    def __init__(self, path: Path, name: str) -> None:
        self.path = path
        self.name = name
        self._launch = ctypes.CDLL(str(path)).emulator_launch

    def launch(
        self,
        params: int,
        grid: Sequence[int],
        block: Sequence[int],
        shared_bytes: int,
        ranges: Sequence[Range],
        seed: int = 0,
        guards: Sequence[Range] = (),
        cluster: int = 1,
    ) -> None:
        """Run a whole launch. `params` is the address of the kernel's struct; `ranges` are apart.

        seed: 0 runs blocks, warps and lanes in order, any other in one of many orders. guards: what
        is poison to a kernel built for AddressSanitizer. cluster: blocks of one, along x.
        """
        request = _Request(
            params,
            (ctypes.c_uint32 * 3)(*grid),
            (ctypes.c_uint32 * 3)(*block),
            shared_bytes,
            len(ranges),
            _pack(ranges),
            _pack(guards),
            len(guards),
            seed,
            cluster,
        )
        report = _Report()
        if self._launch(ctypes.byref(request), ctypes.byref(report)):
            raise EmulatorError(self._describe(report, seed))

    def _describe(self, report: _Report, seed: int) -> str:
        where = f"kernel {self.name}, block {tuple(report.block)}, thread {report.thread}"
        lines = [f"{where}: {report.message.decode()}"]
        for offset in (report.code_offset, *report.callers):
            lines += [f"  at {line}" for line in source_lines(self.path, offset)]
        other = source_lines(self.path, report.other_code_offset)
        lines += [f"  {'the other' if i == 0 else 'by way of'} at {x}" for i, x in enumerate(other)]
        lines.append(f"  ({self.path}, seed {seed})")
        return "\n".join(lines)


def _pack(ranges: Sequence[Range]) -> ctypes.Array[_Range]:
    rows = ((r.begin, r.end, r.is_writable) for r in sorted(ranges))
    return (_Range * max(1, len(ranges)))(*rows)


@functools.cache
def load(path: Path, name: str) -> Library:
    return Library(path, name)


def source_lines(library: Path, code_offset: int) -> list[str]:
    """The place in the kernel of an address in its library, then the places it was inlined into."""
    if not code_offset:
        return []
    command = ["addr2line", "-e", str(library), "-i", hex(code_offset)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    except OSError as error:
        return [f"offset {code_offset:#x}; addr2line could not be run: {error}"]
    found = []
    for place in done.stdout.splitlines():
        # The twins of ptx/ and the runtime are not where a mistake is.
        is_ours = "/emulator/include/" in place or "/emulator/runtime/" in place
        if not is_ours and not place.rpartition("/")[2].startswith("emulator:"):
            path, _, line = place.partition(":")
            short = path.rpartition("/kernels/")[2] if "/kernels/" in path else path
            found.append(f"{short}:{line.split()[0] if line else '?'}")
    return found
