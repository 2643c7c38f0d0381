"""Calls without a plan behind each other, in random order, in graphs and on two streams: each has
the bits that it gives alone."""

from __future__ import annotations

from typing import Any

import pytest
from helpers import call_runs
from helpers.share import some

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("kind", [*call_runs.KINDS])
@pytest.mark.parametrize("seed", range(2))
def test_calls_of_one_kind(torch: Any, kind: str, seed: int) -> None:
    call_runs.check(call_runs.drawn(seed, torch, [kind], some(16)), 4, has_graph=True)


def test_calls_of_cupys_arrays() -> None:
    cupy = pytest.importorskip("cupy")
    kinds = ("small", "latent", "flash")
    call_runs.check(call_runs.drawn(5, cupy, kinds, some(24)), 4, has_graph=False)


@pytest.mark.parametrize("seed", range(10, 12))
def test_calls_of_all_kinds(torch: Any, seed: int) -> None:
    call_runs.check(call_runs.drawn(seed, torch, [*call_runs.KINDS], some(24)), 4, has_graph=True)


@pytest.mark.parametrize("seed", range(20, 22))
def test_two_streams(torch: Any, seed: int) -> None:
    runs = [call_runs.drawn(seed + k, torch, [*call_runs.KINDS], some(10)) for k in (0, 100)]
    call_runs.on_two_streams(runs, 5)
