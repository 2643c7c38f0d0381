"""Calls for arrays of torch and of JAX, eager or inside their compilers: on the CPU, or on a GPU.

A call takes functions by their public names, arrays, and q, which the compiled program has just
made. For torch, and for eager calls of JAX, the functions are those of this module; inside jax.jit
they are those of cupyattn.integrations.jax.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import numpy as np

import cupyattn
from cupyattn import (  # noqa: F401
    append_paged_kv_cache,
    dot_product_attention,
    flash_attn_interface,
    merge_state,
    merge_states,
    single_decode_with_kv_cache,
    single_prefill_with_kv_cache,
    trtllm_batch_context_with_kv_cache,
    trtllm_batch_decode_with_kv_cache,
)
from cupyattn.flash_attn import (  # noqa: F401
    flash_attn_func,
    flash_attn_varlen_func,
    flash_attn_with_kvcache,
)
from cupyattn.mla import trtllm_batch_decode_with_kv_cache_mla  # noqa: F401
from cupyattn.slots import reshape_and_cache
from cupyattn.sparse import attend, select  # noqa: F401

B, T, S, H, HK, D, PAGE = 2, 3, 8, 4, 2, 64, 4
EAGER = sys.modules[__name__]


class Arrays:
    """q [B, T, H, D], k and v [B, S, HK, D], pages of the same, and what says where they are.

    framework: torch, or jax, whose arrays are on its own device.
    """

    def __init__(self, framework: Any, dtype: str, device: str = "cpu") -> None:
        self.framework, self.device = framework, device
        is_torch = framework.__name__ == "torch"
        self.xp = framework if is_torch else framework.numpy

        def put(x: Any, kind: str) -> Any:
            if is_torch:
                return framework.as_tensor(x).to(device, getattr(framework, kind))
            return self.xp.asarray(x, kind)

        def ints(*values: int) -> Any:
            return put(np.array(values), "int32")

        rng = np.random.default_rng(0)
        shapes = (B, T, H, D), (B, S, HK, D), (B, S, HK, D), (B, 1, HK, D), (1, H, T, S)
        numbers = [put(rng.standard_normal(shape), dtype) for shape in shapes]
        self.q, self.k, self.v, self.new, self.bias = numbers
        self.latents = put(rng.standard_normal((4, PAGE, 576)), dtype)
        self.wide = put(rng.standard_normal((B, T, 2, 576)), dtype)
        self.pages = tuple(x.reshape(-1, PAGE, HK, D) for x in (self.k, self.v))
        self.flat = tuple(x.reshape(-1, HK, D) for x in (self.k, self.v))
        self.pair = self.xp.stack(self.pages, 1)
        self.table = ints(0, 1, 2, 3).reshape(B, 2)
        self.lens, self.few, self.indptr = ints(8, 5), ints(3, 2), ints(0, 2, 4)
        self.cu_q, self.cu_k = ints(0, T, 2 * T), ints(0, 8, 13)
        self.lists = ints(*(n % 5 - 1 for n in range(B * T * 2))).reshape(B * T, 1, 2)
        self.mask = put(rng.random((B, 1, T, S)) < 0.7, "bool" if is_torch else "bool_")
        self.sinks = put(np.zeros(H), "float32")
        self.slopes = put(np.arange(H), "float32")

    def appended(self) -> tuple[Any, ...]:
        """What is ahead of the cache, and behind it, where each request gets a token."""
        index = self.table.flatten()
        front = self.new[:, 0] * 2, self.new[:, 0], index[:2], self.few
        return front, (index, self.indptr, self.few)


def rows(q: Any) -> Any:
    return q.reshape(-1, H, D)


Call = Callable[[Any, Arrays, Any], Any]
DOT_PRODUCT: dict[str, Call] = {
    "dense": lambda f, x, q: f.dot_product_attention(
        q, x.k, x.v, is_causal=True, sinks=x.sinks, return_lse=True
    ),
    "window": lambda f, x, q: f.dot_product_attention(
        q, x.k, x.v, local_window_size=(2, 1), logits_soft_cap=2.0
    ),
    "first": lambda f, x, q: f.dot_product_attention(
        q, x.k, x.v, is_causal=True, causal_alignment="first", return_lse=True
    ),
    "lengths": lambda f, x, q: f.dot_product_attention(
        q, x.k, x.v, key_value_seq_lengths=x.lens, scale=0.3, logits_soft_cap=2.0, return_lse=True
    ),
    "paged": lambda f, x, q: f.dot_product_attention(
        q, *x.pages, block_table=x.table, kv_lens=x.lens, is_causal=True, return_residual=True
    ),
    "ragged": lambda f, x, q: f.dot_product_attention(
        rows(q), *x.flat, cu_seqlens_q=x.cu_q, cu_seqlens_k=x.cu_k, max_seqlen_q=T, is_causal=True
    ),
}


def _merged(f: Any, x: Arrays, q: Any) -> Any:
    parts = [
        f.flash_attn_varlen_func(
            rows(q), *x.flat, x.cu_q, x.cu_k, T, S, causal=causal, return_softmax_lse=True
        )
        for causal in (False, True)
    ]
    (a, s_a), (b, s_b) = parts
    two = f.merge_state(a, s_a.mT, b, s_b.mT, lse_base_on_e=True)
    stack = x.xp.stack
    return *two, *f.merge_states(stack((a, b), 1), stack((s_a.mT, s_b.mT), 1))


def _listed(f: Any, x: Arrays, q: Any) -> Any:
    lists = f.select(
        rows(q), x.k[:, :, 0], lengths=x.lens, topk=3, block=2, first=1, groups=HK, score="relu_sum"
    )
    return f.attend(
        rows(q), x.pages, lists, x.table, x.lens, granularity=2, sinks=x.sinks, return_lse=True
    )


OTHERS: dict[str, Call] = {
    "select": lambda f, x, q: f.select(rows(q), x.k[:, :, 0], topk=4, block=1, last=2),
    "select, attend": _listed,
    "attend": lambda f, x, q: f.attend(
        rows(q), x.flat, x.lists, kv_indptr=x.cu_k, indptr=x.cu_q, granularity=4, window=2
    ),
    "flash_attn_func": lambda f, x, q: f.flash_attn_func(
        q, x.k, x.v, softmax_scale=0.2, causal=True, window_size=(None, 0), return_softmax_lse=True
    ),
    "flash_attn_varlen_func": lambda f, x, q: f.flash_attn_varlen_func(
        rows(q), *x.flat, x.cu_q, x.cu_k, T, S, causal=True, s_aux=x.sinks
    ),
    "flash_attn_with_kvcache": lambda f, x, q: f.flash_attn_with_kvcache(
        q, *x.pages, cache_seqlens=x.lens, page_table=x.table, causal=True, window_size=(4, 0)
    ),
    "single_prefill": lambda f, x, q: f.single_prefill_with_kv_cache(
        q[0], x.k[0], x.v[0], causal=True, window_left=3, return_lse=True, backend="fa2"
    ),
    "single_decode": lambda f, x, q: f.single_decode_with_kv_cache(
        q[0, 0], x.k[0], x.v[0], logits_soft_cap=2.0
    ),
    "single_decode, LSE": lambda f, x, q: f.single_decode_with_kv_cache(
        q[0, 0], x.k[0], x.v[0], return_lse=True
    ),
    "trtllm decode": lambda f, x, q: f.trtllm_batch_decode_with_kv_cache(
        q[:, 0], x.pages, None, x.table, x.lens, S, 0.125, 1.0, kv_layout="NHD"
    ),
    "trtllm drafts": lambda f, x, q: f.trtllm_batch_decode_with_kv_cache(
        rows(q), x.pair, None, x.table, x.lens, S, 0.125, q_len_per_req=T, sinks=x.sinks,
        kv_layout="NHD", return_lse=True,
    ),
    "trtllm context": lambda f, x, q: f.trtllm_batch_context_with_kv_cache(
        rows(q), x.pages, None, x.table, x.lens, T, S, 0.125, 1.0, B, x.cu_q, x.cu_k,
        kv_layout="NHD", return_lse=True,
    ),
    "latent": lambda f, x, q: f.trtllm_batch_decode_with_kv_cache_mla(
        x.wide + q[:, :, :2, :1], x.latents, None, 128, 512, 64, x.table, x.lens, S,
        bmm1_scale=0.05, return_lse=True,
    ),
    "merges": _merged,
}  # fmt: skip

# Masks, biases and expressions, which torch's operator does not take; and shapes without a batch.
OF_JAX: dict[str, Call] = {
    "both lengths": lambda f, x, q: f.dot_product_attention(
        q, x.k, x.v, key_value_seq_lengths=x.lens, query_seq_lengths=x.few, is_causal=True
    ),
    "mask": lambda f, x, q: f.dot_product_attention(q, x.k, x.v, mask=x.mask, return_lse=True),
    "mask, both lengths": lambda f, x, q: f.dot_product_attention(
        q, x.k, x.v, mask=x.mask, key_value_seq_lengths=x.lens, query_seq_lengths=x.few
    ),
    "bias": lambda f, x, q: f.dot_product_attention(
        q, x.k, x.v, x.bias, is_causal=True, logits_soft_cap=3.0
    ),
    "bias, mask, lengths": lambda f, x, q: f.dot_product_attention(
        q, x.k, x.v, x.bias, x.mask, key_value_seq_lengths=x.lens, return_lse=True
    ),
    "first of one": lambda f, x, q: f.dot_product_attention(
        q[:1], x.k[:1], x.v[:1], local_window_size=(2, 1), causal_alignment="first"
    ),
    "first, lengths": lambda f, x, q: f.dot_product_attention(
        q, x.k, x.v, is_causal=True, causal_alignment="first", key_value_seq_lengths=x.lens,
        query_seq_lengths=x.few,
    ),
    "expression": lambda f, x, q: f.dot_product_attention(
        q, x.k, x.v, logits_transform="logit * factor + slopes[head]", mask_fn="kv_idx != 1",
        logits_params={"factor": 0.5, "slopes": x.slopes},
    ),
    "expression of one request": lambda f, x, q: f.single_prefill_with_kv_cache(
        q[0], x.k[0], x.v[0], logits_transform="logit + slopes[head]", mask_fn="kv_idx != 1",
        logits_params={"slopes": x.slopes}, return_lse=True,
    ),
    "no batch": lambda f, x, q: f.dot_product_attention(q[0], x.k[0], x.v[0], is_causal=True),
    "decode": lambda f, x, q: f.dot_product_attention(
        q[:1, :1], x.k[:1], x.v[:1], return_lse=True
    ),
}  # fmt: skip


def _stored(f: Any, x: Arrays, q: Any) -> Any:
    """New keys into slots, one of them skipped."""
    caches = [pages.clone() for pages in x.pages]
    new = q[:, 0, :HK]
    reshape_and_cache(new, new * 2, *caches, x.few - 3)
    return q, *caches


def _appended(f: Any, x: Arrays, q: Any) -> Any:
    """Decoding with new keys, which are written first; the caches are part of the answer."""
    caches = [pages.clone() for pages in x.pages]
    out = f.flash_attn_with_kvcache(
        q[:, :1], *caches, x.new, x.new * 2, cache_seqlens=x.few, page_table=x.table, causal=True
    )
    return out, *caches


def _append_pages(f: Any, x: Arrays, q: Any) -> Any:
    front, behind = x.appended()
    pool = x.pair.clone()
    f.append_paged_kv_cache(*front, pool, *behind)
    return pool, q


def _into(f: Any, x: Arrays, q: Any) -> Any:
    """The answer in an array of the function's."""
    out = q * 0
    made, lse = f.dot_product_attention(q, x.k, x.v, out=out, return_lse=True)
    return made + 1, lse, out


