"""How many persistent blocks leave room for the launch beside them."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from cupyattn.schedule import Masking
from cupyattn.schedule.batch import BatchRequests
from cupyattn.schedule.mixed import Kinds
from cupyattn.schedule.sm_partition import persistent_grid_size
from cupyattn.schedule.tile_shape import TileShape

LARGE, SMALL = TileShape(128, 128, 132, 4.0), TileShape(16, 64, 264, 0.25)


def kind(shape: TileShape, *lengths: tuple[int, int]) -> Kinds:
    """Requests of (rows, keys)."""
    rows, keys = np.array(lengths, np.int64).reshape(-1, 2).T
    starts = [np.cumsum(x) - x for x in (rows, keys)]
    return [(BatchRequests(rows, keys, *starts), shape)]


def blocks(chunks: list[tuple[int, int]], decodes: list[tuple[int, int]]) -> int:
    kernels = [kind(LARGE, *chunks), kind(SMALL, *decodes)]
    return persistent_grid_size(kernels, 4, Masking(-1, 0), 256, 2)


def test_a_chunk_beside_many_decodes() -> None:
    """Measured on an H200: 108 is the best of 88 to 132 for this batch."""
    assert blocks([(2048, 8192)], [(1, 4096)] * 63) == 108


def test_nothing_to_do_leaves_nothing() -> None:
    assert blocks([(2048, 8192)], []) == 132
    assert blocks([], [(1, 4096)]) == 132


def test_a_short_decode_is_not_worth_an_sm() -> None:
    assert blocks([(2048, 8192)], [(1, 512)]) == 132


@given(st.integers(65, 5000), st.integers(1, 500), st.integers(1, 60_000))
def test_more_decodes_take_more_but_never_most(rows: int, count: int, keys: int) -> None:
    found = [blocks([(rows, rows)], [(1, keys)] * n) for n in (count, 2 * count)]
    assert 132 >= found[0] >= found[1] > 132 // 2
