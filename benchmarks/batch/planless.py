"""Decode by `trtllm_batch_decode_with_kv_cache`, ours and FlashInfer's: it has no plan."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

from ..candidate import Candidate
from .case import BatchCase
from .inputs import BatchInputs
from .wrappers import empty_output, workspace


def candidate(
    function: Callable[..., Any],
    name: str,
    variant: str,
    case: BatchCase,
    inputs: BatchInputs,
    **options: Any,
) -> Candidate:
    """One call over the padded page table."""
    assert inputs.tables is not None
    import torch

    device = inputs.q.device
    out = empty_output(case, inputs)
    if inputs.sinks is not None:
        # FlashInfer takes a list of them.
        options["sinks"] = inputs.sinks if name.startswith("ours") else [inputs.sinks]
    call = functools.partial(
        function,
        inputs.q,
        (inputs.k, inputs.v),
        workspace(name, str(device)),
        torch.from_numpy(inputs.tables.block_table()).to(device),
        torch.from_numpy(inputs.tables.kv_lens).to(device),
        max(case.kv_lens),
        bmm1_scale=1.0 / math.sqrt(case.head_dim_qk),  # the whole scale of the logits
        window_left=case.window_left,
        out=out,
        kv_layout="NHD",
        **options,
    )
    return Candidate(name, variant, call, lambda answer: answer[None], out)
