"""What wrappers say of themselves."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

import cupyattn


def ints(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


def test_before_and_behind_a_plan() -> None:
    wrapper = cupyattn.BatchDecodeWithPagedKVCacheWrapper()
    name = "BatchDecodeWithPagedKVCacheWrapper"
    assert repr(wrapper) == f"<{name}: nothing is planned>"
    wrapper.plan(ints(0, 1, 3), ints(0, 7, 5), ints(3, 16), 8, 2, 64, 16, q_data_type="bfloat16")
    assert repr(wrapper) == (
        f"<{name}: bfloat16, 8 query heads over 2 key heads, head dim 64, pages of 16 tokens; "
        "2 requests: 1 x 1 row over 3 keys; 1 x 1 row over 32 keys; the reference, on the CPU>"
    )


def test_of_wrappers_around_others() -> None:
    pod = cupyattn.PODWithPagedKVCacheWrapper()
    assert repr(pod) == "<PODWithPagedKVCacheWrapper: nothing is planned>"
    pod.plan(ints(0, 1), ints(0), ints(3), 8, 2, 64, 16)
    assert repr(pod).startswith("<PODWithPagedKVCacheWrapper: float16, 8 query heads over 2")
    shared = cupyattn.BatchDecodeWithSharedPrefixPagedKVCacheWrapper()
    assert "nothing is planned" in repr(shared)


def test_one_that_is_not_complete() -> None:
    cls = cupyattn.BatchAttention
    assert repr(cls.__new__(cls)) == "<BatchAttention: nothing is planned>"


def test_kernels_on_a_gpu(device: Any, own_workspaces: list[int], make: Callable[..., Any]) -> None:
    wrapper = cupyattn.BatchDecodeWithPagedKVCacheWrapper(make(8 << 20, dtype="uint8"))
    wrapper.plan(ints(0, 1, 3), ints(0, 7, 5), ints(3, 16), 8, 2, 64, 16, q_data_type="bfloat16")
    assert repr(wrapper).endswith("; decode_sm80 (decode), on cuda:0>")
