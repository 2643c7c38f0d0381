"""What plans know of tiles: when blocks form clusters, and what their parts cost."""

from __future__ import annotations

import numpy as np
import pytest

from cupyattn.schedule.balance import Work, best_chunk
from cupyattn.schedule.tile_shape import TileShape, cluster_size

FEW = TileShape(16, 128, 132, 0.25, 0.03, rows_at_a_time=8)


@pytest.mark.parametrize(
    ("num_items", "key_tiles", "wanted"),
    [
        (8, 32, 8),
        (1, 256, 8),
        (16, 4, 4),
        (16, 2, 2),
        (1, 1, 1),  # nothing to share
        (17, 32, 1),  # no room for eight blocks an item
        (8, 1024, 1),  # memory is busy anyway
    ],
)
def test_few_items_get_clusters(num_items: int, key_tiles: int, wanted: int) -> None:
    assert cluster_size(num_items, key_tiles, 132) == wanted


def test_a_cluster_is_a_block_of_more_warps() -> None:
    shape = FEW.in_clusters(8, 15)
    assert (shape.tile_kv, shape.num_slots, shape.cluster) == (1024, 15, 8)
    assert shape.rows_at_a_time == 64 and shape.tile_q == FEW.tile_q


@pytest.mark.parametrize(
    ("keys", "parts"),
    [(1024, 1), (4096, 4), (8192, 4), (32768, 8)],
)
def test_parts_of_one_key_head(keys: int, parts: int) -> None:
    """As measured on an H200: a part saves tiles and costs a merge."""
    shape = FEW.in_clusters(8, 15)
    tiles = -(-keys // shape.tile_kv)
    chunk = best_chunk(Work(None, tiles, tiles, 1), 15, shape.costs(8), shape.least_part(tiles, 8))
    assert -(-tiles // chunk) in (parts, parts + 1, parts - 1)


def test_many_heads_are_not_split_beyond_their_clusters() -> None:
    shape = FEW.in_clusters(8, 15)
    work = Work(None, 16, 16, 1)
    assert best_chunk(work, 15 // 8, shape.costs(8)) == 16


def test_parts_that_a_launch_merges_cost_the_blocks_nothing() -> None:
    shape = TileShape(32, 64, 264, 0.25, 0.03, rows_at_a_time=4, least_share=0.52)
    apart = shape.merged_apart()
    assert not apart.is_fused and apart.cost_of_part(32) == 0.0
    assert apart.least_part(64, 32) == 1
    assert apart.costs(32).merge < shape.costs(32).merge + 2 and apart.costs(32).part == 0.0
    lengths = np.full(4, 128)
    work = Work(lengths, 128, int(lengths.sum()), 4)
    assert best_chunk(work, 33, apart.costs(32)) < 128
