"""FlashInfer's portable kernels (backend "fa2")."""

from __future__ import annotations

from ..candidate import Candidate
from ..case import Case
from ..inputs import Inputs
from . import _flashinfer


def candidates(case: Case, inputs: Inputs) -> list[Candidate]:
    return _flashinfer.candidates("fa2", case, inputs)
