"""How much of the kernels the small cases run (coverage.py)."""

from __future__ import annotations

import pytest

from . import coverage


@pytest.mark.slow
def test_nearly_every_line_runs() -> None:
    share, table = coverage.summarise(coverage.measure())
    assert share >= coverage.WANTED, table


def test_a_line_that_did_not_run_is_told() -> None:
    share, table = coverage.summarise({"a.cuh": {1: 3, 2: 0, 7: 1, 8: 0}, "b.cu": {1: 1}})
    assert share == 0.6
    assert "50.0 %  a.cuh  2, 8" in table and "60.0 %  of 5 lines" in table
