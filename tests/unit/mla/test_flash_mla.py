"""FlashMLA's functions on the CPU: rows with scales, sinks, lists, metadata."""

from __future__ import annotations

import functools
import math
from typing import Any

import numpy as np
import pytest

from cupyattn import flash_attn, flash_mla, reference
from cupyattn.errors import ArgumentError, UnsupportedError
from cupyattn.reference.latent_rows import pack_rows, unpack_rows

RNG = np.random.default_rng(3)
Q = RNG.standard_normal((2, 3, 4, 576)).astype(np.float32)
CACHE = RNG.standard_normal((5, 4, 1, 576)).astype(np.float32)
TABLE = np.array([[3, 1, 0], [2, 4, 4]], np.int32)
LENS = np.array([9, 4], np.int32)


def dense(q: Any = Q, cache: Any = CACHE, **named: Any) -> Any:
    return flash_mla.flash_mla_with_kvcache(q, cache, TABLE, LENS, 512, None, **named)


def expected(cache: np.ndarray = CACHE, **named: Any) -> tuple[np.ndarray, np.ndarray]:
    answers = []
    for q, table, n in zip(Q, TABLE, LENS, strict=True):
        k = cache[table].reshape(-1, 1, 576)[:n]
        answers.append(reference.attention(q, k, k[..., :512], sm_scale=576**-0.5, **named))
    out, lse = (np.stack(x) for x in zip(*answers, strict=True))
    return out, lse.swapaxes(1, 2) * math.log(2.0)


@pytest.mark.parametrize("causal", [False, True])
def test_dense(causal: bool) -> None:
    out, lse = dense(causal=causal)
    wanted, wanted_lse = expected(causal=causal)
    assert out.shape == (2, 3, 4, 512) and lse.shape == (2, 4, 3)
    np.testing.assert_allclose(out, wanted, atol=1e-5)
    np.testing.assert_allclose(lse, wanted_lse, atol=1e-5)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("window_left", [0, 2, 7])
def test_windows(causal: bool, window_left: int) -> None:
    out, lse = dense(causal=causal, window_left=window_left)
    wanted, wanted_lse = expected(causal=causal, window_left=window_left)
    np.testing.assert_allclose(out, wanted, atol=1e-5)
    np.testing.assert_allclose(lse, wanted_lse, atol=1e-5)
    latent, rope = slice(None, 512), slice(512, None)
    found, found_lse, *_ = flash_attn.flash_attn_with_kvcache(
        Q[..., rope], CACHE[..., rope], CACHE[..., latent], qv=Q[..., latent], causal=causal,
        page_table=TABLE, cache_seqlens=LENS, window_size=(window_left, -1),
        softmax_scale=576**-0.5, return_softmax_lse=True,
    )  # fmt: skip
    np.testing.assert_allclose(found, wanted, atol=1e-5)
    np.testing.assert_allclose(found_lse, wanted_lse, atol=1e-5)


def test_lists_have_no_window() -> None:
    indices = np.zeros((2, 3, 4), np.int32)
    with pytest.raises(ArgumentError, match="window_left: got 3 with indices that name all keys"):
        flash_mla.flash_mla_with_kvcache(Q, CACHE, None, None, 512, indices=indices, window_left=3)
    with pytest.raises(ArgumentError, match="window_left: got -3"):
        dense(window_left=-3)


def test_a_sink_scales_the_answer_and_not_the_lse() -> None:
    sink = np.array([0.3, -2.0, 1.5, 6.0], np.float32)
    out, lse = dense(attn_sink=sink)
    plain, plain_lse = expected()
    share = np.exp(plain_lse) / (np.exp(plain_lse) + np.exp(sink)[None, :, None])
    np.testing.assert_allclose(out, plain * share.swapaxes(1, 2)[..., None], atol=1e-5)
    np.testing.assert_allclose(lse, plain_lse, atol=1e-5)


