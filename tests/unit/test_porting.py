"""Calls as FlashInfer's programs make them: nothing but the import changes."""

from __future__ import annotations

import functools
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from helpers import batches
from helpers.batches import HKV, HQ, D

import cupyattn
import cupyattn.prefill
from cupyattn.core import dtypes
from cupyattn.errors import ArgumentError, PlanError, UnsupportedError, WorkspaceError

PAGE = 4
BATCH = batches.make([3, 1, 4], [7, 2, 11], PAGE)
ONE = batches.make([1, 1, 1], [7, 0, 11], PAGE)


def workspace(num_bytes: int = 64) -> np.ndarray:
    return np.zeros(num_bytes, np.uint8)


def decode_wrapper() -> Any:
    return cupyattn.BatchDecodeWithPagedKVCacheWrapper(workspace())


def test_fast_decode_plan_in_the_place_of_plan() -> None:
    w = decode_wrapper()
    w.plan = w.begin_forward = functools.partial(cupyattn.fast_decode_plan, w)
    for plan in (w.plan, w.begin_forward):
        plan(*ONE.table, HQ, HKV, D, PAGE, q_data_type="float16", data_type="float16")
        np.testing.assert_array_equal(
            w.run(ONE.q, ONE.one_tensor()), ONE.expected()[0].astype(np.float16)
        )


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        ({}, ("float16", "float16")),
        ({"data_type": "bfloat16"}, ("bfloat16", "bfloat16")),
        ({"data_type": "float8_e4m3fn", "q_data_type": "bfloat16"}, ("bfloat16", "float8_e4m3fn")),
        ({"data_type": "bfloat16", "q_data_type": None}, ("bfloat16", "bfloat16")),
        (
            {"data_type": "bfloat16", "kv_data_type": "float8_e5m2"},
            ("bfloat16", "float8_e5m2"),
        ),
    ],
)
def test_data_type_fills_what_is_not_given(given: Any, wanted: tuple[str, str]) -> None:
    decode = decode_wrapper()
    decode.plan(*ONE.table, HQ, HKV, D, PAGE, **given)
    prefill = cupyattn.BatchPrefillWithPagedKVCacheWrapper(workspace())
    prefill.plan(BATCH.qo_indptr, *BATCH.table, HQ, HKV, D, PAGE, **given)
    for w in (decode, prefill):
        spec = w._current.geometry.spec
        assert (spec.dtype_q.name, spec.dtype_kv.name) == wanted


def test_a_flat_mask_of_one_request() -> None:
    b = batches.make([5], [9])
    k, v = b.ragged()
    mask = np.random.default_rng(1).random((5, 9)) < 0.5
    expected = cupyattn.single_prefill_with_kv_cache(b.q, k, v, custom_mask=mask)
    got = cupyattn.single_prefill_with_kv_cache(b.q, k, v, custom_mask=mask.ravel())
    np.testing.assert_array_equal(got, expected)


def test_a_leave_to_answer_less_exactly_changes_nothing() -> None:
    less = {"skip_softmax_threshold_scale_factor": 1e3}
    even_less = less | {"use_fp16_softmax": True, "uses_spcompress": True}
    prefill = cupyattn.BatchPrefillWithPagedKVCacheWrapper(workspace())
    prefill.plan(BATCH.qo_indptr, *BATCH.table, HQ, HKV, D, PAGE)
    decode = decode_wrapper()
    decode.plan(*ONE.table, HQ, HKV, D, PAGE)
    for w, b, given in ((prefill, BATCH, even_less), (decode, ONE, less)):
        expected = w.run(b.q, b.one_tensor())
        np.testing.assert_array_equal(w.run(b.q, b.one_tensor(), **given), expected)


def test_a_run_of_more_rows_than_planned() -> None:
    b = batches.make([2, 2, 2], [7, 5, 11], PAGE)
    planned, other = decode_wrapper(), decode_wrapper()
    planned.plan(*b.table, HQ, HKV, D, PAGE, q_len_per_req=2)
    other.plan(*b.table, HQ, HKV, D, PAGE)
    wanted = planned.run(b.q, b.one_tensor())
    np.testing.assert_array_equal(other.run(b.q, b.one_tensor(), q_len_per_req=2), wanted)
    np.testing.assert_array_equal(
        other.run(b.q[::2], b.one_tensor()),
        planned.run(b.q[::2], b.one_tensor(), q_len_per_req=1),
    )


