"""Seeded random merges of states."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

FORMS = ("pair", "in place", "states", "segments")
WIDE = ("bfloat16", "float16", "float32")
HEAD_DIMS = (1, 7, 8, 33, 64, 72, 80, 96, 128, 200, 256, 300, 512, 1040)


@dataclass(frozen=True)
class MergeCase:
    """`num_states` are those of a row; of each row, in "segments". `strides` is "packed", "gaps"
    (rows of whole 16 bytes), "unaligned" or "transposed" (head, then row)."""

    form: str = "pair"
    dtype: str = "bfloat16"
    s_dtype: str = "float32"
    out_dtype: str = ""
    num_rows: int = 5
    num_states: int | tuple[int, ...] = 3
    num_heads: int = 3
    head_dim: int = 64
    strides: str = "packed"
    base_on_e: bool = False
    gives_outputs: bool = True
    has_mask: bool = False
    spread: float = 4.0
    empty: float = 0.2
    seed: int = 0


def random_case(seed: int) -> MergeCase:
    """Everything varies."""
    rng = np.random.default_rng(seed)
    form = FORMS[seed % 4]
    num_rows = int(rng.choice([1, 2, 5, 17]))
    num_states: Any = int(rng.choice([0, 1, 2, 3, 4, 5, 8, 9, 16, 33]))
    if form == "segments":
        num_states = tuple(int(x) for x in rng.integers(0, 12, num_rows))
    return MergeCase(
        form=form,
        dtype=WIDE[int(rng.integers(3))],
        s_dtype=WIDE[int(rng.integers(3))]
        if form != "in place" and rng.random() < 0.2
        else "float32",
        out_dtype=WIDE[int(rng.integers(3))] if rng.random() < 0.2 else "",
        num_rows=num_rows,
        num_states=num_states,
        num_heads=int(rng.choice([1, 2, 3, 8, 20])),
        head_dim=int(rng.choice(HEAD_DIMS)),
        strides=("packed", "gaps", "unaligned", "transposed")[int(rng.integers(4))],
        base_on_e=bool(rng.random() < 0.3),
        gives_outputs=bool(rng.random() < 0.7),
        has_mask=form == "in place" and bool(rng.random() < 0.5),
        spread=float(rng.choice([0.1, 4.0, 60.0])),
        empty=float(rng.choice([0.0, 0.2, 0.9])),
        seed=seed,
    )
