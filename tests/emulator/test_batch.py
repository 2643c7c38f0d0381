"""Batches on the host: ragged and paged keys, splits by plan or by size, graphs' spare items."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from helpers import gpu_cases
from helpers.cases import Case

from . import batches
from .batches import Batch

SMALL = replace(gpu_cases.PLAIN, head_dim_qk=64, head_dim_vo=64, strides=("packed",) * 4)
HALF = {"dtype": "float16", "kv_dtype": "float16"}
CLASSES: dict[str, dict[str, Any]] = {
    "plain": {},
    "float16": HALF,
    "dim 128": {"head_dim_qk": 128, "head_dim_vo": 128},
    "dims 192, 128": {"head_dim_qk": 192, "head_dim_vo": 128},
    "dims 24, 40": {"head_dim_qk": 24, "head_dim_vo": 40},
    "rope": {"pos_encoding_mode": "ROPE_LLAMA"},
    "alibi": {"pos_encoding_mode": "ALIBI"},
    "soft cap": {"logits_soft_cap": 5.0},
    "mask": {"mask_kind": "packed"},
    "scales": {"scale_q": "per_head", "scale_k": "per_head", "scale_v": "per_head"},
    "e4m3": {"kv_dtype": "float8_e4m3fn"},
    "e5m2, rope": {**HALF, "kv_dtype": "float8_e5m2", "pos_encoding_mode": "ROPE_LLAMA"},
    "float32 output": {"o_dtype": "float32"},
}


def base(name: str) -> Case:
    return replace(SMALL, **CLASSES[name])


def check(batch: Batch, **facts: Any) -> batches.BatchAnswer:
    answer = batches.run(batch, **facts)
    answer.check()
    return answer


@pytest.mark.parametrize("is_paged", [False, True], ids=["ragged", "paged"])
@pytest.mark.parametrize("name", CLASSES)
def test_random_batches(name: str, is_paged: bool) -> None:
    pages = (1, 3, 16, 64)
    for seed in range(6):
        size = pages[seed % 4] if is_paged else 0
        check(batches.random_batch(seed, base(name), size), seed=seed % 3)


@pytest.mark.slow
@pytest.mark.parametrize("first", range(0, 300, 10))
def test_many_random_batches(first: int) -> None:
    names = [*CLASSES]
    for seed in range(first, first + 10):
        check(batches.random_batch(seed, base(names[seed % len(names)])), seed=seed % 3)


@pytest.mark.parametrize("page_size", [0, 16], ids=["ragged", "paged"])
@pytest.mark.parametrize(("qo_lens", "merges"), [((1, 2), False), ((40, 3), True)])
def test_splits_of_a_batch(qo_lens: tuple[int, ...], merges: bool, page_size: int) -> None:
    case = replace(SMALL, num_kv_heads=2, group=4, causal=True)
    batch = Batch(case, qo_lens, (600, 500), page_size, split_tokens=130)
    answer = check(batch)
    assert answer.num_merges > 0
    assert ("merge_splits" in {launch.name for launch in answer.launches}) == merges


@pytest.mark.parametrize("page_size", [0, 16], ids=["ragged", "paged"])
def test_spare_items_of_a_graph_do_nothing(page_size: int) -> None:
    case = replace(SMALL, num_kv_heads=1, group=4)
    batch = Batch(case, (3, 1), (300, 90), page_size, is_captured=True)
    assert check(batch, num_sms=16).num_items > 2


@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.parametrize("qo_lens", [(1, 3), (40, 20)], ids=["decode", "prefill"])
@pytest.mark.parametrize("page_size", [0, 16], ids=["ragged", "paged"])
def test_hidden_values_do_not_contaminate(
    page_size: int, qo_lens: tuple[int, int], value: float
) -> None:
    """A window hides the first key from all rows, causality the last from all but one."""
    case = replace(SMALL, num_kv_heads=2, group=2, causal=True, window_left=70, sm_scale=0.05)
    spoil = [(1, "v", (119, 1, 3), value), (1, "v", (0, 0), value), (0, "v", (81, 0, 0), value)]
    batches.run(Batch(case, qo_lens, (90, 120), page_size), spoil).check()
