"""Sparse attention by the names of vLLM, SGLang, FlashInfer and FlashMLA: random calls on the CPU
beside float64."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")

from helpers import named_cases


@pytest.mark.parametrize("name", named_cases.NAMES)
def test_random_calls(name: str) -> None:
    for seed in range(40):
        case = named_cases.draw(name, seed)
        case.check(case.run(named_cases.put))
