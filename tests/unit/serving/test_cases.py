"""Every mode with options crossed, against a dense oracle, on CPU arrays."""

from __future__ import annotations

import numpy as np
import pytest
from helpers.serving_cases import KINDS, Case, LatentCase


@pytest.mark.parametrize("kind", KINDS)
def test_random_steps(kind: str) -> None:
    for seed in range(40):
        Case(seed, kind=kind).run()


@pytest.mark.parametrize("kind", KINDS)
def test_random_steps_of_torch(kind: str) -> None:
    torch = pytest.importorskip("torch")
    for seed in range(100, 108):
        Case(seed, torch, kind=kind).run()


@pytest.mark.parametrize("kind", KINDS)
def test_random_steps_over_latent_pools(kind: str) -> None:
    for seed in range(12):
        LatentCase(seed, kind=kind).run()


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("first", range(1000, 1250, 50))
def test_many_random_steps(kind: str, first: int) -> None:
    for seed in range(first, first + 50):
        Case(seed, np, kind=kind).run()
