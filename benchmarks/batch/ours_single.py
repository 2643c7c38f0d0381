"""What a batch costs without a wrapper: cupyattn's single_prefill, once a request."""

from __future__ import annotations

import functools
from importlib import import_module
from itertools import pairwise
from typing import Any

from ..candidate import Candidate
from ..ours import options
from .case import BatchCase
from .inputs import BatchInputs
from .wrappers import empty_output

NAME = "ours_single"


def candidates(case: BatchCase, inputs: BatchInputs) -> list[Candidate]:
    """Calls back to back, each writing its rows of one output."""
    out = empty_output(case, inputs)
    prefill: Any = import_module("cupyattn").single_prefill_with_kv_cache
    calls = []
    for b, (start, stop) in enumerate(pairwise(case.q_offsets)):
        one = inputs.request(b)
        named = options(case.request(b))
        if one.packed is not None:
            named["packed_custom_mask"] = one.packed[0]
        calls.append(
            functools.partial(prefill, one.q[0], one.k[0], one.v[0], out=out[start:stop], **named)
        )
    every = calls[0] if len(calls) == 1 else lambda: [call() for call in calls]
    return [Candidate(NAME, f"x{case.batch}", every, lambda _: out[None], out)]
