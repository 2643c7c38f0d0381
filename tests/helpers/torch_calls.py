"""Calls that torch.ops.cupyattn has, with tensors: on the CPU, or on a GPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import cupyattn
from cupyattn import flash_attn, flash_attn_interface, mla
from cupyattn.slots import reshape_and_cache

B, T, S, H, HK, D, PAGE = 2, 3, 8, 4, 2, 64, 4


class Tensors:
    """q [B, T, H, D], k and v [B, S, HK, D], pages of the same, and what says where they are."""

    def __init__(self, torch: Any, device: str, dtype: str) -> None:
        generator = torch.Generator().manual_seed(0)

        def random(*shape: int) -> Any:
            x = torch.randn(shape, generator=generator)
            return x.to(device, getattr(torch, dtype))

        def ints(*values: int) -> Any:
            return torch.tensor(values, dtype=torch.int32, device=device)

        self.torch, self.device = torch, device
        self.q, self.k, self.v = random(B, T, H, D), random(B, S, HK, D), random(B, S, HK, D)
        self.pages = self.k.reshape(-1, PAGE, HK, D), self.v.reshape(-1, PAGE, HK, D)
        self.pair = self.torch.stack(self.pages, dim=1)
        self.latents = random(4, PAGE, 576)
        self.table = ints(0, 1, 2, 3).reshape(B, 2)
        self.lens, self.cu_q, self.cu_k = ints(8, 5), ints(0, T, 2 * T), ints(0, 8, 13)
        self.rows = self.q.reshape(-1, H, D)
        self.flat = self.k.reshape(-1, HK, D), self.v.reshape(-1, HK, D)
        self.indptr = ints(0, 2, 4)
        self.new = random(B, 1, HK, D)
        self.few = ints(3, 2)
        self.sinks = torch.zeros(H, device=device)


Function = Callable[[Any], Any]
# Each takes q, which the compiled function has just made, and whatever else of the tensors.
CALLS: dict[str, Callable[[Tensors, Any], Any]] = {
    "dense": lambda x, q: cupyattn.dot_product_attention(
        q, x.k, x.v, is_causal=True, local_window_size=(4, 0), sinks=x.sinks
    ),
    "first": lambda x, q: cupyattn.dot_product_attention(
        q, x.k, x.v, is_causal=True, causal_alignment="first", return_lse=True
    ),
    "lengths": lambda x, q: cupyattn.dot_product_attention(
        q, x.k, x.v, key_value_seq_lengths=x.lens, logits_soft_cap=2.0, return_lse=True
    ),
    "paged": lambda x, q: cupyattn.dot_product_attention(
        q, *x.pages, block_table=x.table, kv_lens=x.lens, is_causal=True, return_residual=True
    ),
    "ragged": lambda x, q: cupyattn.dot_product_attention(
        q.reshape(-1, H, D), *x.flat, cu_seqlens_q=x.cu_q, cu_seqlens_k=x.cu_k, max_seqlen_q=T
    ),
    "flash_attn_func": lambda x, q: flash_attn.flash_attn_func(
        q, x.k, x.v, softmax_scale=0.2, causal=True, window_size=(None, 0), return_attn_probs=True
    ),
    "FA3's order": lambda x, q: flash_attn_interface.flash_attn_func(
        q, x.k, x.v, 0.2, True, window_size=(2, 0), return_attn_probs=True
    ),
    "flash_attn_varlen_func": lambda x, q: flash_attn.flash_attn_varlen_func(
        q.reshape(-1, H, D), *x.flat, x.cu_q, x.cu_k, T, S, causal=True, s_aux=x.sinks
    ),
    "varlen pages": lambda x, q: flash_attn.flash_attn_varlen_func(
        q.reshape(-1, H, D), *x.pages, x.cu_q, None, T, x.torch.tensor(S), seqused_k=x.lens,
        page_table=x.table, causal=True, return_softmax_lse=True, deterministic=True,
    ),
    "flash_attn_with_kvcache": lambda x, q: flash_attn.flash_attn_with_kvcache(
        q, *x.pages, cache_seqlens=x.lens, page_table=x.table, causal=True
    ),
    "single_prefill": lambda x, q: cupyattn.single_prefill_with_kv_cache(
        q[0], x.k[0], x.v[0], causal=True, return_lse=True, backend="fa2"
    ),
    "single_decode": lambda x, q: cupyattn.single_decode_with_kv_cache(q[0, 0], x.k[0], x.v[0]),
    "trtllm_decode": lambda x, q: cupyattn.trtllm_batch_decode_with_kv_cache(
        q[:, 0], x.pair, None, x.table, x.lens, S, 0.125, kv_layout="NHD"
    ),
    "trtllm_context": lambda x, q: cupyattn.trtllm_batch_context_with_kv_cache(
        q.reshape(-1, H, D), x.pages, None, x.table, x.lens, T, S, 0.125, 1.0, B, x.cu_q, x.cu_k,
        kv_layout="NHD", return_lse=True,
    ),
}  # fmt: skip


def latent(x: Tensors, q: Any) -> Any:
    """Latent attention, queries and keys of 576 columns, the LSE too."""
    wide = q.reshape(B, T, -1).repeat(1, 1, 5)[..., : 2 * 576].reshape(B, T, 2, 576)
    return mla.trtllm_batch_decode_with_kv_cache_mla(
        wide, x.latents, None, 128, 512, 64, x.table, x.lens, S, bmm1_scale=0.05, return_lse=True
    )


def merged(x: Tensors, q: Any) -> Any:
    rows = q.reshape(-1, H, D)
    parts = [
        flash_attn.flash_attn_varlen_func(
            rows, *x.flat, x.cu_q, x.cu_k, T, S, causal=causal, return_softmax_lse=True
        )
        for causal in (False, True)
    ]
    (a, s_a), (b, s_b) = parts
    two = cupyattn.merge_state(a, s_a.mT, b, s_b.mT, lse_base_on_e=True)
    return *two, *cupyattn.merge_states(
        x.torch.stack((a, b), 1), x.torch.stack((s_a.mT, s_b.mT), 1)
    )


def stored(x: Tensors, q: Any) -> Any:
    """New keys into slots, one of them skipped."""
    caches = [pages.clone() for pages in x.pages]
    new = q[:, 0, :HK]
    reshape_and_cache(new, new * 2, *caches, x.few - 3)
    return q, *caches


def appended(x: Tensors, q: Any) -> Any:
    """Decoding with new keys, which are written first; the caches are part of the answer."""
    caches = [pages.clone() for pages in x.pages]
    out = flash_attn.flash_attn_with_kvcache(
        q[:, :1], *caches, x.new, x.new * 2, cache_seqlens=x.few, page_table=x.table, causal=True
    )
    return out, *caches


def append_pages(x: Tensors, q: Any) -> Any:
    ints = x.table.flatten()
    pool = x.pair.clone()
    cupyattn.append_paged_kv_cache(
        x.new[:, 0] * 2, x.new[:, 0], ints[:2], x.few, pool, ints, x.indptr, x.few
    )  # fmt: skip
    return pool, q


def into(x: Tensors, q: Any) -> Any:
    """The answer in an array of the function's."""
    out = q * 0
    made, lse = cupyattn.dot_product_attention(q, x.k, x.v, out=out, return_lse=True)
    return made + 1, lse, out