def test_sinks_that_are_infinite_and_far_larger_than_logits() -> None:
    """-inf is none, +inf leaves nothing, and the LSE is that of the keys to its last digits."""
    sink = np.array([-np.inf, np.inf, 40.0, 500.0], np.float32)
    indices = np.tile(np.arange(5, dtype=np.int32), (2, 3, 1))
    indices[1, 2] = -1
    plain, plain_lse = flash_mla.flash_mla_with_kvcache(Q, CACHE, None, None, 512, indices=indices)
    out, lse = flash_mla.flash_mla_with_kvcache(
        Q, CACHE, None, None, 512, indices=indices, attn_sink=sink
    )
    np.testing.assert_array_equal(lse, plain_lse)
    np.testing.assert_array_equal(out[:, :, 0], plain[:, :, 0])
    assert not out[:, :, 1].any() and np.isposinf(lse[1, :, 2]).all()
    share = np.exp(plain_lse[:, 2] - 40.0)[..., None]
    np.testing.assert_allclose(out[:, :, 2][:, :2], plain[:, :2, 2] * share[:, :2], rtol=1e-5)


def test_entries_that_are_no_slots_are_no_keys() -> None:
    """FlashMLA: -1, or any number from s_kv on."""
    rows = CACHE.reshape(-1, 1, 576)
    indices = np.array([[[3, -1, 20, 114514, 2**31 - 1, 7, -(2**31)]]] * 2, np.int32)
    plain = np.array([[[3, 7]]] * 2, np.int32)
    q = Q[0, :2]
    for a, b in zip(
        flash_mla.flash_mla_sparse_fwd(q, rows, indices, 0.05),
        flash_mla.flash_mla_sparse_fwd(q, rows, plain, 0.05),
        strict=True,
    ):
        np.testing.assert_array_equal(a, b)


def test_the_answers_of_sparse_fwd() -> None:
    """The largest logit and a natural LSE, without the sink; -inf and +inf without keys."""
    rows = CACHE.reshape(-1, 1, 576)
    indices = np.array([[[0, 5, 11]], [[-1, 20, 99]]], np.int32)
    q, sink = Q[0, :2], np.full(4, 3.0, np.float32)
    out, max_logits, lse = flash_mla.flash_mla_sparse_fwd(q, rows, indices, 0.05, attn_sink=sink)
    logits = q[0] @ rows[[0, 5, 11], 0].T * 0.05
    np.testing.assert_allclose(max_logits[0], logits.max(-1), rtol=1e-5)
    np.testing.assert_allclose(lse[0], np.log(np.exp(logits).sum(-1)), rtol=1e-5)
    assert max_logits.dtype == lse.dtype == np.float32
    assert np.isneginf(max_logits[1]).all() and np.isposinf(lse[1]).all() and not out[1].any()


def test_requests_that_lie_further_apart_than_their_tokens() -> None:
    """Of q and of lists, as slices of larger arrays."""
    indices = RNG.integers(-1, 20, (2, 3, 7)).astype(np.int32)
    q, lists = np.full((2, 5, 4, 600), np.nan, np.float32), np.full((2, 4, 9), 2**20, np.int32)
    q[:, :3, :, :576], lists[:, :3, :7] = Q, indices
    q, lists = q[:, :3, :, :576], lists[:, :3, :7]
    call = functools.partial(flash_mla.flash_mla_with_kvcache, head_dim_v=512)
    for one, other in (
        ((Q, CACHE, TABLE, LENS), (q, CACHE, TABLE, LENS)),
        ((Q, CACHE, None, None), (q, CACHE, None, None)),
    ):
        has_lists = one[2] is None
        wanted = call(*one, indices=indices if has_lists else None)
        got = call(*other, indices=lists if has_lists else None)
        for a, b in zip(wanted, got, strict=True):
            np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("heads_kv", [2, 4])
