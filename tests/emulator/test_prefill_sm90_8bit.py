"""prefill_sm90 on the host where queries, keys and values have 8 bits."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from helpers import eight_bit_cases
from helpers.batch_cases import Case as BatchCase
from helpers.batch_cases import Problem
from helpers.cases import Case
from helpers.eight_bit_cases import E4M3, INT8
from helpers.share import one_of

import cupyattn
from cupyattn import reference
from cupyattn.choose.candidates import only_form
from cupyattn.launch.tiles.forms import AS_THEY_ARE

from . import gpu, run, test_prefill_sm90

SERVED = eight_bit_cases.PREFILL_SM90
BASE = replace(
    test_prefill_sm90.BASE, dtype=E4M3, kv_dtype=E4M3, head_dim_qk=128, head_dim_vo=128, kv_len=500
)
CAUSAL = replace(BASE, causal=True)
NARROW = replace(CAUSAL, head_dim_qk=64, head_dim_vo=64)
KINDS = [pytest.param(kind, id=kind) for kind in SERVED.dtypes]


def typed(case: Case, kind: str) -> Case:
    return case if kind != INT8 else replace(case, dtype=INT8, scale_q="per_head", scale_k="float")


@only_form(AS_THEY_ARE)
def check(case: Case, **facts: Any) -> run.Answer:
    answer = run.single(case, **facts)
    assert "prefill_sm90" in test_prefill_sm90.kernels(answer)
    assert "widen_rows" not in {launch.name for launch in answer.launches}
    answer.check()
    return answer


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("causal", [False, True])
def test_prompts(causal: bool, kind: str) -> None:
    check(typed(replace(BASE, causal=causal), kind))


@pytest.mark.parametrize(
    "options",
    one_of(
        4,
        [
            {"scale_q": "per_head", "scale_k": "per_head", "scale_v": "per_head"},
            {"group": 5, "scale_q": "per_head", "kv_len": 90},
            {"window_left": 130},
            {"window_left": 0, "causal": False, "window_right": 2},
            {"has_sinks": True},
            {"kv_len": 40},  # fewer keys than queries: rows without keys
            {"kv_len": 0},
            {"kv_layout": "HND", "strides": ("padded",) * 4},
            {"o_dtype": "float32"},
            {"o_dtype": "float16"},
            {"o_dtype": E4M3},
            {"logits_soft_cap": 8.0},
            {"logits_soft_cap": 0.5, "scale_q": "per_head", "has_sinks": True},
            {"pos_encoding_mode": "ALIBI"},
            {"pos_encoding_mode": "ALIBI", "window_left": 70},
            {"sm_scale": 2.0},
            {"kv_len": 1500, "scale_v": "per_head"},  # sums are emptied twice
        ],
    ),
)
def test_options(options: dict[str, Any]) -> None:
    check(replace(CAUSAL, **options))


@pytest.mark.parametrize("of_elements", [False, True])
@only_form(AS_THEY_ARE)
def test_gates(of_elements: bool) -> None:
    rng = np.random.default_rng(8)
    q, k, v = (
        rng.standard_normal((n, h, 128)).astype(ml_dtypes.float8_e4m3fn)
        for n, h in ((40, 4), (300, 2), (300, 2))
    )
    gate = rng.standard_normal((40, 4, 128) if of_elements else (40, 4)).astype(np.float32)
    options: dict[str, Any] = {"causal": True, "output_gate": gate, "o_dtype": "float32"}
    with gpu.plugged_in() as emulated:
        out = cupyattn.single_prefill_with_kv_cache(q, k, v, **options)
        assert not emulated.has_launched("widen_rows")
    exact = cupyattn.single_prefill_with_kv_cache(q, k, v, **options)
    assert np.square(out - exact).mean() < 0.03**2 * np.square(exact).mean()


@pytest.mark.parametrize("seed", range(1, 3))
def test_the_order_of_warps_changes_no_bit(seed: int) -> None:
    first, second = (check(CAUSAL, seed=x) for x in (0, seed))
    for a, b in zip(first.bits(), second.bits(), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("dims", [x for x in SERVED.dims if x != (128, 128)])
def test_head_dims(dims: tuple[int, int]) -> None:
    case = replace(CAUSAL, head_dim_qk=dims[0], head_dim_vo=dims[1])
    check(case)
    # Rows of Q one by one, and an item after another.
    check(replace(case, group=5, has_sinks=True, scale_q="per_head"), num_sms=1)


PAGED = replace(test_prefill_sm90.PAGED, problem=Problem(E4M3, E4M3, (128, 128)))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("page_size", one_of(2, [16, 64, 8]))
def test_pages(page_size: int, kind: str) -> None:
    problem = replace(PAGED.problem, dtype=kind)
    check_batch(replace(PAGED, problem=problem, page_size=page_size, is_pair=True))


@only_form(AS_THEY_ARE)
def check_batch(case: BatchCase, **facts: Any) -> run.Answer:
    answer = run.batch(case, **facts)
    assert "prefill_sm90" in test_prefill_sm90.kernels(answer)
    answer.check()
    return answer


@pytest.mark.parametrize("seed", one_of(20, range(60)))
@only_form(AS_THEY_ARE)
def test_random_requests(seed: int) -> None:
    run.single(run.small(eight_bit_cases.single(seed, SERVED))).check()


@pytest.mark.parametrize("seed", one_of(20, range(60)))
@only_form(AS_THEY_ARE)
def test_random_batches(seed: int) -> None:
    run.batch(eight_bit_cases.batch(seed, replace(SERVED, most_keys=600))).check()


# Values of keys that causality hides: the sweep of a masked tile makes them zeros.
@pytest.mark.parametrize("key", one_of(2, [290, 256, 300, 499]))
def test_hidden_values_do_not_contaminate(key: int) -> None:
    check_hidden_values(key)


def check_hidden_values(key: int, **facts: Any) -> None:
    case = replace(CAUSAL, window_left=200)
    spoil = {"v": [((key, 1, 3), np.nan), ((40, 0, 60), -np.nan), ((41, 1, 127), np.nan)]}
    check(case, spoil=spoil, **facts)


@only_form(AS_THEY_ARE)
def attend(q: np.ndarray, k: np.ndarray, v: np.ndarray, **facts: Any) -> tuple[Any, ...]:
    """(out, lse) of rounded inputs [n, heads, head_dim], and what float64 says of them."""
    inputs = [x.astype(ml_dtypes.float8_e4m3fn) for x in (q, k, v)]
    facts.setdefault("num_sms", 1)  # which has all keys, one after another
    with gpu.plugged_in(**facts) as emulated:
        out, lse = cupyattn.single_prefill_with_kv_cache(*inputs, return_lse=True)
        assert emulated.has_launched("prefill_sm90")
    return out.astype(np.float64), lse, *reference.attention(*inputs)


def check_sums_are_emptied(**facts: Any) -> None:
    """Values of one sign: what the tensor cores' 14 bits lose of a long sum goes one way."""
    rng = np.random.default_rng(1)
    q, k = rng.standard_normal((2, 64, 1, 128))
    k = np.repeat(k[:1], 4096, 0)
    v = 1 + 0.1 * rng.standard_normal((4096, 1, 128))
    out, lse, exact, exact_lse = attend(q, k, v, **facts)
    assert abs(out / exact - 1).mean() < 0.004
    assert abs(lse - exact_lse).max() < 1e-3


