"""The greatest scores of rows, on the host: clusters of blocks, keys that have no room, warps."""

from __future__ import annotations

import pytest
from helpers.share import one_of
from helpers.topk_cases import TopkCase

from cupyattn.launch.ops import select_topk

from . import gpu

_SHAPES = ((1, 128), (1, 0), (2, 0), (4, 128), (8, 128))


@pytest.mark.parametrize("first", one_of(4, range(0, 60, 5)))
def test_rows_of_clusters(first: int, monkeypatch: pytest.MonkeyPatch) -> None:
    for seed in range(first, first + 5):
        shape = select_topk.Shape(*_SHAPES[seed % len(_SHAPES)])
        monkeypatch.setattr(select_topk, "choose_shape", lambda *_, shape=shape: shape)
        case = TopkCase(seed).expect()
        with gpu.plugged_in(num_sms=4, seed=seed % 3):
            case.run()


@pytest.mark.parametrize("first", one_of(4, range(0, 60, 10)))
def test_rows_of_warps(first: int) -> None:
    for seed in range(first, first + 10):
        case = TopkCase(seed, most=(200, 900)[seed % 2], topk=(1, 5, 16, 32)[seed % 4]).expect()
        with gpu.plugged_in(num_sms=4, seed=seed % 3, arch=(900, 800)[seed % 2]):
            case.run()


def test_begins_before_scores_are_there() -> None:
    """A launch that begins early reads nothing before it has waited."""
    case = TopkCase(3, most=200, topk=16).expect()
    with gpu.plugged_in(num_sms=4, begins_early=True):
        case.run()
