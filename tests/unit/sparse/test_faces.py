"""Other libraries' functions over lists and selections, on the CPU."""

from __future__ import annotations

import math
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from cupyattn import dsa_indexer, msa_ops, paged_mqa, reference, sparse, topk
from cupyattn.errors import ArgumentError, UnsupportedError

E4M3 = ml_dtypes.float8_e4m3fn


def offsets(*lengths: int) -> np.ndarray:
    return np.append(0, np.cumsum(lengths)).astype(np.int32)


@pytest.fixture
def pages() -> dict[str, Any]:
    """Two requests of 300 and 129 keys with two tokens each, K and V as halves of one array."""
    rng = np.random.default_rng(4)
    both = rng.standard_normal((6, 2, 128, 64)).astype(np.float32)
    return {
        "q": rng.standard_normal((4, 4, 32)).astype(np.float32),
        "k": both[..., :32],
        "v": both[..., 32:],
        "page_table": np.array([[0, 3, 1], [5, 2, 4]], np.int32),
        "seqused_k": np.array([300, 129], np.int32),
    }


def rows_of(pages: dict[str, Any], name: str) -> np.ndarray:
    """The keys or values of both requests, one after the other."""
    own = zip(pages["page_table"], pages["seqused_k"], strict=True)
    return np.concatenate(
        [pages[name][table].swapaxes(1, 2).reshape(-1, 2, 32)[:length] for table, length in own]
    )


def test_scores_choice_and_attention_of_msa(pages: dict[str, Any]) -> None:
    rng = np.random.default_rng(5)
    q_index = rng.standard_normal((4, 2, 32)).astype(np.float32)
    cu = offsets(2, 2)
    table = {name: pages[name] for name in ("page_table", "seqused_k")}
    scores = msa_ops.msa_proxy_score(q_index, pages["k"], cu, **table)
    assert scores.shape == (2, 3, 4)
    for token, seen in enumerate((299, 300, 128, 129)):
        keys = rows_of(pages, "k")[300 * (token // 2) :][:seen]
        for head in range(2):
            want = [
                (keys[b : b + 128, head] @ q_index[token, head]).max() for b in range(0, seen, 128)
            ]
            np.testing.assert_allclose(scores[head, : len(want), token], want, rtol=1e-5)
            assert np.isneginf(scores[head, len(want) :, token]).all()
    flat = msa_ops.msa_proxy_score(q_index, rows_of(pages, "k"), cu, offsets(300, 129))
    np.testing.assert_array_equal(flat, scores)
    one = msa_ops.msa_proxy_score(q_index, pages["k"], cu, **table, reduce_heads=True)
    np.testing.assert_array_equal(one, scores.max(0, keepdims=True))
    valid = np.array([3, 3, 1, 2], np.int32)
    lists = msa_ops.msa_topk_select(scores, 2, valid, force_end_blocks=1)
    assert lists.shape == (4, 2, 2) and (lists[:2, :, 1] == 2).all()
    np.testing.assert_array_equal(lists[2], [[0, -1]] * 2)
    own = np.ascontiguousarray(lists.swapaxes(0, 1))
    out, lse = msa_ops.msa_sparse_decode_attention(
        **pages, q2k_indices=own, seqlen_q=2, return_softmax_lse=True
    )
    want, want_lse = sparse.attend(
        pages["q"],
        (rows_of(pages, "k"), rows_of(pages, "v")),
        lists,
        kv_indptr=offsets(300, 129),
        granularity=128,
        return_lse=True,
    )
    np.testing.assert_allclose(out, want, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(lse, want_lse * math.log(2), rtol=1e-5)
    prompt = msa_ops.msa_sparse_attention(**pages, q2k_indices=own, cu_seqlens_q=cu, causal=True)
    np.testing.assert_array_equal(prompt, out)


def test_msa_attention_without_causality_sees_whole_blocks(pages: dict[str, Any]) -> None:
    own = np.tile(np.array([1], np.int32), (2, 4, 1))
    out = msa_ops.msa_sparse_attention(**pages, q2k_indices=own, cu_seqlens_q=offsets(2, 2))
    keys, values = (rows_of(pages, name) for name in "kv")
    want, _ = reference.attention(pages["q"][2:], keys[428:429], values[428:429])
    np.testing.assert_allclose(out[2:], want, rtol=1e-5)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"k_scale": 1.0}, "k_scale: is of keys in NVFP4"),
        ({"q_offset": 1}, "q_offset: is not supported"),
        ({"seqlen_q": 3}, "q: has 4 tokens of 2 requests"),
        ({"page_table": None, "seqused_k": None}, "got None; wanted the keys"),
        ({"q2k_indices": np.zeros((4, 2), np.int32)}, r"wanted \[num_kv_heads, tokens, topk\]"),
    ],
)
def test_bad_calls_of_msa(pages: dict[str, Any], changes: dict[str, Any], words: str) -> None:
    call = {**pages, "q2k_indices": np.zeros((2, 4, 1), np.int32), "seqlen_q": 2, **changes}
    with pytest.raises((ArgumentError, UnsupportedError), match=words):
        msa_ops.msa_sparse_decode_attention(**call)


