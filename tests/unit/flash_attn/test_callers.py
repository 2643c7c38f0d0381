"""flash_attn's functions as other programs call them: their forms of arguments, and imports."""

from __future__ import annotations

import importlib
import inspect
import subprocess
import sys
from typing import Any

import numpy as np
import pytest

import cupyattn.flash_attn as flash_attn_interface
from cupyattn import flash_attn
from cupyattn.errors import ArgumentError, UnsupportedError

torch = pytest.importorskip("torch")
B, H, HK, D, PAGE = 3, 4, 2, 16, 4


def ints(*values: int) -> Any:
    return torch.tensor(values, dtype=torch.int32)


@pytest.fixture
def pool() -> tuple[Any, Any]:
    torch.manual_seed(3)
    return torch.randn(10, PAGE, HK, D), torch.randn(10, PAGE, HK, D)


TABLE = torch.tensor([[3, 1, -1], [7, 2, 5], [4, -1, -1]], dtype=torch.int32)


def test_nano_vllm(pool: tuple[Any, Any]) -> None:
    """Prompts with and without cached keys, then a decode whose graph has rows of no request."""
    k_cache, v_cache = pool
    q = torch.randn(9, H, D)
    named = {"softmax_scale": D**-0.5, "causal": True}
    cu, fresh = ints(0, 4, 9), torch.randn(9, HK, D)
    out = flash_attn.flash_attn_varlen_func(
        q, fresh, fresh, max_seqlen_q=5, cu_seqlens_q=cu, max_seqlen_k=5, cu_seqlens_k=cu, **named
    )
    assert out.shape == q.shape and out.dtype == torch.float32
    cached = flash_attn.flash_attn_varlen_func(
        q, k_cache, v_cache, max_seqlen_q=5, cu_seqlens_q=cu, max_seqlen_k=9,
        cu_seqlens_k=ints(0, 7, 16), block_table=TABLE[:2], **named,
    )  # fmt: skip
    used = flash_attn.flash_attn_varlen_func(
        q, k_cache, v_cache, cu, None, seqused_k=ints(7, 9), page_table=TABLE[:2], **named
    )
    assert torch.equal(cached, used)
    decoded = flash_attn.flash_attn_with_kvcache(
        q[:B].unsqueeze(1), k_cache, v_cache, cache_seqlens=ints(7, 9, 0), block_table=TABLE,
        **named,
    )  # fmt: skip
    assert decoded.shape == (B, 1, H, D) and not decoded[2].any()
    last = flash_attn.flash_attn_with_kvcache(
        q[3:4][None], k_cache, v_cache, cache_seqlens=7, page_table=TABLE[:1], **named
    )
    assert torch.allclose(cached[3], last[0, 0], atol=1e-6)


def test_mini_sglang(pool: tuple[Any, Any]) -> None:
    out = flash_attn.flash_attn_with_kvcache(
        q=torch.randn(5, H, D), k_cache=pool[0], v_cache=pool[1], page_table=TABLE,
        cache_seqlens=ints(7, 9, 2), cu_seqlens_q=ints(0, 2, 4, 5),
        cu_seqlens_k_new=ints(0, 7, 16, 18), max_seqlen_q=2, softmax_scale=0.25, sm_margin=0,
        window_size=(-1, -1), softcap=0.0, num_splits=0, pack_gqa=None, causal=True, ver=3,
    )  # fmt: skip
    assert out.shape == (5, H, D)


