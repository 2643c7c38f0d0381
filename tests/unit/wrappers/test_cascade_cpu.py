"""Cascades on CPU arrays: what the wrapper makes of levels, served by the reference."""

from __future__ import annotations

import numpy as np
import pytest
from helpers import cascade_calls


@pytest.mark.parametrize("first", range(0, 120, 20))
def test_random_cascades(first: int) -> None:
    for seed in range(first, first + 20):
        case = cascade_calls.random_case(seed)
        cascade_calls.run_case(case, np, np.zeros(16, np.uint8))
