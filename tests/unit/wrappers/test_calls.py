"""Every way to spell a call of the batch wrappers, old and new, gives the same answer."""

from __future__ import annotations

import inspect
from typing import Any

import numpy as np
import pytest
from helpers import batches
from helpers.batches import HKV, HQ, WORKSPACE, D

import cupyattn
import cupyattn.decode
import cupyattn.prefill

PAGE = 4
B = batches.make([3, 1, 4], [7, 0, 11], PAGE)
ONE = batches.make([1, 1, 1], [7, 0, 11], PAGE)
PAGED, RAGGED = (
    cupyattn.BatchPrefillWithPagedKVCacheWrapper,
    cupyattn.BatchPrefillWithRaggedKVCacheWrapper,
)
DECODE = cupyattn.BatchDecodeWithPagedKVCacheWrapper


def same(a: Any, b: Any) -> None:
    for x, y in zip(a, b, strict=True):
        np.testing.assert_array_equal(x, y)


def test_names_are_where_they_are_looked_for() -> None:
    assert cupyattn.decode.BatchDecodeWithPagedKVCacheWrapper is DECODE
    assert cupyattn.prefill.BatchPrefillWithPagedKVCacheWrapper is PAGED
    assert cupyattn.prefill.BatchPrefillWithRaggedKVCacheWrapper is RAGGED
    assert issubclass(cupyattn.decode.CUDAGraphBatchDecodeWithPagedKVCacheWrapper, DECODE)
    assert cupyattn.fast_decode_plan is cupyattn.decode.fast_decode_plan
    for cls in (DECODE, PAGED, RAGGED):
        for name in (
            *("plan", "run", "run_return_lse", "begin_forward", "forward", "forward_return_lse"),
            *("end_forward", "reset_workspace_buffer", "workspace_size"),
        ):
            assert callable(getattr(cls, name)) and getattr(cls, name).__doc__


# FlashInfer's positional orders (spec 1.3, 1.5), self left out.
ORDERS = {
    (DECODE, "__init__"): "float_workspace_buffer kv_layout use_cuda_graph use_tensor_cores "
    "paged_kv_indptr_buffer paged_kv_indices_buffer paged_kv_last_page_len_buffer backend jit_args",
    (DECODE, "plan"): "indptr indices last_page_len num_qo_heads num_kv_heads head_dim page_size "
    "pos_encoding_mode window_left logits_soft_cap q_data_type kv_data_type data_type sm_scale "
    "rope_scale rope_theta non_blocking block_tables seq_lens fixed_split_size disable_split_kv",
    (PAGED, "__init__"): "float_workspace_buffer kv_layout use_cuda_graph qo_indptr_buf "
    "paged_kv_indptr_buf paged_kv_indices_buf paged_kv_last_page_len_buf custom_mask_buf "
    "mask_indptr_buf backend jit_args jit_kwargs",
    (PAGED, "plan"): "qo_indptr paged_kv_indptr paged_kv_indices paged_kv_last_page_len "
    "num_qo_heads num_kv_heads head_dim_qk page_size head_dim_vo custom_mask packed_custom_mask "
    "causal pos_encoding_mode use_fp16_qk_reduction sm_scale window_left logits_soft_cap "
    "rope_scale rope_theta q_data_type kv_data_type o_data_type non_blocking prefix_len_ptr "
    "token_pos_in_items_ptr token_pos_in_items_len max_item_len_ptr seq_lens seq_lens_q "
    "block_tables max_token_per_sequence max_sequence_kv fixed_split_size disable_split_kv",
    (RAGGED, "__init__"): "float_workspace_buffer kv_layout use_cuda_graph qo_indptr_buf "
    "kv_indptr_buf custom_mask_buf mask_indptr_buf backend jit_args jit_kwargs",
    (RAGGED, "plan"): "qo_indptr kv_indptr num_qo_heads num_kv_heads head_dim_qk head_dim_vo "
    "custom_mask packed_custom_mask causal pos_encoding_mode use_fp16_qk_reduction window_left "
    "logits_soft_cap sm_scale rope_scale rope_theta q_data_type kv_data_type o_data_type "
    "non_blocking prefix_len_ptr token_pos_in_items_ptr token_pos_in_items_len max_item_len_ptr "
    "fixed_split_size disable_split_kv seq_lens seq_lens_q max_token_per_sequence max_sequence_kv "
    "v_indptr o_indptr",
}


