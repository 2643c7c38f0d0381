"""Attention by unions of the lists of neighbouring tokens, on the host."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from helpers import list_cases
from helpers.list_cases import ListCase

from . import gpu, test_key_lists

# Two requests of several groups of tokens, the last of which has few; drafts and blocks that the
# ends cut.
SMALL = ListCase(
    (700, 300),
    (11, 9),
    length=4,
    granularity=64,
    num_qo_heads=32,
    num_kv_heads=2,
    page_size=64,
    kept=0.7,
)


def run(case: ListCase, **facts: Any) -> gpu.EmulatedGpu:
    """Launch a case and compare it with the oracle; what was launched."""
    emulated = test_key_lists.run(case, **{"num_sms": 4, **facts})
    ahead = ["widen_pages"] if case.dtype_kv else []
    assert [x.name for x in emulated.launches] == [*ahead, "union_lists", "prefill_sm90"]
    return emulated


@pytest.mark.parametrize("granularity", [64, 128])
@pytest.mark.parametrize("page_size", [16, 64, 128, 256])
def test_blocks_and_pages(granularity: int, page_size: int) -> None:
    run(replace(SMALL, granularity=granularity, page_size=page_size))


@pytest.mark.parametrize(
    "changes",
    [
        {"groups": "one"},
        {"causal": False},
        {"has_sinks": True},
        {"fill": 0.0},
        {"fill": 0.3, "length": 8},
        {"kept": 0.0, "length": 8},
        {"kv_lens": (0, 9)},
        {"repeated": 0.5, "length": 6},
        {"bad_values": 0.002, "length": 6},
        {"bad_values": 0.002, "num_qo_heads": 40, "dtype": "bfloat16"},
        {"qo_lens": (16, 16)},
        {"kv_lens": (4000, 300), "length": 3, "kept": 0.0},
        {"num_qo_heads": 8, "qo_lens": (40, 33)},
        {"num_qo_heads": 40},
        {"dtype": "bfloat16", "head_dim": 128},
        {"head_dim": 80, "head_dim_vo": 64},
        {"page_size": 0},
        {"page_size": 0, "granularity": 128, "bad_values": 0.002},
        {"page_size": 0, "index_step": 2, "causal": False, "fill": 0.3, "length": 8},
        {"page_size": 701, "is_dense": True},
        {"page_size": 704, "is_dense": True, "kv_lens": (700,), "qo_lens": (11,)},
        {"window": 1},
        {"window": 70, "granularity": 128},
        {"window": 200, "page_size": 0, "repeated": 0.5, "bad_values": 0.002},
        {"window": 1000, "fill": 0.3},
        {"gates": "heads"},
        {"gates": "elements", "bad_values": 0.002, "window": 64},
        {"index_step": 3},
        {"dtype_kv": "float8_e4m3fn", "length": 8},
        {
            "dtype": "bfloat16",
            "dtype_kv": "float8_e4m3fn",
            "length": 8,
            "page_size": 16,
            "window": 70,
            "index_step": 2,
        },
    ],
)
def test_options(changes: dict[str, Any]) -> None:
    run(replace(SMALL, **changes))


def test_many_requests() -> None:
    run(replace(SMALL, kv_lens=tuple(range(60, 130)), qo_lens=(9,) * 70, num_qo_heads=16, length=2))


@pytest.mark.parametrize("seed", range(3))
def test_random_cases(seed: int) -> None:
    case = list_cases.draw_unions(seed)
    test_key_lists.run(case, num_sms=3, seed=seed)
