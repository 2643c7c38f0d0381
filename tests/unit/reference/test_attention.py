"""The reference against torch and by-hand answers; its promises on NaN, memory and errors."""

from __future__ import annotations

import math
import subprocess
import sys
import tracemalloc

import ml_dtypes
import numpy as np
import pytest

from cupyattn.errors import ArgumentError
from cupyattn.reference import Visibility, attention, rope

LN3 = math.log(3.0)


def normal(rng, *shape):
    return rng.standard_normal(shape)


def sdpa(q, k, v, seen=None, **options):
    """torch's attention in float64 on [L, H, D] arrays."""
    torch = pytest.importorskip("torch")
    tensors = [torch.from_numpy(x.swapaxes(0, 1).copy())[None] for x in (q, k, v)]
    mask = None if seen is None else torch.from_numpy(seen)
    o = torch.nn.functional.scaled_dot_product_attention(
        *tensors, attn_mask=mask, enable_gqa=True, **options
    )
    return o[0].numpy().swapaxes(0, 1)


@pytest.mark.parametrize("heads", [(4, 4), (6, 2), (5, 1)])
@pytest.mark.parametrize("dims", [(64, 64), (48, 24)])
def test_matches_torch_sdpa(heads, dims):
    rng = np.random.default_rng(0)
    q, k, v = normal(rng, 50, heads[0], dims[0]), *(normal(rng, 50, heads[1], d) for d in dims)
    for causal in (False, True):
        o, _ = attention(q, k, v, causal=causal)
        np.testing.assert_allclose(o, sdpa(q, k, v, is_causal=causal), rtol=0, atol=1e-13)


@pytest.mark.parametrize(("qo_len", "kv_len"), [(37, 90), (300, 300), (270, 600)])
@pytest.mark.parametrize("window_left", [-1, 0, 33])
def test_matches_torch_sdpa_with_an_explicit_mask(qo_len, kv_len, window_left):
    rng = np.random.default_rng(1)
    q, k, v = normal(rng, qo_len, 4, 32), normal(rng, kv_len, 2, 32), normal(rng, kv_len, 2, 32)
    position = np.arange(qo_len)[:, None] + kv_len - qo_len
    key = np.arange(kv_len)
    seen = key <= position
    if window_left >= 0:
        seen &= position - key <= window_left
    o, _ = attention(q, k, v, causal=True, window_left=window_left, sm_scale=0.3)
    np.testing.assert_allclose(o, sdpa(q, k, v, seen, scale=0.3), rtol=0, atol=1e-13)

    mask = rng.random((qo_len, kv_len)) < 0.3
    mask[:, 5] = True
    o, _ = attention(q, k, v, mask=mask)
    np.testing.assert_allclose(o, sdpa(q, k, v, mask), rtol=0, atol=1e-13)


def scalar_case(**options):
    """One row, two keys with logits ln 1 and ln 3, values 4 and 8."""
    q, k, v = np.ones((1, 1, 1)), np.array([[[0.0]], [[LN3]]]), np.array([[[4.0]], [[8.0]]])
    o, lse = attention(q, k, v, sm_scale=1.0, **options)
    return o.item(), lse.item()


def test_two_keys_by_hand():
    assert scalar_case() == pytest.approx((7.0, 2.0))
    assert scalar_case(sinks=np.array([math.log(4.0)])) == pytest.approx((3.5, 3.0))
    assert scalar_case(mask=np.array([[True, False]])) == pytest.approx((4.0, 0.0))
    assert scalar_case(window_left=0) == pytest.approx((8.0, math.log2(3.0)))
    assert scalar_case(scale_v=0.5) == pytest.approx((3.5, 2.0))
    assert scalar_case(scale_q=2.0) == pytest.approx((7.6, math.log2(10.0)))
    assert scalar_case(scale_k=np.array([2.0])) == pytest.approx((7.6, math.log2(10.0)))
    # logit 1 becomes c * tanh(ln3 / c) with c = ln3 / artanh(1/2), so c / 2 = 1.
    assert scalar_case(logits_soft_cap=LN3 / math.atanh(0.5)) == pytest.approx(
        scalar_case(scale_q=1.0 / math.atanh(0.5) / 2.0)
    )
    # One head has slope 2**-8; the first key is one place to the left of the row.
    slope = math.exp(-(2.0**-8))
    total = slope + 3.0
    expected = ((4.0 * slope + 24.0) / total, math.log2(total))
    assert scalar_case(pos_encoding_mode="ALIBI") == pytest.approx(expected)


