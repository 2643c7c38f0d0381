"""torch scaled_dot_product_attention, held to its FlashAttention-2 backend."""

from __future__ import annotations

from ..candidate import Candidate
from ..case import Case
from ..inputs import Inputs
from . import _sdpa


def candidates(case: Case, inputs: Inputs) -> list[Candidate]:
    return _sdpa.candidates("sdpa_flash", "FLASH_ATTENTION", case, inputs)
