"""Batches of prompts and decodes, and tiles that are offered for them, for tests of the choice."""

from __future__ import annotations

from collections.abc import Sequence

from cupyattn.choose.candidates import Batch, Candidate, Parts, best_of
from cupyattn.launch.tiles.row_classes import DECODE, LARGE, PERSISTENT
from cupyattn.schedule.batch import TileWork
from cupyattn.schedule.sm_partition import DecodeLoad
from cupyattn.schedule.tile_shape import TileShape


def batch_of(works: TileWork, load: DecodeLoad | None, num_kv_heads: int, group_size: int) -> Batch:
    """Prompts, and decodes that launches behind theirs may serve."""
    parts: Parts = [(LARGE, works)] + ([(DECODE, works)] if load is not None else [])
    prompts = None if load is None else works
    return Batch(parts, works, num_kv_heads, group_size, 0, 512, load, prompts)


def choose(batch: Batch, shapes: Sequence[TileShape]) -> Candidate:
    """The soonest of these tiles, by the names "large", "1", "2", ..."""
    return best_of(
        batch, {str(index) if index else PERSISTENT: x for index, x in enumerate(shapes)}
    )