@pytest.mark.parametrize("causal", [False, True])
def test_heads_of_keys(heads_kv: int, causal: bool) -> None:
    caches = RNG.standard_normal((5, 4, heads_kv, 576)).astype(np.float32)
    out, lse = dense(cache=caches, causal=causal)
    for head in range(heads_kv):
        own = slice(head * 4 // heads_kv, (head + 1) * 4 // heads_kv)
        wanted, wanted_lse = expected(caches[:, :, head : head + 1], causal=causal)
        np.testing.assert_allclose(out[:, :, own], wanted[:, :, own], atol=1e-5)
        np.testing.assert_allclose(lse[:, own], wanted_lse[:, own], atol=1e-5)
    with pytest.raises(UnsupportedError, match="k_cache: has"):
        dense(cache=caches, attn_sink=np.zeros(4, np.float32))
    with pytest.raises(ArgumentError, match="q: 4 heads with 3 heads"):
        dense(cache=RNG.standard_normal((5, 4, 3, 576)).astype(np.float32))


def test_a_sink_alone_is_no_key() -> None:
    indices = np.full((2, 3, 5), -1, np.int32)
    out, lse = flash_mla.flash_mla_with_kvcache(
        Q, CACHE, None, None, 512, indices=indices, attn_sink=np.ones(4, np.float32)
    )
    assert not out.any() and np.isposinf(lse).all()


def test_rows_of_656_bytes() -> None:
    rows = pack_rows(CACHE)
    assert rows.shape == (5, 4, 1, 656) and rows.dtype == np.uint8
    plain = unpack_rows(rows)
    assert np.abs(plain - CACHE).max() < 0.26  # half of e4m3's last place of values up to 4
    out, lse = dense(cache=rows, is_fp8_kvcache=True)
    wanted, wanted_lse = expected(plain)
    np.testing.assert_allclose(out, wanted, atol=1e-5)
    np.testing.assert_allclose(lse, wanted_lse, atol=1e-5)
    with pytest.raises(ArgumentError, match="wanted uint8"):
        unpack_rows(rows[..., :600])


def test_no_rows_are_packed_and_unpacked() -> None:
    none = np.zeros((0, 3, 576), np.float32)
    assert pack_rows(none).shape == (0, 3, 656)
    assert unpack_rows(pack_rows(none)).shape == (0, 3, 576)


def test_lists_of_tokens() -> None:
    indices = RNG.integers(-1, 20, (2, 3, 7)).astype(np.int32)
    out, lse = flash_mla.flash_mla_with_kvcache(
        Q, CACHE, None, None, 512, indices=indices, topk_length=np.array([7, 4], np.int32)
    )
    flat = CACHE.reshape(-1, 1, 576)
    for b, t in np.ndindex(2, 3):
        seen = indices[b, t, : (7, 4)[b]]
        k = flat[seen[seen >= 0]]
        wanted = reference.attention(Q[b, t][None], k, k[..., :512], sm_scale=576**-0.5)
        np.testing.assert_allclose(out[b, t], wanted[0][0], atol=1e-5)
        np.testing.assert_allclose(lse[b, :, t], wanted[1][0] * math.log(2.0), atol=1e-5)


def test_metadata() -> None:
    metadata, splits = flash_mla.get_mla_metadata()
    assert isinstance(metadata, flash_mla.FlashMLASchedMeta) and splits is None
    metadata, splits = flash_mla.get_mla_metadata(LENS, 4, 1)
    assert (metadata.shape, metadata.dtype) == ((1, 8), np.int32)
    assert (splits.shape, splits.dtype) == ((3,), np.int32)
    out, _ = flash_mla.flash_mla_with_kvcache(Q, CACHE, TABLE, LENS, 512, metadata, splits)
    np.testing.assert_array_equal(out, dense()[0])


@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [
        ({"q": Q[0]}, ArgumentError, "q: shape is"),
        ({"head_dim_v": 600}, ArgumentError, "head_dim_v: got 600, but q has 576 columns"),
        ({"head_dim_v": 500}, UnsupportedError, "500 and 76 are not supported"),
        ({"extra_k_cache": CACHE}, ArgumentError, "extra_k_cache: is read by lists alone"),
        ({"extra_topk_length": LENS}, ArgumentError, "read by lists alone"),
        ({"topk_length": LENS}, ArgumentError, "topk_length: given without indices"),
        ({"indices": TABLE[:, None], "causal": True}, ArgumentError, "causal: got True"),
        ({"indices": TABLE[:, None]}, ArgumentError, "indices: has lists for 2 tokens; wanted 6"),
        ({"softmax_scale": "x"}, ArgumentError, "softmax_scale"),
        ({"k_cache": CACHE[..., :500]}, ArgumentError, "k_cache: rows have 500 columns"),
        ({"cache_seqlens": LENS + 9}, ArgumentError, "has 18, and block_table has pages for 12"),
        ({"block_table": TABLE + 2}, ArgumentError, "has page 5; the cache holds 5 pages"),
        ({"attn_sink": np.zeros(3, np.float32)}, ArgumentError, "sinks"),
        ({"is_fp8_kvcache": 2}, ArgumentError, "is_fp8_kvcache"),
    ],
)
def test_bad_input(changes: dict[str, Any], error: type[Exception], words: str) -> None:
    given = {"q": Q, "k_cache": CACHE, "block_table": TABLE, "cache_seqlens": LENS}
    with pytest.raises(error, match=words):
        flash_mla.flash_mla_with_kvcache(**{**given, "head_dim_v": 512, **changes})


