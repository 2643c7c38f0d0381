"""The libraries that cupyattn is measured against, one module each."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from ..batch.case import BatchCase
from ..candidate import Candidate, Unsupported
from ..cases import AnyCase
from ..lists import offers
from ..lists.case import ListCase
from ..merge.case import MergeCase
from ..selections import offers as selection_offers
from ..selections.case import SelectionCase

PEERS = (
    *("fa3", "flashinfer_fa2", "flashinfer_fa3", "flashinfer_xqa"),
    *("sdpa_flash", "sdpa_cudnn", "sdpa_efficient"),
    "fa4",
    "flashmla",
    "fa3_fp8",
    "cudnn_fp8",
    "triton",
    "gather",
    "deepgemm",
)
OURS = ("ours", "ours_single", "ours_apart", "ours_trtllm", "ours_16bit")
IMPLEMENTATIONS = (*OURS, *PEERS)

_SINGLE = ("ours", "fa3", "flashinfer_fa2", "flashinfer_fa3", "sdpa_flash", "sdpa_cudnn")
_MERGE = ("ours", "flashinfer_fa2")
_BATCH = {
    "batch_decode": ("ours", "ours_trtllm", "fa3", "flashinfer_fa2", "flashinfer_xqa"),
    "append": ("ours", "fa3", "flashinfer_fa2", "flashinfer_fa3"),
    "verify": ("ours", "fa3", "flashinfer_fa2"),
    "ragged": (
        *("ours", "ours_single", "fa3", "flashinfer_fa2", "flashinfer_fa3", "sdpa_cudnn", "fa4"),
    ),
    "varlen": ("ours", "fa3", "fa4"),
    "kvcache": ("ours", "fa3"),
    "cascade": ("ours", "ours_apart", "flashinfer_fa2"),
    "mixed": ("ours", "ours_apart", "fa3", "flashinfer_fa2"),
    "host_batch": ("ours", "flashinfer_fa2"),
    "mla": ("ours", "ours_trtllm", "fa3", "flashinfer_fa2", "flashinfer_fa3", "flashmla"),
    "flash_mla": ("ours", "flashmla"),
    "fp8": ("ours", "ours_16bit", "fa3_fp8", "flashinfer_fa3", "cudnn_fp8"),
}
_EIGHT_BITS = ("fa3_fp8", "cudnn_fp8")
# The peer of kernels that do without Hopper's instructions.
_PORTABLE = ("ours", "flashinfer_fa2")
# Head dims beyond 256, which neither FlashAttention-3 nor cuDNN has.
_WIDE = {
    "batch_decode": ("ours", "ours_trtllm", "flashinfer_fa2", "sdpa_efficient"),
    "ragged": ("ours", "flashinfer_fa2", "sdpa_efficient"),
}


def offering(case: AnyCase) -> tuple[str, ...]:
    """The implementations that a case is meant for; others have no row in it."""
    if isinstance(case, MergeCase):
        return _MERGE
    if not isinstance(case, BatchCase):
        return _SINGLE
    if isinstance(case, ListCase):
        return offers.offering(case)
    if isinstance(case, SelectionCase):
        return selection_offers.OFFERING
    if case.is_portable:
        return _PORTABLE
    return (_WIDE if case.head_dim_vo > 256 else {}).get(case.op) or _BATCH[case.op]


def candidates(name: str, case: AnyCase, inputs: Any, build: bool = True) -> list[Candidate]:
    """What one implementation offers for a case. Without `build`, nothing of a batch case that a
    peer would have to compile first.

    Raises Unsupported with the reason if it cannot serve the case, ImportError or OSError if the
    library is not there.
    """
    if isinstance(case, ListCase):
        return offers.candidates(name, case, inputs, build)
    if isinstance(case, SelectionCase):
        return selection_offers.candidates(name, case, inputs)
    if isinstance(case, BatchCase):
        return _of_batch(name, case, inputs, build)
    if isinstance(case, MergeCase):
        merge = import_module(".merge.candidates", "benchmarks")
        return list(merge.candidates(name, case, inputs))
    module = ".ours" if name == "ours" else f".peers.{name}"
    result: list[Candidate] = import_module(module, "benchmarks").candidates(case, inputs)
    return result


def _of_batch(name: str, case: BatchCase, inputs: Any, build: bool) -> list[Candidate]:
    if case.api == "mla":
        return list(import_module(".batch.latent", "benchmarks").candidates(name, case, inputs))
    library, _, backend = name.partition("_")
    if library == "flashinfer" and backend != "xqa":
        flashinfer = import_module(".batch.peer_flashinfer", "benchmarks")
        return list(flashinfer.candidates(backend, case, inputs, build))
    module = name if name in OURS else f"peer_{backend or library}"
    if name in _EIGHT_BITS:
        module = f"peer_{name}"
    if name == "ours" and case.op in ("varlen", "kvcache"):
        module = "ours_flash_attn"
    result = import_module(f".batch.{module}", "benchmarks")
    if library == "flashinfer" and not build:
        result.check(case)
        if not import_module(".peers.prebuild", "benchmarks").is_ready(case, backend, backend):
            raise Unsupported("its module is not built, and none is built here")
    return list(result.candidates(case, inputs))
