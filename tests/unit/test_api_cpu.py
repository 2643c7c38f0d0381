"""The public calls on CPU arrays of every framework: what comes back, and every way to ask."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import cupyattn
from cupyattn import array, reference
from cupyattn.array import as_numpy, view
from cupyattn.core import dtypes
from cupyattn.core.dtypes import DType

FLOATS = (dtypes.float16, dtypes.bfloat16, dtypes.float32)
FP8 = (dtypes.float8_e4m3fn, dtypes.float8_e5m2)
LQ, LKV, HQ, HKV, D = 5, 9, 4, 2, 16


def make(framework: str, a: np.ndarray) -> Any:
    if framework == "torch":
        pytest.importorskip("torch")
        return array.from_numpy(a.copy(), view(pytest.importorskip("torch").zeros(1), "like"))
    if framework == "jax":
        return pytest.importorskip("jax").numpy.asarray(a)
    return a.copy()


def values(x: Any) -> np.ndarray:
    return as_numpy(view(x, "x")).astype(np.float64)


def kv_inputs(row: DType, kv: DType | None = None) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    shapes = {"q": (LQ, HQ, D), "k": (LKV, HKV, D), "v": (LKV, HKV, D)}
    kinds = {"q": row.numpy, "k": (kv or row).numpy, "v": (kv or row).numpy}
    return {n: rng.standard_normal(s).astype(kinds[n]) for n, s in shapes.items()}


@pytest.fixture
def arrays() -> SimpleNamespace:
    """float32 NumPy q, k, v, and the reference's causal answer."""
    a = kv_inputs(dtypes.float32)
    o, lse = reference.attention(**a, causal=True)
    return SimpleNamespace(**a, o=o, lse=lse)


# --- frameworks and dtypes ---


@pytest.mark.parametrize("framework", ["numpy", "torch", "jax"])
@pytest.mark.parametrize("row", FLOATS, ids=repr)
@pytest.mark.parametrize("kv", [None, *FP8], ids=repr)
def test_answers_are_the_callers_own_kind(framework: str, row: DType, kv: DType | None) -> None:
    a = kv_inputs(row, kv)
    given = {name: make(framework, x) for name, x in a.items()}
    ref_o, ref_lse = reference.attention(**a, causal=True)
    out, lse = cupyattn.single_prefill_with_kv_cache(**given, causal=True, return_lse=True)
    assert type(out) is type(lse) is type(given["q"])
    assert (view(out, "out").dtype, view(lse, "lse").dtype) == (row, dtypes.float32)
    assert (tuple(out.shape), tuple(lse.shape)) == ((LQ, HQ, D), (LQ, HQ))
    np.testing.assert_array_equal(values(out), ref_o.astype(row.numpy).astype(np.float64))
    np.testing.assert_array_equal(values(lse), ref_lse.astype(np.float32))
    token = cupyattn.single_decode_with_kv_cache(given["q"][-1], given["k"], given["v"])
    assert type(token) is type(given["q"]) and tuple(token.shape) == (HQ, D)
    np.testing.assert_array_equal(values(token), values(out)[-1])


@pytest.mark.parametrize("framework", ["numpy", "torch"])
@pytest.mark.parametrize("row", FLOATS, ids=repr)
def test_out_and_lse_are_written_and_returned(framework: str, row: DType) -> None:
    a = kv_inputs(row)
    given = {name: make(framework, x) for name, x in a.items()}
    out = make(framework, np.full((LQ, HQ, D), 7, row.numpy))
    lse = make(framework, np.full((LQ, HQ), 7, np.float32))
    fresh = cupyattn.single_prefill_with_kv_cache(**given, return_lse=True)
    got = cupyattn.single_prefill_with_kv_cache(**given, return_lse=True, out=out, lse=lse)
    assert got[0] is out and got[1] is lse
    for mine, theirs in zip(got, fresh, strict=True):
        np.testing.assert_array_equal(values(mine), values(theirs))
    token, logsum = out[0], lse[0]
    assert cupyattn.single_decode_with_kv_cache(given["q"][1], *cache(given), out=token) is token
    got = cupyattn.single_decode_with_kv_cache(
        given["q"][1], *cache(given), return_lse=True, lse=logsum
    )
    assert got[1] is logsum and got[0] is not token
    np.testing.assert_array_equal(values(out)[0], values(out)[1])
    np.testing.assert_array_equal(values(lse)[0], values(lse)[1])


def cache(given: dict[str, Any]) -> tuple[Any, Any]:
    return given["k"], given["v"]


