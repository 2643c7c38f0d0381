"""Cascades through the public wrapper on the host: one launch for all levels, and its merge."""

from __future__ import annotations

import numpy as np
import pytest
from helpers import cascade_calls

from cupyattn.launch.batch import BatchLauncher

from . import gpu


def run_case(seed: int, monkeypatch: pytest.MonkeyPatch, is_shared: bool) -> list[str]:
    """Names of the kernels that ran."""
    monkeypatch.setattr(BatchLauncher, "gains_by_levels", lambda *_: is_shared)
    with gpu.plugged_in(num_sms=8 + seed % 9, seed=seed % 3) as emulated:
        workspace = emulated.empty((64 << 20,), np.dtype(np.uint8))
        cascade_calls.run_case(cascade_calls.random_case(seed), np, workspace)
    return [launch.name for launch in emulated.launches]


@pytest.mark.parametrize("first", range(0, 40, 4))
def test_random_cascades(first: int, monkeypatch: pytest.MonkeyPatch) -> None:
    for seed in range(first, first + 4):
        run_case(seed, monkeypatch, is_shared=seed % 4 != 3)
