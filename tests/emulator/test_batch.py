"""Batches through the public wrappers on the host: ragged and paged keys, splits, every option."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from helpers import batch_cases, batches, compare
from helpers.batch_cases import PROBLEMS, Case, Problem
from helpers.share import one_of

import cupyattn

from . import gpu, run

COUNT = len(PROBLEMS)
BASE = Case(
    seed=1,
    wrapper="paged",
    problem=Problem("bfloat16", "bfloat16", (64, 64)),
    qo_len=(40, 3),
    kv_len=(600, 500),
    page_size=16,
    num_kv_heads=2,
    group=4,
    kv_layout="NHD",
    causal=True,
    window_left=-1,
    sm_scale=None,
    has_sinks=False,
    scale_v="none",
    is_pair=True,
    is_packed=False,
    ids_on_device=False,
    table_dtype="int32",
    split=(None, False),
    is_padded=False,
    with_out=True,
)
RAGGED: dict[str, Any] = {"wrapper": "ragged", "page_size": 0}
KINDS = {"ragged": RAGGED, "paged": {}}


@pytest.mark.parametrize("index", one_of(12, range(COUNT)))
def test_random_batches(index: int) -> None:
    for seed in range(index, index + 2 * COUNT, COUNT):
        run.batch(batch_cases.random_case(seed), seed=seed % 3).check()


@pytest.mark.slow
@pytest.mark.parametrize("first", range(2 * COUNT, 30 * COUNT, COUNT))
def test_many_random_batches(first: int) -> None:
    for seed in range(first, first + COUNT):
        run.batch(batch_cases.random_case(seed), seed=seed % 3, num_sms=8 + seed % 30).check()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("qo_len", "merges"), [((1, 2), False), ((40, 33), True)])
def test_splits(qo_len: tuple[int, ...], merges: bool, kind: str) -> None:
    size = 130 if kind == "ragged" else 8  # tokens or pages
    case = replace(BASE, qo_len=qo_len, split=(size, False), **KINDS[kind])
    answer = run.batch(case)
    answer.check()
    assert ("merge_splits" in {launch.name for launch in answer.launches}) == merges


@pytest.mark.parametrize("qo_len", [1, 5])
def test_merges_of_many_parts(qo_len: int) -> None:
    """Up to, and past, the 16 states that a warp asks for at a time and the 32 that it weighs."""
    kv_len = tuple(64 * parts - 5 for parts in (2, 15, 16, 17, 32, 33, 49))
    case = replace(BASE, qo_len=(qo_len,) * len(kv_len), kv_len=kv_len, split=(4, False))
    case = replace(case, num_kv_heads=1, has_sinks=True)
    answer = run.batch(case)
    answer.check()
    assert {launch.name for launch in answer.launches} == {"decode_sm80"}


@pytest.mark.parametrize("kind", KINDS)
def test_the_order_of_threads_changes_no_bit(kind: str) -> None:
    answers = [run.batch(replace(BASE, **KINDS[kind]), seed=seed) for seed in range(4)]
    for answer in answers[1:]:
        compare.assert_bitwise_equal(answers[0].out, answer.out, kind)
        compare.assert_bitwise_equal(answers[0].lse, answer.lse, kind)


@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.parametrize("qo_len", [(1, 3), (40, 20)], ids=["decode", "prefill"])
@pytest.mark.parametrize("kind", KINDS)
def test_hidden_values_do_not_contaminate(kind: str, qo_len: tuple[int, int], value: float) -> None:
    """A window hides the first key from all rows, causality the last from all but one."""
    case = replace(BASE, qo_len=qo_len, kv_len=(90, 120), window_left=70, sm_scale=0.05)
    spoil = [(1, "v", (119, 1, 3), value), (1, "v", (0, 0), value), (0, "v", (81, 0, 0), value)]
    run.batch(replace(case, **KINDS[kind]), spoil).check()


def test_a_wrapper_for_graphs() -> None:
    """Its work list has room for batches that need more: what is spare does nothing."""
    with gpu.plugged_in(num_sms=16) as emulated:
        buffers = [np.zeros(n, np.int32) for n in (6, 64, 5)]
        wrapper = cupyattn.BatchDecodeWithPagedKVCacheWrapper(
            emulated.empty((16 << 20,), np.dtype(np.uint8)),
            use_cuda_graph=True,
            paged_kv_indptr_buffer=buffers[0],
            paged_kv_indices_buffer=buffers[1],
            paged_kv_last_page_len_buffer=buffers[2],
        )
        for seed, lengths in enumerate(([300, 1, 90, 0, 17], [5, 5, 5, 5, 5])):
            b = batches.make([1] * 5, lengths, 16, seed=seed, heads=(4, 2), dims=(64, 64))
            wrapper.plan(*b.table, 4, 2, 64, 16, q_data_type="float16")
            out, lse = wrapper.run(b.q, b.one_tensor(), return_lse=True)
            expected, expected_lse = b.expected()
            np.testing.assert_allclose(out.astype(np.float64), expected, atol=2e-3)
            np.testing.assert_allclose(lse, expected_lse, atol=1e-3)
