"""Every way to serve a batch by launches, and when each would be done.

A plan takes the soonest. `python -m benchmarks tiles` times them all, by force.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from dataclasses import dataclass

from ...schedule.batch import TileWork
from ...schedule.makespan import Slots, best_split
from ...schedule.sm_partition import Streams, best_partition, followed, time_together
from ...schedule.tile_shape import TileShape, decode_time
from ..tiles.select import FEW, LARGE, SMALL, VERIFY
from .kernels import Kernels, Keys

Parts = list[tuple[str, TileWork]]


@dataclass(frozen=True)
class Candidate:
    """One way to serve a batch.

    name   of the tiles that serve all ("short"), "large + others" where launches for fewer rows
           follow, "by rows" for a launch a row class, or the blocks of decode ("decode x8" are
           clusters of eight)
    parts  the launches: of which row class or tiles, and what they do
    slots  blocks of the first launch that run at a time; 0: as many as it has, -1: by rows
    shape  of the only launch, where its kernel has blocks of several shapes
    time   when all is done, in microseconds; infinite where nothing is known of it
    """

    name: str
    parts: Parts
    slots: int = -1
    shape: TileShape | None = None
    time: float = math.inf


_forced: str = ""


def forced() -> str:
    """The name of the candidate that plans have to take; "" if they choose."""
    return _forced


@contextlib.contextmanager
def only(name: str) -> Iterator[None]:
    """Plans take the candidate of this name, where they have it: for measurements. Not for
    threads."""
    global _forced
    before, _forced = _forced, name
    try:
        yield
    finally:
        _forced = before


@dataclass(frozen=True)
class Batch:
    """What candidates are made for: the requests of each row class, and of all.

    streams  what the classes of few rows read, if others are there
    """

    parts: Parts
    works: TileWork
    num_kv_heads: int
    group_size: int
    max_qo_len: int
    streams: Streams | None
    many: TileWork | None


def candidates(kernels: Kernels, batch: Batch) -> list[Candidate]:
    """Every way to serve a batch of at least one request."""
    if not batch.parts:
        return []
    found = [_alone(batch, name, shape) for name, shape in kernels.timed_shapes().items()]
    if batch.many is not None and batch.streams is not None:
        shapes = kernels.timed_shapes().items()
        found += [_with_others(batch, name, shape) for name, shape in shapes]
    (rows, works), *others = batch.parts
    if others or rows not in FEW:
        return [*found, Candidate("by rows", batch.parts)]
    return [*found, *_of_few_rows(kernels, batch, rows, works)]


def _alone(batch: Batch, name: str, shape: TileShape) -> Candidate:
    """One launch of prefill_sm90 serves all."""
    assert shape.times is not None
    if batch.many is not None and batch.streams is not None:
        time = time_together(batch.many.of(shape), batch.num_kv_heads, shape, batch.streams)
    else:
        slots = Slots(shape.num_slots, shape.num_sms)
        time = best_split(batch.works.of(shape), batch.num_kv_heads, slots, shape.times).time
    return Candidate(name, [(name, batch.works)], 0, None, time)


def _with_others(batch: Batch, name: str, shape: TileShape) -> Candidate:
    """Launches for the requests of few rows follow one for those of many, on SMs of their own if
    its blocks are persistent."""
    assert batch.many is not None and batch.streams is not None
    of_first = followed(shape, batch.streams.times) if shape.is_persistent else shape
    may_leave = shape.is_persistent and name == LARGE
    slots, time = best_partition(
        batch.many.of(shape), batch.num_kv_heads, of_first, batch.streams, may_leave
    )
    few = [part for part in batch.parts if part[0] not in (SMALL, LARGE)]
    slots = 0 if slots == shape.num_slots else slots
    return Candidate(f"{name} + others", [(name, batch.many), *few], slots, None, time)


def _of_few_rows(kernels: Kernels, batch: Batch, rows: str, works: TileWork) -> list[Candidate]:
    """The blocks of decode for requests of one row class, and those of prefill for more rows."""
    most_rows = batch.max_qo_len * batch.group_size
    keys = Keys(works.requests.kv_len.size, works.longest, works.num_keys)
    found = []
    for kernel_rows, shape in kernels.blocks_of_few_rows(rows, keys):
        times = kernels.card.decode.of(shape)
        time = decode_time(shape, times, *keys, batch.num_kv_heads, most_rows)
        name = _name_of_blocks(rows, shape)
        found.append(Candidate(name, [(kernel_rows, works)], -1, shape, time))
    if rows == VERIFY:
        found.append(Candidate(SMALL, [(SMALL, works)], -1, kernels.get(SMALL).shapes[0]))
    return found


def name_of(parts: Parts, rows: str, shape: TileShape, is_by_rows: bool) -> str:
    """The name of the candidate whose launches these are; rows, shape: of the last."""
    if not is_by_rows:
        return f"{parts[0][0]} + others" if len(parts) > 1 else parts[0][0]
    if len(parts) > 1 or parts[0][0] not in FEW:
        return "by rows"
    if rows == SMALL:
        return rows
    return _name_of_blocks(parts[0][0], shape)


def _name_of_blocks(rows: str, shape: TileShape) -> str:
    if shape.cluster > 1:
        return f"{rows} x{shape.cluster}"
    if shape.decode is not None:
        return f"{rows} alone"
    return rows if shape.is_fused else f"{rows} merged apart"
