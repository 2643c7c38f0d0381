"""The data of a card, fitted to times of candidates that were measured on it."""

from __future__ import annotations

import functools
import json
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from ..core.problem import AttentionProblem
from ..launch.tiles import prefill_sm90
from ..launch.tiles.row_classes import LARGE, MAX_ROWS, ONE_AN_SM, PERSISTENT, SMALL, VERIFY
from ..schedule.makespan import TileTimes
from ..schedule.sm_partition import BesideTimes
from ..schedule.tile_shape import DecodeKinds, DecodeTimes, DecodeWork, TileShape, decode_time
from . import least_squares, tile_times
from .candidates import (
    BY_ROW_CLASS,
    Batch,
    Candidate,
    Keys,
    Offer,
    alone,
    name_of_blocks,
    split_time,
    with_others,
)
from .card import Card, TileKey, TimedTile

# A tile has times of its own for such head dims from so many samples on.
_MIN_SAMPLES = 12
# What the fit of a tile changes.
_TILE_FIELDS = "launch", "item", "key_tile", "single_block_factor", "mha_factor"
# Rows say nothing of these: a partition is chosen by them, and no other is timed beside it.
_NOT_TOLD = ("stream_rate",)
# What blocks take at least that have an SM each, where others have none: memory is all theirs.
_MIN_SINGLE_BLOCK_FACTOR = 0.8
_SHARES = {"single_block_factor": (0.3, 1.0), "mha_factor": (1.0, 2.0)}


class Sample(NamedTuple):
    """What candidates of a batch took, in microseconds, by name."""

    problem: AttentionProblem
    page_size: int
    offer: Offer
    batch: Batch
    us: dict[str, float]


def fit_card(card: Card, samples: Sequence[Sample]) -> Card:
    """A card like `card` whose times are nearest to the samples."""
    card = _fit_rates(card, samples)
    card = _fit_tiles(card, samples)
    card = _fit_rates(card, samples)
    card = _fit_options(card, samples)
    card = _fit_portable(card, samples)
    card = replace(card, decode=_fit_decode(card, samples))
    card = replace(card, fp8_keys=_fit_fp8(card, samples))
    return replace(card, beside=_fit_beside(card, samples))


class _OfTile(NamedTuple):
    """A sample of one launch of a tile that serves requests of one row class."""

    sample: Sample
    tile: prefill_sm90.Tile
    us: float

    def told(self, card: Card, key: TileKey, timed: TimedTile) -> float:
        sample = self.sample
        times = tile_times.scaled(card, sample.problem, self.tile, key, timed)
        times = times.of_group(sample.batch.group_size)
        shape = replace(sample.offer.timed_shapes()[self.tile.name], times=times)
        return alone(sample.batch, self.tile.name, shape).time

    def told_by_nearest(self, card: Card) -> float:
        key = tile_times.nearest(card, self.sample.problem, self.tile)
        assert key is not None
        return self.told(card, key, card.tiles[key])


def _of_tiles(samples: Iterable[Sample]) -> list[_OfTile]:
    result = []
    for sample in samples:
        if sample.batch.prompts is not None:
            continue
        shapes = sample.offer.timed_shapes()
        us = dict(sample.us)
        if [*us] == [BY_ROW_CLASS] and sample.batch.parts[0][0] == LARGE:
            us = {PERSISTENT: us[BY_ROW_CLASS]}
        for name in us.keys() & shapes.keys():
            tile = prefill_sm90.find(sample.problem, sample.page_size, name)
            assert isinstance(tile, prefill_sm90.Tile)
            result.append(_OfTile(sample, tile, us[name]))
    return result


def _fit_rates(card: Card, samples: Sequence[Sample]) -> Card:
    """How fast tiles read keys, by requests of few rows, and write and read states."""
    group = [
        x
        for x in _of_tiles(samples)
        if x.sample.batch.max_qo_len * x.sample.batch.group_size <= MAX_ROWS[VERIFY]
        and not tile_times.option_names(x.sample.problem)
    ]
    if len(group) < _MIN_SAMPLES:
        return card

    def card_of(x: np.ndarray) -> Card:
        return replace(card, key_rate=float(x[0]), state_rate=float(x[1]))

    def told(x: np.ndarray) -> np.ndarray:
        built = card_of(x)
        _forget(group)
        return np.array([y.told_by_nearest(built) for y in group])

    start = np.array([card.key_rate, card.state_rate])
    return card_of(least_squares.fit(told, start, np.array([x.us for x in group])))


