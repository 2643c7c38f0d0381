"""Calls inside jax.jit beside eager ones: on the CPU, or on a GPU."""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import numpy as np

B, T, S, H, HK, D, PAGE = 2, 3, 8, 4, 2, 64, 4


class Arrays:
    """q [B, T, H, D], k and v [B, S, HK, D], pages of the same, and what says where they are."""

    def __init__(self, jax: Any, dtype: str) -> None:
        rng, jnp = np.random.default_rng(0), jax.numpy
        shapes = (B, T, H, D), (B, S, HK, D), (B, S, HK, D), (B, HK, D)
        self.q, self.k, self.v, self.new = (
            jnp.asarray(rng.standard_normal(shape), dtype) for shape in shapes
        )
        self.pages = tuple(x.reshape(-1, PAGE, HK, D) for x in (self.k, self.v))
        self.pair = jnp.stack(self.pages, axis=1)
        self.table = jnp.arange(4, dtype="int32").reshape(B, 2)
        self.lens, self.cu_q = jnp.asarray([8, 5], "int32"), jnp.asarray([0, T, 2 * T], "int32")
        self.cu_k, self.few = jnp.asarray([0, 8, 13], "int32"), jnp.asarray([3, 2], "int32")
        self.indptr = jnp.asarray([0, 2, 4], "int32")
        self.mask = jnp.asarray(rng.random((B, 1, T, S)) < 0.7)
        self.sinks = jnp.zeros(H, "float32")
        self.bias = jnp.asarray(rng.standard_normal((1, H, T, S)), dtype)
        self.slopes = jnp.arange(H, dtype="float32")
        self.latents = jnp.asarray(rng.standard_normal((4, PAGE, 576)), dtype)
        self.wide = jnp.asarray(rng.standard_normal((B, T, 2, 576)), dtype)


# Each calls a door's function, eager or inside jit, with q.
CALLS: dict[str, Callable[[Any, Arrays, Any], Any]] = {
    "dense": lambda f, x, q: f(q, x.k, x.v, is_causal=True, sinks=x.sinks, return_lse=True),
    "window": lambda f, x, q: f(q, x.k, x.v, local_window_size=(2, 1), logits_soft_cap=2.0),
    "lengths": lambda f, x, q: f(q, x.k, x.v, key_value_seq_lengths=x.lens, scale=0.3),
    "both lengths": lambda f, x, q: f(
        q, x.k, x.v, key_value_seq_lengths=x.lens, query_seq_lengths=x.few, is_causal=True
    ),
    "paged": lambda f, x, q: f(
        q, *x.pages, block_table=x.table, kv_lens=x.lens, is_causal=True, return_residual=True
    ),
    "ragged": lambda f, x, q: f(
        q.reshape(-1, H, D), x.k.reshape(-1, HK, D), x.v.reshape(-1, HK, D),
        cu_seqlens_q=x.cu_q, cu_seqlens_k=x.cu_k, max_seqlen_q=T, is_causal=True,
    ),
    "mask": lambda f, x, q: f(q, x.k, x.v, mask=x.mask, return_lse=True),
    "mask, both lengths": lambda f, x, q: f(
        q, x.k, x.v, mask=x.mask, key_value_seq_lengths=x.lens, query_seq_lengths=x.few
    ),
    "bias": lambda f, x, q: f(q, x.k, x.v, x.bias, is_causal=True, logits_soft_cap=3.0),
    "bias, mask, lengths": lambda f, x, q: f(
        q, x.k, x.v, x.bias, x.mask, key_value_seq_lengths=x.lens, return_lse=True
    ),
    "first": lambda f, x, q: f(q, x.k, x.v, is_causal=True, causal_alignment="first"),
    "first of one": lambda f, x, q: f(
        q[:1], x.k[:1], x.v[:1], local_window_size=(2, 1), causal_alignment="first"
    ),
    "first, lengths": lambda f, x, q: f(
        q, x.k, x.v, is_causal=True, causal_alignment="first", key_value_seq_lengths=x.lens,
        query_seq_lengths=x.few,
    ),
    "expression": lambda f, x, q: f(
        q, x.k, x.v, logits_transform="logit * factor + slopes[head]", mask_fn="kv_idx != 1",
        logits_params={"factor": 0.5, "slopes": x.slopes},
    ),
    "no batch": lambda f, x, q: f(q[0], x.k[0], x.v[0], is_causal=True),
    "decode": lambda f, x, q: f(q[:1, :1], x.k[:1], x.v[:1], return_lse=True),
}  # fmt: skip


def _latent(calls: Any, x: Arrays, q: Any) -> Any:
    wide = x.wide + q[:, :, :2, :1]
    return calls.trtllm_batch_decode_with_kv_cache_mla(
        wide, x.latents, None, 128, 512, 64, x.table, x.lens, S, bmm1_scale=0.05, return_lse=True
    )


def _merged(calls: Any, x: Arrays, q: Any) -> Any:
    import jax

    v_a, v_b = q[0], x.q[1]
    s_a, s_b = (y[..., 0].astype("float32") for y in (v_a, v_b))
    stacked = jax.numpy.stack
    many = calls.merge_states(stacked((v_a, v_b), 1), stacked((s_a, s_b), 1))
    return calls.merge_state(v_a, s_a, v_b, s_b, lse_base_on_e=True), many


