"""Sinks in every wrapper, on the CPU and in what is launched; the wrapper that is made for them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from helpers import batches, sink_calls
from helpers.batches import HKV, HQ, WORKSPACE, D
from helpers.fake_batch import Device

import cupyattn
from cupyattn.errors import ArgumentError, PlanError, UnsupportedError

LENGTHS = [3, 0, 1, 5], [9, 4, 0, 70]
SINKS = np.array([0.5, -1, 3, 0], np.float32)
SCALE = 0.37
F16 = {"q_data_type": "float16", "kv_data_type": "float16"}


def make(space: Any = None, **options: Any) -> cupyattn.BatchAttentionWithAttentionSinkWrapper:
    space = WORKSPACE if space is None else space
    return cupyattn.BatchAttentionWithAttentionSinkWrapper(space, **options)


def check(got: Any, wanted: tuple[np.ndarray, np.ndarray]) -> None:
    o, lse = got
    np.testing.assert_array_equal(o, wanted[0].astype(np.float16))
    np.testing.assert_allclose(lse, wanted[1].astype(np.float32), rtol=1e-6)


@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("window", [-1, 5])
def test_the_run_says_the_scale(layout: str, window: int) -> None:
    b = batches.make(*LENGTHS, 4)
    w = make(None, kv_layout=layout, backend="fa2", window_left=window, **F16)
    w.plan(b.qo_indptr, *b.table, HQ, HKV, D, 4, causal=True, sm_scale=100.0)
    cache = b.one_tensor(layout)
    options = {"causal": True, "window_left": window, "sinks": SINKS}
    for scale in (SCALE, 2, -0.5, np.float32(0.25)):
        got = w.run(b.q, cache, SINKS, scale, return_lse=True)
        check(got, b.expected(sm_scale=float(scale), **options))
    check(w.run_return_lse(b.q, cache, SINKS, SCALE), b.expected(sm_scale=SCALE, **options))
    got = w.run(b.q, cache, SINKS, SCALE, q_scale=3.0, k_scale=0.5, v_scale=2.0, return_lse=True)
    check(got, b.expected(sm_scale=1.5 * SCALE, scale_v=2.0, **options))
    by_head = np.array([1, 2, 0.5, -1], np.float32)
    got = w.run(b.q, cache, SINKS, SCALE, q_scale=by_head, return_lse=True)
    check(got, b.expected(sm_scale=SCALE, scale_q=by_head, **options))
    out, lse = np.zeros_like(b.q), np.zeros(b.q.shape[:2], np.float32)
    assert w.run(b.q, cache, SINKS, SCALE, out=out, lse=lse) is out
    check((out, lse), b.expected(sm_scale=SCALE, **options))


def test_what_plan_leaves_out_is_the_constructors() -> None:
    b = batches.make(*LENGTHS, 4)
    table = b.qo_indptr, *b.table
    rope = {"pos_encoding_mode": "ROPE_LLAMA"}
    w = make(None, window_left=5, **rope, **F16)
    for given, mode, window in (
        ({}, "ROPE_LLAMA", 5),
        ({"window_left": -1}, "ROPE_LLAMA", -1),
        ({"pos_encoding_mode": "NONE"}, "NONE", 5),
    ):
        w.plan(*table, HQ, HKV, D, 4, **given)
        got = w.run(b.q, b.one_tensor(), SINKS, SCALE, return_lse=True)
        options = {"pos_encoding_mode": mode, "window_left": window}
        check(got, b.expected(sm_scale=SCALE, sinks=SINKS, **options))
    # By position, in the order of today and in the older one, which has no head_dim_vo.
    for rest in ((D, None, None, True, "NONE"), (None, None, True, "NONE")):
        w.plan(*table, HQ, HKV, D, 4, *rest)
        got = w.run(b.q, b.one_tensor(), SINKS, SCALE, return_lse=True)
        check(got, b.expected(sm_scale=SCALE, sinks=SINKS, causal=True, window_left=5))
    with pytest.raises(PlanError, match="window_left: run"):
        w.run(b.q, b.one_tensor(), SINKS, SCALE, window_left=3)
    with pytest.raises(TypeError, match="multiple values"):
        w.plan(*table, HQ, HKV, D, 4, qo_indptr=b.qo_indptr)


def test_head_dims_and_dtypes_of_the_constructor() -> None:
    w = make(None, head_dim_qk=D, head_dim_vo=8, kv_data_type="float8_e4m3fn")
    table = np.array([0, 1]), np.array([0, 1]), np.array([0]), np.array([1])
    plan = w.plan(*table, HQ, HKV, D, 4)
    assert plan is None
    given = w._require_plan().geometry.options
    assert (given.head_dim_vo, given.q_data_type, given.kv_data_type) == (
        8,
        "bfloat16",
        "float8_e4m3fn",
    )
    w.plan(*table, HQ, HKV, 2 * D, 4, data_type="float16")
    problem = w._require_plan().geometry.spec.problem()
    assert (problem.head_dim_vo, str(problem.dtype_q), str(problem.dtype_kv)) == (
        2 * D,
        "float16",
        "float16",
    )
    assert w.workspace_size(*table, HQ, HKV, D, 4)[0] == 16


BAD: dict[str, tuple[type[Exception], dict[str, Any]]] = {
    "sink: got None": (ArgumentError, {"sink": None}),
    "sm_scale: got None": (ArgumentError, {"sm_scale": None}),
    "sm_scale: got nan": (ArgumentError, {"sm_scale": float("nan")}),
    "sm_scale: got 'x'": (ArgumentError, {"sm_scale": "x"}),
    "q_scale: got 'x'": (ArgumentError, {"q_scale": "x"}),
    "sinks: dtype is float16; wanted float32": (ArgumentError, {"sink": SINKS.astype("f2")}),
    "sinks: dimension 0 of shape .3. is 3; wanted": (ArgumentError, {"sink": SINKS[:3]}),
    "sinks: got list": (ArgumentError, {"sink": [0.0] * 4}),
}


@pytest.mark.parametrize("message", BAD)
def test_bad_runs(message: str) -> None:
    b = batches.make(*LENGTHS, 4)
    w = make(None, **F16)
    with pytest.raises(PlanError):
        w.run(b.q, b.one_tensor(), SINKS, SCALE)
    w.plan(b.qo_indptr, *b.table, HQ, HKV, D, 4)
    error, changes = BAD[message]
    out = np.full_like(b.q, 7)
    with pytest.raises(error, match=message):
        w.run(b.q, b.one_tensor(), **{"sink": SINKS, "sm_scale": SCALE, "out": out} | changes)
    assert (out == 7).all()


def test_calls_that_have_no_place_for_a_sink() -> None:
    b = batches.make(*LENGTHS, 4)
    w = make(None, **F16)
    w.plan(b.qo_indptr, *b.table, HQ, HKV, D, 4)
    for call in (w.forward, w.forward_return_lse):
        with pytest.raises(UnsupportedError, match=r"forward: .* call run"):
            call(b.q, b.one_tensor(), causal=True)
    with pytest.raises(TypeError, match="sink"):
        w.run(b.q, b.one_tensor())
    for changes in ({"pos_encoding_mode": "ROPE"}, {"window_left": -2}, {"backend": "trtllm-gen"}):
        with pytest.raises(ArgumentError, match=next(iter(changes))):
            make(None, **changes)


# --- on a GPU that is not there: what is launched ---


@pytest.mark.parametrize("split", [None, 8])
@pytest.mark.parametrize("lengths", [LENGTHS, ([1, 1, 1], [0, 5, 100]), ([2, 2], [70, 33])])
def test_every_wrapper_counts_a_sink_once(device: Device, lengths: Any, split: int | None) -> None:
    b = batches.make(*lengths, 4)
    wanted = b.expected(causal=True, sinks=SINKS, sm_scale=SCALE)
    for name, run in sink_calls.every_wrapper(
        b, SINKS, SCALE, device.workspace(), split, device.put
    ):
        for _ in range(2):
            o, lse = (device.get(x) for x in run())
            np.testing.assert_allclose(o, wanted[0], atol=2e-3, err_msg=name)
            np.testing.assert_allclose(lse, wanted[1], rtol=1e-5, err_msg=name)


def test_every_wrapper_on_the_cpu() -> None:
    for lengths in (LENGTHS, ([1, 1, 1], [0, 5, 100])):
        b = batches.make(*lengths, 4)
        for _, run in sink_calls.every_wrapper(b, SINKS, SCALE, WORKSPACE, 8):
            check(run(), b.expected(causal=True, sinks=SINKS, sm_scale=SCALE))
