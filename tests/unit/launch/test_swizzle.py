"""In what order prefill_sm90 takes the items of heads."""

from __future__ import annotations

import pytest

from cupyattn.core import dtypes
from cupyattn.core.problem import AttentionProblem
from cupyattn.launch.attention.swizzle import L2Swizzle, l2_swizzle

from .test_candidates import requests_of
from .test_mixed_launches import planned

L2_BYTES = 50 << 20


def swizzle(num_kv_heads: int, kv_len: int, causal: bool = True) -> L2Swizzle:
    problem = AttentionProblem(dtypes.bfloat16, dtypes.bfloat16, dtypes.bfloat16, 192, 128)
    return l2_swizzle(problem, num_kv_heads, kv_len, causal, L2_BYTES)


@pytest.mark.parametrize("kv_len", [1, 512, 4096, 16384, 131072])
def test_keys_of_a_swizzle_fit_l2(kv_len: int) -> None:
    found = swizzle(128, kv_len)
    assert 1 <= found.heads_per_swizzle <= 128
    assert (
        found.heads_per_swizzle == 1
        or found.heads_per_swizzle * kv_len * 2 * (192 + 128) <= L2_BYTES
    )


def test_the_shortest_items_come_last_where_there_are_several_swizzles() -> None:
    assert swizzle(128, 4096) == (8, True)
    # All heads are one swizzle, whose shortest items are its last, or all items are as long.
    assert swizzle(8, 512) == (8, False)
    assert swizzle(128, 4096, causal=False) == (8, False)


@pytest.mark.parametrize(
    ("num_kv_heads", "fitting", "heads"),
    [
        (5, 5, [5]),
        (6, 5, [3, 3]),
        (8, 7, [4, 4]),
        (10, 8, [5, 5]),
        (12, 6, [4, 4, 4]),
        (12, 11, [6, 6]),
        (12, 12, [12]),
        (128, 9, [8] * 16),
        # No divisor comes near what fits.
        (5, 4, [3, 2]),
        (7, 6, [4, 3]),
        (13, 3, [3, 3, 3, 3, 1]),
        (4, 0, [1] * 4),
    ],
)
def test_swizzles_have_equally_many_heads(
    num_kv_heads: int, fitting: int, heads: list[int]
) -> None:
    kv_len = int(0.6 * L2_BYTES) // (640 * fitting) if fitting else 1 << 20
    each = swizzle(num_kv_heads, kv_len).heads_per_swizzle
    assert [len(range(num_kv_heads)[i : i + each]) for i in range(0, num_kv_heads, each)] == heads


@pytest.mark.parametrize("num_items", [1, 4, 5, 32, 1000])
def test_some_items_are_last(num_items: int) -> None:
    assert 0 <= swizzle(128, 4096).num_tail_items(num_items) <= num_items // 4
    assert swizzle(8, 512).num_tail_items(num_items) == 0
    if num_items >= 32:
        assert swizzle(128, 4096).num_tail_items(num_items) >= num_items // 8


def test_blocks_of_rows_that_read_the_same_pages_keep_all_of_them() -> None:
    launcher, _ = planned([(64, 4096)], (16, 16))
    pages = 16384 // launcher.spec.page_size
    for num_rows, kept in ((4, 0), (64, 16384)):  # of so few none is read again
        schedule = launcher.schedule(requests_of([(64, 4096)] * num_rows))
        assert schedule.all_keys == num_rows * 4096
        assert launcher._kept_keys(schedule, pages) == max(schedule.longest, kept)
