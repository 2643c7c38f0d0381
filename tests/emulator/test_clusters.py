"""Few requests of few rows: the blocks of a cluster share the keys, and merge in shared memory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from helpers import batch_cases
from helpers.cases import Case
from helpers.share import one_of

from cupyattn.choose import candidates
from cupyattn.launch.attention import kernels
from cupyattn.schedule.tile_shape import TileShape

from . import run
from .test_batch import BASE

DECODE = replace(BASE, qo_len=(1, 1), kv_len=(900, 700), has_sinks=True)
# The keys of the longest of two requests of two KV heads. A block takes 256 at a time.
SIZES = {2: 400, 4: 900, 8: 1700}


@pytest.fixture(autouse=True)
def prefer(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Plans that prefer clusters, or those of these sizes; 1: blocks that have an SM each."""

    def prefer(*sizes: int) -> None:
        def time(shape: TileShape, *_: int) -> float:
            return 2.0 if shape.decode is None else 1.0 / shape.cluster

        monkeypatch.setattr(kernels, "CLUSTERS", [size for size in sizes if size > 1])
        monkeypatch.setattr(candidates, "decode_time", time)

    prefer(8, 4)
    return prefer


FP8 = batch_cases.Problem("bfloat16", "float8_e4m3fn", (128, 128))


def clusters(answer: run.Answer) -> set[int]:
    return {launch.cluster for launch in answer.launches if launch.name == "decode_sm80"}


@pytest.mark.parametrize("cluster", SIZES)
def test_clusters_of_each_size(cluster: int, prefer: Callable[..., None]) -> None:
    prefer(cluster)
    case = replace(DECODE, kv_len=(90, SIZES[cluster]))
    answer = run.batch(case, num_sms=32, has_clusters=True)
    answer.check()
    assert clusters(answer) == {cluster}
    assert {launch.name for launch in answer.launches} == {"decode_sm80"}


@pytest.mark.parametrize("changes", [
    {"qo_len": (8, 8), "kv_len": (900, 8), "problem": FP8},
    {"qo_len": (4, 3), "kv_len": (40, 1500)},
    {"kv_len": (0, 900), "num_kv_heads": 1},
    {"problem": FP8},
    {"problem": batch_cases.Problem("float16", "float16", (128, 64))},
    {"wrapper": "ragged", "page_size": 0},
    {"window_left": 300},
])  # fmt: skip
@pytest.mark.parametrize("seed", one_of(2, [0, 3]))
def test_what_clusters_answer(changes: dict[str, Any], seed: int) -> None:
    case = replace(DECODE, **changes)
    answer = run.batch(case, num_sms=32, seed=seed, has_clusters=True)
    answer.check()
    assert max(clusters(answer)) > 1


@pytest.mark.parametrize(("tiles", "is_fused"), [((7, 40), True), ((90,), False)])
def test_blocks_with_an_sm_each(
    tiles: tuple[int, ...], is_fused: bool, prefer: Callable[..., None]
) -> None:
    """The last block of a tile merges up to 32 parts, a launch merges more."""
    prefer(1)
    kv_len, qo_len = tuple(256 * n - 6 for n in tiles), (1,) * len(tiles)
    case = replace(DECODE, qo_len=qo_len, kv_len=kv_len, num_kv_heads=1)
    answer = run.batch(case, num_sms=128, has_clusters=True)
    answer.check()
    launch, *merges = answer.launches
    assert (launch.cluster, launch.block[0]) == (1, 256) and max(launch.grid) > 2
    assert [x.name for x in merges] == ["merge_splits"] * (not is_fused)


@pytest.mark.parametrize("qo_len", [1, 8])
def test_the_last_cluster_merges_the_splits(qo_len: int, prefer: Callable[..., None]) -> None:
    prefer(2)
    # More than 16 rows have another kernel, but for fp8 keys.
    keys = {"problem": FP8} if qo_len > 4 else {}
    case = replace(DECODE, qo_len=(qo_len,), kv_len=(7000,), num_kv_heads=1, **keys)
    answers = [run.batch(case, num_sms=64, seed=s, has_clusters=True) for s in (0, 5)]
    for answer in answers:
        answer.check()
    (launch,) = answers[0].launches
    assert launch.cluster == 2 and max(launch.grid[1:]) > 2
    for first, second in zip(*(answer.bits() for answer in answers), strict=True):
        np.testing.assert_array_equal(first, second)


ONE = Case(1, 1, 7000, 1, 4, 64, 64, has_sinks=True)


@pytest.mark.parametrize("cluster", [1, 4])
@pytest.mark.parametrize(
    "changes",
    [{}, {"qo_len": 3, "causal": True}, {"kv_len": 14_000, "window_left": 12_000}],
)
def test_one_request(changes: dict[str, Any], cluster: int, prefer: Callable[..., None]) -> None:
    """Its blocks and clusters find their work by the grid."""
    prefer(cluster)
    answer = run.single(replace(ONE, **changes), num_sms=64, has_clusters=True)
    answer.check()
    (launch,) = answer.launches
    assert (launch.name, launch.cluster, launch.block[0]) == ("decode_sm80", cluster, 256)
    assert launch.grid[0] == cluster and launch.grid[2] > 1


def test_many_parts_of_one_request_are_merged_by_a_launch(prefer: Callable[..., None]) -> None:
    prefer(1)
    case = replace(ONE, kv_len=36_000)
    answer = run.single(case, num_sms=128, has_clusters=True)
    answer.check()
    launch, merge = answer.launches
    assert launch.grid[2] > 32 and merge.name == "merge_splits"
