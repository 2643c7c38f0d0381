"""Selections of blocks, on the host: scores beside an oracle of theirs, and what is chosen."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from helpers import select_cases

from cupyattn import sparse
from cupyattn.launch.ops import select as launch_select

from . import gpu


def run(seed: int, **facts: Any) -> gpu.EmulatedGpu:
    """A drawn call; what was launched."""
    case = select_cases.draw(seed, on_gpu=True)
    with gpu.plugged_in(**facts) as emulated:
        lists, values = sparse.select(**case.arguments)
    select_cases.check(case, lists, values, slack=1e-5)
    return emulated


@pytest.mark.parametrize("seed", range(12))
def test_random_calls(seed: int) -> None:
    run(seed, num_sms=4, seed=seed)
