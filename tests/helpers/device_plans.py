"""Plans that the plan_batch kernel makes: run it alone, read what it wrote, hold it to the lengths.

The launcher's kernels are stood in for by tile shapes, so that nothing else is compiled.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import numpy as np

from cupyattn.core import dtypes
from cupyattn.core.key_share import KeyShare
from cupyattn.core.spec import AttentionSpec
from cupyattn.errors import PlanError
from cupyattn.launch.attention import plan_batch
from cupyattn.launch.attention.batch import BatchLauncher, BatchSchedule
from cupyattn.launch.attention.plan_batch import DevicePlan, IndexFormat, Lengths
from cupyattn.schedule import Masking, tile_span
from cupyattn.schedule.batch import (
    NUM_SPLITS,
    WORK_FIELDS,
    BatchPlan,
    BatchRequests,
    listed_parts,
)
from cupyattn.schedule.cuts import pack
from cupyattn.schedule.limits import Limits
from cupyattn.schedule.tile_shape import TileShape
from cupyattn.schedule.validate import validate_plan

_FLOAT = dtypes.float16
# What the planner pays for a block besides its key tiles.
_OVERHEAD = 2.0
_SHAPE = TileShape(16, 64, 64, 0.25)
_CAUSAL = Masking(-1, 0)
_SPLIT_TILE = WORK_FIELDS.index("split_tile")


class Launcher(BatchLauncher):
    """A launcher whose kernels are one tile shape."""

    def __init__(
        self,
        shape: TileShape,
        group: int,
        kv_heads: int,
        masking: Masking,
        share: KeyShare | None = None,
    ) -> None:
        heads = group * kv_heads, kv_heads, 64, 64
        windows = {
            "window_left": masking.window_left,
            "window_right": masking.window_right,
        }
        spec = AttentionSpec(*heads, _FLOAT, _FLOAT, _FLOAT, page_size=16, **windows)
        spec = replace(spec, key_share=share)
        super().__init__(spec, spec.problem(), 0)
        # Prefill's are merged by a list of split tiles, decode's by counters.
        self._tiles: Any = SimpleNamespace(fused_merge=shape.tile_q <= 32, fused_splits=0)
        self._shape = shape

    def tiles(self, rows: str) -> Any:
        return self._tiles

    def choose(self, *_: Any) -> tuple[str, TileShape]:
        return "", self._shape

    def reserve(
        self,
        rows: str,
        shape: TileShape,
        most: Limits,
        longest: int,
        begins_early: bool = False,
        num_blocks: int = 0,
    ) -> tuple[BatchSchedule, int]:
        tiles = self._tiles
        split, heads = most.num_split_tiles, self.num_kv_heads
        merges = 0 if tiles.fused_merge else split
        counters = 0 if merges else split * heads
        bounds = np.cumsum([0, 48 * most.num_items, 4 * merges, 4 * counters]).tolist()
        states = 4 * 65 * most.num_states * heads * shape.tile_q
        part: Any = SimpleNamespace(items=0, merges=bounds[1], counters=bounds[2])
        return BatchSchedule(np.zeros(0, np.int32), states, (part,)), -(-bounds[3] // 16) * 16


@dataclass(frozen=True)
class Batch:
    """Lengths as they are in device memory; how they are given is drawn from `form`.

    form: "uniform", "steps" (cumulative), "lens" (with offsets in tokens), "elements" (the same,
    each token counting `unit`). is_ragged: keys begin where offsets say. has_kv_steps: lengths of
    keys are cumulative. has_kv_begin: rows see no keys before `begins`. share: kv_len are what this
    rank holds of `whole` lengths; not counts_rows: what is given of these is without the rows.
    """

    qo_len: tuple[int, ...]
    kv_len: tuple[int, ...]
    form: str = "uniform"
    group: int = 4
    kv_heads: int = 2
    shape: TileShape = _SHAPE
    masking: Masking = _CAUSAL
    max_kv_len: int = 0
    likely_kv_len: int = 0
    is_ragged: bool = False
    dtype: str = "int32"
    unit: int = 1
    has_kv_steps: bool = False
    has_kv_begin: bool = False
    share: KeyShare | None = None
    counts_rows: bool = True

    def launcher(self) -> Launcher:
        return Launcher(self.shape, self.group, self.kv_heads, self.masking, self.share)

    @property
    def whole(self) -> np.ndarray:
        """Lengths of whole requests, some of which end behind keys of other ranks."""
        own = np.array(self.kv_len, np.int64)
        if self.share is None:
            return own
        before = np.where(own > 0, self.share.position(own - 1) + 1, 0)
        return before + np.arange(own.size) % (self.share.position(own) - before + 1)

    @property
    def room(self) -> int:
        """Keys that a request has room for, or rows of k."""
        if self.is_ragged:
            return self.max_kv_len or max(1, sum(self.kv_len))
        return self.max_kv_len or max((1, *self.kv_len))

    @property
    def begins(self) -> np.ndarray:
        """The first key that rows of each request see."""
        lengths = self.requests().kv_len
        return lengths // 3 if self.has_kv_begin else 0 * lengths

    def requests(self) -> BatchRequests:
        """As the planner should read them."""
        qo_len, kv_len = (np.array(x, np.int64) for x in (self.qo_len, self.kv_len))
        starts = np.cumsum(kv_len) - kv_len if self.is_ragged else np.arange(len(kv_len)) * 1000
        kv_len = np.clip(kv_len, 0, self.room)
        return BatchRequests(qo_len, kv_len, np.cumsum(qo_len) - qo_len, starts)

    def arrays(self) -> tuple[list[np.ndarray | None], Lengths]:
        requests = self.requests()
        kind = dtypes.parse(self.dtype).numpy
        count = len(self.qo_len)
        ends = np.concatenate([[0], np.cumsum(self.qo_len)])
        given: list[Any] = [None, np.array(self.kv_len, np.int64), None, None, None]
        qo_len = -1
        if self.form == "uniform":
            qo_len = self.qo_len[0] if count else 1
        elif self.form == "steps":
            given[2] = ends
        else:
            given[0], given[2] = np.array(self.qo_len), ends[:-1]
        if self.is_ragged:
            given[3] = requests.kv_start
        if self.has_kv_begin:
            given[4] = self.begins
        elif self.share is not None:
            given[4] = self.whole - (0 if self.counts_rows else np.array(self.qo_len))
        units = [1, 1, self.unit, self.unit, 1]
        if self.has_kv_steps:
            given[1], units[1] = np.concatenate([[0], np.cumsum(self.kv_len)]), self.unit
        arrays = [
            None if x is None else (x * unit).astype(kind)
            for x, unit in zip(given, units, strict=True)
        ]
        units[1] *= -1 if self.has_kv_steps else 1
        units[4] *= 1 if self.counts_rows else -1
        formats = [IndexFormat(1, dtypes.parse(self.dtype), unit) for unit in units]
        rows = int(ends[-1])
        lengths = Lengths(
            num_requests=count,
            num_rows=rows,
            qo_len=qo_len,
            max_qo_len=max((1, *self.qo_len)),
            kv_step=1000,
            max_kv_len=self.room,
            likely_kv_len=self.likely_kv_len or self.room,
            formats=tuple(formats),  # type: ignore[arg-type]
            is_ragged=not (given[0] is given[2] is given[3] is given[4] is None),
        )
        return arrays, lengths


@dataclass(frozen=True)
class Made:
    """What the kernel wrote."""

    items: np.ndarray
    merges: np.ndarray
    counters: np.ndarray
    prepared: DevicePlan

    def cut_plan(self, num_blocks: int) -> tuple[BatchPlan, int]:
        """The list of requests that are cut, as if it had so many blocks, and how many it has."""
        used = self.items[:, NUM_SPLITS] > 0
        assert used[:num_blocks].all(), "too few heads"
        (places,) = used.nonzero()
        room = int(places[num_blocks]) if places.size > num_blocks else -1
        assert (np.diff(places[num_blocks:]) == 1).all(), "spare items between others"
        assert not self.items[~used].any(), "spare items hold something"
        items = self.items[used]
        begin, end, following = listed_parts(items)
        moved = np.where(following > 0, following - room + num_blocks, 0)
        items[:, 8:10] = pack(begin, end, moved).view(np.int32).reshape(-1, 2)
        merges = self.merges[self.merges >= 0]
        merges = np.where(merges >= num_blocks, merges - room + num_blocks, merges)
        merges = merges[np.argsort(items[merges, _SPLIT_TILE])]
        assert (items[merges, _SPLIT_TILE] == np.arange(merges.size)).all(), "other merges"
        num_states = int(items[merges, NUM_SPLITS].sum())
        return BatchPlan(items, merges, num_states, num_blocks=num_blocks), room

    def plan(self) -> BatchPlan:
        """The list without what is spare."""
        column = dict(zip(WORK_FIELDS, self.items.T, strict=True))
        used = column["num_splits"] > 0
        assert (np.diff(used.astype(int)) <= 0).all(), "items after the spare ones"
        assert not self.items[~used].any(), "spare items hold something"
        merges = np.flatnonzero((column["num_splits"] > 1) & (column["split"] == 0))
        if len(self.merges):
            listed = self.merges[self.merges >= 0]
            assert listed.tolist() == merges.tolist(), "another list of merges"
            assert (self.merges[len(merges) :] == -1).all(), "merges after the spare ones"
        return BatchPlan(self.items[used], merges, int(column["num_splits"][merges].sum()))


Run = Callable[[DevicePlan, list[Any]], np.ndarray]


def make(batch: Batch, run: Run) -> Made:
    """Plan a batch; `run` enqueues the kernel on arrays and returns the workspace as int32."""
    arrays, lengths = batch.arrays()
    launcher = batch.launcher()
    prepared = plan_batch.prepare(launcher, lengths)
    words = run(prepared, arrays)
    width = len(WORK_FIELDS)
    cuts = [prepared.items // 4, prepared.merges // 4, prepared.counters // 4]
    count = (cuts[1] - cuts[0]) // width
    items = words[cuts[0] :][: count * width].reshape(count, width)
    return Made(items, words[cuts[1] : cuts[2]], words[cuts[2] : prepared.scales[0] // 4], prepared)


def check(batch: Batch, made: Made) -> None:
    """Every row with every key once, and nobody's work much longer than it need be."""
    plan, requests = made.plan(), batch.requests()
    try:
        validate_plan(plan, requests, batch.group, batch.shape.tile_q)
    except PlanError as error:
        raise AssertionError(f"{batch}: {error}") from error
    column = {name: plan.items[:, i] for i, name in enumerate(WORK_FIELDS)}
    by_start = {int(q): i for i, q in enumerate(requests.q_start) if requests.qo_len[i]}
    for q, *row in plan.items[:, :4].tolist():
        index = by_start[q]
        wanted = (requests.qo_len[index], requests.kv_start[index], requests.kv_len[index])
        assert tuple(row) == wanted, f"request {index}: {row} for {wanted}"
    begins = batch.begins if batch.share is None else batch.whole - requests.kv_len
    first_keys = [int(begins[by_start[int(q)]]) for q in column["q_start"]]
    assert column["key_offset"].tolist() == first_keys
    assert not made.counters.any(), "counters that are not zero"
    if batch.likely_kv_len and batch.likely_kv_len < max(batch.kv_len, default=0):
        return  # the caller has said that lengths are not worth splitting
    last, bound = finish(batch, column), ideal(batch)
    assert last <= bound, f"done after {last} tiles' time, {bound} would do"


