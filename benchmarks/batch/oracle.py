"""The float64 answers of a batch's sampled rows: the oracle of single requests, one by one."""

from __future__ import annotations

import random

from ..oracle import ROWS_A_CASE, Expected, attend_rows, sample_rows
from .case import BatchCase
from .inputs import BatchInputs


def expect_batch(case: BatchCase, inputs: BatchInputs) -> list[Expected]:
    """Sampled rows of the checked requests, numbered as in an answer [1, rows of all requests, Hq,
    D]."""
    requests = checked_requests(case)
    count = max(2, ROWS_A_CASE // len(requests))
    expected = []
    for b in requests:
        start = case.q_offsets[b]
        one = case.request(b)
        rows = sample_rows(one.q_len, count, seed=b)
        answer = attend_rows(one, inputs.request(b), 0, rows)
        expected.append(Expected(0, [start + row for row in rows], answer))
    return expected


def checked_requests(case: BatchCase) -> list[int]:
    """All requests, or `case.checked` of them: the first, the last, those with the fewest and the
    most keys, and random ones."""
    count = case.checked
    if count is None or count >= case.batch:
        return list(range(case.batch))
    kv_lens = case.kv_lens
    chosen = {0, case.batch - 1, kv_lens.index(min(kv_lens)), kv_lens.index(max(kv_lens))}
    others = [b for b in range(case.batch) if b not in chosen]
    random.Random(case.name).shuffle(others)
    return sorted([*chosen, *others[: max(0, count - len(chosen))]])