def test_rotation_by_hand():
    q, k = np.array([[[1.0, 0.0]]]), np.array([[[1.0, 0.0]]] * 3)
    v = np.eye(3)[:, None]
    o, _ = attention(q, k, v, sm_scale=1.0, pos_encoding_mode="ROPE_LLAMA", rope_scale=2.0)
    # The row stands at position 2, so the keys are 2, 1 and 0 steps of half a radian away.
    weights = np.exp(np.cos([1.0, 0.5, 0.0]))
    np.testing.assert_allclose(o[0, 0], weights / weights.sum(), atol=1e-15)


def test_rotation_keeps_relative_positions():
    rng = np.random.default_rng(2)
    x, y = normal(rng, 3, 2, 16), normal(rng, 3, 2, 16)
    near = np.einsum("lhd,lhd->lh", rope(x, np.arange(3)), rope(y, np.arange(3) + 5))
    far = np.einsum("lhd,lhd->lh", rope(x, np.arange(3) - 40), rope(y, np.arange(3) - 35))
    np.testing.assert_allclose(near, far, atol=1e-12)
    np.testing.assert_array_equal(rope(x, np.zeros(3)), x)


def test_lse_is_the_base_2_logsumexp():
    rng = np.random.default_rng(3)
    q, k, v = normal(rng, 20, 6, 16), normal(rng, 40, 3, 16), normal(rng, 40, 3, 8)
    logits = np.einsum("ihd,jhd->ihj", q, np.repeat(k, 2, axis=1)) / 4.0
    _, lse = attention(q, k, v)
    np.testing.assert_allclose(
        lse, np.logaddexp2.reduce(logits * math.log2(math.e), axis=-1), rtol=1e-13
    )


def test_huge_logits_do_not_overflow():
    o, lse = attention(np.full((1, 1, 1), 1e5), np.full((3, 1, 1), 1e5), np.ones((3, 1, 1)))
    assert o.item() == 1.0
    assert lse.item() == pytest.approx(1e10 * math.log2(math.e) + math.log2(3.0))


@pytest.mark.parametrize(("qo_len", "kv_len"), [(0, 5), (4, 0), (0, 0)])
def test_nothing_to_attend(qo_len, kv_len):
    q, k, v = np.ones((qo_len, 4, 8)), np.ones((kv_len, 2, 8)), np.ones((kv_len, 2, 16))
    for options in ({}, {"causal": True, "pos_encoding_mode": "ROPE_LLAMA", "window_left": 3}):
        o, lse = attention(q, k, v, **options)
        np.testing.assert_array_equal(o, np.zeros((qo_len, 4, 16)))
        np.testing.assert_array_equal(lse, np.full((qo_len, 4), -np.inf))


def test_rows_without_keys():
    rng = np.random.default_rng(4)
    q, k, v = normal(rng, 9, 2, 8), normal(rng, 4, 2, 8), normal(rng, 4, 2, 8)
    o, lse = attention(q, k, v, causal=True)
    assert (o[:5] == 0).all() and (lse[:5] == -np.inf).all()
    np.testing.assert_allclose(o[5:], attention(q[5:], k, v, causal=True)[0], atol=1e-15)
    sinks = np.array([1.5, -2.0])
    o, lse = attention(q, k, v, causal=True, sinks=sinks)
    assert (o[:5] == 0).all()
    np.testing.assert_allclose(lse[:5], np.tile(sinks * math.log2(math.e), (5, 1)))
    plain, plain_lse = attention(q, k, v, causal=True)
    o, lse = attention(q, k, v, causal=True, sinks=np.array([-np.inf, np.inf]))
    np.testing.assert_array_equal(o[:, 0], plain[:, 0])
    np.testing.assert_array_equal(lse[:, 0], plain_lse[:, 0])
    assert not o[:, 1].any() and np.isposinf(lse[:, 1]).all()


