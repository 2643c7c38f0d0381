"""Launches the read_tables kernel: the tables of a plan, checked and brought to the host, which waits
for them. Of a decode the kernel also writes the work list."""

from __future__ import annotations

import functools
import platform
import struct
from typing import NamedTuple

import numpy as np

from ... import jit
from ...core import recording
from ...schedule.balance import MAX_WAVES
from ...schedule.batch import WORK_FIELDS
from ...schedule.limits import Limits
from ...schedule.tile_shape import TileShape
from ..driver import params
from ..driver.enqueue import Launch, cuda, enqueue, load_function
from .batch import BatchLauncher
from .kernels import MOST_PARTS
from .layout import BatchSchedule

_THREADS = 512
CONFIG = jit.Config({"kThreads": _THREADS})
# One block reads them all, so that more are read faster by copies.
MOST_REQUESTS = 8192
# What `lengths` hold: nothing, the tokens of the last page of each request, or its keys.
NO_LENGTHS, LAST_PAGE, KEYS = range(3)

# kernels/cupyattn/params/read_tables.cuh: addresses and kinds of the tables, landing, words, ticket;
# num_requests, qo_len, page_size, kind; what a planned list depends on.
_PLANNED = struct.Struct("<6i 7d")
_PARAMS = struct.Struct(f"<9Q 4i {_PLANNED.size}s")
HEAD = 8  # numbers of TablesHead
_NO_PLAN = bytes(_PLANNED.size)
_LEAST_NUMBERS = 4096
# Looks at the ticket before the driver is asked to wait, some 50 us. Only x86 sees what the GPU
# writes in its order.
_LOOKS = 1000 if platform.machine() in ("x86_64", "AMD64") else 0


class Table(NamedTuple):
    """The address of a table on the GPU, 0 for none, and whether its numbers have 64 bits."""

    address: int = 0
    is_wide: bool = False


NO_TABLE = Table()


class Planner(NamedTuple):
    """What the kernel is told to plan requests of one batch size.

    rows, shape  of the launcher's kernel
    num_words    room for the longest list
    """

    launcher: BatchLauncher
    rows: str
    shape: TileShape
    num_words: int
    packed: bytes


class Landing:
    """Pinned memory in which one launch leaves numbers for the host."""

    __slots__ = ("_memory", "_words", "address", "numbers", "ticket")

    def __init__(self, num_numbers: int) -> None:
        size = max(_LEAST_NUMBERS, 1 << (num_numbers - 1).bit_length())
        self.numbers, self._memory = _alloc_pinned(size)
        self.numbers[0] = 0
        self.address = self.numbers.ctypes.data
        self.ticket = 0
        self._words = memoryview(self.numbers)

    def wait(self, stream: int) -> None:
        """Until the launch whose ticket was taken last has left all its numbers."""
        words, ticket = self._words, self.ticket
        for _ in range(_LOOKS):
            if words[0] == ticket:
                return
        cuda().runtime.streamSynchronize(stream)  # raises what went wrong on the GPU


def _alloc_pinned(num_numbers: int) -> tuple[np.ndarray, object]:
    from cupy.cuda import alloc_pinned_memory

    memory = alloc_pinned_memory(8 * num_numbers)
    return np.frombuffer(memory, np.int64, num_numbers), memory


# Those that no launch writes. Lists are safe for threads, and for a signal handler that plans.
_idle: list[Landing] = []


class Reading:
    """Tables on their way to the host, a context that ends when the GPU is done with its memory."""

    __slots__ = ("_landing", "_num_numbers", "_stream", "num_requests")

    def __init__(self, landing: Landing, num_requests: int, num_numbers: int, stream: int) -> None:
        self._landing: Landing | None = landing
        self._num_numbers, self._stream = num_numbers, stream
        self.num_requests = num_requests

    def __enter__(self) -> Reading:
        return self

    def __exit__(self, *_: object) -> None:
        if self._landing is not None:
            self.wait()

    def wait(self) -> np.ndarray:
        """int64: TablesHead, and what the kernel writes behind it."""
        landing = self._landing
        assert landing is not None
        landing.wait(self._stream)
        found = landing.numbers[: self._num_numbers].copy()
        self._landing = None
        _idle.append(landing)
        return found


def launch(
    tables: tuple[Table, Table, Table],
    kind: int,
    num_requests: int,
    qo_len: int,
    page_size: int,
    planner: Planner | None,
    words: int,
    device: int,
    stream: int,
) -> Reading:
    """Enqueue the kernel. tables: qo_indptr, or none where each request has `qo_len` rows;
    kv_indptr; lengths. words: where the work list goes on the GPU."""
    recording.spoil()
    num_numbers = HEAD + 3 * num_requests + 1
    if tables[0].address:
        num_numbers += 2 * num_requests + 1
    try:
        landing = _idle.pop()
    except IndexError:
        landing = Landing(num_numbers)
    if landing.numbers.size < num_numbers:
        landing = Landing(num_numbers)
    landing.ticket += 1
    (qo, qo_wide), (kv, kv_wide), (lengths, is_wide) = tables
    arguments = params.this_thread.launch_buffer
    _PARAMS.pack_into(
        *(arguments.buffer, arguments.offset, qo, qo_wide, kv, kv_wide, lengths, is_wide),
        *(landing.address, words, landing.ticket, num_requests, qo_len, page_size, kind),
        _NO_PLAN if planner is None else planner.packed,
    )
    enqueue(_launch(device), arguments, device, stream)
    return Reading(landing, num_requests, num_numbers, stream)


@functools.lru_cache(maxsize=1024)
def planner(launcher: BatchLauncher, num_requests: int, qo_len: int) -> Planner | None:
    """What plans so many requests of `qo_len` rows; None where the host has to do it: the kernel
    plans tiles of decode that see all keys, if no length decides which kernel serves them."""
    masking = launcher.masking
    if masking.window_left >= 0 or masking.has_mask or launcher.spec.logits is not None:
        return None
    chosen = launcher.choose_for_any_length(num_requests, qo_len)
    if chosen is None or num_requests > _THREADS:
        return None
    rows, shape = chosen
    most_rows, heads = qo_len * launcher.group_size, launcher.num_kv_heads
    if most_rows > shape.tile_q or shape.times is not None:
        return None
    per_wave = max(1, shape.num_slots // heads)
    num_words = len(WORK_FIELDS) * (num_requests + MAX_WAVES * per_wave) + num_requests * heads
    most_fused = 1
    if shape.is_fused:
        most_fused = MOST_PARTS if shape.part_cost else num_words
    costs = shape.costs(most_rows)
    packed = _PLANNED.pack(
        *(num_words, shape.tile_kv, per_wave, heads, most_fused, 0),
        *(shape.cost_of_part(most_rows), *costs, costs.least_share * costs.block),
    )
    return Planner(launcher, rows, shape, num_words, packed)


def planned_schedule(
    planner: Planner, num_items: int, num_split_tiles: int, num_states: int, most_parts: int
) -> BatchSchedule | None:
    """The launches of the list that the kernel has written; None if it has written none."""
    if not num_items:
        return None
    made = Limits(num_items, num_split_tiles, num_states)
    return planner.launcher.schedule_planned(planner.rows, planner.shape, made, most_parts)


@functools.cache
def _launch(device: int) -> Launch:
    return Launch(load_function("read_tables", CONFIG, device), (1, 1, 1), _THREADS, 0)
