"""A kernel built for the host: loads its library, launches it, tells what went wrong and where."""

from __future__ import annotations

import ctypes
import functools
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

# The most that a struct has (launch/driver/params.py).
_PARAMS_BYTES = 2048


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


class _Previous(ctypes.Structure):
    _fields_ = [
        ("launch", ctypes.c_void_p),
        ("request", ctypes.c_void_p),
        ("report", ctypes.c_void_p),
        ("has_failed", ctypes.c_int64),
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
        library = ctypes.CDLL(str(path))
        self._launch = library.emulator_launch
        self._previous = _Previous.in_dll(library, "emulator_previous")

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
        ahead: Ahead | None = None,
    ) -> _Request:
        """Run a whole launch. `params` is the address of the kernel's struct; `ranges` are apart.

        seed: 0 runs blocks, warps and lanes in order, any other in one of many orders. guards: what
        is poison to a kernel built for AddressSanitizer. cluster: blocks of one, along x.
        ahead: a launch that runs once more, when this one waits for it. Returns the request.
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
        if ahead is not None:
            ahead.place_before(self._previous)
        has_failed = self._launch(ctypes.byref(request), ctypes.byref(report))
        was_awaited, self._previous.launch = not self._previous.launch, None
        if ahead is not None and self._previous.has_failed:
            raise EmulatorError(ahead.kernel._describe(ahead.report, seed))
        if has_failed:
            raise EmulatorError(self._describe(report, seed))
        if not was_awaited:
            raise EmulatorError(f"kernel {self.name}: no thread waits for the launch before it")
        return request

    def _describe(self, report: _Report, seed: int) -> str:
        where = f"kernel {self.name}, block {tuple(report.block)}, thread {report.thread}"
        lines = [f"{where}: {report.message.decode()}"]
        for offset in (report.code_offset, *report.callers):
            lines += [f"  at {line}" for line in source_lines(self.path, offset)]
        other = source_lines(self.path, report.other_code_offset)
        lines += [f"  {'the other' if i == 0 else 'by way of'} at {x}" for i, x in enumerate(other)]
        lines.append(f"  ({self.path}, seed {seed})")
        return "\n".join(lines)


class Ahead:
    """A launch that can run once more. It holds a copy of its struct, from a LaunchBuffer."""

    def __init__(self, kernel: Library, request: _Request) -> None:
        self.kernel, self.report, self._request = kernel, _Report(), request
        self._params = ctypes.create_string_buffer(_PARAMS_BYTES + 64)
        begin = -(-ctypes.addressof(self._params) // 64) * 64
        ctypes.memmove(begin, request.params, _PARAMS_BYTES)
        request.params = begin

    def place_before(self, previous: _Previous) -> None:
        """Let the kernel that has this run it where it waits."""
        previous.launch = ctypes.cast(self.kernel._launch, ctypes.c_void_p).value
        previous.request = ctypes.addressof(self._request)
        previous.report = ctypes.addressof(self.report)
        previous.has_failed = 0


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