def test_mask_overrules_causal_and_meets_the_window():
    sees = Visibility(4, 6, causal=True, window_left=1, mask=np.ones((4, 6), bool))
    expected = [[0, 1, 1, 1, 1, 1], [0, 0, 1, 1, 1, 1], [0, 0, 0, 1, 1, 1], [0, 0, 0, 0, 1, 1]]
    np.testing.assert_array_equal(sees.dense(), np.array(expected, bool))
    causal = Visibility(4, 6, causal=True).dense()
    np.testing.assert_array_equal(causal, np.tri(4, 6, 2, dtype=bool))


@pytest.mark.parametrize("window_left", [-1, 0, 40, 10**12])
@pytest.mark.parametrize(("qo_len", "kv_len"), [(600, 600), (600, 90), (300, 900)])
def test_blocks_of_rows_do_not_show(qo_len, kv_len, window_left):
    rng = np.random.default_rng(5)
    q, k, v = normal(rng, qo_len, 2, 8), normal(rng, kv_len, 1, 8), normal(rng, kv_len, 1, 8)
    o, lse = attention(q, k, v, causal=True, window_left=window_left)
    seen = Visibility(qo_len, kv_len, causal=True, window_left=window_left).dense()
    logits = np.where(seen[:, None], np.einsum("ihd,jd->ihj", q, k[:, 0]) / math.sqrt(8), -np.inf)
    weights = np.exp(logits)
    total = np.maximum(weights.sum(-1, keepdims=True), 1e-300)
    np.testing.assert_allclose(o, weights / total @ v[:, 0], atol=1e-13)
    with np.errstate(divide="ignore"):
        np.testing.assert_allclose(lse, np.log2(weights.sum(-1)), atol=1e-13)


