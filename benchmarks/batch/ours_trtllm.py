"""cupyattn's decode without a plan: each call plans on the device, where lengths and pages are."""

from __future__ import annotations

from importlib import import_module

from ..candidate import Candidate
from .case import BatchCase
from .inputs import BatchInputs
from .planless import candidate

NAME = "ours_trtllm"


def candidates(case: BatchCase, inputs: BatchInputs) -> list[Candidate]:
    """One call, its plan included."""
    function = import_module("cupyattn").trtllm_batch_decode_with_kv_cache
    return [candidate(function, NAME, "trtllm", case, inputs)]
