"""Attention by lists on the CPU, beside an oracle that is written apart from it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from helpers import sparse_cases
from helpers.sparse_cases import AttendCase

import cupyattn
from cupyattn import sparse


def check(case: AttendCase) -> None:
    """Make the call into memory of the caller's, and compare what it writes."""
    want, want_lse = sparse_cases.expected(case)
    q = case.arguments["q"]
    out = np.full(want.shape, 7.0, q.dtype)
    lse = np.full(want_lse.shape, 7.0, np.float32)
    got = sparse.attend(**case.arguments, out=out, lse=lse)
    assert got[0] is out and got[1] is lse
    nobody = slice(len(case.seen), None)
    assert (out[nobody] == 7.0).all() and (lse[nobody] == 7.0).all(), case
    own, rtol = slice(len(case.seen)), sparse_cases.tolerance(q.dtype)
    found = out[own].astype(np.float64)
    np.testing.assert_allclose(found, want[own], rtol=rtol, atol=1e-7, err_msg=str(case))
    np.testing.assert_allclose(lse[own], want_lse[own], rtol=1e-6, atol=1e-6, err_msg=str(case))


@pytest.mark.parametrize("part", range(8))
def test_random_calls(part: int) -> None:
    for seed in range(part * 60, (part + 1) * 60):
        check(sparse_cases.draw(seed))


@pytest.mark.slow
@pytest.mark.parametrize("part", range(8))
def test_many_random_calls(part: int) -> None:
    for seed in range(1000 + part * 250, 1250 + part * 250):
        check(sparse_cases.draw(seed))


def small() -> dict[str, Any]:
    """A good call of two tokens of each of two requests."""
    rng = np.random.default_rng(3)
    return {
        "q": rng.standard_normal((4, 4, 16)).astype(np.float32),
        "cache": rng.standard_normal((6, 2, 8, 2, 16)).astype(np.float32),
        "lists": np.array([[[0, 2]], [[2, -1]], [[1, 0]], [[-1, -1]]], np.int32),
        "table": np.array([[0, 1, 2], [3, 4, 5]], np.int32),
        "lengths": np.array([20, 23], np.int32),
        "granularity": 8,
        "return_lse": True,
    }


def test_lists_of_all_keys_give_attention() -> None:
    call = small()
    call["lists"] = np.tile(np.arange(3, dtype=np.int32), (4, 1))
    out, lse = sparse.attend(**call)
    want, want_lse = cupyattn.trtllm_batch_decode_with_kv_cache(
        call["q"], call["cache"], None, call["table"], call["lengths"], 24, 0.25,
        kv_layout="NHD", q_len_per_req=2, return_lse=True,
    )  # fmt: skip
    np.testing.assert_allclose(out, want, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(lse, want_lse, rtol=1e-5, atol=1e-6)


def test_a_block_counts_as_often_as_it_is_listed() -> None:
    call = small()
    once, twice = (
        sparse.attend(**call | {"lists": np.array([own] * 4, np.int32)})[1]
        for own in ([0, -1], [0, 0])
    )
    np.testing.assert_allclose(twice, once + 1, rtol=1e-6)


def test_an_empty_list_gives_nothing() -> None:
    out, lse = sparse.attend(**small())
    assert not out[3].any() and np.isneginf(lse[3]).all()
    sinks = np.arange(4, dtype=np.float32)
    out, lse = sparse.attend(**small(), sinks=sinks)
    assert not out[3].any()
    np.testing.assert_allclose(lse[3], sinks / np.log(2.0), rtol=1e-6)


@pytest.mark.parametrize("requests", [0, 1, 2])
@pytest.mark.parametrize("form", ["pages", "rows", "dense"])
def test_no_tokens(form: str, requests: int) -> None:
    """A step that has none for a rank, say, whatever says how the keys lie."""
    if form == "dense" and not requests:
        return
    q, lists = np.zeros((0, 4, 16), np.float16), np.zeros((0, 5), np.int32)
    k = np.ones((3, 8, 2, 16), np.float16)
    named: dict[str, Any] = {"pages": {"table": np.zeros((requests, 2), np.int32)}}.get(form, {})
    if form == "pages":
        named["lengths"] = np.full(requests, 9, np.int32)
    if form == "rows":
        k, named["kv_indptr"] = k[0], np.zeros(requests + 1, np.int32)
    if form == "dense":
        k = k[:requests]
    out, lse = sparse.attend(q, (k, k), lists, **named, return_lse=True)
    assert out.shape == (0, 4, 16) and lse.shape == (0, 4)


def test_states_of_two_lists_merge() -> None:
    call = small()
    call["lists"] = np.tile(np.array([2, 0], np.int32), (4, 1))
    whole, whole_lse = sparse.attend(**call)
    parts = [sparse.attend(**call | {"lists": call["lists"][:, i : i + 1]}) for i in range(2)]
    out, lse = cupyattn.merge_state(*parts[0], *parts[1])
    np.testing.assert_allclose(out, whole, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(lse, whole_lse, rtol=1e-5, atol=1e-6)


def test_lists_of_groups_first_are_a_view() -> None:
    call = small()
    lists = np.ascontiguousarray(np.stack([call["lists"][:, 0], call["lists"][::-1, 0]]))
    apart = sparse.attend(**call | {"lists": lists.swapaxes(0, 1)})
    packed = sparse.attend(**call | {"lists": np.ascontiguousarray(lists.swapaxes(0, 1))})
    for x, y in zip(apart, packed, strict=True):
        np.testing.assert_array_equal(x, y)


def test_torch_gets_tensors() -> None:
    torch = pytest.importorskip("torch")
    call = {
        name: torch.from_numpy(x) if isinstance(x, np.ndarray) else x for name, x in small().items()
    }
    out, lse = sparse.attend(**call)
    assert isinstance(out, torch.Tensor) and isinstance(lse, torch.Tensor)
    np.testing.assert_array_equal(out.numpy(), sparse.attend(**small())[0])
