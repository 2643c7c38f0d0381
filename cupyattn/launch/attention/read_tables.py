"""Launches the read_tables kernel: it brings the tables of a plan to the host, checked.

The host waits for them. Of a decode the kernel also writes the work list, as plan_batch does.
"""

from __future__ import annotations

import functools
import itertools
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
from .kernels import MAX_PARTS
from .layout import BatchSchedule
from .plan_batch import THREADS

CONFIG = jit.Config({"kThreads": THREADS})
# One block reads them all, so that more are read faster by copies.
MAX_REQUESTS = 4096
# What `lengths` hold: nothing, the tokens of the last page of each request, or its keys.
NO_LENGTHS, LAST_PAGE, KEYS = range(3)

# kernels/cupyattn/params/read_tables.cuh: address and width of each table; landing, items, ticket;
# num_requests, qo_len, page_size, kind; what a planned list depends on.
_PLANNED = struct.Struct("<2i I 5i 7d")
_PARAMS = struct.Struct(f"<9Q 4i {_PLANNED.size}s")
HEAD = 8  # numbers of TablesHead
_NO_PLAN = bytes(_PLANNED.size)
MAX_NUMBERS = HEAD + 5 * MAX_REQUESTS + 2
# Looks at the ticket before the driver is asked to wait, some 50 us. Only x86 sees what the GPU
# writes in its order.
_LOOKS = 1000 if platform.machine() in ("x86_64", "AMD64") else 0
_MAX_CACHED = 1024


class DeviceTables(NamedTuple):
    """qo_indptr, kv_indptr and lengths, which one launch reads.

    tables     the address of each, 0 for none, and whether its numbers have 64 bits
    kind       of lengths
    q_len      rows of every request; 0: qo_indptr says
    page_size  0 for ragged keys
    """

    tables: tuple[int, bool, int, bool, int, bool]
    kind: int
    num_requests: int
    q_len: int
    page_size: int


class Built(NamedTuple):
    """What a list has that the kernel has written."""

    num_items: int
    num_split_tiles: int
    num_states: int
    max_parts: int


class Planner:
    """What the kernel is told to plan requests of one batch size.

    num_words   room for the longest list
    max_fused  parts of a tile that its last block merges
    """

    __slots__ = (
        "_launcher",
        "_rows",
        "_schedules",
        "_shape",
        "max_fused",
        "num_words",
        "packed",
    )

    def __init__(
        self,
        launcher: BatchLauncher,
        row_class: str,
        shape: TileShape,
        num_words: int,
        max_fused: int,
        packed: bytes,
    ) -> None:
        self._launcher, self._rows, self._shape = launcher, row_class, shape
        self.num_words, self.max_fused, self.packed = num_words, max_fused, packed
        self._schedules: dict[tuple[int, ...], BatchSchedule] = {}

    def schedule(self, built: Built) -> BatchSchedule | None:
        """The launches of the list that the kernel has written; None if it has written none."""
        if not built.num_items:
            return None
        cached = self._schedules.get(built)
        if cached is None:
            if len(self._schedules) >= _MAX_CACHED:
                self._schedules.clear()
            limits = Limits(built.num_items, built.num_split_tiles, built.num_states)
            rows, shape = self._rows, self._shape
            cached = self._launcher.schedule_planned(rows, shape, limits, built.max_parts)
            self._schedules[built] = cached
        return cached


# Pinned memory in which one launch at a time leaves numbers: as an array, a view, an address. Lists
# are safe for threads, and for a signal handler that plans.
_idle: list[tuple[np.ndarray, memoryview, int]] = []
_tickets = itertools.count(1)


def _alloc_pinned() -> np.ndarray:
    from cupy.cuda import alloc_pinned_memory

    # The array keeps the memory.
    return np.frombuffer(alloc_pinned_memory(8 * MAX_NUMBERS), np.int64, MAX_NUMBERS)


def read(
    asked: DeviceTables, planner: Planner | None, words: int, device: int, stream: int
) -> np.ndarray:
    """int64: TablesHead, and what the kernel leaves behind it. The GPU is waited for.

    words: where the planner's work list goes on the GPU.
    """
    recording.spoil()
    tables, kind, num_requests, q_len, page_size = asked
    try:
        landing = _idle.pop()
    except IndexError:
        built = _alloc_pinned()
        built[0] = 0
        landing = built, memoryview(built), built.ctypes.data  # type: ignore[arg-type]
    numbers, seen, address = landing
    arguments, ticket = params.this_thread.launch_buffer, next(_tickets)
    _PARAMS.pack_into(
        arguments.buffer,
        arguments.offset,
        *tables,
        address,
        words,
        ticket,
        num_requests,
        q_len,
        page_size or 1,
        kind,
        _NO_PLAN if planner is None else planner.packed,
    )
    try:
        enqueue(_launch(device), arguments, device, stream)
        for _ in range(_LOOKS):
            if seen[0] == ticket:
                break
        else:
            cuda().runtime.streamSynchronize(stream)  # raises what went wrong on the GPU
    except BaseException:  # an interrupt comes while the GPU still writes there
        cuda().runtime.streamSynchronize(stream)
        raise
    result = numbers[: HEAD + (3 if q_len else 5) * num_requests + 2].copy()
    _idle.append(landing)
    return result


@functools.lru_cache(maxsize=1024)
def planner(launcher: BatchLauncher, num_requests: int, qo_len: int) -> Planner | None:
    """What plans so many requests of `qo_len` rows; None where the host has to do it: the kernel
    plans tiles of decode that see all keys, if no length decides which kernel serves them."""
    masking = launcher.masking
    if masking.window_left >= 0 or masking.has_mask or launcher.spec.logits is not None:
        return None
    if masking.share is not None:
        return None
    chosen = launcher.choose_for_any_length(num_requests, qo_len)
    if chosen is None or num_requests > THREADS:
        return None
    rows, shape = chosen
    max_rows, heads = qo_len * launcher.group_size, launcher.num_kv_heads
    if max_rows > shape.tile_q or shape.times is not None:
        return None
    per_wave = max(1, shape.num_slots // heads)
    max_items = num_requests + MAX_WAVES * per_wave
    tiles = launcher.tiles(rows)
    max_fused = max(1, tiles.fused_splits)
    if tiles.fused_merge and shape.is_fused:
        max_fused = MAX_PARTS if shape.part_cost else max_items
    costs = shape.costs(max_rows)
    tile_kv_magic, tile_kv_shift = params.divisor(shape.tile_kv)
    packed = _PLANNED.pack(
        shape.tile_kv,
        tile_kv_shift,
        tile_kv_magic,
        per_wave,
        max_items,
        heads,
        max_fused,
        0,
        shape.cost_of_part(max_rows),
        *costs,
        costs.min_share * costs.block,
    )
    num_words = len(WORK_FIELDS) * max_items + num_requests * heads
    return Planner(launcher, rows, shape, num_words, max_fused, packed)


@functools.cache
def _launch(device: int) -> Launch:
    return Launch(load_function("read_tables", CONFIG, device), (1, 1, 1), THREADS, 0)
