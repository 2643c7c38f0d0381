"""torch SDPA held to its memory-efficient kernel, which alone of torch's has head dims beyond 256.

It has neither pages nor grouped heads: keys are gathered, and repeated for prompts, beforehand; the
heads of a decode are its rows.
"""

from __future__ import annotations

from typing import Any

from ..candidate import Candidate, Unsupported
from .case import BatchCase
from .inputs import BatchInputs

NAME = "sdpa_efficient"


def candidates(case: BatchCase, inputs: BatchInputs) -> list[Candidate]:
    """One batched call over requests of one length."""
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel

    if len(set(zip(case.q_lens, case.kv_lens, strict=True))) > 1:
        raise Unsupported("SDPA takes requests of one length")
    is_prompt = case.causal and case.q_lens[0] == case.kv_lens[0]
    if not case.is_plain or case.kv_dtype != case.dtype or not (is_prompt or case.q_lens[0] == 1):
        raise Unsupported("measured for plain decodes and causal prompts")
    count, group = case.batch, case.num_qo_heads // case.num_kv_heads
    requests = [inputs.request(b) for b in range(count)]
    k, v = (torch.cat([getattr(one, name) for one in requests]) for name in "kv")
    q = inputs.q.view(count, case.q_lens[0], case.num_qo_heads, -1)
    if is_prompt:
        q, note = q.transpose(1, 2), "KV heads repeated beforehand"
        k, v = (x.repeat_interleave(group, dim=2) for x in (k, v))
    else:
        q, note = q.view(count, case.num_kv_heads, group, -1), "keys gathered beforehand"
    k, v = (x.transpose(1, 2) for x in (k, v))

    def call() -> Any:
        with sdpa_kernel(SDPBackend.EFFICIENT_ATTENTION):
            return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=is_prompt)

    def rows(answer: Any) -> Any:
        answer = answer.transpose(1, 2) if is_prompt else answer
        return answer.reshape(1, -1, case.num_qo_heads, case.head_dim_vo)

    return [Candidate(NAME, "sdpa", call, rows, note=note)]
