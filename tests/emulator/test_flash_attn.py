"""flash_attn's functions, kernels and all, on the host."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from helpers import row_copies
from helpers.flash_cases import FORMS, Case
from helpers.new_keys import random_new_keys
from helpers.plain_answers import dense
from helpers.share import one_of

from cupyattn import array
from cupyattn.core import dtypes
from cupyattn.engine.widening import widened
from cupyattn.flash_attn import (
    attend,
    flash_attn_func,
    flash_attn_varlen_func,
    flash_attn_with_kvcache,
)
from cupyattn.launch.attention import plan_batch

from . import gpu


@pytest.mark.parametrize("rounds", one_of(2, [range(3), range(3, 8)]), ids=["few", "rest"])
@pytest.mark.parametrize("form", FORMS)
def test_random_calls(form: str, rounds: range) -> None:
    for seed in (FORMS.index(form) + len(FORMS) * i for i in rounds):
        with gpu.plugged_in(seed=seed % 3):
            Case(seed, is_gpu=True).run()


def run_padded(page_size: int, options: dict[str, Any], dim: int = 64, **facts: Any) -> None:
    """Many rows over pages whose first keys do not exist: they are NaN."""
    rng = np.random.default_rng(5)
    pads, lens = np.array([page_size + 3, 0, 41]), np.array([230, 190, 41])
    rows, heads, kv_heads = 50, 4, 2
    width = -(-230 // page_size)
    table = rng.permutation(3 * width).reshape(3, width).astype(np.int32)
    pools = np.full((2, 3 * width, page_size, kv_heads, dim), np.nan, np.float16)
    keys = rng.normal(0, 1, (2, 3, 230, kv_heads, dim)).astype(np.float16)
    for b in range(3):
        for j in range(pads[b], lens[b]):
            pools[:, table[b, j // page_size], j % page_size] = keys[:, b, j]
    q = rng.normal(0, 1, (3, rows, heads, dim)).astype(np.float16)
    with gpu.plugged_in(**facts) as emulated:
        out, lse = flash_attn_with_kvcache(
            *(q, *pools),
            cache_seqlens=lens.astype(np.int32),
            page_table=table,
            cache_leftpad=pads.astype(np.int32),
            return_softmax_lse=True,
            **options,
        )
        name = "prefill_sm80" if facts.get("is_portable") else "prefill_sm90"
        assert emulated.has_launched(name)
    masks = {"causal": options.get("causal", False), "window": options.get("window_size", (-1, -1))}
    for b in range(3):
        k, v = (keys[i, b, pads[b] : lens[b]] for i in range(2))
        want, want_lse = dense(q[b], k, v, scale=dim**-0.5, chunk=0, **masks)
        np.testing.assert_allclose(out[b], want, 2e-2, 2e-2)
        np.testing.assert_allclose(lse[b], want_lse, 1e-2, 1e-2)


@pytest.mark.parametrize("is_portable", [True, False])
@pytest.mark.parametrize("page_size", [16, 5])
@pytest.mark.parametrize("options", [{}, {"causal": True}, {"window_size": (90, 0)}])
def test_padding_ahead_of_many_rows(
    is_portable: bool, page_size: int, options: dict[str, Any]
) -> None:
    run_padded(page_size, options, is_portable=is_portable, num_sms=4)


@pytest.mark.parametrize("dim", one_of(2, [72, 160]))
@pytest.mark.parametrize("page_size", one_of(2, [16, 5]))
def test_padding_ahead_of_rows_of_other_head_dims(page_size: int, dim: int) -> None:
    run_padded(page_size, {"causal": True}, dim, num_sms=4)


@pytest.mark.parametrize("first", one_of(3, range(0, 48, 16)))
def test_new_keys(first: int) -> None:
    """Rows, pages and positions of nobody among them."""
    names = set()
    for seed in range(first, first + 16):
        with gpu.plugged_in(seed=seed % 3) as emulated:
            random_new_keys(seed).run()
        names |= {launch.name for launch in emulated.launches}
    assert names == {"append_new_kv", "copy_rows"}  # tables of fp8 are widened


@pytest.mark.parametrize("arch", [800, 900])
def test_copies_of_rows(arch: int) -> None:
    check_copies(arch=arch)


def check_copies(**facts: Any) -> None:
    for seed in range(40):
        with gpu.plugged_in(seed=seed % 3, **facts) as emulated:
            row_copies.check(seed)
        assert {launch.name for launch in emulated.launches} <= {"copy_rows"}


@pytest.mark.parametrize("arch", [800, 900])
@pytest.mark.parametrize("wide", ["float16", "bfloat16"])
@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float8_e5m2"])
def test_fp8_numbers_in_16_bits(dtype: str, wide: str, arch: int) -> None:
    """All of them."""
    narrow, to = dtypes.parse(dtype, "dtype"), dtypes.parse(wide, "dtype")
    x = np.arange(256, dtype=np.uint8).view(narrow.numpy).reshape(4, 1, 64)
    with gpu.plugged_in(arch=arch):
        got = widened(array.view(x, "x"), to, "x").astype(np.float32)
    with np.errstate(invalid="ignore"):
        want = x.astype(np.float32)
    np.testing.assert_array_equal(got, want)
    numbers = ~np.isnan(want)
    np.testing.assert_array_equal(np.signbit(got[numbers]), np.signbit(want[numbers]))


def run_of_requests(rows: int, is_portable: bool = False, **facts: Any) -> None:
    """Slopes and scales that differ by request, of keys, of values, and of fp8 queries: dense,
    in chunks, and in splits."""
    rng = np.random.default_rng(rows)
    count, heads, kv_heads, dim, room = 3, 4, 2, 64, 230
    fp8 = dtypes.float8_e4m3fn.numpy
    q = rng.normal(0, 1, (count, rows, heads, dim)).astype(np.float16)
    k, v = rng.normal(0, 1, (2, count, room, kv_heads, dim)).astype(np.float16)
    keys = k.astype(fp8), v.astype(fp8)
    slopes = rng.random((count, heads)).astype(np.float32) * 0.3
    of_q, of_k, of_v = rng.random((3, count, kv_heads)).astype(np.float32) * 2
    scales = {"k_descale": of_k, "v_descale": of_v, "return_softmax_lse": True}
    lens = np.array([230, 41, 150], np.int32)
    calls: list[Callable[[], Any]] = [
        lambda: flash_attn_func(q, k, v, alibi_slopes=slopes, return_softmax_lse=True),
        lambda: flash_attn_func(q, k, v, alibi_slopes=slopes[1], return_softmax_lse=True),
        lambda: flash_attn_func(q, k, v, 0.0, None, True, softcap=5.0, alibi_slopes=slopes),
        lambda: flash_attn_func(q, *keys, causal=True, **scales),
        lambda: flash_attn_func(q, *keys, v_descale=of_v),
        lambda: flash_attn_func(q.astype(fp8), *keys, q_descale=of_q, k_descale=of_k[0]),
        lambda: flash_attn_func(q, *keys, softcap=3.0, alibi_slopes=slopes, **scales),
        lambda: flash_attn_func(
            q, *keys, causal=True, attention_chunk=7, alibi_slopes=slopes, **scales
        ),
        lambda: flash_attn_with_kvcache(q, *keys, cache_seqlens=lens, causal=True, **scales),
    ]
    for index, call in enumerate(calls):
        want = call()
        with gpu.plugged_in(is_portable=is_portable, num_sms=4, **facts):
            got = call()
        # Probabilities have 8 bits where queries have: four bits of each product are right.
        within = 6e-2 if index == 5 else 2e-2
        for a, b in zip(*((x if isinstance(x, tuple) else (x,)) for x in (got, want)), strict=True):
            np.testing.assert_allclose(a.astype(np.float32), b.astype(np.float32), within, within)


@pytest.mark.parametrize("is_portable", [True, False])
@pytest.mark.parametrize("rows", [3, 50])
def test_slopes_and_scales_of_requests(rows: int, is_portable: bool) -> None:
    run_of_requests(rows, is_portable)


def test_fp8_keys_converted_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    """With scales of requests; keys of few rows or of fp8 queries, and pages, stay as they are."""
    monkeypatch.setattr(attend, "WIDENING_ROWS", 140)
    monkeypatch.setattr(attend, "WIDENING_LOGITS", 0)
    rng = np.random.default_rng(0)
    fp8 = dtypes.float8_e4m3fn.numpy
    q = rng.normal(0, 1, (2, 70, 4, 64)).astype(dtypes.bfloat16.numpy)
    k, v = rng.normal(0, 1, (2, 2, 90, 2, 64)).astype(fp8)
    of_q, of_k, of_v = rng.uniform(0.5, 2, (3, 2, 2)).astype(np.float32)
    scales = {"k_descale": of_k, "v_descale": of_v, "return_softmax_lse": True}
    offsets = np.array([0, 70, 140], np.int32), np.array([0, 90, 180], np.int32)
    flat = [x.reshape(-1, *x.shape[2:]) for x in (q, k, v)]
    lens = np.array([90, 90], np.int32)
    calls: list[tuple[Callable[[], Any], bool]] = [
        (lambda: flash_attn_func(q[:, :69], k, v, causal=True), False),
        (lambda: flash_attn_func(q, k, v, causal=True), True),
        (lambda: flash_attn_func(q, k, v, causal=True, **scales), True),
        (lambda: flash_attn_func(q.astype(fp8), k, v, q_descale=of_q, **scales), False),
        (lambda: flash_attn_varlen_func(*flat, *offsets, 69, 90, causal=True), False),
        (lambda: flash_attn_varlen_func(*flat, *offsets, 70, 90, causal=True), True),
        (lambda: flash_attn_with_kvcache(q, k, v, cache_seqlens=lens, **scales), False),
    ]
    for call, is_converted in calls:
        want = call()
        with gpu.plugged_in(num_sms=4) as emulated:
            for _ in range(2):  # what is cached of one call is not taken for another
                emulated.forget()
                got = call()
                names = [launch.name for launch in emulated.launches]
                assert ("copy_rows" in names) == is_converted
        within = 3e-2 if "prefill_sm90" not in names or is_converted else 6e-2
        for a, b in zip(*((x if isinstance(x, tuple) else (x,)) for x in (got, want)), strict=True):
            np.testing.assert_allclose(a.astype(np.float32), b.astype(np.float32), within, within)


def test_slopes_and_scales_of_requests_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of more requests than a block plans, of which there are two here."""
    monkeypatch.setattr(plan_batch, "max_requests", lambda device: 2)
    run_of_requests(6)


