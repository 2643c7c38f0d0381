"""Bad calls of attend and select: a typed error with a useful sentence, and nothing written."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from cupyattn import sparse
from cupyattn.engine import select as select_engine
from cupyattn.errors import ArgumentError, UnsupportedError

T, HQ, HKV, D = 4, 4, 2, 16


def ints(*shape: int) -> np.ndarray:
    return np.zeros(shape, np.int32)


def attend() -> dict[str, Any]:
    """A good call: two requests of two tokens, pages of eight keys."""
    return {
        "q": np.ones((T, HQ, D), np.float16),
        "cache": np.ones((6, 2, 8, HKV, D), np.float16),
        "lists": ints(T, HKV, 3),
        "table": np.arange(6, dtype=np.int32).reshape(2, 3),
        "lengths": np.array([20, 9], np.int32),
        "granularity": 8,
        "out": np.full((T, HQ, D), 7, np.float16),
    }


def select() -> dict[str, Any]:
    """The same requests, and an index of two heads."""
    return {
        "q_index": np.ones((T, 2, D), np.float16),
        "index_cache": np.ones((6, 8, D), np.float16),
        "table": np.arange(6, dtype=np.int32).reshape(2, 3),
        "lengths": np.array([20, 9], np.int32),
        "topk": 2,
        "block": 8,
        "out": np.full((T, 2, 2), 7, np.int32),
    }


ATTEND = [
    ("lists: dtype is int64", {"lists": np.zeros((T, 1, 3), np.int64)}),
    (r"lists: shape is \[4, 3, 3\]; wanted \[4, 1 or 2 or 4, entries\]", {"lists": ints(T, 3, 3)}),
    (r"lists: shape is \[3, 1, 3\]", {"lists": ints(3, 3)}),
    ("of one entry at least", {"lists": ints(T, 1, 0)}),
    ("lists: the last dimension has stride 2", {"lists": ints(T, 1, 6)[..., ::2]}),
    ("granularity: got 12; wanted the keys of a block, a power of two", {"granularity": 12}),
    ("granularity: got 512", {"granularity": 512}),
    ("granularity: got 0", {"granularity": 0}),
    ("window: got -1", {"window": -1}),
    ("causal: ", {"causal": "yes"}),
    ("kv_indptr: given beside table", {"kv_indptr": ints(3)}),
    ("cache: got one array without table", {"table": None}),
    ("cache: got 3 arrays", {"cache": (np.ones((6, 8, HKV, D), np.float16),) * 3}),
    ("lengths: got None", {"lengths": None}),
    ("q: has 4 tokens of 3 requests", {"table": ints(3, 3), "lengths": ints(3)}),
    (r"lengths: request 0 has 25, and table has pages for 24", {"lengths": ints(2) + 25}),
    ("table: lists name keys of request 0 on page 9", {"table": ints(2, 3) + 9}),
    ("indptr: request 1 has", {"indptr": np.array([0, 2, 5], np.int32)}),
    ("out: shape is", {"out": np.ones((T, HQ, 8), np.float16)}),
    (r"sinks: shape is \[3\]", {"sinks": np.ones(3, np.float32)}),
    (r"output_gate: shape is \[4, 2\]", {"output_gate": np.ones((T, HKV), np.float16)}),
    (r"k_scale: shape is \[3\]", {"k_scale": np.ones(3, np.float32)}),
]
SELECT = [
    ("q_index: shape is", {"q_index": np.ones((T, D), np.float16)}),
    ("q_index: dtype is int32", {"q_index": ints(T, 2, D)}),
    (
        "index_cache: dtype is float32 but q_index is float16",
        {"index_cache": np.ones((6, 8, D), "f4")},
    ),
    (r"index_cache: shape is \[6, 8, 8\]", {"index_cache": np.ones((6, 8, 8), np.float16)}),
    ("index_cache: uint8 of shape", {"index_cache": np.zeros((6, 8, 1, D), np.uint8)}),
    ("lengths: got None beside table", {"lengths": None}),
    (r"lengths: shape is \[3\]; wanted \[2\]", {"lengths": ints(3)}),
    ("lengths: request 0 has 25 keys; its index has room for 24", {"lengths": ints(2) + 25}),
    ("table: request 0 has page 9", {"table": ints(2, 3) + 9}),
    ("topk: got 0", {"topk": 0}),
    ("topk: got 4096", {"topk": 4096}),
    ("block: got 24", {"block": 24}),
    ("ratio: got 16; wanted a divisor of block", {"ratio": 16}),
    ("tail: is for blocks of one index row", {"tail": True}),
    ("score: got 'mean'", {"score": "mean"}),
    ("groups: got 3 for 2 index heads", {"groups": 3}),
    ("first, last: got 2 and 1", {"first": 2, "last": 1}),
    ("weights: given with score 'max'", {"weights": np.ones((T, 2), np.float32)}),
    (r"weights: shape is \[4\]", {"score": "relu_sum", "weights": np.ones(T, np.float32)}),
    ("candidate_block: given without candidates", {"candidate_block": 8}),
    ("candidate_block: got 12", {"candidates": ints(T, 1), "candidate_block": 12}),
    ("candidates: those of token 0 repeat a block", {"candidates": ints(T, 2)}),
    (r"candidates: shape is \[3, 1, 1\]", {"candidates": ints(3, 1)}),
    (r"k_scales: shape is \[6\]", {"k_scales": np.ones(6, np.float32)}),
    ("indptr: holds", {"indptr": np.array([0, 3, 9], np.int32)}),
    (r"out: shape is \[4, 2, 3\]", {"out": ints(T, 2, 3)}),
    ("values: dtype is int32", {"values": ints(T, 2, 2)}),
]


@pytest.mark.parametrize(
    ("good", "function", "words", "changes"),
    [(attend, sparse.attend, *row) for row in ATTEND]
    + [(select, sparse.select, *row) for row in SELECT],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_a_bad_call_is_refused(
    good: Callable[[], dict[str, Any]],
    function: Callable[..., Any],
    words: str,
    changes: dict[str, Any],
) -> None:
    function(**good())
    call = good() | changes
    with pytest.raises((ArgumentError, UnsupportedError), match=words):
        function(**call)
    if "out" not in changes:
        assert (call["out"] == 7).all()


def gpu_call(make: Callable[..., Any], **changes: Any) -> dict[str, Any]:
    arrays = {
        "q": make(T, HQ, D),
        "cache": (make(6, 8, HKV, D), make(6, 8, HKV, D)),
        "lists": make(T, HKV, 3, dtype="int32"),
        "table": make(2, 3, dtype="int32"),
        "lengths": make(2, dtype="int32"),
        "granularity": 8,
    }
    return arrays | {name: x(make) if callable(x) else x for name, x in changes.items()}


@pytest.mark.parametrize(
    "changes",
    [
        {"lengths": lambda make: make(2, dtype="int64")},
        {"indptr": lambda make: make(3, dtype="int64")},
        {"k_scale": lambda make: make(1, dtype="float32")},
        {"k_scale": lambda make: make(2, 2, dtype="float32")},
        {
            "v_scale": lambda make: make(HKV, dtype="float32"),
            "lists": lambda make: make(T, HQ, 3, dtype="int32"),
        },
    ],
)
def test_kernels_read_lengths_and_scales_of_any_form(
    gpu: Any, make: Callable[..., Any], changes: dict[str, Any]
) -> None:
    sparse.attend(**gpu_call(make, **changes))
    assert gpu.launches


def test_a_repeated_call_is_launched_from_the_cache(
    gpu: Any, make: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    from cupyattn.engine import run_planless

    sparse.attend(**gpu_call(make), return_lse=True)
    first = list(gpu.launches)
    assert first

    def refuse(*_: object) -> None:
        raise AssertionError("the call was not cached")

    monkeypatch.setattr(run_planless, "check", refuse)
    sparse.attend(**gpu_call(make), return_lse=True)
    assert len(gpu.launches) == 2 * len(first)


def select_call(make: Callable[..., Any], **changes: Any) -> dict[str, Any]:
    call = {
        "q_index": make(T, 2, 64),
        "index_cache": make(6, 8, 64),
        "table": make(2, 3, dtype="int32"),
        "lengths": make(2, dtype="int32"),
        "topk": 2,
        "block": 8,
    }
    return call | {name: x(make) if callable(x) else x for name, x in changes.items()}


@pytest.mark.parametrize(
    ("words", "changes"),
    [
        (
            "q_index: dtype float32 has no GPU kernel",
            {
                "q_index": lambda make: make(T, 2, 64, dtype="float32"),
                "index_cache": lambda make: make(6, 8, 64, dtype="float32"),
            },
        ),
        (
            "q_index: head_dim 16 has no GPU kernel",
            {"q_index": lambda make: make(T, 2, 16), "index_cache": lambda make: make(6, 8, 16)},
        ),
        ("groups: 1 of 3 index heads", {"q_index": lambda make: make(T, 3, 64), "groups": 1}),
        (
            "index_cache: rows begin at other",
            {"index_cache": lambda make: make(6, 8, 65)[..., :64]},
        ),
    ],
)
def test_a_selection_without_a_kernel_is_refused(
    gpu: Any, make: Callable[..., Any], words: str, changes: dict[str, Any]
) -> None:
    with pytest.raises(UnsupportedError, match=words):
        sparse.select(**select_call(make, **changes))
    assert gpu.launches == []


def test_shares_of_softmax_are_three_launches(gpu: Any, make: Callable[..., Any]) -> None:
    call = select_call(make, candidates=lambda make: make(T, 2, 1, dtype="int32"))
    sparse.select(**call, score="softmax", groups=2)
    assert [x.kernel for x in gpu.launches] == ["select_scores", "select_softmax", "select_topk"]


def test_a_selection_like_an_earlier_one_is_not_checked_again(
    gpu: Any, make: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    call = select_call(make)
    lists = sparse.select(**call, return_values=True)[0]
    with monkeypatch.context() as patch:
        patch.setattr(select_engine, "check", None)
        again, values = sparse.select(**call, return_values=True)
    assert tuple(again.shape) == tuple(values.shape) == tuple(lists.shape)
    first, second = gpu.launches[:2], gpu.launches[2:]
    assert [(x.kernel, x.grid) for x in first] == [(x.kernel, x.grid) for x in second]
    sparse.select(**call, out=lists)
    with pytest.raises(ArgumentError, match="out"):
        sparse.select(**call | {"table": lists[:2, 0]}, out=lists)


def test_a_selection_is_two_launches(gpu: Any, make: Callable[..., Any]) -> None:
    call = select_call(make)
    lists, values = sparse.select(**call, return_values=True)
    assert tuple(lists.shape) == tuple(values.shape) == (T, 2, 2)
    sparse.select(**call, out=lists)
    assert len(gpu.launches) == 4
