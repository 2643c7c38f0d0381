"""Calls of 8 bits: the model of low precision, the tolerance, and that seeds draw everything."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from helpers import cases, compare, eight_bit_cases, lowprec, single_calls
from helpers.batch_calls import planned
from helpers.batches import WORKSPACE
from helpers.calls import run_and_check

PLAIN = cases.Case(
    seed=3,
    qo_len=40,
    kv_len=300,
    num_kv_heads=2,
    group=2,
    head_dim_qk=64,
    head_dim_vo=64,
    dtype="float8_e4m3fn",
    kv_dtype="float8_e4m3fn",
    causal=True,
)
KINDS = [PLAIN, replace(PLAIN, dtype="int8", scale_q="per_head", scale_k="float")]


def checked(case: cases.Case, out: np.ndarray, lse: np.ndarray) -> None:
    single_calls.Call(case, np).check(out, lse)


@pytest.mark.parametrize("case", KINDS, ids=["e4m3", "int8"])
def test_every_honest_order_passes(case: cases.Case) -> None:
    inputs = cases.make_inputs(case)
    for order in ({"kv_tile": 16}, {"kv_tile": 128, "is_reversed": True}, {"kv_tile": 1 << 20}):
        checked(case, *cases.low_precision(case, inputs, **order))


@pytest.mark.parametrize("case", KINDS, ids=["e4m3", "int8"])
@pytest.mark.parametrize("wrong", ["keys", "values", "scale of a head", "a hidden key", "P"])
def test_mistakes_fail(case: cases.Case, wrong: str) -> None:
    inputs = cases.make_inputs(case)
    given = dict(inputs)
    if wrong == "keys":
        given["k"] = np.concatenate([inputs["k"][:-2], inputs["k"][-2:][::-1]])
    elif wrong == "values":
        given["v"] = inputs["v"][:, :, ::-1]
    elif wrong == "scale of a head":
        given["scale_v"] = np.float32([1, 1.2])
    elif wrong == "a hidden key":
        case = replace(case, window_left=100)
        given["k"] = inputs["k"]
    out, lse = cases.low_precision(replace(case, window_left=-1), given)
    if wrong == "P":
        out = out * out.dtype.type(1.25)
    with pytest.raises(AssertionError):
        checked(case, out, lse)


def test_slack_is_small_beside_the_values() -> None:
    arguments = cases.arguments(PLAIN, cases.make_inputs(PLAIN))
    slack = lowprec.slack_of_8_bits(**arguments)
    exact, _ = cases.reference(PLAIN, cases.make_inputs(PLAIN))
    assert slack.shape == exact.shape[:2]
    assert 0.002 < np.median(slack) < 0.3 * np.median(np.abs(exact).max(-1))


def test_slack_takes_all_options() -> None:
    for seed in range(20):
        case = eight_bit_cases.single(seed)
        inputs = cases.make_inputs(case)
        low = cases.low_precision(case, inputs, kv_tile=128, is_reversed=True)
        call = single_calls.Call(case, np)
        compare.assert_close(
            low[0],
            low[1],
            *map(np.asarray, cases.reference(case, inputs)),
            *cases.low_precision(case, inputs),
            case,
            slack=call.slack(),
            logit_magnitude=cases.logit_magnitude(case),
        )


def test_random_requests_run_on_the_cpu() -> None:
    for seed in range(12):
        run_and_check(single_calls.Call(eight_bit_cases.single(seed), np))


def test_random_batches_run_on_the_cpu() -> None:
    for seed in range(16):
        run_and_check(planned(eight_bit_cases.batch(seed), np, WORKSPACE))


def test_seeds_draw_everything() -> None:
    singles = [eight_bit_cases.single(seed) for seed in range(300)]
    batches = [eight_bit_cases.batch(seed) for seed in range(300)]
    every = eight_bit_cases.EVERYTHING
    assert {c.dtype for c in singles} == {c.problem.dtype for c in batches} == {*every.dtypes}
    assert {(c.head_dim_qk, c.head_dim_vo) for c in singles} == {*every.dims}
    for found in ("causal", "has_sinks", "return_lse"):
        assert {getattr(c, found) for c in singles} == {False, True}
    assert {c.wrapper for c in batches} == {"paged", "ragged"}
    assert any(c.problem.is_masked for c in batches) and any(c.problem.is_capped for c in batches)
    assert any(0 in c.kv_len for c in batches) and any(0 in c.qo_len for c in batches)
    assert any(c.kv_len < c.qo_len for c in singles)
    narrow = eight_bit_cases.Served(dtypes=("int8",), dims=((64, 64),), has_caps=False)
    assert {eight_bit_cases.single(seed, narrow).logits_soft_cap for seed in range(50)} == {None}
