"""A shared prefix on the host: two attentions, and the merge of their states."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import numpy as np
import pytest
from helpers import shared_calls
from helpers.share import one_of

from .run import emulate


@pytest.mark.parametrize("first", one_of(3, range(0, 9, 3)))
def test_random_calls(first: int) -> None:
    """Decode, prefill and padded keys."""
    for seed in range(first, first + 3):
        case = shared_calls.random_case(seed)
        emulate(partial(shared_calls.Call, case, np), num_sms=8 + seed, seed=seed % 3)


def test_three_launches() -> None:
    case = replace(
        shared_calls.random_case(0), qo_len=(1, 1), kv_len=(40, 7), shared_len=100, dtype="float16"
    )
    emulated = emulate(partial(shared_calls.Call, case, np), num_sms=4, is_portable=True)
    names = [launch.name for launch in emulated.launches]
    assert names == [*["decode_sm80"] * 2, "merge_states"] * 2