def _fit_tiles(card: Card, samples: Sequence[Sample]) -> Card:
    """Tiles with plain logits first, and then what a cap adds to them."""
    groups: dict[TileKey, list[_OfTile]] = defaultdict(list)
    for of_tile in _of_tiles(samples):
        problem, tile = of_tile.sample.problem, of_tile.tile
        if tile_times.option_names(problem):
            continue
        own = TileKey(
            "prefill_sm90", tile.name, tile.keys, problem.head_dim_qk, problem.head_dim_vo
        )
        groups[own].append(of_tile)
    tiles = dict(card.tiles)
    for own, group in groups.items():
        plain = [x for x in group if not x.sample.problem.soft_cap]
        if own in tiles or len(plain) >= _MIN_SAMPLES:
            tiles[own] = _fit_tile(replace(card, tiles=tiles), own, plain, group[0])
    card = replace(card, tiles=tiles)
    for own, group in groups.items():
        capped = [x for x in group if x.sample.problem.soft_cap]
        if own in tiles and len(capped) >= 4:
            tiles[own] = _fit_cap(card, own, capped)
    return card


def _fit_tile(card: Card, own: TileKey, group: list[_OfTile], one: _OfTile) -> TimedTile:
    """The times of a tile, which start as those of the nearest."""
    timed = card.tiles.get(own)
    if timed is None:
        key = tile_times.nearest(card, one.sample.problem, one.tile)
        assert key is not None
        plain = replace(one.sample.problem, soft_cap=False)
        times = tile_times.scaled(card, plain, one.tile, key, card.tiles[key])
        times = times._replace(state=0.0, read=0.0)
        timed = card.tiles[key]._replace(times=times, area=one.tile.area)
    if len(group) < 4:
        return timed
    fields = [
        name
        for name in _TILE_FIELDS
        if name != "mha_factor" or any(x.sample.batch.group_size == 1 for x in group)
    ]

    is_lone = one.tile.shape.min_blocks == 1

    def times_of(x: np.ndarray) -> TimedTile:
        values = {name: _within(name, float(v)) for name, v in zip(fields, x, strict=True)}
        if is_lone:
            factor = values["single_block_factor"]
            values["single_block_factor"] = max(factor, _MIN_SINGLE_BLOCK_FACTOR)
        return timed._replace(times=timed.times._replace(**values))

    def told(x: np.ndarray) -> np.ndarray:
        built = times_of(x)
        _forget(group)
        return np.array([y.told(card, own, built) for y in group])

    start = np.array([max(getattr(timed.times, name), 1e-3) for name in fields])
    return times_of(least_squares.fit(told, start, np.array([x.us for x in group])))


def _fit_cap(card: Card, own: TileKey, group: list[_OfTile]) -> TimedTile:
    timed = card.tiles[own]

    def times_of(x: np.ndarray) -> TimedTile:
        return timed._replace(capped=(float(x[0]), float(x[1])))

    def told(x: np.ndarray) -> np.ndarray:
        _forget(group)
        return np.array([y.told(card, own, times_of(x)) for y in group])

    start = np.array([max(timed.capped[0], 0.5), timed.capped[1]])
    return times_of(least_squares.fit(told, start, np.array([x.us for x in group])))


def _fit_options(card: Card, samples: Sequence[Sample]) -> Card:
    """What options cost a launch and a key tile."""
    options = dict(card.options)
    for name in options:
        group = [
            x for x in _of_tiles(samples) if tile_times.option_names(x.sample.problem) == [name]
        ]
        if len(group) < 4:
            continue

        def told(x: np.ndarray, name: str = name, group: list[_OfTile] = group) -> np.ndarray:
            built = replace(card, options={**options, name: (float(x[0]), float(x[1]))})
            _forget(group)
            return np.array([y.told_by_nearest(built) for y in group])

        us, (added, factor) = np.array([x.us for x in group]), options[name]
        fitted = least_squares.fit(told, np.array([max(added, 0.5), factor]), us)
        options[name] = float(fitted[0]), float(fitted[1])
    return replace(card, options=options)