def test_cudnns_wrappers_count_elements() -> None:
    """Pages are heads first, whatever the layout is said to be."""
    rows, lengths = np.diff(BATCH.qo_indptr), np.diff(BATCH.kv_indptr)
    asked = {"seq_lens_q": rows.reshape(-1, 1, 1, 1), "seq_lens": lengths}
    more = {"max_token_per_sequence": 4, "max_sequence_kv": 11, "causal": True}
    w = cupyattn.BatchPrefillWithPagedKVCacheWrapper(workspace(), "NHD", backend="cudnn")
    plan = functools.partial(w.plan, num_qo_heads=HQ, num_kv_heads=HKV, head_dim_qk=D, **more)
    offsets = BATCH.qo_indptr * HQ * D
    paged = functools.partial(plan, offsets, *BATCH.table, page_size=PAGE)
    paged(**asked)
    k, v = (x.swapaxes(1, 2) for x in BATCH.cache)
    wanted = BATCH.expected(causal=True)[0].astype(np.float16)
    np.testing.assert_array_equal(w.run(BATCH.q, (k, v)), wanted)
    with pytest.raises(ArgumentError, match=r"qo_indptr: .* multiples of a token's 64 elements"):
        plan(BATCH.qo_indptr, *BATCH.table, page_size=PAGE)
    for name in asked:
        with pytest.raises(ArgumentError, match=f"{name}: differs from"):
            paged(**{name: asked[name] + 1})

    b = batches.make([3, 1, 4], [7, 2, 11], dims=(D, 2 * D))
    w = cupyattn.BatchPrefillWithRaggedKVCacheWrapper(workspace(), backend="cudnn")
    named = {"v_indptr": b.kv_indptr * HKV * 2 * D, "o_indptr": b.qo_indptr * HQ * 2 * D}
    plan = functools.partial(
        w.plan, b.qo_indptr * HQ * D, b.kv_indptr * HKV * D, HQ, HKV, D, 2 * D, **more
    )
    plan(**named, **asked)
    np.testing.assert_array_equal(
        w.run(b.q, *b.ragged()), b.expected(causal=True)[0].astype("half")
    )
    for name in named:
        with pytest.raises(ArgumentError, match=f"{name}: names other rows than"):
            plan(**{name: named[name][::-1].max() - named[name][::-1]})
    # In tokens, where no element is counted.
    w = cupyattn.BatchPrefillWithRaggedKVCacheWrapper(workspace())
    w.plan(b.qo_indptr, b.kv_indptr, HQ, HKV, D, v_indptr=b.kv_indptr, o_indptr=b.qo_indptr)


SINK_VARIANT = {
    "jit_args": (
        *("batch_prefill_attention_sink_f16_swa_False_fa2", "float16", "float16", "float16"),
        *("int32", D, D, ["sink"], ["float"], ["sm_scale"], ["double"]),
        *("AttentionSink", "struct AttentionSink : AttentionVariantBase {};"),
    ),
    "jit_kwargs": {"use_sliding_window": False},
}


def test_sinks_by_jit_arguments() -> None:
    sinks = np.array([1, -2, 0.5, 3], np.float32)
    paged = cupyattn.BatchPrefillWithPagedKVCacheWrapper(workspace(), **SINK_VARIANT)
    paged.plan(BATCH.qo_indptr, *BATCH.table, HQ, HKV, D, PAGE, causal=True)
    ragged = cupyattn.BatchPrefillWithRaggedKVCacheWrapper(workspace(), **SINK_VARIANT)
    ragged.plan(BATCH.qo_indptr, BATCH.kv_indptr, HQ, HKV, D, causal=True, sm_scale=5.0)
    wanted = BATCH.expected(causal=True, sinks=sinks, sm_scale=0.3)[0].astype(np.float16)
    for w, arrays in ((paged, (BATCH.one_tensor(),)), (ragged, BATCH.ragged())):
        np.testing.assert_array_equal(w.run(BATCH.q, *arrays, sinks, 0.3), wanted)
        out = w.run(BATCH.q, *arrays, sinks, 0.15, q_scale=2.0)
        np.testing.assert_array_equal(out, wanted)
        with pytest.raises(ArgumentError, match="sink: got None"):
            w.run(BATCH.q, *arrays)
        with pytest.raises(ArgumentError, match="sm_scale: got None"):
            w.run(BATCH.q, *arrays, sinks)
        with pytest.raises(TypeError, match="takes sink and sm_scale"):
            w.run(BATCH.q, *arrays, sinks, 0.3, 1.0)
    others = [*SINK_VARIANT["jit_args"]]
    others[11] = "FlashSigmoid"
    for given in ({"jit_args": others}, {"jit_args": "AttentionSink"}, {"jit_kwargs": {"x": 1}}):
        with pytest.raises(
            UnsupportedError, match=r"jit_args: .*logits_transform.* AttentionSink is"
        ):
            cupyattn.BatchPrefillWithPagedKVCacheWrapper(workspace(), **given)


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float8_e5m2"])
def test_fp8_answers(dtype: str) -> None:
    """Rounded once, after the scale of the output."""
    scale, kind = 200.0, dtypes.parse(dtype).numpy
    o, _ = BATCH.expected()
    wanted = cupyattn.reference.to_fp8(o * scale, 1.0, kind).view(np.uint8)
    w = cupyattn.BatchPrefillWithPagedKVCacheWrapper(workspace())
    w.plan(BATCH.qo_indptr, *BATCH.table, HQ, HKV, D, PAGE, o_data_type=dtype)
    given = np.zeros(o.shape, kind)
    for out in (None, given):
        got = w.run(BATCH.q, BATCH.one_tensor(), v_scale=scale, out=out)
        assert got.dtype == kind and (out is None or got is given)
        np.testing.assert_array_equal(got.view(np.uint8), wanted)
    table = np.array([[*BATCH.indices[a:b], 0, 0][:3] for a, b in pairwise(BATCH.indptr)], np.int32)
    got = cupyattn.trtllm_batch_decode_with_kv_cache(
        BATCH.q[[2, 3, 7]], BATCH.one_tensor(), None, table, np.array(BATCH.kv_len, np.int32), 11,
        D**-0.5, scale / 2, kv_layout="NHD", out_dtype=dtype, o_scale=2.0,
    )  # fmt: skip
    halved = cupyattn.reference.to_fp8(o * scale / 2, 1.0, kind)
    np.testing.assert_array_equal(got.view(np.uint8), halved.view(np.uint8)[[2, 3, 7]])


