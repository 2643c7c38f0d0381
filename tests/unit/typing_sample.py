"""A program that uses every public name. Type checkers read it (test_types.py), nothing runs it.

Lines with `type: ignore` are mistakes that a checker has to find.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from typing_extensions import assert_type

import cupyattn
from cupyattn.typing import Array, ArrayT, LseT, Pages, Scale
from cupyattn.xqa import xqa

Half = npt.NDArray[np.float16]
Float = npt.NDArray[np.float32]
Int = npt.NDArray[np.int32]
Bool = npt.NDArray[np.bool_]


class Tensor:
    """An array of a framework that says no more about itself than this."""

    shape: tuple[int, ...] = ()
    dtype: object = None


def one_call(q: Half, t: Tensor, table: Int) -> None:
    attention = cupyattn.dot_product_attention
    assert_type(attention(q, q, q, is_causal=True, local_window_size=(4, 0)), Half)
    assert_type(attention(t, t, t, block_table=table, kv_lens=table), Tensor)
    assert_type(cupyattn.dot_product_attention(t, t, t, return_lse=True), tuple[Tensor, Tensor])
    attention(q, q, q, casual=True)  # type: ignore[call-overload]


def answers_of_one_request(q: Half, t: Tensor, mask: Bool, flag: bool) -> None:
    prefill = cupyattn.single_prefill_with_kv_cache
    assert_type(prefill(q, q, q), Half)
    assert_type(prefill(q, q, q, causal=True, custom_mask=mask), Half)
    assert_type(prefill(q=q, k=q, v=q, return_lse=True), tuple[Half, Float])
    assert_type(prefill(t, q, q), Tensor)
    assert_type(prefill(t, q, q, return_lse=flag), Tensor | tuple[Tensor, Tensor])
    assert_type(cupyattn.single_prefill_with_kv_cache_return_lse(t, q, q), tuple[Tensor, Tensor])
    assert_type(cupyattn.single_decode_with_kv_cache(q, q, q, "HND"), Half)
    assert_type(
        cupyattn.single_decode_with_kv_cache(t, t, t, return_lse=True), tuple[Tensor, Tensor]
    )
    prefill(q, q)  # type: ignore[call-overload]
    prefill(q, q, [1.0])  # type: ignore[call-overload]
    prefill(q, q, q, casual=True)  # type: ignore[call-overload]
    prefill(q, q, q, causal="yes")  # type: ignore[call-overload]


def calls_without_a_plan(q: Half, pages: Pages, table: Int, flag: bool) -> None:
    decode = cupyattn.trtllm_batch_decode_with_kv_cache
    assert_type(decode(q, pages, None, table, table, 99, 0.1, q), Half)
    assert_type(decode(q, pages, None, table, table, 9, return_lse=True), tuple[Half, Float])
    assert_type(decode(query=q, kv_cache=(q, q), workspace_buffer=None, block_tables=table,
                       seq_lens=table, max_seq_len=99), Half)  # fmt: skip
    context = cupyattn.trtllm_batch_context_with_kv_cache
    rest = (1.0, 1.0, 2, table, table)
    assert_type(context(q, pages, None, table, table, 5, 99, *rest, return_lse=flag),
                Half | tuple[Half, Float])  # fmt: skip
    assert_type(
        cupyattn.xqa_batch_decode_with_kv_cache(q, pages, None, table, table, 99, sinks=table), Half
    )
    assert_type(cupyattn.xqa(q, q, q, table, table, q_seq_len=2), Half)
    assert_type(xqa(q, q, q, table, table, return_lse=True), tuple[Half, Float])
    cupyattn.cudnn_batch_decode_with_kv_cache(q, q, q, 0.1, None, max_sequence_kv=9)
    prefill = cupyattn.cudnn_batch_prefill_with_kv_cache
    out, _ = prefill(q, q, q, 0.1, None, max_token_per_sequence=5, max_sequence_kv=9,
                     causal=True, return_lse=False)  # fmt: skip
    assert_type(out, Half)
    ragged = cupyattn.trtllm_ragged_attention_deepseek
    ragged(q, q, q, None, table, 5, 99, 0.1, q, 0.0, 2, -1, table, table, None, True, True)
    fused = cupyattn.trtllm_fmha_v2_prefill
    fused((q, q, q), "SEPARATE_Q_K_V", None, table, 5, 99, 0.1, q, 2, table, table, return_lse=flag)
    decode(q, pages, None, table)  # type: ignore[call-overload]


def batches(q: Tensor, pages: Pages, offsets: Int, workspace: Tensor, flag: bool) -> None:
    decode = cupyattn.BatchDecodeWithPagedKVCacheWrapper(workspace, "NHD")
    decode.plan(offsets, offsets, offsets, 4, 2, 128, 16, q_data_type="float16")
    cupyattn.fast_decode_plan(decode, offsets, offsets, offsets, 4, 2, 128, 16)
    assert_type(decode.run(q, pages), Tensor)
    assert_type(decode.run(q, (q, q), 1.0, 1.0, 1.0, k_scale=1.0), Tensor)
    assert_type(decode.run(q, pages, out=q, return_lse=True), tuple[Tensor, Tensor])
    assert_type(decode.run_return_lse(q, pages), tuple[Tensor, Tensor])
    assert_type(decode.forward(q, pages, window_left=3), Tensor)
    assert_type(decode.workspace_size(offsets), tuple[int, int])
    graph = cupyattn.CUDAGraphBatchDecodeWithPagedKVCacheWrapper(q, offsets, offsets, offsets)
    graph.end_forward()
    paged = cupyattn.BatchPrefillWithPagedKVCacheWrapper()
    paged.plan(offsets, offsets, offsets, offsets, 4, 2, 128, 16, causal=True)
    assert_type(paged.run(q, pages, return_lse=flag), Tensor | tuple[Tensor, Tensor])
    ragged = cupyattn.BatchPrefillWithRaggedKVCacheWrapper("cuda")
    ragged.begin_forward(offsets, offsets, 4, 2, 128)
    assert_type(ragged.run(q, q, q, return_lse=True), tuple[Tensor, Tensor])
    mixed = cupyattn.BatchAttention("NHD", "cuda:1")
    mixed.plan(offsets, offsets, offsets, offsets, 4, 2, 128, 128, 16)
    assert_type(mixed.run(q, pages), tuple[Tensor, Tensor])
    sinks = cupyattn.BatchAttentionWithAttentionSinkWrapper(workspace)
    sinks.plan(offsets, offsets, offsets, offsets, 4, 2, 128, 16)
    assert_type(sinks.run(q, pages, q, 0.1), Tensor)
    assert_type(sinks.run(q, pages, q, 0.1, return_lse=True), tuple[Tensor, Tensor])
    ranges = cupyattn.BatchPrefillWithCausalBidirectionalRangesWrapper()
    ranges.plan(offsets, offsets, offsets, offsets, 4, 2, 128, 16, bidirectional_ranges=offsets)
    assert_type(ranges.run(q, pages, offsets, 512), Tensor)
    assert_type(ranges.run(q, pages, return_lse=True), tuple[Tensor, Tensor])
    decode.run(q)  # type: ignore[call-overload]
    decode.run(q, pages, k_scales=1.0)  # type: ignore[call-overload]
    paged.plan(offsets)  # type: ignore[call-arg]


def shared_keys(q: Half, pages: Pages, offsets: Int) -> None:
    cascade = cupyattn.MultiLevelCascadeAttentionWrapper(2)
    levels = [offsets, offsets]
    cascade.plan(levels, levels, levels, levels, 4, 2, 128, 16)
    assert_type(cascade.run(q, pages), Half)
    assert_type(cascade.run(q, pages, return_lse=True), tuple[Half, Float])
    decode = cupyattn.BatchDecodeWithSharedPrefixPagedKVCacheWrapper()
    decode.begin_forward(offsets, offsets, offsets, 4, 2, 128, 16)
    assert_type(decode.forward(q, q, q, pages), Half)
    prefill = cupyattn.BatchPrefillWithSharedPrefixPagedKVCacheWrapper()
    prefill.begin_forward(offsets, offsets, offsets, offsets, 4, 2, 128)
    assert_type(prefill.run(q, q, q, pages), Half)
    assert_type(cupyattn.batch_decode_with_shared_prefix_padded_kv_cache(q, q, q, q, q), Half)


def sparse(q: Tensor, blocks: Int, mask: Bool) -> None:
    fixed = cupyattn.BlockSparseAttentionWrapper()
    fixed.plan(blocks, blocks, 64, 64, 8, 8, 4, 2, 128)
    assert_type(fixed.run(q, q, q, return_lse=True), tuple[Tensor, Tensor])
    variable = cupyattn.VariableBlockSparseAttentionWrapper()
    variable.plan(mask, blocks, blocks, 4, 2, 128)
    assert_type(variable.run(q, q, q), Tensor)
    assert_type(variable.forward(q, q, q), Tensor)


def pods(q: Tensor, pages: Pages, table: Int, scale: float) -> None:
    one = cupyattn.PODWithPagedKVCacheWrapper()
    one.plan(table, table, table, 4, 2, 128, 16)
    prompt, decodes = one.run(q, q, q, q, pages, k_scale=scale)
    many = cupyattn.BatchPODWithPagedKVCacheWrapper()
    many.plan(table, table, table, table, table, table, table, table, 4, 2, 128, 16)
    (prompt, _), (decodes, _) = many.run(q, pages, q, pages, return_lse=True)
    assert prompt.shape != decodes.shape


def states(v: Tensor, s: Float, offsets: Int) -> None:
    assert_type(cupyattn.merge_state(v, s, v, s), tuple[Tensor, Float])
    assert_type(cupyattn.merge_state_in_place(v, s, v, s), tuple[Tensor, Float] | None)
    assert_type(cupyattn.merge_states(v, s), tuple[Tensor, Float])
    assert_type(cupyattn.variable_length_merge_states(v, s, offsets), tuple[Tensor, Float])


def caches(k: Half, pages: Pages, offsets: Int, mask: Bool) -> None:
    rows, positions = cupyattn.get_batch_indices_positions(offsets, offsets, 9)
    assert_type(rows, Int)
    assert_type(str(cupyattn.explain(None)), str)
    assert_type(cupyattn.get_seq_lens(offsets, offsets, 16), Int)
    assert_type(cupyattn.get_share_seq_lens(offsets, 2, 0), Int)
    assert_type(cupyattn.get_share_slots(offsets, 2, 0), Int)
    assert_type(cupyattn.get_share_lists(offsets, 2, 0), tuple[Int, Int])
    cupyattn.append_paged_kv_cache(k, k, rows, positions, pages, offsets, offsets, offsets)
    eight: cupyattn.QuantizedQKV = cupyattn.quantize_qkv(k, k, k, dtype="int8", hadamard=True)
    cupyattn.rope_and_cache(eight.q, k, k, k, k, rows, positions, rope_theta=1e4)
    cupyattn.top_k_page_table_transform(k, rows, offsets, 8)
    cupyattn.top_k_ragged_transform(k, offsets, offsets, 8)
    assert_type(cupyattn.packbits(mask, "little"), Bool)
    assert_type(cupyattn.segment_packbits(mask, offsets), tuple[Bool, Bool])


def twice(x: ArrayT, scale: Scale, other: Array) -> ArrayT:
    """What a library on top of this one may look like."""
    return cupyattn.single_decode_with_kv_cache(x, other, other, k_scale=2.0)


def merged(v: ArrayT, s: LseT) -> tuple[ArrayT, LseT]:
    return cupyattn.merge_states(v, s)


def errors() -> tuple[type[cupyattn.CupyAttnError], ...]:
    assert_type(cupyattn.__version__, str)
    argument: type[ValueError] = cupyattn.ArgumentError
    expression: type[cupyattn.ArgumentError] = cupyattn.ExpressionError
    assert argument and expression
    kinds = cupyattn.ArgumentError, cupyattn.UnsupportedError, cupyattn.PlanError
    more = cupyattn.WorkspaceError, cupyattn.CompileError, cupyattn.DeviceError
    return *kinds, *more, cupyattn.DistributedError, cupyattn.MissingPackageError


def latent(q: Half, pages: Half, table: Int) -> None:
    wrapper = cupyattn.BatchMLAPagedAttentionWrapper(None)
    wrapper.plan(table, table, table, table, 128, 512, 64, 64, True, 0.07)
    wrapper.run(query=q, kv_cache=pages, return_lse=True)
    older = cupyattn.BatchDecodeMlaWithPagedKVCacheWrapper(None)
    older.plan(table, table, table, 128, 512, 64, 0.07)
    older.run(q, q, pages, pages, return_lse=True)
    cupyattn.trtllm_batch_decode_with_kv_cache_mla(
        q, pages, None, 128, 512, 64, table, table, 9, bmm1_scale=0.07
    )
    cupyattn.xqa_batch_decode_with_kv_cache_mla(q, pages, None, 128, 512, 64, table, table, 9)
    cupyattn.xqa_mla(q, pages, pages, table, table)
    cupyattn.append_paged_mla_kv_cache(q, q, table, table, pages, None, table, table, table)
