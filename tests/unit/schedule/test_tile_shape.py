"""What plans know of tiles: how soon blocks of decode are done, and what their parts cost."""

from __future__ import annotations

import numpy as np
import pytest

from cupyattn.schedule.balance import Work, best_chunk
from cupyattn.schedule.tile_shape import (
    DecodeKinds,
    DecodeTimes,
    DecodeWork,
    TileShape,
    decode_time,
)

# Fitted to the times of an H200.
TIMES = DecodeKinds(
    cluster=DecodeTimes(3.9, 0.035, 5.75, 0.5, 3.65, 0.06, 2.2),
    one_an_sm=DecodeTimes(3.05, 0.06, 4.55, 0.485, 3.8, 0.037, 2.2),
    two_an_sm=DecodeTimes(5.35, 0.02, 1.2, 0.44, 4.95, 0.064, 2.2),
    merged_apart=DecodeTimes(7.9, 0.05, 3.75, 0.525, 1.2, 0.001, 2.2),
)
FEW = TileShape(16, 128, 132, 0.25, 0.03, rows_at_a_time=8, num_sms=132)
USUAL = TileShape(16, 64, 264, 0.25, 0.03, rows_at_a_time=4, min_share=0.52, num_sms=132)
# As many clusters run at a time on an H200.
OFFERED = {
    "usual": USUAL,
    "alone": FEW.timed(TIMES.one_an_sm),
    "clusters of 8": FEW.in_clusters(8, 15, TIMES.cluster),
    "clusters of 4": FEW.in_clusters(4, 30, TIMES.cluster),
}


def time_of(shape: TileShape, *facts: int) -> float:
    return decode_time(shape, TIMES.of(shape), DecodeWork(*facts))


@pytest.mark.parametrize(
    ("keys", "kv_heads", "rows", "wanted"),
    [
        ([1024], 1, 8, "clusters of 8"),  # 10.6 us, alone 10.9, usual 11.7
        ([1658] * 12, 1, 8, "clusters of 8"),  # 14.0, 14.4, 15.1
        ([11_575], 8, 12, "clusters of 8"),  # 17.9, 20.1, 20.8
        ([4096] * 4, 4, 7, "clusters of 4"),  # 20.5, 21.3, 22.3
        ([8905, 19_828, 20_074], 2, 2, "alone"),  # 26.8, clusters of 8 27.3
        ([1294, 8315, 2600, 4100, 3000], 1, 4, "alone"),  # 12.2, clusters of 8 13.3
        ([460] * 80, 1, 5, "alone"),  # 14.5, usual 15.1
        ([1961] * 93, 1, 5, "alone"),  # 37.6, usual 40.4
        ([191] * 14, 8, 4, "usual"),  # 11.2, alone 12.1
    ],
)
def test_the_soonest_blocks_of_few_requests(
    keys: list[int], kv_heads: int, rows: int, wanted: str
) -> None:
    """As measured on an H200, 128 columns in pages."""
    facts = len(keys), max(keys), sum(keys), kv_heads, rows
    times = {
        name: time_of(shape, *facts)
        for name, shape in OFFERED.items()
        if len(keys) * kv_heads <= shape.num_slots
    }
    assert min(times, key=times.__getitem__) == wanted


def test_uneven_requests_come_in_waves_of_clusters() -> None:
    """Three requests of four heads are 32 parts. Measured on an H100: 146 us, usual 133."""
    facts = 3, 63_937, 62_502 + 63_937 + 37_988, 4, 5
    even = 3, 63_937, 3 * 63_937, 4, 5
    for name, is_later in (("usual", False), ("alone", False), ("clusters of 8", True)):
        time, usual = (time_of(OFFERED[x], *facts) for x in (name, "usual"))
        assert (time > usual + 1.0) == is_later
    assert time_of(OFFERED["clusters of 8"], *even) < time_of(USUAL, *even)


def test_memory_is_as_fast_for_clusters_that_leave_sms_idle() -> None:
    facts = 8, 60_000, 480_000, 1, 8
    times = [time_of(OFFERED[name], *facts) for name in ("alone", "clusters of 8")]
    assert abs(times[0] - times[1]) < 3.0


def test_nothing_to_do() -> None:
    assert 0 < time_of(USUAL, 0, 0, 0, 1, 1) < time_of(USUAL, 1, 4096, 4096, 1, 1)


def test_a_cluster_is_a_block_of_more_warps() -> None:
    shape = FEW.in_clusters(8, 15, TIMES.cluster)
    assert (shape.tile_kv, shape.num_slots, shape.cluster) == (1024, 15, 8)
    assert shape.rows_at_a_time == 64 and shape.tile_q == FEW.tile_q


@pytest.mark.parametrize(
    ("keys", "parts"),
    [(1024, 1), (4096, 1), (8192, 8), (32768, 8)],
)
def test_parts_of_one_key_head(keys: int, parts: int) -> None:
    """As measured on an H200: a part saves tiles and costs a merge."""
    shape = FEW.in_clusters(8, 15, TIMES.cluster)
    tiles = -(-keys // shape.tile_kv)
    least = shape.min_part(tiles, 8)
    chunk = best_chunk(Work(None, tiles, tiles, 1), 15, shape.costs(8), least).size
    assert -(-tiles // chunk) in (parts, parts + 1, parts - 1)


def test_blocks_alone_end_in_one_wave() -> None:
    """Measured for 2 requests of 8 KV heads, 256 columns: 18.2 us by 8 parts, 23.1 by 23."""
    shape = TileShape(16, 64, 132, 0.25, 0.03, rows_at_a_time=4, num_sms=132).timed(TIMES.one_an_sm)
    work = Work(np.array([28, 18]), 28, 46, 2)
    chunk = best_chunk(work, 132 // 8, shape.costs(2), shape.min_part(28, 2)).size
    assert 8 <= -(-28 // chunk) + -(-18 // chunk) <= 132 // 8


def test_many_heads_are_not_split_beyond_their_clusters() -> None:
    shape = FEW.in_clusters(8, 15, TIMES.cluster)
    work = Work(None, 16, 16, 1)
    assert best_chunk(work, 15 // 8, shape.costs(8)).size == 16


def test_parts_that_a_launch_merges_cost_the_blocks_nothing() -> None:
    shape = TileShape(32, 64, 264, 0.25, 0.03, rows_at_a_time=4, min_share=0.52)
    apart = shape.merged_apart()
    assert not apart.is_fused and apart.cost_of_part(32) == 0.0
    assert apart.min_part(64, 32) == 1
    assert apart.costs(32).merge < shape.costs(32).merge + 2 and apart.costs(32).part == 0.0
    lengths = np.full(4, 128)
    work = Work(lengths, 128, int(lengths.sum()), 4)
    assert best_chunk(work, 33, apart.costs(32)).size < 128
