"""Which problems prefill_sm90 serves."""

from __future__ import annotations

from itertools import product

import pytest
from helpers.fake_gpu import MAX_SHARED

from cupyattn.core import dtypes
from cupyattn.core.problem import AttentionProblem
from cupyattn.launch.tiles import sm90


@pytest.mark.parametrize("dim", [64, 96, 128])
@pytest.mark.parametrize("page_size", [1, 3])
def test_gathered_rows_are_served_under_all_options(dim: int, page_size: int) -> None:
    for custom_mask, prescale_logits in product((False, True), repeat=2):
        problem = AttentionProblem(
            *[dtypes.bfloat16] * 3,
            dim,
            dim,
            paged=True,
            custom_mask=custom_mask,
            prescale_logits=prescale_logits,
        )
        assert sm90.choose(problem, MAX_SHARED, page_size) is not None
