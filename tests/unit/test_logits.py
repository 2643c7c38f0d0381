"""User-written logits through every face that offers them, answered on the CPU."""

from __future__ import annotations

import math

import numpy as np
import pytest

import cupyattn
from cupyattn import reference
from cupyattn.errors import ArgumentError, ExpressionError, PlanError, UnsupportedError

RNG = np.random.default_rng(0)
HEADS, KV_HEADS, DIM = 4, 2, 16
SLOPES = reference.alibi_slopes(HEADS).astype(np.float32)
ALIBI = {
    "logits_transform": "logit + slopes[head] * (kv_idx - q_idx)",
    "logits_params": {"slopes": SLOPES},
}


def rows(count, heads=HEADS):
    return RNG.standard_normal((count, heads, DIM)).astype(np.float32)


def single(qo_len=5, kv_len=9):
    return rows(qo_len), rows(kv_len, KV_HEADS), rows(kv_len, KV_HEADS)


def prefill(*arrays, **options):
    return cupyattn.single_prefill_with_kv_cache(*arrays, return_lse=True, **options)


def assert_same(found, wanted, tolerance=1e-6):
    for a, b in zip(found, wanted, strict=True):
        np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance)


# --- one request ---

# An expression, and the built-in option that means the same.
BUILT_IN = [
    ({"logits_transform": "7 * tanh(logit / 7)"}, {"logits_soft_cap": 7.0}),
    ({"logits_transform": "3 * tanh(logit * 0.5)"}, {"logits_soft_cap": 3.0, "q_scale": 1.5}),
    ({"logits_transform": "c * tanh(logit / c) + 0", "logits_params": {"c": 7}},
     {"logits_soft_cap": 7.0}),
    (ALIBI, {"pos_encoding_mode": "ALIBI"}),
    ({"mask_fn": "kv_idx <= q_idx"}, {"causal": True}),
    ({"mask_fn": "kv_idx <= q_idx && kv_idx >= q_idx - w", "logits_params": {"w": 2}},
     {"causal": True, "window_left": 2}),
    ({"mask_fn": "kv_idx >= q_idx - w", "logits_params": {"w": 2}, "causal": True},
     {"causal": True, "window_left": 2}),
    ({"mask_fn": "seen[q_row, kv_idx]", "logits_params": {"seen": RNG.random((5, 9)) < 0.6}}, None),
    ({"logits_transform": "logit"}, {}),
    ({"logits_transform": "scale * logit", "logits_params": {"scale": 0.5}}, {"q_scale": 0.5}),
    ({"logits_transform": "where(kv_idx < q_idx + 1, logit, -1e30)"}, {"causal": True}),
]  # fmt: skip


@pytest.mark.parametrize(
    ("given", "built_in"), BUILT_IN, ids=[str(i) for i in range(len(BUILT_IN))]
)
@pytest.mark.parametrize("more", [{}, {"sm_scale": 0.7, "sinks": SLOPES}])
def test_an_expression_answers_as_the_option_that_it_spells(given, built_in, more):
    arrays = single()
    if built_in is None:
        built_in = {"custom_mask": given["logits_params"]["seen"]}
    assert_same(prefill(*arrays, **given, **more), prefill(*arrays, **built_in, **more))


