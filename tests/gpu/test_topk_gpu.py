"""The greatest scores of rows on the GPU: what NumPy chooses, entry by entry."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from helpers import topk_cases
from helpers.given_scores import GivenScores
from helpers.share import one_of
from helpers.topk_cases import TopkCase

from cupyattn.core.device import device_props, overlaps_launches
from cupyattn.launch.ops import select_topk

pytestmark = pytest.mark.gpu

_MOST = (60, 250, 1000, 5000, 40_000)


@pytest.mark.parametrize("first", one_of(10, range(0, 400, 20)))
def test_random_rows(first: int, xp: Any) -> None:
    for seed in range(first, first + 20):
        topk = (0, 0, 512, 2048, 16)[seed % 7 % 5]
        TopkCase(seed, xp, most=_MOST[seed % 5], topk=topk).expect().run()


@pytest.mark.parametrize("first", one_of(5, range(0, 100, 20)))
def test_given_scores(first: int, xp: Any) -> None:
    for seed in range(first, first + 20):
        GivenScores(seed, xp, most=(100, 900, 20_000)[seed % 3]).expect().run()


@pytest.mark.parametrize("cluster", [1, 2, 4, 8])
@pytest.mark.parametrize("warp_room", [0, 128, 512])
@pytest.mark.parametrize("threads", [512, 1024])
def test_every_shape(
    cluster: int, warp_room: int, threads: int, xp: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    if cluster > 1 and not overlaps_launches(device_props(0).arch):
        pytest.skip("this GPU has no clusters")
    shape = select_topk.Shape(cluster, warp_room, threads)
    monkeypatch.setattr(select_topk, "choose_shape", lambda *_: shape)
    if shape.shared_bytes > device_props(0).max_smem_per_block:
        pytest.skip("a block of this GPU has less shared memory")
    for seed in range(6):
        most = (300, 3000, 30_000)[seed % 3]
        TopkCase(seed, xp, most=most, topk=(0, 700)[seed % 2]).expect().run()


@pytest.mark.parametrize("keys", [8, 32])
def test_rows_of_warps(keys: int, xp: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(select_topk, "choose_shape", lambda *_: select_topk.rows_of_warps(keys))
    for seed in range(30):
        case = TopkCase(seed, xp, most=32 * keys - 100, topk=(1, 7, 16, 32)[seed % 4])
        case.expect().run()


@pytest.mark.parametrize("kind", topk_cases.KINDS)
def test_a_million_blocks(kind: str) -> None:
    cupy = pytest.importorskip("cupy")
    case = TopkCase(7, cupy, most=1 << 20, topk=2048, kind=kind)
    case.kv_lens[:] = (1 << 20) * case.block - 5
    case.expect().run()


def test_in_a_graph() -> None:
    """Replays choose from what the scores and lengths are by then."""
    cupy = pytest.importorskip("cupy")
    for most, topk in ((900, 16), (50_000, 2048)):
        case = TopkCase(4, cupy, most=most, topk=topk, kind="normal").expect()
        case.place()
        stream = cupy.cuda.Stream(non_blocking=True)
        cupy.cuda.Device().synchronize()
        with stream:
            case.launch()
            stream.synchronize()
            stream.begin_capture()
            case.launch()
            graph = stream.end_capture()
        case.owned["out"].clear()
        cupy.cuda.Device().synchronize()
        for _ in range(3):
            graph.launch(stream)
        stream.synchronize()
        case.check()
        case.placed["kv_lens"][...] //= 2
        case.kv_lens = case.kv_lens // 2
        scores = case.owned["scores"].values()
        case.choose([scores[row] for row in range(scores.shape[0])])
        cupy.cuda.Device().synchronize()
        graph.launch(stream)
        stream.synchronize()
        np.testing.assert_array_equal(case.owned["out"].values(), case.lists)
