"""What the two torch SDPA peers share."""

from __future__ import annotations

from typing import Any

from ..candidate import Candidate, Unsupported
from ..case import Case
from ..inputs import Inputs


def candidates(name: str, backend: str, case: Case, inputs: Inputs) -> list[Candidate]:
    """One batched call on [B, H, S, D] views, with GQA in the kernel where the backend has it."""
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel

    _check(case)
    chosen = getattr(SDPBackend, backend)
    q, k, v = (x.transpose(1, 2) for x in (inputs.q, inputs.k, inputs.v))
    group = case.num_qo_heads // case.num_kv_heads

    def attend(keys: Any, values: Any, enable_gqa: bool) -> Any:
        with sdpa_kernel(chosen):
            return torch.nn.functional.scaled_dot_product_attention(
                q, keys, values, is_causal=case.causal, enable_gqa=enable_gqa
            )

    note = ""
    if group > 1:
        try:
            attend(k, v, True)
        except RuntimeError:  # no kernel of this backend takes grouped heads
            k, v = (x.repeat_interleave(group, dim=1) for x in (k, v))
            group, note = 1, "KV heads repeated beforehand"
    return [
        Candidate(name, "sdpa", lambda: attend(k, v, group > 1), _to_rows, note=note),
    ]


def _to_rows(answer: Any) -> Any:
    return answer.transpose(1, 2)


def _check(case: Case) -> None:
    if not case.is_plain:
        raise Unsupported("this SDPA backend has no such option")
    if case.kv_dtype == "float8_e4m3fn":
        raise Unsupported("SDPA takes one dtype for q, k and v")
    if case.causal and case.q_len != case.kv_len:
        raise Unsupported("SDPA's is_causal is aligned to the top left")
    if case.op == "host":
        raise Unsupported("choosing the backend would be timed with the call")
