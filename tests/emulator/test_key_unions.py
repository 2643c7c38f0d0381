"""Attention by unions of the lists of neighbouring tokens, on the host."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from helpers import list_cases
from helpers.list_cases import ListCase

from cupyattn.launch.attention.key_unions import Costs, UnionLauncher

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
    names = [x.name for x in emulated.launches]
    behind = ["decode_sm80"] if names[-1] == "decode_sm80" else []
    assert names == [*ahead, "union_lists", "prefill_sm90", *behind]
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
        {"dtype": "bfloat16", "dtype_kv": "float8_e4m3fn", "length": 8, "scales": "one"},
        {"dtype": "bfloat16", "dtype_kv": "float8_e4m3fn", "length": 8, "scales": "heads"},
        {"dtype": "bfloat16", "dtype_kv": "float8_e4m3fn", "length": 8, "scales": "requests"},
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


# Of blocks of four keys that some tokens share, of groups of ten tokens.
SMALL_BLOCKS = replace(SMALL, granularity=4, length=40, num_qo_heads=24, page_size=16)


def check_small(**changes: Any) -> None:
    """Unions of all small blocks, whatever they cost."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(UnionLauncher, "costs", lambda *_: None)
        emulated = run(replace(SMALL_BLOCKS, **changes))
    assert [x.name for x in emulated.launches] == ["union_lists", "prefill_sm90"]


@pytest.mark.parametrize(
    "changes",
    [
        {"head_dim": 256, "groups": "one"},
        {"head_dim": 256, "granularity": 64, "length": 4, "page_size": 64},
        {"head_dim": 128, "dtype": "bfloat16", "page_size": 4, "fill": 0.5},
        {"granularity": 8, "page_size": 4, "length": 20},
        {"granularity": 32, "length": 8, "gates": "elements", "num_qo_heads": 40},
        {"kv_lens": (103, 61), "length": 20, "fill": 1.0},
        {"bad_values": 0.002, "kv_lens": (150, 90)},
        {"causal": False, "repeated": 0.5},
        {"fill": 0.0, "has_sinks": True, "kv_lens": (0, 9)},
        {"num_qo_heads": 8, "qo_lens": (40, 33)},
    ],
)
def test_small_blocks(changes: dict[str, Any]) -> None:
    check_small(**changes)


def test_many_small_blocks() -> None:
    """More entries than ordinary launches have room for: 15 tokens of 16 have a union."""
    check_small(num_qo_heads=16, length=513, kv_lens=(4000, 300), qo_lens=(17, 2), kept=0.9)


def check_who_is_alone() -> None:
    """Lists are read by themselves where their tokens share little, and then by nobody else."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(UnionLauncher, "costs", lambda *_: Costs(1000, 406))
        case = replace(SMALL_BLOCKS, kv_lens=(700, 60), qo_lens=(11, 9), kept=0.0, groups="one")
        emulated = run(case)
        # One head's lists are read by themselves, and the other's are not.
        run(replace(case, groups="kv", num_qo_heads=20, qo_lens=(31, 9)))
        run(replace(SMALL, kept=0.0, groups="kv", qo_lens=(9, 17)))
    assert emulated.launches[-1].name == "decode_sm80"


def test_unions_that_are_too_large_are_not_made() -> None:
    check_who_is_alone()


@pytest.mark.parametrize("seed", [0, 3, 8, 9])
def test_random_small_blocks(seed: int) -> None:
    test_key_lists.run(list_cases.draw_small_unions(seed), num_sms=3, seed=seed)


def test_many_requests() -> None:
    run(replace(SMALL, kv_lens=tuple(range(60, 130)), qo_lens=(9,) * 70, num_qo_heads=16, length=2))


@pytest.mark.parametrize("seed", range(3))
def test_random_cases(seed: int) -> None:
    case = list_cases.draw_unions(seed)
    test_key_lists.run(case, num_sms=3, seed=seed)