def fused_index(rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Pages of DeepGEMM, and their rows and scales."""
    rows = rng.standard_normal((5, 16, 128)).astype(E4M3)
    scales = rng.uniform(0.5, 2, size=(5, 16)).astype(np.float32)
    flat = [x.reshape(5, -1).view(np.uint8) for x in (rows, scales)]
    return np.concatenate(flat, axis=1).reshape(5, 16, 1, 132), rows, scales


def test_logits_of_deepgemm() -> None:
    rng = np.random.default_rng(6)
    fused, rows, scales = fused_index(rng)
    q = rng.standard_normal((2, 2, 3, 128)).astype(E4M3)
    weights = rng.standard_normal((4, 3)).astype(np.float32)
    table, lens = np.array([[3, 1], [0, 4]], np.int32), np.array([20, 5], np.int32)
    meta = paged_mqa.get_paged_mqa_logits_metadata(lens, 16, 8)
    assert meta.shape == (9, 2) and meta.dtype == np.int32
    logits = paged_mqa.fp8_paged_mqa_logits(q, fused, weights, lens, table, meta, 32)
    for row, seen in enumerate((19, 20, 4, 5)):
        own = rows[table[row // 2]].reshape(-1, 128).astype(float)[:seen]
        products = q[row // 2, row % 2].astype(float) @ own.T
        want = weights[row].astype(float) @ np.maximum(products, 0)
        want *= scales[table[row // 2]].reshape(-1)[:seen]
        np.testing.assert_allclose(logits[row, :seen], want, rtol=1e-5, atol=1e-5)
        assert np.isneginf(logits[row, seen:]).all()
    each = np.array([[19, 20], [4, 5]], np.int32)
    again = paged_mqa.fp8_paged_mqa_logits(q, fused, weights, each, table, None, 32)
    np.testing.assert_array_equal(again, logits)
    with pytest.raises(ArgumentError, match="context_lens: holds"):
        paged_mqa.fp8_paged_mqa_logits(q, fused, weights, lens + 20, table, None, 32)


def test_slots_of_the_greatest_scores() -> None:
    rng = np.random.default_rng(7)
    scores = rng.standard_normal((3, 40)).astype(np.float32)
    table = rng.permutation(30).reshape(2, 15).astype(np.int32)
    lengths, owners = np.array([40, 3, 0], np.int32), np.array([1, 0, 0], np.int32)
    raw = np.empty((3, 6), np.int32)
    slots = topk.top_k_page_table_transform(
        scores, table, lengths, 6, owners, page_size=4, out_raw_indices=raw
    )
    best = np.sort(np.argsort(-scores[0])[:6])
    np.testing.assert_array_equal(raw[0], best)
    np.testing.assert_array_equal(slots[0], table[1][best // 4] * 4 + best % 4)
    assert raw[1].tolist() == [0, 1, 2, -1, -1, -1] and (slots[2] == -1).all()


def test_ties_go_to_the_lower_or_the_higher_index() -> None:
    table, lengths = np.arange(8, dtype=np.int32)[None], np.array([8], np.int32)
    zeros = np.zeros((1, 8), np.float32)
    for tie_break, want in ((0, [0, 1]), (1, [0, 1]), (2, [6, 7])):
        slots = topk.top_k_page_table_transform(zeros, table, lengths, 2, tie_break=tie_break)
        assert slots[0].tolist() == want


def test_the_index_of_dsa_lists_keys_of_segments() -> None:
    rng = np.random.default_rng(8)
    q = rng.standard_normal((5, 4, 16)).astype(np.float16)
    packed = rng.standard_normal((12, 40)).astype(np.float16)
    w = rng.standard_normal((5, 4)).astype(np.float32)
    call = q, packed[:, :16], w, offsets(3, 2), offsets(4, 8)
    indices, scores = dsa_indexer.dsa_indexer_topk(*call, top_k=3)
    assert indices.shape == scores.shape == (5, 3)
    assert indices[0].tolist() == [0, 1, -1] and np.isneginf(scores[0, 2])
    keys = packed[4:12, :16].astype(float)
    products = q[4].astype(float) @ keys.T / 4
    want = w[4].astype(float) @ np.maximum(products, 0)
    best = np.sort(np.argsort(-want)[:3])
    np.testing.assert_array_equal(indices[4], best)
    np.testing.assert_allclose(scores[4], want[best], rtol=1e-5, atol=1e-6)
    out = np.empty((5, 3), np.int32)
    assert dsa_indexer.dsa_indexer_topk(*call, top_k=3, indices=out)[0] is out
    np.testing.assert_array_equal(out, indices)
