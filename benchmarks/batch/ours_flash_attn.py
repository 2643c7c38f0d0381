"""cupyattn's flash_attn functions as engines call them: without a plan, lengths on the device."""

from __future__ import annotations

import functools
import math
from importlib import import_module
from typing import Any

from ..candidate import Candidate
from ..ours import NAME
from .case import BatchCase
from .inputs import BatchInputs
from .wrappers import empty_output


def candidates(case: BatchCase, inputs: BatchInputs) -> list[Candidate]:
    """flash_attn_varlen_func over ragged keys, flash_attn_with_kvcache over pages."""
    library = import_module("cupyattn.flash_attn")
    options = {"softmax_scale": 1.0 / math.sqrt(case.head_dim_qk), "causal": case.causal}
    if case.op == "kvcache":
        return [_with_kvcache(library, options, case, inputs)]
    out = empty_output(case, inputs)
    offsets = [_on_device(x, inputs) for x in (inputs.qo_indptr, inputs.kv_indptr)]
    call = functools.partial(
        library.flash_attn_varlen_func,
        *(inputs.q, inputs.k, inputs.v, *offsets, max(case.q_lens), max(case.kv_lens)),
        out=out,
        **options,
    )
    return [Candidate(NAME, "varlen", call, lambda answer: answer[None], out)]


def _with_kvcache(
    library: Any, options: dict[str, Any], case: BatchCase, inputs: BatchInputs
) -> Candidate:
    assert inputs.tables is not None
    shape = inputs.q.shape
    call = functools.partial(
        library.flash_attn_with_kvcache,
        inputs.q.view(case.batch, -1, *shape[1:]),
        inputs.k,
        inputs.v,
        cache_seqlens=_on_device(inputs.tables.kv_lens, inputs),
        page_table=_on_device(inputs.tables.block_table(), inputs),
        **options,
    )
    return Candidate(NAME, "kvcache", call, lambda answer: answer.view(1, *shape[:2], -1))


def _on_device(table: Any, inputs: BatchInputs) -> Any:
    import torch

    return torch.from_numpy(table).to(inputs.q.device)
