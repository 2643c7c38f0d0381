"""Latent pools: what writes leave in them, graphs, chunks of a prefix, SGLang's names, errors."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from helpers import serving_engine as engine
from helpers.serving_cases import LatentCase

from cupyattn.errors import ArgumentError, UnsupportedError
from cupyattn.flash_attn import merge_state_v2
from cupyattn.serving import (
    AttentionBackend,
    BackendConfig,
    BatchInfo,
    ForwardMode,
    LayerSpec,
    MHATokenToKVPool,
    MLATokenToKVPool,
)

LATENT, ROPE, HEADS = 256, 64, 3
NOPE, VALUE = 32, 16  # columns of unabsorbed heads: keys have NOPE + ROPE of them
LAYER = LayerSpec(softmax_scale=0.05)


def pool_of(is_split: bool = False, dtype: str = "float32", slots: int = 96) -> MLATokenToKVPool:
    pool = MLATokenToKVPool(
        slots, LATENT, ROPE, 2, np.zeros(1, np.float32), dtype=dtype, is_split=is_split
    )
    for layer in range(2):
        for part in pool.get_latent_buffers(layer):
            if part is not None:
                part[...] = np.nan
    return pool


def rows_of(pool: MLATokenToKVPool, layer: int) -> np.ndarray:
    k, rope = pool.get_latent_buffers(layer)
    return np.asarray(k if rope is None else np.concatenate([k, rope], -1), np.float32)


@pytest.mark.parametrize("kind", ["decode", "draft beams", "verify chain", "verify tree"])
def test_replays_are_eager_steps(kind: str) -> None:
    for seed in range(6):
        case = LatentCase(seed, kind=kind)
        if not case.bs:
            continue
        case.pad(seed % 3)
        backend, meta = case.capture()
        backend.init_forward_metadata_replay(case.bs, case.batch_of_one_key())
        batch = case.batch()
        backend.init_forward_metadata_replay(case.bs, batch)
        q, layer = case.queries(), case.layer()
        out, lse = backend.forward(q, layer, meta, return_lse=True, lse_layout="th")
        case.check(q, out, lse)
        eager = case.backend()
        eager.init_forward_metadata(batch)
        assert eager.forward(q, layer).tobytes() == out.tobytes()


@pytest.mark.parametrize("is_split", [False, True])
@pytest.mark.parametrize("axes", [2, 3])
def test_rows_are_written_in_both_forms(is_split: bool, axes: int) -> None:
    rng = np.random.default_rng(axes)
    rows = rng.standard_normal((4, LATENT + ROPE)).astype(np.float32)
    given = rows if axes == 2 else rows[:, None]
    loc, layer = np.array([7, -1, 0, 95]), LayerSpec(1, softmax_scale=1.0)
    together, apart = pool_of(is_split), pool_of(is_split)
    together.set_kv_buffer(layer, loc, given, given)
    apart.set_mla_kv_buffer(layer, loc, given[..., :LATENT], given[..., LATENT:])
    for pool in (together, apart):
        found = rows_of(pool, 1)[:, 0]
        np.testing.assert_array_equal(found[loc[loc >= 0]], rows[loc >= 0])
        assert np.isnan(np.delete(found, loc[loc >= 0], axis=0)).all()
        assert np.isnan(rows_of(pool, 0)).all()


@pytest.mark.parametrize("scale", [None, 0.25])
def test_fp8_rows_are_divided_by_the_scale_that_attention_multiplies_by(scale: Any) -> None:
    rng = np.random.default_rng(3)
    pool, n = pool_of(dtype="float8_e4m3fn"), 9
    layer = LayerSpec(0, softmax_scale=0.05, k_scale=scale)
    rows = rng.standard_normal((n, 1, LATENT + ROPE)).astype(np.float16)
    table = np.arange(2 * 16, dtype=np.int32).reshape(2, 16)
    config = BackendConfig(HEADS, 1, LATENT + ROPE, LATENT, max_context_len=16, use_mla=True)
    backend = AttentionBackend(config, pool, table)
    backend.write_kv(layer, table[1, :n], rows[..., :LATENT], k_rope=rows[..., LATENT:])
    backend.init_forward_metadata(BatchInfo(ForwardMode.DECODE, np.array([1]), np.array([n])))
    q = rng.standard_normal((1, HEADS, LATENT + ROPE)).astype(np.float16)
    out = backend.forward(q, layer)
    factor = np.float32(scale or 1.0)
    stored = (rows.astype(np.float32) / factor).astype(ml_dtypes.float8_e4m3fn)
    keys = stored.astype(np.float64)[:, 0] * factor
    weights = np.exp(0.05 * q[0].astype(np.float64) @ keys.T)
    wanted = weights @ keys[:, :LATENT] / weights.sum(-1, keepdims=True)
    np.testing.assert_allclose(out[0].astype(np.float64), wanted, rtol=4e-3, atol=4e-3)


class Model:
    """One layer of an MLA model: keys and values of all heads follow from a latent row."""

    def __init__(self, seed: int) -> None:
        self.rng = rng = np.random.default_rng(seed)
        self.w_k = rng.standard_normal((HEADS, NOPE, LATENT)) / LATENT**0.5
        self.w_v = rng.standard_normal((HEADS, VALUE, LATENT)) / LATENT**0.5
        self.scale = (NOPE + ROPE) ** -0.5

    def queries(self, rows: int) -> np.ndarray:
        return self.rng.standard_normal((rows, HEADS, NOPE + ROPE)).astype(np.float32)

    def latents(self, rows: int) -> np.ndarray:
        return self.rng.standard_normal((rows, 1, LATENT + ROPE)).astype(np.float32)

    def absorbed(self, q: np.ndarray) -> np.ndarray:
        nope = np.einsum("rhn,hnl->rhl", q[..., :NOPE], self.w_k)
        return np.concatenate([nope, q[..., NOPE:]], -1).astype(np.float32)

    def unabsorbed(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Keys and values of all heads."""
        latent, rope = rows[:, 0, :LATENT], rows[:, :, LATENT:]
        k = np.concatenate([np.einsum("rl,hnl->rhn", latent, self.w_k), rope.repeat(HEADS, 1)], -1)
        return k.astype(np.float32), np.einsum("rl,hvl->rhv", latent, self.w_v).astype(np.float32)

    def values_of(self, out: np.ndarray) -> np.ndarray:
        """The answer of absorbed attention in columns of values."""
        return np.einsum("rhl,hvl->rhv", out, self.w_v)


