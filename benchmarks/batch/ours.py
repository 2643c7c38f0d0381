"""cupyattn's batch wrappers, as a caller with torch or CuPy arrays would use them."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from ..candidate import Candidate
from ..ours import NAME, to_torch, wrap_for
from .case import BatchCase
from .inputs import BatchInputs
from .several import VARIANTS, bind_several
from .wrappers import bind, empty_output


def candidates(case: BatchCase, inputs: BatchInputs) -> list[Candidate]:
    """One candidate: the wrapper of the case, the whole batch in one run()."""
    out = empty_output(case, inputs)
    wrap = wrap_for(case.framework)
    if case.api in VARIANTS:
        variant = VARIANTS[case.api][0]
        library = import_module("cupyattn")
        calls = bind_several(variant, library, NAME, case, inputs, wrap, out)
        return [calls.candidate(NAME, variant, case, lambda _: out[None], out)]
    mask = {} if inputs.packed is None else {"packed_custom_mask": wrap(inputs.packed)}
    calls = bind(import_module("cupyattn"), NAME, case, inputs, wrap, out, mask)

    def output(answer: Any) -> Any:
        tensor = to_torch(answer, case.framework) if out is None else out
        return tensor[None]

    return [calls.candidate(NAME, case.api, case, output, out)]
