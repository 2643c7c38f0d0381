"""cupyattn's batch wrappers, as a caller with torch or CuPy arrays would use them."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from ..candidate import Candidate
from ..ours import NAME, to_torch, wrap_for
from .case import BatchCase
from .inputs import BatchInputs
from .wrappers import bind, empty_output


def candidates(case: BatchCase, inputs: BatchInputs) -> list[Candidate]:
    """One candidate: the wrapper of the case, the whole batch in one run()."""
    out = empty_output(case, inputs)
    wrap = wrap_for(case.framework)
    mask = {} if inputs.packed is None else {"packed_custom_mask": wrap(inputs.packed)}
    calls = bind(import_module("cupyattn"), NAME, case, inputs, wrap, out, mask)

    def output(answer: Any) -> Any:
        tensor = to_torch(answer, case.framework) if out is None else out
        return tensor[None]

    return [calls.candidate(NAME, case.api, case, output, out)]
