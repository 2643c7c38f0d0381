"""Windows of latent attention on the host's kernels: what calls give, and which pages are read."""

from __future__ import annotations

import numpy as np
import pytest
from helpers import mla_calls
from helpers.calls import run_and_check
from helpers.share import one_of

from cupyattn import flash_mla

from . import gpu

SEEDS = [
    seed
    for seed in range(80)
    if mla_calls.random_case(seed).window_left >= 0
    and sum(mla_calls.random_case(seed).qo_len) * mla_calls.random_case(seed).heads <= 256
]
ABSURD = 2**31 - 1


@pytest.mark.parametrize("is_portable", [False, True])
@pytest.mark.parametrize("seed", one_of(6, SEEDS))
def test_random_calls(seed: int, is_portable: bool) -> None:
    case = mla_calls.random_case(seed)
    if is_portable:
        case = mla_calls.portable(case)
    with gpu.plugged_in(num_sms=6, seed=seed, is_portable=is_portable) as emulated:
        workspace = emulated.empty((64 << 20,), np.dtype(np.uint8))
        run_and_check(mla_calls.Call(case, np, workspace))


@pytest.mark.parametrize(("heads", "q_len"), [(16, 1), (16, 2), (128, 2)])
@pytest.mark.parametrize("page_size", [16, 64])
def test_pages_ahead_of_the_window_are_not_read(heads: int, q_len: int, page_size: int) -> None:
    rng = np.random.default_rng(heads + page_size)
    kv_len, window_left = np.array([1500, 333, 40], np.int32), 100
    counts = -(-kv_len // page_size)
    cache = rng.standard_normal((int(counts.sum()), page_size, 1, 576)).astype(np.float16)
    q = rng.standard_normal((3, q_len, heads, 576)).astype(np.float16)
    table = np.full((3, int(counts.max())), ABSURD, np.int32)
    pages = rng.permutation(int(counts.sum())).astype(np.int32)
    for index, (first, count) in enumerate(zip(counts.cumsum() - counts, counts, strict=True)):
        table[index, :count] = pages[first : first + count]
    named = {"causal": True, "window_left": window_left}
    wanted = flash_mla.flash_mla_with_kvcache(q, cache, table, kv_len, 512, **named)
    for row, count in zip(table, kv_len, strict=True):
        first = max(0, int(count) - q_len - window_left)
        row[: first // 64 * 64 // page_size] = ABSURD  # tiles begin at multiples of 64 keys
    with gpu.plugged_in(num_sms=6, seed=heads) as emulated:
        got = flash_mla.flash_mla_with_kvcache(q, cache, table, kv_len, 512, **named)
        assert emulated.has_launched("wide_sm90" if heads * q_len > 32 else "wide_decode_sm90")
    np.testing.assert_allclose(got[0].astype(np.float32), wanted[0], atol=2e-3)
    np.testing.assert_allclose(got[1], wanted[1], atol=2e-3)
