"""Kernels of ranks that share keys, on the host: states of all ranks merge to the whole answer."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from helpers import key_shares
from helpers.batches import SMALL_WORKSPACE
from helpers.key_shares import Case
from helpers.share import one_of

from . import gpu

# Kernels of both tiers, by what brings a rank's call to them.
LARGE = {
    "prefill": Case(1, "prefill", 2, 4, (190, 100), (70, 33), window_left=50),
    "ragged": Case(2, "ragged", 3, 16, (300, 140), (130, 5)),
    "capped": Case(3, "ragged", 2, 5, (200,), (90,), heads=(2, 1), soft_cap=15.0),
    "tree": Case(4, "tree", 2, 3, (150, 60), (40, 40)),
    "gathered": Case(5, "prefill", 2, 1, (160,), (80,), page_size=1),
    "mla": Case(6, "mla", 2, 7, (200, 90), (9, 20), heads=(8, 1), page_size=64),
    "mla decode": Case(7, "mla", 3, 1, (200, 90), (2, 2), heads=(4, 1), page_size=64),
    "both kinds": Case(8, "prefill", 2, 16, (200, 150, 90), (1, 60, 2)),
}


def _error(case: Case, **facts: Any) -> tuple[float, set[str]]:
    """Of the merged answer, and which kernels ran."""
    with gpu.plugged_in(**{"num_sms": 6, "seed": case.seed % 3} | facts) as emulated:
        got = key_shares.merged(case, np.asarray, np.asarray, SMALL_WORKSPACE)
    names = {launched.name for launched in emulated.launches}
    return key_shares.error(got, key_shares.Whole.of(case).expected()), names


def check(case: Case, **facts: Any) -> set[str]:
    """The error is that of one rank with all keys; returns which kernels ran."""
    error, names = _error(case, **facts)
    assert error <= 1.02 * _error(case.alone(), **facts)[0] + 1e-5
    return names


@pytest.mark.parametrize("is_portable", [True, False])
@pytest.mark.parametrize("kind", one_of(3, key_shares.KINDS))
@pytest.mark.parametrize("seed", range(2))
def test_random_cases(kind: str, seed: int, is_portable: bool) -> None:
    check(key_shares.random_case(seed, kind), is_portable=is_portable)


@pytest.mark.parametrize("name", one_of(3, LARGE))
def test_kernels_of_hopper(name: str) -> None:
    wanted = {"mla": "wide_sm90", "mla decode": "wide_decode_sm90"}.get(name, "prefill_sm90")
    assert wanted in check(LARGE[name], num_sms=2)


@pytest.mark.parametrize("name", one_of(3, LARGE))
def test_portable_kernels(name: str) -> None:
    check(LARGE[name], num_sms=2, is_portable=True)


@pytest.mark.slow
@pytest.mark.parametrize("first", range(0, 60, 6))
def test_many_random_cases(first: int) -> None:
    for seed in range(first, first + 6):
        check(key_shares.random_case(seed), num_sms=4 + seed, is_portable=seed % 2 == 0)
