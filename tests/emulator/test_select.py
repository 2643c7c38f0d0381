"""Selections of blocks, on the host: scores beside an oracle of theirs, and what is chosen."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from helpers import select_cases

from cupyattn import paged_mqa, sparse
from cupyattn.launch.ops import select as launch_select

from . import gpu


def run(case_seed: int, **facts: Any) -> gpu.EmulatedGpu:
    """A drawn call; what was launched."""
    case = select_cases.draw(case_seed, on_gpu=True)
    with gpu.plugged_in(**facts) as emulated:
        lists, values = sparse.select(**case.arguments)
    select_cases.check(case, lists, values, slack=2e-6)
    return emulated


@pytest.mark.parametrize("seed", range(12))
def test_random_calls(seed: int) -> None:
    emulated = run(seed, num_sms=4, seed=seed)
    assert {x.name for x in emulated.launches} <= {
        "select_scores",
        "select_softmax",
        "select_topk",
    }


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(100, 220))
def test_many_random_calls(seed: int) -> None:
    run(seed, num_sms=4, seed=seed)


@pytest.mark.parametrize("seed", [2, 9, 13])
def test_tokens_in_several_launches(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch_select, "_MAX_SCORE_BYTES", 1)
    emulated = run(seed, num_sms=4)
    assert len(emulated.launches) > 2


def models_call(score: str, is_fp8: bool) -> dict[str, Any]:
    """MiniMax-M3's index: four heads, blocks of 128 keys; or DeepSeek's, whose blocks are keys."""
    rng = np.random.default_rng(3)
    dtype = ml_dtypes.float8_e4m3fn if is_fp8 else ml_dtypes.bfloat16
    heads = 4 if score == "max" else 64
    call: dict[str, Any] = {
        "q_index": rng.standard_normal((4, heads, 128)).astype(dtype),
        "index_cache": rng.standard_normal((16, 64, 128)).astype(dtype),
        "table": rng.permutation(16).astype(np.int32).reshape(2, 8),
        "lengths": np.array([500, 131], np.int32),
        "topk": 2 if score == "max" else 64,
        "block": 128 if score == "max" else 1,
        "score": score,
        "return_values": True,
    }
    if score == "max":
        return call | {"last": 1}
    scales = rng.uniform(0.5, 2, size=(16, 64)).astype(np.float32)
    return call | {"weights": rng.random((4, heads)).astype(np.float32), "k_scales": scales}


def check_model(score: str, is_fp8: bool, num_sms: int) -> None:
    call = models_call(score, is_fp8)
    check_beside_host(call, num_sms=num_sms)


@pytest.mark.parametrize("num_sms", [1, 64])
@pytest.mark.parametrize(("score", "is_fp8"), [("max", False), ("max", True), ("relu_sum", True)])
def test_indices_of_models(score: str, is_fp8: bool, num_sms: int) -> None:
    """With many SMs the warps of a block share blocks of keys."""
    check_model(score, is_fp8, num_sms)


@pytest.mark.parametrize("is_fp8", [False, True])
@pytest.mark.parametrize("num_sms", [1, 64])
def test_prompts(num_sms: int, is_fp8: bool) -> None:
    """Many columns, which are multiplied by warpgroups."""
    call = models_call("max", is_fp8)
    rng = np.random.default_rng(8)
    q = rng.standard_normal((2 * 40, 4, 128)).astype(call["q_index"].dtype)
    call |= {"q_index": q, "sm_scale": -0.5, "lengths": np.array([300, 39], np.int32)}
    check_beside_host(call, num_sms=num_sms)


def check_candidates() -> None:
    """Negative numbers name no block, nor do those behind the last."""
    call = models_call("max", False)
    call["candidates"] = np.array(
        [[-1, 3, 0, 9], [2, -1, -1, 1], [1, -7, 0, 5], [-1] * 4], np.int32
    )
    check_beside_host(call)


def test_candidates_alone_compete() -> None:
    check_candidates()


@pytest.mark.parametrize("score", ["max", "relu_sum", "softmax"])
def test_candidates_of_groups(score: str) -> None:
    check_candidates_of_groups(score)


def check_candidates_of_groups(score: str) -> None:
    """Two lists of each token, of two heads each."""
    call = models_call("max", False) | {"score": score, "groups": 2}
    rng = np.random.default_rng(12)
    own = np.array([rng.permutation(5) - 1 for _ in range(8)], np.int32)
    call["candidates"] = own.reshape(4, 2, 5)[:, :, :3]
    if score != "max":
        call["weights"] = rng.standard_normal((4, 4)).astype(np.float32)
    check_beside_host(call)


def check_softmax(num_sms: int = 64) -> None:
    """Blocks that several warps share, of long rows whose logits rise."""
    call = models_call("max", False) | {"score": "softmax", "groups": 2, "topk": 3}
    rng = np.random.default_rng(14)
    rows = call["index_cache"].astype(np.float64) * np.linspace(0.2, 2, 16)[:, None, None]
    call["index_cache"] = rows.astype(call["index_cache"].dtype)
    call["weights"] = rng.uniform(0.5, 2, (4, 4)).astype(np.float32)
    check_beside_host(call, num_sms=num_sms)


@pytest.mark.parametrize("num_sms", [1, 64])
def test_shares_of_softmax(num_sms: int) -> None:
    check_softmax(num_sms)


@pytest.mark.parametrize("ratio", [1, 4])
def test_rows_without_lengths(ratio: int) -> None:
    """Requests have all rows there are, and no tail."""
    call = models_call("relu_sum", False) | {"block": ratio, "ratio": ratio, "tail": ratio > 1}
    for name in ("table", "lengths", "k_scales"):
        del call[name]
    call["index_cache"] = call["index_cache"].reshape(2, 512, 128)[:, :67]
    check_beside_host(call)


def check_beside_host(call: dict[str, Any], **facts: Any) -> None:
    want = sparse.select(**call)
    with gpu.plugged_in(**facts):
        lists, values = sparse.select(**call)
    np.testing.assert_array_equal(lists, want[0])
    np.testing.assert_allclose(values, want[1], rtol=1e-5, atol=1e-5)


def test_a_nan_is_no_score() -> None:
    call = models_call("max", False)
    call["index_cache"][call["table"][0, 2], 5] = np.nan  # of the second block
    with gpu.plugged_in():
        lists, values = sparse.select(**call | {"last": 0, "topk": 4})
    assert lists[0].tolist() == [[0, 1, 2, 3]] * 4
    assert np.isneginf(values[0, :, 1]).all() and np.isfinite(values[0][:, [0, 2, 3]]).all()


@pytest.mark.parametrize("cleans", [True, False])
def test_a_matrix_of_scores(cleans: bool) -> None:
    """DeepGEMM's, of two tokens a request."""
    rng = np.random.default_rng(4)
    rows = rng.standard_normal((5, 16, 128)).astype(ml_dtypes.float8_e4m3fn)
    scales = rng.uniform(0.5, 2, size=(5, 16)).astype(np.float32)
    flat = [x.reshape(5, -1).view(np.uint8) for x in (rows, scales)]
    pages = np.concatenate(flat, axis=1).reshape(5, 16, 1, 132)
    q = rng.standard_normal((2, 2, 8, 128)).astype(ml_dtypes.float8_e4m3fn)
    weights = rng.standard_normal((4, 8)).astype(np.float32)
    table, lens = np.array([[3, 1], [0, 4]], np.int32), np.array([20, 5], np.int32)
    call = q, pages, weights, lens, table, None, 33, cleans
    want = paged_mqa.fp8_paged_mqa_logits(*call)
    with gpu.plugged_in():
        found = paged_mqa.fp8_paged_mqa_logits(*call)
    sees = np.arange(33) < np.array([[19], [20], [4], [5]])
    np.testing.assert_allclose(found[sees], want[sees], rtol=1e-5, atol=1e-5)
    hidden = found[~sees]
    assert np.isneginf(hidden).all() if cleans else not np.isfinite(hidden).any()


def test_begins_before_what_it_reads_is_there() -> None:
    """Launches that begin early read nothing before they have waited."""
    run(4, num_sms=4, begins_early=True)
