"""What flash_attn's documentation says of its functions, sentence by sentence."""

from __future__ import annotations

import math

import numpy as np
import pytest
from helpers.plain_answers import dense

from cupyattn import flash_attn
from cupyattn.flash_attn import (
    flash_attn_combine,
    flash_attn_func,
    flash_attn_varlen_func,
    flash_attn_with_kvcache,
    get_scheduler_metadata,
    merge_state_v2,
)

RNG = np.random.default_rng(7)


def normal(*shape: int) -> np.ndarray:
    return RNG.standard_normal(shape).astype(np.float32)


def ints(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


def seen(sq: int, sk: int, **options: object) -> list[str]:
    """Which keys each row sees, as digits: values are powers of two, logits equal."""
    q, k = np.zeros((1, sq, 1, 16), np.float32), np.zeros((1, sk, 1, 16), np.float32)
    v = np.zeros((1, sk, 1, 16), np.float32)
    v[0, :, 0, 0] = 2.0 ** np.arange(sk)
    out, lse = flash_attn_func(q, k, v, return_softmax_lse=True, **options)
    sums = np.where(np.isneginf(lse[0, 0]), 0, out[0, :, 0, 0] * np.exp(lse[0, 0]))
    bits = np.rint(sums).astype(int)
    return ["".join(str(x >> j & 1) for j in range(sk)) for x in bits]


@pytest.mark.parametrize(
    ("sq", "sk", "options", "rows"),
    [
        (2, 5, {"causal": True}, ["11110", "11111"]),
        (5, 2, {"causal": True}, ["00", "00", "00", "10", "11"]),
        (2, 5, {}, ["11111", "11111"]),
        (3, 5, {"window_size": (1, 0)}, ["01100", "00110", "00011"]),
        (3, 5, {"window_size": (1, 1)}, ["01110", "00111", "00011"]),
        (3, 5, {"window_size": (-1, 1)}, ["11110", "11111", "11111"]),
        (3, 5, {"window_size": (0, -1)}, ["00111", "00011", "00001"]),
        (3, 5, {"window_size": (2, 3), "causal": True}, ["11100", "01110", "00111"]),
        (5, 2, {"window_size": (1, 1)}, ["00", "00", "10", "11", "11"]),
        (4, 6, {"attention_chunk": 3}, ["111000", "000111", "000111", "000111"]),
        (4, 6, {"attention_chunk": 3, "causal": True}, ["111000", "000100", "000110", "000111"]),
        (4, 2, {"attention_chunk": 2}, ["00", "00", "11", "11"]),
        (2, 4, {"window_size": [None, None]}, ["1111", "1111"]),
        (2, 4, {"window_size": None}, ["1111", "1111"]),
    ],
)
def test_which_keys_a_row_sees(
    sq: int, sk: int, options: dict[str, object], rows: list[str]
) -> None:
    assert seen(sq, sk, **options) == rows


def test_rows_without_keys_are_zero_and_minus_infinity() -> None:
    q, k = normal(1, 5, 2, 16), normal(1, 2, 2, 16)
    out, lse = flash_attn_func(q, k, k, causal=True, return_softmax_lse=True)
    assert (out[0, :3] == 0).all() and np.isneginf(lse[0, :, :3]).all()
    assert np.isfinite(lse[0, :, 3:]).all()
    out, lse = flash_attn_func(q, k[:, :0], k[:, :0], return_softmax_lse=True)
    assert (out == 0).all() and np.isneginf(lse).all()
    # A sink is a key without a value.
    out, lse = flash_attn_func(q, k[:, :0], k[:, :0], sinks=np.array([1, 2]).astype(np.float32),
                               return_softmax_lse=True)  # fmt: skip
    assert (out == 0).all() and np.allclose(lse[0], [[1] * 5, [2] * 5])


def test_heads_share_keys_in_groups() -> None:
    q, k, v = normal(1, 3, 6, 16), normal(1, 4, 2, 16), normal(1, 4, 2, 16)
    whole = flash_attn_func(q, k, v)
    for head in range(6):
        one = slice(head // 3, head // 3 + 1)
        alone = flash_attn_func(q[:, :, head : head + 1], k[:, :, one], v[:, :, one])
        assert np.allclose(whole[:, :, head], alone[:, :, 0], atol=1e-6)


def test_the_default_scale_is_one_by_the_root_of_head_dim() -> None:
    q, k = normal(2, 3, 2, 24), normal(2, 4, 2, 24)
    assert np.array_equal(
        flash_attn_func(q, k, k), flash_attn_func(q, k, k, softmax_scale=1 / math.sqrt(24))
    )


def test_lse_is_natural_with_heads_first() -> None:
    q, k = normal(5, 4, 16), normal(7, 2, 16)
    cu_q, cu_k = ints(0, 3, 5), ints(0, 4, 7)
    out, lse = flash_attn_varlen_func(q, k, k, cu_q, cu_k, 3, 4, return_softmax_lse=True)
    assert out.shape == (5, 4, 16) and lse.shape == (4, 5) and lse.dtype == np.float32
    for rows, keys in ((slice(0, 3), slice(0, 4)), (slice(3, 5), slice(4, 7))):
        want, want_lse = dense(q[rows], k[keys], k[keys], scale=0.25)
        assert np.allclose(out[rows], want, atol=1e-6)
        assert np.allclose(lse[:, rows], want_lse, atol=1e-6)
    out, lse = flash_attn_func(q[None], k[None], k[None], return_softmax_lse=True)
    assert lse.shape == (1, 4, 5)


def test_alibi_is_of_the_distance_behind_the_soft_cap() -> None:
    q, k = normal(1, 4, 2, 16), normal(1, 6, 2, 16)
    slopes = np.array([[0.5, 0.125]], np.float32)
    out = flash_attn_func(q, k, k, softcap=0.5, alibi_slopes=slopes)
    want, _ = dense(q[0], k[0], k[0], scale=0.25, softcap=0.5, slopes=slopes[0])
    assert np.allclose(out[0], want, atol=1e-6)


# --- caches ---


def test_new_keys_are_written_in_place_first() -> None:
    cache, new, q = normal(2, 8, 2, 16), normal(2, 2, 2, 16), normal(2, 2, 4, 16)
    k_cache, v_cache = cache.copy(), cache.copy() + 1
    lens = ints(3, 6)
    out = flash_attn_with_kvcache(q, k_cache, v_cache, new, new, cache_seqlens=lens, causal=True)
    for row, length in enumerate(lens):
        end = length + 2
        assert np.array_equal(k_cache[row, length:end], new[row])
        assert np.array_equal(v_cache[row, length:end], new[row])
        assert np.array_equal(k_cache[row, end:], cache[row, end:])
        assert np.array_equal(k_cache[row, :length], cache[row, :length])
        want, _ = dense(q[row], k_cache[row, :end], v_cache[row, :end], scale=0.25, causal=True)
        assert np.allclose(out[row], want, atol=1e-6)


def test_a_cache_without_lengths_is_full() -> None:
    q, k = normal(2, 1, 4, 16), normal(2, 5, 2, 16)
    full = flash_attn_with_kvcache(q, k, k)
    assert np.array_equal(full, flash_attn_with_kvcache(q, k, k, cache_seqlens=5))
    assert np.array_equal(full, flash_attn_with_kvcache(q, k, k, cache_seqlens=ints(5, 5)))
    assert np.array_equal(full, flash_attn_func(q, k, k))


def test_pages_of_any_size_are_the_same_cache() -> None:
    q, k, v = normal(1, 3, 4, 16), normal(12, 2, 16), normal(12, 2, 24)
    want = flash_attn_with_kvcache(q, k[None], v[None], cache_seqlens=11, causal=True)
    for size in (1, 2, 3, 4, 6, 12):
        order = RNG.permutation(12 // size)
        table = np.argsort(order)[None].astype(np.int32)
        pages = [x.reshape(-1, size, 2, x.shape[-1])[order] for x in (k, v)]
        got = flash_attn_with_kvcache(q, *pages, cache_seqlens=11, page_table=table, causal=True)
        assert np.array_equal(got, want), size


def test_left_padding_hides_the_first_keys() -> None:
    q, k, v = normal(2, 2, 4, 16), normal(2, 9, 2, 16), normal(2, 9, 2, 16)
    k[0, :2] = v[0, :2] = np.nan
    lens, pads = ints(6, 9), ints(2, 0)
    for options in ({}, {"causal": True}, {"window_size": (1, 0)}, {"attention_chunk": 3}):
        out = flash_attn_with_kvcache(q, k, v, cache_seqlens=lens, cache_leftpad=pads, **options)
        for row in range(2):
            own = slice(pads[row], lens[row])
            named = {"chunk" if n == "attention_chunk" else n.removesuffix("_size"): x
                     for n, x in options.items()}  # fmt: skip
            want, _ = dense(q[row], k[row, own], v[row, own], scale=0.25, **named)
            assert np.allclose(out[row], want, atol=1e-6)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize(
    ("options", "moves"),
    [
        ({}, False),
        ({"causal": True}, True),
        ({"window_size": (3, 3)}, True),
    ],
)
def test_rotary(interleaved: bool, options: dict[str, object], moves: bool) -> None:
    """Keys to where they are written; rows of q each to its own place, or all to the first."""
    angles = np.arange(20)[:, None] * np.array([1.0, 0.3] * 4)
    cos, sin = np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)
    first = np.arange(8) * 2 if interleaved else np.arange(8)
    second = first + 1 if interleaved else first + 8

    def turn(x: np.ndarray, at: int) -> np.ndarray:
        made = x.copy()
        made[..., first] = x[..., first] * cos[at] - x[..., second] * sin[at]
        made[..., second] = x[..., first] * sin[at] + x[..., second] * cos[at]
        return made

    q, k, v = normal(1, 3, 2, 24), normal(1, 3, 1, 24), normal(1, 3, 1, 24)
    k_cache, v_cache = normal(1, 10, 1, 24), normal(1, 10, 1, 24)
    other = k_cache.copy(), v_cache.copy()
    given = q.copy(), k.copy()
    out = flash_attn_with_kvcache(
        q, k_cache, v_cache, k, v, rotary_cos=cos, rotary_sin=sin, cache_seqlens=4,
        rotary_interleaved=interleaved, **options,
    )  # fmt: skip
    assert np.array_equal(q, given[0]) and np.array_equal(k, given[1])
    turned_k = np.stack([turn(k[0, i], 4 + i) for i in range(3)])[None]
    turned_q = np.stack([turn(q[0, i], 4 + i * moves) for i in range(3)])[None]
    want = flash_attn_with_kvcache(turned_q, *other, turned_k, v, cache_seqlens=4, **options)
    assert np.allclose(out, want, atol=1e-5) and np.allclose(k_cache, other[0], atol=1e-6)


# --- states ---


def test_combining_parts_gives_the_whole() -> None:
    q, k, v = normal(2, 3, 4, 16), normal(2, 12, 2, 16), normal(2, 12, 2, 16)
    want, want_lse = flash_attn_func(q, k, v, return_softmax_lse=True)
    parts = [
        flash_attn_func(q, k[:, i : i + 4], v[:, i : i + 4], return_softmax_lse=True)
        for i in (0, 4, 8)
    ]
    outs = np.stack([out for out, _ in parts])
    lses = np.stack([lse.swapaxes(1, 2) for _, lse in parts])
    out, lse = flash_attn_combine(outs, lses)
    assert out.dtype == np.float32 and lse.shape == (2, 3, 4)
    assert np.allclose(out, want, atol=1e-6)
    assert np.allclose(lse.swapaxes(1, 2), want_lse, atol=1e-6)
    target = np.zeros((2, 3, 4, 16), np.float16)
    out, _ = flash_attn_combine(outs, lses, target, "float16")
    assert out is target and np.allclose(target, want, atol=2e-3)
    rows, lse = flash_attn_combine(outs.reshape(3, 6, 4, 16), lses.reshape(3, 6, 4))
    assert rows.shape == (6, 4, 16) and lse.shape == (6, 4)


def test_merge_state_v2() -> None:
    """Vectors of the serving specification, and two empty states, which upstream makes NaN."""
    inf = math.inf
    v_a = np.array([[[1, 2]], [[4, 4]], [[7, 7]], [[5, 5]]], np.float32)
    v_b = np.array([[[3, 6]], [[8, 0]], [[9, 9]], [[6, 6]]], np.float32)
    s_a = np.array([[0], [1], [inf], [-inf]], np.float32)
    s_b = np.array([[math.log(3)], [-inf], [0.5], [inf]], np.float32)
    v, s = merge_state_v2(v_a, s_a, v_b, s_b)
    assert np.allclose(v[:, 0], [[2.5, 5], [4, 4], [9, 9], [0, 0]])
    assert np.allclose(s[:, 0], [1.386294, 1, 0.5, -inf])
    out, lse = np.empty_like(v_a), np.empty_like(s_a)
    got = merge_state_v2(v_a, s_a, v_b, s_b, out, lse)
    assert got[0] is out and got[1] is lse and np.array_equal(out, v)


def test_the_serving_oracle() -> None:
    """T22 of the serving specification: numbers worked out elsewhere."""
    cache = np.arange(6, dtype=np.float32).reshape(6, 1, 1, 1)
    k, v = (np.broadcast_to(x, (6, 1, 1, 8)).copy() for x in (cache / 2, cache))
    k[..., 1:] = 0
    q = np.zeros((2, 2, 8), np.float32)
    q[:, :, 0] = [[1, 2], [0, -1]]
    for options, want, want_lse in (
        ({}, [[4.462117, 4.761594], [3, 1.849579]],
         [[2.813262, 1.098612], [5.126928, -0.092394]]),
        ({"window_size": (1, 0)}, [[4.462117, 4.761594], [2, 1.537883]],
         [[2.813262, 0.693147], [5.126928, -0.186738]]),
        ({"sinks": np.zeros(2, np.float32)}, [[4.209509, 4.733502], [2.25, 0.882097]],
         [[2.871539, 1.386294], [5.132845, 0.648017]]),
        ({"softcap": 1.0}, [[4.040711, 4.002427], [3, 2.634594]],
         [[1.639858, 1.098612], [1.690632, 0.34165]]),
    ):  # fmt: skip
        out, lse = flash_attn_with_kvcache(
            q, k, v, page_table=np.array([[5, 3, 1]], np.int32), cache_seqlens=3,
            cu_seqlens_q=ints(0, 2), max_seqlen_q=2, softmax_scale=1.0, causal=True,
            return_softmax_lse=True, **options,
        )  # fmt: skip
        assert np.allclose(out[..., 0], want, atol=1e-5)
        assert np.allclose(lse, want_lse, atol=1e-5)


def test_schedules_are_accepted_and_change_nothing() -> None:
    lens = ints(3, 5)
    metadata = get_scheduler_metadata(
        batch_size=2, max_seqlen_q=1, max_seqlen_k=5, num_heads_q=4, num_heads_kv=2, headdim=16,
        cache_seqlens=lens, qkv_dtype="bfloat16", page_size=None, causal=True, num_splits=0,
    )  # fmt: skip
    assert metadata.dtype == np.int32 and metadata.shape == (1,)
    q, k = normal(2, 1, 4, 16), normal(2, 5, 2, 16)
    plain = flash_attn_with_kvcache(q, k, k, cache_seqlens=lens)
    for options in ({"scheduler_metadata": metadata}, {"num_splits": 1}, {"num_splits": 7},
                    {"pack_gqa": False, "sm_margin": 8}):  # fmt: skip
        assert np.array_equal(
            flash_attn_with_kvcache(q, k, k, cache_seqlens=lens, **options), plain
        )


def test_every_name_is_documented() -> None:
    for name in flash_attn.__all__:
        assert "Semantics:" in getattr(flash_attn, name).__doc__
