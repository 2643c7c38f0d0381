"""The libraries that cupyattn is measured against, one module each."""

from __future__ import annotations

from importlib import import_module

from ..candidate import Candidate
from ..cases import Case
from ..inputs import Inputs

PEERS = ("fa3", "flashinfer_fa2", "flashinfer_fa3", "sdpa_flash", "sdpa_cudnn")
IMPLEMENTATIONS = ("ours", *PEERS)


def candidates(name: str, case: Case, inputs: Inputs) -> list[Candidate]:
    """What one implementation offers for a case.

    Raises Unsupported with the reason if it cannot serve the case, ImportError or OSError if the
    library is not there.
    """
    module = ".ours" if name == "ours" else f".peers.{name}"
    found: list[Candidate] = import_module(module, "benchmarks").candidates(case, inputs)
    return found
