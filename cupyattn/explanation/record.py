"""What an explanation holds, and how it is printed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from html import escape

from .picture import draw
from .timeline import LaunchBlocks

_NO_TIME = "—"


@dataclass(frozen=True)
class Choice:
    """One way to serve the batch.

    Parameters
    ----------
    name
        The kernel and its tiles.
    time
        When all would be done, in microseconds; None where nothing is known of it.
    is_taken
        It is what the plan has.
    """

    name: str
    time: float | None
    is_taken: bool


@dataclass(frozen=True)
class Refusal:
    """What does not serve the batch, and why."""

    name: str
    reason: str


@dataclass(frozen=True)
class PlannedLaunch:
    """One launch of a plan.

    Parameters
    ----------
    kernel, tiles
        The entry of kernels/, and which of its tiles.
    tile_rows, tile_keys
        Of a tile: query tokens times heads of a group, and keys; two of each where blocks are of
        two kinds.
    grid, blocks
        The shape of the launch.
    cluster
        So many blocks share an item.
    is_persistent
        Blocks stay and take one item after another.
    blocks_at_a_time
        That the card runs.
    waves
        How often these are filled; of persistent blocks, the items of each.
    items
        Tiles of rows times parts of their keys, for all key heads.
    splits
        The fewest and the most parts of the keys of a tile of rows.
    key_tiles
        The fewest and the most of a block.
    read_bytes
        Of keys and values that all blocks read; most of it comes from L2 where tiles share keys.
    states, state_bytes
        Partial results.
    merge
        What merges them.
    is_beside
        It begins beside the launch before it; else behind it.
    """

    kernel: str
    tiles: str
    tile_rows: tuple[int, ...]
    tile_keys: tuple[int, ...]
    grid: tuple[int, int, int]
    blocks: int
    cluster: int
    is_persistent: bool
    blocks_at_a_time: int
    waves: float
    items: int
    splits: tuple[int, int]
    key_tiles: tuple[int, int]
    read_bytes: int
    states: int
    state_bytes: int
    merge: str
    is_beside: bool


@dataclass(frozen=True)
class Explanation:
    """Why the kernels of a plan run. `str()` is a table, and `picture()` an SVG of the SMs.

    Parameters
    ----------
    card
        That the plan is for.
    times
        Where its times come from.
    problem, batch
        What is asked, in words.
    key_bytes
        Bytes of all keys and values that rows see, once each.
    key_time
        What memory takes for them, in microseconds; None where its rate is not known.
    candidates
        Every way to serve the batch, the soonest first.
    refusals
        What does not serve it.
    launches
        Of the plan, in their order.
    workspace_bytes, word_bytes
        Of partial results, and of lists that go to the device.
    notes
        What else decided.
    parts
        The explanations of further batches that the wrapper has planned.
    blocks
        How the items of each launch fall to its blocks.
    num_sms
        SMs of the card.
    """

    card: str
    times: str
    problem: str
    batch: str
    key_bytes: int
    key_time: float | None
    candidates: tuple[Choice, ...]
    refusals: tuple[Refusal, ...]
    launches: tuple[PlannedLaunch, ...]
    workspace_bytes: int
    word_bytes: int
    notes: tuple[str, ...] = ()
    parts: tuple[Explanation, ...] = ()
    blocks: tuple[LaunchBlocks, ...] = field(default=(), repr=False, compare=False)
    num_sms: int = field(default=1, repr=False)

    @property
    def taken(self) -> Choice | None:
        """The candidate that the plan has; None where no candidates were compared."""
        return next((x for x in self.candidates if x.is_taken), None)

    def picture(self) -> str:
        """An SVG of the SMs over time: a bar for each block, as the estimate deals them out."""
        time = None if self.taken is None else self.taken.time
        return draw(self.blocks, self.num_sms, time, f"{self.batch}, {self.card.partition(':')[0]}")

    def __str__(self) -> str:
        lines = [*self._heading(), ""]
        lines += [*self._candidates(), ""] if self.candidates else []
        lines += [*_table(_refusals(self.refusals)), ""] if self.refusals else []
        lines += self._launches()
        lines += [f"note: {note}" for note in self.notes]
        for part in self.parts:
            lines += ["", str(part)]
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        return f"<pre>{escape(str(self))}</pre>"

    def _heading(self) -> list[str]:
        keys = f"{_bytes(self.key_bytes)}"
        if self.key_time is not None:
            keys += f", which memory takes {_micros(self.key_time)} for"
        return [
            f"card       {self.card}",
            f"times      {self.times}",
            f"problem    {self.problem}",
            f"batch      {self.batch}",
            f"keys       {keys}",
        ]

    def _candidates(self) -> list[str]:
        rows = [("candidate", "estimated", "")]
        for x in self.candidates:
            time = _NO_TIME if x.time is None else _micros(x.time)
            rows.append((x.name, time, "taken" if x.is_taken else ""))
        return _table(rows)

    def _launches(self) -> list[str]:
        if not self.launches:
            return ["nothing is launched"]
        rows = [_COLUMNS, *(_cells(launch) for launch in self.launches)]
        sizes = f"workspace {_bytes(self.workspace_bytes)}, lists {_bytes(self.word_bytes)}"
        return [*_table(rows), sizes]


_COLUMNS = (
    "launch",
    "rows x keys",
    "grid",
    "blocks",
    "at a time",
    "waves",
    "parts of keys",
    "key tiles",
    "keys read",
    "states",
    "merged by",
)


def _cells(x: PlannedLaunch) -> tuple[str, ...]:
    tiles = zip(x.tile_rows, x.tile_keys, strict=True)
    name = f"{'+ ' if x.is_beside else ''}{x.kernel} ({x.tiles})"
    blocks = f"{x.blocks:,}" + (f" in clusters of {x.cluster}" if x.cluster > 1 else "")
    return (
        name,
        ", ".join(f"{rows} x {keys}" for rows, keys in tiles),
        " x ".join(map(str, x.grid)),
        blocks + (" persistent" if x.is_persistent else ""),
        f"{x.blocks_at_a_time:,}",
        f"{x.waves:.2f}",
        _from_to(x.splits),
        _from_to(x.key_tiles),
        _bytes(x.read_bytes),
        f"{x.states:,} ({_bytes(x.state_bytes)})" if x.states else _NO_TIME,
        x.merge or _NO_TIME,
    )


def _refusals(refusals: Sequence[Refusal]) -> list[tuple[str, ...]]:
    return [("not served by", "because"), *((x.name, x.reason) for x in refusals)]


def _table(rows: Sequence[Sequence[str]]) -> list[str]:
    """Columns of text, each as wide as its widest cell."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [
        "  ".join(cell.ljust(n) for cell, n in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]
    return [lines[0], "-" * max(map(len, lines)), *lines[1:]]


def _from_to(numbers: tuple[int, int]) -> str:
    minimum, maximum = numbers
    return f"{minimum:,}" if minimum == maximum else f"{minimum:,} to {maximum:,}"


def _micros(time: float) -> str:
    return f"{time:,.1f} us"


def _bytes(size: int) -> str:
    if size >= 1 << 20:
        return f"{size / 2**20:,.{0 if size >= 10 << 20 else 1}f} MiB"
    return f"{size / 1024:,.1f} KiB" if size >= 1 << 10 else f"{size} B"