def qv(**named: Any) -> Any:
    given = {"cache_seqlens": LENS, "page_table": TABLE, "return_softmax_lse": True, **named}
    parts = [np.ascontiguousarray(x) for x in (Q[..., 512:], CACHE[..., 512:], CACHE[..., :512])]
    latent = np.ascontiguousarray(Q[..., :512])
    if "cu_seqlens_q" in named:
        parts[0], latent = (x.reshape(-1, *x.shape[2:]) for x in (parts[0], latent))
    return flash_attn.flash_attn_with_kvcache(*parts, qv=latent, **given)


@pytest.mark.parametrize("causal", [False, True])
def test_qv_of_flash_attn(causal: bool) -> None:
    """The rope parts are q and k_cache, the latent ones qv and v_cache."""
    wanted, wanted_lse = expected(causal=causal)
    out, lse = qv(causal=causal)
    np.testing.assert_allclose(out, wanted, atol=1e-5)
    np.testing.assert_allclose(lse, wanted_lse, atol=1e-5)
    rows = np.array([0, 3, 6], np.int32)
    out, lse = qv(causal=causal, cu_seqlens_q=rows, max_seqlen_q=3)
    np.testing.assert_allclose(out, wanted.reshape(6, 4, 512), atol=1e-5)
    np.testing.assert_allclose(lse, wanted_lse.swapaxes(0, 1).reshape(4, 6), atol=1e-5)


def test_qv_over_rows() -> None:
    """A cache without a page table: each request has a row of it."""
    q, cache = Q[:, :1], CACHE[:2].repeat(3, axis=1)
    out = flash_attn.flash_attn_with_kvcache(
        q[..., 512:], cache[..., 512:], cache[..., :512], qv=q[..., :512], cache_seqlens=7
    )
    for b in range(2):
        k = cache[b, :7]
        wanted, _ = reference.attention(q[b], k, k[..., :512], sm_scale=576**-0.5)
        np.testing.assert_allclose(out[b], wanted, atol=1e-5)


def test_qv_with_options_that_latent_attention_has_not() -> None:
    """The copies of q and qv side by side, and of k and v, are plain attention."""
    for options in ({"softcap": 3.0}, {"window_size": (4, 0)}, {"attention_chunk": 3}):
        out, lse = qv(**options)
        both = flash_attn.flash_attn_with_kvcache(
            np.concatenate([Q[..., 512:], Q[..., :512]], 3),
            np.concatenate([CACHE[..., 512:], CACHE[..., :512]], 3),
            np.ascontiguousarray(CACHE[..., :512]),
            cache_seqlens=LENS,
            page_table=TABLE,
            return_softmax_lse=True,
            **options,
        )
        np.testing.assert_allclose(out, both[0], atol=1e-5)
        np.testing.assert_allclose(lse, both[1], atol=1e-5)


def test_what_qv_refuses() -> None:
    with pytest.raises(ArgumentError, match="q: shape is"):
        flash_attn.flash_attn_with_kvcache(Q[0], CACHE, CACHE, qv=Q)
    with pytest.raises(ArgumentError, match="qv: shape is"):
        flash_attn.flash_attn_with_kvcache(Q, CACHE, CACHE, qv=Q[..., :100])