def _fit_portable(card: Card, samples: Sequence[Sample]) -> Card:
    """The times of prefill_sm80, where a measurement has asked for its blocks."""
    groups: dict[TileKey, list[tuple[Sample, float]]] = defaultdict(list)
    for sample in samples:
        (row_class, _), *others = sample.batch.parts
        us = sample.us.get(SMALL if row_class == VERIFY else BY_ROW_CLASS)
        row_class = SMALL if row_class == VERIFY else row_class
        if others or us is None or sample.offer.portable_times(row_class) is None:
            continue
        problem = sample.problem
        keys = tile_times.portable_keys(problem)
        if not (tile_times.option_names(problem) or problem.soft_cap):
            key = TileKey(
                tile_times.PORTABLE_KERNEL,
                row_class,
                keys,
                problem.head_dim_qk,
                problem.head_dim_vo,
            )
            groups[key].append((sample, us))
    tiles = dict(card.tiles)
    for key, group in groups.items():
        if len(group) >= _MIN_SAMPLES or key in tiles:
            tiles[key] = _fit_portable_tile(replace(card, tiles=tiles), key, group)
    return replace(card, tiles=tiles)


def _fit_portable_tile(card: Card, own: TileKey, group: list[tuple[Sample, float]]) -> TimedTile:
    sample = group[0][0]
    shape = sample.offer.shape(own.tile)
    key = own if own in card.tiles else tile_times.nearest_portable(card, sample.problem, own.tile)
    assert key is not None
    timed, fields = card.tiles[key], ("launch", "item", "key_tile", "single_block_factor")
    area = shape.tile_q * shape.tile_kv
    size = area * (own.head_dim_qk + own.head_dim_vo)
    scale = size / (timed.area * (key.head_dim_qk + key.head_dim_vo))
    start = timed.times._replace(key_tile=scale * timed.times.key_tile)

    def times_of(x: np.ndarray) -> TimedTile:
        values = {name: _within(name, float(v)) for name, v in zip(fields, x, strict=True)}
        return TimedTile(start._replace(**values), area, timed.capped)

    def told(x: np.ndarray) -> np.ndarray:
        built = replace(card, tiles={**card.tiles, own: times_of(x)})
        result = []
        for sample, _ in group:
            batch, shape = sample.batch, sample.offer.shape(own.tile)
            batch.works.forget()
            area = shape.tile_q, shape.tile_kv
            times = tile_times.portable_times_of(built, sample.problem, own.tile, area)
            assert times is not None
            times = times.of_group(batch.group_size)
            result.append(split_time(batch.works.of(shape), batch.num_kv_heads, shape, times))
        return np.array(result)

    us = np.array([us for _, us in group])
    values = np.array([getattr(start, name) for name in fields])
    return times_of(least_squares.fit(told, values, us))


def _forget(group: Iterable[_OfTile]) -> None:
    """Splits that works remember are of times that nobody asks for again."""
    for x in group:
        x.sample.batch.works.forget()


def _within(name: str, value: float) -> float:
    minimum, maximum = _SHARES.get(name, (0.0, math.inf))
    return min(max(value, minimum), maximum)


_Told = Callable[[DecodeTimes], float]


def _of_decode(
    card: Card, samples: Iterable[Sample], is_fp8: bool
) -> dict[str, list[tuple[_Told, float]]]:
    """What blocks of decode take by their times, and what they took, by their kind."""
    groups: dict[str, list[tuple[_Told, float]]] = defaultdict(list)
    for sample in samples:
        (row_class, works), *others = sample.batch.parts
        if others or row_class not in ONE_AN_SM or sample.problem.dtype_kv.is_fp8 != is_fp8:
            continue
        batch = sample.batch
        keys = Keys(works.requests.kv_len.size, works.longest, works.num_keys)
        decode_work = keys.decode_work(batch.num_kv_heads, batch.max_rows, batch.key_bytes)
        for name, shape in _blocks(sample, row_class, keys.num_requests):
            if name in sample.us:
                kind = card.decode.kind_of(shape)
                told = functools.partial(_decode_time, shape, decode_work)
                groups[kind].append((told, sample.us[name]))
    return groups


def _decode_time(shape: TileShape, decode_work: DecodeWork, times: DecodeTimes) -> float:
    return decode_time(shape, times, decode_work)


def _fit_fp8(card: Card, samples: Sequence[Sample]) -> float:
    """How much longer blocks of decode take for keys of fp8."""
    groups = _of_decode(card, samples, True)
    group = [(kind, *one) for kind, some in groups.items() for one in some]
    if len(group) < _MIN_SAMPLES:
        return card.fp8_keys

    def told(x: np.ndarray) -> np.ndarray:
        decode = card.decode.of_keys(float(x[0]))
        return np.array([of(getattr(decode, kind)) for kind, of, _ in group])

    us = np.array([us for _, _, us in group])
    return float(least_squares.fit(told, np.array([card.fp8_keys]), us)[0])


