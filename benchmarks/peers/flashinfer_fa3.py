"""FlashInfer's Hopper kernels (backend "fa3")."""

from __future__ import annotations

from ..candidate import Candidate
from ..case import Case
from ..inputs import Inputs
from . import _flashinfer


def candidates(case: Case, inputs: Inputs) -> list[Candidate]:
    return _flashinfer.candidates("fa3", case, inputs)
