"""prefill_sm90 over fp8 keys on the host."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from helpers import cases
from helpers.batch_cases import Problem
from helpers.share import one_of

import cupyattn
from cupyattn.choose.candidates import only_form
from cupyattn.launch.tiles.forms import AS_THEY_ARE

from . import gpu, run, test_prefill_sm90

FP8 = replace(
    test_prefill_sm90.CAUSAL, kv_dtype="float8_e4m3fn", scale_k="vector", scale_v="scalar"
)


@pytest.fixture(autouse=True)
def as_they_are() -> Iterator[None]:
    """Also where keys that are widened ahead are served sooner."""
    with only_form(AS_THEY_ARE):
        yield


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


# bfloat16 rows become float16: large ones, tiny ones and those with elements of both sizes, beside
# rows of zeros. The scale of the logits makes up for most of the power.
@pytest.mark.parametrize(
    ("power", "dims"),
    one_of(
        4,
        product((-30, -12, 15, 60), ((64, 64), (128, 128), (192, 128), (72, 72))),
        is_several=True,
    ),
)
def test_fp8_under_rows_of_any_size(power: int, dims: tuple[int, int]) -> None:
    check_rows_of_any_size(power, dims)
    check_rows_of_any_size(power, dims, "prefill_sm80", is_portable=True)


def check_rows_of_any_size(
    power: int, dims: tuple[int, int], kernel: str = "prefill_sm90", **facts: object
) -> None:
    case = replace(FP8, dtype="bfloat16", head_dim_qk=dims[0], head_dim_vo=dims[1])
    case = replace(case, sm_scale=2.0**-power / np.sqrt(dims[0]), strides=("padded",) * 4)
    q = cases.make_inputs(case)["q"]
    powers = np.array([power, power, power - 2, power, power + 1])[np.arange(len(q)) % 5]
    rows = q.astype(np.float32) * np.exp2(powers)[:, None, None]
    rows[7] = 0
    # A row with elements far from its largest.
    rows[12, :, ::2] *= 2.0**-9
    answer = run.single(case, spoil={"q": [((slice(None),), rows.astype(q.dtype))]}, **facts)
    assert test_prefill_sm90.kernels(answer)[0] == kernel
    answer.check()


# What a row cannot say stays its own.
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_fp8_under_rows_that_are_not_finite(value: float) -> None:
    case = replace(FP8, dtype="bfloat16")
    clean = run.single(case)
    spoilt = run.single(case, spoil={"q": [((33, 1, 5), value)]})
    same = np.ones(clean.out.shape[:2], bool)
    same[33, 1] = False
    for a, b in zip(clean.bits(), spoilt.bits(), strict=True):
        np.testing.assert_array_equal(a[same], b[same])
    assert not np.isfinite(spoilt.out[33, 1].astype(np.float32)).any()


# Both kernels multiply float16 and differ in the order of keys, and in the maxima under which
# probabilities are rounded.
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_a_row_over_fp8_is_decoded_verified_and_prefilled_alike(dtype: str) -> None:
    case = replace(FP8, dtype=dtype, kv_len=700, head_dim_qk=128, head_dim_vo=128)
    inputs = cases.make_inputs(case)
    answers = []
    for rows in (80, 8, 1):
        with gpu.plugged_in() as emulated:
            out, lse = cupyattn.single_prefill_with_kv_cache(
                inputs["q"][-rows:],
                inputs["k"],
                inputs["v"],
                causal=True,
                return_lse=True,
                o_dtype="float32",
            )
        answers.append((emulated.launches[0].name, out[-1], lse[-1]))
    names, outs, lses = zip(*answers, strict=True)
    assert names == ("prefill_sm90", "decode_sm80", "decode_sm80")
    np.testing.assert_array_equal(outs[1], outs[2])
    np.testing.assert_allclose(outs[0], outs[2], rtol=0, atol=1e-3 * np.abs(outs[2]).max())
    np.testing.assert_allclose(lses, lses[2:] * 3, rtol=0, atol=1e-5)


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