def test_sums_are_emptied() -> None:
    check_sums_are_emptied()


def check_small_probabilities(**facts: Any) -> None:
    """One of the last keys outweighs each of a thousand others 2^13 times, but not all of them."""
    rng = np.random.default_rng(2)
    q = np.zeros((64, 1, 128))
    q[:, :, 0] = 16
    k = 0.01 * rng.standard_normal((2048, 1, 128))
    k[:, :, 0] = 0
    k[-3, :, 0] = 6.5  # a logit of 9.2
    v = 1 + 0.1 * rng.standard_normal((2048, 1, 128))
    v[-3] = -1
    out, _, exact, _ = attend(q, k, v, **facts)
    assert abs(out - exact).max() < 0.06


def test_small_probabilities_count() -> None:
    check_small_probabilities()


def check_rising_logits(**facts: Any) -> None:
    """Keys from the last to the first outweigh those before them: maxima move in every tile."""
    rng = np.random.default_rng(3)
    q = rng.standard_normal((64, 1, 128))
    q[:, :, 0] = 8
    k = rng.standard_normal((1500, 1, 128))
    k[:, 0, 0] = np.linspace(14, -14, 1500)
    v = 1 + rng.standard_normal((1500, 1, 128))
    v[700:] -= 2  # what has been added up before counts for little at the end
    out, lse, exact, exact_lse = attend(q, k, v, **facts)
    assert abs(out - exact).mean() < 0.05
    assert abs(lse - exact_lse).max() < 5e-3


