"""The check before the clock: sampled rows of an output against `cupyattn.reference` in float64."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from .. import array, reference
from .cases import Case
from .inputs import Inputs

# ‖error‖ / ‖reference‖. A bfloat16 output with float32 inside is near 2e-3.
TOLERANCE = 4e-3
_REQUESTS, _ROWS = 3, 4


@dataclass(frozen=True)
class Expected:
    """The float64 output [Hq, Dvo] of one row of `out`."""

    row: int
    output: np.ndarray


def expect(case: Case, inputs: Inputs, random: np.random.Generator) -> list[Expected]:
    """The outputs of some rows: the first and last of the first and last request, and others."""
    result = []
    for request in _sample(case.requests, _REQUESTS, random):
        k, v = (_keys(case, inputs, x, request) for x in (inputs.k, inputs.v))
        for row in _sample(case.q_len, _ROWS, random):
            seen = case.kv_len - case.q_len + row + 1
            token = request * case.q_len + row
            output, _ = reference.attention(
                _host(inputs.q[token : token + 1]), k[:seen], v[:seen], sm_scale=case.sm_scale
            )
            result.append(Expected(token, output[0]))
    return result


def relative_error(expected: list[Expected], output: Any) -> float:
    """‖error‖ / ‖reference‖ over the expected rows of an output [1, rows, Hq, Dvo]; NaN for NaN."""
    error = square = 0.0
    for item in expected:
        difference = _host(output[0, item.row]).astype(np.float64) - item.output
        error += float(np.square(difference).sum())
        square += float(np.square(item.output).sum())
    return math.sqrt(error / square)


def _sample(size: int, count: int, random: np.random.Generator) -> list[int]:
    """`count` of the numbers below `size`, the first and the last among them."""
    if size <= count:
        return list(range(size))
    between = 1 + random.choice(size - 2, count - 2, replace=False)
    return [0, *sorted(int(i) for i in between), size - 1]


def _keys(case: Case, inputs: Inputs, x: Any, request: int) -> np.ndarray:
    """One request's keys or values on the host, [kv_len, Hkv, D]."""
    if inputs.tables is None:
        return _host(x[request * case.kv_len : (request + 1) * case.kv_len])
    pages = [_host(x[int(page)]) for page in inputs.tables[request]]
    return np.concatenate(pages)[: case.kv_len]


def _host(x: Any) -> np.ndarray:
    return array.to_host(array.view(x, "output"))
