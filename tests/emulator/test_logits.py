"""User-written logits on the kernels, on the host, against the same expressions in NumPy."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from helpers.logits_calls import HEADS, Batch, FarBiases, Single, compare

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

SCALES = np.linspace(-0.5, 1.5, HEADS[0]).astype(np.float32)


def check_single(call: Single, kernel: str = "", **facts: Any) -> None:
    """kernel: one that is to answer."""
    with gpu.plugged_in(**{"num_sms": 6, "is_portable": "sm80" in kernel} | facts) as emulated:
        got = call.run(np)
    compare(got, call.run())
    assert not kernel or emulated.has_launched(kernel)


def check_batch(call: Batch, **facts: Any) -> gpu.EmulatedGpu:
    with gpu.plugged_in(num_sms=6, **facts) as emulated:
        wrapper = call.plan(np, emulated.empty((16 << 20,), np.dtype(np.uint8)))
        answers = [call.run(wrapper, np) for _ in range(2)]
    wanted = call.run(call.plan())
    for got in answers:
        compare(got, wanted)
    return emulated


@pytest.mark.parametrize("kernel", SINGLE)
def test_a_transform_and_a_mask(kernel: str) -> None:
    check_single(Single("everything", *SINGLE[kernel]), kernel, seed=1)


def check_far_biases(qo_len: int, kernel: str = "", is_by_row: bool = False, **facts: Any) -> None:
    # Splits of as many keys each, because what a split tells of such a row is its maximum alone.
    call = FarBiases(qo_len, 768, is_by_row=is_by_row)
    with gpu.plugged_in(**{"num_sms": 6, "is_portable": "sm80" in kernel} | facts) as emulated:
        call.compare(call.run(np))
    assert not kernel or emulated.has_launched(kernel)


@pytest.mark.parametrize("is_by_row", [False, True])
@pytest.mark.parametrize("kernel", SINGLE)
def test_biases_of_any_finite_size(kernel: str, is_by_row: bool) -> None:
    # Where one SM is busy anyway no keys are split.
    num_sms = 1 if kernel == "prefill_sm90" else 6
    check_far_biases(SINGLE[kernel][0], kernel, is_by_row, num_sms=num_sms)


def test_a_batch() -> None:
    check_batch(Batch("requests", "paged", *LENGTHS["paged"]), seed=2)


@pytest.mark.parametrize("kind", LENGTHS)
def test_arrays_with_a_row_for_each_row_of_q(kind: str) -> None:
    check_batch(Batch("near keys", kind, *LENGTHS[kind]), seed=3)


@pytest.mark.parametrize("kernel", SINGLE)
def test_biases_of_near_keys(kernel: str) -> None:
    check_single(Single("rel_logits", *SINGLE[kernel]), kernel, seed=4)


@pytest.mark.parametrize("kind", LENGTHS)
def test_biases_of_near_keys_in_a_batch(kind: str) -> None:
    check_batch(Batch("rel_logits", kind, *LENGTHS[kind]), seed=5)


@pytest.mark.parametrize("facts", [{"scale_q": SCALES}, {"sm_scale": -0.1}, {"causal": True}])
def test_biases_of_near_keys_beside(facts: dict[str, Any]) -> None:
    """Scales of heads, of either sign; and of keys behind a row, which have no bias, none."""
    check_single(Single("rel_logits, masked", 90, 300, **facts), "prefill_sm90", seed=6)


# Mutations have catchers for few of these; here are all kernels.
@pytest.mark.slow
@pytest.mark.parametrize("name", ["transform", "mask", "mask by head", "both", "cap"])
@pytest.mark.parametrize("kernel", SINGLE)
def test_every_kind_of_expression(kernel: str, name: str) -> None:
    check_single(Single(name, *SINGLE[kernel]), kernel, seed=3)


@pytest.mark.slow
@pytest.mark.parametrize("kind", LENGTHS)
@pytest.mark.parametrize("name", ["requests", "near keys", "mask by head"])
def test_every_kind_of_batch(name: str, kind: str) -> None:
    check_batch(Batch(name, kind, *LENGTHS[kind]))


@pytest.mark.slow
@pytest.mark.parametrize("facts", [{"kv_dtype": "float8_e4m3fn"}, {"dims": (128, 128)},
                                   {"pos_encoding_mode": "ROPE_LLAMA"}])  # fmt: skip
@pytest.mark.parametrize("kernel", SINGLE)
def test_other_facts(kernel: str, facts: dict[str, Any]) -> None:
    # Rotated fp8 keys and the like are the portable kernel's.
    check_single(Single("everything", *SINGLE[kernel], **facts))


def test_hidden_values_that_are_no_numbers_touch_no_row() -> None:
    call = Single("mask by parity", 5, 300)
    wanted = call.run()
    _, k, v = call.arrays
    hidden = np.arange(300) // 3 % 2 == 1
    k[hidden], v[hidden] = np.nan, np.inf
    with gpu.plugged_in(num_sms=6):
        compare(call.run(np), wanted)
