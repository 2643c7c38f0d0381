"""Every way to serve a batch by launches, and when each would be done.

A plan takes the soonest. `python -m benchmarks tiles` times them all, by force.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from operator import itemgetter
from typing import Any, NamedTuple, Protocol

import numpy as np

from ..launch.tiles.row_classes import DECODE, LARGE, ONE_AN_SM, PERSISTENT, SMALL, VERIFY
from ..schedule.balance import ROUNDED, Work
from ..schedule.batch import TileWork
from ..schedule.makespan import TileTimes, best_split
from ..schedule.sm_partition import (
    DecodeLoad,
    Partition,
    best_partition,
    followed,
    lower_bound_on_all,
    time_together,
)
from ..schedule.tile_shape import DecodeKinds, DecodeWork, TileShape, decode_time

# The name of a launch for each row class that comes.
BY_ROW_CLASS = "by row class"
Parts = list[tuple[str, TileWork]]
# What the time of tiles of prefill_sm90 counts beside that of blocks of decode for few rows of a
# class: estimates of the latter are too low for 17 to 32 rows (by rows of an H100).
MARGIN = {DECODE: 0.9, VERIFY: 0.85}
# Bounds are so much below what their candidates take, and estimates are off by half of it: what
# might be sooner by less than this is taken no more often rightly than wrongly (by rows of an
# H100), and to look at it takes longer than all else that a plan does.
_NEAR = 1.1
# Microseconds of a launch from which on a list pays for its plan: tiles of a request follow each
# other in it, and find their keys in L2.
_LONG = 140.0
# The same where keys of all requests are more than L2 holds, and are read by three tiles or more:
# by levels they come from memory for each.
_LONG_BEYOND_L2, _MANY_KEY_BYTES, _READ_AGAIN = 40.0, 48 << 20, 3
_by_bound = itemgetter(0)


class Keys(NamedTuple):
    """The keys of so many requests: those of the longest, and of all."""

    num_requests: int
    longest: int
    total: int

    @classmethod
    def of(cls, kv_len: np.ndarray) -> Keys:
        if not kv_len.size:
            return cls(0, 0, 0)
        return cls(kv_len.size, int(np.maximum.reduce(kv_len)), int(np.add.reduce(kv_len)))

    @classmethod
    def equal(cls, num_requests: int, kv_len: int) -> Keys:
        return cls(num_requests, kv_len, num_requests * kv_len)

    def decode_work(self, num_kv_heads: int, rows: int, key_bytes: int) -> DecodeWork:
        """These keys of requests of a tile of so many rows each."""
        return DecodeWork(
            self.num_requests, self.longest, self.total, num_kv_heads, rows, key_bytes
        )

    def work(self, tile_kv: int) -> Work:
        """The work of a tile of rows each, all as long as the longest."""
        return Work.of_equal(self.num_requests, -(-self.longest // tile_kv))

    def within(self, maximum: int) -> Keys:
        """The keys that rows see if each row sees so many at most."""
        total = min(self.total, self.num_requests * maximum)
        return Keys(self.num_requests, min(self.longest, maximum), total)


class Offer(Protocol):
    """The kernels that serve a problem on a device (launch/attention/kernels.py). form: of queries
    of 8 bits, which its candidates are called by."""

    @property
    def form(self) -> str: ...
    @property
    def decode_times(self) -> DecodeKinds: ...
    @property
    def is_paged(self) -> bool: ...
    def timed_shapes(self) -> Mapping[str, TileShape]:
        """Tiles of prefill_sm90 that serve all rows, by name."""
        ...

    def decode_blocks(
        self, row_class: str, num_requests: int, max_rows: int
    ) -> list[tuple[str, TileShape]]:
        """The blocks of decode for requests of a row class: the class of their kernel, and their
        shape."""
        ...

    def shape(self, row_class: str) -> TileShape:
        """The shape of the kernel of a row class."""
        ...

    def portable_times(self, row_class: str) -> TileTimes | None:
        """What blocks of prefill_sm80 take for a row class; None if they do not serve it, or were
        not timed."""
        ...


# Not frozen, because every plan makes some and a frozen one is slow to make. No field changes.
@dataclass(slots=True)
class Candidate:
    """One way to serve a batch.

    name   of the tiles that serve all ("q64_oneshot"), "persistent + others" where launches for
           fewer rows follow, BY_ROW_CLASS for a launch a row class, or the blocks of decode
           ("decode cluster8")
    parts  the launches: of which row class or tiles, and what they do
    slots  blocks of the first launch that run at a time; 0: as many as it has, -1: by row classes
    shape  of the only launch, where its kernel has blocks of several shapes
    time   when all is done, in microseconds; infinite where nothing is known of it
    """

    name: str
    parts: Parts
    slots: int = -1
    shape: TileShape | None = None
    time: float = math.inf


_forced: str = ""
_forced_form: str | None = None


def forced() -> str:
    """The name of the candidate that plans have to take; "" if they choose."""
    return _forced


def forced_form() -> str | None:
    """The form in which plans have to serve queries of 8 bits; None if they choose."""
    return _forced_form


def full_name(name: str, form: str) -> str:
    """What a candidate is called beside those of other forms."""
    return f"{name}, {form}" if form else name


def form_of(name: str) -> str:
    """The form of a candidate of such a name."""
    return name.partition(", ")[2]


@contextlib.contextmanager
def only(name: str) -> Iterator[None]:
    """Plans take the candidate of this name, where they have it: for measurements. Not for
    threads."""
    with _forcing(name, form_of(name)):
        yield


@contextlib.contextmanager
def only_form(form: str) -> Iterator[None]:
    """Plans serve queries of 8 bits in this form (launch/tiles/forms.py), where they have it: for
    measurements and tests. Not for threads."""
    with _forcing("", form):
        yield


@contextlib.contextmanager
def _forcing(name: str, form: str) -> Iterator[None]:
    global _forced, _forced_form
    before = _forced, _forced_form
    _forced, _forced_form = name, form
    try:
        yield
    finally:
        _forced, _forced_form = before


@dataclass(slots=True)
class Batch:
    """What candidates are made for: the requests of each row class, and of all.

    key_bytes    of a key and its value
    prompts      the requests of more rows, which launches for decodes may follow
    decode_load  what the decodes beside them read
    in_turns     `works` with keys counted once, where requests read the same ones, and L2 does not
                 hold those of all heads: blocks that take items serve heads one after another, and
                 others have all at once, and read memory
    """

    parts: Parts
    works: TileWork
    num_kv_heads: int
    group_size: int
    max_qo_len: int
    key_bytes: int
    decode_load: DecodeLoad | None
    prompts: TileWork | None
    in_turns: TileWork | None = None

    @property
    def longest(self) -> int:
        """The most keys of a request."""
        if self.prompts is None or self.decode_load is None:
            return self.works.longest
        return max(self.prompts.longest, self.decode_load.longest)

    @property
    def max_rows(self) -> int:
        return self.max_qo_len * self.group_size


class _Form(NamedTuple):
    """A candidate that has not been estimated.

    bound  it is not done before, times `margin`
    make   of a batch, a name, a shape and a limit: the candidate; its time may be anything from the
           limit on
    margin times as long it counts, where others are the usual ones
    """

    bound: float
    make: Callable[[Batch, str, Any, float], Candidate]
    name: str
    shape: Any
    margin: float = 1.0


class _Rates(NamedTuple):
    """What bounds of a shape's launches need: its launch, what a pair of a row and a key, and a
    tile, take of all slots, and which share of that where each of so many tiles has an SM."""

    launch: float
    pair: float
    tile: float
    alone: float
    max_single: int


@lru_cache(maxsize=1024)
def _rates(shape: TileShape, num_kv_heads: int) -> _Rates:
    times = shape.times
    assert times is not None
    share = ROUNDED * num_kv_heads / shape.num_slots
    return _Rates(
        launch=ROUNDED * times.launch,
        pair=share * times.key_tile / (shape.tile_q * shape.tile_kv),
        tile=share * times.item,
        alone=times.single_block_factor,
        max_single=shape.num_sms // num_kv_heads,
    )


def best(offer: Offer, batch: Batch) -> Candidate:
    """The candidate that is done soonest.

    Estimates go by their bounds, and end where none is left that may be sooner by more than
    estimates are good for.
    """
    if _forced:
        asked = [x for x in candidates(offer, batch) if full_name(x.name, offer.form) == _forced]
        if asked:
            return asked[0]
    return _soonest(batch, _forms(offer, batch))


def _soonest(batch: Batch, forms: list[_Form]) -> Candidate:
    result = None
    limit = math.inf
    for bound, make, name, shape, margin in sorted(forms, key=_by_bound):
        if result is not None and _NEAR * bound >= limit:
            break
        candidate = make(batch, name, shape, limit / margin)
        if result is None or margin * candidate.time < limit:
            result, limit = candidate, margin * candidate.time
    assert result is not None, "no requests"
    return result


def best_unplanned(
    offer: Offer, batch: Batch, plan_us: float, may_split: bool
) -> tuple[str, TileShape, bool] | None:
    """The tiles of prefill_sm90 that are done soonest where blocks find their items, and whether
    keys are split, as one wave of blocks of one item each may. None where what is best of all is
    done sooner by more than so many microseconds, for what takes so long that a plan pays, and for
    decode."""
    if batch.parts[0][0] == DECODE:
        return None
    candidate: tuple[float, str, TileShape, bool] | None = None
    for name, shape in offer.timed_shapes().items():
        is_other = _forced not in ("", full_name(name, offer.form))
        if is_other or (shape.max_keys and batch.longest > shape.max_keys):
            continue
        assert shape.times is not None
        work, heads = batch.works.of(shape), batch.num_kv_heads
        is_one_wave = work.num_tiles * heads <= shape.num_slots and not shape.is_persistent
        for splits in (False, True) if is_one_wave and may_split else (False,):
            split = best_split(work, heads, shape.slots, shape.times, splits)
            if (candidate is None or split.time < candidate[0]) and (split.chunk > 0) == splits:
                candidate = split.time, name, shape, splits
    if candidate is None:
        return None
    time, name, shape, is_split = candidate
    if not _forced:
        if time > (_LONG_BEYOND_L2 if _reads_again(batch, shape) else _LONG):
            return None
        chosen = best(offer, batch)
        is_tile = chosen.name in offer.timed_shapes()
        margin = 1.0 if is_tile else MARGIN.get(batch.parts[0][0], 1.0)
        if margin * time > chosen.time + plan_us:
            return None
    return name, shape, is_split


def _reads_again(batch: Batch, shape: TileShape) -> bool:
    """Whether tiles of a request that do not follow each other find their keys in memory alone."""
    requests = batch.works.requests
    num_bytes = int(requests.kv_len.sum()) * batch.num_kv_heads * batch.key_bytes
    num_tiles = batch.works.of(shape).num_tiles
    return num_bytes > _MANY_KEY_BYTES and num_tiles >= _READ_AGAIN * requests.kv_len.size > 3


def best_of(batch: Batch, shapes: Mapping[str, TileShape]) -> Candidate:
    """The soonest of these tiles, with or without launches for few rows behind them."""
    return _soonest(batch, _forms_of_tiles(batch, shapes))


def candidates(offer: Offer, batch: Batch) -> list[Candidate]:
    """Every way to serve a batch."""
    return [form.make(batch, form.name, form.shape, math.inf) for form in _forms(offer, batch)]


def _forms(offer: Offer, batch: Batch) -> list[_Form]:
    if not batch.parts:
        return []
    (row_class, works), *others = batch.parts
    is_one_token = works.requests.qo_len.size == batch.max_qo_len == 1
    if not others and row_class == DECODE and (offer.is_paged or is_one_token):
        # Tiles of prefill gain nothing here, and would be one more kernel for an engine to compile.
        return [_known(x) for x in _decode_candidates(offer, batch)]
    result = _forms_of_tiles(batch, offer.timed_shapes())
    if not others and row_class in ONE_AN_SM:
        margin = MARGIN[row_class]
        result = [form._replace(bound=margin * form.bound, margin=margin) for form in result]
        return result + [_known(x) for x in _decode_candidates(offer, batch)]
    if result and row_class == LARGE:
        return result  # the tiles of prefill_sm90 are those of its class
    return [*result, _known(_by_row_class(offer, batch))]


def _forms_of_tiles(batch: Batch, shapes: Mapping[str, TileShape]) -> list[_Form]:
    result, longest, heads, load = [], batch.longest, batch.num_kv_heads, batch.decode_load
    rows, pairs = (batch.works if batch.prompts is None else batch.prompts).rows_and_pairs()
    for name, shape in shapes.items():
        if shape.max_keys and longest > shape.max_keys:
            continue
        launch, pair, tile, alone_share, max_single = _rates(shape, heads)
        num_tiles = -(-rows // shape.tile_q)
        busy = pairs * pair + num_tiles * tile
        if load is None or batch.prompts is None:
            minimum = launch + (busy if num_tiles > max_single else alone_share * busy)
            result.append(_Form(minimum, alone, name, shape))
            continue
        decodes = load.num_keys * shape.tile_q * pair + load.keys.size * tile
        is_alone = num_tiles + load.keys.size <= max_single
        minimum = launch + (busy + decodes) * (alone_share if is_alone else 1.0)
        result.append(_Form(max(minimum, load.lower_bound_together(shape)), alone, name, shape))
        if name != PERSISTENT and (shape.is_persistent or shape.max_keys):
            continue  # behind other blocks that take items launches wait as long, and longer
        minimum = launch + (busy if num_tiles > max_single else alone_share * busy)
        num_blocks = 0 if shape.is_persistent else num_tiles * heads  # which leave SMs to others
        minimum = lower_bound_on_all(minimum, num_blocks, shape, load)
        result.append(_Form(minimum, with_others, name, shape))
    return result


def _known(candidate: Candidate) -> _Form:
    return _Form(candidate.time, _given, "", candidate)


def _given(batch: Batch, name: str, candidate: Candidate, limit: float) -> Candidate:
    return candidate


def alone(batch: Batch, name: str, shape: TileShape, limit: float = math.inf) -> Candidate:
    """One launch of prefill_sm90 serves all."""
    assert shape.times is not None
    if batch.prompts is not None and batch.decode_load is not None:
        work = batch.prompts.of(shape)
        time = time_together(work, batch.num_kv_heads, shape, batch.decode_load, limit)
    else:
        works = batch.in_turns if batch.in_turns and shape.is_persistent else batch.works
        time = split_time(works.of(shape), batch.num_kv_heads, shape, shape.times, limit)
    return Candidate(name, [(name, batch.works)], 0, None, time)


def with_others(batch: Batch, name: str, shape: TileShape, limit: float = math.inf) -> Candidate:
    """Launches for the requests of few rows follow one for those of many, on SMs of their own if
    its blocks are persistent."""
    assert batch.prompts is not None and batch.decode_load is not None
    slots, time = partition_beside(
        batch.prompts, batch.num_kv_heads, shape, batch.decode_load, limit
    )
    decodes = [part for part in batch.parts if part[0] not in (SMALL, LARGE)]
    return Candidate(f"{name} + others", [(name, batch.prompts), *decodes], slots, None, time)


def partition_beside(
    prompts: TileWork,
    num_kv_heads: int,
    shape: TileShape,
    load: DecodeLoad,
    limit: float = math.inf,
) -> Partition:
    """How many blocks of a launch run at a time that others follow, 0 for as many as it has, and
    when all are done."""
    of_first = followed(shape, load.times) if shape.is_persistent else shape
    may_leave = shape.is_persistent and not shape.max_keys
    result = best_partition(prompts.of(shape), num_kv_heads, of_first, load, may_leave, limit)
    return result._replace(num_slots=0) if result.num_slots == shape.num_slots else result


def _by_row_class(offer: Offer, batch: Batch) -> Candidate:
    """A launch a row class, by the portable kernels where prefill_sm90 does not serve."""
    (row_class, works), *others = batch.parts
    time = math.inf
    if not others:
        shape = offer.shape(row_class)
        time = split_time(
            works.of(shape), batch.num_kv_heads, shape, offer.portable_times(row_class)
        )
    elif batch.decode_load is not None and batch.prompts is None:
        time = batch.decode_load.time()
    return Candidate(BY_ROW_CLASS, batch.parts, -1, None, time)


def split_time(
    work: Work,
    num_kv_heads: int,
    shape: TileShape,
    times: TileTimes | None,
    limit: float = math.inf,
) -> float:
    """When one launch of prefill is done whose blocks take so long, no less than the limit if not
    within that; infinite where they were not timed."""
    if times is None:
        return math.inf
    return best_split(work, num_kv_heads, shape.slots, times, limit=limit).time


def _decode_candidates(offer: Offer, batch: Batch) -> list[Candidate]:
    """The blocks of decode for requests of one row class, and those of prefill for more rows."""
    ((row_class, works),) = batch.parts
    keys = Keys(works.requests.kv_len.size, works.longest, works.num_keys)
    decode_work = keys.decode_work(batch.num_kv_heads, batch.max_rows, batch.key_bytes)
    return [
        Candidate(name_of_blocks(row_class, name, shape), [(name, works)], -1, shape, time)
        for time, name, shape in timed_blocks(offer, row_class, decode_work, works.of)
    ]


def timed_blocks(
    offer: Offer,
    row_class: str,
    decode_work: DecodeWork,
    work_of: Callable[[TileShape], Work],
) -> list[tuple[float, str, TileShape]]:
    """The blocks of decode for requests of one row class, and those of prefill for 17 rows and
    more: when they are done, the class of their kernel, and their shape."""
    times, offered = (
        offer.decode_times,
        offer.decode_blocks(row_class, decode_work.num_tiles, decode_work.rows),
    )
    result = [
        (decode_time(shape, times.of(shape), decode_work), name, shape) for name, shape in offered
    ]
    if row_class == VERIFY:
        shape = offer.shape(SMALL)
        time = split_time(
            work_of(shape), decode_work.num_kv_heads, shape, offer.portable_times(SMALL)
        )
        result.append((time, SMALL, shape))
    return result


def name_of_blocks(row_class: str, kernel_rows: str, shape: TileShape) -> str:
    """The name of blocks for a row class. kernel_rows: the class that their kernel is of."""
    if kernel_rows == SMALL:
        return SMALL
    if shape.cluster > 1:
        return f"{row_class} cluster{shape.cluster}"
    if shape.decode is not None:
        return f"{row_class} one_an_sm"
    return row_class if shape.is_fused else f"{row_class} merge_launch"
