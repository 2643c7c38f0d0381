"""Which implementations a case by lists is meant for, and what each offers."""

from __future__ import annotations

from importlib import import_module

from ..candidate import Candidate
from .case import ListCase
from .inputs import ListInputs

_BY_BLOCKS = ("ours", "triton", "flashinfer_fa2", "flashinfer_fa3", "fa3", "gather")
_OFFERING = {
    "m3": _BY_BLOCKS,
    "nsa": _BY_BLOCKS,
    "qsa": _BY_BLOCKS,
    "dsa": ("ours", "flashmla", "fa3", "flashinfer_fa3"),
    "v4": ("ours", "fa3", "flashinfer_fa3"),
    "blocks": ("ours", "flashinfer_fa2", "flashinfer_fa3"),
}


def offering(case: ListCase) -> tuple[str, ...]:
    """The implementations that have a row in a case."""
    return _OFFERING[case.family]


def candidates(name: str, case: ListCase, inputs: ListInputs, build: bool) -> list[Candidate]:
    """What one implementation offers; Unsupported with the reason if it cannot serve the case."""
    library, _, backend = name.partition("_")
    if library == "flashinfer":
        flashinfer = import_module("benchmarks.lists.peer_flashinfer")
        return list(flashinfer.candidates(backend, case, inputs, build))
    module = name if name == "ours" else f"peer_{name}"
    return list(import_module(f"benchmarks.lists.{module}").candidates(case, inputs))
