"""Calls without a plan of ranks that share keys, on the host: the planner and the kernels."""

from __future__ import annotations

import numpy as np
import pytest
from helpers import key_shares, planless_shares
from helpers.share import one_of

from . import gpu


def _error(door: str, case: key_shares.Case, arch: int) -> float:
    with gpu.plugged_in(num_sms=6, seed=case.seed % 3, arch=arch):
        got = planless_shares.merged(
            door, case, np.asarray, np.asarray, lambda shape: np.zeros(shape, np.float32)
        )
    return key_shares.error(got, planless_shares.expected(door, key_shares.Whole.of(case)))


@pytest.mark.parametrize("arch", [800, 900])
@pytest.mark.parametrize("door", planless_shares.DOORS)
@pytest.mark.parametrize("seed", one_of(2, range(4)))
def test_random_cases(door: str, seed: int, arch: int) -> None:
    case = planless_shares.random_case(seed, door)
    assert _error(door, case, arch) <= 1.02 * _error(door, case.alone(), arch) + 2e-4
