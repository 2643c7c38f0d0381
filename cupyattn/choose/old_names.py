"""Names that tiles and candidates had once. Measured rows and cards that `cupyattn tune` wrote then
hold them, and stay as they are: what reads them translates."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

_TILES = {
    "large": "persistent",
    "broad": "q128_persistent",
    "twin": "q64_persistent",
    "tall": "q192_oneshot",
    "middle": "q128_oneshot",
    "short": "q64_oneshot",
    "queue": "lean_persistent",
    "lean": "lean32",
    "flat": "lean64",
}
_CANDIDATES = (
    (r"by rows", "by row class"),
    (r"(decode|verify) alone", r"\1 one_an_sm"),
    (r"(decode|verify) merged apart", r"\1 merge_launch"),
    (r"(decode|verify) x(\d)", r"\1 cluster\2"),
)
_FIELDS = {
    "alone": "single_block_factor",
    "own_keys": "mha_factor",
    "least_share": "min_share",
}


def fields(record: Mapping[str, Any]) -> dict[str, Any]:
    """A record of a card by today's names of its fields."""
    return {_FIELDS.get(name, name): value for name, value in record.items()}


def tile(name: str, keys: str, head_dims: tuple[int, int]) -> str:
    """Today's name of a tile of prefill_sm90 for such keys and head dims. Two names did not say
    what a tile was: it depended on the head dims."""
    if name == "broad" and max(head_dims) <= 80:
        return "q192_persistent"
    if name == "lean" and max(head_dims) <= 64:
        return "lean80" if keys == "ragged" else "lean64"
    return _TILES.get(name, name)


def candidate(name: str, keys: str, head_dims: tuple[int, int]) -> str:
    """Today's name of a candidate."""
    for pattern, replacement in _CANDIDATES:
        if re.fullmatch(pattern, name):
            return re.sub(pattern, replacement, name)
    first, *others = name.split(" + ")
    return " + ".join((tile(first, keys, head_dims), *others))