def test_chunks_of_a_prefix_merge_to_the_whole() -> None:
    """Unabsorbed new tokens over themselves, and over chunks of the prefix, are what absorbed
    queries over the pool give; in SGLang's names."""
    model, prefix, new, chunk = Model(5), np.array([5, 3, 0]), np.array([2, 4, 3]), 2
    lens = prefix + new
    pool = pool_of(slots=640 + 256)
    table = engine.slots(1)
    backend = engine.backend(arch="MLA", token_to_kv_pool=pool)
    rows = [model.latents(int(n)) for n in lens]
    slots = [table[r, :n] for r, n in zip([2, 0, 5], lens, strict=True)]
    pool.set_kv_buffer(
        SimpleNamespace(layer_id=0), np.concatenate(slots), np.concatenate(rows), None
    )
    batch = engine.batch(
        "EXTEND", lens, [2, 0, 5], extend=new, token_to_kv_pool=pool, attn_attend_prefix_cache=None
    )
    backend.init_forward_metadata(batch)
    q = model.queries(int(new.sum()))
    absorbed = engine.layer(0, HEADS, 1, LATENT + ROPE, v_head_dim=LATENT, scaling=model.scale)
    whole = backend.forward_extend(model.absorbed(q), None, None, absorbed, batch)
    wanted = model.values_of(whole.reshape(-1, HEADS, LATENT))

    heads = engine.layer(1, HEADS, HEADS, NOPE + ROPE, v_head_dim=VALUE, scaling=model.scale)
    own = np.concatenate([r[p:] for r, p in zip(rows, prefix, strict=True)])
    batch.attn_attend_prefix_cache, batch.mha_return_lse = False, True
    out, lse = backend.forward_extend(q, *model.unabsorbed(own), heads, batch, save_kv_cache=False)
    assert out.shape == (len(q), HEADS, VALUE) and lse.shape == (len(q), HEADS)
    counts = [np.clip(prefix - chunk * i, 0, chunk) for i in range(3)]
    batch.attn_attend_prefix_cache = True
    batch.prefix_chunk_cu_seq_lens = [
        np.concatenate([[0], np.cumsum(n)]).astype(np.int32) for n in counts
    ]
    batch.prefix_chunk_max_seq_lens = [int(n.max()) for n in counts]
    for index, count in enumerate(counts):
        batch.prefix_chunk_idx = index
        part = np.concatenate(
            [r[chunk * index : chunk * index + n] for r, n in zip(rows, count, strict=True)]
        )
        other, other_lse = backend.forward_extend(
            q, *model.unabsorbed(part), heads, batch, save_kv_cache=False
        )
        out, lse = merge_state_v2(out, np.ascontiguousarray(lse), other, other_lse.copy())
    np.testing.assert_allclose(out, wanted, rtol=1e-4, atol=1e-5)


