"""A row of e4m3 queries has the same bits decoded, verified, appended and in a whole prompt, where
keys are split by a fixed size: one kernel answers all, by tiles that begin where keys do."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

import cupyattn
from emulator import gpu

HEADS, KV_HEADS, PAGE = 4, 2, 16
NUM_ROWS, NUM_KEYS = 37, 421


def _rows(arrays: tuple[np.ndarray, ...], begin: int, end: int, pages: int) -> tuple[Any, Any]:
    """The answers of rows [begin, end), as the last ones of a request of as many keys as the last
    of them sees, beside a request of other lengths."""
    q, k, v = arrays
    other = 5 + begin % 3
    seen = NUM_KEYS - NUM_ROWS + end
    wrapper = cupyattn.BatchPrefillWithPagedKVCacheWrapper(np.empty(1 << 24, np.uint8), "NHD")
    counts = [-(-seen // PAGE), 7]
    wrapper.plan(
        np.array([0, end - begin, end - begin + other], np.int32),
        np.array([0, counts[0], sum(counts)], np.int32),
        np.r_[np.arange(counts[0]), np.arange(7)].astype(np.int32),
        np.array([(seen - 1) % PAGE + 1, 3], np.int32),
        HEADS,
        KV_HEADS,
        q.shape[2],
        PAGE,
        causal=True,
        q_data_type=q.dtype,
        kv_data_type=k.dtype,
        o_data_type=ml_dtypes.bfloat16,
        fixed_split_size=pages,
    )
    rows = np.concatenate([q[begin:end], q[:other]])
    out, lse = wrapper.run(rows, (k, v), return_lse=True)
    return out[: end - begin], lse[: end - begin]


def _decoded(arrays: tuple[np.ndarray, ...], row: int, pages: int) -> tuple[Any, Any]:
    """The answers of one row, by the wrapper of decode."""
    q, k, v = arrays
    seen = NUM_KEYS - NUM_ROWS + row + 1
    count = -(-seen // PAGE)
    wrapper = cupyattn.BatchDecodeWithPagedKVCacheWrapper(np.empty(1 << 24, np.uint8), "NHD")
    wrapper.plan(
        np.array([0, count], np.int32),
        np.arange(count, dtype=np.int32),
        np.array([(seen - 1) % PAGE + 1], np.int32),
        HEADS,
        KV_HEADS,
        q.shape[2],
        PAGE,
        q_data_type=q.dtype,
        kv_data_type=k.dtype,
        o_data_type=ml_dtypes.bfloat16,
        fixed_split_size=pages,
    )
    out, lse = wrapper.run(q[row : row + 1], (k, v), return_lse=True)
    return out, lse


@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("pages", [24, 6])
def test_rows_have_the_bits_of_a_prompt(dim: int, pages: int) -> None:
    rng = np.random.default_rng(dim + pages)
    count = -(-NUM_KEYS // PAGE)
    q = rng.standard_normal((NUM_ROWS, HEADS, dim)).astype(ml_dtypes.float8_e4m3fn)
    k, v = (
        rng.standard_normal((count, PAGE, KV_HEADS, dim)).astype(ml_dtypes.float8_e4m3fn)
        for _ in range(2)
    )
    with gpu.plugged_in(num_sms=6):
        whole = _rows((q, k, v), 0, NUM_ROWS, pages)
        for row in (0, 30):
            for got, want in zip(_decoded((q, k, v), row, pages), whole, strict=True):
                assert got.tobytes() == want[row : row + 1].tobytes(), row
        # Parts of another size are another sum.
        assert _rows((q, k, v), 0, NUM_ROWS, 30 - pages)[0].tobytes() != whole[0].tobytes()
        for begin, end in [(0, 1), (36, 37), (20, 24), (8, 37), (3, 19)]:
            part = _rows((q, k, v), begin, end, pages)
            for got, want in zip(part, whole, strict=True):
                assert got.tobytes() == want[begin:end].tobytes(), (begin, end)
