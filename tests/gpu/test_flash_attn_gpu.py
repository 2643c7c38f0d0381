"""flash_attn's functions on a GPU: random calls with their options crossed, and new keys alone."""

from __future__ import annotations

from types import ModuleType

import pytest
from helpers.flash_cases import Case
from helpers.new_keys import random_new_keys

pytestmark = pytest.mark.gpu

NUM_CASES, BLOCK = 420, 70


@pytest.mark.parametrize("first", range(0, NUM_CASES, BLOCK))
def test_random_calls(xp: ModuleType, first: int) -> None:
    for seed in range(first, first + BLOCK):
        Case(seed, xp, "cuda", is_gpu=True).run()


@pytest.mark.parametrize("first", range(0, 160, 40))
def test_new_keys(xp: ModuleType, first: int) -> None:
    for seed in range(first, first + 40):
        random_new_keys(seed).run(xp, "cuda")
