"""FlashAttention-3: the op `flash_attn_3::fwd` of the library that CUPYATTN_BENCH_FA3 names."""

from __future__ import annotations

import functools
import math
import os
from typing import Any

from ..candidate import Candidate, Unsupported
from ..case import Case
from ..inputs import Inputs

NAME = "fa3"
LIBRARY_VARIABLE = "CUPYATTN_BENCH_FA3"


def candidates(case: Case, inputs: Inputs) -> list[Candidate]:
    """One batched call; decode is the same call with one query row and split keys."""
    if case.pos_encoding_mode != "NONE" or case.mask != "none" or case.logits_soft_cap:
        raise Unsupported("FlashAttention-3 as built has no such option")
    if case.kv_dtype != "bfloat16":
        raise Unsupported("FlashAttention-3 takes no fp8 KV with a 16-bit q")
    if case.framework != "torch":
        raise Unsupported("takes torch tensors only")
    fwd = forward()
    options: dict[str, Any] = {
        "softmax_scale": 1.0 / math.sqrt(case.head_dim_qk),
        "is_causal": case.causal,
        "num_splits": 0,
    }
    if case.window_left >= 0:
        options |= {"window_size_left": case.window_left, "window_size_right": 0}

    def call() -> Any:
        return fwd(inputs.q, inputs.k, inputs.v, **options)

    return [Candidate(NAME, "fwd", call, lambda answer: answer[0])]


@functools.cache
def forward() -> Any:
    """The op, loaded once. Raises Unsupported where no library is named."""
    import torch

    path = os.environ.get(LIBRARY_VARIABLE)
    if not path:
        raise Unsupported(f"{LIBRARY_VARIABLE} does not name the FlashAttention-3 library")
    torch.ops.load_library(path)
    return torch.ops.flash_attn_3.fwd
