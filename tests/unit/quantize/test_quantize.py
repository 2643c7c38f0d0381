"""quantize_qkv and rope_and_cache on the CPU: what is stored, and which calls are refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import cupyattn
from cupyattn.core import dtypes
from cupyattn.errors import ArgumentError, UnsupportedError
from cupyattn.reference import quantize as in_numpy

E4M3 = dtypes.float8_e4m3fn.numpy


def _rows(n: int, heads: int = 2, dim: int = 64, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((n, heads, dim)).astype(np.float16)


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "int8"])
def test_blocks_of_requests_lie_where_their_rows_begin(dtype: str) -> None:
    lengths = [5, 0, 130, 64]
    indptr = np.cumsum([0, *lengths])
    q = _rows(199)
    q[5:69] *= 100
    x = cupyattn.quantize_qkv(q, qo_indptr=indptr, dtype=dtype)
    assert x.q_block_scales.shape == (-(-199 // 64) + 4, 2) and x.k is None
    largest = 127 if dtype == "int8" else 448
    for request, length in enumerate(lengths):
        for block in range(-(-length // 64)):
            first = indptr[request] + 64 * block
            rows = slice(first, min(first + 64, indptr[request + 1]))
            scale = x.q_block_scales[indptr[request] // 64 + request + block]
            amax = np.abs(q[rows].astype(np.float32)).max(axis=(0, 2))
            np.testing.assert_array_equal(scale, amax / np.float32(largest))
            real = x.q[rows].astype(np.float32) * scale[:, None]
            bound = (
                scale[:, None] * 0.5001
                if dtype == "int8"
                else np.abs(q[rows]) / 16 + scale[:, None]
            )
            assert (np.abs(real - q[rows]) <= bound).all()


def test_dense_arrays_and_given_scales() -> None:
    q, k = _rows(140).reshape(2, 70, 2, 64), _rows(140, 1).reshape(2, 70, 1, 64)
    scales = np.array([[0.5], [0.25]], np.float32)
    x = cupyattn.quantize_qkv(q, k, scale_k=scales, block_size=128)
    assert x.q.shape == q.shape and x.q.dtype == E4M3 and x.q_block_scales.shape == (2, 1, 2)
    assert x.scale_k is scales and x.k_block_scales is None
    np.testing.assert_array_equal(x.k[1], (k[1].astype(np.float32) * 4).astype(E4M3))


def test_a_rotation_keeps_products_and_spreads_outliers() -> None:
    q, k = _rows(64, 1, 128), _rows(64, 1, 128, seed=1)
    k[:, 0, 7] += 60
    plain, rotated = (
        cupyattn.quantize_qkv(q, k, dtype="int8", hadamard=is_rotated)
        for is_rotated in (False, True)
    )
    exact = q[:, 0].astype(np.float64) @ k[:, 0].T.astype(np.float64)
    errors = []
    for x in (plain, rotated):
        real = (x.q[:, 0] * x.q_block_scales[0, 0]) @ (x.k[:, 0] * x.k_block_scales[0, 0]).T
        errors.append(np.abs(real - exact).max())
    assert errors[1] < errors[0] / 2


def test_a_mean_is_subtracted_of_its_request() -> None:
    k = _rows(10, 1, 64)
    mean = np.stack([k[:4].mean(axis=0), k[4:].mean(axis=0)]).astype(np.float32)
    x = cupyattn.quantize_qkv(k=k, kv_indptr=np.array([0, 4, 10]), k_mean=mean, scale_k=0.01)
    smooth = k.astype(np.float32) - np.repeat(mean, [4, 6], axis=0)
    np.testing.assert_array_equal(x.k, in_numpy.stored(smooth, 0.01, E4M3))


def test_means_of_keys_are_found() -> None:
    k = _rows(600, 2, 64)
    k[:, :, 3] += 20
    x = cupyattn.quantize_qkv(k=k, kv_indptr=np.array([0, 0, 500, 600]), smooth_k=True)
    assert x.k_mean.shape == (3, 2, 64) and not x.k_mean[0].any()
    np.testing.assert_allclose(x.k_mean[1], k[:500].astype(np.float64).mean(axis=0), rtol=1e-6)
    plain = cupyattn.quantize_qkv(k=k, kv_indptr=np.array([0, 0, 500, 600]))
    assert x.k_block_scales[1:9].max() < plain.k_block_scales[1:9].min() / 2


@pytest.mark.parametrize("interleave", [False, True])
def test_the_norm_and_the_rotation_are_those_of_models(interleave: bool) -> None:
    q, k, v = _rows(3, 2), _rows(3, 1), _rows(3, 1)
    weight = np.linspace(0.5, 1.5, 64).astype(np.float32)
    caches = [np.zeros((8, 1, 64), np.float16) for _ in "kv"]
    positions, slots = np.array([2, 9, 4]), np.array([5, -1, 0])
    named: dict[str, Any] = {"rotary_dim": 32, "rope_theta": 1e4, "interleave": interleave}
    out = cupyattn.rope_and_cache(
        q, k, v, *caches, slots, positions, q_weight=weight, k_weight=weight, eps=1e-5, **named
    )

    def turned(x: np.ndarray) -> np.ndarray:
        y = x.astype(np.float64)
        y = y / np.sqrt((y * y).mean(axis=-1, keepdims=True) + 1e-5) * weight
        angles = positions[:, None, None] * 1e4 ** (-np.arange(16) / 16)
        low, high = (y[..., 0:32:2], y[..., 1:32:2]) if interleave else (y[..., :16], y[..., 16:32])
        z = (low + 1j * high) * np.exp(1j * angles)
        y = y.copy()
        if interleave:
            y[..., 0:32:2], y[..., 1:32:2] = z.real, z.imag
        else:
            y[..., :16], y[..., 16:32] = z.real, z.imag
        return y

    np.testing.assert_allclose(out.astype(np.float64), turned(q), atol=2e-3)
    np.testing.assert_allclose(caches[0][[5, 0]].astype(np.float64), turned(k)[[0, 2]], atol=2e-3)
    np.testing.assert_array_equal(caches[1][[5, 0]], v[[0, 2]])
    assert not caches[0][[1, 2, 3, 4, 6, 7]].any()


def test_fresh_blocks_of_pages_forget_old_scales() -> None:
    caches = [np.zeros((2, 64, 1, 64), E4M3) for _ in "kv"]
    scales = [np.full((2, 1, 1), 99, np.float32) for _ in "kv"]
    k = _rows(64, 1)
    named = {"k_block_scales": scales[0], "v_block_scales": scales[1]}
    cupyattn.rope_and_cache(None, k, k, *caches, np.arange(64, 128), **named)
    amax = np.abs(k.astype(np.float32)).max()
    assert scales[0][:, 0, 0].tolist() == [99, amax / np.float32(448)]
    np.testing.assert_array_equal(caches[0][1], caches[1][1])


@pytest.mark.parametrize(
    ("named", "message"),
    [
        ({"dtype": "float8_e5m2"}, "dtype: got float8_e5m2"),
        ({"block_size": 32}, "block_size: got 32; wanted 64 or 128"),
        ({"block_size": np.ones(2)}, "block_size"),
        ({"scale_q": 0.0}, "scale_q"),
        ({"scale_q": np.ones(3, np.float32)}, "scale_q: shape is"),
        ({"scale_k": 1.0}, "scale_k: given without k"),
        ({"k_mean": np.zeros((1, 1, 64), np.float32)}, "k_mean, smooth_k: given without k"),
        ({"smooth_k": True}, "k_mean, smooth_k: given without k"),
        ({"qo_indptr": np.array([0, 5, 4, 10])}, "qo_indptr: wanted offsets"),
        ({"qo_indptr": np.array([0, 11])}, "qo_indptr: wanted offsets"),
        ({"v": np.zeros((10, 2, 64), np.float32)}, "v: dtype is float32"),
        ({"q": np.zeros((10, 2, 96), np.float16), "hadamard": True}, "hadamard: q has head_dim 96"),
        ({"q": None}, "q, k, v: all are None"),
    ],
)
def test_wrong_calls_of_quantize_qkv(named: dict[str, Any], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        cupyattn.quantize_qkv(**{"q": _rows(10), **named})


def test_wide_heads_are_refused() -> None:
    with pytest.raises(UnsupportedError, match="head_dim is 512"):
        cupyattn.quantize_qkv(_rows(1, 1, 512))


@pytest.mark.parametrize(
    ("named", "message"),
    [
        ({"slot_mapping": None}, "slot_mapping: wanted slots"),
        ({"slot_mapping": np.array([0, 1, 32])}, "slot_mapping: has slot 32"),
        ({"slot_mapping": np.array([0, 1])}, "slot_mapping"),
        ({"kv_indices": np.array([0])}, "slot_mapping: wanted slots"),
        ({"rope_theta": 1e4}, "positions: got None"),
        ({"rope_theta": 1e4, "positions": np.arange(3), "rotary_dim": 24}, "rotary_dim: got 24"),
        ({"q_weight": np.ones(32, np.float16)}, "q_weight"),
        ({"q_dtype": "float8_e5m2"}, "q_dtype: got float8_e5m2"),
        (
            {"k_block_scales": np.ones((2, 1, 1), np.float32)},
            "k_block_scales: given for a cache of",
        ),
        ({"k_scale": np.ones(2, np.float32)}, "k_scale: shape is"),
        ({"k_cache": np.zeros((2, 16, 1, 64), np.int8)}, "v_cache: dtype is float16"),
        ({"k_mean": np.zeros((2, 1, 64), np.float32)}, "k_mean: is of 2 requests"),
    ],
)
def test_wrong_calls_of_rope_and_cache(named: dict[str, Any], message: str) -> None:
    arguments: dict[str, Any] = {
        "q": _rows(3),
        "k": _rows(3, 1),
        "v": _rows(3, 1),
        "k_cache": np.zeros((2, 16, 1, 64), np.float16),
        "v_cache": np.zeros((2, 16, 1, 64), np.float16),
        "slot_mapping": np.array([0, 1, 2]),
    }
    with pytest.raises(ArgumentError, match=message):
        cupyattn.rope_and_cache(**{**arguments, **named})


def test_a_cache_that_is_an_input_is_refused() -> None:
    cache = np.zeros((3, 1, 64), np.float16)
    with pytest.raises(ArgumentError, match="k_cache: overlaps k"):
        cupyattn.rope_and_cache(None, cache, _rows(3, 1), cache, cache.copy(), np.arange(3))