def spans(batch: Batch, column: dict[str, np.ndarray]) -> np.ndarray:
    """Key tiles of each item."""
    found = []
    for values in zip(*(column[name].tolist() for name in WORK_FIELDS), strict=True):
        item = dict(zip(WORK_FIELDS, values, strict=True))
        others = item["key_offset"] if batch.share is not None else 0
        begin, end = visible(batch, item["first_row"], item["qo_len"], item["kv_len"], others)
        if batch.share is None:
            begin = min(max(begin, item["key_offset"]), end)
        first, last = tile_span(begin, end, batch.shape.tile_kv, item["split"], item["num_splits"])
        found.append(last - first)
    return np.array(found, np.int64)


def visible(batch: Batch, first_row: int, qo_len: int, kv_len: int, others: int) -> tuple[int, int]:
    last_row = min(first_row + batch.shape.tile_q, qo_len * batch.group) - 1
    tokens = first_row // batch.group, last_row // batch.group
    if batch.share is None:
        return batch.masking.key_span(*tokens, qo_len, kv_len)
    whole, masking = kv_len + others, batch.masking
    first, last = (token + whole - qo_len for token in tokens)
    held = np.flatnonzero(batch.share.holds(np.arange(whole)))[:kv_len]
    sees = np.ones(len(held), bool)
    if masking.window_left >= 0:
        sees &= held >= first - masking.window_left
    if masking.window_right >= 0:
        sees &= held <= last + masking.window_right
    seen = np.flatnonzero(sees)
    return (int(seen[0]), int(seen[-1]) + 1) if seen.size else (0, 0)


