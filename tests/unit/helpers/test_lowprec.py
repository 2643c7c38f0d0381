"""The helpers other suites lean on: the low-precision model, the tolerance, poison and cases."""

from __future__ import annotations

import itertools
from dataclasses import asdict, replace

import ml_dtypes
import numpy as np
import pytest
from helpers import cases, lowprec, poison
from helpers.compare import assert_bitwise_equal, assert_close, ulp

from cupyattn.core import dtypes
from cupyattn.reference import attention

BF16 = np.dtype(ml_dtypes.bfloat16)
PLAIN = cases.Case(
    seed=7, qo_len=70, kv_len=150, num_kv_heads=2, group=3, head_dim_qk=64, head_dim_vo=64
)


def answers(case, **order):
    """Inputs, the float64 answer and the low-precision answer."""
    inputs = cases.make_inputs(case)
    return inputs, cases.reference(case, inputs), cases.low_precision(case, inputs, **order)


def compare(case, got, ref, low):
    p_dtype = dtypes.parse(case.dtype).numpy
    magnitude = cases.logit_magnitude(case)
    assert_close(got[0], got[1], *ref, *low, what=case, p_dtype=p_dtype, logit_magnitude=magnitude)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("o_dtype", [None, "float32"])
def test_low_precision_errs_by_its_roundings_and_no_more(dtype, o_dtype):
    """u|o| for the output and u * sum p|v| / sum p for P, with u half an ulp at 1."""
    case = replace(PLAIN, dtype=dtype, kv_dtype=dtype, o_dtype=o_dtype, causal=True)
    inputs, (ref_o, ref_lse), (low_o, low_lse) = answers(case)
    error = np.abs(low_o.astype(np.float64) - ref_o)
    spread, _ = attention(inputs["q"], inputs["k"], np.abs(inputs["v"]), causal=True)
    unit = float(ml_dtypes.finfo(dtypes.parse(dtype).numpy).eps) / 2
    out_unit = float(ml_dtypes.finfo(case.out_dtype).eps) / 2
    assert (error <= 1.01 * (out_unit * np.abs(ref_o) + unit * spread) + 1e-6).all()
    # Rounding P alone must show: far more than float32 noise, even where the output is float32.
    assert error.max() > 0.1 * unit
    np.testing.assert_allclose(low_lse, ref_lse, rtol=0, atol=4e-6)


def test_low_precision_rounds_rotated_inputs():
    case = replace(PLAIN, dtype="bfloat16", kv_dtype="bfloat16", pos_encoding_mode="ROPE_LLAMA")
    _, (_, ref_lse), (_, low_lse) = answers(case)
    error = np.abs(low_lse - ref_lse).max()
    # Logits of about unit size: each of 64 products is off by about 2**-9 of itself.
    assert 1e-4 < error < 3e-2


@pytest.mark.parametrize("kv_dtype", ["float8_e4m3fn", "float8_e5m2"])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_fp8_converts_to_16_bits_without_rounding(kv_dtype, dtype):
    codes = np.arange(256, dtype=np.uint8).view(dtypes.parse(kv_dtype).numpy)
    narrow = codes.astype(dtypes.parse(dtype).numpy).astype(np.float64)
    np.testing.assert_array_equal(narrow, codes.astype(np.float64))


def test_low_precision_in_float32_is_the_reference():
    """With nothing narrower than float32, the two independent paths agree on every option."""
    for seed in range(100, 140):
        case = cases.random_case(seed)
        inputs = cases.make_inputs(case)
        inputs = inputs | {name: inputs[name].astype(np.float32) for name in ("q", "k", "v")}
        ref_o, ref_lse = cases.reference(case, inputs)
        low_o, low_lse = cases.low_precision(replace(case, o_dtype="float32"), inputs)
        np.testing.assert_allclose(low_o, ref_o, rtol=0, atol=5e-5, err_msg=str(case))
        np.testing.assert_allclose(low_lse, ref_lse, rtol=3e-6, atol=3e-5, err_msg=str(case))


@pytest.mark.parametrize("which", ["k", "v"])
def test_low_precision_keeps_masked_poison_out(which):
    case = replace(PLAIN, causal=True, pos_encoding_mode="ROPE_LLAMA", window_left=20)
    inputs = cases.make_inputs(case)
    inputs[which][60, 1] = np.nan
    inputs[which][149, 0] = np.nan
    ref, low = cases.reference(case, inputs), cases.low_precision(case, inputs)
    assert np.isnan(ref[0]).any() and np.isfinite(ref[0]).any()
    compare(case, low, ref, low)


ORDERS = ({"kv_tile": 16}, {"kv_tile": 128, "is_reversed": True}, {"kv_tile": 10**6})


def test_tolerance_admits_every_honest_order():
    for seed in range(60):
        case = cases.random_case(seed)
        inputs, ref, low = answers(case)
        for order in ORDERS:
            compare(case, cases.low_precision(case, inputs, **order), ref, low)


