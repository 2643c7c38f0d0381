"""Every option of the reference, alone and in pairs, against formulas written as plain loops."""

from __future__ import annotations

import cmath
import itertools
import math

import ml_dtypes
import numpy as np
import pytest

from cupyattn.reference import alibi_slopes, attention

NUM_HEADS, NUM_KV_HEADS, HEAD_DIM = 6, 2, 8


def naive_slopes(num_heads):
    """The slopes as their paper builds them: a geometric sequence, and every other of the next."""
    if num_heads & (num_heads - 1) == 0:
        return [2.0 ** (-8.0 / num_heads * (h + 1)) for h in range(num_heads)]
    n = 2 ** int(math.log2(num_heads))
    return naive_slopes(n) + naive_slopes(2 * n)[0::2][: num_heads - n]


def naive_rotation(x, position, scale, theta):
    """Elements i and i + D/2 as a complex number, turned."""
    half = len(x) // 2
    turned = [
        complex(x[i], x[i + half]) * cmath.exp(1j * position / scale * theta ** (-i / half))
        for i in range(half)
    ]
    return [z.real for z in turned] + [z.imag for z in turned]


def naive(q, k, v, group, **options):
    """(o, lse) as nested lists, one scalar at a time."""
    get = options.get
    qo_len, kv_len, shift = len(q), len(k), len(k) - len(q)
    slopes = naive_slopes(NUM_HEADS)
    o = np.zeros((qo_len, NUM_HEADS, v.shape[2]))
    lse = np.zeros((qo_len, NUM_HEADS))
    for i, h in itertools.product(range(qo_len), range(NUM_HEADS)):
        g = h // group
        logits = {}
        for j in range(kv_len):
            if get("mask") is not None:
                if not options["mask"][i][j]:
                    continue
            elif get("causal") and j > i + shift:
                continue
            if get("window_left", -1) >= 0 and j < i + shift - options["window_left"]:
                continue
            qi, kj = [float(x) for x in q[i, h]], [float(x) for x in k[j, g]]
            if get("pos_encoding_mode") == "ROPE_LLAMA":
                turn = (get("rope_scale", 1.0), get("rope_theta", 1e4))
                qi, kj = naive_rotation(qi, i + shift, *turn), naive_rotation(kj, j, *turn)
            logit = sum(a * b for a, b in zip(qi, kj, strict=True))
            logit *= get("sm_scale", 1.0 / math.sqrt(HEAD_DIM))
            logit *= per_head(get("scale_q"), h) * per_head(get("scale_k"), g)
            if get("pos_encoding_mode") == "ALIBI":
                logit += slopes[h] * (j - (i + shift))
            if get("logits_soft_cap"):
                logit = options["logits_soft_cap"] * math.tanh(logit / options["logits_soft_cap"])
            logits[j] = logit
        weights = {j: math.exp(x) for j, x in logits.items()}
        total = sum(weights.values())
        if get("sinks") is not None:
            total += math.exp(options["sinks"][h])
        lse[i, h] = math.log2(total) if total else -math.inf
        for j, weight in weights.items():
            for d in range(v.shape[2]):
                o[i, h, d] += weight / total * float(v[j, g, d]) * per_head(get("scale_v"), g)
    return o, lse


def per_head(scale, head):
    if scale is None:
        return 1.0
    return scale if isinstance(scale, float) else float(scale[head])


# True stands for a random mask. Options that set the same argument are never paired.
OPTIONS = {
    "causal": {"causal": True},
    "window_0": {"window_left": 0},
    "window_2": {"window_left": 2},
    "mask": {"mask": True},
    "soft_cap": {"logits_soft_cap": 1.5},
    "sm_scale": {"sm_scale": 0.9},
    "rope": {"pos_encoding_mode": "ROPE_LLAMA"},
    "rope_tuned": {"pos_encoding_mode": "ROPE_LLAMA", "rope_scale": 3.0, "rope_theta": 50.0},
    "alibi": {"pos_encoding_mode": "ALIBI"},
    "sinks": {"sinks": np.linspace(-2.0, 3.0, NUM_HEADS)},
    "scale_q": {"scale_q": np.linspace(0.5, 2.0, NUM_HEADS)},
    "scale_k": {"scale_k": np.array([1.7, 0.6])},
    "scale_v": {"scale_v": np.array([0.25, 3.0])},
    "scale_floats": {"scale_q": 1.3, "scale_k": 0.7, "scale_v": 2.0},
    "HND": {"kv_layout": "HND"},
    "fp8": {"kv_dtype": ml_dtypes.float8_e4m3fn},
}
SHAPES = [(5, 7), (6, 3), (1, 6)]