def _rows(x: Arrays, q: Any) -> tuple[Any, ...]:
    return q.reshape(-1, H, D), x.k.reshape(-1, HK, D), x.v.reshape(-1, HK, D)


# Other functions of the door, by functions of the same names.
OTHERS: dict[str, Callable[[Any, Arrays, Any], Any]] = {
    "latent": _latent,
    "merge": _merged,
    "single_decode": lambda f, x, q: (
        f.single_decode_with_kv_cache(q[0, 0], x.k[0], x.v[0], logits_soft_cap=2.0),
        f.single_decode_with_kv_cache(q[0, 0], x.k[0], x.v[0], return_lse=True),
    ),
    "single_prefill": lambda f, x, q: f.single_prefill_with_kv_cache(
        q[0], x.k[0], x.v[0], causal=True, window_left=3, backend="fa2", return_lse=True
    ),
    "trtllm decode": lambda f, x, q: (
        f.trtllm_batch_decode_with_kv_cache(
            q[:, 0], x.pages, None, x.table, x.lens, S, 0.125, 1.0, kv_layout="NHD"
        ),
        f.trtllm_batch_decode_with_kv_cache(
            q.reshape(-1, H, D), x.pair, None, x.table, x.lens, S, 0.125, q_len_per_req=T,
            sinks=x.sinks, kv_layout="NHD", return_lse=True,
        ),
    ),
    "trtllm context": lambda f, x, q: f.trtllm_batch_context_with_kv_cache(
        q.reshape(-1, H, D), x.pages, None, x.table, x.lens, T, S, 0.125, 1.0, B, x.cu_q, x.cu_k,
        kv_layout="NHD",
    ),
    "flash_attn": lambda f, x, q: (
        f.flash_attn_func(q, x.k, x.v, causal=True, return_softmax_lse=True),
        f.flash_attn_varlen_func(
            *_rows(x, q), x.cu_q, x.cu_k, T, S, causal=True, s_aux=x.sinks
        ),
        f.flash_attn_with_kvcache(
            q, *x.pages, cache_seqlens=x.lens, page_table=x.table, window_size=(4, 0)
        ),
    ),
}  # fmt: skip


def check_other(jax: Any, name: str, x: Arrays) -> None:
    """The same as `check`."""
    import cupyattn
    import cupyattn.integrations.jax as door
    from cupyattn import flash_attn, mla

    eager = types.SimpleNamespace(
        **{
            f.__name__: f
            for f in (
                *(
                    cupyattn.merge_state,
                    cupyattn.merge_states,
                    mla.trtllm_batch_decode_with_kv_cache_mla,
                ),
                *(cupyattn.single_decode_with_kv_cache, cupyattn.single_prefill_with_kv_cache),
                cupyattn.trtllm_batch_decode_with_kv_cache,
                cupyattn.trtllm_batch_context_with_kv_cache,
                *(flash_attn.flash_attn_func, flash_attn.flash_attn_varlen_func),
                flash_attn.flash_attn_with_kvcache,
            )
        }
    )
    got = jax.jit(lambda q: OTHERS[name](door, x, q * 2))(x.q)
    want = OTHERS[name](eager, x, x.q * 2)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert a.dtype == b.dtype and a.shape == b.shape
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))


def pages_to_append(x: Arrays) -> tuple[Any, ...]:
    """(what is ahead of the cache, what is behind it) of an append of a token a request."""
    index = x.table.flatten()
    return (x.new, x.new * 2, index[:2], x.few), (index, x.indptr, x.few)


def check(jax: Any, name: str, x: Arrays) -> None:
    """A compiled call, with XLA's work around it, gives what the eager call gives."""
    import cupyattn
    import cupyattn.integrations.jax as door

    inside = jax.jit(lambda q: CALLS[name](door.dot_product_attention, x, q * 2))
    for scale in (1, 0.5):
        q = x.q * scale
        want = CALLS[name](cupyattn.dot_product_attention, x, q * 2)
        for got, expected in zip(jax.tree.leaves(inside(q)), jax.tree.leaves(want), strict=True):
            assert got.dtype == expected.dtype and got.shape == expected.shape
            np.testing.assert_array_equal(np.asarray(got), np.asarray(expected))


def check_append(jax: Any, x: Arrays, is_pair: bool, *, donates: bool) -> None:
    """An append in a compiled function, to a cache that is donated or kept."""
    import cupyattn
    import cupyattn.integrations.jax as door

    def make() -> Any:
        pages = [jax.numpy.array(y, copy=True) for y in x.pages]
        return tuple(pages) if is_pair else jax.numpy.stack(pages, axis=1)

    front, behind = pages_to_append(x)
    want = cupyattn.append_paged_kv_cache(*front, make(), *behind)

    def append(cache: Any) -> Any:
        return door.append_paged_kv_cache(*front, cache, *behind)

    compiled = jax.jit(append, donate_argnums=(0,) if donates else ())
    cache = make()
    first = jax.tree.leaves(cache)[0]
    got = compiled(cache)
    assert isinstance(got, tuple) == is_pair
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))
    assert first.is_deleted() == donates
    if not donates:
        for a, b in zip(jax.tree.leaves(cache), jax.tree.leaves(make()), strict=True):
            np.testing.assert_array_equal(np.asarray(a), np.asarray(b))
