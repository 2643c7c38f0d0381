"""Calls without a plan behind each other on the host, kernels and all: launches begin early, and a
workspace holds what calls before have left."""

from __future__ import annotations

import numpy as np
import pytest
from helpers import call_runs
from helpers.share import one_of

from . import gpu


@pytest.mark.parametrize("seed", one_of(6, range(6)))
def test_calls_have_the_bits_that_they_give_alone(seed: int) -> None:
    with gpu.plugged_in(num_sms=6, seed=seed, begins_early=True) as emulated:
        run = call_runs.drawn(seed, np, ("small", "latent"), 5)
        assert call_runs.check(run, 1, has_graph=False) == 5
    assert emulated.launches
