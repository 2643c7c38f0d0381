"""Attention by lists of keys, on the host."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from helpers import list_cases
from helpers.list_cases import ListCase

from . import gpu

# Two requests, drafts of two tokens, blocks that the end cuts.
SMALL = ListCase((83, 150), (2, 2), length=12, granularity=8)
TOLERANCE = {"float16": 2e-3, "bfloat16": 1.6e-2}


def launch(
    case: ListCase, arrays: list_cases.Arrays, num_tokens: int = 0, **facts: Any
) -> gpu.EmulatedGpu:
    """Launch a case on these arrays; what was launched."""
    with gpu.plugged_in(**facts) as emulated:
        for x in list_cases.arrays_of(arrays):
            is_output = x is arrays.o or x is arrays.lse
            emulated.register(x.ctypes.data, x.nbytes, x, is_output)
        list_cases.launch(
            case,
            arrays,
            lambda x: x.ctypes.data,
            list_cases.launcher(case),
            gpu.STREAM,
            emulated.allocate,
            num_tokens,
        )
    return emulated


def run(case: ListCase, **facts: Any) -> gpu.EmulatedGpu:
    """Launch a case and compare it with the oracle; what was launched."""
    arrays = list_cases.make(case)
    emulated = launch(case, arrays, **facts)
    o, lse = list_cases.expected(case, arrays)
    found = arrays.o.astype(np.float64)
    assert np.isfinite(found).all() or case.bad_values, case
    atol = TOLERANCE[case.dtype] * (4 if case.dtype_kv else 1)
    np.testing.assert_allclose(found, o, rtol=atol, atol=atol, err_msg=str(case))
    np.testing.assert_allclose(
        arrays.lse.astype(np.float64) * np.log(2.0), lse, rtol=1e-3, atol=1e-3 + atol / 4
    )
    return emulated


@pytest.mark.parametrize("granularity", [1, 4, 8, 64, 128])
def test_blocks_of_each_size(granularity: int) -> None:
    run(replace(SMALL, granularity=granularity, length=max(2, 96 // granularity)))


@pytest.mark.parametrize("groups", ["one", "kv", "query"])
def test_lists_of_heads(groups: str) -> None:
    run(replace(SMALL, groups=groups))


@pytest.mark.parametrize("page_size", [0, 1, 3, 16, 128])
def test_keys_in_pages_and_rows(page_size: int) -> None:
    run(replace(SMALL, page_size=page_size))


@pytest.mark.parametrize(
    "changes",
    [
        {"qo_lens": (1, 3)},
        {"qo_lens": (0, 2)},
        {"causal": False},
        {"window": 20},
        {"window": 500},
        {"has_sinks": True},
        {"fill": 0.0},
        {"fill": 0.0, "has_sinks": True},
        {"kv_lens": (0, 1)},
        {"dtype": "bfloat16", "dtype_kv": "float8_e4m3fn"},
        {"num_qo_heads": 40},
        {"num_qo_heads": 80},
        {"head_dim": 128, "head_dim_vo": 64},
        {"soft_cap": 5.0},
        {"scales": "one"},
        {"scales": "heads", "groups": "query"},
        {"scales": "requests", "soft_cap": 5.0},
        {"scales": "requests", "groups": "query", "length": 100, "kv_lens": (900, 150)},
        {"index_step": 2},
        {"index_step": 3, "qo_lens": (1, 3), "page_size": 0},
        {"gates": "heads"},
        {"head_dim": 256, "granularity": 4, "length": 60, "num_qo_heads": 24},
        {"head_dim": 256, "fill": 0.1, "length": 60, "window": 20},
        {"head_dim": 256, "dtype": "bfloat16", "dtype_kv": "float8_e4m3fn", "scales": "heads"},
        {"head_dim": 192, "head_dim_vo": 256},
    ],
)
def test_options(changes: dict[str, Any]) -> None:
    run(replace(SMALL, **changes))


def check_tokens_of_nobody() -> None:
    """Tokens past the last offset keep their output as it was."""
    case = replace(SMALL, qo_lens=(1, 2))
    arrays = list_cases.make(replace(SMALL, qo_lens=(1, 2, 2), kv_lens=(83, 150, 0)))
    arrays.qo_offsets = arrays.qo_offsets[:3].copy()
    launch(case, arrays, num_tokens=5)
    assert np.isfinite(arrays.o[:3].astype(float)).all()
    assert np.isnan(arrays.o[3:].astype(float)).all()


def test_tokens_of_nobody_are_left_alone() -> None:
    check_tokens_of_nobody()


def test_parts_of_a_list_are_merged_by_the_last_block() -> None:
    case = ListCase((900,), (1,), length=100, granularity=8, num_qo_heads=4)
    emulated = run(case, num_sms=16)
    assert [x.grid[2] > 1 for x in emulated.launches] == [True]


def test_parts_of_many_rows_are_merged_by_a_launch() -> None:
    case = ListCase((900, 700), (1, 2), length=100, granularity=8, num_qo_heads=32)
    emulated = run(case, num_sms=16)
    assert [x.name for x in emulated.launches] == ["decode_sm80", "merge_splits"]


def test_clusters_share_a_list(monkeypatch: pytest.MonkeyPatch) -> None:
    case = ListCase((900,), (1,), length=200, granularity=4, num_qo_heads=4)
    emulated = run(case, num_sms=32, has_clusters=True)
    assert emulated.launches[0].cluster > 1


@pytest.mark.parametrize(
    "changes",
    [
        {"head_dim": 64, "window": 30},
        {"head_dim": 128, "fill": 0.05, "length": 100, "dtype": "bfloat16"},
        {"head_dim": 256, "scales": "requests", "groups": "query"},
    ],
)
def test_few_lists_of_many_tiles(changes: dict[str, Any]) -> None:
    """Blocks that have an SM of their own, whose warps have several tiles."""
    case = ListCase((3000, 900), (1, 1), length=400, granularity=4, num_qo_heads=4)
    run(replace(case, **changes), num_sms=4, has_clusters=True)


@pytest.mark.parametrize(
    ("tokens", "keys", "cluster", "parts"),
    [(1, 2048, 8, 1), (1, 16384, 1, 32), (16, 8192, 4, 1), (64, 2048, 1, 1)],
)
def test_few_lists_have_the_blocks_that_read_them_soonest(
    tokens: int, keys: int, cluster: int, parts: int
) -> None:
    with gpu.plugged_in(num_sms=132, has_clusters=True):
        launcher = list_cases.launcher(ListCase((32768,), (1,), length=16, granularity=128))
        (launch, _), *_ = launcher.plan(tokens, keys).parts
    assert (launch.cluster, launch.grid[2]) == (cluster, parts)


@pytest.mark.parametrize("seed", range(4))
def test_random_cases(seed: int) -> None:
    case = list_cases.draw(seed)
    run(case, num_sms=8, seed=seed)