@pytest.mark.parametrize("poison", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("which", ["k", "v", "both"])
@pytest.mark.parametrize(
    "options",
    [
        {"causal": True},
        {"causal": True, "pos_encoding_mode": "ROPE_LLAMA", "logits_soft_cap": 5.0},
        {"window_left": 2, "pos_encoding_mode": "ALIBI"},
        {"mask": np.random.default_rng(6).random((12, 15)) < 0.4},
    ],
)
def test_a_bad_key_reaches_exactly_the_rows_that_see_it(options, which, poison):
    rng = np.random.default_rng(7)
    q, k, v = normal(rng, 12, 4, 8), normal(rng, 15, 2, 8), normal(rng, 15, 2, 8)
    clean_o, clean_lse = attention(q, k, v, **options)
    for key in (2, 7, 14):
        bad_k, bad_v = k.copy(), v.copy()
        if which != "v":
            bad_k[key, 1] = np.nan
        if which != "k":
            bad_v[key, 1, 3] = poison
        o, lse = attention(q, bad_k, bad_v, **options)
        pattern = {n: options[n] for n in ("causal", "window_left", "mask") if n in options}
        sees = Visibility(12, 15, **pattern).dense()[:, key]
        hit = np.zeros((12, 4), bool)
        hit[sees, 2:] = True
        np.testing.assert_array_equal(o[~hit], clean_o[~hit])
        np.testing.assert_array_equal(lse[~hit], clean_lse[~hit])
        assert hit.any() and not np.isfinite(o[hit][:, 3]).any()
        if which == "v":
            np.testing.assert_array_equal(lse, clean_lse)
            assert np.isfinite(o[hit][:, :3]).all()
        else:
            assert np.isnan(lse[hit]).all()


@pytest.mark.parametrize(
    "dtype",
    [np.float16, np.float32, ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2],
)
def test_low_precision_inputs_are_taken_exactly(dtype):
    rng = np.random.default_rng(8)
    q, k, v = (normal(rng, 6, 2, 8).astype(dtype) for _ in range(3))
    wide = [x.astype(np.float64) for x in (q, k, v)]
    np.testing.assert_array_equal(attention(q, k, v)[0], attention(*wide)[0])


def test_strides_and_layouts_do_not_matter():
    rng = np.random.default_rng(9)
    fused = normal(rng, 10, 8, 16)
    q, k, v = fused[:, :4], fused[:, 4:6], fused[:, 6:]
    expected = attention(q.copy(), k.copy(), v.copy())
    heads_first = [np.ascontiguousarray(x.swapaxes(0, 1)) for x in (k, v)]
    for answer in (attention(q, k, v), attention(q, *heads_first, kv_layout="HND")):
        np.testing.assert_array_equal(answer[0], expected[0])
        np.testing.assert_array_equal(answer[1], expected[1])


def test_inputs_are_left_alone():
    rng = np.random.default_rng(10)
    q, k, v = (normal(rng, 5, 2, 8) for _ in range(3))
    mask, sinks, scale = rng.random((5, 5)) < 0.5, normal(rng, 2), normal(rng, 2)
    given = [q, k, v, mask, sinks, scale]
    before = [x.copy() for x in given]
    for x in given:
        x.flags.writeable = False
    attention(q, k, v, mask=mask, window_left=1, sinks=sinks, scale_q=scale, logits_soft_cap=3.0)
    for x, old in zip(given, before, strict=True):
        np.testing.assert_array_equal(x, old)


def test_memory_is_bounded_by_blocks():
    rng = np.random.default_rng(11)
    q, k, v = normal(rng, 2048, 8, 8), normal(rng, 2048, 2, 8), normal(rng, 2048, 2, 8)
    tracemalloc.start()
    try:
        attention(q, k, v, pos_encoding_mode="ALIBI", logits_soft_cap=10.0)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    # All logits at once, in float64, are 268 MB.
    assert peak < 80e6


def test_imports_no_device_library():
    code = (
        "import sys; sys.modules.update(dict.fromkeys(('cupy', 'torch', 'jax')));"
        "import numpy as np; from cupyattn.reference import attention;"
        "attention(*[np.ones((2, 1, 8))] * 3)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


ONES = np.ones((3, 2, 8))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"q": np.ones((3, 8))}, "q: got shape"),
        ({"k": np.ones((3, 8))}, "k: got shape"),
        ({"v": np.ones((4, 2, 8))}, "k, v: got 3 tokens"),
        ({"v": np.ones((3, 1, 8))}, "k, v: got 3 tokens of 2 heads"),
        ({"q": np.ones((3, 2, 16))}, "head dim 8 with q of head dim 16"),
        ({"q": np.ones((3, 3, 8))}, "3 heads with 2 key heads"),
        ({"q": np.ones((3, 0, 8))}, "0 heads"),
        ({"kv_layout": "HDN"}, "kv_layout"),
        ({"pos_encoding_mode": "ROPE"}, "pos_encoding_mode"),
        ({"window_left": -2}, "window_left"),
        ({"logits_soft_cap": -1.0}, "logits_soft_cap"),
        ({"logits_soft_cap": math.nan}, "logits_soft_cap"),
        ({"sm_scale": math.inf}, "sm_scale"),
        ({"rope_scale": 0.0}, "rope_scale"),
        ({"rope_theta": -1.0}, "rope_theta"),
        ({"scale_q": np.ones(3)}, "scale_q"),
        ({"scale_k": math.nan}, "scale_k"),
        ({"scale_v": np.ones((2, 1))}, "scale_v"),
        ({"sinks": np.ones(1)}, "sinks"),
        ({"mask": np.ones((3, 4), bool)}, "mask: got bool"),
        ({"mask": np.ones((3, 3))}, "mask: got float64"),
    ],
)
def test_bad_arguments_are_named(change, said):
    with pytest.raises(ArgumentError, match=said):
        attention(**{"q": ONES, "k": ONES, "v": ONES} | change)


def test_odd_head_dims_cannot_rotate():
    odd = np.ones((3, 2, 7))
    with pytest.raises(ArgumentError, match="odd"):
        attention(odd, odd, odd, pos_encoding_mode="ROPE_LLAMA")
