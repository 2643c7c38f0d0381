"""flash_attn's functions, kernels and all, on the host."""

from __future__ import annotations

import pytest
from helpers.flash_cases import FORMS, Case
from helpers.new_keys import random_new_keys

from . import gpu


@pytest.mark.parametrize("form", FORMS)
def test_random_calls(form: str) -> None:
    for seed in range(FORMS.index(form), 8 * len(FORMS), len(FORMS)):
        with gpu.plugged_in(seed=seed % 3):
            Case(seed, is_gpu=True).run()


@pytest.mark.parametrize("first", range(0, 48, 16))
def test_new_keys(first: int) -> None:
    """Rows, pages and positions of nobody among them."""
    for seed in range(first, first + 16):
        with gpu.plugged_in(seed=seed % 3):
            random_new_keys(seed).run()


@pytest.mark.slow
@pytest.mark.parametrize("first", range(100, 400, 50))
def test_many_random_calls(first: int) -> None:
    for seed in range(first, first + 50):
        with gpu.plugged_in(seed=seed % 3):
            Case(seed, is_gpu=True).run()
