"""Queries of e4m3 through doors without a plan, with the scales that each has for them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from golden.cards import plugged_in

import cupyattn
from cupyattn import reference

E4M3 = ml_dtypes.float8_e4m3fn
HEADS, KV_HEADS, DIM, PAGE = 8, 2, 128, 16
LENS = np.array([100, 77], np.int32)
TABLE = np.arange(14, dtype=np.int32).reshape(2, 7)
SCALE, OUTPUT_SCALE = 0.05, 1.5


def drawn(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng((seed, *shape)).standard_normal(shape, np.float32).astype(E4M3)


class Pages:
    """A row for each of two requests, over pages [pages, KV heads, tokens, head dim]."""

    def __init__(self) -> None:
        self.q = drawn(2, HEADS, DIM)
        self.k, self.v = (drawn(14, KV_HEADS, PAGE, DIM, seed=i) for i in (1, 2))
        self.space = np.zeros(1 << 24, np.uint8)

    def expected(self) -> np.ndarray:
        rows = []
        for q, pages, n in zip(self.q, TABLE, LENS, strict=True):
            k, v = (
                x[pages].transpose(0, 2, 1, 3).reshape(-1, KV_HEADS, DIM)[:n].astype(np.float64)
                for x in (self.k, self.v)
            )
            out, _ = reference.attention(q[None].astype(np.float64), k, v, sm_scale=SCALE)
            rows.append(OUTPUT_SCALE * out[0])
        return np.stack(rows)


def trtllm(pages: Pages, as_given: Callable[[float], Any]) -> np.ndarray:
    return cupyattn.trtllm_batch_decode_with_kv_cache(
        pages.q,
        (pages.k, pages.v),
        pages.space,
        TABLE,
        LENS,
        PAGE * 7,
        bmm1_scale=as_given(SCALE),
        bmm2_scale=as_given(OUTPUT_SCALE),
    )


def xqa(pages: Pages, as_given: Callable[[float], Any]) -> np.ndarray:
    out = np.zeros((2, 1, HEADS, DIM), ml_dtypes.bfloat16)
    of_output = 0.5  # kv_scale scales the logits and the output
    cupyattn.xqa(
        pages.q[:, None],
        pages.k,
        pages.v,
        TABLE,
        LENS,
        out,
        workspace_buffer=pages.space,
        kv_layout="HND",
        q_scale=as_given(SCALE * DIM**0.5 / of_output),
        kv_scale=as_given(of_output),
        rcp_out_scale=OUTPUT_SCALE / of_output,
    )
    return out[:, 0]


def cudnn(pages: Pages, as_given: Callable[[float], Any]) -> np.ndarray:
    out = cupyattn.cudnn_batch_decode_with_kv_cache(
        pages.q,
        pages.k,
        pages.v,
        as_given(SCALE),
        pages.space,
        max_sequence_kv=PAGE * 7,
        actual_seq_lens_kv=LENS,
        block_tables=TABLE,
    )
    return OUTPUT_SCALE * out.astype(np.float32)  # it has no scale of values


DOORS = [trtllm, xqa, cudnn]
GIVEN = [float, lambda x: np.array([x], np.float32)]


@pytest.mark.parametrize("as_given", GIVEN, ids=["number", "array"])
@pytest.mark.parametrize("door", DOORS)
def test_decode(door: Any, as_given: Callable[[float], Any]) -> None:
    pages = Pages()
    np.testing.assert_allclose(
        door(pages, as_given).astype(np.float32), pages.expected(), 2**-7, 1e-3
    )


@pytest.mark.parametrize("door", DOORS)
def test_decode_has_kernels(door: Any) -> None:
    with plugged_in("h100") as card:
        card.begin()
        door(Pages(), float)
        assert any("sm" in name for name, _ in card.loaded)


def test_ragged_prompts_with_factors() -> None:
    rows = np.array([0, 30, 50], np.int32)
    q, k, v = (drawn(50, h, DIM, seed=3) for h in (HEADS, KV_HEADS, KV_HEADS))
    out, _ = cupyattn.cudnn_batch_prefill_with_kv_cache(
        q,
        k,
        v,
        SCALE,
        np.zeros(1 << 24, np.uint8),
        max_token_per_sequence=30,
        max_sequence_kv=30,
        actual_seq_lens_q=np.diff(rows),
        actual_seq_lens_kv=np.diff(rows),
        causal=True,
        return_lse=True,
        batch_offsets_q=rows,
        batch_offsets_k=rows,
        batch_offsets_units="tokens",
        q_scale=0.5,
        k_scale=2.0,
        v_scale=OUTPUT_SCALE,
    )
    for first, end in ((0, 30), (30, 50)):
        arrays = (x[first:end].astype(np.float64) for x in (q, k, v))
        want, _ = reference.attention(*arrays, sm_scale=SCALE, causal=True)
        np.testing.assert_allclose(
            out[first:end].astype(np.float32), OUTPUT_SCALE * want, 2**-7, 1e-3
        )


def test_dense_tensors() -> None:
    q, k, v = (drawn(1, 40, h, DIM, seed=4) for h in (HEADS, KV_HEADS, KV_HEADS))
    out = cupyattn.dot_product_attention(q, k, v, scale=SCALE, is_causal=True)
    want, _ = reference.attention(
        *(x[0].astype(np.float64) for x in (q, k, v)), sm_scale=SCALE, causal=True
    )
    assert out.dtype == ml_dtypes.bfloat16
    np.testing.assert_allclose(out[0].astype(np.float32), want, 2**-7, 1e-3)
