"""The classes of requests by their packed query rows, and the names of tiles that serve them."""

from __future__ import annotations

# Row classes, and the most packed query rows of each but the last.
DECODE, VERIFY, SMALL, LARGE = ROW_CLASSES = "decode", "verify", "small", "large"
MOST_ROWS = {DECODE: 16, VERIFY: 32, SMALL: 64}
# Tiles of the last class: the one for long launches, and others for work lists that fill the card
# badly with it.
LARGE_TILES = (LARGE, "broad", "twin", "tall", "middle", "short", "queue", "lean", "flat")
# The classes of such rows in batches of so few blocks that each may have an SM of its own.
FEW = {DECODE: "few decode", VERIFY: "few verify"}


def row_class(rows: int) -> str:
    """The kernel family for this many packed query rows (query tokens times group size)."""
    for name, most in MOST_ROWS.items():
        if rows <= most:
            return name
    return LARGE