def test_an_expression_joins_the_other_options():
    arrays = single()
    found = prefill(
        *arrays, logits_transform="logit - abs(kv_idx - q_idx)", mask_fn="head != 1 || kv_idx != 0",
        causal=True, window_left=6, pos_encoding_mode="ROPE_LLAMA", sinks=SLOPES,
        scale_q=SLOPES, scale_v=2.0,
    )  # fmt: skip
    q, k, v = arrays
    place = np.arange(5)[:, None] + 4
    key = np.arange(9)
    o, lse = np.zeros((5, HEADS, DIM)), np.zeros((5, HEADS))
    q = reference.rope(q, place[:, 0])
    k = reference.rope(k, key)
    for h in range(HEADS):
        logits = q[:, h] @ k[:, h // 2].T * SLOPES[h] / 4 - abs(key - place)
        seen = (key <= place) & (key >= place - 6) & ((h != 1) | (key != 0))
        weights = np.where(seen, np.exp(logits), 0)
        total = weights.sum(1, keepdims=True) + math.exp(SLOPES[h])
        o[:, h], lse[:, h] = 2 * (weights / total) @ v[:, h // 2], np.log2(total[:, 0])
    assert_same(found, (o, lse))


def test_sigmoid_attention_is_a_softmax_times_its_sum():
    q, k, v = single()
    out, lse = prefill(
        q, k, v, logits_transform="log_sigmoid(logit + b)", logits_params={"b": -1.5}
    )
    logits = np.einsum("qhd,khd->hqk", q, k.repeat(2, 1)) / 4 - 1.5
    wanted = np.einsum("hqk,khd->qhd", 1 / (1 + np.exp(-logits)), v.repeat(2, 1))
    assert_same((out * np.exp2(lse)[..., None],), (wanted,), 1e-5)


def test_rows_that_a_mask_leaves_nothing_are_zero():
    out, lse = prefill(*single(), mask_fn="q_row != 2 && head < 3")
    assert not out[2].any() and not out[:, 3].any() and out[1, 0].any()
    assert (lse[2] == -np.inf).all() and (lse[:, 3] == -np.inf).all()


def test_a_hidden_key_touches_no_row():
    q, k, v = single()
    wanted = prefill(q, k[1:], v[1:])
    k[0], v[0] = np.nan, np.inf
    assert_same(prefill(q, k, v, mask_fn="kv_idx != 0"), wanted)
    # Heads see different keys: head 3 sees the bad one, the others do not.
    out, _ = prefill(q, k, v, mask_fn="kv_idx != 0 || head == 3")
    assert np.isfinite(out[:, :3]).all() and np.isnan(out[:, 3]).all()
    assert_same((out[:, :3],), (wanted[0][:, :3],))


def test_decode_counts_its_row_as_the_last():
    q, k, v = single(1)
    options = {"mask_fn": "q_row == 0 && kv_idx > q_idx - 3", "return_lse": True, **ALIBI}
    found = cupyattn.single_decode_with_kv_cache(q[0], k, v, **options)
    assert_same(found, [x[0] for x in prefill(q, k, v, window_left=2, pos_encoding_mode="ALIBI")])


# --- batches ---

QO, KV = [3, 0, 5, 1], [7, 4, 5, 9]
MASK = "doc[batch, q_idx] == doc[batch, kv_idx] && kv_idx <= q_idx"
TRANSFORM = "logit * t[batch] + rel[head, min(q_idx - kv_idx, 3)]"
PARAMS = {
    "doc": RNG.integers(0, 2, (4, 9)).astype(np.int32),
    "t": np.array([0.5, 1.0, 2.0, 1.5], np.float32),
    "rel": RNG.standard_normal((HEADS, 4)).astype(np.float16),
}


def one_by_one(q, keys, values, params=PARAMS, lens=QO):
    """The requests of a batch as calls of their own, whose texts name the request."""
    out, lse, begin = [], [], 0
    for b, qo_len in enumerate(lens):
        texts = {
            "logits_transform": TRANSFORM.replace("batch", f"{b}"),
            "mask_fn": MASK.replace("batch", f"{b}"),
        }
        if qo_len:
            q_b = q[begin : begin + qo_len]
            o, rows_lse = prefill(q_b, keys[b], values[b], logits_params=params, **texts)
            out.append(o)
            lse.append(rows_lse)
        begin += qo_len
    return np.concatenate(out), np.concatenate(lse)


def indptr(lens):
    return np.concatenate([[0], np.cumsum(lens)]).astype(np.int32)


def in_pages(keys, values, page_size=4):
    """(cache, indptr, indices, last_page_len) with NaN in every slot that no request owns."""
    counts = [-(-len(k) // page_size) for k in keys]
    cache = np.full((sum(counts) + 1, 2, page_size, KV_HEADS, DIM), np.nan, np.float32)
    order = RNG.permutation(sum(counts)).astype(np.int32)
    place = 0
    for k, v, count in zip(keys, values, counts, strict=True):
        for i, x in enumerate((k, v)):
            flat = np.full((count * page_size, KV_HEADS, DIM), np.nan, np.float32)
            flat[: len(x)] = x
            cache[order[place : place + count], i] = flat.reshape(count, page_size, KV_HEADS, DIM)
        place += count
    last = [len(k) - (n - 1) * page_size for k, n in zip(keys, counts, strict=True)]
    return cache, indptr(counts), order, np.array(last, np.int32)


EXPRESSIONS = {"logits_transform": TRANSFORM, "mask_fn": MASK, "logits_params": PARAMS}
TYPES = {"q_data_type": "float32", "kv_data_type": "float32"}


def test_a_ragged_batch_knows_its_requests():
    q, keys, values = (
        rows(sum(QO)),
        [rows(n, KV_HEADS) for n in KV],
        [rows(n, KV_HEADS) for n in KV],
    )
    w = cupyattn.BatchPrefillWithRaggedKVCacheWrapper(np.zeros(1 << 22, np.uint8))
    w.plan(indptr(QO), indptr(KV), HEADS, KV_HEADS, DIM, **EXPRESSIONS, **TYPES)
    k, v = np.concatenate(keys), np.concatenate(values)
    assert_same(w.run(q, k, v, return_lse=True), one_by_one(q, keys, values))
    # Arrays may be replaced by a run, and the plan's stay for the next one.
    other = PARAMS | {"t": PARAMS["t"] * 2}
    found = w.run(q, k, v, return_lse=True, logits_params={"t": other["t"]})
    assert_same(found, one_by_one(q, keys, values, other))
    assert_same(w.run(q, k, v, return_lse=True), one_by_one(q, keys, values))


def test_a_paged_batch_knows_its_requests():
    q, keys, values = (
        rows(sum(QO)),
        [rows(n, KV_HEADS) for n in KV],
        [rows(n, KV_HEADS) for n in KV],
    )
    cache, *tables = in_pages(keys, values)
    w = cupyattn.BatchPrefillWithPagedKVCacheWrapper(np.zeros(1 << 22, np.uint8))
    w.plan(indptr(QO), *tables, HEADS, KV_HEADS, DIM, 4, **EXPRESSIONS, **TYPES)
    assert_same(w.run(q, cache, return_lse=True), one_by_one(q, keys, values))


@pytest.mark.parametrize("q_len", [1, 2])
def test_a_decode_batch_knows_its_requests(q_len):
    q, keys, values = (
        rows(4 * q_len),
        [rows(n, KV_HEADS) for n in KV],
        [rows(n, KV_HEADS) for n in KV],
    )
    cache, *tables = in_pages(keys, values)
    w = cupyattn.BatchDecodeWithPagedKVCacheWrapper(np.zeros(1 << 22, np.uint8))
    w.plan(*tables, HEADS, KV_HEADS, DIM, 4, q_len_per_req=q_len, **EXPRESSIONS, **TYPES)
    wanted = one_by_one(q, keys, values, lens=[q_len] * 4)
    assert_same(w.run(q, cache, return_lse=True), wanted)
    w.plan(*tables, HEADS, KV_HEADS, DIM, 4, **EXPRESSIONS, **TYPES)
    assert_same(w.run(q, cache, return_lse=True, q_len_per_req=q_len), wanted)


def test_a_plan_without_expressions_follows_one_with():
    q, keys, values = rows(4), [rows(n, KV_HEADS) for n in KV], [rows(n, KV_HEADS) for n in KV]
    cache, *tables = in_pages(keys, values)
    w = cupyattn.BatchDecodeWithPagedKVCacheWrapper(np.zeros(1 << 22, np.uint8))
    w.plan(*tables, HEADS, KV_HEADS, DIM, 4, **TYPES)
    plain = w.run(q, cache)
    w.plan(*tables, HEADS, KV_HEADS, DIM, 4, **EXPRESSIONS, **TYPES)
    assert np.abs(w.run(q, cache) - plain).max() > 1e-3
    w.plan(*tables, HEADS, KV_HEADS, DIM, 4, **TYPES)
    np.testing.assert_array_equal(w.run(q, cache), plain)


def test_numbers_of_a_graph_stay_those_of_its_first_plan():
    w = cupyattn.BatchDecodeWithPagedKVCacheWrapper(
        np.zeros(1 << 22, np.uint8), use_cuda_graph=True,
        paged_kv_indptr_buffer=np.zeros(2, np.int32),
        paged_kv_indices_buffer=np.zeros(4, np.int32),
        paged_kv_last_page_len_buffer=np.zeros(1, np.int32),
    )  # fmt: skip
    tables = np.array([0, 1], np.int32), np.array([0], np.int32), np.array([4], np.int32)

    def plan(c):
        w.plan(*tables, HEADS, KV_HEADS, DIM, 4, logits_transform="c + logit",
               logits_params={"c": c}, **TYPES)  # fmt: skip

    plan(1.0)
    plan(1.0)
    with pytest.raises(PlanError, match="logits"):
        plan(2.0)


def test_arrays_of_a_graph_stay_those_of_its_first_plan():
    w = cupyattn.BatchDecodeWithPagedKVCacheWrapper(
        np.zeros(1 << 22, np.uint8), use_cuda_graph=True,
        paged_kv_indptr_buffer=np.zeros(2, np.int32),
        paged_kv_indices_buffer=np.zeros(4, np.int32),
        paged_kv_last_page_len_buffer=np.zeros(1, np.int32),
    )  # fmt: skip
    tables = np.array([0, 1], np.int32), np.array([0], np.int32), np.array([4], np.int32)
    q, cache = rows(1), RNG.standard_normal((1, 2, 4, KV_HEADS, DIM)).astype(np.float32)
    slopes = SLOPES.copy()

    def plan(slopes):
        w.plan(*tables, HEADS, KV_HEADS, DIM, 4, logits_params={"slopes": slopes},
               logits_transform=ALIBI["logits_transform"], **TYPES)  # fmt: skip

    plan(slopes)
    before = w.run(q, cache)
    slopes *= 5
    plan(slopes)
    assert np.abs(w.run(q, cache) - before).max() > 1e-3
    with pytest.raises(PlanError, match="write into those"):
        plan(slopes.copy())


# --- what is refused ---


def with_c(text, c):
    return {"logits_transform": text, "logits_params": {"c": c}}


CALLS = [
    ({"logits_params": {}}, ArgumentError, "without an expression"),
    ({"logits_transform": "2 * logit", "logits_params": [1]}, ArgumentError, "wanted a dict"),
    ({"logits_transform": "2 * logit", "logits_params": {"2c": 1}},
     ArgumentError, "letters, digits"),
    ({"logits_transform": "2 * logit", "logits_params": {1: 1}}, ArgumentError, "letters, digits"),
    ({"logits_transform": "2 * logit", "logits_params": {"head": 1}},
     ArgumentError, "is a word of"),
    ({"logits_transform": "2 * logit", "logits_params": {"max": 1}}, ArgumentError, "is a word of"),
    (with_c("c * logit", True), ArgumentError, "as 1 or 0"),
    (with_c("c * logit", math.inf), ArgumentError, "finite"),
    (with_c("c * logit", 2**40), ArgumentError, "at most"),
    (with_c("c * logit", "1"), ArgumentError, "a number or an array"),
    (with_c("c * logit", [1.0]), ArgumentError, "a number or an array"),
    (with_c("c * logit", np.zeros((), np.float32)), ArgumentError, "1 to 4 axes"),
    (with_c("c[0] * logit", np.zeros(4)), ArgumentError, "dtype"),
    (with_c("c[0] * logit", np.zeros(4, np.int64)), UnsupportedError, "int32"),
    (with_c("c[head] * logit", SLOPES[:3].copy()), ArgumentError, "wanted 4, the num_qo_heads"),
    (with_c("c[kv_head] * logit", SLOPES), ArgumentError, "wanted 2, the num_kv_heads"),
    (with_c("c[kv_idx] * logit", SLOPES), ArgumentError, "at least 9, the keys"),
    (with_c("c[q_row, 0] * logit", SLOPES[None]), ArgumentError, "at least 5, the query tokens"),
    (with_c("c[batch] * logit", SLOPES), ArgumentError, "wanted 1, the batch size"),
    (with_c("c[kv_idx // 4] * logit", SLOPES[:0]), ArgumentError, "at least 1"),
    (with_c("c[head] * logit", SLOPES[::-1]), ArgumentError, "contiguous"),
    ({"logits_transform": 3}, ExpressionError, "as a string"),
    ({"mask_fn": lambda q, k: q > k}, ExpressionError, "as a string"),
    ({"logits_transform": "2 * logit", "logits_soft_cap": 30.0}, UnsupportedError, r"30 \* tanh"),
    ({"logits_transform": "9 * tanh(logit / 9)", "logits_soft_cap": 30.0},
     UnsupportedError, r"30 \* tanh"),
    ({"logits_transform": "2 * logit", "pos_encoding_mode": "ALIBI"}, UnsupportedError, "slopes"),
    ({"mask_fn": "kv_idx < 3", "custom_mask": np.ones((5, 9), bool)}, UnsupportedError, "seen"),
    ({"logits_transform": "logit + batch", "custom_mask": np.ones((5, 9), bool)},
     UnsupportedError, "reads batch"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("options", "error", "says"), CALLS, ids=[str(i) for i in range(len(CALLS))]
)
def test_a_bad_call_is_refused_before_anything_is_written(options, error, says):
    out = np.full((5, HEADS, DIM), 7.0, np.float32)
    if "dtype" in says:
        error = (ArgumentError, UnsupportedError)
    with pytest.raises(error, match=says):
        cupyattn.single_prefill_with_kv_cache(*single(), out=out, **options)
    assert (out == 7).all()


def test_wide_heads_are_refused():
    q, k = np.zeros((2, 1, 512), np.float16), np.zeros((3, 1, 512), np.float16)
    with pytest.raises(UnsupportedError, match=r"mask_fn: is not supported with head dims 512"):
        cupyattn.single_prefill_with_kv_cache(q, k, k, mask_fn="kv_idx < 2")


def test_a_run_replaces_arrays_alone():
    q, k, v = rows(2), rows(3, KV_HEADS), rows(3, KV_HEADS)
    w = cupyattn.BatchPrefillWithRaggedKVCacheWrapper(np.zeros(1 << 22, np.uint8))
    ends = np.array([0, 2], np.int32), np.array([0, 3], np.int32)
    w.plan(*ends, HEADS, KV_HEADS, DIM, **TYPES)
    with pytest.raises(ArgumentError, match="the plan has no expression"):
        w.run(q, k, v, logits_params={"s": SLOPES})
    w.plan(*ends, HEADS, KV_HEADS, DIM, logits_transform="logit * c + s[head]",
           logits_params={"s": SLOPES, "c": 2.0}, **TYPES)  # fmt: skip
    for given, says in (
        ({"c": 3.0}, r"'c' is a number, which plan\(\) fixes"),
        ({"r": SLOPES}, "the plan has no array 'r'; it has s"),
        ({"s": SLOPES.astype(np.float16)}, "the plan said float32 with 1"),
        ({"s": SLOPES[:, None]}, "the plan said float32 with 1"),
        ({"s": SLOPES[:3]}, "the num_qo_heads"),
    ):
        with pytest.raises(ArgumentError, match=says):
            w.run(q, k, v, logits_params=given)
    with pytest.raises(UnsupportedError, match="lse_base"):
        w.run(q, k, v, logits_params={"s": SLOPES}, lse_base="ln")


def test_a_mask_of_a_run_and_one_of_the_plan_are_refused():
    cache = np.zeros((1, 2, 4, KV_HEADS, DIM), np.float32)
    tables = np.array([0, 1], np.int32), np.array([0], np.int32), np.array([4], np.int32)
    w = cupyattn.BatchDecodeWithPagedKVCacheWrapper(np.zeros(1 << 22, np.uint8))
    w.plan(*tables, HEADS, KV_HEADS, DIM, 4, q_len_per_req=2, mask_fn="kv_idx > 0", **TYPES)
    with pytest.raises(UnsupportedError, match="mask: is not supported beside the mask_fn"):
        w.run(rows(2), cache, mask=np.ones((1, 2, 2), bool))
    # A transform stands beside it.
    w.plan(*tables, HEADS, KV_HEADS, DIM, 4, q_len_per_req=2, logits_transform="2 * logit", **TYPES)
    w.run(rows(2), cache, mask=np.ones((1, 2, 2), bool))


def test_answers_overlap_no_parameter():
    q, k, v = single()
    memory = np.zeros((5, HEADS, DIM), np.float32)
    s = memory.reshape(-1)[:HEADS]
    with pytest.raises(ArgumentError, match=r"out"):
        cupyattn.single_prefill_with_kv_cache(
            q, k, v, out=memory, logits_transform="logit + s[head]", logits_params={"s": s}
        )


# --- the one call ---


@pytest.mark.parametrize("count", [1, 3])
def test_dot_product_attention_takes_them(count):
    shape = (count, 5, HEADS, DIM)
    q, k, v = (RNG.standard_normal(shape).astype(np.float32) for _ in range(3))
    doc = RNG.integers(0, 2, (count, 5)).astype(np.int32)
    bias = RNG.standard_normal((count, HEADS, 5, 5)).astype(np.float32)
    out, lse = cupyattn.dot_product_attention(
        q, k, v, is_causal=True, return_lse=True,
        logits_transform="logit + bias[batch, head, q_row, kv_idx]",
        mask_fn="doc[batch, q_idx] == doc[batch, kv_idx]",
        logits_params={"bias": bias, "doc": doc},
    )  # fmt: skip
    logits = np.einsum("bqhd,bkhd->bhqk", q, k) / 4 + bias
    seen = (np.arange(5)[:, None] >= np.arange(5)) & (doc[:, :, None] == doc[:, None])
    weights = np.where(seen[:, None], np.exp(logits), 0)
    total = weights.sum(-1)
    wanted = np.einsum("bhqk,bkhd->bqhd", weights, v) / total.swapaxes(1, 2)[..., None]
    assert_same((out, lse), (wanted, np.log(total).swapaxes(1, 2)))
    given = {"logits_transform": "logit + t[batch] * kv_idx", "mask_fn": "kv_idx < 4"}
    one = cupyattn.dot_product_attention(
        q[0], k[0], v[0], logits_params={"t": SLOPES[:1].copy()}, **given
    )
    wanted = prefill(
        q[0], k[0], v[0], logits_transform="logit + t * kv_idx", mask_fn="kv_idx < 4",
        logits_params={"t": float(SLOPES[0])},
    )  # fmt: skip
    np.testing.assert_allclose(one, wanted[0], rtol=1e-6, atol=1e-6)


def test_dot_product_attention_says_where_they_are_not():
    q = rows(6).reshape(2, 3, HEADS, DIM)
    for more in (
        {"mask": np.ones((3, 3), bool)},
        {"kv_lens": np.array([1, 2])},
        {"cu_seqlens_q": np.array([0, 3]), "cu_seqlens_k": np.array([0, 3])},
    ):
        with pytest.raises(UnsupportedError, match="BatchPrefillWithRaggedKVCacheWrapper"):
            cupyattn.dot_product_attention(q, q, q, mask_fn="kv_idx < 2", **more)
    with pytest.raises(ArgumentError, match="wanted 2, the batch size"):
        cupyattn.dot_product_attention(
            q, q, q, logits_transform="logit + s[batch]", logits_params={"s": SLOPES}
        )


def test_rows_of_all_requests_are_counted() -> None:
    """As a bias of its own for each request and row gives it, and not where requests are apart."""
    rng = np.random.default_rng(8)
    q, k, v = (rng.standard_normal((2, 5, 4, 16)).astype(np.float16) for _ in range(3))
    near = rng.standard_normal((10, 4, 3)).astype(np.float32)
    text = "logit + (kv_idx <= q_idx ? near[{}head, q_idx - kv_idx] : 0)"
    indptr = np.array([0, 5, 10], np.int32)
    flat = [x.reshape(10, 4, 16) for x in (q, k, v)]
    answers = []
    for index, bias in (("q_token, ", near), ("batch, q_row, ", near.reshape(2, 5, 4, 3))):
        w = cupyattn.BatchPrefillWithRaggedKVCacheWrapper(None)
        transform = {"logits_transform": text.format(index), "logits_params": {"near": bias}}
        w.plan(indptr, indptr, 4, 4, 16, causal=True, **transform)
        answers.append(w.run(*flat))
    np.testing.assert_array_equal(*answers)
    transform = {"logits_transform": text.format("q_token, "), "logits_params": {"near": near}}
    with pytest.raises(UnsupportedError, match="logits_transform: reads q_token"):
        cupyattn.dot_product_attention(q, k, v, **transform)
    one = cupyattn.dot_product_attention(*(x[:1] for x in (q, k, v)), is_causal=True, **transform)
    np.testing.assert_allclose(one[0], answers[0][:5], atol=2e-3)
    with pytest.raises(ArgumentError, match="axis 0 has 9 elements; wanted at least 10, the rows"):
        w.plan(indptr, indptr, 4, 4, 16, **(transform | {"logits_params": {"near": near[:9]}}))
        w.run(*flat)
