"""Calls of 8-bit queries that are widened ahead, or with their keys and values, on the host."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from helpers import eight_bit_cases
from helpers.cases import Case
from helpers.eight_bit_cases import E4M3, INT8
from helpers.share import one_of

from cupyattn.choose.candidates import only_form
from cupyattn.launch.tiles.forms import ALL, KEYS, ON_ARRIVAL, QUERIES

from . import run, test_prefill_sm90_8bit

SERVED = replace(eight_bit_cases.EVERYTHING, most_keys=600)
CAUSAL = replace(test_prefill_sm90_8bit.CAUSAL, kv_len=200)
PAGED = test_prefill_sm90_8bit.PAGED


def check(answer: run.Answer, is_ahead: bool = True) -> run.Answer:
    """is_ahead: a launch ahead of attention widens rows."""
    answer.check()
    assert ("widen_rows" in {launch.name for launch in answer.launches}) == is_ahead
    return answer


@only_form(QUERIES)
def check_queries(case: Case, is_decode: bool = False) -> None:
    check(run.single(case, is_decode=is_decode))


@only_form(ON_ARRIVAL)
def check_arrival(case: Case, is_decode: bool = False, **facts: Any) -> None:
    """Portable kernels widen rows of q as they read them."""
    check(run.single(case, is_decode=is_decode, **facts), is_ahead=False)


@pytest.mark.parametrize(
    "options",
    one_of(
        4,
        [
            {"head_dim_qk": 160, "head_dim_vo": 160},
            {"head_dim_qk": 256, "head_dim_vo": 256},
            {"head_dim_qk": 192, "head_dim_vo": 192},
            {"head_dim_qk": 48, "head_dim_vo": 48, "strides": ("padded",) * 4},
            {"mask_kind": "bool"},
            {"pos_encoding_mode": "ROPE_LLAMA", "scale_k": "per_head"},
            {"head_dim_qk": 24, "head_dim_vo": 40},
            {"head_dim_qk": 512, "head_dim_vo": 512},
        ],
    ),
)
def test_options(options: dict[str, Any]) -> None:
    case = replace(CAUSAL, **options)
    check_queries(case)
    if case.head_dim_qk <= 256:
        check_arrival(case)
        step = replace(case, qo_len=1, mask_kind="none", scale_k="none")
        check_arrival(step, is_decode=True)


@pytest.mark.parametrize("is_portable", [False, True])
@pytest.mark.parametrize("changes", [{"pos_encoding_mode": "ROPE_LLAMA"}, {"head_dim_qk": 40}])
def test_int8(changes: dict[str, Any], is_portable: bool) -> None:
    case = test_prefill_sm90_8bit.typed(replace(CAUSAL, **changes), INT8)
    step = replace(case, qo_len=1, scale_q="float", scale_k="float")
    check_arrival(case, is_portable=is_portable)
    check_arrival(step, is_decode=True, is_portable=is_portable)
    if not is_portable:
        check_queries(case)
        check_queries(step, is_decode=True)


KEYS_TOO = replace(CAUSAL, qo_len=70, kv_len=90)


@only_form(ALL)
def check_all(case: Case, **facts: Any) -> None:
    """Kernels of 16 bits serve it, behind one launch that widens q, k and v."""
    answer = check(run.single(case, **facts))
    (widening,) = (launch for launch in answer.launches if launch.name == "widen_rows")
    assert widening.grid[1] == 3


@pytest.mark.parametrize("kind", [E4M3, INT8])
@pytest.mark.parametrize(
    "changes",
    one_of(
        3,
        [
            {},
            {"strides": ("padded",) * 4, "kv_layout": "HND"},
            {"head_dim_qk": 256, "head_dim_vo": 256},
            {"head_dim_qk": 192, "head_dim_vo": 128, "kv_len": 0},
            {"head_dim_qk": 40, "head_dim_vo": 24},
            {"qo_len": 2, "kv_len": 200, "scale_v": "per_head"},
            {"scale_q": "per_head", "scale_k": "per_head", "mask_kind": "bool"},
            {"o_dtype": "float32", "logits_soft_cap": 20.0, "has_sinks": True},
        ],
    ),
)
def test_keys_are_widened_too(changes: dict[str, Any], kind: str) -> None:
    check_all(test_prefill_sm90_8bit.typed(replace(KEYS_TOO, **changes), kind))


@pytest.mark.parametrize("kv_dtype", [E4M3, "float8_e5m2"])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize(
    "changes",
    one_of(
        2,
        [
            {"strides": ("padded",) * 4, "kv_layout": "HND", "scale_k": "float"},
            {"head_dim_qk": 256, "head_dim_vo": 256},
            {"head_dim_qk": 40, "head_dim_vo": 24, "kv_len": 0},
            {"qo_len": 2, "kv_len": 200, "scale_v": "per_head", "scale_k": "per_head"},
            {"o_dtype": "float32", "logits_soft_cap": 20.0, "mask_kind": "bool"},
        ],
    ),
)
@only_form(KEYS)
def test_keys_alone_are_widened(changes: dict[str, Any], dtype: str, kv_dtype: str) -> None:
    """Beside queries of 16 bits: what becomes of them has those queries' dtype."""
    case = replace(KEYS_TOO, dtype=dtype, kv_dtype=kv_dtype, **changes)
    check(run.single(case))


