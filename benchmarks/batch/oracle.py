"""The float64 answers of a batch's sampled rows: the oracle of single requests, one by one."""

from __future__ import annotations

from ..oracle import ROWS_A_CASE, Expected, attend_rows, sample_rows
from .case import BatchCase
from .inputs import BatchInputs


def expect_batch(case: BatchCase, inputs: BatchInputs) -> list[Expected]:
    """Sampled rows of every request, numbered as in an answer [1, rows of all requests, Hq, D]."""
    count = max(2, ROWS_A_CASE // case.batch)
    expected = []
    for b, start in enumerate(case.q_offsets[:-1]):
        one = case.request(b)
        rows = sample_rows(one.q_len, count, seed=b)
        answer = attend_rows(one, inputs.request(b), 0, rows)
        expected.append(Expected(0, [start + row for row in rows], answer))
    return expected
