"""prefill_sm90 over fp8 keys on the host."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from helpers.batch_cases import Problem
from helpers.share import one_of

from . import run, test_prefill_sm90

FP8 = replace(
    test_prefill_sm90.CAUSAL, kv_dtype="float8_e4m3fn", scale_k="vector", scale_v="scalar"
)


@pytest.mark.parametrize(
    ("dims", "dtype", "kv_dtype"),
    one_of(
        2,
        [
            ((64, 64), "float16", "float8_e4m3fn"),
            ((64, 64), "bfloat16", "float8_e5m2"),
            ((96, 96), "float16", "float8_e5m2"),
            ((128, 128), "bfloat16", "float8_e4m3fn"),
            ((256, 256), "bfloat16", "float8_e4m3fn"),
            ((192, 128), "float16", "float8_e4m3fn"),
        ],
        is_several=True,
    ),
)
def test_fp8(dims: tuple[int, int], dtype: str, kv_dtype: str) -> None:
    case = replace(FP8, dtype=dtype, kv_dtype=kv_dtype, head_dim_qk=dims[0], head_dim_vo=dims[1])
    test_prefill_sm90.check(case)
    if dims != (256, 256):
        test_prefill_sm90.check(replace(case, kv_len=500, window_left=130, logits_soft_cap=5.0))


# Rows of whole 16 bytes, and rows whose last 16 have eight of NaN.
@pytest.mark.parametrize("dims", one_of(2, [(72, 72), (80, 80), (104, 24), (168, 136), (256, 128)]))
def test_fp8_of_other_head_dims(dims: tuple[int, int]) -> None:
    case = replace(FP8, head_dim_qk=dims[0], head_dim_vo=dims[1], strides=("padded",) * 4)
    test_prefill_sm90.check(case)
    test_prefill_sm90.check(replace(case, dtype="bfloat16", kv_dtype="float8_e5m2", kv_len=500))


ODD_PAGES = replace(
    test_prefill_sm90.PAGED,
    problem=Problem("bfloat16", "float8_e4m3fn", (72, 72)),
    page_size=1,
    window_left=150,
    is_padded=True,
)


@pytest.mark.parametrize(
    ("dims", "page_size"),
    one_of(3, product([(72, 72), (112, 80), (144, 136)], (1, 16)), is_several=True),
)
def test_fp8_pages_of_other_head_dims(dims: tuple[int, int], page_size: int) -> None:
    problem = replace(ODD_PAGES.problem, dims=dims)
    test_prefill_sm90.check_batch(replace(ODD_PAGES, problem=problem, page_size=page_size))


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_hidden_fp8_values_do_not_contaminate(value: float) -> None:
    case = replace(test_prefill_sm90.CAUSAL, kv_dtype="float8_e5m2")
    answer = run.single(case, spoil={"v": [((290, 1, 3), value), ((40, 0, 60), value)]})
    assert test_prefill_sm90.kernels(answer)[0] == "prefill_sm90"
    answer.check()


@pytest.mark.parametrize(
    ("dim", "page_size"), one_of(3, product((64, 128), (1, 16)), is_several=True)
)
def test_fp8_over_pages(dim: int, page_size: int) -> None:
    problem = Problem("bfloat16", "float8_e4m3fn", (dim, dim))
    test_prefill_sm90.check_batch(
        replace(test_prefill_sm90.PAGED, problem=problem, page_size=page_size, window_left=150)
    )