def int32(x: Any) -> np.ndarray:
    return np.asarray(x, np.int32)


RAGGED = {
    "seq_lens": int32(BATCH.kv_len), "max_q_len": 4, "max_kv_len": 11, "bmm2_scale": 0.5,
    "batch_size": 3, "cum_seq_lens_q": BATCH.qo_indptr, "cum_seq_lens_kv": BATCH.kv_indptr,
    "workspace_buffer": None,
}  # fmt: skip


@pytest.mark.parametrize("causal", [True, False])
def test_trtllm_ragged_attention(causal: bool) -> None:
    b = replace(BATCH, keys=batches.make(BATCH.qo_len, BATCH.kv_len, dims=(D, 2 * D)).keys)
    b.cache = b.cache[0], np.zeros((1, 1, 1, 2 * D))
    sinks = np.array([1, -2, 0.5, 3], np.float32)
    named = RAGGED | {"bmm1_scale": 0.3, "o_sf_scale": 1.0, "enable_pdl": None}
    k, v = b.ragged()
    named |= {"is_causal": causal, "return_lse": True, "attention_sinks": sinks, "window_left": 5}
    ask = functools.partial(cupyattn.prefill.trtllm_ragged_attention_deepseek, b.q, k, v)
    options = {"causal": causal, "window_left": 5, "sinks": sinks, "sm_scale": 0.3}
    o, lse = b.expected(**options)
    got = ask(**named)
    np.testing.assert_array_equal(got[0], (0.5 * o).astype(np.float16))
    np.testing.assert_array_equal(got[1], lse.astype(np.float32))
    for changes, words in (
        ({"batch_size": 2}, "batch_size: got 2; the arrays have 3"),
        ({"cum_seq_lens_kv": None}, "cum_seq_lens_kv: got None for 3 requests"),
        ({"cum_seq_lens_q": None}, "cum_seq_lens_q: got None for 3 requests"),
        ({"max_q_len": 0.5}, "max_q_len: got 0.5"),
    ):
        with pytest.raises(ArgumentError, match=words):
            ask(**named | changes)
    with pytest.raises(UnsupportedError, match="sage_attn_sfs"):
        ask(**named, sage_attn_sfs=(sinks, None, None, None))


def fmha_forms(b: batches.Batch) -> Any:
    """(layout, qkv, what else it takes) of one batch."""
    k, v = b.ragged()
    rows = [b.qo_indptr[1:], b.kv_indptr[1:]]
    table = int32([[*b.indices[i:j], 0, 0][:3] for i, j in pairwise(b.indptr)])
    yield "SEPARATE_Q_K_V", (b.q, k, v), {}
    yield "CONTIGUOUS_Q_KV", (b.q, np.stack([k, v], axis=1)), {}
    for layout in ("NHD", "HND"):
        pages = {"block_tables": table, "cum_seq_lens_kv": None}
        yield f"Q_PAGED_KV_{layout}", (b.q, b.one_tensor(layout)), pages
        pair = tuple(batches.as_layout(x, layout) for x in b.cache)
        yield f"Q_PAGED_KV_{layout}", [b.q, pair], pages
    if b.q.shape == k.shape and (rows[0] == rows[1]).all():
        yield "PACKED_QKV", np.stack([b.q, k, v], axis=1), {}


