"""FlashAttention-4 (CuTe DSL) over ragged batches: by cumulative lengths, or dense where requests
are of one length. It compiles a kernel at its first use, in seconds; its host part is long."""

from __future__ import annotations

import math
from functools import partial
from importlib import import_module
from typing import Any

from ..candidate import Candidate, Unsupported
from .case import BatchCase
from .inputs import BatchInputs

NAME = "fa4"


def candidates(case: BatchCase, inputs: BatchInputs) -> list[Candidate]:
    """One call: dense where requests are of one length."""
    if not case.is_plain or case.kv_dtype != case.dtype or inputs.tables is not None:
        raise Unsupported("measured over plain ragged batches of 16 bits only")
    try:
        library = import_module("flash_attn.cute")
    except ImportError as error:
        raise Unsupported(f"flash-attn-4 cannot be imported: {error}") from error
    import torch

    options = {"softmax_scale": 1.0 / math.sqrt(case.head_dim_qk), "causal": case.causal}
    arrays = (inputs.q, inputs.k, inputs.v)
    shape = (1, -1, case.num_qo_heads, case.head_dim_vo)

    def rows(answer: Any) -> Any:
        return (answer[0] if isinstance(answer, tuple) else answer).view(shape)

    names = ("cu_seqlens_q", inputs.qo_indptr), ("cu_seqlens_k", inputs.kv_indptr)
    lengths = {name: torch.from_numpy(x).to(inputs.q.device) for name, x in names}
    most = {"max_seqlen_q": max(case.q_lens), "max_seqlen_k": max(case.kv_lens)}
    varlen = partial(library.flash_attn_varlen_func, *arrays, **lengths, **most, **options)
    if len({(q_len, kv_len) for _, q_len, kv_len in case.requests}) > 1:
        return [Candidate(NAME, "varlen", varlen, rows)]
    dense = [x.view(case.batch, -1, *x.shape[1:]) for x in arrays]
    call = partial(library.flash_attn_func, *dense, **options)
    return [Candidate(NAME, "dense", call, rows)]