def swapped(x):
    return x[::-1].copy()


def with_a_flipped_bit(mask):
    flipped = mask.copy()
    flipped[33, 77] ^= True
    return flipped


# Options of the case, and the arguments that a faulty kernel would have used instead.
FAULTS = {
    "causal one key too far": ({"causal": True}, {"mask": np.tri(70, 150, 81, dtype=bool)}),
    "causal one key short": ({"causal": True}, {"mask": np.tri(70, 150, 79, dtype=bool)}),
    "window one key short": ({"window_left": 40}, {"window_left": 39}),
    "window one key too far": ({"window_left": 40}, {"window_left": 41}),
    "sinks left out": ({"has_sinks": True}, {"sinks": None}),
    "soft cap left out": ({"logits_soft_cap": 30.0}, {"logits_soft_cap": None}),
    "scale_k of the wrong head": ({"scale_k": "per_head"}, {"scale_k": swapped}),
    "scale_v of the wrong head": ({"scale_v": "per_head"}, {"scale_v": swapped}),
    "slopes off by their base": ({"pos_encoding_mode": "ALIBI"}, {"pos_encoding_mode": "NONE"}),
    "theta ignored": (
        {"pos_encoding_mode": "ROPE_LLAMA", "rope_theta": 5e5},
        {"rope_theta": 1e4},
    ),
    "one mask bit": ({"mask_kind": "bool"}, {"mask": with_a_flipped_bit}),
}


@pytest.mark.parametrize("checks_lse", [True, False])
@pytest.mark.parametrize("fault", FAULTS)
def test_tolerance_catches_faults(fault, checks_lse):
    """A wrong option, computed as precisely as the right one, is not taken for rounding."""
    options, wrong = FAULTS[fault]
    case = replace(PLAIN, **options)
    inputs, ref, low = answers(case)
    arguments = cases.arguments(case, inputs)
    for name, value in wrong.items():
        arguments[name] = value(inputs[name]) if callable(value) else value
    o, lse = lowprec.attention(**arguments)
    with pytest.raises(AssertionError, match="first wrong at"):
        compare(case, (o, lse if checks_lse else None), ref, low)


@pytest.mark.parametrize("part", [0, 1])
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_misplaced_specials_are_found(part, value):
    _, ref, low = answers(PLAIN)
    got = [low[0].copy(), low[1].copy()]
    got[part][3, 2] = value
    with pytest.raises(AssertionError, match=r"misplaced, first at \(3, 2"):
        compare(PLAIN, got, ref, low)
    missing = [ref[0].copy(), ref[1].copy()]
    missing[part][3, 2] = value
    with pytest.raises(AssertionError, match=r"misplaced, first at \(3, 2"):
        compare(PLAIN, low, missing, got)


def test_failures_tell_where_and_how_much():
    _, ref, low = answers(PLAIN)
    wrong = low[0].copy()
    wrong[5, 1, 40] += 1.0
    with pytest.raises(AssertionError, match=r"o: 100.00% of 26880 pass\n.*at \(5, 1, 40\): got"):
        compare(PLAIN, (wrong, low[1]), ref, low)
    with pytest.raises(AssertionError, match="got shape"):
        compare(PLAIN, (low[0][1:], low[1]), ref, low)


def test_a_masked_row_must_be_exactly_zero():
    case = replace(PLAIN, kv_len=0)
    _, ref, low = answers(case)
    compare(case, low, ref, low)
    wrong = low[0].copy()
    wrong[4, 0, 0] = 1e-7
    with pytest.raises(AssertionError, match="first wrong"):
        compare(case, (wrong, low[1]), ref, low)


def test_ulp():
    sizes = np.array([0.0, 1.0, 1.99, 2.0, 1e-30])
    half = np.dtype(np.float16)
    np.testing.assert_array_equal(ulp(half, sizes), [0.0, 2**-10, 2**-10, 2**-9, 2**-24])
    np.testing.assert_array_equal(ulp(BF16, sizes)[:4], [0.0, 2**-7, 2**-7, 2**-6])


def test_bitwise_comparison_sees_a_single_bit():
    a = np.zeros((2, 3), BF16)
    b = a.copy()
    assert_bitwise_equal(a, b, "same")
    b[1, 2] = -0.0
    with pytest.raises(AssertionError, match=r"1 differ, first at \(1, 2\)"):
        assert_bitwise_equal(a, b, "signed zero")


DTYPES = [*(d.numpy for d in dtypes.ALL), np.dtype(np.float64)]


