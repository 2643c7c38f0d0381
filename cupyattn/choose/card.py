"""What kernels take on one card: data of `cards/*.json`, scaled for cards that nobody measured.

`python -m benchmarks fit` writes these files from measured rows, and `cupyattn tune` one of the
user's own card, which goes before them (tuned.py). A card without a file takes the nearest of its
architecture: what memory takes is scaled by the rate of its memory, and what products take by its
clock. (More SMs need no scale: they are more slots.) An architecture of which no card was measured
has a file that holds the rates of one card, and says which measured one it is taken to be like.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

from ..core.device import NO_GPU, DeviceProps
from ..errors import ArgumentError
from ..schedule.makespan import TileTimes
from ..schedule.sm_partition import BesideTimes
from ..schedule.tile_shape import DecodeKinds, DecodeTimes
from . import old_names, tuned

# What may change logits besides a scale and a cap (tile_times.option_names).
OPTIONS = "rope_llama", "alibi", "mask", "rows"
FOLDER = Path(__file__).with_name("cards")
# The fields of a card's records that memory decides; all others are latencies, or products.
_MEMORY_TIMES = ("key_tile",)
_MEMORY_RATES = ("stream_rate", "memory_rate", "rate_beside_products", "tiny_page_rate")


class TileKey(NamedTuple):
    """A tile that was timed: of which kernel, its name there, and the keys and head dims."""

    kernel: str
    tile: str
    keys: str
    head_dim_qk: int
    head_dim_vo: int


class TimedTile(NamedTuple):
    """What a timed tile takes.

    area    its rows of Q times its keys
    capped  what a soft cap adds to a launch, and times as long a key tile takes
    """

    times: TileTimes
    area: int
    capped: tuple[float, float]


class WideningTimes(NamedTuple):
    """What a launch that widens rows of 8 bits ahead of attention takes: itself, in microseconds,
    and bytes that it reads and writes in one."""

    launch: float = 2.5
    rate: float = 2.8e6

    def time(self, num_elements: int) -> float:
        """The launch takes this for so many elements, each a byte that becomes two."""
        return self.launch + 3 * num_elements / self.rate


_SOME_WIDENING = WideningTimes()


@dataclass(frozen=True)
class Card:
    """The times of one card.

    memory_rate  of its memory, in GB/s, and `sm_clock` of its SMs, in MHz; 0: not known
    source       the measured rows, and the commit that they come from; "" if nobody measured it
    state_rate   bytes of states that all SMs write and read in a microsecond
    key_rate     bytes of keys that blocks of prefill read in a microsecond
    fp8_keys     times as long blocks of decode take for keys of fp8 as for as many bytes of 16 bits
    row_rate     bytes of rows of Q and the output that they read and write in a microsecond
    options      what an option adds to a launch of prefill, and times as long a key tile takes
    scaled_from  the card that was measured, if this one was not
    widening     of rows of 8 bits
    """

    name: str
    match: tuple[str, ...]
    arch: str
    num_sms: int
    memory_rate: float
    sm_clock: float
    source: str
    state_rate: float
    key_rate: float
    row_rate: float
    fp8_keys: float
    decode: DecodeKinds
    beside: BesideTimes
    options: Mapping[str, tuple[float, float]]
    tiles: Mapping[TileKey, TimedTile]
    scaled_from: str = ""
    widening: WideningTimes = _SOME_WIDENING

    def slower(self, factor: float) -> Card:
        """The times of a card on which all takes so many times as long."""
        beside = _scaled(self.beside, 1 / factor, _BESIDE_RATES)
        return replace(
            self,
            state_rate=self.state_rate / factor,
            key_rate=self.key_rate / factor,
            row_rate=self.row_rate / factor,
            decode=DecodeKinds._make(_scaled(x, factor, _DECODE_TIMES) for x in self.decode),
            beside=_scaled(beside, factor, _BESIDE_TIMES),
            widening=WideningTimes(factor * self.widening.launch, self.widening.rate / factor),
            options={name: (factor * us, times) for name, (us, times) in self.options.items()},
            tiles={
                key: timed._replace(
                    times=_scaled(timed.times, factor, _TILE_TIMES),
                    capped=(factor * timed.capped[0], timed.capped[1]),
                )
                for key, timed in self.tiles.items()
            },
        )

    def scaled_to(self, props: DeviceProps) -> Card:
        """The times that a card of these properties should have."""
        memory = _ratio(props.memory_rate, self.memory_rate)
        clock = _ratio(props.sm_clock, self.sm_clock)
        decode = DecodeKinds._make(_scaled(x, 1 / memory, _MEMORY_TIMES) for x in self.decode)
        beside = _scaled(self.beside, memory, _MEMORY_RATES)
        tiles = {
            key: timed._replace(times=_scaled(timed.times, 1 / clock, ("item", "key_tile")))
            for key, timed in self.tiles.items()
        }
        return replace(
            self,
            name=props.name,
            match=(props.name,),
            arch=props.arch,
            num_sms=props.num_sms,
            memory_rate=props.memory_rate,
            sm_clock=props.sm_clock,
            source="",
            state_rate=memory * self.state_rate,
            key_rate=memory * self.key_rate,
            row_rate=memory * self.row_rate,
            decode=decode,
            beside=beside,
            tiles=tiles,
            scaled_from=self.scaled_from or self.name,
            widening=self.widening._replace(rate=memory * self.widening.rate),
        )


# --- What times and rates there are ---

_TILE_TIMES = ("launch", "item", "key_tile", "merge", "state", "read", "row")
_DECODE_TIMES = ("start", "row", "block", "merge", "part", "key_tile")
_BESIDE_RATES = (*_MEMORY_RATES, "rate_of_block")
_BESIDE_TIMES = (
    "start",
    "latency",
    "further_launch",
    "longest",
    "item",
    "tiny_page_item",
    "late_merge",
    "followed",
)


def _ratio(wanted: float, measured: float) -> float:
    """Times as much of something as on the measured card; 1 where either is not known."""
    return wanted / measured if wanted and measured else 1.0


def _scaled(record: Any, factor: float, fields: tuple[str, ...]) -> Any:
    return record._replace(**{name: factor * getattr(record, name) for name in fields})


_used: Card | None = None


@contextlib.contextmanager
def using(card: Card) -> Iterator[None]:
    """Launchers that are made meanwhile plan by this card, on every device: for measurements. Not
    for threads."""
    global _used
    before, _used = _used, card
    try:
        yield
    finally:
        _used = before


def card_of(props: DeviceProps) -> Card:
    """The card of a device: as it was measured here, or by its name; else the nearest of its
    architecture, scaled."""
    return _used or known(props).card


class Known(NamedTuple):
    """The card of a device, and the file that `cupyattn tune` wrote of it here, if it did."""

    card: Card
    file: Path | None = None


@lru_cache(maxsize=64)
def known(props: DeviceProps) -> Known:
    """What is known of a device."""
    if own := tuned.find(props, read):
        card, file = own
        return Known(card, file)
    return Known(packaged(props))


def packaged(props: DeviceProps) -> Card:
    """The card of a device by the files of this package alone."""
    for card in shipped():
        if props.name in card.match:
            return card
    result = [card for card in (*shipped(), *unmeasured()) if card.arch == props.arch]
    return min(result or shipped(), key=lambda card: _distance(card, props)).scaled_to(props)


def _distance(card: Card, props: DeviceProps) -> tuple[float, float]:
    memory = _ratio(props.memory_rate, card.memory_rate)
    return max(memory, 1 / memory), abs(card.num_sms - props.num_sms)


@lru_cache(maxsize=1)
def shipped() -> tuple[Card, ...]:
    """The cards of this package that have times of their own, by name."""
    return tuple(read(text, name) for name, text in _texts().items() if not _like(text))


@lru_cache(maxsize=1)
def unmeasured() -> tuple[Card, ...]:
    """A card of each architecture of which none was measured, by the times that it should have."""
    texts = _texts()
    result = []
    for text in texts.values():
        if name := _like(text):
            facts = json.loads(text)["card"]
            props = replace(
                NO_GPU,
                name=facts["name"],
                arch=facts["arch"],
                num_sms=facts["num_sms"],
                memory_rate=float(facts["memory_gb_per_s"]),
                sm_clock=float(facts["sm_clock_mhz"]),
            )
            result.append(read(texts[name], name).scaled_to(props))
    return tuple(result)


def _texts() -> dict[str, str]:
    return {path.stem: path.read_text("utf-8") for path in sorted(FOLDER.glob("*.json"))}


def _like(text: str) -> str:
    """The card that a file of an unmeasured one names."""
    return str(json.loads(text).get("like", ""))


def read(text: str, where: str) -> Card:
    """The card of a file's text. ArgumentError with a sentence if it is not one."""
    try:
        return _card(json.loads(text))
    except (AttributeError, KeyError, RecursionError, TypeError, ValueError) as error:
        raise ArgumentError(
            f"{where}: this is no file of a card's times ({type(error).__name__}: {error}); "
            "delete it, or write it anew with `cupyattn tune`"
        ) from error