@pytest.mark.parametrize("dims", [(57, 57), (24, 35), (111, 8)])
def test_head_dims_of_no_kernel(dims: tuple[int, int]) -> None:
    """Dense, ragged and over a cache, to which new keys are added; into the caller's output too."""
    rng = np.random.default_rng(dims[0])
    q = rng.normal(0, 1, (2, 3, 4, dims[0])).astype(np.float16)
    k = rng.normal(0, 1, (2, 6, 2, dims[0])).astype(np.float16)
    v = rng.normal(0, 1, (2, 6, 2, dims[1])).astype(np.float16)
    wanted = [dense(q[b], k[b], v[b], scale=dims[0] ** -0.5, chunk=0, causal=True) for b in (0, 1)]
    lens = np.array([4, 4], np.int32)
    with gpu.plugged_in() as emulated:
        out, lse = flash_attn_func(q, k, v, causal=True, return_softmax_lse=True)
        given = np.zeros(out.shape, np.float16)
        assert flash_attn_func(q, k, v, causal=True, out=given) is given
        offsets = np.array([0, 3, 6], np.int32), np.array([0, 6, 12], np.int32)
        flat = [x.reshape(-1, *x.shape[2:]) for x in (q, k, v)]
        rows = flash_attn_varlen_func(*flat, *offsets, 3, 6, causal=True)
        caches = [np.array(x) for x in (k, v)]
        for x in caches:
            x[:, 4:] = np.nan
        new = k[:, 4:], v[:, 4:]
        cached = flash_attn_with_kvcache(q, *caches, *new, cache_seqlens=lens, causal=True)
    assert emulated.has_launched("copy_rows")
    assert np.array_equal(caches[0], k) and np.array_equal(caches[1], v)
    for b, (want, want_lse) in enumerate(wanted):
        for got in (out[b], given[b], rows[3 * b : 3 * b + 3], cached[b]):
            np.testing.assert_allclose(got, want, 2e-2, 2e-2)
        np.testing.assert_allclose(lse[b], want_lse, 1e-2, 1e-2)