def test_sglang(pool: tuple[Any, Any]) -> None:
    """Descales as one number expanded, sinks in bfloat16, an LSE with more behind it."""
    k_cache, v_cache = (x.to(torch.float8_e4m3fn) for x in pool)
    q = torch.randn(B, H, D, dtype=torch.bfloat16)
    scale = torch.tensor(0.5).expand(B, HK)
    out, lse, *_ = flash_attn.flash_attn_with_kvcache(
        q=q.to(torch.float8_e4m3fn), k_cache=k_cache, v_cache=v_cache, page_table=TABLE,
        cache_seqlens=ints(7, 9, 2), cu_seqlens_q=torch.arange(B + 1, dtype=torch.int32),
        max_seqlen_q=1, causal=False, k_descale=scale, v_descale=scale, return_softmax_lse=True,
        num_splits=1, sinks=torch.zeros(H, dtype=torch.bfloat16),
    )  # fmt: skip
    assert out.dtype == torch.bfloat16 and lse.shape == (H, B) and lse.dtype == torch.float32
    merged, s = flash_attn.merge_state_v2(out, lse.T.contiguous(), out, lse.T.contiguous())
    assert torch.allclose(merged, out) and torch.allclose(s, lse.T + np.log(2), atol=1e-5)


def test_vllm() -> None:
    """Everything by name, an output of the caller's, keys and values side by side in one array."""
    blocks = torch.randn(10, HK, PAGE, 2 * D)
    k_cache, v_cache = blocks.transpose(1, 2).split(D, dim=-1)
    q, out = torch.randn(6, H, D), torch.zeros(6, H, D)
    cu, lens = ints(0, 2, 5, 6), ints(7, 9, 2)
    one = torch.ones(()).expand(B, HK)
    named = dict(
        q=q, k=k_cache, v=v_cache, cu_seqlens_q=cu, max_seqlen_q=torch.tensor(3),
        seqused_k=lens, max_seqlen_k=torch.tensor(9), softmax_scale=0.25, causal=True,
        alibi_slopes=None, window_size=[-1, -1], block_table=TABLE, softcap=0.0,
        scheduler_metadata=None, fa_version=3, q_descale=one, k_descale=one, v_descale=one,
        num_splits=0, s_aux=None, dropout_p=0.0, q_v=None, cp_world_size=1, cp_rank=0,
    )  # fmt: skip
    got = flash_attn.flash_attn_varlen_func(out=out, return_softmax_lse=True, **named)
    assert got[0] is out and got[1].shape == (H, 6)
    packed = flash_attn.flash_attn_varlen_func(
        **(named | {"k": k_cache.contiguous(), "v": v_cache.contiguous()})
    )
    assert torch.equal(packed, out)


def test_transformers(pool: tuple[Any, Any]) -> None:
    """It takes what the signature has; a decode appends, with requests that are none."""
    varlen = inspect.signature(flash_attn.flash_attn_varlen_func).parameters
    names = ("window_size", "softcap", "s_aux", "deterministic", "dropout_p", "block_table")
    assert {*names} <= {*varlen}
    with_cache = inspect.signature(flash_attn.flash_attn_with_kvcache).parameters
    assert ("page_table" in with_cache) + ("block_table" in with_cache) == 1
    q, cu = torch.randn(9, H, D), ints(0, 4, 9, 9)
    k = torch.randn(9, HK, D)
    flash_attn.flash_attn_varlen_func(
        q, k, k, cu, cu, torch.tensor(5), torch.tensor(5), softmax_scale=0.25, causal=True,
        window_size=(2, 0), s_aux=torch.nn.Parameter(torch.zeros(H)),
    )  # fmt: skip
    before = [x.clone() for x in pool]
    new = torch.randn(2, B, 1, HK, D)
    out = flash_attn.flash_attn_with_kvcache(
        torch.randn(B, 1, H, D), *pool, k=new[0], v=new[1], cache_seqlens=ints(5, 9, -1),
        softmax_scale=0.25, causal=True, window_size=(-1, -1), page_table=TABLE,
    )  # fmt: skip
    assert not out[2].any()
    for cache, old, x in zip(pool, before, new, strict=True):
        assert torch.equal(cache[1, 1], x[0, 0]) and torch.equal(cache[5, 1], x[1, 0])
        old[1, 1], old[5, 1] = x[0, 0], x[1, 0]
        assert torch.equal(cache, old)


