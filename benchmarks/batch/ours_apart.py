"""The same work through our other wrappers: keys not shared, or chunks and decodes apart."""

from __future__ import annotations

from importlib import import_module

from ..candidate import Candidate
from ..ours import wrap_for
from .case import BatchCase
from .inputs import BatchInputs
from .several import VARIANTS, bind_several
from .wrappers import empty_output

NAME = "ours_apart"


def candidates(case: BatchCase, inputs: BatchInputs) -> list[Candidate]:
    """One candidate: the second form of the case."""
    out, variant = empty_output(case, inputs), VARIANTS[case.api][1]
    library, wrap = import_module("cupyattn"), wrap_for(case.framework)
    calls = bind_several(variant, library, NAME, case, inputs, wrap, out)
    return [calls.candidate(NAME, variant, case, lambda _: out[None], out)]
