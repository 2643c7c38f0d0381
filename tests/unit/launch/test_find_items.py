"""What the host says of launches whose blocks find their items."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from cupyattn.choose import candidates
from cupyattn.core.dtypes import bfloat16
from cupyattn.core.problem import AttentionProblem
from cupyattn.launch.attention import find_items, merge_splits
from cupyattn.launch.attention.plan_batch import IndexFormat, Lengths
from cupyattn.launch.instances import LEVELS, SHARED_BYTES, instances
from cupyattn.launch.tiles.config import FOUND_PARTS
from cupyattn.launch.tiles.row_classes import DECODE
from cupyattn.launch.tiles.select import tile_config
from cupyattn.schedule.tile_shape import TileShape

LENGTHS = Lengths(
    num_requests=1,
    num_rows=1,
    qo_len=-1,
    max_qo_len=65,
    kv_step=0,
    max_kv_len=1,
    likely_kv_len=1,
    formats=(IndexFormat(),) * 5,
)


def of(rows: np.ndarray, keys: np.ndarray, spare: int = 0, **changes: Any) -> Lengths:
    """What is known of requests of so many rows and keys, with rows of nobody behind them."""
    num_rows, num_keys = int(rows.sum()) + spare, int(keys.sum())
    longest = 1 << max(0, int(keys.max()) - 1).bit_length()
    named = {"num_requests": rows.size, "num_rows": num_rows, "kv_room": num_keys}
    named |= {"max_kv_len": num_keys, "likely_kv_len": min(num_keys, longest)}
    return LENGTHS._replace(**(named | changes))


@pytest.mark.parametrize("seed", range(200))
def test_no_lengths_have_more_tiles_than_places(seed: int) -> None:
    rng = np.random.default_rng(seed)
    count = int(rng.integers(1, 90))
    rows = rng.integers(0, (3, 40, 900)[seed % 3], count)
    rows[rng.integers(count)] += 1
    group, tile = int(rng.integers(1, 17)), int(rng.choice([16, 48, 64, 126, 128, 192]))
    lengths = of(rows, rows, int(rng.integers(0, 50)))
    most = find_items._max_tiles(lengths, group, tile)
    tiles = -(-rows * group // tile)
    assert tiles.sum() <= most
    # By offsets a request has no fewer places than tiles, and the last ends within all.
    offsets = np.concatenate([[0], rows.cumsum()])
    places = offsets * group // tile + np.arange(count + 1)
    assert (np.diff(places) >= tiles).all()
    if count > find_items._TOGETHER:
        assert places[-1] <= most
    # One request, or equally many rows of each, have no spare ones.
    same = of(rows[:1] * 0 + 7, rows[:1] * 0 + 7)
    assert find_items._max_tiles(same, group, tile) == -(-7 * group // tile)
    equal = lengths._replace(num_rows=9 * count, qo_len=9)
    if count <= find_items._TOGETHER:
        assert find_items._max_tiles(equal, group, tile) == count * -(-9 * group // tile)


def test_likely_lengths_are_those_that_shapes_say() -> None:
    ones = np.ones(4, np.int64)
    # One request is known.
    assert find_items._likely(of(333 * ones[:1], 333 * ones[:1])) == (1, 333, 333, 333, 333)
    # Requests whose mean is near the bound are taken for equal.
    assert find_items._likely(of(300 * ones, 300 * ones)) == (4, 300, 300, 300, 300)
    # One may be as long as the bound, rounded up to a power of two.
    uneven = np.array([1000, 30, 20, 10])
    assert find_items._likely(of(uneven, uneven)) == (4, 768, 768, 97, 97)
    # Keys of their own say nothing of rows.
    assert find_items._likely(of(8 * ones, uneven)) == (4, 8, 768, 8, 97)
    # A table has room for more than there is.
    table = {"kv_step": 512, "max_kv_len": 8192, "likely_kv_len": 8192, "kv_room": 8192}
    likely = find_items._likely(of(40 * ones, 900 * ones, qo_len=40, **table))
    assert likely == (4, 40, 4096, 40, 2048)


def test_tiles_by_levels_read_keys_again_that_l2_does_not_hold() -> None:
    def reads_again(count: int, heads: int, tiles_each: int) -> bool:
        requests = SimpleNamespace(kv_len=np.full(count, 848))
        of = SimpleNamespace(num_tiles=count * tiles_each)
        works = SimpleNamespace(requests=requests, of=lambda shape: of)
        batch: Any = SimpleNamespace(works=works, num_kv_heads=heads, key_bytes=512)
        return candidates._reads_again(batch, cast(TileShape, None))

    assert reads_again(8, 32, 5)
    assert not reads_again(8, 8, 5)  # 28 MB
    assert not reads_again(8, 32, 2)
    assert not reads_again(1, 512, 5)  # tiles of one request follow each other


def test_merges_wait_for_a_list_that_blocks_write() -> None:
    """A planner's list is older than the launch before a merge, which is looked up beside that
    launch; what blocks find they list in the launch itself."""
    problem = AttentionProblem(bfloat16, bfloat16, bfloat16, 128, 128, paged=True)
    planned = tile_config(problem, DECODE, SHARED_BYTES["sm_90a"], True, "sm_90a", 16)
    found = planned.finding(FOUND_PARTS)
    assert "kFindsItems" not in merge_splits.config(problem, planned)
    assert merge_splits.config(problem, found)["kFindsItems"] is True
    assert ("merge_splits", merge_splits.config(problem, found)) in instances(
        LEVELS["standard"], "sm_90a"
    )
