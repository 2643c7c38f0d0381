"""What arguments of public calls may mean, by name: a name means the same in nearly all of them.

Where it does not, RULES has "step.name", or an Entry has a rule of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np

from .batches import SMALL_WORKSPACE as WORKSPACE
from .wrong_values import (
    HUGE,
    Rejected,
    above,
    array,
    dtype,
    flag,
    ignored,
    integer,
    integers,
    nothing,
    number,
    one_of,
    scale,
    whole,
)

Rule = Callable[[Any], Any]
HALF, BF16, FP32 = np.float16, ml_dtypes.bfloat16, np.float32
FP8 = ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2


# --- rules of rules ---


def several(rule: Rule) -> Rule:
    def meant(value: Any) -> list[Any]:
        if not isinstance(value, (tuple, list)):
            raise Rejected
        return [rule(x) for x in value]

    return meant


def or_default(rule: Rule, default: Any = None) -> Rule:
    return lambda value: default if value is None else rule(value)


def or_ignored(rule: Rule) -> Rule:
    """An older name, which is not read where the newer one is given."""

    def meant(value: Any) -> Any:
        try:
            return rule(value)
        except Exception:  # values raise what they like
            return None

    return meant


# --- rules of a few arguments ---

floats = array(HALF, BF16, FP32)
keys = array(HALF, BF16, FP32, *FP8)
float32s = array(FP32)
indices = integers()
lengths = integers(np.int32, np.int64, np.uint32)
one = or_default(number, 1.0)
MODE = one_of("NONE", "ROPE_LLAMA", "ALIBI")
BACKENDS = "auto fa2 fa3 cudnn cutlass cute-dsl trtllm-gen trtllm-native xqa".split()


def workspace(value: Any) -> np.ndarray:
    is_array = isinstance(value, np.ndarray)
    if not is_array or not value.flags.writeable or not value.flags.c_contiguous:
        raise Rejected
    return WORKSPACE


def pages(value: Any) -> Any:
    """One tensor of both, or a pair."""
    if isinstance(value, (tuple, list)):
        if len(value) != 2:
            raise Rejected
        return keys(value[0]), keys(value[1])
    return keys(value)


def flag_off(value: Any) -> None:
    if flag(value):
        raise Rejected


def item_length(value: Any) -> int:
    """Without items it only has to be a length."""
    is_one = isinstance(value, np.ndarray) and value.shape == () and value.dtype.kind in "iu"
    return whole(0)(value.item() if is_one else value)


def bound(value: Any) -> int | None:
    """The largest length that a caller promises, or None where none is promised."""
    return None if value is None else integer(value, 0, HUGE)


def _longest(value: Any) -> int | None:
    """An integer, or an array of one."""
    is_one = isinstance(value, np.ndarray) and value.size == 1 and value.dtype.kind in "iu"
    return bound(value.reshape(-1)[0].item() if is_one else value)


def _true(value: Any) -> None:
    assert flag(value)


def _lengths_or_one(value: Any) -> Any:
    return indices(value) if isinstance(value, np.ndarray) and value.ndim else whole(0)(value)


def _zero(value: Any) -> float:
    if number(value):
        raise Rejected
    return 0.0


def _sides(value: Any) -> Any:
    if value is None:
        return -1, -1
    if not isinstance(value, (tuple, list)) or len(value) != 2:
        raise Rejected
    return tuple(-1 if x is None else whole(-1)(x) for x in value)


def _nones(value: Any) -> None:
    if any(x is not None for x in value):
        raise Rejected


def _named(*rules: tuple[Rule, str]) -> dict[str, Rule]:
    return {name: rule for rule, names in rules for name in names.split()}


RULES = _named(
    # arrays
    (floats, "q query q_p q_d q_nope q_pe v_a v_b s_a s_b s v_other prefix_output prefix_lse"),
    (floats, "suffix_output suffix_lse output_lse out_partial lse_partial rotary_cos rotary_sin"),
    (keys, "k v k_cache v_cache key value k_shared v_shared k_unique v_unique k_p v_p append_key"),
    (keys, "append_value append_ckv append_kpe ckv_cache kpe_cache paged_ckv_cache"),
    (keys, "paged_kpe_cache"),
    (pages, "paged_kv_cache kv_cache unique_kv_cache paged_kv_cache_p paged_kv_cache_d"),
    (or_ignored(pages), "unique_kv_data"),
    (several(floats), "qkv"),
    (floats, "s_aux output_gate rel_logits"),
    (float32s, "sinks sink attention_sinks s_other alibi_slopes"),
    (array(bool), "custom_mask custom_mask_p block_mask block_mask_map x"),
    (array(np.uint8), "packed_custom_mask packed_custom_mask_p packed_mask"),
    (array(bool, "u1", "u2", "u4", "u8", "i4", "i8"), "mask"),
    # tables and lengths
    (indices, "indptr indices last_page_len qo_indptr kv_indptr kv_indices kv_len_arr"),
    (indices, "kv_last_page_len paged_kv_indptr paged_kv_indices paged_kv_last_page_len"),
    (indices, "unique_kv_indptr unique_kv_indices unique_kv_last_page_len append_indptr"),
    (indices, "qo_indptr_p qo_indptr_d kv_indptr_p kv_indptr_d kv_indices_p kv_indices_d"),
    (indices, "last_page_len_p last_page_len_d batch_indices positions block_tables block_table"),
    (indices, "page_table cu_seqlens_q cu_seqlens_k seqused_q seqused_k cache_batch_idx"),
    (indices, "cache_leftpad cu_seqlens_k_new bidirectional_ranges block_row_sz block_col_sz"),
    (several(indices), "qo_indptr_arr paged_kv_indptr_arr paged_kv_indices_arr"),
    (or_default(indices), "dynamic_causal plan.cp_tot_seqused_k"),
    (or_ignored(indices), "rotary_seqlens"),
    (lengths, "seq_lens cum_seq_lens_q q_cu_seq_lens actual_seq_lens_q actual_seq_lens_kv"),
    (lengths, "batch_offsets_q"),
    (or_default(lengths), "cum_seq_lens_kv"),
    (_lengths_or_one, "cache_seqlens"),
    (bound, "max_q_len max_kv_len max_seq_len max_sequence_kv"),
    (_longest, "max_seqlen_q max_seqlen_k"),
    # sizes
    (whole(1), "num_qo_heads num_kv_heads num_heads head_dim head_dim_qk head_dim_vo page_size"),
    (whole(1), "head_dim_ckv head_dim_compressed_kv q_len_per_req q_seq_len M N R C"),
    (whole(1), "max_token_per_sequence"),
    (whole(0), "head_dim_kpe kv_lora_rank qk_rope_head_dim sparse_mla_top_k batch_size nnz"),
    (whole(0), "attention_chunk chunked_attention_size sliding_win_size"),
    (or_default(whole(0)), "prefill_tokens_with_context"),
    (whole(-1), "window_left window_right window_left_p window_left_d fixed_split_size"),
    (whole(-(2**31)), "causal_window_left range_window_left num_splits"),
    (whole(1, 1), "cp_world cp_world_size"),  # what several give, another test says
    (whole(0, 0), "plan.cp_rank"),
    (whole(1, 32), "num_levels"),
    (_sides, "window_size"),
    (item_length, "token_pos_in_items_len"),
    (or_default(workspace), "workspace_buffer"),
    (workspace, "float_workspace_buffer"),
    # numbers
    (number, "sm_scale sm_scale_p sm_scale_d softmax_scale"),
    (above(0.0, is_open=False), "skip_softmax_threshold_scale_factor"),
    (one, "bmm1_scale bmm2_scale kv_scale rcp_out_scale scale"),
    (or_default(number), "bmm1_scale_log2"),
    (scale, "scale_q scale_k scale_v q_scale k_scale v_scale"),
    (above(0.0), "rope_scale rope_theta rope_scale_p rope_scale_d rope_theta_p rope_theta_d"),
    (above(0.0, is_open=False), "logits_soft_cap logits_soft_cap_scale"),
    (or_default(above(0.0, is_open=False), 0.0), "softcap"),
    (or_default(_zero, 0.0), "dropout_p"),
    # flags and words
    (flag, "causal causal_p is_causal return_lse return_lse_base_on_e return_softmax_lse"),
    (flag, "return_attn_probs use_cuda_graph use_tensor_cores disable_split_kv lse_base_on_e"),
    (flag, "rotary_interleaved enable_dcp"),
    (or_default(one_of("base2", "basee")), "return_lse_base"),
    (flag_off, "save_softmax_stats use_profiler"),
    (_true, "uses_shared_paged_kv_idx"),
    (dtype, "o_dtype o_data_type kv_data_type data_type out_dtype output_dtype"),
    (or_default(dtype, HALF), "q_data_type"),
    (one_of("NHD", "HND"), "kv_layout kv_layout_p"),
    (MODE, "pos_encoding_mode pos_encoding_mode_p"),
    (or_default(MODE), "pos_encoding_mode_d"),
    (one_of(*BACKENDS), "backend"),
    (one_of("log2", "ln"), "lse_base"),
    (one_of("NH", "HN"), "lse_layout"),
    (one_of("none", "base2", "basee"), "lse_mode"),
    (one_of("1"), "logits_transform"),  # of the wrong values, the one that is an expression
    (one_of("elements", "tokens"), "batch_offsets_units"),
    (one_of("little", "big"), "bitorder"),
    (one_of("cpu"), "device"),
    (one_of("SEPARATE_Q_K_V"), "input_layout"),
    (one_of("causal", "sliding_window", "padding"), "mask_mode"),
    (or_default(one_of("packed", "split")), "query_layout kv_cache_layout"),
    (one_of("default", "kv-per-tensor", "bmm-scalar"), "scale_mode"),
    # what has to be left out
    (nothing, "kv_cache_sf jit_args jit_kwargs k_sf_cache v_sf_cache o_sf_vec_size o_sf_scale"),
    (nothing, "batch_offsets_stats batch_offsets_k batch_offsets_v batch_offsets_o v_indptr"),
    (nothing, "o_indptr o_scale enable_block_sparse_attention profiler_buffer custom_mask_d"),
    (nothing, "packed_custom_mask_d kv_block_lens q2k_indices q2k_num qv q_v score_mod mask_mod"),
    (nothing, "block_sparse_tensors aux_tensors aux_tensor_leading_dims metadata"),
    (nothing, "kv_len ckv_scale ckv_scale_arr kpe_scale"),
    # of queries of 8 bits alone
    (nothing, "q_block_scales k_block_scales v_block_scales k_mean"),
    (ignored, "block_size"),
    (_nones, "sage_attn_sfs"),
    # what is not read
    (ignored, "enable_pdl non_blocking is_cuda_graph_compatible seq_lens_q max_item_len_ptr"),
    (ignored, "sm_count semaphores multi_ctas_kv_counter_buffer bf16q_fp8kv_transform_mode"),
    (ignored, "allow_fp16_qk_reduction use_fp16_qk_reduction use_fp16_softmax uses_spcompress"),
    (ignored, "num_elts_per_sage_attn_blk q_seq_lens_cpu kv_seq_lens_cpu skip_softmax use_sinks"),
    (ignored, "sparse_mla_top_k_lens use_clc kv_splits causal_d kv_layout_d return_lse_p"),
    (ignored, "return_lse_d scheduler_metadata fa_version ver cp_rank pack_gqa deterministic"),
    (
        ignored,
        "cp_kv_cache_interleave_size cp_tot_seqused_k causal_seqlens_kv_global",
    ),  # of one rank
    (ignored, "sm_margin q_descale k_descale v_descale"),  # they scale fp8 values alone
    # plans have tables of their own, and wrappers the buffers of graphs
    (ignored, "plan.block_tables plan.seq_lens plan.max_sequence_kv plan.max_token_per_sequence"),
    (ignored, "plan.cum_seq_lens_q plan.max_q_len make.workspace_buffer make.qo_indptr"),
    (ignored, "make.kv_indptr make.kv_indices make.kv_len_arr"),
    (dtype, "make.q_data_type"),
)
