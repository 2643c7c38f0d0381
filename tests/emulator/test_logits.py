"""User-written logits on the kernels, on the host, against the same expressions in NumPy."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from helpers.logits_calls import Batch, Single, compare

from . import gpu

# The lengths that each kernel is asked for.
SINGLE = {
    "prefill_sm90": (90, 300),
    "prefill_sm80": (18, 300),
    "decode_sm80": (5, 700),
}
LENGTHS = {
    "ragged": ([40, 0, 3, 90], [150, 20, 333, 90]),
    "paged": ([40, 0, 3, 90], [150, 20, 333, 90]),
    "decode": ([1] * 4, [150, 0, 400, 33]),
}


def check_single(call: Single, kernel: str, **facts: Any) -> None:
    with gpu.plugged_in(num_sms=6, **facts) as emulated:
        got = call.run(np)
    compare(got, call.run())
    assert emulated.has_launched(kernel)


def check_batch(call: Batch, **facts: Any) -> gpu.EmulatedGpu:
    with gpu.plugged_in(num_sms=6, **facts) as emulated:
        wrapper = call.plan(np, emulated.empty((16 << 20,), np.dtype(np.uint8)))
        answers = [call.run(wrapper, np) for _ in range(2)]
    wanted = call.run(call.plan())
    for got in answers:
        compare(got, wanted)
    return emulated


@pytest.mark.parametrize("kernel", SINGLE)
def test_a_transform(kernel: str) -> None:
    check_single(Single("transform", *SINGLE[kernel]), kernel, seed=1)


@pytest.mark.parametrize("kernel", SINGLE)
def test_a_mask(kernel: str) -> None:
    check_single(Single("mask", *SINGLE[kernel]), kernel, seed=2)


@pytest.mark.parametrize("kernel", SINGLE)
def test_a_mask_that_heads_differ_in(kernel: str) -> None:
    check_single(Single("mask by head", *SINGLE[kernel]), kernel, seed=3)


@pytest.mark.parametrize("kind", LENGTHS)
def test_a_batch(kind: str) -> None:
    check_batch(Batch("requests", kind, *LENGTHS[kind]))
