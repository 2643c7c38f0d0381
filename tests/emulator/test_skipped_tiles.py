"""Tiles of keys that weigh next to nothing, which Hopper leaves out where a call lets it."""

from __future__ import annotations

from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest
from helpers.share import one_of
from helpers.skip_cases import NAME, Call, Case

import cupyattn

from . import gpu

CASES = {
    "ragged": Case(),
    "pages": Case(page_size=16),
    "pages of 64": Case(page_size=64, dtype="bfloat16"),
    "dims 64": Case(dims=(64, 64), heads=(8, 2), heavy=448),
    "dims 80": Case(dims=(80, 80), heavy=384),
    "dims 192 and 128": Case(dims=(192, 128), heavy=384),
    "dims 256 and 128": Case(dims=(256, 128), page_size=32, heavy=384),
    "all keys": Case(causal=False),
    "few rows of a tile": Case(qo_len=(66, 130), heads=(1, 1)),
}
# Head dims of 256, and pages that no box of a tensor map fits.
EXACT = {"dims 256": Case(dims=(256, 256)), "pages of 3": Case(page_size=3)}


def made(case: Case, factor: float | None, seed: int = 1) -> tuple[Call, list[np.ndarray]]:
    dtype = np.dtype(np.float16 if case.dtype == "float16" else ml_dtypes.bfloat16)
    with gpu.plugged_in(num_sms=3, seed=seed) as emulated:
        call = Call(case, np, emulated.empty((16 << 20,), np.dtype(np.uint8)), dtype)
        answer = [np.array(x, np.float64) for x in call.run(factor)]
        assert emulated.has_launched("prefill_sm90")
    return call, answer


def check(call: Call, answer: list[np.ndarray], keeps_light: bool) -> None:
    out, lse = call.expected(keeps_light)
    near = 0.02 if call.case.dtype == "bfloat16" else 2e-3
    np.testing.assert_allclose(answer[0], out, rtol=near, atol=near)
    np.testing.assert_allclose(answer[1], lse, atol=1e-3)


@pytest.mark.parametrize("name", one_of(3, list(CASES)))
def test_light_tiles_are_left_out(name: str) -> None:
    """Beyond the factor they are, below it they are not; and neither without it."""
    case = CASES[name]
    check(*made(case, case.factor(2.0 * case.weight)), keeps_light=False)
    check(*made(case, case.factor(0.5 * case.weight)), keeps_light=True)
    check(*made(case, 0.0), keeps_light=True)


@pytest.mark.parametrize("name", EXACT)
def test_others_are_exact(name: str) -> None:
    case = EXACT[name]
    check(*made(case, case.factor(2.0 * case.weight)), keeps_light=True)


def test_tiles_that_need_a_mask_are_not_left_out() -> None:
    """A window cuts tiles of light keys, and others have none but light ones."""
    case = Case(window_left=550)
    call, (out, lse) = made(case, case.factor(2.0 * case.weight))
    all_of_them, none = call.expected(True), call.expected(False)
    assert (out >= none[0] - 0.01).all() and (out <= all_of_them[0] + 0.01).all()
    assert (lse >= none[1] - 1e-3).all() and (lse <= all_of_them[1] + 1e-3).all()
    assert (out < all_of_them[0] - 0.1).mean() > 0.5


def test_the_largest_logit_is_never_left_out() -> None:
    """Not even by a factor that is larger than the number of keys, where keys rise."""
    case = Case(gap=0.5, causal=False)  # the keys that come last are the largest
    check(*made(case, 1e6), keeps_light=True)


def check_warps_that_differ() -> None:
    """The last 16 rows of each 64 see light keys as heavy ones, so that none is left out."""
    case = replace(CASES["ragged"], qo_len=(192,), kv_len=(700,), heads=(1, 1))
    dtype = np.dtype(np.float16)
    with gpu.plugged_in(num_sms=3, seed=1) as emulated:
        call = Call(case, np, emulated.empty((16 << 20,), np.dtype(np.uint8)), dtype)
        sees_all = np.arange(192) // 16 % 4 == 3
        q = np.array(call.arguments[0])
        q[sees_all, :, 0] = 0.0
        factor = {NAME: case.factor(2.0 * case.weight)}
        out, lse = call.wrapper.run(q, *call.arguments[1:], return_lse=True, **factor)
    wanted, wanted_lse = call.expected(keeps_light=True)
    np.testing.assert_allclose(lse[~sees_all], wanted_lse[~sees_all], atol=1e-3)
    np.testing.assert_allclose(out[~sees_all].astype(np.float64), wanted[~sees_all], rtol=2e-3)


def test_warps_decide_together() -> None:
    check_warps_that_differ()


def test_bits_do_not_depend_on_the_order() -> None:
    case = CASES["ragged"]
    factor = case.factor(2.0 * case.weight)
    first, other = (made(case, factor, seed)[1] for seed in (1, 2))
    for x, y in zip(first, other, strict=True):
        np.testing.assert_array_equal(x, y)


@pytest.mark.parametrize("factor", [0.01, 1.0, 30.0])
def test_what_rows_lose_is_bounded(factor: float) -> None:
    """By the factor, of logits of any size, which fall from block to block for each row apart."""
    rng = np.random.default_rng(int(factor))
    q, k, v = (rng.standard_normal((512, h, 128)).astype(np.float16) for h in (4, 2, 2))
    k[..., 0] = rng.integers(-3, 4, (4, 1, 1)).repeat(128, axis=0)[..., 0] * 3.0
    q[..., 0] = 4.0
    exact, lse = cupyattn.single_prefill_with_kv_cache(q, k, v, causal=True, return_lse=True)
    with gpu.plugged_in(num_sms=3, seed=3):
        got, got_lse = cupyattn.single_prefill_with_kv_cache(
            q, k, v, causal=True, return_lse=True, **{NAME: factor}
        )
    most = 2.0 * factor * np.abs(v).max() + 4e-3
    assert np.abs(got.astype(np.float64) - exact).max() <= most
    assert (got_lse <= lse + 1e-3).all() and (got_lse >= lse - np.log2(1.0 + factor) - 1e-3).all()


def test_a_logit_that_is_no_number_is_not_left_out() -> None:
    case = replace(CASES["ragged"], qo_len=(200,), kv_len=(700,))
    with gpu.plugged_in(num_sms=3, seed=1) as emulated:
        call = Call(case, np, emulated.empty((16 << 20,), np.dtype(np.uint8)), np.dtype(np.float16))
        keys = np.array(call.arguments[1])
        keys[100, 0, 3] = np.nan
        q = np.array(call.arguments[0])
        out = call.wrapper.run(q, keys, call.arguments[2], **{NAME: 1e4})
    assert np.isnan(out).all()
