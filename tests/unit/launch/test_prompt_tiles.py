"""Which tiles of prefill_sm90 plans choose for dense prompts, by the times that were fitted."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from cupyattn.choose.tile_times import large_tiles, shape_of
from cupyattn.core import dtypes
from cupyattn.core.device import NO_GPU
from cupyattn.core.problem import AttentionProblem
from cupyattn.schedule.batch import BatchRequests, TileWork
from cupyattn.schedule.masking import Masking
from cupyattn.schedule.tile_choice import choose_tiles

NUM_SMS = 132
H200 = replace(NO_GPU, name="NVIDIA H200")
LEAN = {"lean", "flat", "queue"}


def chosen(
    count: int,
    length: int,
    heads: tuple[int, int],
    dim: int,
    causal: bool,
    dim_vo: int = 0,
    soft_cap: bool = False,
    page_size: int = 0,
) -> str:
    kind = dtypes.bfloat16
    problem = AttentionProblem(
        kind, kind, kind, dim, dim_vo or dim, soft_cap=soft_cap, paged=page_size > 0
    )
    made = large_tiles(problem, H200, page_size)
    group = heads[0] // heads[1]
    shapes = [shape_of(*timed, group, heads[1], NUM_SMS) for timed in made.values()]
    lengths, starts = np.full(count, length), np.arange(count) * length
    requests = BatchRequests(lengths, lengths, starts, starts)
    masking = Masking(-1, 0 if causal else -1)
    return [*made][choose_tiles(TileWork(requests, group, masking), heads[1], shapes).chosen]


# Tiles within 4 % of the fastest of an H200 or an H100 (docs/ladder.md).
@pytest.mark.parametrize(
    ("count", "length", "heads", "dim", "fast"),
    [
        (16, 128, (32, 8), 128, {"queue"}),
        (64, 128, (32, 8), 128, {"queue"}),
        (5, 200, (64, 8), 128, {"queue", "large"}),
        (8, 128, (32, 8), 128, {"lean", "queue", "twin"}),
        (4, 256, (32, 8), 128, {"twin"}),
        (2, 512, (32, 8), 128, {"twin"}),
        (1, 2048, (8, 1), 128, {"broad", "middle", "short", "twin"}),
        (4, 777, (8, 1), 128, {"short", "twin"}),
        (128, 64, (32, 8), 128, {"queue"}),
        (16, 128, (32, 32), 128, {"lean"}),
        (64, 128, (32, 32), 128, {"flat", "twin"}),
        (1, 128, (32, 8), 128, {"short", "lean", "flat"}),
        (1, 1024, (32, 8), 128, {"broad", "short", "middle", "tall"}),
        (1, 2048, (32, 8), 128, {"large", "broad"}),
        (1, 2048, (32, 32), 128, {"broad"}),
        (1, 4096, (8, 1), 128, {"broad", "middle"}),
        (4, 512, (32, 8), 128, {"large"}),
        (4, 1024, (32, 32), 128, {"broad"}),
        (16, 512, (32, 8), 128, {"large"}),
        (16, 256, (32, 32), 64, {"flat"}),
        (8, 256, (32, 8), 64, LEAN),
        (16, 128, (32, 32), 96, {"lean"}),
    ],
)
def test_causal_prompts(
    count: int, length: int, heads: tuple[int, int], dim: int, fast: set[str]
) -> None:
    assert chosen(count, length, heads, dim, True) in fast


@pytest.mark.parametrize(
    ("count", "length", "num_heads", "fast"),
    [
        (15, 197, 16, {"lean"}),
        (64, 197, 12, {"queue"}),
        (32, 128, 16, {"flat"}),
        (2, 577, 8, {"short"}),
        (1, 197, 16, {"short"}),
    ],
)
def test_images(count: int, length: int, num_heads: int, fast: set[str]) -> None:
    assert chosen(count, length, (num_heads, num_heads), 64, False) in fast


@pytest.mark.parametrize(
    ("count", "length", "heads", "dims", "fast"),
    [
        (45, 156, (64, 64), (192, 128), {"twin"}),
        (30, 100, (16, 16), (192, 128), {"twin", "flat"}),
        (40, 100, (16, 16), (192, 128), {"twin", "large"}),
        (6, 89, (32, 32), (192, 128), {"flat"}),
        (1, 128, (32, 32), (192, 128), {"short"}),
        (4, 512, (64, 64), (192, 128), {"large"}),
        (1, 4096, (128, 128), (192, 128), {"large"}),
        (16, 128, (8, 4), (256, 256), {"flat"}),
        (4, 512, (16, 8), (256, 256), {"flat"}),
        (2, 1024, (8, 4), (256, 256), {"short", "large"}),
    ],
)
def test_wide_heads(
    count: int, length: int, heads: tuple[int, int], dims: tuple[int, int], fast: set[str]
) -> None:
    assert chosen(count, length, heads, dims[0], True, dims[1]) in fast


@pytest.mark.parametrize(
    ("count", "length", "heads", "dim", "fast"),
    [
        (2, 60, (32, 16), 128, {"flat", "lean"}),
        (6, 40, (16, 8), 256, {"flat"}),
        (1, 512, (32, 16), 128, {"short"}),
        (8, 300, (8, 4), 128, {"short"}),
        (16, 400, (4, 2), 256, {"flat"}),
        (1, 300, (16, 8), 256, {"short"}),
        (1, 4096, (8, 4), 128, {"middle"}),
        (2, 2000, (32, 16), 128, {"large"}),
    ],
)
def test_soft_caps(
    count: int, length: int, heads: tuple[int, int], dim: int, fast: set[str]
) -> None:
    assert chosen(count, length, heads, dim, True, soft_cap=True) in fast


@pytest.mark.parametrize(
    ("count", "length", "heads", "dim", "soft_cap", "fast"),
    [
        # Two tiles of 64 rows each: one wave of lean blocks.
        (223, 71, (1, 1), 64, False, {"lean"}),
        (16, 71, (1, 1), 64, False, {"short", "lean"}),
        (1, 43, (32, 16), 64, True, {"lean"}),
        (1, 1434, (8, 1), 128, True, {"short", "middle"}),
        (1, 606, (16, 8), 256, True, {"short"}),
    ],
)
def test_pages(
    count: int, length: int, heads: tuple[int, int], dim: int, soft_cap: bool, fast: set[str]
) -> None:
    assert chosen(count, length, heads, dim, True, soft_cap=soft_cap, page_size=16) in fast


def test_persistent_lean_blocks_have_several_items() -> None:
    """Two requests of 128 tokens are 128 items, for which 396 blocks find no next one."""
    assert chosen(2, 128, (32, 8), 128, True) != "queue"


@pytest.mark.parametrize("count", [1, 4, 64])
def test_long_prompts_do_not_have_lean_blocks(count: int) -> None:
    assert chosen(count, 513, (32, 8), 128, True) not in LEAN
