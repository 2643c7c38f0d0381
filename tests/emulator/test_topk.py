"""The greatest scores of rows, on the host: clusters of blocks, and keys that have no room."""

from __future__ import annotations

import pytest
from helpers.share import one_of
from helpers.topk_cases import TopkCase

from cupyattn.launch.ops import select_topk

from . import gpu

_SHAPES = ((1, 128), (1, 0), (2, 0), (4, 128), (8, 128))


@pytest.mark.parametrize("first", one_of(5, range(0, 100, 10)))
def test_random_rows(first: int, monkeypatch: pytest.MonkeyPatch) -> None:
    for seed in range(first, first + 10):
        shape = select_topk.Shape(*_SHAPES[seed % len(_SHAPES)])
        monkeypatch.setattr(select_topk, "choose_shape", lambda *_, shape=shape: shape)
        case = TopkCase(seed).expect()
        with gpu.plugged_in(num_sms=4, seed=seed % 3):
            case.run()