# Calls that write their arguments, and FlashAttention-3's order of arguments.
OF_TORCH: dict[str, Call] = {
    "return_attn_probs": lambda f, x, q: f.flash_attn_func(q, x.k, x.v, return_attn_probs=True),
    "FA3's order": lambda f, x, q: flash_attn_interface.flash_attn_func(
        q, x.k, x.v, 0.2, True, window_size=(2, 0), return_attn_probs=True
    ),
    "varlen pages": lambda f, x, q: f.flash_attn_varlen_func(
        rows(q), *x.pages, x.cu_q, None, T, x.xp.tensor(S), seqused_k=x.lens,
        page_table=x.table, causal=True, return_softmax_lse=True, deterministic=True,
    ),
    "reshape_and_cache": _stored,
    "append": _appended,
    "append_paged_kv_cache": _append_pages,
    "out": _into,
}  # fmt: skip
JAX = DOT_PRODUCT | OTHERS | OF_JAX
TORCH = DOT_PRODUCT | OTHERS | OF_TORCH


def wrapper(x: Arrays, kind: str) -> Any:
    """The run of a planned wrapper, as one of torch's calls."""
    torch, counts = x.xp, x.xp.tensor([0, 2, 4], dtype=x.xp.int32)
    workspace = torch.zeros(32 << 20, dtype=torch.uint8, device=x.device)
    dtype = {"q_data_type": x.q.dtype, "kv_data_type": x.q.dtype}
    of_rows = torch.tensor([0, T, 2 * T], dtype=torch.int32)
    last = torch.tensor([4, 1], dtype=torch.int32)
    if kind == "decode":
        made = cupyattn.BatchDecodeWithPagedKVCacheWrapper(workspace)
        made.plan(counts, x.table.flatten(), last, H, HK, D, PAGE, **dtype)
        return lambda q: made.run(q[:, 0], x.pair, return_lse=True)
    if kind == "prefill":
        paged = cupyattn.BatchPrefillWithPagedKVCacheWrapper(workspace)
        paged.plan(of_rows, counts, x.table.flatten(), last, H, HK, D, PAGE, causal=True, **dtype)
        return lambda q: paged.run(rows(q), x.pages, k_scale=0.5)
    ragged = cupyattn.BatchPrefillWithRaggedKVCacheWrapper(workspace)
    ragged.plan(of_rows, torch.tensor([0, 8, 13]), H, HK, D, causal=True, **dtype)

    def run(q: Any) -> Any:
        out = rows(q) * 0
        return ragged.run(rows(q), *x.flat, out=out) + out

    return run


