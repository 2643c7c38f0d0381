"""TensorRT-LLM's calls: chunks of keys, pages of K and V apart, softmax statistics, scales."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from helpers import batches
from helpers.batches import WORKSPACE
from helpers.fmha_calls import LAYOUTS, Chunked

import cupyattn
from cupyattn.core import dtypes
from cupyattn.errors import ArgumentError


def int32(values: Any) -> np.ndarray:
    return np.asarray(values, np.int32)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("chunk", [0, 7, 32])
def test_trtllm_fmha_v2_prefill_of_chunks_and_of_pages_apart(layout: str, chunk: int) -> None:
    case = Chunked(chunk, layout, chunk)
    o, lse = case.expected()
    got = case(WORKSPACE, return_lse=True)
    np.testing.assert_allclose(got[0], o, rtol=2e-3, atol=2e-3)
    np.testing.assert_allclose(got[1], lse, rtol=1e-5, atol=1e-5)
    out, stats = case(WORKSPACE, save_softmax_stats=True)
    np.testing.assert_array_equal(out, got[0])
    assert stats.shape == (*lse.shape, 2) and stats.dtype == np.float32
    found = stats[..., 0] + np.log(stats[..., 1])
    np.testing.assert_allclose(found, lse * math.log(2), rtol=1e-5, atol=1e-5)


def test_softmax_stats_under_a_cap_and_of_rows_without_keys() -> None:
    """Sums under a cap are apart from any maximum, whose unit FlashInfer changes there."""
    case = Chunked(3, "CONTIGUOUS_Q_KV", 0)
    capped = {"logits_soft_cap_scale": 20.0}
    _, stats = case(WORKSPACE, save_softmax_stats=True, **capped)
    _, lse = case(WORKSPACE, return_lse=True, **capped)
    assert not stats[..., 0].any()
    np.testing.assert_allclose(np.log2(stats[..., 1]), lse, rtol=1e-5, atol=1e-5)
    case.lens[1][:] = 0
    for options in ({}, capped):
        _, stats = case(WORKSPACE, save_softmax_stats=True, **options)
        with np.errstate(divide="ignore"):
            assert np.isneginf(stats[..., 0] + np.log(stats[..., 1])).all()


def test_pages_of_v_that_do_not_lie_behind_those_of_k() -> None:
    case = Chunked(1, "own pages", 0)
    (q, (k, v)), table = case.qkv()
    for pages in ((v, k), (k, v[..., :32]), (k, v.copy()[1:].astype(np.float16)), (k, None)):
        case.qkv = lambda pages=pages: ((q, pages), table)  # type: ignore[method-assign]
        with pytest.raises(ArgumentError, match=r"qkv \(V\)|block_tables"):
            case(WORKSPACE)


def test_fp8_values_beside_keys_of_16_bits() -> None:
    b = batches.make([3, 1, 4], [7, 2, 11], 4)
    k, v = b.ragged()
    narrow = v.astype(dtypes.float8_e4m3fn.numpy)

    def call(value: np.ndarray) -> np.ndarray:
        return cupyattn.trtllm_ragged_attention_deepseek(
            *(b.q, k, value, None, int32(b.kv_len), 4, 11, 0.3, 0.5, 1.0, 3, -1),
            *(b.qo_indptr, b.kv_indptr, None, True, False),
        )

    np.testing.assert_array_equal(call(narrow), call(narrow.astype(np.float16)))
    with pytest.raises(ArgumentError, match="value: dtype"):
        call(v.astype(np.float32))


def test_a_scale_of_the_logits_in_base_2_counts_in_place_of_the_other() -> None:
    b = batches.make([1] * 3, [9, 8, 7], 4)
    table = np.zeros((3, 3), np.int32)
    for row, begin, end in zip(table, b.indptr, b.indptr[1:], strict=False):
        row[: end - begin] = b.indices[begin:end]
    given = (b.q, b.one_tensor(), WORKSPACE, table, int32(b.kv_len), 9)
    call = cupyattn.trtllm_batch_decode_with_kv_cache
    want = call(*given, bmm1_scale=0.2, kv_layout="NHD")
    scale = 0.2 * math.log2(math.e)
    for form in (scale, np.float32(scale), np.full(1, scale, np.float32), np.array(scale, "f4")):
        got = call(*given, bmm1_scale=7.0, kv_layout="NHD", bmm1_scale_log2=form)
        np.testing.assert_allclose(got, want, rtol=1e-3, atol=1e-4)
    for bad in ("0.3", np.ones(2, np.float32), np.ones(1), math.nan):
        with pytest.raises(ArgumentError, match="bmm1_scale_log2"):
            call(*given, kv_layout="NHD", bmm1_scale_log2=bad)
