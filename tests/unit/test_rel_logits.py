"""Biases of near keys (rel_logits) on the CPU: what they mean, and which are refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import cupyattn
from cupyattn import ArgumentError, UnsupportedError

RNG = np.random.default_rng(0)
ROWS, KEYS, HEADS, KV_HEADS, DIM, DISTANCES = 5, 9, 4, 2, 16, 3
TEXT = "logit + (kv_idx <= q_idx && q_idx - kv_idx < 3 ? near[q_token, head, q_idx - kv_idx] : 0)"
prefill, decode = cupyattn.single_prefill_with_kv_cache, cupyattn.single_decode_with_kv_cache


def made(*shape: int, dtype: Any = np.float16) -> np.ndarray:
    return RNG.standard_normal(shape).astype(dtype)


def single() -> tuple[np.ndarray, ...]:
    keys = made(2, KEYS, KV_HEADS, DIM)
    return made(ROWS, HEADS, DIM), *keys, made(ROWS, HEADS, DISTANCES)


def assert_same(got: Any, wanted: Any) -> None:
    for x, y in zip(got, wanted, strict=True):
        np.testing.assert_array_equal(x, y)


@pytest.mark.parametrize(
    "more", [{}, {"causal": True}, {"window_left": 1}, {"mask_fn": "head < 2"}]
)
def test_they_are_what_a_text_says(more: dict[str, Any]) -> None:
    q, k, v, near = single()
    given = {"logits_transform": TEXT, "logits_params": {"near": near}}
    wanted = prefill(q, k, v, return_lse=True, **given, **more)
    assert_same(prefill(q, k, v, return_lse=True, rel_logits=near, **more), wanted)
    plain = prefill(q, k, v, return_lse=True, **more)
    assert np.abs(plain[0].astype(float) - wanted[0]).max() > 0.01


def test_by_hand() -> None:
    q, k, v = np.zeros((1, 1, 8), np.float16), np.zeros((4, 1, 8), np.float16), made(4, 1, 8)
    near = np.log(np.array([[[1.0, 3.0]]], np.float32))
    out, lse = prefill(q, k, v, rel_logits=near, return_lse=True, o_dtype="float32")
    weights = np.array([1.0, 1.0, 3.0, 1.0]) / 6.0
    np.testing.assert_allclose(out[0, 0], weights @ v[:, 0].astype(float), atol=1e-6)
    assert lse[0, 0] == pytest.approx(np.log2(6.0))


def test_decode_is_the_last_row() -> None:
    q, k, v, near = single()
    wanted = prefill(q, k, v, causal=True, return_lse=True, rel_logits=near)
    got = decode(q[-1], k, v, return_lse=True, rel_logits=near[-1:])
    assert_same(got, (wanted[0][-1], wanted[1][-1]))


def planned(kind: str, near: np.ndarray, **more: Any) -> tuple[Any, tuple[Any, ...]]:
    """A wrapper of two requests, and what its runs take: one row each, or two and three."""
    cache, table = made(3, 2, 4, KV_HEADS, DIM), ([0, 2, 3], [0, 1, 2], [3, 2])
    table = tuple(np.array(x, np.int32) for x in table)
    ends = np.array([0, 2, 5], np.int32)
    types = {"q_data_type": "float16", "rel_logits": near} | more
    heads = HEADS, KV_HEADS, DIM
    if kind == "decode":
        w: Any = cupyattn.BatchDecodeWithPagedKVCacheWrapper(None)
        w.plan(*table, *heads, 4, **types)
        return w, (made(2, HEADS, DIM), cache)
    if kind == "paged":
        w = cupyattn.BatchPrefillWithPagedKVCacheWrapper(None)
        w.plan(ends, *table, *heads, 4, causal=True, **types)
        return w, (made(5, HEADS, DIM), cache)
    w = cupyattn.BatchPrefillWithRaggedKVCacheWrapper(None)
    w.plan(ends, np.array([0, 7, 9 + 7], np.int32), *heads, causal=True, **types)
    return w, (made(5, HEADS, DIM), *made(2, 16, KV_HEADS, DIM))


@pytest.mark.parametrize("kind", ["decode", "paged", "ragged"])
def test_batches_count_rows_of_all_requests(kind: str) -> None:
    rows = 2 if kind == "decode" else 5
    near, other = made(2, rows, HEADS, DISTANCES)
    w, arrays = planned(kind, near)
    texts = {"rel_logits": None, "logits_transform": TEXT, "logits_params": {"near": near}}
    wanted_by = planned(kind, near, **texts)[0]
    assert_same(w.run(*arrays, return_lse=True), wanted_by.run(*arrays, return_lse=True))
    got = w.run(*arrays, return_lse=True, rel_logits=other)
    assert_same(got, wanted_by.run(*arrays, return_lse=True, logits_params={"near": other}))
    assert_same(w.run(*arrays, return_lse=True), wanted_by.run(*arrays, return_lse=True))
    with pytest.raises(ArgumentError, match=r"rel_logits: dtype is float32; the plan said float16"):
        w.run(*arrays, rel_logits=other.astype(np.float32))
    with pytest.raises(ArgumentError, match=r"logits_params: the plan has no array 'rel_logits'"):
        w.run(*arrays, logits_params={"rel_logits": other})
    with pytest.raises(ArgumentError, match=r"rel_logits: axis 0 has 1 elements; wanted at least"):
        w.run(*arrays, rel_logits=other[:1])
    plain = planned(kind, near, rel_logits=None)[0]
    with pytest.raises(ArgumentError, match=r"rel_logits: the plan has none; pass rel_logits"):
        plain.run(*arrays, rel_logits=other)


WRONG: dict[str, tuple[Any, type[Exception], str]] = {
    "axes": (
        lambda x: {"rel_logits": x[0]},
        ArgumentError,
        r"shape is \[4, 3\]; wanted \[rows, num",
    ),
    "rows": (lambda x: {"rel_logits": x[:4]}, ArgumentError, "wanted at least 5, the rows of q"),
    "heads": (lambda x: {"rel_logits": x[:, :2].copy()}, ArgumentError, "wanted 4, the num_qo"),
    "dtype": (lambda x: {"rel_logits": x.astype(int)}, ArgumentError, "wanted float32, float16"),
    "strides": (lambda x: {"rel_logits": x[..., ::2]}, ArgumentError, "wanted a contiguous"),
    "none": (lambda x: {"rel_logits": x[..., :0]}, ArgumentError, "axis 2 has 0 elements"),
    "a number": (lambda x: {"rel_logits": 0.5}, ArgumentError, "rel_logits"),
    "cap": (
        lambda x: {"rel_logits": x, "logits_soft_cap": 30.0},
        UnsupportedError,
        "beside logits_soft_cap=30",
    ),
    "slopes": (
        lambda x: {"rel_logits": x, "pos_encoding_mode": "ALIBI"},
        UnsupportedError,
        "beside pos_encoding_mode='ALIBI'",
    ),
    "transform": (
        lambda x: {"rel_logits": x, "logits_transform": "2 * logit"},
        UnsupportedError,
        r"beside logits_transform; write it there, as near\[",
    ),
    "name": (
        lambda x: {"rel_logits": x, "logits_params": {"rel_logits": x}, "mask_fn": "kv_idx < 3"},
        ArgumentError,
        "is an argument of its own",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_ones(name: str) -> None:
    *arrays, near = single()
    make, error, message = WRONG[name]
    with pytest.raises(error, match=message):
        prefill(*arrays, **make(near))


def test_others_refuse_them_by_name() -> None:
    q, near = made(3, 2, 512), made(3, 2, 4)
    with pytest.raises(UnsupportedError, match=r"rel_logits: is not supported with head dims 512"):
        prefill(q, q, q, rel_logits=near)
    with pytest.raises(
        UnsupportedError, match=r"rel_logits: is not supported with cp_world_size=2"
    ):
        planned("decode", made(2, HEADS, 3), cp_world_size=2, cp_rank=0)
    w, arrays = planned("ragged", made(5, HEADS, 3))
    with pytest.raises(UnsupportedError, match=r"rel_logits: is not supported beside lse_base"):
        w.run(*arrays, rel_logits=made(5, HEADS, 3), lse_base="ln")