def test_queries_of_any_strides() -> None:
    """Heads before tokens, as a projection leaves them, and parts of one array."""
    q, k = torch.randn(2, H, 3, D), torch.randn(2, HK, 5, D)
    want = flash_attn.flash_attn_func(
        *(x.transpose(1, 2).contiguous() for x in (q, k, k)), causal=True
    )
    got = flash_attn.flash_attn_func(*(x.transpose(1, 2) for x in (q, k, k)), causal=True)
    assert torch.equal(got, want)
    qkv = torch.randn(2, 3, 3, H, D)
    parts = qkv.unbind(2)
    got = flash_attn.flash_attn_func(*parts)
    assert torch.equal(got, flash_attn.flash_attn_func(*(x.contiguous() for x in parts)))


def test_other_frameworks() -> None:
    jax = pytest.importorskip("jax")
    q, k = (np.ones((1, 2, H, D), np.float32), np.ones((1, 3, HK, D), np.float32))
    out, lse = flash_attn.flash_attn_func(
        *(jax.numpy.asarray(x) for x in (q, k, k)), return_attn_probs=True
    )
    assert isinstance(out, jax.Array) and isinstance(lse, jax.Array)
    assert np.allclose(lse, np.log(3) + 4, atol=1e-5)


# --- imports ---


def test_it_stands_for_flash_attn(monkeypatch: pytest.MonkeyPatch) -> None:
    """By both names, with what programs ask to know what they have."""
    code = """
import sys
import cupyattn.flash_attn
sys.modules["flash_attn"] = cupyattn.flash_attn
sys.modules["flash_attn_interface"] = cupyattn.flash_attn
import flash_attn
from flash_attn import flash_attn_func, flash_attn_varlen_func, flash_attn_with_kvcache
from flash_attn.flash_attn_interface import flash_attn_varlen_func as same
from flash_attn_interface import flash_attn_combine, get_scheduler_metadata
assert same is flash_attn_varlen_func
assert tuple(map(int, flash_attn.__version__.split("."))) >= (2, 7, 0)
assert not {"torch", "cupy", "jax"} & {*sys.modules}
"""
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert found.returncode == 0, found.stderr


def test_the_module_has_fa3s_names() -> None:
    for name in ("flash_attn_func", "flash_attn_varlen_func", "flash_attn_with_kvcache",
                 "flash_attn_combine", "get_scheduler_metadata"):  # fmt: skip
        assert callable(getattr(flash_attn_interface, name))
    module = importlib.import_module("cupyattn.flash_attn.flash_attn_interface")
    assert module.flash_attn_func is flash_attn.flash_attn_func
    order = [*inspect.signature(flash_attn.flash_attn_with_kvcache).parameters][:32]
    assert order == [
        *("q", "k_cache", "v_cache", "k", "v", "qv", "rotary_cos", "rotary_sin", "cache_seqlens"),
        *("cache_batch_idx", "cache_leftpad", "page_table", "cu_seqlens_q", "cu_seqlens_k_new"),
        *("max_seqlen_q", "rotary_seqlens", "q_descale", "k_descale", "v_descale"),
        *("softmax_scale", "causal", "window_size", "attention_chunk", "softcap"),
        *("rotary_interleaved", "scheduler_metadata", "num_splits", "pack_gqa", "sm_margin"),
        *("return_softmax_lse", "alibi_slopes", "out"),
    ]
    order = [*inspect.signature(flash_attn.flash_attn_varlen_func).parameters][:23]
    assert order == [
        *("q", "k", "v", "cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k"),
        *("seqused_q", "seqused_k", "softmax_scale", "causal", "qv", "q_descale", "k_descale"),
        *("v_descale", "window_size", "attention_chunk", "softcap", "num_splits", "pack_gqa"),
        *("deterministic", "sm_margin", "return_attn_probs"),
    ]


def test_gradients_are_refused() -> None:
    q = torch.randn(1, 2, H, D, requires_grad=True)
    with pytest.raises(ArgumentError, match="q: requires grad"):
        flash_attn.flash_attn_func(q, q.detach(), q.detach())
    with torch.no_grad():
        flash_attn.flash_attn_func(q, q, q)
    with pytest.raises(UnsupportedError, match="dropout_p"):
        flash_attn.flash_attn_func(q, q, q, dropout_p=0.1)