def check(names, qo_len, kv_len):
    rng = np.random.default_rng(len(names) + 10 * qo_len + kv_len)
    options = {key: value for name in names for key, value in OPTIONS[name].items()}
    kv_dtype = options.pop("kv_dtype", np.float64)
    q = rng.standard_normal((qo_len, NUM_HEADS, HEAD_DIM))
    k = rng.standard_normal((kv_len, NUM_KV_HEADS, HEAD_DIM)).astype(kv_dtype)
    v = rng.standard_normal((kv_len, NUM_KV_HEADS, 3)).astype(kv_dtype)
    if "mask" in options:
        options["mask"] = rng.random((qo_len, kv_len)) < 0.6
    expected = naive(q, k, v, NUM_HEADS // NUM_KV_HEADS, **options)
    if options.get("kv_layout") == "HND":
        k, v = k.swapaxes(0, 1), v.swapaxes(0, 1)
    o, lse = attention(q, k, v, **options)
    np.testing.assert_allclose(o, expected[0], rtol=0, atol=1e-12, err_msg=str(names))
    np.testing.assert_allclose(lse, expected[1], rtol=0, atol=1e-12, err_msg=str(names))


@pytest.mark.parametrize(("qo_len", "kv_len"), SHAPES)
def test_no_option(qo_len, kv_len):
    check((), qo_len, kv_len)


@pytest.mark.parametrize("name", OPTIONS)
def test_each_option_with_every_other(name):
    """Alone, and paired with each option whose arguments it does not itself set."""
    for other in OPTIONS:
        if other == name or not OPTIONS[name].keys() & OPTIONS[other].keys():
            for qo_len, kv_len in SHAPES:
                check((name, other), qo_len, kv_len)


@pytest.mark.parametrize("position", ["rope_tuned", "alibi"])
@pytest.mark.parametrize("masking", ["causal", "mask"])
@pytest.mark.parametrize(("qo_len", "kv_len"), SHAPES)
def test_all_at_once(position, masking, qo_len, kv_len):
    scales = ("sm_scale", "scale_q", "scale_k", "scale_v", "sinks", "soft_cap")
    check((position, masking, "window_2", *scales, "HND", "fp8"), qo_len, kv_len)


@pytest.mark.parametrize("num_heads", [*range(1, 40), 64, 71, 128])
def test_alibi_slopes(num_heads):
    np.testing.assert_allclose(alibi_slopes(num_heads), naive_slopes(num_heads), rtol=1e-14)


def test_alibi_counts_from_the_position_of_the_row():
    """The bias is that of arXiv 2108.12409, so a row's own key has none."""
    rng = np.random.default_rng(0)
    q = rng.standard_normal((4, 2, HEAD_DIM))
    k, v = rng.standard_normal((2, 9, 2, HEAD_DIM))
    o, lse = attention(q, k, v, causal=True, pos_encoding_mode="ALIBI")
    for h, slope in enumerate(naive_slopes(2)):
        bias = slope * (np.arange(9) - (np.arange(4)[:, None] + 5))
        logits = q[:, h] @ k[:, h].T / math.sqrt(HEAD_DIM) + bias
        weights = np.exp(logits) * np.tri(4, 9, 5)
        np.testing.assert_allclose(o[:, h], weights / weights.sum(1, keepdims=True) @ v[:, h])
        np.testing.assert_allclose(lse[:, h], np.log2(weights.sum(1)))