def test_lse_is_written_even_if_not_returned(arrays: SimpleNamespace) -> None:
    lse = np.zeros((LQ, HQ), np.float32)
    out = cupyattn.single_prefill_with_kv_cache(arrays.q, arrays.k, arrays.v, causal=True, lse=lse)
    assert isinstance(out, np.ndarray)
    np.testing.assert_array_equal(lse, arrays.lse.astype(np.float32))


def test_strided_outputs(arrays: SimpleNamespace) -> None:
    whole = np.full((LQ, HQ + 2, D), 7, np.float32)
    lse = np.full((HQ, LQ), 7, np.float32)
    cupyattn.single_prefill_with_kv_cache(
        arrays.q, arrays.k, arrays.v, causal=True, out=whole[:, 1:-1], lse=lse.T
    )
    np.testing.assert_array_equal(whole[:, 1:-1], arrays.o.astype(np.float32))
    assert (whole[:, 0] == 7).all() and (whole[:, -1] == 7).all()
    np.testing.assert_array_equal(lse.T, arrays.lse.astype(np.float32))


def test_read_only_inputs(arrays: SimpleNamespace) -> None:
    for x in (arrays.q, arrays.k, arrays.v):
        x.flags.writeable = False
    out = cupyattn.single_prefill_with_kv_cache(arrays.q, arrays.k, arrays.v, causal=True)
    np.testing.assert_array_equal(out, arrays.o.astype(np.float32))
    assert out.flags.writeable


def test_inference_on_parameters() -> None:
    torch = pytest.importorskip("torch")
    q = torch.randn(3, 2, 8, requires_grad=True)
    with torch.no_grad():
        out = cupyattn.single_prefill_with_kv_cache(q, q, q)
    assert not out.requires_grad


def o_dtype_names() -> list[Any]:
    names: list[Any] = ["bfloat16", "bf16", "torch.bfloat16", ml_dtypes.bfloat16]
    names += [np.dtype(ml_dtypes.bfloat16), dtypes.bfloat16]
    for module in ("torch", "jax.numpy"):
        try:
            names.append(__import__(module, fromlist=["bfloat16"]).bfloat16)
        except ImportError:
            continue
    return names


@pytest.mark.parametrize("name", o_dtype_names(), ids=lambda x: f"{type(x).__name__} {x}")
def test_every_way_to_name_a_dtype(arrays: SimpleNamespace, name: Any) -> None:
    out = cupyattn.single_prefill_with_kv_cache(
        arrays.q, arrays.k, arrays.v, causal=True, o_dtype=name
    )
    assert out.dtype == np.dtype(ml_dtypes.bfloat16)
    np.testing.assert_array_equal(out, arrays.o.astype(ml_dtypes.bfloat16))


# --- options reach the reference ---


