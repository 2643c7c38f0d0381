"""The block-sparse wrappers: against a dense mask, on the CPU and on a GPU that is not there."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from helpers import sparse_calls
from helpers.fake_batch import Device
from helpers.sparse_calls import SparseCall

import cupyattn
from cupyattn.errors import ArgumentError, PlanError, UnsupportedError

NO_SPACE = np.zeros(1 << 25, np.uint8)
KINDS = pytest.mark.parametrize("call_of", [sparse_calls.fixed, sparse_calls.variable])
CallOf = Callable[[int], SparseCall]


def check(call: SparseCall, out: np.ndarray, lse: np.ndarray) -> None:
    o, sums = call.expected()
    np.testing.assert_array_equal(out, o.astype(call.q.dtype), strict=True)
    np.testing.assert_allclose(lse, sums.astype(np.float32), rtol=2e-6, atol=1e-6)


@KINDS
def test_random_calls(call_of: CallOf) -> None:
    w = call_of(0).wrapper(NO_SPACE)
    forms = set()
    for seed in range(60):  # each plan replaces the last
        call = call_of(seed)
        call.plan_with(w)
        forms.add((w._current.geometry.spec.causal, w._current.mask.form))
        out, lse = w.run(call.q, call.k, call.v, return_lse=True)
        check(call, out, lse)
        np.testing.assert_array_equal(w.run(call.q, call.k, call.v), out)
    assert forms == {(False, None), (True, None), (False, "whole")}


@KINDS
def test_on_the_gpu(call_of: CallOf, device: Device, only_cached_runs: Any) -> None:
    w = call_of(0).wrapper(device.workspace())
    for seed in range(13):
        call = call_of(seed)
        call.plan_with(w, device.put if seed % 2 else np.asarray, device.put)
        arrays = [device.put(x) for x in (call.q, call.k, call.v)]
        for _ in range(2):
            out, lse = w.run(*arrays, return_lse=True)
            check(call, device.get(out), device.get(lse))
        given = [device.put(np.zeros(x.shape, x.dtype)) for x in (device.get(out), device.get(lse))]
        assert w.run(*arrays, out=given[0], lse=given[1]) is given[0]
        check(call, *(device.get(x) for x in given))
    only_cached_runs()
    w.run(*arrays, return_lse=True)


@KINDS
@pytest.mark.parametrize("framework", ["torch", "jax"])
def test_other_frameworks(call_of: CallOf, framework: str) -> None:
    put: Any = pytest.importorskip("torch").from_numpy
    if framework == "jax":
        put = pytest.importorskip("jax.numpy").asarray
    for seed in (0, 2, 4):
        call = call_of(seed)
        w = call.wrapper(np.zeros(1 << 20, np.uint8))
        call.plan_with(w, put, put)
        q, k, v = (put(x) for x in (call.q, call.k, call.v))
        out, lse = w.run(q, k, v, return_lse=True)
        assert type(out) is type(lse) is type(q)
        check(call, np.asarray(out), np.asarray(lse))


@KINDS
def test_what_is_not_in_the_mask_is_not_planned(call_of: CallOf, device: Device) -> None:
    w, total = call_of(0).wrapper(device.workspace()), 0
    for seed in (0, 2, 4, 6):  # neither causality nor a mask of elements
        call = call_of(seed)
        call.plan_with(w)
        lengths = w._current.batch.requests
        seen = int(call.mask.sum()) // len(call.mask)
        if call.heads_first:
            seen = int(call.mask.sum()) * len(call.q) // len(call.k)
        assert (lengths.qo_len * lengths.kv_len).sum() == seen
        total += seen
    assert total


def test_rows_of_a_fused_projection() -> None:
    call = sparse_calls.fixed(8)
    w = call.wrapper(NO_SPACE)
    call.plan_with(w)
    fused = np.concatenate([call.k, call.v], axis=1)
    heads = call.k.shape[1]
    check(call, *w.run(call.q, fused[:, :heads], fused[:, heads:], return_lse=True))


@pytest.mark.parametrize("framework", ["numpy", "torch"])
def test_heads_that_do_not_follow_one_another_are_copied(framework: str) -> None:
    put: Any = np.asarray if framework == "numpy" else pytest.importorskip("torch").from_numpy
    call = sparse_calls.variable(20)
    assert min(call.q.shape) > 1 < call.k.shape[0]
    w = call.wrapper(put(np.zeros(1 << 20, np.uint8)))
    call.plan_with(w)
    q, k, v = (put(np.ascontiguousarray(x.swapaxes(0, 1))) for x in (call.q, call.k, call.v))
    out, lse = w.run(*(x.swapaxes(0, 1) for x in (q, k, v)), return_lse=True)
    check(call, np.asarray(out), np.asarray(lse))
    with pytest.raises(ArgumentError, match=r"out: strides are .* heads one after another"):
        w.run(call.q, call.k, call.v, out=np.zeros_like(q).swapaxes(0, 1))


def test_the_documented_example() -> None:
    torch = pytest.importorskip("torch")
    w = cupyattn.BlockSparseAttentionWrapper(torch.empty(1 << 20, dtype=torch.uint8))
    indptr = torch.tensor([0, 1, 3, 5], dtype=torch.int32)
    indices = torch.tensor([2, 0, 2, 1, 2], dtype=torch.int32)
    w.plan(indptr, indices, 3, 3, 1, 1, 32, 8, 128)
    q, k, v = (torch.randn((3, heads, 128), dtype=torch.float16) for heads in (32, 8, 8))
    mask = torch.tensor([[0, 0, 1], [1, 0, 1], [0, 1, 1]], dtype=torch.bool)
    wanted = cupyattn.single_prefill_with_kv_cache(q, k, v, custom_mask=mask)
    assert torch.allclose(w.run(q, k, v), wanted)
    w.begin_forward(None, None, 3, 3, 1, 1, 32, 8, 128, block_mask=mask.expand(8, 3, 3))
    assert torch.allclose(w.run(q, k, v), wanted)
    wide = cupyattn.single_prefill_with_kv_cache(q, k, v, custom_mask=mask, sm_scale=0.5)
    assert torch.allclose(w.forward(q, k, v, sm_scale=0.5), wide)


def test_scales_and_a_soft_cap() -> None:
    call = sparse_calls.fixed(8)
    w = call.wrapper(NO_SPACE)
    args, named = call.plan
    w.plan(*args, **named, logits_soft_cap=3.0)
    scales = [np.linspace(0.5, 2, x.shape[1]).astype(np.float32) for x in (call.q, call.k, call.v)]
    out, lse = w.run(call.q, call.k, call.v, *scales, return_lse=True)
    wanted = cupyattn.single_prefill_with_kv_cache(
        call.q, np.nan_to_num(call.k), np.nan_to_num(call.v), *scales, logits_soft_cap=3.0,
        custom_mask=call.mask[0], return_lse=True,
    )  # fmt: skip
    np.testing.assert_array_equal(out, wanted[0])
    np.testing.assert_allclose(lse, wanted[1], rtol=1e-6)


def test_fp8_queries_and_a_float16_answer_by_default() -> None:
    call = sparse_calls.fixed(9)
    assert call.q.dtype == ml_dtypes.bfloat16
    w = call.wrapper(NO_SPACE)
    args, named = call.plan
    w.plan(*args, **{**named, "o_data_type": "float16"})
    assert w.run(call.q, call.k, call.v).dtype == np.float16


# --- errors ---

INDPTR, INDICES = np.array([0, 1, 3], np.int32), np.array([2, 0, 2], np.int32)
FIXED: dict[str, Any] = {
    **{"indptr": INDPTR, "indices": INDICES, "M": 4, "N": 9, "R": 2, "C": 3},
    **{"num_qo_heads": 4, "num_kv_heads": 2, "head_dim": 16},
}
SHOWN = np.ones((2, 2, 3), bool)
VARIABLE: dict[str, Any] = {
    "block_mask_map": SHOWN,
    "block_row_sz": np.array([[2, 2], [1, 3]], np.int32),
    "block_col_sz": np.array([[4, 4, 1], [3, 3, 3]], np.int32),
    **{"num_qo_heads": 4, "num_kv_heads": 2, "head_dim": 16},
}


@pytest.mark.parametrize(
    ("changes", "error", "match"),
    [
        ({"N": 10}, ArgumentError, "N: got 10 columns, in blocks of 3"),
        ({"R": 0}, ArgumentError, "R: got 0; wanted an integer, 1 or more"),
        ({"M": 5}, ArgumentError, "indptr: holds 3 offsets; wanted 4, for 5 rows in blocks of 2"),
        ({"indptr": INDPTR[::-1]}, ArgumentError, "indptr: .*never fall"),
        ({"indices": INDICES[:2]}, ArgumentError, "indices: holds 2; wanted 3"),
        ({"indices": INDICES + 1}, ArgumentError, "indices: entry 0 is 3; wanted 0 to 2"),
        ({"indices": None}, ArgumentError, "indices: got None; wanted it, or block_mask"),
        ({"mask": np.ones((3, 2, 2), bool)}, ArgumentError, "mask: dimension 2"),
        ({"mask": np.ones((3, 2, 3), np.uint8)}, ArgumentError, "mask: dtype is uint8"),
        ({"packed_mask": np.ones(2, np.uint8)}, ArgumentError, "packed_custom_mask: holds 2"),
        ({"block_mask": SHOWN ^ np.eye(3, dtype=bool)[:2]}, None, ""),
        ({"block_mask": np.arange(12).reshape(2, 2, 3) > 5}, UnsupportedError, "heads see diff"),
        ({"block_mask": SHOWN[:, :1]}, ArgumentError, "block_mask: dimension 1"),
        ({"block_mask": np.ones((3, 2, 3), bool)}, ArgumentError, "block_mask: is of 3 heads"),
        ({"pos_encoding_mode": "ALIBI"}, UnsupportedError, "pos_encoding_mode: 'ALIBI'"),
        ({"pos_encoding_mode": "X"}, ArgumentError, "pos_encoding_mode: got 'X'"),
        ({"kv_block_lens": INDICES}, UnsupportedError, "kv_block_lens: not supported"),
        ({"v_scale": INDICES}, UnsupportedError, "v_scale: FP8 scales are arguments of run"),
        ({"num_qo_heads": 3}, ArgumentError, "3 query heads over 2 KV heads"),
    ],
)
def test_bad_plans(changes: Any, error: Any, match: str) -> None:
    w = cupyattn.BlockSparseAttentionWrapper(NO_SPACE, "vsa_sm100_blk64")
    w.plan(**FIXED)
    before = w._current
    if error is None:
        w.plan(**FIXED | changes)
        return
    with pytest.raises(error, match=match):
        w.plan(**FIXED | changes)
    assert w._current is before


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"block_mask_map": SHOWN[:1]}, "block_mask_map: dimension 0 .*is 1; wanted"),
        ({"block_mask_map": SHOWN.astype(np.int8)}, "block_mask_map: dtype is int8"),
        (
            {"block_row_sz": np.array([[2, 2], [1, 4]], np.int32)},
            "4 for head 0 and to 5 for head 1",
        ),
        ({"block_col_sz": np.array([[4, 5], [3, 6]], np.int32)}, "block_col_sz: dimension 1"),
        ({"block_col_sz": np.array([[9, 1, -1], [3, 3, 3]], np.int32)}, "block_col_sz: holds -1"),
        ({"block_col_sz": np.ones((2, 3), np.float32)}, "block_col_sz: dtype is float32"),
        ({"num_qo_heads": 5}, "5 query heads over 2 KV heads"),
        ({"causal": None}, "causal"),
    ],
)
def test_bad_plans_of_variable_blocks(changes: Any, match: str) -> None:
    w = cupyattn.VariableBlockSparseAttentionWrapper(NO_SPACE)
    w.plan(**VARIABLE)
    before = w._current
    with pytest.raises(ArgumentError, match=match):
        w.plan(**VARIABLE | changes)
    assert w._current is before


def test_bad_runs() -> None:
    q, k = np.zeros((4, 4, 16), np.float16), np.zeros((9, 2, 16), np.float16)
    w: Any = cupyattn.BlockSparseAttentionWrapper(NO_SPACE)
    with pytest.raises(PlanError, match="plan"):
        w.run(q, k, k)
    w.plan(**FIXED)
    with pytest.raises(ArgumentError, match=r"v: dimension 0 of shape .* is 6; wanted 9, the N of"):
        w.run(q, k, k[:6])
    with pytest.raises(ArgumentError, match="k: dimension 1"):
        w.run(q, k[:, :1], k)
    with pytest.raises(ArgumentError, match="q: holds 3 rows"):
        w.run(q[:3], k, k)
    q, k = np.zeros((4, 4, 16), np.float16), np.zeros((2, 9, 16), np.float16)
    w = cupyattn.VariableBlockSparseAttentionWrapper(NO_SPACE)
    with pytest.raises(PlanError, match="plan"):
        w.run(q, k, k)
    w.plan(**VARIABLE)
    with pytest.raises(ArgumentError, match=r"k: dimension 1 of shape .* is 8; wanted 9"):
        w.run(q, k[:, :8], k)
    with pytest.raises(ArgumentError, match="out: dtype is float32; wanted float16"):
        w.run(q, k, k, out=np.zeros(q.shape, np.float32))
    with pytest.raises(ArgumentError, match="out: overlaps q"):
        w.run(q, k, k, out=q)
    with pytest.raises(ArgumentError, match="lse: shape is"):
        w.run(q, k, k, lse=np.zeros((4, 5), np.float32))
