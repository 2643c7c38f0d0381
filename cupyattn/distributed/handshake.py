"""Facts that all ranks must share, compared before the first call that needs them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

_ABSENT = object()


def packed(facts: Mapping[str, Any]) -> bytes:
    """The facts of a rank as bytes. Values are compared as what `str` makes of them."""
    return json.dumps({str(name): _plain(value) for name, value in facts.items()}).encode()


def unpacked(data: bytes) -> dict[str, Any]:
    facts: dict[str, Any] = json.loads(data.decode())
    return facts


def differences(of_ranks: Sequence[Mapping[str, Any]]) -> str | None:
    """A sentence that says which rank differs from rank 0, and in what; None if none does."""
    first = of_ranks[0]
    names = list(dict.fromkeys(name for facts in of_ranks for name in facts))
    found = []
    for name in names:
        wanted = first.get(name, _ABSENT)
        others: dict[str, list[int]] = {}
        for rank, facts in enumerate(of_ranks):
            if (got := facts.get(name, _ABSENT)) != wanted:
                others.setdefault(_words(name, got), []).append(rank)
        clauses = [f"{_ranks(ranks)} {words}" for words, ranks in others.items()]
        if clauses:
            found.append(f"{', '.join(clauses)}, rank 0 {_words(name, wanted)}")
    return "; ".join(found) if found else None


def out_of_step(calls: Sequence[str], rank: int) -> str | None:
    """A sentence that says which ranks are in another call than this one; None if all are in it."""
    own = calls[rank]
    others = [f"rank {i} is in {call}" for i, call in enumerate(calls) if call != own]
    if not others:
        return None
    return (
        f"{', '.join(others)}, and rank {rank} is in {own}; all ranks of a group make the same "
        "calls in the same order, of the same sizes"
    )


def _words(name: str, value: Any) -> str:
    if value is _ABSENT:
        return f"has no {name}"
    return f"has {name} {value}"


def _ranks(ranks: Sequence[int]) -> str:
    """ "rank 1", or "ranks 1, 2 and 5" with the verb's form left as it is."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    if len(ranks) > 6:
        return f"each of {len(ranks)} ranks ({ranks[0]}, {ranks[1]}, ..., {ranks[-1]})"
    return f"each of ranks {', '.join(map(str, ranks[:-1]))} and {ranks[-1]}"


def _plain(value: Any) -> Any:
    """What JSON keeps as it is, and the text of all else."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, (list, tuple)):
        return [_plain(part) for part in value]
    return str(value)
