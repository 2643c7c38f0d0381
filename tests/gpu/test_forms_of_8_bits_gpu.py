"""Every form in which queries of 8 bits are served, on the GPU: random calls by seeds."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from helpers import eight_bit_cases, single_calls
from helpers.batch_calls import planned
from helpers.on_gpu import try_random, workspace
from helpers.share import one_of

import cupyattn
from cupyattn import flash_attn
from cupyattn.choose.candidates import only_form
from cupyattn.launch.tiles.forms import FORMS, KEYS

pytestmark = pytest.mark.gpu

cupy = pytest.importorskip("cupy")

BLOCK, NUM_CASES = 25, 100
# Outputs of e4m3 have no array of CuPy's.
SERVED = replace(
    eight_bit_cases.EVERYTHING, page_sizes=(16,), o_dtypes=(None, "float16", "float32")
)
FIRST = one_of(4, range(0, NUM_CASES, BLOCK))  # each case has kernels of its own


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("first", FIRST)
def test_random_requests(first: int, form: str) -> None:
    with only_form(form):
        make = lambda seed, xp: single_calls.Call(eight_bit_cases.single(seed, SERVED), xp)  # noqa: E731
        try_random(first, BLOCK, make)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("first", FIRST)
def test_random_batches(first: int, form: str) -> None:
    with only_form(form):
        make = lambda seed, xp: planned(eight_bit_cases.batch(seed, SERVED), xp, workspace(xp))  # noqa: E731
        try_random(first, BLOCK, make)


@pytest.mark.parametrize("first", FIRST)
def test_keys_widened_beside_queries_of_16_bits(first: int) -> None:
    dtypes = "float16", "bfloat16"

    def request(seed: int, xp: Any) -> Any:
        case = eight_bit_cases.single(seed, SERVED)
        return single_calls.Call(replace(case, dtype=dtypes[seed % 2]), xp)

    def batch(seed: int, xp: Any) -> Any:
        case = eight_bit_cases.batch(seed, SERVED)
        problem = replace(case.problem, dtype=dtypes[seed % 2])
        return planned(replace(case, problem=problem), xp, workspace(xp))

    with only_form(KEYS):
        try_random(first, BLOCK, request)
        try_random(first, BLOCK, batch)


@pytest.mark.parametrize(("rows", "keys"), [(1, 3000), (3, 900), (40, 700), (900, 900)])
def test_forms_agree(torch: Any, rows: int, keys: int) -> None:
    """Of ragged requests, and of a call without a plan."""
    torch.manual_seed(1)
    q, k, v = (
        torch.randn(2, n, h, 128, device="cuda").to(torch.float8_e4m3fn)
        for n, h in ((rows, 8), (keys, 2), (keys, 2))
    )
    space = torch.zeros(1 << 27, dtype=torch.uint8, device="cuda")
    answers = []
    for form in FORMS:
        with only_form(form):
            wrapper = cupyattn.BatchPrefillWithRaggedKVCacheWrapper(space)
            offsets = [np.array([0, n, 2 * n], np.int32) for n in (rows, keys)]
            options = {"q_data_type": "float8_e4m3fn", "kv_data_type": "float8_e4m3fn"}
            wrapper.plan(*offsets, 8, 2, 128, causal=True, **options)
            answers.append(wrapper.run(*(x.flatten(0, 1) for x in (q, k, v))))
            answers.append(flash_attn.flash_attn_func(q, k, v, causal=True).flatten(0, 1))
    first, *others = (x.float() for x in answers)
    for other in others:
        assert (other - first).norm() < 0.03 * first.norm()
    assert any("values" in note and "widened" in note for note in cupyattn.explain(wrapper).notes)