# --- checks of JAX: a compiled call gives what the eager one gives ---


def _same(jax: Any, got: Any, wanted: Any) -> None:
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
        assert a.dtype == b.dtype and a.shape == b.shape
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))


def check_jit(jax: Any, name: str, x: Arrays) -> None:
    """With XLA's work around the call."""
    import cupyattn.integrations.jax as door

    inside = jax.jit(lambda q: JAX[name](door, x, q * 2))
    for q in (x.q, x.q * 0.5):
        _same(jax, inside(q), JAX[name](EAGER, x, q * 2))


def check_append(jax: Any, x: Arrays, is_pair: bool, *, donates: bool) -> None:
    """An append in a compiled function, to a cache that is donated or kept."""
    import cupyattn.integrations.jax as door

    def make() -> Any:
        pages = [jax.numpy.array(y, copy=True) for y in x.pages]
        return tuple(pages) if is_pair else jax.numpy.stack(pages, axis=1)

    front, behind = x.appended()
    wanted = append_paged_kv_cache(*front, make(), *behind)

    def append(cache: Any) -> Any:
        return door.append_paged_kv_cache(*front, cache, *behind)

    compiled = jax.jit(append, donate_argnums=(0,) if donates else ())
    cache = make()
    first = jax.tree.leaves(cache)[0]
    got = compiled(cache)
    assert isinstance(got, tuple) == is_pair
    _same(jax, got, wanted)
    assert first.is_deleted() == donates
    if not donates:
        _same(jax, cache, make())