@pytest.mark.parametrize("key", ORDERS, ids=lambda k: f"{k[0].__name__}.{k[1]}")
def test_positional_orders(key: Any) -> None:
    signature = inspect.signature(getattr(*key))
    kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD,)
    names = [n for n, p in signature.parameters.items() if p.kind in kinds]
    assert names[1:] == ORDERS[key].split()


def paged_answers(*args: Any, **options: Any) -> Any:
    w = PAGED(WORKSPACE)
    w.plan(B.qo_indptr, *B.table, HQ, HKV, D, PAGE, *args, **options)
    return w.run(B.q, B.one_tensor(), return_lse=True)


def ragged_answers(*args: Any, **options: Any) -> Any:
    w = RAGGED(WORKSPACE)
    w.plan(B.qo_indptr, B.kv_indptr, HQ, HKV, D, *args, **options)
    return w.run(B.q, *B.ragged(), return_lse=True)


@pytest.mark.parametrize("answers", [paged_answers, ragged_answers])
def test_old_and_new_orders_of_prefill_plans(answers: Any) -> None:
    masks = np.concatenate([m.ravel() for m in B.masks()])
    bits = batches.offsets([m.size for m in B.masks()])
    packed, _ = cupyattn.segment_packbits(masks, bits, "little")
    masked = answers(custom_mask=masks)
    same(answers(masks), masked)  # old: the mask first
    same(answers(None, masks), masked)  # new: head_dim_vo first
    same(answers(D, masks), masked)
    same(answers(None, packed), masked)  # old: the packed mask second
    same(answers(None, None, packed), masked)
    causal = answers(causal=True)
    same(answers(None, None, True), causal)  # old
    same(answers(None, None, None, True), causal)  # new
    rope = answers(causal=True, pos_encoding_mode="ROPE_LLAMA")
    same(answers(None, None, True, "ROPE_LLAMA"), rope)
    same(answers(None, None, None, True, "ROPE_LLAMA"), rope)


def test_old_names() -> None:
    w = PAGED(workspace_buffer=WORKSPACE, qk_indptr_buf=None)
    w.begin_forward(
        B.qo_indptr,
        *B.table,
        HQ,
        HKV,
        head_dim=D,
        page_size=PAGE,
        allow_fp16_qk_reduction=True,
        data_type="float16",
        non_blocking=False,
    )
    plain = paged_answers()
    same(w.forward_return_lse(B.q, B.one_tensor(), allow_fp16_qk_reduction=True), plain)
    same([w.forward(B.q, B.one_tensor())], plain[:1])
    same(
        w.forward_return_lse(B.q, B.one_tensor(), True, "ALIBI"),
        paged_answers(causal=True, pos_encoding_mode="ALIBI"),
    )
    w.end_forward()
    r = RAGGED(WORKSPACE)
    r.begin_forward(B.qo_indptr, B.kv_indptr, HQ, HKV, head_dim=D)
    same(r.forward_return_lse(B.q, *B.ragged(), causal=True), ragged_answers(causal=True))
    d = DECODE(workspace_buffer=WORKSPACE, use_tensor_cores=True, backend="fa2")
    assert d.use_tensor_cores and not d.is_cuda_graph_enabled
    d.begin_forward(*ONE.table, HQ, HKV, D, PAGE, data_type="float16")
    got = d.forward(ONE.q, ONE.one_tensor(), "ROPE_LLAMA", None, 0.5, 2.0, 3, 5.0, 0.3, 2.0, 5e5)
    d.plan(
        *ONE.table, HQ, HKV, D, PAGE, "ROPE_LLAMA", 3, 5.0,
        sm_scale=0.3, rope_scale=2.0, rope_theta=5e5,
    )  # fmt: skip
    same([d.run(ONE.q, ONE.one_tensor(), k_scale=0.5, v_scale=2.0)], [got])


