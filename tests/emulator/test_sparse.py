"""sparse.attend on the host's kernels: the calls that tests/unit/sparse makes, as far as there are
kernels for them."""

from __future__ import annotations

import numpy as np
import pytest
from helpers import sparse_cases

from cupyattn import sparse

from . import gpu

SEEDS = [1, 2, 4, 5, 8, 10, 12, 20, 22, 23, 24, 29, 44, 81, 112, 124, 131, 175]
TOLERANCE = {"float16": 2e-3, "bfloat16": 1.6e-2}


@pytest.mark.parametrize("seed", SEEDS)
def test_random_calls(seed: int) -> None:
    case = sparse_cases.draw(seed)
    want, want_lse = sparse_cases.expected(case)
    with gpu.plugged_in(num_sms=8, seed=seed):
        first = sparse.attend(**case.arguments)
        again = sparse.attend(**case.arguments)  # as the cache has it
    own, atol = slice(len(case.seen)), TOLERANCE[case.arguments["q"].dtype.name]
    found = first[0][own].astype(np.float64)
    np.testing.assert_allclose(found, want[own], rtol=atol, atol=atol, err_msg=str(case))
    np.testing.assert_allclose(first[1][own], want_lse[own], rtol=1e-3, atol=1e-3)
    for x, y in zip(first, again, strict=True):
        np.testing.assert_array_equal(x[own], y[own])
