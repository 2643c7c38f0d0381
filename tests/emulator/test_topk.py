"""The greatest scores of rows, on the host: clusters of blocks, keys that have no room, warps."""

from __future__ import annotations

import numpy as np
import pytest
from helpers.given_scores import GivenScores
from helpers.share import one_of
from helpers.topk_cases import TopkCase

from cupyattn import sparse, topk
from cupyattn.launch.ops import select_topk

from . import gpu

# Blocks of a cluster, entries of a warp's list, threads.
_SHAPES = ((1, 128, 512), (1, 0, 512), (2, 0, 1024), (4, 128, 512), (8, 128, 512))


@pytest.mark.parametrize("first", one_of(4, range(0, 60, 5)))
def test_rows_of_clusters(first: int, monkeypatch: pytest.MonkeyPatch) -> None:
    for seed in range(first, first + 5):
        shape = select_topk.Shape(*_SHAPES[seed % len(_SHAPES)])
        monkeypatch.setattr(select_topk, "choose_shape", lambda *_, shape=shape: shape)
        case = TopkCase(seed).expect()
        with gpu.plugged_in(num_sms=4, seed=seed % 3):
            case.run()


@pytest.mark.parametrize("seed", one_of(4, range(0, 12, 2)))
def test_runs_longer_than_lists(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    shape = select_topk.Shape(1 + seed % 4 // 2, 128)
    monkeypatch.setattr(select_topk, "choose_shape", lambda *_: shape)
    case = TopkCase(seed, most=6000).expect()
    with gpu.plugged_in(num_sms=4):
        case.run()


@pytest.mark.parametrize("first", one_of(4, range(0, 60, 10)))
def test_rows_of_warps(first: int, monkeypatch: pytest.MonkeyPatch) -> None:
    for seed in range(first, first + 10):
        shape = select_topk.rows_of_warps((8, 32)[seed % 2])
        monkeypatch.setattr(select_topk, "choose_shape", lambda *_, shape=shape: shape)
        case = TopkCase(seed, most=(150, 900)[seed % 2], topk=(1, 5, 16, 32)[seed % 4]).expect()
        with gpu.plugged_in(num_sms=4, seed=seed % 3, arch=(900, 800)[seed % 2]):
            case.run()


@pytest.mark.parametrize("first", one_of(4, range(0, 40, 10)))
def test_given_scores(first: int) -> None:
    for seed in range(first, first + 10):
        case = GivenScores(seed).expect()
        with gpu.plugged_in(num_sms=4, seed=seed % 3, arch=(900, 800)[seed % 2]):
            case.run()


def test_given_indices_beyond_their_arrays(emulated: gpu.EmulatedGpu) -> None:
    """What only the GPU knows reads nothing beyond, and lists nothing."""
    scores = np.arange(12, dtype=np.float32).reshape(3, 4)
    table, lengths = np.array([[5, -1]], np.int32), np.array([9, -2, 4], np.int32)
    starts = np.array([1, 0, 4], np.int32)
    call = scores, table, lengths, 3, np.array([0, 0, 7], np.int32)
    slots = topk.top_k_page_table_transform(*call, row_starts=starts)
    assert slots.tolist() == [[-1, -1, -1], [-1, -1, -1], [-1, -1, -1]]
    slots = topk.top_k_page_table_transform(*call)
    assert slots.tolist() == [[-1, -1, -1], [-1, -1, -1], [-1, -1, -1]]
    rows = topk.top_k_ragged_transform(scores, starts, lengths, 3, row_starts=starts)
    assert rows.tolist() == [[1, 2, 3], [-1, -1, -1], [-1, -1, -1]]


def check_zeros_of_clusters() -> None:
    """Scores of +0 and -0 tie, the last block is in, tokens of a request see more in turn."""
    for last in (0, 1):
        case = TopkCase(0, kind="zeros", most=300, topk=16)
        case.causal, case.has_candidates, case.tail = True, False, False
        case.ratio, case.block, case.groups = 1, 1, 1
        case.first, case.last = 0, last
        case.has_offsets, case.num_tokens = True, 2
        case.kv_lens, case.offsets = np.array([290], np.int32), np.array([0, 2], np.int32)
        with pytest.MonkeyPatch.context() as patch, gpu.plugged_in(num_sms=4):
            patch.setattr(select_topk, "choose_shape", lambda *_: select_topk.Shape(2, 128))
            case.expect().run()


def check_zeros_of_warps() -> None:
    """More scores tie than are wanted, and fewer than have room."""
    case = TopkCase(1, kind="zeros", most=30, topk=16)
    case.kv_lens[:] = 30 * case.block
    with gpu.plugged_in(num_sms=4):
        case.expect().run()


def test_zeros() -> None:
    check_zeros_of_clusters()
    check_zeros_of_warps()


def test_begins_before_scores_are_there() -> None:
    """A choice that begins beside its scores reads none before it has waited."""
    rng = np.random.default_rng(0)
    q = rng.standard_normal((2, 4, 128)).astype(np.float16)
    cache = rng.standard_normal((2, 40, 128)).astype(np.float16)
    for size in (5, 36):  # of warps, of clusters
        call = {"topk": size, "block": 1, "lengths": np.array([37, 40], np.int32), "groups": 1}
        want = sparse.select(q, cache[:, :40], **call)
        with gpu.plugged_in(num_sms=4, begins_early=True) as emulated:
            got = sparse.select(q, cache, **call)
        assert [x.name for x in emulated.launches] == ["select_scores", "select_topk"]
        assert [set(x) for x in got[:, 0].tolist()] == [set(x) for x in want[:, 0].tolist()]
