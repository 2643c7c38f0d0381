"""FlashAttention-3 over batches: ragged by cumulative lengths, paged by a padded page table."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

from ..candidate import Candidate, Unsupported
from ..peers.fa3 import NAME, forward
from .case import BatchCase
from .inputs import BatchInputs


def candidates(case: BatchCase, inputs: BatchInputs) -> list[Candidate]:
    """It chooses the number of splits, and it does not split.

    Requests of one length are also one dense batch.
    """
    has_option = case.mask != "none" or case.logits_soft_cap or case.sinks
    if case.pos_encoding_mode != "NONE" or has_option:
        raise Unsupported("FlashAttention-3 as built has no such option")
    if case.kv_dtype != case.dtype:
        raise Unsupported("FlashAttention-3 takes no fp8 KV with a 16-bit q")
    fwd = forward()
    q, options = inputs.q, _options(case, inputs)
    if case.api == "decode":
        q = q[:, None]
    elif case.op == "kvcache":
        q = q.view(case.batch, -1, *q.shape[1:])
    shape = (1, -1, case.num_qo_heads, case.head_dim_vo)

    def candidate(variant: str, num_splits: int, arrays: Any, given: dict[str, Any]) -> Candidate:
        call = partial(fwd, *arrays, num_splits=num_splits, **given)
        return Candidate(NAME, variant, call, lambda answer: answer[0].view(shape))

    arrays = (q, inputs.k, inputs.v)
    result = [candidate("fwd", 0, arrays, options), candidate("unsplit", 1, arrays, options)]
    if inputs.tables is None and len({(q_len, kv_len) for _, q_len, kv_len in case.requests}) == 1:
        # Its dense form is the faster one: no request is looked up.
        dense = tuple(x.view(case.batch, -1, *x.shape[1:]) for x in arrays)
        plain = {name: value for name, value in options.items() if "seqlen" not in name}
        result += [candidate("dense", 0, dense, plain), candidate("dense_unsplit", 1, dense, plain)]
    return result


def _options(case: BatchCase, inputs: BatchInputs) -> dict[str, Any]:
    import torch

    def on_device(table: Any) -> Any:
        return torch.from_numpy(table).to(inputs.q.device)

    options: dict[str, Any] = {
        "softmax_scale": 1.0 / math.sqrt(case.head_dim_qk),
        "is_causal": case.causal,
    }
    if case.window_left >= 0:
        options |= {"window_size_left": case.window_left, "window_size_right": 0}
    if case.api != "decode" and case.op != "kvcache":
        options |= {"cu_seqlens_q": on_device(inputs.qo_indptr), "max_seqlen_q": max(case.q_lens)}
    if inputs.tables is None:
        lengths = {"cu_seqlens_k": on_device(inputs.kv_indptr), "max_seqlen_k": max(case.kv_lens)}
        return options | lengths
    table, lengths = inputs.tables.block_table(), inputs.tables.kv_lens
    return options | {"page_table": on_device(table), "seqused_k": on_device(lengths)}
