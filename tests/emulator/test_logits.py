"""User-written logits on the kernels, on the host, against the same expressions in NumPy."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from helpers import logits_calls

import cupyattn

from . import gpu


def check_single(name: str, qo_len: int, kv_len: int, kernel: str, **options: Any) -> None:
    """One request, of which `kernel` is asked."""
    facts = {x: options.pop(x) for x in ("seed", "is_portable") if x in options}
    with gpu.plugged_in(num_sms=6, **facts) as emulated:
        got, wanted = logits_calls.single(name, np, qo_len, kv_len, **options)
    logits_calls.compare(got, wanted)
    assert emulated.has_launched(kernel)


@pytest.mark.parametrize("name", ["transform", "mask", "mask by head", "both"])
def test_prefill_of_hopper(name: str) -> None:
    check_single(name, 90, 300, "prefill_sm90", seed=1)