def _fit_decode(card: Card, samples: Sequence[Sample]) -> DecodeKinds:
    """The times of each kind of blocks of decode, by keys of 16 bits."""
    groups = _of_decode(card, samples, False)
    result = card.decode
    for kind, group in groups.items():
        times = getattr(result, kind)
        if len(group) < _MIN_SAMPLES:
            continue

        def told_all(x: np.ndarray, group: Any = group) -> np.ndarray:
            built = DecodeTimes._make(map(float, x))
            return np.array([told(built) for told, _ in group])

        us = np.array([us for _, us in group])
        fitted = least_squares.fit(told_all, np.array(times), us)
        result = result._replace(**{kind: DecodeTimes._make(map(float, fitted))})
    return result


def _blocks(sample: Sample, row_class: str, count: int) -> Iterable[tuple[str, Any]]:
    for name, shape in sample.offer.decode_blocks(row_class, count, sample.batch.max_rows):
        yield name_of_blocks(row_class, name, shape), shape


def _fit_beside(card: Card, samples: Sequence[Sample]) -> BesideTimes:
    """What launches beside each other take."""
    group: list[tuple[Callable[[BesideTimes], Candidate], float]] = []
    for sample in samples:
        batch = sample.batch
        if batch.prompts is None or batch.decode_load is None:
            continue
        for name in sample.offer.timed_shapes():
            times = tile_times.times_of(card, sample.problem, sample.page_size, name)
            assert times is not None
            shape = sample.offer.timed_shapes()[name]
            shape = replace(shape, times=times.of_group(batch.group_size))
            for label, make in ((name, alone), (f"{name} + others", with_others)):
                if label in sample.us:
                    group.append((_beside(batch, name, shape, make), sample.us[label]))
    if len(group) < _MIN_SAMPLES:
        return card.beside
    fields = [name for name in BesideTimes._fields if name not in _NOT_TOLD]

    def times_of(x: np.ndarray) -> BesideTimes:
        return card.beside._replace(**dict(zip(fields, map(float, x), strict=True)))

    def told(x: np.ndarray) -> np.ndarray:
        built = times_of(x)
        return np.array([make(built).time for make, _ in group])

    start = np.array([getattr(card.beside, name) for name in fields])
    return times_of(least_squares.fit(told, start, np.array([us for _, us in group])))


def _beside(
    batch: Batch, name: str, shape: Any, make: Callable[[Batch, str, Any], Candidate]
) -> Callable[[BesideTimes], Candidate]:
    assert batch.decode_load is not None
    load = batch.decode_load

    def told(times: BesideTimes) -> Candidate:
        return make(replace(batch, decode_load=replace(load, times=times)), name, shape)

    return told


def text_of(card: Card) -> str:
    """The JSON of a card's file, a line a tile."""
    data = {
        "card": {
            "name": card.name,
            "match": list(card.match),
            "arch": card.arch,
            "num_sms": card.num_sms,
            "memory_gb_per_s": card.memory_rate,
            "sm_clock_mhz": card.sm_clock,
        },
        "measured": _measured(card),
        "rates": _rounded(
            {
                "states": card.state_rate,
                "keys": card.key_rate,
                "rows": card.row_rate,
                "fp8_keys": card.fp8_keys,
            }
        ),
        "decode": {k: _rounded(x._asdict()) for k, x in card.decode._asdict().items()},
        "beside": _rounded(card.beside._asdict()),
        "options": {name: [*map(_short, pair)] for name, pair in card.options.items()},
        "widening": _rounded(card.widening._asdict()),
    }
    rows = (_row(key, timed) for key, timed in sorted(card.tiles.items()))
    lines = ",\n".join(f"    {json.dumps(row)}" for row in rows)
    return json.dumps(data, indent=2)[:-2] + f',\n  "tiles": [\n{lines}\n  ]\n}}\n'


def _measured(card: Card) -> dict[str, str] | None:
    rows, _, commit = card.source.partition(" at ")
    return {"rows": rows, "commit": commit} if rows else None


def _row(key: TileKey, timed: TimedTile) -> dict[str, Any]:
    names = TileTimes._fields
    times = {
        name: getattr(timed.times, name) for name in names if name not in ("state", "read", "row")
    }
    dims = [key.head_dim_qk, key.head_dim_vo]
    row: dict[str, Any] = {"kernel": key.kernel, "tile": key.tile, "keys": key.keys, "dims": dims}
    row |= {"area": timed.area, **_rounded(times)}
    return {**row, "capped": [*map(_short, timed.capped)]}


def _short(value: float) -> float:
    return float(f"{value:.3g}")


def _rounded(values: dict[str, float]) -> dict[str, float]:
    return {name: float(f"{value:.4g}") for name, value in values.items()}