def test_old_positional_orders_of_runs() -> None:
    cache = ONE.one_tensor()
    d = DECODE(WORKSPACE)
    d.plan(*ONE.table, HQ, HKV, D, PAGE)
    wanted = d.run(ONE.q, cache, q_scale=2.0, k_scale=0.5, v_scale=3.0, return_lse=True)
    same(d.run(ONE.q, cache, 2.0, 0.5, 3.0, True), wanted)
    same(d.run(ONE.q, cache, 2.0, 0.5, 3.0, return_lse=True), wanted)
    same(d.run_return_lse(ONE.q, cache, 2.0, k_scale=0.5, v_scale=3.0), wanted)
    p, cache = PAGED(WORKSPACE), B.one_tensor()
    p.plan(B.qo_indptr, *B.table, HQ, HKV, D, PAGE)
    wanted = p.run(B.q, cache, k_scale=0.5, v_scale=3.0, return_lse=True)
    same(p.run(B.q, cache, 0.5, 3.0, True), wanted)
    same(p.run(B.q, cache, None, 0.5, 3.0, return_lse=True), wanted)
    by_head = np.array([0.5, 0.5], np.float32)
    same(p.run(B.q, cache, np.ones(HQ, np.float32), by_head, 3.0, return_lse=True), wanted)
    r = RAGGED(WORKSPACE)
    r.plan(B.qo_indptr, B.kv_indptr, HQ, HKV, D)
    same(r.run(B.q, *B.ragged(), True), r.run_return_lse(B.q, *B.ragged()))
    same(r.run(B.q, *B.ragged(), None, 0.5, 3.0, return_lse=True), wanted)


def test_arguments_kept_for_compatibility_change_nothing() -> None:
    plain = paged_answers()
    kept = {
        "use_fp16_qk_reduction": True,
        "non_blocking": False,
        "seq_lens": np.array([1]),
        "seq_lens_q": np.array([1]),
        "block_tables": np.zeros((3, 4), np.int32),
        "max_token_per_sequence": 5,
        "max_sequence_kv": 12,
    }
    same(paged_answers(**kept), plain)
    w = PAGED(WORKSPACE, backend="fa3")
    w.plan(B.qo_indptr, *B.table, HQ, HKV, D, PAGE, window_left=5)
    w.run(B.q, B.one_tensor(), enable_pdl=True, window_left=5, kv_cache_sf=None)


def test_graph_mode_on_the_cpu_fills_the_buffers() -> None:
    def empty(n: int) -> np.ndarray:
        return np.full(n, -7, np.int32)

    buffers = empty(4), empty(20), empty(3)
    w = cupyattn.CUDAGraphBatchDecodeWithPagedKVCacheWrapper(WORKSPACE, *buffers)
    assert w.is_cuda_graph_enabled and not w.use_tensor_cores
    w.plan(*ONE.table, HQ, HKV, D, PAGE)
    np.testing.assert_array_equal(buffers[0], ONE.indptr)
    np.testing.assert_array_equal(buffers[1][: ONE.indptr[-1]], ONE.indices[: ONE.indptr[-1]])
    assert (buffers[1][ONE.indptr[-1] :] == -7).all()
    np.testing.assert_array_equal(buffers[2], ONE.last_page_len)
    o = w.run(ONE.q, ONE.one_tensor())
    np.testing.assert_array_equal(o, ONE.expected()[0].astype(np.float16))
    with pytest.raises(cupyattn.PlanError, match="indptr: 2 requests"):
        w.plan(ONE.indptr[:3], ONE.indices, ONE.last_page_len[:2], HQ, HKV, D, PAGE)