@pytest.mark.parametrize("lengths", [BATCH.qo_len, BATCH.kv_len])
def test_trtllm_fmha_v2_prefill_in_every_layout(lengths: list[int]) -> None:
    b = batches.make(
        lengths, BATCH.kv_len, PAGE, heads=(HQ, HQ if lengths is BATCH.kv_len else HKV)
    )
    modes = (
        ({}, {"causal": True}),
        ({"mask_mode": "PADDING"}, {}),
        ({"mask_mode": "sliding_window", "window_left": 3}, {"causal": True, "window_left": 3}),
        ({"logits_soft_cap_scale": 2.0}, {"causal": True, "logits_soft_cap": 2.0}),
        ({"pos_encoding_mode": "alibi"}, {"causal": True, "pos_encoding_mode": "ALIBI"}),
    )
    common = RAGGED | {"cum_seq_lens_q": b.qo_indptr, "bmm1_scale": 0.3}
    layouts = set()
    for layout, qkv, own in fmha_forms(b):
        layouts.add(layout)
        for given, options in modes:
            named = common | own | given | {"skip_softmax_threshold_scale_factor": 1.0}
            got = cupyattn.trtllm_fmha_v2_prefill(qkv, layout, **named, return_lse=True)
            o, lse = b.expected(sm_scale=0.3, **options)
            np.testing.assert_array_equal(got[0], (0.5 * o).astype(np.float16))
            np.testing.assert_array_equal(got[1], lse.astype(np.float32))
    assert len(layouts) == (5 if lengths is BATCH.kv_len else 4)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"input_layout": "QKV"}, "input_layout: got 'QKV'; wanted one of 'PACKED_QKV'"),
        ({"mask_mode": "random"}, "mask_mode: got 'random'"),
        ({"mask_mode": "chunked"}, "chunked_attention_size: got 0 with mask_mode='chunked'"),
        ({"chunked_attention_size": 64}, "chunked_attention_size: got 64 with mask_mode='causal'"),
        ({"save_softmax_stats": True, "return_lse": True}, "save_softmax_stats, return_lse: got"),
        ({"pos_encoding_mode": "rope"}, "pos_encoding_mode: got 'rope'"),
        ({"mask_mode": "padding", "window_left": 4}, "window_left: got 4 with mask_mode='padding'"),
        ({"qkv": None}, r"qkv: .* wanted \(Q, KV\)"),
        ({"qkv": (BATCH.q, BATCH.q)}, r"qkv\[1\]: shape is \[8, 4, 16\]; wanted \[rows, 2"),
        ({"qkv": (BATCH.q, None)}, r"qkv\[1\]: got NoneType"),
        ({"block_tables": int32([[0]])}, "block_tables: wanted None, with"),
        ({"input_layout": "Q_PAGED_KV_NHD"}, "block_tables: wanted the pages"),
    ],
)
def test_bad_calls_of_trtllm_fmha_v2_prefill(changes: dict[str, Any], words: str) -> None:
    k, v = BATCH.ragged()
    given = RAGGED | {"qkv": (BATCH.q, np.stack([k, v], axis=1)), "bmm1_scale": 1.0}
    given |= {"input_layout": "CONTIGUOUS_Q_KV"} | changes
    with pytest.raises((ArgumentError, UnsupportedError), match=words):
        cupyattn.trtllm_fmha_v2_prefill(**given)


def test_attributes_that_engines_read_and_set() -> None:
    decode, mixed = decode_wrapper(), cupyattn.BatchAttention(device="cpu")
    for w in (decode, mixed):
        assert w._backend == "auto" and w._int_workspace_buffer is None
        w._backend, w._int_workspace_buffer = "fa2", workspace()
    other = cupyattn.BatchPrefillWithPagedKVCacheWrapper(workspace(), backend="fa3")
    other._int_workspace_buffer = decode._int_workspace_buffer
    assert other._backend == "fa3"
    other.reset_workspace_buffer(workspace(128), other._int_workspace_buffer)
    shared, new = decode._int_workspace_buffer, workspace()
    assert other._int_workspace_buffer is shared
    other.reset_workspace_buffer(workspace(128), new)
    assert other._int_workspace_buffer is new
    with pytest.raises(WorkspaceError, match="int_workspace_buffer: its address is 1 bytes past"):
        other.reset_workspace_buffer(workspace(), workspace()[1:])


def test_errors_are_of_flashinfers_kinds() -> None:
    """What differs from a plan, or from what a graph keeps, is a ValueError as well."""
    assert issubclass(PlanError, ValueError) and issubclass(PlanError, RuntimeError)
    assert issubclass(WorkspaceError, ValueError)
