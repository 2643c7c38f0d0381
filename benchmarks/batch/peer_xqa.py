"""FlashInfer's XQA decode, `trtllm_batch_decode_with_kv_cache(backend="xqa")`: it has no plan."""

from __future__ import annotations

from ..candidate import Candidate, Unsupported
from .case import BatchCase
from .inputs import BatchInputs
from .planless import candidate

NAME = "flashinfer_xqa"
_PAGE_SIZES = (16, 32, 64, 128)


def check(case: BatchCase) -> None:
    """Raises Unsupported with the reason if XQA does not serve the case."""
    if case.page_size not in _PAGE_SIZES:
        raise Unsupported(f"XQA takes pages of {', '.join(map(str, _PAGE_SIZES))}")
    if case.kv_dtype not in ("bfloat16", "float16"):
        raise Unsupported("measured over 16-bit keys only")


def candidates(case: BatchCase, inputs: BatchInputs) -> list[Candidate]:
    """One call over the padded page table."""
    check(case)
    import flashinfer  # type: ignore[import-not-found]

    function = flashinfer.decode.trtllm_batch_decode_with_kv_cache
    return [candidate(function, NAME, "xqa", case, inputs, backend="xqa")]
