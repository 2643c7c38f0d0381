"""Merges into fp8."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from helpers.calls import run_and_check
from helpers.fake_gpu import Gpu, pointer
from helpers.merge_calls import FP8, Call, fp8_cases

import cupyattn
from cupyattn.core import dtypes
from cupyattn.errors import ArgumentError
from cupyattn.flash_attn import merge_attn_states
from cupyattn.launch.driver import params


@pytest.mark.parametrize("narrow", FP8)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_answers_are_rounded_once_and_saturated(narrow: str, dtype: str) -> None:
    for case in fp8_cases(dtype, narrow, 40):
        run_and_check(Call(case, np))


def test_scales_that_do_not_fit() -> None:
    v, s = np.ones((4, 2, 8), np.float16), np.zeros((4, 2), np.float32)
    narrow = np.zeros((4, 2, 8), dtypes.parse(FP8[0]).numpy)
    for scale, out, words in (
        (0.5, None, "output_scale: belongs to an fp8 out, and out is None"),
        (0.5, np.zeros_like(v), "output_scale: belongs to an fp8 out, and out is float16"),
        (0.0, narrow, "output_scale: got 0.0; wanted a number above 0"),
        ("1", narrow, "output_scale: got '1'"),
        (np.ones(2, np.float32), narrow, r"output_scale: shape is \[2\]"),
        (np.ones(1), narrow, "output_scale: dtype"),
    ):
        with pytest.raises(ArgumentError, match=words):
            cupyattn.merge_state(v, s, v, s, out=out, output_scale=scale)
    with pytest.raises(ArgumentError, match="prefill_tokens_with_context: got -1"):
        merge_attn_states(np.zeros_like(v), v, s.T, v, s.T, None, -1)
    with pytest.raises(ArgumentError, match="output: shape is"):
        merge_attn_states(np.zeros_like(v)[:3], v, s.T, v, s.T)
    with pytest.raises(ArgumentError, match="prefix_lse: dimension 0"):
        merge_attn_states(np.zeros_like(v), v, s, v, s)


def test_scales_on_the_device_reach_the_kernel_also_from_the_cache(
    gpu: Gpu, make: Callable
) -> None:
    if not hasattr(make(1), "untyped_storage"):
        pytest.skip("CuPy has no fp8 of its own")
    v, s = make(4, 2, 64, dtype="bfloat16"), make(4, 2, dtype="float32")
    out, scale = make(4, 2, 64, dtype="float8_e4m3fn"), make(1, dtype="float32")
    for given in (scale, make(1, dtype="float32"), 0.25, 0.5, None):
        for _ in range(2):
            cupyattn.merge_state(v, s, v, s, out=out, output_scale=given)
            *_, pointed, look = params.MERGE_STATES.unpack_from(gpu.launches[-1].params)
            is_number = given is None or isinstance(given, float)
            assert pointed == (0 if is_number else pointer(given))
            assert params.MERGE_LOOK.unpack(look)[8] == (1 / given if given and is_number else 1)
