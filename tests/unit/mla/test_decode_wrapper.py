"""FlashInfer's older wrapper for decode over a latent cache, and its records of dimensions."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import cupyattn
from cupyattn import mla
from cupyattn.errors import ArgumentError, PlanError, UnsupportedError

PAGE, HEADS = 4, 3
INDPTR, LAST = np.array([0, 3, 3, 5], np.int32), np.array([2, 0, 4], np.int32)
KV_LEN = np.array([10, 0, 8], np.int32)


def arrays(seed: int = 0) -> tuple[np.ndarray, ...]:
    rng = np.random.default_rng(seed)
    ids = rng.permutation(7)[:5].astype(np.int32)
    shapes = (3, HEADS, 512), (3, HEADS, 64), (7, PAGE, 512), (7, PAGE, 64)
    return ids, *(rng.normal(0, 0.3, shape).astype(np.float16) for shape in shapes)


def planned(**changes: Any) -> Any:
    w = cupyattn.BatchDecodeMlaWithPagedKVCacheWrapper(None, **changes.pop("make", {}))
    given = {"indptr": INDPTR, "indices": arrays()[0], "last_page_len": LAST, "num_qo_heads": HEADS}
    given |= {"head_dim_compressed_kv": 512, "page_size": PAGE, "sm_scale": 0.1}
    w.plan(**given | changes)
    return w


def expected(scale: float) -> Any:
    ids, *parts = arrays()
    w = cupyattn.BatchMLAPagedAttentionWrapper(None)
    w.plan(np.arange(4), INDPTR, ids, KV_LEN, HEADS, 512, 64, PAGE, False, scale, "float16")
    return w.run(*parts, return_lse=True)


def test_it_is_the_newer_wrapper_in_other_words() -> None:
    parts = arrays()[1:]
    w = planned(rope_theta=1e4, make={"use_tensor_cores": True})
    assert w.use_tensor_cores and not w.is_cuda_graph_enabled
    for got, want in zip(w.run(*parts, return_lse=True), expected(0.1), strict=True):
        np.testing.assert_array_equal(got, want)
    np.testing.assert_array_equal(w.forward(*parts), expected(0.1)[0])
    scaled = w.run(*parts, q_scale=2.0, k_scale=0.5, v_scale=3.0)
    np.testing.assert_allclose(scaled, 3.0 * expected(0.1)[0], rtol=2e-3, atol=1e-4)
    for got, want in zip(w.run_return_lse(*parts, k_scale=2.0), expected(0.2), strict=True):
        np.testing.assert_allclose(got, want, rtol=2e-3, atol=1e-4)


def test_a_window_leaves_the_last_keys() -> None:
    ids, *parts = arrays()
    w = planned(window_left=3)
    last = cupyattn.BatchMLAPagedAttentionWrapper(None)
    q_nope, q_pe, ckv, kpe = parts
    # The last four keys lie in two pages, and in the last one.
    first = ids[1] * PAGE + np.arange(2, 4), ids[2] * PAGE + np.arange(2)
    rows = np.concatenate([*first, ids[4] * PAGE + np.arange(4)])
    pages = [x.reshape(-1, 1, x.shape[-1])[rows] for x in (ckv, kpe)]
    indptr, ids = np.array([0, 4, 4, 8], np.int32), np.arange(8, dtype=np.int32)
    lens = np.array([4, 0, 4], np.int32)
    last.plan(np.arange(4), indptr, ids, lens, HEADS, 512, 64, 1, False, 0.1, "float16")
    wanted = last.run(q_nope, q_pe, *pages, return_lse=True)
    for got, want in zip(w.run(*parts, return_lse=True), wanted, strict=True):
        np.testing.assert_allclose(got, want, rtol=2e-3, atol=1e-4)


def test_buffers_of_a_graph_are_filled() -> None:
    indptr, ids, last = np.zeros(4, np.int32), np.zeros(9, np.int32), np.zeros(3, np.int32)
    names = ("paged_kv_indptr_buffer", "paged_kv_indices_buffer", "paged_kv_last_page_len_buffer")
    buffers = dict(zip(names, (indptr, ids, last), strict=True))
    w = planned(make={"use_cuda_graph": True, **buffers})
    np.testing.assert_array_equal(indptr, INDPTR)
    np.testing.assert_array_equal(w.run(*arrays()[1:]), expected(0.1)[0])
    with pytest.raises(PlanError, match="2 requests, but the buffers"):
        w.plan(INDPTR[:3], arrays()[0], LAST[:2], HEADS, 512, PAGE, 0.1)
    with pytest.raises(ArgumentError, match="paged_kv_last_page_len_buffer"):
        cupyattn.BatchDecodeMlaWithPagedKVCacheWrapper(None, True)


@pytest.mark.parametrize(
    ("changes", "kind", "words"),
    [
        ({"window_left": -3}, ArgumentError, "window_left: got -3"),
        ({"logits_soft_cap": 3.0}, UnsupportedError, "logits_soft_cap: latent"),
        ({"last_page_len": LAST[:2]}, ArgumentError, r"last_page_len: shape is \[2\]"),
        ({"last_page_len": LAST + 1}, ArgumentError, "request 2 has 5 tokens in its last page"),
        ({"indptr": INDPTR[::-1].copy()}, ArgumentError, "indptr: falls"),
        ({"sm_scale": "x"}, ArgumentError, "sm_scale: got 'x'"),
        ({"head_dim_compressed_kv": 100}, UnsupportedError, "100 and 64 are not supported"),
    ],
)
def test_bad_plans(changes: dict[str, Any], kind: type[Exception], words: str) -> None:
    with pytest.raises(kind, match=words):
        planned(**changes)


def test_records_of_dimensions() -> None:
    head = mla.supported_mla_head_dimensions[0]
    assert head == mla.deepseek_mla_dimensions == mla.MLAHeadDimensions(128, 64, 128, 512)
    assert [x.num_heads for x in mla.supported_mla_layer_dimensions] == [128, 64, 32]
    for dims in mla.supported_mla_head_dimensions:
        sizes = dims.kv_lora_rank, dims.qk_rope_head_dim
        w = cupyattn.BatchMLAPagedAttentionWrapper(None)
        w.plan(np.arange(4), INDPTR, arrays()[0], KV_LEN, HEADS, *sizes, PAGE, False, 0.1)
