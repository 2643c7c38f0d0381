"""The kernels of page operations on the host: every access checked, every bit compared."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from helpers import page_cases, poison
from helpers.page_cases import Append
from helpers.page_faults import STRAY, random_case, spoil

import cupyattn
from cupyattn import paging
from cupyattn.core import dtypes

from . import gpu


@pytest.fixture
def emulated() -> Iterator[gpu.EmulatedGpu]:
    with gpu.plugged_in() as found:
        yield found


def embed(x: np.ndarray) -> Any:
    return poison.embed(x.astype(np.int32)).array


@pytest.mark.parametrize("first", range(0, 120, 40))
def test_random_appends(emulated: gpu.EmulatedGpu, first: int) -> None:
    for seed in range(first, first + 40):
        emulated.forget()
        emulated.seed, emulated.arch = seed % 3, (900, 800)[seed % 2]
        append = Append.prepare(random_case(seed), np)
        append.run()
        append.check()


def test_stray_indices_touch_nothing(emulated: gpu.EmulatedGpu) -> None:
    append = Append.prepare(STRAY, np)
    assert spoil(append) >= 10
    append.run()
    append.check()


@pytest.mark.parametrize("arch", [800, 900], ids=["by hand", "by instruction"])
@pytest.mark.parametrize("cache_dtype", page_cases.FP8)
def test_roundings(emulated: gpu.EmulatedGpu, cache_dtype: str, arch: int) -> None:
    """Every bfloat16, and every float16, as fp8."""
    emulated.mode, emulated.arch = "plain", arch
    fp8 = dtypes.parse(cache_dtype).numpy
    for dtype in ("bfloat16", "float16"):
        x = np.arange(2**16, dtype=np.uint16).view(dtypes.parse(dtype).numpy).reshape(-1, 1, 64)
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
