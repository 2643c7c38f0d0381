"""The merge kernel on the host: every access checked, random merges among poison."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from helpers import calls
from helpers.merge_calls import (
    FORMS,
    FP8,
    Call,
    MergeCase,
    check_bad_offsets,
    fp8_cases,
    random_case,
)
from helpers.share import one_of

import cupyattn

from . import gpu

# Rows of 13 chunks of 16 bytes, with gaps.
PLAIN = MergeCase(head_dim=104, strides="gaps")


def run_and_check(case: MergeCase, emulated: gpu.EmulatedGpu) -> None:
    emulated.forget()
    calls.run_and_check(Call(case, np))


@pytest.mark.parametrize("first", one_of(6, range(0, 120, 20)))
def test_random_merges(emulated: gpu.EmulatedGpu, first: int) -> None:
    for seed in range(first, first + 20):
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
    check_bad_offsets(np)


def test_bad_lse_shows_in_its_row_alone(emulated: gpu.EmulatedGpu) -> None:
    case = MergeCase(num_states=7, form="states", empty=0.0)
    for lse in (np.inf, np.nan):
        call = Call(replace(case, gives_outputs=False), np)
        call.inputs["s"].array[1, 2, 1] = lse
        for x in call.run():
            is_nan = np.isnan(x) if x.ndim == 2 else np.isnan(x.astype(np.float32)).all(-1)
            assert is_nan[1, 1] and is_nan.sum() == 1


@pytest.mark.parametrize("narrow", FP8)
@pytest.mark.parametrize("arch", [800, 900])
def test_merges_into_fp8(emulated: gpu.EmulatedGpu, narrow: str, arch: int) -> None:
    emulated.arch = arch
    # Rows of whole 16 bytes, and rows that are not.
    for head_dim, dtype in ((64, "float16"), (40, "bfloat16"), (33, "float32")):
        for case in fp8_cases(dtype, narrow, head_dim):
            run_and_check(case, emulated)
