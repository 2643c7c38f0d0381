"""Selections of blocks on the CPU, beside an oracle that is written apart from them."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from helpers import select_cases

from cupyattn import reference, sparse

E4M3 = ml_dtypes.float8_e4m3fn


def check(seed: int) -> None:
    """Make the call twice, the second time into the caller's memory, and look at what it lists."""
    case = select_cases.draw(seed)
    lists, values = sparse.select(**case.arguments)
    select_cases.check(case, lists, values, slack=1e-12)
    out, own_values = np.full_like(lists, 7), np.full_like(values, 7)
    assert sparse.select(**case.arguments, out=out, values=own_values)[0] is out
    np.testing.assert_array_equal(out, lists)
    np.testing.assert_array_equal(own_values, values)


@pytest.mark.parametrize("part", range(8))
def test_random_calls(part: int) -> None:
    for seed in range(part * 60, (part + 1) * 60):
        check(seed)


@pytest.mark.slow
@pytest.mark.parametrize("part", range(8))
def test_many_random_calls(part: int) -> None:
    for seed in range(1000 + part * 250, 1250 + part * 250):
        check(seed)


def small() -> dict[str, Any]:
    """Two requests of 40 and 9 keys, with a token each, two index heads, and blocks of eight."""
    rng = np.random.default_rng(5)
    return {
        "q_index": rng.standard_normal((2, 2, 16)).astype(np.float32),
        "index_cache": rng.standard_normal((2, 40, 16)).astype(np.float32),
        "lengths": np.array([40, 9], np.int32),
        "topk": 3,
        "block": 8,
    }


def test_equal_scores_choose_the_lower_block() -> None:
    call = small()
    call["q_index"][:] = 0.0
    np.testing.assert_array_equal(sparse.select(**call)[0], [[0, 1, 2]] * 2)
    call["index_cache"][0, 39] = np.nan  # its block comes last
    np.testing.assert_array_equal(sparse.select(**call | {"topk": 4})[0], [[0, 1, 2, 3]] * 2)


def test_zeros_of_both_signs_are_equal() -> None:
    scores = np.array([-0.0, 0.0, -1.0, 0.0])
    assert reference.choose_blocks(scores, 2).tolist() == [0, 1]
    assert reference.choose_blocks(np.array([np.nan, -np.inf, -np.inf]), 2).tolist() == [0, 1]
    assert reference.choose_blocks(np.array([np.nan, 1.0, 3.0]), 2).tolist() == [1, 2]


def test_first_and_last_blocks_are_listed() -> None:
    lists = sparse.select(**small(), first=1, last=1)
    assert (lists[0, :, 0] == 0).all() and (lists[0, :, 2] == 4).all()
    np.testing.assert_array_equal(lists[1], [[0, 1, -1]] * 2)


def test_a_tail_comes_besides() -> None:
    call = small() | {"block": 4, "ratio": 4, "score": "relu_sum", "tail": True}
    call["index_cache"] = call["index_cache"][:, :10]
    call["lengths"] = np.array([38, 8], np.int32)
    lists = sparse.select(**call)
    assert lists.shape == (2, 1, 4) and lists[0, 0, 3] == 9
    np.testing.assert_array_equal(lists[1, 0], [0, 1, -1, -1])


def test_pages_of_deepgemm_are_rows_with_scales() -> None:
    rng = np.random.default_rng(2)
    rows = rng.standard_normal((3, 8, 128)).astype(E4M3)
    scales = rng.uniform(0.5, 2, size=(3, 8)).astype(np.float32)
    fused = np.concatenate([rows.reshape(3, -1).view(np.uint8), scales.view(np.uint8)], axis=1)
    call: dict[str, Any] = {
        "q_index": rng.standard_normal((1, 4, 128)).astype(E4M3),
        "table": np.array([[2, 0, 1]], np.int32),
        "lengths": np.array([21], np.int32),
        "topk": 6,
        "block": 1,
        "score": "relu_sum",
        "weights": rng.standard_normal((1, 4)).astype(np.float32),
        "return_values": True,
    }
    given = sparse.select(**call, index_cache=fused.reshape(3, 8, 1, 132))
    apart = sparse.select(**call, index_cache=rows, k_scales=scales)
    for x, y in zip(given, apart, strict=True):
        np.testing.assert_array_equal(x, y)


def test_what_is_selected_is_attended() -> None:
    """Lists of all blocks, and the attention of all keys."""
    rng = np.random.default_rng(9)
    call = small() | {"topk": 5}
    lists = sparse.select(**call)
    q = rng.standard_normal((2, 4, 32)).astype(np.float32)
    k, v = rng.standard_normal((2, 2, 40, 2, 32)).astype(np.float32)
    out = sparse.attend(q, (k, v), lists, lengths=call["lengths"], granularity=8)
    for request, length in enumerate(call["lengths"]):
        want, _ = reference.attention(q[request][None], k[request][:length], v[request][:length])
        np.testing.assert_allclose(out[request], want[0], rtol=1e-5, atol=1e-6)
