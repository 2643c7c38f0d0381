"""The classes of requests by their packed query rows, and the names of tiles that serve them."""

from __future__ import annotations

from ...core.problem import AttentionProblem

# Row classes, and the most packed query rows of each but the last.
DECODE, VERIFY, SMALL, LARGE = ROW_CLASSES = "decode", "verify", "small", "large"
MAX_ROWS = {DECODE: 16, VERIFY: 32, SMALL: 64}
# Tiles of prefill_sm90 for the last class: PERSISTENT serves all options, with 192 rows or 128, as
# these leave registers; a problem may have others (prefill_sm90), for work lists that fill the card
# badly with it.
PERSISTENT = "persistent"
LARGE_TILES = (
    PERSISTENT,
    "q256_persistent",
    "q192_persistent",
    "q128_persistent",
    "q64_persistent",
    "q192_oneshot",
    "q128_oneshot",
    "q64_oneshot",
    "lean_persistent",
    "lean80",
    "lean32",
    "lean64",
)
# The classes of such rows in batches of so few blocks that each may have an SM of its own.
ONE_AN_SM = {DECODE: "decode_one_an_sm", VERIFY: "verify_one_an_sm"}


def row_class_of(rows: int, problem: AttentionProblem | None = None) -> str:
    """The kernel family for this many packed query rows (query tokens times group size). A problem
    of 8-bit products has one for all: few rows then have the bits of many."""
    if problem is not None and problem.has_tiles_of_prompts:
        return LARGE
    for name, maximum in MAX_ROWS.items():
        if rows <= maximum:
            return name
    return LARGE