@pytest.mark.parametrize(("columns", "kv_heads"), [(512, 2), (256, 1), (57, 2)])
def test_queries_of_values(columns: int, kv_heads: int) -> None:
    """Dense, ragged and over a cache, to which new keys are added."""
    rng = np.random.default_rng(columns)
    q, qv = (rng.normal(0, 1, (2, 3, 4, d)).astype(np.float16) for d in (64, columns))
    k, v = (rng.normal(0, 1, (2, 40, kv_heads, d)).astype(np.float16) for d in (64, columns))
    scale = (64 + columns) ** -0.5
    named = {"causal": True, "softcap": 9.0, "qv": qv}
    lens, offsets = np.array([38, 38], np.int32), np.array([0, 1, 2], np.int32)
    with gpu.plugged_in(num_sms=4) as emulated:
        out, lse = flash_attn_func(q, k, v, return_softmax_lse=True, **named)
        flat = [x.reshape(-1, *x.shape[2:]) for x in (q, k, v)]
        named["qv"] = qv.reshape(-1, *qv.shape[2:])
        rows = flash_attn_varlen_func(*flat, 3 * offsets, 40 * offsets, 3, 40, **named)
        caches = [np.array(x) for x in (k, v)]
        for x in caches:
            x[:, 38:] = np.nan
        new = k[:, 38:], v[:, 38:]
        cached = flash_attn_with_kvcache(q, *caches, *new, cache_seqlens=lens, **named | {"qv": qv})
    assert emulated.has_launched("copy_rows")
    for b in range(2):
        joined = (np.concatenate(x, 2) for x in ((q[b], qv[b]), (k[b], v[b])))
        want, want_lse = dense(*joined, v[b], scale=scale, causal=True, softcap=9.0)
        for got in (out[b], rows[3 * b : 3 * b + 3], cached[b]):
            np.testing.assert_allclose(got, want, 2e-2, 2e-2)
        np.testing.assert_allclose(lse[b], want_lse, 1e-2, 1e-2)


@pytest.mark.slow
@pytest.mark.parametrize("first", range(100, 400, 50))
def test_many_random_calls(first: int) -> None:
    for seed in range(first, first + 50):
        with gpu.plugged_in(seed=seed % 3):
            Case(seed, is_gpu=True).run()
