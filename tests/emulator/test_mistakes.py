"""Every check of the emulator, shown on a kernel that deserves it and on one that does not."""

from __future__ import annotations

import re
import struct
from pathlib import Path

import numpy as np
import pytest

from . import build, library
from .library import EmulatorError, Range

SOURCE = Path(__file__).parent / "probes" / "mistakes.cu"
_ROW = re.compile(r"case (\d+): return (\w+)\(b\);")
CASES = {name: int(number) for number, name in _ROW.findall(SOURCE.read_text())}

_NO_BARRIER = "with no barrier between"
_IN_FLIGHT = "an asynchronous copy is still in flight"
_STUCK = "no thread can go on"
_NO_ARRAY = "which is no array of this call"
MESSAGES = {
    "missing_block_barrier": _NO_BARRIER,
    "missing_warp_barrier": _NO_BARRIER,
    "warp_barrier_for_a_block": _NO_BARRIER,
    "shuffle_for_a_barrier": _NO_BARRIER,
    "overwritten_while_read": _NO_BARRIER,
    "overwritten_while_read_in_a_warp": _NO_BARRIER,
    "written_by_two": "that were written with no barrier between",
    "atomic_and_plain_read": _NO_BARRIER,
    "never_written": "was never written",
    "copy_without_wait": _IN_FLIGHT,
    "copy_waits_for_the_wrong_group": _IN_FLIGHT,
    "copy_without_commit": _IN_FLIGHT,
    "copy_of_another_thread": f"{_NO_BARRIER}|{_IN_FLIGHT}",
    "copy_over_what_is_read": f"{_NO_BARRIER}|{_IN_FLIGHT}",
    "ldmatrix_of_a_copy_in_flight": _IN_FLIGHT,
    "barrier_some_do_not_reach": _STUCK,
    "barrier_half_a_warp_does_not_reach": _STUCK,
    "parted_lanes": "lanes of a warp have parted",
    "lanes_at_two_barriers": "different barriers",
    "named_barrier_of_others": _NO_BARRIER,
    "warps_at_two_barriers": "at different places",
    "misaligned_shared_vector": "misaligned",
    "misaligned_copy": "misaligned",
    "misaligned_copy_source": "misaligned",
    "misaligned_matrix": "misaligned",
    "misaligned_global_vector": "misaligned",
    "past_the_array": _NO_ARRAY,
    "before_the_array": _NO_ARRAY,
    "writes_past_the_array": _NO_ARRAY,
    "copies_past_the_array": _NO_ARRAY,
    "writes_an_input": "writes 4 bytes to an input",
    "past_shared_memory": "past the 4096 bytes",
    "stack_of_another_thread": _NO_ARRAY,
    "shift_too_far": "a shift by too much",
    "overflowing_sum": "a sum overflows",
    "index_past_a_local_array": "an index past its array",
}
# What the twins of ptx/ see without the compiler's hooks.
SEEN_WHEN_PLAIN = {
    "ldmatrix_of_a_copy_in_flight": _IN_FLIGHT,
    "barrier_some_do_not_reach": _STUCK,
    "barrier_half_a_warp_does_not_reach": _STUCK,
    "parted_lanes": "lanes of a warp have parted",
    "lanes_at_two_barriers": "different barriers",
    "warps_at_two_barriers": "at different places",
    "misaligned_copy": "misaligned",
    "misaligned_copy_source": "misaligned",
    "misaligned_matrix": "misaligned",
    "copies_past_the_array": _NO_ARRAY,
}


def run(
    name: str, mode: str = "checked", seed: int = 0, kernel: library.Library | None = None
) -> tuple[np.ndarray, np.ndarray]:
    if kernel is None:
        kernel = library.load(build.build(build.Source.of_file(SOURCE), mode), "mistakes")
    values = np.arange(256, dtype=np.float32)
    # Between arrays of the call there is memory that is not the call's.
    memory = np.full(1024, np.nan, np.float32)
    start = -memory.ctypes.data % 16 // 4
    x, out = memory[start : start + 256], memory[start + 512 : start + 768]
    x[:] = values
    arrays = ((x, False), (out, True))
    ranges = [Range(a.ctypes.data, a.ctypes.data + a.nbytes, writable) for a, writable in arrays]
    params = struct.pack("<QQii", x.ctypes.data, out.ctypes.data, CASES[name], 0)
    buffer = np.frombuffer(params, np.uint8)
    low, (inner, outer), high = memory.ctypes.data, ranges, memory.ctypes.data + memory.nbytes
    gaps = ((low, inner.begin), (inner.end, outer.begin), (outer.end, high))
    guards = [Range(*gap, False) for gap in gaps]
    kernel.launch(buffer.ctypes.data, (1, 1, 1), (128, 1, 1), 4096, ranges, seed, guards)
    return values, out


def test_every_mistake_has_a_message() -> None:
    assert {name for name in CASES if not name.startswith("fine_")} == set(MESSAGES)


@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("name", MESSAGES)
def test_a_mistake_is_named(name: str, seed: int) -> None:
    with pytest.raises(EmulatorError) as caught:
        run(name, seed=seed)
    text = str(caught.value)
    assert re.search(MESSAGES[name], text), text
    assert re.match(r"kernel mistakes, block \(0, 0, 0\), thread \d+: ", text), text
    # The line is inside the function that holds the mistake.
    lines = SOURCE.read_text().splitlines()
    first = next(i for i, line in enumerate(lines, 1) if f"void {name}(" in line)
    last = first
    while not lines[last - 1].endswith("}") or (last > first and lines[last - 1] != "}"):
        last += 1
    places = [int(n) for n in re.findall(r"at \S*mistakes\.cu:(\d+)", text)]
    assert any(first <= place <= last for place in places), text


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("mode", ["plain", "checked"])
@pytest.mark.parametrize("name", [name for name in CASES if name.startswith("fine_")])
def test_what_is_right_passes(name: str, mode: str, seed: int) -> None:
    values, out = run(name, mode, seed)
    lanes = np.arange(128)
    expected = {
        "fine_exchange": values[(lanes + 32) % 128],
        "fine_exchange_in_a_warp": values[lanes ^ 1],
        "fine_atomics": np.ones(128),
        "fine_copy": values[:128],
        "fine_copy_of_nothing": np.zeros(128),
        "fine_named_barriers": values[lanes ^ 32],
        "fine_barriers_of_roles": values[lanes ^ 64],
    }
    np.testing.assert_array_equal(out[:128], expected[name])


@pytest.mark.parametrize("name", SEEN_WHEN_PLAIN)
def test_what_is_seen_without_hooks(name: str) -> None:
    with pytest.raises(EmulatorError, match=SEEN_WHEN_PLAIN[name]):
        run(name, "plain")


def test_a_race_names_both_sides() -> None:
    with pytest.raises(EmulatorError) as caught:
        run("missing_block_barrier")
    assert len(re.findall(r"(?:  at|the other at) \S*mistakes\.cu:\d+", str(caught.value))) >= 2
