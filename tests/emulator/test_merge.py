"""The merge kernel on the host: every access checked, random merges among poison."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
from helpers.merge_cases import FORMS, MergeCall, MergeCase, random_case

import cupyattn

from . import gpu

# Rows of 13 chunks of 16 bytes, with gaps.
PLAIN = MergeCase(head_dim=104, strides="gaps")


@pytest.fixture
def emulated() -> Iterator[gpu.EmulatedGpu]:
    with gpu.plugged_in() as found:
        yield found


def run_and_check(case: MergeCase, emulated: gpu.EmulatedGpu) -> None:
    emulated.forget()
    call = MergeCall.prepare(case, np)
    call.run()
    call.check()
    call.rerun()


@pytest.mark.parametrize("first", range(0, 120, 40))
def test_random_merges(emulated: gpu.EmulatedGpu, first: int) -> None:
    for seed in range(first, first + 40):
        emulated.seed, emulated.arch = seed % 3, (900, 800)[seed % 2]
        run_and_check(random_case(seed), emulated)


@pytest.mark.parametrize("form", FORMS)
def test_more_heads_than_a_block_has_rows(emulated: gpu.EmulatedGpu, form: str) -> None:
    emulated.mode = "plain"
    run_and_check(MergeCase(form=form, num_rows=2, num_heads=300, head_dim=72), emulated)


def test_one_state_is_copied_bit_for_bit(emulated: gpu.EmulatedGpu) -> None:
    rng = np.random.default_rng(0)
    v = rng.standard_normal((4, 1, 3, 40)).astype(np.float32)
    s = rng.normal(0, 50, (4, 1, 3)).astype(np.float32)
    for base_on_e in (False, True):
        got_v, got_s = cupyattn.merge_states(v, s, lse_base_on_e=base_on_e)
        np.testing.assert_array_equal(got_v, v[:, 0])
        np.testing.assert_array_equal(got_s, s[:, 0])


def test_rows_with_bad_offsets_are_nan(emulated: gpu.EmulatedGpu) -> None:
    v, s = np.ones((6, 2, 24), np.float32), np.zeros((6, 2), np.float32)
    indptr = np.array([0, 7, 3, -1, 2, 6, 6, -(2**31), 2**31 - 1, 2], np.int32)
    got_v, got_s = cupyattn.variable_length_merge_states(v, s, indptr)
    bad = np.array([1, 1, 1, 1, 0, 0, 1, 1, 1], bool)
    assert (np.isnan(got_v).all((1, 2)) == bad).all() and (np.isnan(got_s).all(1) == bad).all()
    assert (got_v[4] == 1).all() and (got_s[4] == 2).all()
    assert (got_v[5] == 0).all() and (got_s[5] == -np.inf).all()


def test_bad_lse_shows_in_its_row_alone(emulated: gpu.EmulatedGpu) -> None:
    case = MergeCase(num_states=7, form="states", empty=0.0)
    for lse in (np.inf, np.nan):
        call = MergeCall.prepare(replace(case, gives_outputs=False), np)
        call.inputs["s"].array[1, 2, 1] = lse
        call.run()
        for x in call.answers:
            is_nan = np.isnan(x) if x.ndim == 2 else np.isnan(x.astype(np.float32)).all(-1)
            assert is_nan[1, 1] and is_nan.sum() == 1
