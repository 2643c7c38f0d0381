"""Rooms speak the words of docs/glossary.md: identifiers that say less than a word of the field."""

from __future__ import annotations

import io
import re
import tokenize
from collections import Counter
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "cupyattn"
# What to write instead is in brackets.
BANNED = re.compile(
    r"found"  # (cached, candidate, result)
    r"|made"  # (built, schedule)
    r"|given"  # (arguments)
    r"|places?"  # (index, offset, item, folder)
    r"|few|many"  # (decodes, prompts)
    r"|answers?"  # (output)
    r"|_?(?!least_squares|most_common)(most|least)(_\w+)?"  # (max_x, min_x, a bound)
    r"|_?(MOST|LEAST)_\w+"  # (MAX_X, MIN_X)
    r"|Streams|own_keys"  # (DecodeLoad, mha_factor)
    r"|broad|twin|tall|flat|queue|short"  # (a tile by what it is)
)
# Rooms that are not held to it yet: folders and files of the package.
LATER = {
    "distributed",
}


def rooms() -> list[str]:
    every = {path.stem for path in PACKAGE.iterdir() if path.suffix == ".py" or path.is_dir()}
    return sorted(every - {"__pycache__"} - LATER)


def identifiers(room: str) -> Counter[str]:
    """How often each banned identifier is in the code of a room, strings and comments aside."""
    count: Counter[str] = Counter()
    for path in sorted([*PACKAGE.glob(f"{room}.py"), *(PACKAGE / room).rglob("*.py")]):
        text = path.read_text("utf-8")
        for token in tokenize.generate_tokens(io.StringIO(text).readline):
            if token.type == tokenize.NAME and BANNED.fullmatch(token.string):
                count[token.string] += 1
    return count


@pytest.mark.parametrize("room", rooms())
def test_a_room_says_the_words_of_the_glossary(room: str) -> None:
    assert not identifiers(room)
