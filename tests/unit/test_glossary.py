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
# Occurrences that are left, by folder and identifier. They may only fall: lower the numbers with
# your change, or add a folder with what it has.
ALLOWED: dict[str, dict[str, int]] = {
    "launch": {"_most": 4, "few": 2, "flat": 2, "place": 8, "places": 2},
    "choose": {"places": 1},
    "schedule": {"most": 1},
    "explanation": {"given": 1},
    "bench": {"answer": 19, "answers": 2, "flat": 7},
    "cli": {"answer": 7, "answers": 3, "places": 2},
}


def identifiers(folder: str) -> Counter[str]:
    """How often each banned identifier is in the code of a folder, strings and comments aside."""
    count: Counter[str] = Counter()
    for path in sorted((PACKAGE / folder).rglob("*.py")):
        text = path.read_text("utf-8")
        for token in tokenize.generate_tokens(io.StringIO(text).readline):
            if token.type == tokenize.NAME and BANNED.fullmatch(token.string):
                count[token.string] += 1
    return count


@pytest.mark.parametrize("folder", ALLOWED)
def test_a_room_says_the_words_of_the_glossary(folder: str) -> None:
    assert dict(identifiers(folder)) == ALLOWED[folder]
