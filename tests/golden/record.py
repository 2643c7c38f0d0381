"""The record of calls as a file, and what differs from it, by part."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from .cards import Kernel, Launch
from .doors import Call

PATH = Path(__file__).parent / "calls.json"
PARTS = ("number of launches", "kernels", "shapes", "params", "places", "words", "second call")
# One launch: kernel, shape, and the digests of its params, of what these point to by name, and of
# the words that the host has written there.
Entry = list[str]
# A call: its card, what refused it, a digest of its launches when it is made again, its launches.
Entries = list[Any]


class Difference(NamedTuple):
    """A call that is not as recorded: in which PARTS, and both."""

    call: Call
    parts: tuple[str, ...]
    was: Entries | None
    now: Entries


def digest(content: bytes | str, digits: int = 6) -> str:
    raw = content.encode() if isinstance(content, str) else content
    return hashlib.blake2b(raw, digest_size=16).hexdigest()[:digits]


def kernel_name(kernel: Kernel) -> str:
    return f"{kernel.name} {digest(kernel.config)}"


def shape_text(launch: Launch) -> str:
    x, y, z, *block, shared, cluster, is_early = launch.shape
    threads = "x".join(str(n) for n in block if n > 1) or "1"
    text = f"{x}x{y}x{z} of {threads}, {shared} B"
    return text + f", clusters of {cluster}" * (cluster > 1) + ", early" * is_early


def entry_of(launch: Launch) -> Entry:
    places = ";".join(f"{offset} {place}" for offset, place in launch.places)
    return [
        kernel_name(launch.kernel),
        shape_text(launch),
        digest(launch.params.rstrip(b"\0")),
        digest(places),
        digest(launch.words) if launch.words else "",
    ]


def entries_of(call: Call) -> Entries:
    again = json.dumps([*map(entry_of, call.again)])
    return [
        call.card,
        call.error,
        digest(again) if call.again else "",
        *map(entry_of, call.launches),
    ]


def _parts(was: Entries | None, now: Entries) -> tuple[str, ...]:
    if was is None or was[:2] != now[:2] or len(was) != len(now):
        return (PARTS[0],)
    columns = zip(zip(*was[3:], strict=True), zip(*now[3:], strict=True), strict=True)
    found = tuple(PARTS[1 + i] for i, (a, b) in enumerate(columns) if a != b)
    return found + PARTS[-1:] * (was[2] != now[2])


def differences(recorded: dict[str, Entries], calls: Iterable[Call]) -> list[Difference]:
    """The calls that are not as recorded, by seed."""
    found = []
    for call in calls:
        was, now = recorded.get(str(call.seed)), entries_of(call)
        if was != now:
            found.append(Difference(call, _parts(was, now), was, now))
    return found


def _launch_text(entry: Entry) -> str:
    kernel, shape, params, places, words = entry
    return f"{kernel}, {shape}; params {params}, places {places}, words {words or 'none'}"


def _side(name: str, entries: Entries | None) -> list[str]:
    if entries is None:
        return [f"  {name}: not recorded"]
    card, error, again, *launches = entries
    head = f"  {name}: {card}" + f", refused by {error}" * bool(error)
    head += f"; second call {again}" * bool(again)
    return [head, *(f"    {i}. {_launch_text(x)}" for i, x in enumerate(launches))]


def told(found: Sequence[Difference], count: int, most: int = 4) -> str:
    """What differs, in words: how many calls of `count` in which parts, and the first few."""
    if not found:
        return ""
    counts = Counter(part for x in found for part in x.parts)
    parts = ", ".join(f"{part} of {counts[part]}" for part in PARTS if counts[part])
    lines = [f"{found[0].call.door}: {len(found)} of {count} calls are not as recorded: {parts}."]
    for x in found[:most]:
        lines.append(f"call {x.call.seed} differs in {', '.join(x.parts)}: {x.call.text}")
        lines += [*_side("was", x.was), *_side("now", x.now)]
    if len(found) > most:
        lines.append(f"and {len(found) - most} more: seeds {[x.call.seed for x in found[most:]]}")
    lines.append(
        "If it is meant, python -m tests.golden --write records it and sums it up for the commit; "
        f"python -m tests.golden --against REF '{found[0].call.door}' shows the bytes of both."
    )
    return "\n".join(lines)


def load() -> dict[str, dict[str, Entries]]:
    return json.loads(PATH.read_text())["doors"] if PATH.exists() else {}


def save(doors: dict[str, dict[str, Entries]], path: Path = PATH) -> None:
    """One line a call, so that the file's own diff tells calls."""
    lines = ['{"doors": {']
    for i, (door, calls) in enumerate(doors.items()):
        lines.append(f"{json.dumps(door)}: {{")
        rows = [
            f"{json.dumps(seed)}: {json.dumps(x, separators=(',', ':'))}"
            for seed, x in calls.items()
        ]
        lines += [row + "," for row in rows[:-1]] + rows[-1:]
        lines.append("}" + "," * (i < len(doors) - 1))
    path.write_text("\n".join([*lines, "}}", ""]))