def test_sinks_count_once_over_chunks_of_a_prefix() -> None:
    model, n = Model(6), 4
    backend = AttentionBackend(BackendConfig(1, 1, 1, max_context_len=64), None, engine.slots(1))
    sinks = np.array([0.5, -1.0, 2.0], np.float32)
    layer = LayerSpec(softmax_scale=model.scale, sinks=sinks)
    q, (k, v) = model.queries(n), model.unabsorbed(model.latents(2 * n))
    cu = np.array([0, n], np.int32)
    new = backend.forward_ragged(
        q, k[n:], v[n:], layer, cu, max_seqlen_q=n, return_lse=True, lse_layout="th"
    )
    old = backend.forward_ragged(
        q, k[:n], v[:n], layer, cu, cu, n, n, causal=False, return_lse=True, lse_layout="th"
    )
    out, lse = merge_state_v2(new[0], new[1].copy(), old[0], old[1].copy())
    whole, whole_lse = backend.forward_ragged(
        q, k, v, layer, cu, np.array([0, 2 * n], np.int32), n, 2 * n,
        return_lse=True, lse_layout="th",
    )  # fmt: skip
    np.testing.assert_allclose(out, whole, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(lse, whole_lse, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("with_rope", [False, True])
def test_an_mla_model_decodes_under_sglang_names(with_rope: bool) -> None:
    """Flat queries, in one array or two, and keys written on the way."""
    model, lens = Model(7), [3, 5]
    pool, table = pool_of(slots=640), engine.slots(1)
    backend = engine.backend(arch="MLA", token_to_kv_pool=pool)
    rows = [model.latents(n) for n in lens]
    for r, own in zip([2, 0], rows, strict=True):
        pool.set_kv_buffer(SimpleNamespace(layer_id=0), table[r, : len(own) - 1], own[:-1], None)
    last = np.concatenate([own[-1:] for own in rows])
    loc = np.array([table[2, 2], table[0, 4]])
    batch = engine.batch("DECODE", lens, [2, 0], token_to_kv_pool=pool, out_cache_loc=loc)
    backend.init_forward_metadata(batch)
    layer = engine.layer(0, HEADS, 1, LATENT + ROPE, v_head_dim=LATENT, scaling=model.scale)
    q = model.absorbed(model.queries(2))
    flat, rope = q.reshape(2, -1), None
    if with_rope:
        flat, rope = q[..., :LATENT].reshape(2, -1), q[..., LATENT:].reshape(2, -1)
    k, k_rope = last[..., :LATENT], last[..., LATENT:]
    out = backend.forward_decode(flat, k, k, layer, batch, q_rope=rope, k_rope=k_rope)
    assert out.shape == (2, HEADS * LATENT)
    for index, own in enumerate(rows):
        keys = own[:, 0].astype(np.float64)
        weights = np.exp(model.scale * q[index] @ keys.T)
        wanted = weights @ keys[:, :LATENT] / weights.sum(-1, keepdims=True)
        np.testing.assert_allclose(out[index].reshape(HEADS, -1), wanted, rtol=1e-4, atol=1e-5)


def backend_of(**changes: Any) -> AttentionBackend:
    named = {"max_context_len": 16, "use_mla": True, **changes}
    config = BackendConfig(HEADS, 1, LATENT + ROPE, LATENT, **named)
    backend = AttentionBackend(config, pool_of(), np.arange(32, dtype=np.int32).reshape(2, 16))
    backend.init_forward_metadata(BatchInfo(ForwardMode.DECODE, np.array([0]), np.array([1])))
    return backend


Q = np.ones((1, HEADS, LATENT + ROPE), np.float32)


@pytest.mark.parametrize(
    "call, error, message",
    [
        (lambda: backend_of().forward(Q, LayerSpec()), ArgumentError, "softmax_scale: got None"),
        (lambda: backend_of().forward(Q[..., :-1], LAYER), ArgumentError, "q: shape is"),
        (
            lambda: backend_of().forward(Q[..., :LATENT], LAYER, q_rope=Q[..., :9]),
            *(ArgumentError, "q_rope: shape is"),
        ),
        (lambda: backend_of().forward(Q, LAYER, q_rope=Q[..., :ROPE]), ArgumentError, "q: shape"),
        (
            lambda: backend_of().forward(Q, LayerSpec(softmax_scale=1.0, window_size=(-2, 0))),
            *(ArgumentError, "window_size: got -2"),
        ),
        (
            lambda: backend_of().forward(Q, LayerSpec(softmax_scale=1.0, softcap=2.0)),
            *(UnsupportedError, "softcap: got 2.0; latent"),
        ),
        (
            lambda: backend_of().forward(Q, LayerSpec(softmax_scale=1.0, num_kv_heads=3)),
            *(ArgumentError, "num_kv_heads: got 3"),
        ),
        (
            lambda: backend_of(sliding_window_size=3, is_hybrid=True),
            *(UnsupportedError, "is_hybrid: got True; latent"),
        ),
        (lambda: backend_of(attention_chunk_size=4), UnsupportedError, "attention_chunk_size: got"),
        (lambda: backend_of(has_encoder=True), UnsupportedError, "has_encoder: got True"),
        (lambda: backend_of(kv_dtype="float16").forward(Q, LAYER), ArgumentError, "kv_dtype: the"),
        (
            lambda: BackendConfig(4, 2, LATENT + ROPE, LATENT, use_mla=True),
            *(ArgumentError, "num_kv_heads: got 2; a latent pool has one head"),
        ),
        (lambda: pool_of(True).get_key_buffer(0), UnsupportedError, "get_key_buffer: the pool"),
        (lambda: pool_of().get_key_buffer(2), ArgumentError, "layer_id: got 2"),
        (
            lambda: MLATokenToKVPool(4, LATENT, 0, 1, np.zeros(1, np.float32)),
            *(ArgumentError, "qk_rope_head_dim: got 0"),
        ),
        (
            lambda: MHATokenToKVPool(4, 1, 8, 1, np.zeros(1, np.float32)).set_mla_kv_buffer(
                LAYER, np.zeros(1, np.int64), Q, Q
            ),
            *(UnsupportedError, "set_mla_kv_buffer: this pool is of MHA"),
        ),
        (
            lambda: backend_of().forward_ragged(Q, Q, Q, LAYER),
            *(Exception, "cu_seqlens_q: there is no metadata of a ragged mode"),
        ),
    ],
)  # fmt: skip
def test_wrong_calls(call: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        call()


def test_a_dense_backend_takes_no_rope_queries() -> None:
    pool = MHATokenToKVPool(32, 1, 8, 1, np.zeros(1, np.float32), dtype="float32")
    config = BackendConfig(1, 1, 8, max_context_len=16)
    backend = AttentionBackend(config, pool, np.arange(32, dtype=np.int32).reshape(2, 16))
    backend.init_forward_metadata(BatchInfo(ForwardMode.DECODE, np.array([0]), np.array([1])))
    q = np.ones((1, 1, 8), np.float32)
    with pytest.raises(ArgumentError, match="q_rope: given without use_mla"):
        backend.forward(q, LayerSpec(), q_rope=q)


@pytest.mark.parametrize("is_latent", [False, True])
def test_keys_move_from_slots_to_slots(is_latent: bool) -> None:
    """Where slots overlap, what was there before is moved; a negative new slot skips."""
    rng = np.random.default_rng(8)
    if is_latent:
        pool: Any = pool_of()
        buffers = [pool.get_key_buffer(layer) for layer in range(2)]
    else:
        pool = MHATokenToKVPool(96, 2, 8, 2, np.zeros(1, np.float32), dtype="float32")
        buffers = [x for layer in range(2) for x in pool.get_kv_buffer(layer)]
    for x in buffers:
        x[...] = rng.standard_normal(x.shape)
    before = [x.copy() for x in buffers]
    pool.move(np.array([3, 4, -1, 5]), np.array([4, 9, 7, 3]))
    for x, old in zip(buffers, before, strict=True):
        wanted = old.copy()
        wanted[[3, 4, 5]] = old[[4, 9, 3]]
        np.testing.assert_array_equal(x, wanted)