CALLS |= {"latent": latent, "merges": merged, "reshape_and_cache": stored}
CALLS |= {"append": appended, "append_paged_kv_cache": append_pages, "out": into}


def wrapper(x: Tensors, kind: str) -> Any:
    """A planned wrapper, and its run as one of CALLS."""
    torch, counts = x.torch, x.torch.tensor([0, 2, 4], dtype=x.torch.int32)
    workspace = torch.zeros(32 << 20, dtype=torch.uint8, device=x.device)
    dtype = {"q_data_type": x.q.dtype, "kv_data_type": x.q.dtype}
    rows = torch.tensor([0, T, 2 * T], dtype=torch.int32)
    last = torch.tensor([4, 1], dtype=torch.int32)
    if kind == "decode":
        made = cupyattn.BatchDecodeWithPagedKVCacheWrapper(workspace)
        made.plan(counts, x.table.flatten(), last, H, HK, D, PAGE, **dtype)
        return lambda _, q: made.run(q[:, 0], x.pair, return_lse=True)
    if kind == "prefill":
        paged = cupyattn.BatchPrefillWithPagedKVCacheWrapper(workspace)
        paged.plan(rows, counts, x.table.flatten(), last, H, HK, D, PAGE, causal=True, **dtype)
        return lambda _, q: paged.run(q.reshape(-1, H, D), x.pages, k_scale=0.5)
    ragged = cupyattn.BatchPrefillWithRaggedKVCacheWrapper(workspace)
    ragged.plan(rows, torch.tensor([0, 8, 13]), H, HK, D, causal=True, **dtype)

    def run(_: Tensors, q: Any) -> Any:
        out = q.reshape(-1, H, D) * 0
        return ragged.run(q.reshape(-1, H, D), *x.flat, out=out) + out

    return run