@pytest.mark.parametrize("framework", ["numpy", "torch"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", ["packed", "padded", "unaligned", "swapped"])
def test_poison_embeds_and_guards(dtype, kind, framework):
    xp = np if framework == "numpy" else pytest.importorskip("torch")
    data = np.random.default_rng(0).integers(0, 2, (5, 3, 8)).astype(dtype)
    steps = cases.element_strides(kind, data.shape)
    p = poison.embed(data, steps, offset=3, xp=xp, device="cpu")
    assert tuple(p.array.shape) == data.shape
    strides = p.array.stride() if xp is not np else np.array(p.array.strides) // dtype.itemsize
    assert tuple(strides) == steps
    assert_bitwise_equal(p.values(), data, "content")
    p.assert_intact("untouched")
    outside = np.flatnonzero(~p.owned)
    before, after = outside[outside < p.offset], outside[outside > np.flatnonzero(p.owned).max()]
    assert len(before) == poison.GUARD + 3 and len(after) == poison.GUARD
    # Whatever may hold a NaN does.
    if dtype.name.startswith(("float", "bfloat")):
        host = p.buffer if xp is np else p.buffer.view(bits(xp, dtype)).numpy().view(dtype)
        assert np.isnan(host[outside]).all()
    for place in (outside[0], before[-1], outside[len(outside) // 2], after[0], outside[-1]):
        raw = p.buffer.view(f"i{dtype.itemsize}" if xp is np else bits(xp, dtype))
        old = int(raw[place])
        raw[place] = old ^ 1
        with pytest.raises(AssertionError, match=f"is {place - p.offset} elements"):
            p.assert_intact("written")
        raw[place] = old
    p.assert_intact("restored")


def bits(torch, dtype):
    return getattr(torch, f"int{8 * dtype.itemsize}")


def test_poison_reads_back_what_was_written():
    p = poison.blank((2, 3, 4), BF16, (20, 5, 1))
    assert np.isnan(p.values().astype(np.float32)).all()
    p.array[...] = 2.0
    p.assert_intact("written inside only")
    assert (p.values() == 2.0).all()
    empty = poison.embed(np.zeros((0, 3, 4), BF16))
    assert empty.array.shape == (0, 3, 4) and not empty.owned.any()
    empty.assert_intact("empty")


def test_poison_refuses_overlapping_strides():
    with pytest.raises(AssertionError, match="overlap"):
        poison.embed(np.zeros((4, 2, 8)), (8, 4, 1))


def test_cases_repeat_and_inputs_are_fresh():
    for seed in range(20):
        case = cases.random_case(seed)
        assert case == cases.random_case(seed)
        first, second = cases.make_inputs(case), cases.make_inputs(case)
        for name, x in first.items():
            if isinstance(x, np.ndarray):
                assert x is not second[name] and x.flags.c_contiguous
                assert_bitwise_equal(x, second[name], name)


def test_cases_reach_every_pair_of_options():
    """Over 3,000 seeds, every value of an option meets every value of every other option."""
    seen = [asdict(cases.random_case(seed)) for seed in range(3000)]
    facts = [
        {
            "q": "decode" if c["qo_len"] == 1 else "many" if c["qo_len"] > 128 else "some",
            "kv": "shorter" if c["kv_len"] < c["qo_len"] else "longer",
            "causal": c["causal"],
            "window": c["window_left"] >= 0,
            "capped": bool(c["logits_soft_cap"]),
            **{n: c[n] for n in ("group", "dtype", "kv_layout", "mask_kind", "pos_encoding_mode")},
            **{n: c[n] for n in ("has_sinks", "scale_q", "scale_k", "scale_v", "o_dtype")},
            "fp8": c["kv_dtype"] if c["kv_dtype"].startswith("float8") else "same",
            "dissimilar": c["head_dim_qk"] != c["head_dim_vo"],
        }
        for c in seen
    ]
    values = {name: {f[name] for f in facts} for name in facts[0]}
    assert len(values["group"]) == 10 and len(values["pos_encoding_mode"]) == 3
    impossible = {("q", "decode", "kv", "shorter")}
    for a, b in itertools.combinations(values, 2):
        met = {(f[a], f[b]) for f in facts}
        missed = {(a, x, b, y) for x in values[a] for y in values[b]} - {
            (a, x, b, y) for x, y in met
        }
        assert missed <= impossible, missed


def test_cases_are_ones_the_kernels_must_take():
    for seed in range(2000):
        case = cases.random_case(seed)
        assert 0 <= case.qo_len <= 300 and 0 <= case.kv_len <= 600
        assert case.multiplies <= 120_000_000
        for dim in (case.head_dim_qk, case.head_dim_vo):
            assert dim % 8 == 0 and 8 <= dim <= 256
        if case.pos_encoding_mode == "ROPE_LLAMA":
            assert case.head_dim_qk % 16 == 0
        for kind in case.strides:
            shape = (case.qo_len, case.num_qo_heads, case.head_dim_qk)
            steps = cases.element_strides(kind, shape)
            aligned = all(s % 8 == 0 for s in steps[:2])
            assert steps[2] == 1 and (aligned or kind == "unaligned")
