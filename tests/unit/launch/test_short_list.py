"""Which work lists come with the Params struct, and what they say."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from cupyattn.core import dtypes
from cupyattn.core.device import NO_GPU
from cupyattn.core.spec import AttentionSpec
from cupyattn.launch.attention.batch import BatchLauncher
from cupyattn.launch.attention.layout import BatchSchedule, Capacity
from cupyattn.launch.attention.short_list import short_list
from cupyattn.schedule.batch import WORK_FIELDS, BatchRequests, Splitting

_HALF = dtypes.bfloat16
SPEC = AttentionSpec(8, 4, 128, 128, _HALF, _HALF, _HALF, causal=True)


def packed(schedule: BatchSchedule) -> bytes:
    (part,) = schedule.parts
    ((launch, _),) = part.launches
    return short_list(schedule, part, launch)


def schedule(
    lengths: list[int],
    spec: AttentionSpec = SPEC,
    capacity: Capacity | None = None,
    splitting: Splitting | None = None,
    keys: int = 0,
    first_key: int = 7,
) -> BatchSchedule:
    qo_len = np.array(lengths)
    kv_len, starts = np.maximum(qo_len, keys), np.cumsum(qo_len) - qo_len
    uniform = lengths[0] if len({*lengths}) == 1 else -1
    requests = BatchRequests(qo_len, kv_len, starts, starts + first_key, uniform=uniform)
    tokens = splitting.tokens if splitting else 0
    launcher = BatchLauncher(spec, spec.problem(), NO_GPU.index)
    return launcher.schedule(requests, split_tokens=tokens, capacity=capacity)


@pytest.mark.parametrize("lengths", [[40, 70, 33], [50, 50, 50], [100, 64]], ids=str)
def test_what_a_short_list_says(lengths: list[int]) -> None:
    made = schedule(lengths)
    num_items = made.parts[0].launches[0][0].num_items
    items = made.words[: num_items * len(WORK_FIELDS)].reshape(num_items, -1)
    names = "q_start", "kv_start", "first_row", "qo_len", "kv_len"
    wanted = items[:, [WORK_FIELDS.index(name) for name in names]]
    kind = np.dtype([("at", "<i4", 3), ("lengths", "<u2", 2)])  # kernels/cupyattn/params/attention.cuh
    got = np.frombuffer(packed(made), kind)
    np.testing.assert_array_equal(np.hstack([got["at"], got["lengths"]]), wanted)
    assert {*got["at"][:, 1] - got["at"][:, 0]} == {7}


def test_other_lists_stay_in_memory() -> None:
    assert packed(schedule([40, 70]))
    capacity = Capacity(2, 110, 70)
    assert not packed(schedule([40, 70], capacity=capacity)), "a later plan changes the list"
    assert not packed(schedule([40] * 20 + [70] * 20)), "many items"
    assert not packed(schedule([40] * 100)), "persistent blocks"
    assert not packed(schedule([70], first_key=0)), "no list"
    assert not packed(schedule([40, 70], splitting=Splitting(tokens=256), keys=2000)), "splits"
    assert not packed(schedule([40, 70], keys=40_000)), "long requests"
    rope = replace(SPEC, pos_encoding="ROPE_LLAMA")
    assert not packed(schedule([40, 70], rope)), "the steps of RoPE are in its place"