def _card(data: dict[str, Any]) -> Card:
    card, measured = data["card"], data["measured"] or {}
    decode = {kind: DecodeTimes(**old_names.fields(x)) for kind, x in data["decode"].items()}
    beside = {name: float(data["beside"][name]) for name in BesideTimes._fields}
    return Card(
        name=str(card["name"]),
        match=tuple(map(str, card["match"])),
        arch=str(card["arch"]),
        num_sms=int(card["num_sms"]),
        memory_rate=float(card["memory_gb_per_s"]),
        sm_clock=float(card["sm_clock_mhz"]),
        source=" at ".join(str(measured[x]) for x in ("rows", "commit") if x in measured),
        state_rate=float(data["rates"]["states"]),
        key_rate=float(data["rates"]["keys"]),
        row_rate=float(data["rates"]["rows"]),
        fp8_keys=float(data["rates"]["fp8_keys"]),
        decode=DecodeKinds(**decode),
        beside=BesideTimes(**beside),
        options={name: _pair(data["options"][name]) for name in OPTIONS},
        tiles=dict(_tile(row) for row in data["tiles"]),
        widening=WideningTimes(**data.get("widening", {})),
    )


def _tile(row: dict[str, Any]) -> tuple[TileKey, TimedTile]:
    row = old_names.fields(row)
    names = [name for name in TileTimes._fields if name in row]
    times = TileTimes(**{name: float(row[name]) for name in names})
    head_dim_qk, head_dim_vo = map(int, row["dims"])
    tile = old_names.tile(row["tile"], row["keys"], (head_dim_qk, head_dim_vo))
    key = TileKey(row["kernel"], tile, row["keys"], head_dim_qk, head_dim_vo)
    return key, TimedTile(times, int(row["area"]), _pair(row["capped"]))


def _pair(numbers: Any) -> tuple[float, float]:
    first, second = map(float, numbers)
    return first, second