@pytest.mark.parametrize("seed", one_of(12, range(36)))
@only_form(KEYS)
def test_random_batches_of_keys_that_are_widened(seed: int) -> None:
    drawn = eight_bit_cases.batch(seed, SERVED)
    problem = replace(drawn.problem, dtype=("float16", "bfloat16")[seed % 2])
    run.batch(replace(drawn, problem=problem)).check()


@pytest.mark.parametrize("arch", [800, 900])
def test_keys_of_portable_kernels_are_widened_too(arch: int) -> None:
    check_all(KEYS_TOO, arch=arch, is_portable=True)


@pytest.mark.parametrize("seed", one_of(12, range(36)))
@only_form(ALL)
def test_random_requests_of_widened_keys(seed: int) -> None:
    run.single(run.small(eight_bit_cases.single(seed, SERVED))).check()


@pytest.mark.parametrize("seed", one_of(12, range(36)))
@only_form(ALL)
def test_random_batches_of_widened_keys(seed: int) -> None:
    run.batch(eight_bit_cases.batch(seed, SERVED)).check()


@pytest.mark.parametrize("seed", one_of(12, range(36)))
@only_form(QUERIES)
def test_random_batches_of_widened_queries(seed: int) -> None:
    run.batch(eight_bit_cases.batch(seed, SERVED)).check()


def small(kind: str) -> Case:
    case = replace(CAUSAL, qo_len=3, kv_len=40, logits_soft_cap=30.0, o_dtype="float32")
    return test_prefill_sm90_8bit.typed(case, kind)


@only_form(QUERIES)
def check_small(kind: str, **facts: Any) -> None:
    check(run.single(small(kind), **facts))


def check_small_arrival(kind: str, **facts: Any) -> None:
    check_arrival(small(kind), **facts)


@pytest.mark.parametrize("kind", [E4M3, INT8])
def test_kinds(kind: str) -> None:
    check_small(kind)
    check_small_arrival(kind)


@pytest.mark.parametrize("facts", [{"is_portable": True}, {"arch": 800, "is_portable": True}])
def test_other_cards(facts: dict[str, Any]) -> None:
    check_arrival(CAUSAL, **facts)
    check_arrival(replace(CAUSAL, qo_len=1), is_decode=True, **facts)
    batch = replace(PAGED, qo_len=(1, 20, 1), kv_len=(90, 60, 200))
    with only_form(ON_ARRIVAL):
        check(run.batch(batch, **facts), is_ahead=False)


def test_rows_off_16_bytes() -> None:
    case = replace(CAUSAL, strides=("unaligned",) * 4)
    check_queries(case)
    check_arrival(case)


@pytest.mark.parametrize("seed", one_of(12, range(36)))
@only_form(ON_ARRIVAL)
def test_random_batches_of_rows_that_arrive(seed: int) -> None:
    run.batch(eight_bit_cases.batch(seed, SERVED)).check()


@pytest.mark.parametrize("seed", one_of(12, range(36)))
def test_random_requests(seed: int) -> None:
    run.single(run.small(eight_bit_cases.single(seed, SERVED))).check()


@pytest.mark.parametrize("seed", one_of(12, range(36)))
def test_random_batches(seed: int) -> None:
    run.batch(eight_bit_cases.batch(seed, SERVED)).check()
