"""cupyattn's wrappers on the values of an 8-bit case in bfloat16: what eight bits gain."""

from __future__ import annotations

from dataclasses import replace

from ..candidate import Candidate
from . import ours
from .case import BatchCase
from .inputs import BatchInputs

NAME = "ours_16bit"
_WIDE = "bfloat16"


def candidates(case: BatchCase, inputs: BatchInputs) -> list[Candidate]:
    """The same call with arrays of twice the bytes."""
    q, k, v = (x.bfloat16() for x in (inputs.q, inputs.k, inputs.v))
    wide = replace(case, dtype=_WIDE, kv_dtype=_WIDE)
    return [
        replace(candidate, peer=NAME)
        for candidate in ours.candidates(wide, replace(inputs, q=q, k=k, v=v))
    ]
