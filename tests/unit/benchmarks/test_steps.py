"""Lengths that change from plan() to plan(), and their times without a GPU."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from benchmarks import plan_times
from benchmarks.batch.cases import BATCH_CASES
from benchmarks.batch.steps import draw_steps


@pytest.mark.parametrize("page_size", [1, 16])
def test_steps_of_decode_grow_by_a_key_and_now_and_then_one_is_done(page_size: int) -> None:
    steps = draw_steps([(6, 1, 100)], page_size, 50, seed=1)
    replaced = 0
    for one, other in pairwise(steps):
        grown = other.kv_lens - one.kv_lens
        assert np.count_nonzero(grown != 1) <= 1
        replaced += int(np.any(grown != 1))
    assert 0 < replaced < 25
    assert all((step.qo_indptr == np.arange(7)).all() for step in steps)


def test_prompts_are_drawn_anew_beside_decodes() -> None:
    steps = draw_steps([(2, 64, 200), (3, 1, 100)], 16, 40, seed=2)
    for one, other in pairwise(steps):
        rows = np.diff(other.qo_indptr)
        assert (rows[:2] >= 16).all() and (rows[:2] < 112).all() and (rows[2:] == 1).all()
        assert (other.kv_lens[:2] >= rows[:2]).all()
        assert (other.kv_lens[:2] != one.kv_lens[:2]).any()
    assert len({step.kv_lens.tobytes() for step in steps}) == len(steps)


@pytest.mark.parametrize("page_size", [1, 16, 64])
def test_tables_of_a_step_hold_its_keys(page_size: int) -> None:
    steps = draw_steps([(5, 1, 70), (2, 40, 90)], page_size, 20, seed=3)
    for step in steps:
        counts = np.diff(step.kv_indptr)
        assert (counts * page_size - page_size + step.last_page_len == step.kv_lens).all()
        assert step.table is steps[0].table and len(step.table) >= step.kv_indptr[-1]
        assert all(x.dtype == np.int32 for x in (step.qo_indptr, step.kv_indptr, step.table))


def test_ragged_steps_have_no_table() -> None:
    for step in draw_steps([(3, 40, 40)], 0, 5, seed=4):
        assert step.table is None and (step.qo_indptr == step.kv_indptr).all()


def test_plans_are_timed_without_a_gpu(monkeypatch: Any, capsys: Any) -> None:
    cases = [case for case in BATCH_CASES if case.name.startswith("plan_decode_64_")]
    monkeypatch.setattr(plan_times, "BATCH_CASES", cases)
    monkeypatch.setattr(plan_times, "NUM_STEPS", 3)
    assert plan_times.main([]) == 0
    _, line = capsys.readouterr().out.splitlines()
    name, median, least = line.split()
    assert name == "plan_decode_64_numpy" and float(median) >= float(least) > 0
