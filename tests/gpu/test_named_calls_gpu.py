"""Sparse attention by the names of vLLM, SGLang, FlashInfer and FlashMLA, on the GPU: random calls
beside float64, each twice."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from helpers import named_cases
from helpers.share import some

pytestmark = pytest.mark.gpu

pytest.importorskip("cupy")

NUM_CASES = 24


@pytest.mark.parametrize("name", named_cases.NAMES)
def test_random_calls(torch: Any, name: str) -> None:
    for seed in range(some(NUM_CASES)):
        case = named_cases.draw(name, seed)
        answers = [case.run(lambda x: named_cases.put(x, "cuda")) for _ in range(2)]
        try:
            case.check(answers[0])
            for first, again in zip(*answers, strict=True):
                np.testing.assert_array_equal(first, again)
        except AssertionError as error:
            raise AssertionError(f"{case}: {error}") from error
