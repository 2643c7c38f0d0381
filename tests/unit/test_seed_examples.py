"""The examples of FlashInfer's documentation, ported by changing one import, on CPU tensors."""

from __future__ import annotations

import pytest

import cupyattn as flashinfer

torch = pytest.importorskip("torch")


def test_append_with_a_causal_and_a_custom_mask() -> None:
    qo_len = 128
    kv_len = 4096
    num_qo_heads = 32
    num_kv_heads = 4
    head_dim = 128
    q = torch.randn(qo_len, num_qo_heads, head_dim).half()
    k = torch.randn(kv_len, num_kv_heads, head_dim).half()
    v = torch.randn(kv_len, num_kv_heads, head_dim).half()
    o = flashinfer.single_prefill_with_kv_cache(q, k, v, causal=True, allow_fp16_qk_reduction=True)
    assert o.shape == torch.Size([128, 32, 128])
    mask = torch.tril(
        torch.full((qo_len, kv_len), True),
        diagonal=(kv_len - qo_len),
    )
    o_custom = flashinfer.single_prefill_with_kv_cache(q, k, v, custom_mask=mask)
    assert torch.allclose(o, o_custom, rtol=1e-3, atol=1e-3)


def test_append_with_a_causal_and_a_custom_mask_and_lse() -> None:
    qo_len = 128
    kv_len = 4096
    num_qo_heads = 32
    num_kv_heads = 4
    head_dim = 128
    q = torch.randn(qo_len, num_qo_heads, head_dim).half()
    k = torch.randn(kv_len, num_kv_heads, head_dim).half()
    v = torch.randn(kv_len, num_kv_heads, head_dim).half()
    V, S = flashinfer.single_prefill_with_kv_cache_return_lse(q, k, v, causal=True)
    assert (V.shape, S.shape) == (torch.Size([128, 32, 128]), torch.Size([128, 32]))
    mask = torch.tril(
        torch.full((qo_len, kv_len), True),
        diagonal=(kv_len - qo_len),
    )
    V_custom, S_custom = flashinfer.single_prefill_with_kv_cache_return_lse(
        q, k, v, custom_mask=mask
    )
    assert torch.allclose(V, V_custom, rtol=1e-3, atol=1e-3)
    assert torch.allclose(S, S_custom, rtol=1e-3, atol=1e-3)


def test_decode() -> None:
    kv_len = 2048
    num_kv_heads = 32
    head_dim = 128
    num_qo_heads = 32
    k = torch.randn(kv_len, num_kv_heads, head_dim).half()
    v = torch.randn(kv_len, num_kv_heads, head_dim).half()
    q = torch.randn(num_qo_heads, head_dim).half()
    o = flashinfer.single_decode_with_kv_cache(q, k, v)
    o_rope = flashinfer.single_decode_with_kv_cache(q, k, v, pos_encoding_mode="ROPE_LLAMA")
    assert o.shape == o_rope.shape == torch.Size([32, 128])
    assert not torch.equal(o, o_rope)


def test_prefill_and_append() -> None:
    kv_len = 2048
    num_kv_heads = 32
    head_dim = 128
    num_qo_heads = 32
    k = torch.randn(kv_len, num_kv_heads, head_dim).half()
    v = torch.randn(kv_len, num_kv_heads, head_dim).half()
    qo_len = 2048
    q = torch.randn(qo_len, num_qo_heads, head_dim).half()
    o = flashinfer.single_prefill_with_kv_cache(q, k, v, causal=False)
    append_qo_len = 128
    q_append = torch.randn(append_qo_len, num_qo_heads, head_dim).half()
    o_append = flashinfer.single_prefill_with_kv_cache(
        q_append, k, v, causal=True, pos_encoding_mode="ROPE_LLAMA"
    )
    o_with_lse, lse = flashinfer.single_prefill_with_kv_cache_return_lse(q, k, v, causal=True)
    assert o.shape == o_with_lse.shape == q.shape and o_append.shape == q_append.shape
    assert lse.shape == torch.Size([2048, 32])
    # The last row sees every key with and without the causal mask.
    assert torch.equal(o[-1], o_with_lse[-1]) and not torch.equal(o[0], o_with_lse[0])
