"""Attention by lists of keys on the GPU: random launches beside the oracle, each of them twice."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from helpers import list_cases
from helpers.share import some

pytestmark = pytest.mark.gpu

cupy = pytest.importorskip("cupy")

TOLERANCE = {"float16": 2e-3, "bfloat16": 1.6e-2}
# Each case has a kernel of its own, which one process compiles one after another.
BLOCK = 8


def upload(x: np.ndarray) -> Any:
    raw = np.frombuffer(x.tobytes() or b"\0", np.uint8)
    return cupy.asarray(raw)


def allocate(num_bytes: int) -> tuple[int, object]:
    memory = cupy.full(num_bytes, 255, dtype=cupy.uint8)
    return memory.data.ptr, memory


def check(seed: int) -> None:
    case = list_cases.draw(seed)
    arrays = list_cases.make(case)
    known = {id(x): upload(x) for x in list_cases.arrays_of(arrays)}
    run, answers = list_cases.launcher(case), []
    for _ in range(2):
        stream = cupy.cuda.get_current_stream().ptr
        list_cases.launch(case, arrays, lambda x: known[id(x)].data.ptr, run, stream, allocate)
        answers.append([known[id(x)].get().tobytes() for x in (arrays.o, arrays.lse)])
    assert answers[0] == answers[1], case
    o, lse = list_cases.expected(case, arrays)
    found = np.frombuffer(answers[0][0], arrays.o.dtype, arrays.o.size).reshape(o.shape)
    found_lse = np.frombuffer(answers[0][1], np.float32, arrays.lse.size).reshape(lse.shape)
    atol = TOLERANCE[case.dtype] * (4 if case.dtype_kv else 1)
    np.testing.assert_allclose(found.astype(np.float64), o, atol, atol, err_msg=str(case))
    np.testing.assert_allclose(found_lse * np.log(2.0), lse, 1e-3, 1e-3 + atol / 4)


@pytest.mark.parametrize("first", range(0, 64, BLOCK))
def test_random_cases(first: int) -> None:
    for seed in range(first, first + some(BLOCK)):
        check(seed)
