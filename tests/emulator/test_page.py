"""The kernels of page operations on the host: every access checked, every bit compared."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from helpers import page_cases, poison, share_cases, slot_cases
from helpers.page_cases import STRAY, Append, random_case, spoil
from helpers.share import one_of

import cupyattn
from cupyattn import paging, reference
from cupyattn.core import dtypes
from cupyattn.errors import ArgumentError
from cupyattn.launch.driver import enqueue
from cupyattn.slots import reshape_and_cache

from . import gpu


def embed(x: np.ndarray) -> Any:
    return poison.embed(x.astype(np.int32)).array


@pytest.mark.parametrize("first", one_of(6, range(0, 240, 20)))
def test_random_appends(emulated: gpu.EmulatedGpu, first: int) -> None:
    for seed in range(first, first + 20):
        emulated.forget()
        emulated.seed, emulated.arch = seed % 3, (900, 800)[seed % 2]
        Append(random_case(seed), np).run_and_check()


def test_stray_indices_touch_nothing(emulated: gpu.EmulatedGpu) -> None:
    append = Append(STRAY, np)
    assert spoil(append) >= 10
    append.run_and_check()


def test_offsets_that_fall(emulated: gpu.EmulatedGpu) -> None:
    append = Append(STRAY, np)
    append.slots = []
    append.run_and_check(kv_indptr=np.array([2**31 - 1, -5, -(2**31), 3, -7], np.int32))


def test_debug_counts_what_is_left_out(
    emulated: gpu.EmulatedGpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    append = Append(STRAY, np)
    count = spoil(append)
    monkeypatch.setattr(enqueue.cuda(), "is_debugging", True)
    with pytest.raises(ArgumentError, match=f"positions: {count} of "):
        append.run_and_check()


@pytest.mark.parametrize("arch", [800, 900], ids=["by hand", "by instruction"])
@pytest.mark.parametrize("cache_dtype", page_cases.FP8)
def test_roundings(emulated: gpu.EmulatedGpu, cache_dtype: str, arch: int) -> None:
    """Every bfloat16, every float16 and the floats around every boundary, as fp8."""
    emulated.mode, emulated.arch = "plain", arch
    fp8 = dtypes.parse(cache_dtype).numpy
    halves = np.arange(2**16, dtype=np.uint16)
    for values in (
        halves.view(dtypes.bfloat16.numpy),
        halves.view(np.float16),
        page_cases.all_roundings(),
    ):
        x = values.reshape(-1, 1, 64)
        nnz = len(x)
        tokens = np.zeros(nnz, np.int32), np.arange(nnz, dtype=np.int32)
        table = (np.array(a, np.int32) for a in ([0], [0, 1], [nnz]))
        cache = np.zeros((1, 2, nnz, 1, 64), fp8)
        cupyattn.append_paged_kv_cache(x, x, *tokens, cache, *table, v_scale=0.7)
        for part, scale in zip(cache[0], (1.0, 0.7), strict=True):
            wanted = page_cases.rounded(x, scale, fp8)
            np.testing.assert_array_equal(part.view(np.uint8), wanted.view(np.uint8))


@pytest.mark.parametrize("seed", range(12))
def test_index_arrays(emulated: gpu.EmulatedGpu, seed: int) -> None:
    rng = np.random.default_rng(seed)
    requests, page_size = (0, 1, 2, 7, 300, 5)[seed % 6], int(rng.integers(1, 70))
    new = rng.integers(0, 5, requests) * (rng.random(requests) < 0.7)
    lengths = new + rng.integers(0, 3000, requests)
    append_indptr = np.concatenate([[rng.integers(3)], new]).cumsum()
    kv_indptr, last = paging.lengths_to_pages(lengths, page_size)
    seq_lens = cupyattn.get_seq_lens(embed(kv_indptr), embed(last), page_size)
    assert seq_lens.tolist() == lengths.tolist()
    for spare in (0, 1, 700):
        nnz = int(append_indptr[-1]) + spare
        outs = [poison.blank((nnz,), np.dtype(np.int32)) for _ in range(2)]
        given = embed(append_indptr), seq_lens, nnz
        cupyattn.get_batch_indices_positions(*given, *(p.array for p in outs))
        for p, expected in zip(outs, paging.positions_of(append_indptr, lengths, nnz), strict=True):
            np.testing.assert_array_equal(p.values(), expected)
            p.assert_intact("output")


def test_fewer_rows_than_tokens(emulated: gpu.EmulatedGpu) -> None:
    outs = [poison.blank((3,), np.dtype(np.int32)) for _ in range(2)]
    given = embed(np.array([0, 2, 900])), embed(np.array([5, 1000])), 3
    cupyattn.get_batch_indices_positions(*given, *(p.array for p in outs))
    assert [p.values().tolist() for p in outs] == [[0, 0, 1], [3, 4, 102]]
    for p in outs:
        p.assert_intact("output")


@pytest.mark.parametrize("first", one_of(3, range(0, 60, 20)))
def test_shares_of_keys(emulated: gpu.EmulatedGpu, first: int) -> None:
    launched = set()
    for seed in range(first, first + 20):
        emulated.forget()
        emulated.seed, emulated.arch = seed % 3, (900, 800)[seed % 2]
        share_cases.Case(seed).run()
        launched |= {launch.name for launch in emulated.launches}
    assert "share_indices" in launched


@pytest.mark.parametrize("first", one_of(6, range(0, 120, 20)))
def test_writes_to_slots(emulated: gpu.EmulatedGpu, first: int) -> None:
    for seed in range(first, first + 20):
        emulated.forget()
        emulated.seed, emulated.arch = seed % 3, (900, 800)[seed % 2]
        slot_cases.Case(seed).run()


def test_stray_slots_touch_nothing(emulated: gpu.EmulatedGpu) -> None:
    write_stray_slots()
    assert [launch.name for launch in emulated.launches] == ["store_kv"]


def write_stray_slots() -> None:
    new = [embed_rows(np.ones((4, 1, 8), np.float32)) for _ in "kv"]
    caches = [poison.blank((3, 1, 8), np.dtype(np.float32)) for _ in "kv"]
    reshape_and_cache(*new, *(c.array for c in caches), embed(np.array([3, -7, 1, 2**30])))
    for cache in caches:
        cache.assert_intact("cache")
        assert (cache.values()[1] == 1).all()
        assert np.isnan(cache.values()[[0, 2]]).all()


def test_quotients_are_those_of_divisions(emulated: gpu.EmulatedGpu) -> None:
    write_wide_values()


def write_wide_values() -> None:
    """float16 of all sizes, with infinities, zeros and NaNs, by scales near 1 and far from it."""
    bits = np.arange(0, 1 << 16, 61).astype(np.uint16)
    special = np.array([0x7C00, 0xFC00, 0x8000, 0x7E00, 0x7BFF, 0xFBFF, 1, 0x8001], np.uint16)
    values = np.concatenate([special, bits]).view(np.float16)
    x = values[: values.size // 64 * 64].reshape(-1, 1, 64)
    for scale in (0.3, 1.7, 3e-20, 2e19):
        caches = [poison.blank((len(x), 1, 64), dtypes.float8_e5m2.numpy) for _ in "kv"]
        slots = embed(np.arange(len(x)))
        new = [embed_rows(x) for _ in "kv"]
        targets = [c.array for c in caches]
        reshape_and_cache(*new, *targets, slots, k_scale=scale, v_scale=scale)
        wanted = np.zeros(x.shape, dtypes.float8_e5m2.numpy)
        places = np.arange(len(x)), np.arange(len(x)), np.zeros(len(x), np.int64)
        reference.store_rows(x, wanted[:, None], places, scale)
        for cache in caches:
            found, is_nan = cache.values(), np.isnan(wanted)
            assert (np.isnan(found) == is_nan).all()
            assert (found.view(np.uint8) == wanted.view(np.uint8))[~is_nan].all()


def embed_rows(x: np.ndarray) -> Any:
    return poison.embed(x).array
