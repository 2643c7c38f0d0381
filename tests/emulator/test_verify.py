"""Masks over draft tokens and multi-item scoring on the host, over the problems of small heads."""

from __future__ import annotations

from dataclasses import replace

import pytest
from helpers import item_cases, verify_cases
from helpers.batch_cases import Case, Problem
from helpers.share import one_of

from . import run

PLAIN = Problem("bfloat16", "bfloat16", (64, 64))
FP8 = Problem("bfloat16", "float8_e4m3fn", (64, 64))
BLOCK = 3


def verification(seed: int, problem: Problem) -> Case:
    return replace(verify_cases.random_case(seed), problem=problem)


def items(seed: int, problem: Problem) -> Case:
    return replace(item_cases.random_case(seed), problem=problem)


@pytest.mark.parametrize("first", one_of(6, range(0, 18, BLOCK)))
@pytest.mark.parametrize("make", [verification, items])
def test_random_cases(make: object, first: int) -> None:
    for seed in range(first, first + BLOCK):
        case = make(seed, FP8 if seed % 3 == 2 else PLAIN)  # type: ignore[operator]
        run.batch(case, seed=seed % 3).check()


@pytest.mark.slow
@pytest.mark.parametrize("first", range(18, 158, 20))
@pytest.mark.parametrize("make", [verify_cases.random_case, item_cases.random_case])
def test_many_random_cases(make: object, first: int) -> None:
    for seed in range(first, first + 20):
        run.batch(make(seed), seed=seed % 3, num_sms=8 + seed % 30).check()  # type: ignore[operator]
