"""Kernels of ranks that share keys, on the host: states of all ranks merge to the whole answer."""

from __future__ import annotations

import numpy as np
import pytest
from helpers import key_shares
from helpers.batches import SMALL_WORKSPACE

from . import gpu


def _error(case: key_shares.Case, arch: int) -> float:
    with gpu.plugged_in(num_sms=6, seed=case.seed % 3, arch=arch):
        got = key_shares.merged(case, np.asarray, np.asarray, SMALL_WORKSPACE)
    return key_shares.error(got, key_shares.Whole.of(case).expected())


@pytest.mark.parametrize("arch", [800, 900])
@pytest.mark.parametrize("kind", key_shares.KINDS)
@pytest.mark.parametrize("seed", range(2))
def test_random_cases(kind: str, seed: int, arch: int) -> None:
    case = key_shares.random_case(seed, kind)
    assert _error(case, arch) <= 1.02 * _error(case.alone(), arch) + 1e-5