def finish(batch: Batch, column: dict[str, np.ndarray]) -> float:
    """When the last block is done, blocks being dealt in order to what is free."""
    slots = [0.0] * batch.shape.num_slots
    for cost in np.repeat(spans(batch, column), batch.kv_heads):
        heapq.heapreplace(slots, slots[0] + float(cost) + _OVERHEAD)
    return max(slots)


def ideal(batch: Batch) -> float:
    """An even share for each slot, twice over, and the overheads of a list that is full."""
    requests, tile_q = batch.requests(), batch.shape.tile_q
    total, longest, tiles = 0, 0, 0
    lengths = requests.qo_len, requests.kv_len, batch.whole - requests.kv_len
    for qo_len, kv_len, others in zip(*lengths, strict=True):
        for first_row in range(0, int(qo_len) * batch.group, tile_q):
            begin, end = visible(batch, first_row, int(qo_len), int(kv_len), int(others))
            span = -(-(end - begin) // batch.shape.tile_kv)
            total, longest, tiles = total + span, max(longest, span), tiles + 1
    share = total * batch.kv_heads / batch.shape.num_slots
    waves = tiles * batch.kv_heads / batch.shape.num_slots + 5
    return min(2.0 * share, share + longest) + _OVERHEAD * waves + 2.0 + 8.0


def random_batch(seed: int) -> Batch:
    """The same batch for the same seed."""
    rng = np.random.default_rng((seed, 93))
    count = int(rng.integers(0, 200))
    is_decode = seed % 2 == 0
    kv_len = rng.integers(0, 5000, count)
    if count and rng.random() < 0.5:
        kv_len[rng.integers(count)] = 100_000
    if rng.random() < 0.2:
        kv_len[:] = 3000
    qo_len = rng.integers(0, 60, count) * (rng.random(count) < 0.9)
    if is_decode:
        qo_len[:] = rng.integers(1, 5)
    tile_q = (16, 32, 64, 128, 192)[int(rng.integers(5))]
    return Batch(
        tuple(qo_len.tolist()),
        tuple(kv_len.tolist()),
        "uniform" if is_decode else ("steps", "lens")[int(rng.integers(2))],
        int(rng.integers(1, 9)),
        (1, 2, 8)[int(rng.integers(3))],
        TileShape(tile_q, (16, 48, 64)[int(rng.integers(3))], 264, 4.0 if tile_q > 32 else 0.25),
        Masking((-1, -1, 0, 500)[int(rng.integers(4))], (-1, 0, 0, 70)[int(rng.integers(4))]),
        is_ragged=not is_decode and bool(rng.random() < 0.5),
        dtype=("int32", "uint32", "int64")[int(rng.integers(3))],
        unit=1 if is_decode else (1, 96)[int(rng.integers(2))],
        has_kv_steps=not is_decode and bool(rng.random() < 0.5),
        has_kv_begin=bool(rng.random() < 0.3),
    )


def shared_batch(seed: int) -> Batch:
    """The same of a rank that holds a share of the keys."""
    rng = np.random.default_rng((seed, 94))
    batch, world = random_batch(seed), int(rng.integers(2, 6))
    share = KeyShare(world, int(rng.integers(world)), (1, 1, 5, 16, 64)[int(rng.integers(5))])
    left, right = batch.masking.window_left, batch.masking.window_right
    return replace(
        batch,
        share=share,
        has_kv_begin=False,
        masking=Masking(left, 0 if left < 0 and right < 0 else right),
        kv_len=tuple(min(x, 6000) for x in batch.kv_len),
        counts_rows=batch.dtype == "uint32" or bool(rng.random() < 0.7),
    )