def head_major(x: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(x.swapaxes(0, 1))


OPTIONS: dict[str, dict[str, Any]] = {
    "causal": {"causal": True},
    "window": {"causal": True, "window_left": 2},
    "soft cap": {"logits_soft_cap": 1.5},
    "sm_scale": {"sm_scale": 0.7},
    "rope": {"pos_encoding_mode": "ROPE_LLAMA"},
    "rope, scaled": {"pos_encoding_mode": "ROPE_LLAMA", "rope_scale": 2.0, "rope_theta": 5e5},
    "alibi": {"pos_encoding_mode": "ALIBI", "causal": True},
    "sinks": {"sinks": np.array([0.5, -1, 2, 0], np.float32)},
    "scales": {
        "scale_q": np.array([1, 2, 0.5, -1], np.float32),
        "scale_k": np.array([0.5, 2], np.float32),
        "scale_v": np.array([3, -1], np.float32),
    },
}


@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_prefill_is_the_reference(
    arrays: SimpleNamespace, options: dict[str, Any], layout: str
) -> None:
    q, k, v = arrays.q, arrays.k, arrays.v
    o, lse = reference.attention(q, k, v, **options)
    if layout == "HND":
        k, v = head_major(k), head_major(v)
    got = cupyattn.single_prefill_with_kv_cache_return_lse(q, k, v, **options, kv_layout=layout)
    np.testing.assert_array_equal(got[0], o.astype(np.float32))
    np.testing.assert_array_equal(got[1], lse.astype(np.float32))


@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize(
    "name", ["window", "soft cap", "sm_scale", "rope, scaled", "alibi", "sinks"]
)
def test_decode_is_the_last_row(arrays: SimpleNamespace, name: str, layout: str) -> None:
    options = {key: x for key, x in OPTIONS[name].items() if key != "causal"}
    o, lse = reference.attention(arrays.q[-1:], arrays.k, arrays.v, causal=True, **options)
    k, v = arrays.k, arrays.v
    if layout == "HND":
        k, v = head_major(k), head_major(v)
    got = cupyattn.single_decode_with_kv_cache(
        arrays.q[-1], k, v, kv_layout=layout, return_lse=True, **options
    )
    np.testing.assert_array_equal(got[0], o[0].astype(np.float32))
    np.testing.assert_array_equal(got[1], lse[0].astype(np.float32))


def test_scales_multiply(arrays: SimpleNamespace) -> None:
    q, k, v = arrays.q, arrays.k, arrays.v
    o, lse = reference.attention(q, k, v, sm_scale=2.0 * 3.0 * 0.25 * 0.5 * 0.1)
    scales = {"sm_scale": 0.1, "scale_q": 2.0, "q_scale": 3.0, "scale_k": 0.25, "k_scale": 0.5}
    got = cupyattn.single_prefill_with_kv_cache_return_lse(
        q, k, v, **scales, scale_v=4.0, v_scale=-0.5
    )
    np.testing.assert_allclose(got[0], -2.0 * o, rtol=1e-6, atol=1e-7)
    np.testing.assert_allclose(got[1], lse, rtol=1e-6)
    token = cupyattn.single_decode_with_kv_cache(
        q[0], k, v, sm_scale=0.1, q_scale=6.0, k_scale=0.125, v_scale=-2.0
    )
    np.testing.assert_allclose(token, -2.0 * o[0], rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("number", [np.float32(0.5), np.array(0.5), np.array([0.5]), 1 / 2])
def test_scales_may_be_any_number(arrays: SimpleNamespace, number: Any) -> None:
    q, k, v = arrays.q, arrays.k, arrays.v
    expected = cupyattn.single_prefill_with_kv_cache(q, k, v, sm_scale=0.5, logits_soft_cap=0.5)
    got = cupyattn.single_prefill_with_kv_cache(q, k, v, sm_scale=number, logits_soft_cap=number)
    np.testing.assert_array_equal(got, expected)


@pytest.mark.parametrize("framework", ["numpy", "torch", "jax"])
def test_masks(arrays: SimpleNamespace, framework: str) -> None:
    seen = np.random.default_rng(1).random((LQ, LKV)) < 0.5
    seen[2] = False
    o, _ = reference.attention(arrays.q, arrays.k, arrays.v, mask=seen, window_left=4)
    q, k, v, mask = (make(framework, x) for x in (arrays.q, arrays.k, arrays.v, seen))
    options = {"causal": True, "window_left": 4}
    got = cupyattn.single_prefill_with_kv_cache(q, k, v, custom_mask=mask, **options)
    np.testing.assert_array_equal(values(got), o.astype(np.float32))
    assert (values(got)[2] == 0).all()
    packed = cupyattn.packbits(mask.reshape(-1), bitorder="little")
    wrong = make(framework, ~seen)
    got = cupyattn.single_prefill_with_kv_cache(
        q, k, v, custom_mask=wrong, packed_custom_mask=packed, **options
    )
    np.testing.assert_array_equal(values(got), o.astype(np.float32))


# --- edges ---


def test_no_rows_and_no_keys(arrays: SimpleNamespace) -> None:
    q, k, v = arrays.q, arrays.k, arrays.v
    out, lse = cupyattn.single_prefill_with_kv_cache_return_lse(q[:0], k, v, causal=True)
    assert (out.shape, lse.shape) == ((0, HQ, D), (0, HQ))
    for causal in (False, True):
        got = cupyattn.single_prefill_with_kv_cache_return_lse(q, k[:0], v[:0], causal=causal)
        assert (got[0] == 0).all() and np.isneginf(got[1]).all()
    token, lse = cupyattn.single_decode_with_kv_cache(q[0], k[:0], v[:0], return_lse=True)
    assert (token == 0).all() and np.isneginf(lse).all()
    sinks = np.arange(HQ, dtype=np.float32)
    token, lse = cupyattn.single_decode_with_kv_cache(
        q[0], k[:0], v[:0], return_lse=True, sinks=sinks
    )
    assert (token == 0).all()
    np.testing.assert_allclose(lse, sinks * np.log2(np.e), rtol=1e-6)
    packed, indptr = cupyattn.segment_packbits(np.zeros(0, bool), np.zeros(1, np.int32))
    assert (packed.shape, indptr.tolist()) == ((0,), [0])


def test_fewer_keys_than_rows(arrays: SimpleNamespace) -> None:
    o, lse = cupyattn.single_prefill_with_kv_cache_return_lse(
        arrays.q, arrays.k[:3], arrays.v[:3], causal=True
    )
    assert (o[:2] == 0).all() and np.isneginf(lse[:2]).all()
    alone = cupyattn.single_prefill_with_kv_cache(arrays.q[2:3], arrays.k[:1], arrays.v[:1])
    np.testing.assert_array_equal(o[2], alone[0])


# --- old calls ---


def test_old_positional_order(arrays: SimpleNamespace) -> None:
    q, k, v = arrays.q, arrays.k, arrays.v
    prefill = cupyattn.single_prefill_with_kv_cache
    mask = np.random.default_rng(2).random((LQ, LKV)) < 0.5
    packed = cupyattn.packbits(mask.flatten(), bitorder="little")
    by_name = prefill(q, k, v, custom_mask=mask)
    for masks in ((mask,), (mask, None), (None, packed), (~mask, packed)):
        np.testing.assert_array_equal(prefill(q, k, v, *masks), by_name)
    np.testing.assert_array_equal(prefill(q, k, v, None, None, True), arrays.o.astype(np.float32))
    rest = (True, "HND", "ROPE_LLAMA", False, 0.3, 2, 5.0, 2.0, 5e5)
    names = ("causal", "kv_layout", "pos_encoding_mode", "allow_fp16_qk_reduction", "sm_scale")
    names += ("window_left", "logits_soft_cap", "rope_scale", "rope_theta")
    k, v = head_major(k), head_major(v)
    by_name = prefill(q, k, v, **dict(zip(names, rest, strict=True)))
    old = cupyattn.single_prefill_with_kv_cache_return_lse(q, k, v, None, None, *rest)
    np.testing.assert_array_equal(old[0], by_name)
    mixed = prefill(q, k, v, None, None, *rest[:3], **dict(zip(names[4:], rest[4:], strict=True)))
    np.testing.assert_array_equal(mixed, by_name)


def test_todays_positional_order(arrays: SimpleNamespace) -> None:
    q, k, v = arrays.q, arrays.k, arrays.v
    prefill = cupyattn.single_prefill_with_kv_cache
    per_head = np.array([1, 2], np.float32)
    by_name = prefill(q, k, v, scale_k=per_head, scale_v=0.5, o_dtype="float16", causal=True)
    got = prefill(q, k, v, None, per_head, 0.5, "float16", None, None, True)
    assert got.dtype == np.float16
    np.testing.assert_array_equal(got, by_name)
    np.testing.assert_array_equal(prefill(q, k, v, None, None), prefill(q, k, v))


def test_arguments_kept_for_compatibility_change_nothing(arrays: SimpleNamespace) -> None:
    q, k, v = arrays.q, arrays.k, arrays.v
    plain = cupyattn.single_prefill_with_kv_cache(q, k, v)
    kept = {
        "use_fp16_qk_reduction": True,
        "backend": "fa3",
        "enable_pdl": True,
        "kv_cache_sf": None,
    }
    np.testing.assert_array_equal(cupyattn.single_prefill_with_kv_cache(q, k, v, **kept), plain)
    token = cupyattn.single_decode_with_kv_cache(
        q[0], k, v, use_tensor_cores=True, enable_pdl=False
    )
    np.testing.assert_array_equal(token, plain[0])


def test_return_lse_variant(arrays: SimpleNamespace) -> None:
    q, k, v = arrays.q, arrays.k, arrays.v
    variant = cupyattn.single_prefill_with_kv_cache_return_lse
    out, _ = variant(q, k, v)
    np.testing.assert_array_equal(variant(q, k, v, return_lse=False), out)


# --- bits ---


@pytest.mark.parametrize("framework", ["numpy", "torch", "jax"])
@pytest.mark.parametrize("bitorder", ["big", "little"])
def test_packbits(framework: str, bitorder: Any) -> None:
    x = np.random.default_rng(3).random(21) < 0.5
    packed = cupyattn.packbits(make(framework, x), bitorder)
    assert type(packed) is type(make(framework, x)) and view(packed, "y").dtype is dtypes.uint8
    np.testing.assert_array_equal(values(packed), np.packbits(x, bitorder=bitorder))
    indptr = np.array([2, 2, 11, 21], np.int32)
    parts, new = cupyattn.segment_packbits(make(framework, x), make(framework, indptr), bitorder)
    expected = [np.packbits(x[a:b], bitorder=bitorder) for a, b in ((2, 11), (11, 21))]
    np.testing.assert_array_equal(values(parts), np.concatenate(expected))
    assert values(new).tolist() == [0, 0, 2, 4] and view(new, "y").dtype is dtypes.int32