def test_rising_logits() -> None:
    check_rising_logits()


def check_far_logits(**facts: Any) -> None:
    """Logits of a tile beyond the range of float32 under the maximum of the tiles before it."""
    # A key of the tenth tile, and one of the fifth, decide the rows that have not seen them.
    case = replace(CAUSAL, kv_len=900, qo_len=64, scale_q="per_head", scale_k="per_head")
    keys = [((slice(200, 203), slice(None), 0), 100.0), ((slice(500, 540), slice(None), 0), 60.0)]
    spoil = {"q": [((slice(None, None, 3), slice(None), 0), 200.0)], "k": keys}
    check(case, spoil=spoil, **facts)


def test_far_logits() -> None:
    check_far_logits()


def check_signed_scales(**facts: Any) -> None:
    """Scales below zero, and of zero, of heads whose logits leave the range of float32."""
    case = replace(CAUSAL, kv_len=900, qo_len=64, scale_q="per_head", scale_k="per_head")
    spoil = {
        "q": [((slice(None, None, 3), slice(None), 0), 200.0)],
        "k": [
            ((slice(200, 203), slice(None), 0), 100.0),
            ((slice(500, 540), slice(None), 0), -60.0),
        ],
        "scale_q": [((1,), -0.7), ((2,), 0.0)],
    }
    check(case, spoil=spoil, **facts)


@only_form(AS_THEY_ARE)
def test_signed_scales() -> None:
    check_signed_scales()


def check_new_rows(**facts: Any) -> None:
    """Rows that see no key of an item's first tile, and in the next small logits alone."""
    case = replace(CAUSAL, num_kv_heads=1, group=1, qo_len=100, kv_len=180)
    spoil = {k: [((slice(None), 0, 0), x)] for k, x in (("q", 8.0), ("k", -32.0))}
    check(case, spoil=spoil, **facts)


@only_form(AS_THEY_ARE)
def test_new_rows() -> None:
    check_new_rows()


def check_boxes(**facts: Any) -> None:
    """Rows of O that leave in boxes of a warp's, the rows past the last box, and those of a request
    behind; sums take the place of a box that may still be read."""
    check(replace(CAUSAL, num_kv_heads=2, group=4, qo_len=21, kv_len=1400), **facts)
    check(replace(CAUSAL, num_kv_heads=1, group=2, qo_len=41, kv_len=100), **facts)


@only_form(AS_THEY_ARE)
def test_boxes() -> None:
    check_boxes()


@only_form(AS_THEY_ARE)
def test_a_nan_that_is_seen_is_answered() -> None:
    answer = run.single(CAUSAL, spoil={"v": [((450, 1, 3), np.nan)], "k": [((470, 0, 5), np.nan)]})
    answer.check()
    assert np.isnan(answer.out.astype(np.float32)).any()


# A warp makes a tile again if one of its rows asks for a larger maximum, or for room to grow.
def test_rows_do_not_depend_on_those_beside_them() -> None:
    check_rows_alone()


def check_rows_alone(**facts: Any) -> None:
    """Rows of middling sums beside one whose maximum moves in many tiles, and without it."""
    case = replace(BASE, kv_len=1500, qo_len=64, num_kv_heads=1, group=1, sm_scale=0.01)
    rising = np.linspace(14, -14, case.kv_len).astype(np.float32)
    facts.setdefault("num_sms", 1)
    keys = [((slice(None), 0, 0), rising)]
    calm, moved = {"q": [((slice(None), 0, 0), 0.0)]}, {"q": [((slice(None), 0, 0), 0.0)]}
    moved["q"].append(((slice(40, 41), 0, 0), 448.0))
    answers = [check(case, spoil={"k": keys, **x}, **facts) for x in (calm, moved)]
    others = np.arange(case.qo_len) != 40
    for first, second in zip(*(answer.bits() for answer in answers), strict=True):
        np.testing.assert_array_equal(first[others], second[others])


def test_a_scale_of_zero_gives_the_mean() -> None:
    check(replace(BASE, sm_scale=0.0))


def check_a_seen_nan(**facts: Any) -> None:
    """Behind a key that a window hides, in a tile whose values are swept."""
    case = replace(CAUSAL, window_left=200)
    check(case, spoil={"v": [((450, 1, 3), np.nan), ((451, 1, 6), np.nan)]}, **facts)


def test_a_nan_that_is_seen_reaches_its_column() -> None:
    check_a_seen_nan()
