"""Queries, keys and values of 8 bits on the GPU, against float64: random calls by seeds."""

from __future__ import annotations

import pytest
from helpers import eight_bit_cases, single_calls
from helpers.batch_calls import planned
from helpers.eight_bit_cases import PREFILL_SM90 as SERVED
from helpers.on_gpu import try_random, workspace

pytestmark = pytest.mark.gpu

cupy = pytest.importorskip("cupy")

BLOCK, NUM_CASES = 25, 800


@pytest.mark.parametrize("first", range(0, NUM_CASES, BLOCK))
def test_random_requests(first: int) -> None:
    make = lambda seed, xp: single_calls.Call(eight_bit_cases.single(seed, SERVED), xp)  # noqa: E731
    try_random(first, BLOCK, make)


@pytest.mark.parametrize("first", range(0, NUM_CASES, BLOCK))
def test_random_batches(first: int) -> None:
    make = lambda seed, xp: planned(eight_bit_cases.batch(seed, SERVED), xp, workspace(xp))  # noqa: E731
    try_random(first, BLOCK, make)
