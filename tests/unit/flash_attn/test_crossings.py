"""flash_attn's functions against a dense oracle, options crossed at random."""

from __future__ import annotations

import numpy as np
import pytest
from helpers.flash_cases import Case


@pytest.mark.parametrize("first", range(0, 700, 50))
def test_random_calls(first: int) -> None:
    for seed in range(first, first + 50):
        Case(seed).run()


def test_random_calls_of_torch() -> None:
    torch = pytest.importorskip("torch")
    for seed in range(1000, 1070):
        Case(seed, torch).run()


def test_what_is_crossed() -> None:
    """A generator that stopped to choose an option would go unnoticed."""
    cases = [Case(seed) for seed in range(200)]
    given = {name for case in cases for name in case.named}
    assert given >= {
        *("causal", "window_size", "attention_chunk", "softcap", "alibi_slopes", "sinks", "s_aux"),
        *("q_descale", "k_descale", "v_descale", "out", "page_table", "block_table"),
        *("seqused_q", "seqused_k", "cache_batch_idx", "cache_leftpad", "rotary_cos"),
        *("rotary_seqlens", "cu_seqlens_k_new", "k", "v", "num_splits", "max_seqlen_q"),
    }
    assert any(case.absent.any() for case in cases)
    assert any(np.any(case.kv_lens == 0) for case in cases)
