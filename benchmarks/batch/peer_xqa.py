"""FlashInfer's XQA decode, `trtllm_batch_decode_with_kv_cache(backend="xqa")`: it has no plan."""

from __future__ import annotations

import functools
import math

from ..candidate import Candidate, Unsupported
from .case import BatchCase
from .inputs import BatchInputs
from .wrappers import empty_output, workspace

NAME = "flashinfer_xqa"
_PAGE_SIZES = (16, 32, 64, 128)


def check(case: BatchCase) -> None:
    """Raises Unsupported with the reason if XQA does not serve the case."""
    if case.page_size not in _PAGE_SIZES:
        raise Unsupported(f"XQA takes pages of {', '.join(map(str, _PAGE_SIZES))}")
    if case.kv_dtype != "bfloat16":
        raise Unsupported("measured over bfloat16 keys only")


def candidates(case: BatchCase, inputs: BatchInputs) -> list[Candidate]:
    """One call over the padded page table."""
    check(case)
    assert inputs.tables is not None
    import flashinfer  # type: ignore[import-not-found]
    import torch

    device = inputs.q.device
    table = torch.from_numpy(inputs.tables.block_table()).to(device)
    lengths = torch.from_numpy(inputs.tables.kv_lens).to(device)
    out = empty_output(case, inputs)
    call = functools.partial(
        flashinfer.decode.trtllm_batch_decode_with_kv_cache,
        inputs.q,
        (inputs.k, inputs.v),
        workspace(NAME, str(device)),
        table,
        lengths,
        max(case.kv_lens),
        bmm1_scale=1.0 / math.sqrt(case.head_dim_qk),  # the whole scale of the logits
        window_left=case.window_left,
        out=out,
        kv_layout="NHD",
        backend="xqa",
    )
    return [Candidate(NAME, "xqa", call, lambda answer: answer[None], out)]
