"""Queries of 8 bits on the CPU, against the reference of the same numbers in float64."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from helpers import needles
from helpers.token_blocks import DIM, E4M3, HEADS, KV_HEADS, UNITS, Blocks, numbers, real

import cupyattn
from cupyattn import reference


def scales(rng: np.random.Generator, form: str, unit: float, heads: int) -> Any:
    """A number or one for each head."""
    return unit if form == "number" else (unit * rng.uniform(0.5, 2, heads)).astype(np.float32)


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


# --- scales of blocks, and of requests ---


by_size = pytest.mark.parametrize("size", [64, 128])


@by_dtype
@by_size
@pytest.mark.parametrize("is_paged", [False, True])
def test_blocks_of_tokens_have_scales(dtype: str, size: int, is_paged: bool) -> None:
    drawn = Blocks(6, dtype, size)
    if is_paged:
        wrapper, pages, scales = drawn.paged(128)
        out, lse = wrapper.run(drawn.q, pages, return_lse=True, **drawn.arguments(**scales))
    else:
        wrapper = drawn.ragged()
        arrays = drawn.q, drawn.k, drawn.v
        out, lse = wrapper.run(*arrays, return_lse=True, **drawn.arguments())
    drawn.check(out, lse)


@pytest.mark.parametrize("options", [{"logits_soft_cap": 2.0}, {"pos_encoding_mode": "ALIBI"}])
def test_scales_of_blocks_come_before_all_options(options: dict[str, Any]) -> None:
    drawn = Blocks(8, "int8", 64)
    arrays = drawn.q, drawn.k, drawn.v
    sinks = np.array([0.5, -1, 2, 0], np.float32)
    run = drawn.ragged(**options).run
    out, lse = run(*arrays, return_lse=True, sinks=sinks, **drawn.arguments())
    drawn.check(out, lse, sinks=sinks, **options)


@by_dtype
def test_one_request_has_no_place_for_others(dtype: str) -> None:
    drawn = Blocks(9, dtype, 64)
    qo_len, kv_len = drawn.QO_LENS[0], drawn.KV_LENS[0]
    scales = {
        f"{name}_block_scales": x[: -(-n // 64)]
        for name, x, n in (
            ("q", drawn.of_q, qo_len),
            ("k", drawn.of_k, kv_len),
            ("v", drawn.of_v, kv_len),
        )
    }
    out, lse = cupyattn.single_prefill_with_kv_cache(
        drawn.q[:qo_len],
        drawn.k[:kv_len],
        drawn.v[:kv_len],
        causal=True,
        o_dtype="float32",
        return_lse=True,
        k_mean=drawn.mean[:1],
        **scales,
    )
    exact, exact_lse = reference.attention(*drawn.real(0), causal=True)
    assert np.abs(out - exact).max() < 1e-5
    assert np.abs(lse - exact_lse).max() < 1e-4


def test_they_multiply_with_scales_of_requests_and_heads() -> None:
    drawn = Blocks(10, "float8_e4m3fn", 64, has_mean=False)
    rng = np.random.default_rng(11)
    of_heads = {
        f"{name}_scale": rng.uniform(0.5, 2, (2, heads)).astype(np.float32)
        for name, heads in (("q", HEADS), ("k", KV_HEADS), ("v", KV_HEADS))
    }
    arrays = drawn.q, drawn.k, drawn.v
    out = drawn.ragged().run(*arrays, **of_heads, **drawn.arguments(k_mean=None))
    for index in range(2):
        exact, _ = reference.attention(
            *(
                real(x, scale[index])
                for x, scale in zip(drawn.real(index), of_heads.values(), strict=True)
            ),
            causal=True,
        )
        assert np.abs(out[slice(*drawn.qo_indptr[index : index + 2])] - exact).max() < 1e-4


@by_dtype
@by_size
def test_what_quantize_qkv_gives_is_what_attention_takes(dtype: str, size: int) -> None:
    rng = np.random.default_rng(14)
    lens = np.array([0, 70, 201], np.int32)
    q, k, v = (rng.standard_normal((201, n, DIM)).astype(np.float16) for n in (HEADS, KV_HEADS, 2))
    k += 3 * rng.standard_normal((KV_HEADS, DIM)).astype(np.float16)
    mean = np.stack([k[a:b].mean(0, dtype=np.float32) for a, b in ((0, 70), (70, 201))])
    stored = cupyattn.quantize_qkv(
        q, k, v, qo_indptr=lens, kv_indptr=lens, dtype=dtype, block_size=size, k_mean=mean
    )
    wrapper = cupyattn.BatchPrefillWithRaggedKVCacheWrapper(np.zeros(1 << 23, np.uint8))
    sizes = lens, lens, HEADS, KV_HEADS, DIM
    types = {"q_data_type": stored.q.dtype, "kv_data_type": stored.v.dtype}
    wrapper.plan(*sizes, causal=True, o_data_type="float32", **types)
    scales = {
        name: getattr(stored, name)
        for name in ("q_block_scales", "k_block_scales", "v_block_scales", "k_mean")
    }
    arrays = stored.q, stored.k, stored.v
    out, lse = wrapper.run(*arrays, return_lse=True, block_size=size, **scales)
    for rows in (slice(0, 70), slice(70, 201)):
        exact, exact_lse = reference.attention(q[rows], k[rows], v[rows], causal=True)
        # Rounding of e4m3 is 2.6 % of a number in the root mean square: of q, k and v 4.5 % of the
        # output, and by q times the mean of k (a product of 3 sqrt(64) / 8 there) 0.11 of the LSE,
        # which would be off by 4 without the mean.
        assert np.sqrt(np.square(out[rows] - exact).mean() / np.square(exact).mean()) < 0.06
        assert np.sqrt(np.square(lse[rows] - exact_lse).mean()) < 0.15


WRONG_BLOCKS: dict[str, tuple[dict[str, Any], str]] = {
    "size": ({"block_size": 32}, "block_size: got 32; wanted 64 or 128"),
    "too few": (
        {"q_block_scales": np.ones((5, HEADS), np.float32)},
        "q_block_scales: shape is .*; wanted at least 6 rows, for 201 tokens in blocks of 64 of 2",
    ),
    "heads": ({"k_block_scales": np.ones((11, HEADS), np.float32)}, "k_block_scales: .* heads"),
    "dtype": ({"v_block_scales": np.ones((11, KV_HEADS))}, "v_block_scales: dtype float64 is not"),
    "mean": ({"k_mean": np.ones((KV_HEADS, DIM), np.float32)}, "k_mean: shape .* wanted 3"),
}


@pytest.mark.parametrize(("changes", "words"), WRONG_BLOCKS.values(), ids=WRONG_BLOCKS)
def test_wrong_scales_of_blocks(changes: dict[str, Any], words: str) -> None:
    drawn = Blocks(12, "int8", 64)
    with pytest.raises(cupyattn.ArgumentError, match=words):
        drawn.ragged().run(drawn.q, drawn.k, drawn.v, **drawn.arguments(**changes))


def test_blocks_are_of_queries_of_8_bits_and_whole_in_a_page() -> None:
    drawn, rows = Blocks(13, "int8", 128), np.zeros((9, HEADS, DIM), np.float16)
    with pytest.raises(
        cupyattn.ArgumentError, match="q_block_scales: given with q of dtype float1"
    ):
        cupyattn.single_prefill_with_kv_cache(rows, rows, rows, q_block_scales=drawn.of_q)
    wrapper, pages, scales = drawn.paged(128)
    arguments = drawn.arguments(**scales)
    wrapper.run(drawn.q, pages, **arguments)
    small = cupyattn.BatchPrefillWithPagedKVCacheWrapper(np.zeros(1 << 23, np.uint8))
    indptr, last = np.array([0, 1, 2], np.int32), np.array([16, 16], np.int32)
    drawn.plan(small, (drawn.qo_indptr, indptr, indptr[:2], last), 16)
    pages = tuple(x[:, :16] for x in pages)
    with pytest.raises(cupyattn.ArgumentError, match="block_size: got 128 with pages of 16"):
        small.run(drawn.q, pages, **arguments)


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


def test_cudnn_takes_them() -> None:
    batch = Batch()
    pages = [x.swapaxes(1, 2) for x in (batch.k, batch.v)]
    lens = [np.array([n, n], np.int32) for n in (9, 20)]
    out, _ = cupyattn.cudnn_batch_prefill_with_kv_cache(
        batch.q.reshape(-1, HEADS, DIM),
        *pages,
        DIM**-0.5,
        np.zeros(1 << 22, np.uint8),
        max_token_per_sequence=9,
        max_sequence_kv=20,
        actual_seq_lens_q=lens[0],
        actual_seq_lens_kv=lens[1],
        block_tables=np.array([[0], [1]], np.int32),
        batch_offsets_q=np.array([0, 9, 18], np.int32),
        batch_offsets_units="tokens",
        causal=True,
        return_lse=False,
        q_scale=0.5,
        k_scale=2.0,
        v_scale=1.0,
    )
    batch.check(out.reshape(2, 9, HEADS, DIM), with_descales=False)


def test_xqa_takes_them() -> None:
    batch, scale = Batch(), 0.5
    out = cupyattn.xqa(
        batch.q[:, -1:],
        *(x.astype(E4M3) for x in (batch.k, batch.v)),
        np.array([[0], [1]], np.int32),
        np.array([[20], [20]], np.uint32),
        None,
        np.zeros(1 << 22, np.uint8),
        num_kv_heads=KV_HEADS,
        page_size=20,
        q_scale=2.0,
        kv_scale=scale,
    )
    assert out.dtype == ml_dtypes.bfloat16
    for i in range(2):
        exact, _ = reference.attention(batch.q[i, -1:], batch.k[i], batch.v[i])
        own = out[i].reshape(HEADS, DIM).astype(np.float64)
        assert (np.abs(own - scale * exact[0]) <= 2**-8 * np.abs(exact[0]) + 1e-6).all()


def test_dot_product_attention_takes_them() -> None:
    batch = Batch()
    out = cupyattn.dot_product_attention(batch.q, batch.k, batch.v)
    for i in range(2):
        exact, _ = reference.attention(batch.q[i], batch.k[i], batch.v[i])
        assert out.dtype == ml_dtypes.bfloat16
        assert (np.abs(out[i].astype(np.float64) - exact) <= 2**-8 * np.abs(exact) + 1e-6).all()


@pytest.mark.parametrize("keys", [300, 4096])
def test_needles_are_found(keys: int) -> None:
    """One key among many has what a row asks for, whatever eight bits leave of the others."""
    stack = needles.haystack(rows=3, keys=keys)
    assert needles.shares_found(stack) == {"prompt": 1.0, "append": 1.0, "decode": 1.0}
    stack.codes[1, 2] *= -1
    assert needles.shares_found(stack)["append"] == 23 / 24
