"""Queries of 8 bits on the CPU, against the reference of the same numbers in float64."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

import cupyattn
from cupyattn import reference

E4M3 = ml_dtypes.float8_e4m3fn
HEADS, KV_HEADS, DIM = 4, 2, 64
# Queries and keys are integers, or hundredths of them.
UNITS = {"float8_e4m3fn": 1.0, "int8": 0.01}


def numbers(rng: np.random.Generator, dtype: str, *shape: int) -> np.ndarray:
    if dtype == "int8":
        return rng.integers(-127, 128, shape).astype(np.int8)
    return rng.standard_normal(shape).astype(E4M3)


def scales(rng: np.random.Generator, form: str, unit: float, heads: int) -> Any:
    """A number or one for each head."""
    return unit if form == "number" else (unit * rng.uniform(0.5, 2, heads)).astype(np.float32)


def real(x: np.ndarray, scale: Any) -> np.ndarray:
    """What numbers [n, heads, head_dim] stand for."""
    return x.astype(np.float64) * np.reshape(scale, (-1, 1))


class Drawn:
    """A request of 8 bits with scales, and what it stands for."""

    def __init__(self, seed: int, dtype: str, form: str, qo_len: int, kv_len: int) -> None:
        rng, unit = np.random.default_rng(seed), UNITS[dtype]
        self.q = numbers(rng, dtype, qo_len, HEADS, DIM)
        self.k = numbers(rng, dtype, kv_len, KV_HEADS, DIM)
        self.v = numbers(rng, "float8_e4m3fn", kv_len, KV_HEADS, DIM)
        self.scale_q = scales(rng, form, unit, HEADS)
        self.scale_k = scales(rng, form, unit, KV_HEADS)
        self.scale_v = scales(rng, form, 0.5, KV_HEADS)
        self.real = (
            real(self.q, self.scale_q),
            real(self.k, self.scale_k),
            real(self.v, self.scale_v),
        )

    @property
    def arrays(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        return self.q, self.k, self.v

    @property
    def descales(self) -> dict[str, Any]:
        return {"scale_q": self.scale_q, "scale_k": self.scale_k, "scale_v": self.scale_v}

    @property
    def run_scales(self) -> dict[str, Any]:
        return {"q_scale": self.scale_q, "k_scale": self.scale_k, "v_scale": self.scale_v}


by_dtype = pytest.mark.parametrize("dtype", UNITS)
by_form = pytest.mark.parametrize("form", ["number", "heads"])


@by_dtype
@by_form
def test_a_prompt_is_attention_of_the_numbers_it_stands_for(dtype: str, form: str) -> None:
    drawn = Drawn(1, dtype, form, 9, 20)
    exact, exact_lse = reference.attention(*drawn.real, causal=True)
    options = {**drawn.descales, "causal": True, "return_lse": True}
    out, lse = cupyattn.single_prefill_with_kv_cache(*drawn.arrays, o_dtype="float32", **options)
    assert np.abs(out - exact).max() < 1e-5
    assert np.abs(lse - exact_lse).max() < 1e-5
    out, _ = cupyattn.single_prefill_with_kv_cache(*drawn.arrays, **options)
    assert out.dtype == ml_dtypes.bfloat16


@by_dtype
def test_a_decode_takes_them(dtype: str) -> None:
    drawn = Drawn(2, dtype, "number", 1, 33)
    exact, _ = reference.attention(*drawn.real)
    out = cupyattn.single_decode_with_kv_cache(drawn.q[0], drawn.k, drawn.v, **drawn.run_scales)
    assert out.dtype == ml_dtypes.bfloat16
    assert np.abs(out.astype(np.float64) - exact[0]).max() < 1e-2


@by_dtype
@by_form
@pytest.mark.parametrize("is_paged", [False, True])
def test_batches_take_them(dtype: str, form: str, is_paged: bool) -> None:
    drawn, page_size = Drawn(3, dtype, form, 12, 48), 16
    qo_indptr, kv_lens = np.array([0, 5, 12], np.int32), (32, 16)
    q_type, kv_type = drawn.q.dtype, drawn.v.dtype
    workspace = np.zeros(1 << 22, np.uint8)
    wrapper: Any
    if is_paged:
        wrapper = cupyattn.BatchPrefillWithPagedKVCacheWrapper(workspace)
        pages = [x.reshape(-1, page_size, KV_HEADS, DIM)[[1, 2, 0]] for x in drawn.arrays[1:]]
        indptr, indices = np.array([0, 2, 3], np.int32), np.array([2, 0, 1], np.int32)
        last = np.array([page_size, page_size], np.int32)
        places = qo_indptr, indptr, indices, last
        wrapper.plan(
            *places,
            HEADS,
            KV_HEADS,
            DIM,
            page_size,
            causal=True,
            q_data_type=q_type,
            kv_data_type=kv_type,
        )
        out = wrapper.run(drawn.q, tuple(pages), **drawn.run_scales)
    else:
        wrapper = cupyattn.BatchPrefillWithRaggedKVCacheWrapper(workspace)
        wrapper.plan(
            qo_indptr,
            np.array([0, 32, 48], np.int32),
            HEADS,
            KV_HEADS,
            DIM,
            causal=True,
            q_data_type=q_type,
            kv_data_type=kv_type,
        )
        out = wrapper.run(*drawn.arrays, **drawn.run_scales)
    assert out.dtype == ml_dtypes.bfloat16
    begin = 0
    for index, kv_len in enumerate(kv_lens):
        rows, keys = slice(*qo_indptr[index : index + 2]), slice(begin, begin + kv_len)
        begin += kv_len
        q, k, v = drawn.real
        exact, _ = reference.attention(q[rows], k[keys], v[keys], causal=True)
        assert np.abs(out[rows].astype(np.float64) - exact).max() < 2e-2


def test_an_output_of_8_bits_has_its_own_scale() -> None:
    drawn = Drawn(4, "float8_e4m3fn", "number", 9, 20)
    out = cupyattn.single_prefill_with_kv_cache(*drawn.arrays, **drawn.descales, o_dtype=E4M3)
    exact, _ = reference.attention(*drawn.real)
    assert out.dtype == E4M3
    assert np.array_equal(out.view(np.uint8), reference.to_fp8(exact, 1.0, E4M3).view(np.uint8))


# --- doors of other libraries ---


class Batch:
    """Two requests of e4m3 with FlashAttention-3's descales, [batch, KV heads]."""

    def __init__(self) -> None:
        rng = np.random.default_rng(5)
        self.q, self.k, self.v = (
            numbers(rng, "float8_e4m3fn", 2, n, heads, DIM)
            for n, heads in ((9, HEADS), (20, KV_HEADS), (20, KV_HEADS))
        )
        self.descales = {
            f"{name}_descale": rng.uniform(0.5, 2, (2, KV_HEADS)).astype(np.float32)
            for name in "qkv"
        }

    def check(self, out: np.ndarray, with_descales: bool = True) -> None:
        """out [2, 9, heads, head_dim] of causal attention, rounded to bfloat16."""
        assert out.dtype == ml_dtypes.bfloat16
        for i in range(2):
            arrays = [self.q[i], self.k[i], self.v[i]]
            if with_descales:
                arrays = [
                    real(x, np.repeat(scale[i], x.shape[1] // KV_HEADS))
                    for x, scale in zip(arrays, self.descales.values(), strict=True)
                ]
            exact, _ = reference.attention(*arrays, causal=True)
            assert (np.abs(out[i].astype(np.float64) - exact) <= 2**-8 * np.abs(exact) + 1e-6).all()

    @property
    def offsets(self) -> tuple[np.ndarray, np.ndarray]:
        return np.array([0, 9, 18], np.int32), np.array([0, 20, 40], np.int32)


def test_flash_attention_takes_descales_by_request() -> None:
    from cupyattn import flash_attn, flash_attn_interface

    batch = Batch()
    arrays = batch.q, batch.k, batch.v
    for library in (flash_attn, flash_attn_interface):
        batch.check(library.flash_attn_func(*arrays, causal=True, **batch.descales))
    lens = np.array([20, 20], np.int32)
    batch.check(
        flash_attn.flash_attn_with_kvcache(
            *arrays, cache_seqlens=lens, causal=True, **batch.descales
        )
    )
    rows = [x.reshape(-1, *x.shape[2:]) for x in arrays]
    out = flash_attn.flash_attn_varlen_func(
        *rows, *batch.offsets, 9, 20, causal=True, **batch.descales
    )
    batch.check(out.reshape(2, 9, HEADS, DIM))


def test_trtllm_takes_them() -> None:
    batch = Batch()
    pages = np.stack([batch.k, batch.v], 1).swapaxes(2, 3)
    table, lens = np.array([[0], [1]], np.int32), np.array([20, 20], np.int32)
    out = cupyattn.trtllm_batch_context_with_kv_cache(
        batch.q.reshape(-1, HEADS, DIM),
        pages,
        np.zeros(1 << 22, np.uint8),
        table,
        lens,
        9,
        20,
        DIM**-0.5,
        1.0,
        2,
        *batch.offsets,
    )
    batch.check(out.reshape(2, 9, HEADS, DIM), with_descales=False)
