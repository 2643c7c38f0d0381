"""Sixty calls, right and wrong. Type checkers read them (test_types.py), nothing runs them.

A line with `type: ignore` is a mistake that a checker has to find.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from typing_extensions import assert_type

import cupyattn

Half = npt.NDArray[np.float16]
Float = npt.NDArray[np.float32]
Int = npt.NDArray[np.int32]


class Tensor:
    """An array of a framework that says no more about itself than this."""

    shape: tuple[int, ...] = ()
    dtype: object = None


def names(q: Half) -> None:
    cupyattn.dot_product_atention(q, q, q)  # type: ignore[attr-defined]
    cupyattn.flash_attn_func(q, q, q)  # type: ignore[attr-defined]
    cupyattn.BatchDecodeWrapper()  # type: ignore[attr-defined]
    cupyattn.flash_attn.flash_attn_fun(q, q, q)  # type: ignore[attr-defined]
    cupyattn.serving.AtentionBackend  # type: ignore[attr-defined]  # noqa: B018
    cupyattn.slots.reshape_and_cash(q, q, q, q, q)  # type: ignore[attr-defined]
    cupyattn.decode.single_decode(q, q, q)  # type: ignore[attr-defined]
    cupyattn.prefill.single_decode_with_kv_cache(q, q, q)  # type: ignore[attr-defined]
    cupyattn.errors.ArgumentErrror  # type: ignore[attr-defined]  # noqa: B018
    cupyattn.paging.num_page(3, 4)  # type: ignore[attr-defined]


def one_call(q: Half, t: Tensor, lens: Int, flag: bool) -> None:
    attention = cupyattn.dot_product_attention
    assert_type(attention(q, q, q), Half)
    assert_type(attention(t, t, t, is_causal=True), Tensor)
    assert_type(attention(q, q, q, return_lse=True), tuple[Half, Float])
    assert_type(attention(q, q, q, return_residual=True), tuple[Half, Float])
    assert_type(attention(t, t, t, return_lse=True), tuple[Tensor, Tensor])
    assert_type(attention(q, q, q, return_lse=flag), Half | tuple[Half, Float])
    assert_type(attention(q, q, q, causal_alignment="first"), Half)
    attention(q, q, q, casual=True)  # type: ignore[call-overload]
    attention(q, q, q, is_casual=True, return_lse=True)  # type: ignore[call-overload]
    attention(q, q, q, is_causal=True, return_lse=flag, kv_len=lens)  # type: ignore[call-overload]
    attention(q, q, return_lse=True)  # type: ignore[call-overload]
    attention(q, q, q, scale="0.1", return_lse=True)  # type: ignore[call-overload]
    attention(q, q, q, causal_alignment="middle")  # type: ignore[call-overload]


def one_request(q: Half, t: Tensor, flag: bool) -> None:
    prefill, decode = cupyattn.single_prefill_with_kv_cache, cupyattn.single_decode_with_kv_cache
    assert_type(prefill(q, q, q, causal=True), Half)
    assert_type(prefill(q, q, q, causal=True, return_lse=True), tuple[Half, Float])
    assert_type(prefill(t, q, q, return_lse=flag), Tensor | tuple[Tensor, Tensor])
    assert_type(decode(q, q, q, "HND", return_lse=True), tuple[Half, Float])
    always = cupyattn.single_prefill_with_kv_cache_return_lse
    assert_type(always(q, q, q, causal=True), tuple[Half, Float])
    assert_type(always(t, t, t), tuple[Tensor, Tensor])
    always(q, q, q, casual=True)  # type: ignore[call-overload]
    prefill(q, q, q, casual=True, return_lse=True)  # type: ignore[call-overload]
    prefill(q, q, q, window_lft=3, return_lse=flag)  # type: ignore[call-overload]
    decode(q, q, q, return_lse=True, causal=True)  # type: ignore[call-overload]


def flash(q: Half, t: Tensor, lens: Int, flag: bool) -> None:
    fa2 = cupyattn.flash_attn
    fa3 = cupyattn.flash_attn_interface
    assert_type(fa2.flash_attn_func(q, q, q, 0.0, None, True), Half)
    assert_type(fa2.flash_attn_func(q, q, q, return_softmax_lse=True), tuple[Half, Float])
    assert_type(fa2.flash_attn_func(t, t, t, return_attn_probs=True), tuple[Tensor, Tensor, Tensor])
    assert_type(fa3.flash_attn_func(t, t, t, return_attn_probs=True), tuple[Tensor, Tensor])
    assert_type(fa2.flash_attn_varlen_func(q, q, q, lens, lens, 9, 9, causal=True), Half)
    assert_type(fa2.flash_attn_with_kvcache(t, t, t, cache_seqlens=lens), Tensor)
    assert_type(
        fa2.flash_attn_qkvpacked_func(t, return_attn_probs=True), tuple[Tensor, Tensor, Tensor]
    )
    assert_type(fa2.merge_state_v2(q, lens, q, lens), tuple[Half, Int])
    fa2.flash_attn_func(q, q, q, casual=True)  # type: ignore[call-overload]
    fa2.flash_attn_func(q, q, q, is_causal=True, return_softmax_lse=True)  # type: ignore[call-overload]
    fa2.flash_attn_func(q, q)  # type: ignore[call-overload]
    fa3.flash_attn_func(q, q, q, softmaxscale=0.1)  # type: ignore[call-overload]
    fa2.flash_attn_varlen_func(q, q, q, lens, cu_seqlen_k=lens)  # type: ignore[call-overload]
    fa2.flash_attn_with_kvcache(q, q, q, cache_seqlen=lens)  # type: ignore[call-overload]


def batches(q: Half, t: Tensor, lens: Int, flag: bool) -> None:
    decode = cupyattn.BatchDecodeWithPagedKVCacheWrapper()
    decode.plan(lens, lens, lens, 8, 2, 64, 16)
    assert_type(decode.run(q, q), Half)
    assert_type(decode.run(q, (q, q), return_lse=True), tuple[Half, Float])
    assert_type(decode.run(t, t, return_lse=flag), Tensor | tuple[Tensor, Tensor])
    assert_type(cupyattn.BatchAttention().run(q, q), tuple[Half, Float])
    assert_type(cupyattn.merge_state(q, q.astype(np.float32), q, lens), tuple[Half, Float])
    assert_type(decode.run_return_lse(q, q), tuple[Half, Float])
    ragged = cupyattn.BatchPrefillWithRaggedKVCacheWrapper()
    assert_type(ragged.run(q, q, q, return_lse=True), tuple[Half, Float])
    assert_type(cupyattn.MultiLevelCascadeAttentionWrapper(2).run(t, t), Tensor)
    trtllm = cupyattn.trtllm_batch_decode_with_kv_cache
    assert_type(trtllm(q, q, None, lens, lens, 99, return_lse=True), tuple[Half, Float])
    assert_type(cupyattn.sparse.attend(q, q, q, lens), Half)
    decode.plan(lens, lens, lens, 8, 2, 64, page_sizes=16)  # type: ignore[call-arg]
    decode.run(q, q, k_scales=1.0, return_lse=True)  # type: ignore[call-overload]
    decode.run(return_lse=True)  # type: ignore[call-overload]
    cupyattn.BatchAttention().run(q, q, k_scales=1.0)  # type: ignore[call-overload]
    cupyattn.merge_state(q, lens, q)  # type: ignore[call-arg]
