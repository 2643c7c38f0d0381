"""Merges into fp8, and what should come out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

import cupyattn
from cupyattn import reference
from cupyattn.core import dtypes
from cupyattn.core.dtypes import DType
from cupyattn.flash_attn import merge_attn_states

Put = Callable[[np.ndarray], Any]
FP8 = (dtypes.float8_e4m3fn, dtypes.float8_e5m2)


def check_close(got: np.ndarray, want: np.ndarray, narrow: DType) -> None:
    """Rounded once, saturated; a step apart where float32 sums differ."""
    exact = reference.to_fp8(want, 1.0, narrow.numpy).astype(np.float64)
    x = got.astype(np.float64)
    assert np.isfinite(x).all()
    step = np.maximum(np.abs(exact) * (0.126 if narrow is FP8[0] else 0.26), 2.0**-9)
    assert (np.abs(x - exact) <= step).all()
    assert (x == exact).mean() > 0.97


def check_states(put: Put, put_fp8: Put, narrow: DType, head_dim: int, dtype: DType) -> None:
    """All three forms, with scales as numbers and as arrays."""
    rng = np.random.default_rng(head_dim)
    v = rng.normal(0, 3, (5, 3, 2, head_dim)).astype(dtype.numpy)
    s = rng.normal(0, 3, (5, 3, 2)).astype(np.float32)
    indptr = np.array([0, 3, 3, 9, 15], np.int32)
    flat = put(v.reshape(15, 2, head_dim)), put(s.reshape(15, 2)), put(indptr)
    for scale in (None, 0.05, np.array([0.002], np.float32), np.array(0.7, np.float32)):
        factor = 1.0 if scale is None else float(np.asarray(scale).reshape(-1)[0])
        given = put(scale) if isinstance(scale, np.ndarray) else scale
        for call, arrays in (
            (cupyattn.merge_state, tuple(put(x) for i in (0, 1) for x in (v[:, i], s[:, i]))),
            (cupyattn.merge_states, (put(v), put(s))),
            (cupyattn.variable_length_merge_states, flat),
        ):
            want, want_s = call(*(as_float32(x) for x in numpy_of(call, v, s, indptr)))
            out = put_fp8(np.zeros(want.shape, narrow.numpy))
            got, got_s = call(*arrays, out=out, output_scale=given)
            assert got is out
            check_close(host(out, narrow), want.astype(np.float64) / factor, narrow)
            np.testing.assert_allclose(host(got_s), want_s, rtol=1e-5, atol=1e-5)


def as_float32(x: np.ndarray) -> np.ndarray:
    return x if x.dtype.kind == "i" else x.astype(np.float32)


def numpy_of(call: Any, v: np.ndarray, s: np.ndarray, indptr: np.ndarray) -> tuple[Any, ...]:
    if call is cupyattn.merge_state:
        return v[:, 0], s[:, 0], v[:, 1], s[:, 1]
    if call is cupyattn.merge_states:
        return v, s
    return v.reshape(15, *v.shape[2:]), s.reshape(15, 2), indptr


def host(x: Any, narrow: DType | None = None) -> np.ndarray:
    """An array of any framework on the host."""
    if isinstance(x, np.ndarray):
        return x
    if hasattr(x, "untyped_storage"):
        import torch

        if narrow is not None:
            return x.view(torch.uint8).cpu().numpy().view(narrow.numpy)
        return x.cpu().numpy()
    return x.get() if narrow is None else x.get().view(narrow.numpy)


def check_vllm(put: Put, empty: Callable[[tuple[int, ...], DType], Any], narrow: DType) -> None:
    """vLLM's call: rows without a prefix, infinities of both signs."""
    rng = np.random.default_rng(1)
    rows, heads, dim = 37, 3, 48
    v = rng.normal(0, 1, (2, rows, heads, dim)).astype(np.float16)
    s = rng.normal(0, 1, (2, heads, rows)).astype(np.float32)
    s[0][:, ::5], s[1][:, 1::7] = np.inf, -np.inf
    s[1][:, 36] = np.inf  # of a row without a prefix: its v counts all the same
    for out_dtype in (dtypes.float16, narrow):
        for count in (None, 20, 0):
            scale = 0.05 if out_dtype is narrow else None
            out, lse = empty((rows, heads, dim), out_dtype), empty((heads, rows), dtypes.float32)
            given = None if scale is None else put(np.array([scale], np.float32))
            answer = merge_attn_states(
                out, put(v[0]), put(s[0]), put(v[1]), put(s[1]), lse, count, given
            )
            assert answer is None
            want, want_s = vllm(v, s, rows if count is None else count)
            want_s = want_s.astype(np.float32)
            np.testing.assert_allclose(host(lse), want_s, rtol=1e-5, atol=1e-5)
            if scale is None:
                np.testing.assert_allclose(host(out), want, rtol=2e-3, atol=2e-3)
            else:
                check_close(host(out, narrow), want / scale, narrow)


def vllm(v: np.ndarray, s: np.ndarray, count: int) -> tuple[np.ndarray, np.ndarray]:
    given, s = s, np.where(np.isinf(s), -np.inf, s.astype(np.float64))
    most = np.maximum(s[0], s[1])
    most = np.where(np.isfinite(most), most, 0.0)
    w = np.exp(s - most)
    total = w.sum(axis=0)
    with np.errstate(divide="ignore"):
        lse = np.log(total) + most
    parts = [(w[i] / np.where(total > 0, total, 1)).T[..., None] * v[i] for i in (0, 1)]
    out = parts[0] + parts[1]
    out[count:], lse[:, count:] = v[1][count:], given[1][:, count:]
    return out, lse
