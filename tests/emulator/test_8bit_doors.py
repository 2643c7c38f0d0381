"""Queries of e4m3 through the doors of other libraries, by the kernel that multiplies them."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from helpers import needles

import cupyattn
from cupyattn import flash_attn, reference
from cupyattn.choose.candidates import only_form
from cupyattn.core import dtypes
from cupyattn.core.device import NO_GPU
from cupyattn.core.problem import AttentionProblem
from cupyattn.launch.tiles.config import Target
from cupyattn.launch.tiles.forms import AS_THEY_ARE, forms_of
from emulator import gpu

E4M3 = ml_dtypes.float8_e4m3fn
HEADS, KV_HEADS, DIM, PAGE = 4, 2, 128, 16
QO_LEN, KV_LEN = 9, 140
# Probabilities and the output are rounded to e4m3 and bfloat16: 2.4 % measured on the emulator.
LIMIT = 0.03


def is_served() -> bool:
    problem = AttentionProblem(
        dtypes.float8_e4m3fn, dtypes.float8_e4m3fn, dtypes.bfloat16, DIM, DIM, prescale_logits=True
    )
    forms = forms_of(problem, Target(NO_GPU.arch, NO_GPU.max_smem_per_block))
    return forms[0].name == AS_THEY_ARE


pytestmark = pytest.mark.skipif(not is_served(), reason="no kernel multiplies e4m3 queries")


@pytest.fixture(autouse=True)
def as_they_are() -> Iterator[None]:
    """Also where another form is served sooner."""
    with only_form(AS_THEY_ARE):
        yield


class Batch:
    """Two requests with FlashAttention-3's descales, [batch, KV heads]; also as rows and pages."""

    def __init__(self) -> None:
        rng = np.random.default_rng(5)
        self.arrays = tuple(
            rng.standard_normal((2, n, heads, DIM)).astype(E4M3)
            for n, heads in ((QO_LEN, HEADS), (KV_LEN, KV_HEADS), (KV_LEN, KV_HEADS))
        )
        self.descales = {
            f"{name}_descale": rng.uniform(0.5, 2, (2, KV_HEADS)).astype(np.float32)
            for name in "qkv"
        }
        self.rows = tuple(x.reshape(-1, *x.shape[2:]) for x in self.arrays)
        self.offsets = np.array([0, QO_LEN, 2 * QO_LEN], np.int32)
        self.kv_offsets = np.array([0, KV_LEN, 2 * KV_LEN], np.int32)
        self.lens = np.array([KV_LEN, KV_LEN], np.int32)
        num_pages = -(-KV_LEN // PAGE)
        self.table = np.arange(2 * num_pages, dtype=np.int32).reshape(2, num_pages)
        gap = np.zeros((2, num_pages * PAGE - KV_LEN, KV_HEADS, DIM), E4M3)
        self.pages = tuple(
            np.concatenate([x, gap], 1).reshape(-1, PAGE, KV_HEADS, DIM) for x in self.arrays[1:]
        )

    def check(self, out: np.ndarray, has_descales: bool = True) -> None:
        assert out.dtype == ml_dtypes.bfloat16
        for i, own in enumerate(out.reshape(2, QO_LEN, HEADS, DIM).astype(np.float64)):
            arrays = [x[i].astype(np.float64) for x in self.arrays]
            if has_descales:
                arrays = [
                    x * np.repeat(scale[i], x.shape[1] // KV_HEADS)[:, None]
                    for x, scale in zip(arrays, self.descales.values(), strict=True)
                ]
            exact, _ = reference.attention(*arrays, causal=True)
            assert np.square(own - exact).mean() < LIMIT**2 * np.square(exact).mean()


@pytest.fixture
def emulated() -> Iterator[Any]:
    with gpu.plugged_in(num_sms=8) as found:
        yield found
        assert "copy_rows" not in {launch.name for launch in found.launches}  # nothing is widened
        assert "prefill_sm90" in {launch.name for launch in found.launches}


def test_flash_attention(emulated: Any) -> None:
    batch = Batch()
    out = flash_attn.flash_attn_func(*batch.arrays, causal=True, **batch.descales)
    batch.check(out)
    offsets = batch.offsets, batch.kv_offsets
    varlen = flash_attn.flash_attn_varlen_func(
        *batch.rows, *offsets, QO_LEN, KV_LEN, causal=True, **batch.descales
    )
    assert np.array_equal(varlen.reshape(out.shape), out)
    of_cache = flash_attn.flash_attn_with_kvcache(
        batch.arrays[0],
        *batch.pages,
        cache_seqlens=batch.lens,
        block_table=batch.table,
        causal=True,
        **batch.descales,
    )
    assert np.array_equal(of_cache, out)


def check_one_launch(**facts: Any) -> None:
    """Blocks find their items, since descales of requests and heads are read where they lie."""
    lengths = (33, 0, 200, 64, 1)
    rng, offsets = np.random.default_rng(8), np.cumsum([0, *lengths]).astype(np.int32)
    q, k, v = (
        rng.standard_normal((sum(lengths), heads, DIM)).astype(E4M3)
        for heads in (HEADS, KV_HEADS, KV_HEADS)
    )
    descales = [rng.uniform(0.5, 2, (len(lengths), KV_HEADS)).astype(np.float32) for _ in range(3)]
    names = ("q_descale", "k_descale", "v_descale")
    with gpu.plugged_in(**{"num_sms": 8} | facts) as found, only_form(AS_THEY_ARE):
        for _ in range(2):  # the second finds its counter as the first left it
            out = flash_attn.flash_attn_varlen_func(
                *(q, k, v, offsets, offsets, max(lengths), max(lengths)),
                causal=True,
                **dict(zip(names, descales, strict=True)),
            )
        assert [launch.name for launch in found.launches] == 2 * ["prefill_sm90"]
    for i, (first, end) in enumerate(pairwise(offsets)):
        scaled = [
            x[first:end].astype(np.float64) * np.repeat(scale[i], x.shape[1] // KV_HEADS)[:, None]
            for x, scale in zip((q, k, v), descales, strict=True)
        ]
        exact, _ = reference.attention(*scaled, causal=True)
        error = np.square(out[first:end].astype(np.float64) - exact).sum()
        assert error <= LIMIT**2 * np.square(exact).sum()


def test_prompts_with_descales_are_one_launch() -> None:
    check_one_launch()


def test_trtllm(emulated: Any) -> None:
    batch = Batch()
    out = cupyattn.trtllm_batch_context_with_kv_cache(
        batch.rows[0],
        np.stack(batch.pages, 1).swapaxes(2, 3).copy(),
        np.zeros(1 << 24, np.uint8),
        batch.table,
        batch.lens,
        QO_LEN,
        KV_LEN,
        DIM**-0.5,
        1.0,
        2,
        batch.offsets,
        batch.kv_offsets,
    )
    batch.check(out, has_descales=False)


def test_planned_batches_with_scales_of_requests(emulated: Any) -> None:
    batch = Batch()
    wrapper = cupyattn.BatchPrefillWithRaggedKVCacheWrapper(np.zeros(1 << 24, np.uint8))
    wrapper.plan(
        batch.offsets,
        batch.kv_offsets,
        HEADS,
        KV_HEADS,
        DIM,
        causal=True,
        q_data_type=E4M3,
        kv_data_type=E4M3,
    )
    of_q, of_k, of_v = batch.descales.values()
    of_q = np.repeat(of_q, HEADS // KV_HEADS, axis=1)
    batch.check(wrapper.run(*batch.rows, q_scale=of_q, k_scale=of_k, v_scale=of_v))


def test_needles_are_found() -> None:
    """By whichever kernels are soonest: few rows are widened."""
    stack = needles.haystack(rows=4, keys=700)
    with gpu.plugged_in(num_sms=8):
        assert needles.shares_found(stack) == {"prompt": 1.0, "append": 1.0, "decode": 1.0}
