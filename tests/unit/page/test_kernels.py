"""The kernels of page operations themselves, on the host: see helpers/host_kernels.py.

From the public call down to the Params struct nothing is replaced but the driver.
"""

from __future__ import annotations

import ctypes
import sys
from typing import Any

import numpy as np
import pytest
from helpers import host_kernels, poison
from helpers.fake_gpu import Gpu, maker
from helpers.page_cases import Append
from helpers.page_faults import STRAY, random_case, spoil

import cupyattn
from cupyattn import jit, paging
from cupyattn.errors import ArgumentError

CPU = {"device": "cpu"}


def embed(x: np.ndarray) -> Any:
    """A tensor of int32 among poison."""
    return poison.embed(x.astype(np.int32), xp=sys.modules["torch"], **CPU).array


@pytest.fixture
def torch(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> Any:
    """torch with a GPU whose kernels run on the host."""
    maker("torch", monkeypatch)
    monkeypatch.setattr(jit, "load", host_kernels.load)
    gpu.api.launch_kernel = host_kernels.launch_kernel
    return pytest.importorskip("torch")


@pytest.mark.parametrize("first", range(0, 240, 40))
def test_random_appends(torch: Any, first: int) -> None:
    for seed in range(first, first + 40):
        append = Append.prepare(random_case(seed), torch, **CPU)
        append.run()
        append.check()


def test_stray_indices_write_nothing(torch: Any) -> None:
    append = Append.prepare(STRAY, torch, **CPU)
    assert spoil(append, xp=torch, **CPU) >= 10
    append.run()
    append.check()


def test_offsets_that_fall(torch: Any) -> None:
    append = Append.prepare(STRAY, torch, **CPU)
    append.slots = []
    bad = torch.tensor([2**31 - 1, -5, -(2**31), 3, -7], dtype=torch.int32)
    append.run(kv_indptr=bad)
    append.check()


def test_debug_counts_what_is_left_out(torch: Any, gpu: Gpu, monkeypatch: Any) -> None:
    append = Append.prepare(STRAY, torch, **CPU)
    count = spoil(append, xp=torch, **CPU)
    runtime = gpu.api.runtime
    gpu.api.is_debugging, runtime.streamSynchronize = True, lambda stream: None
    runtime.memcpy = lambda to, source, size, kind: ctypes.memmove(to, source, size)
    runtime.memsetAsync = lambda to, value, size, stream: ctypes.memset(to, value, size)
    with pytest.raises(ArgumentError, match=f"positions: {count} of "):
        append.run()
    append.check()


@pytest.mark.parametrize("seed", range(12))
def test_index_arrays(torch: Any, seed: int) -> None:
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
        outs = [poison.blank((nnz,), np.dtype(np.int32), xp=torch, **CPU) for _ in range(2)]
        cupyattn.get_batch_indices_positions(
            embed(append_indptr), seq_lens, nnz, *(p.array for p in outs)
        )
        for p, expected in zip(outs, paging.positions_of(append_indptr, lengths, nnz), strict=True):
            np.testing.assert_array_equal(p.values(), expected)
            p.assert_intact("output")


def test_fewer_rows_than_tokens(torch: Any) -> None:
    outs = [poison.blank((3,), np.dtype(np.int32), xp=torch, **CPU) for _ in range(2)]
    indptr, lengths = (torch.tensor(x, dtype=torch.int32) for x in ([0, 2, 900], [5, 1000]))
    cupyattn.get_batch_indices_positions(indptr, lengths, 3, *(p.array for p in outs))
    assert [p.values().tolist() for p in outs] == [[0, 0, 1], [3, 4, 102]]
    for p in outs:
        p.assert_intact("output")
