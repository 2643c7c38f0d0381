"""cupyattn through its public API, as a caller with torch or CuPy arrays would use it."""

from __future__ import annotations

import functools
from collections.abc import Callable
from importlib import import_module
from typing import Any

from .candidate import Candidate
from .case import Case
from .inputs import Inputs

NAME = "ours"


def candidates(case: Case, inputs: Inputs) -> list[Candidate]:
    """One candidate: a call per request, back to back; its variant says how it was called."""
    import torch

    cupyattn: Any = import_module("cupyattn")
    out = None
    if case.out:
        shape = (case.batch, case.q_len, case.num_qo_heads, case.head_dim_vo)
        out = torch.empty(shape, dtype=inputs.q.dtype, device=inputs.q.device)
    serve: Callable[..., Any] = (
        cupyattn.single_decode_with_kv_cache
        if case.api == "decode"
        else cupyattn.single_prefill_with_kv_cache
    )
    arguments = [_arguments(case, inputs, b, out) for b in range(case.batch)]
    calls = [functools.partial(serve, *positional, **named) for positional, named in arguments]

    def output(answer: Any) -> Any:
        if out is not None:
            return out
        answers = answer if isinstance(answer, list) else [answer]
        tensors = [to_torch(a, case.framework) for a in answers]
        return torch.stack([t.view(case.q_len, case.num_qo_heads, -1) for t in tensors])

    variant = "single" if case.batch == 1 else f"single_x{case.batch}"
    if case.op == "host":
        variant = "out" if case.out else "alloc"
    call = calls[0] if case.batch == 1 else lambda: [one() for one in calls]
    return [Candidate(NAME, variant, call, output, buffer=out)]


def _arguments(case: Case, inputs: Inputs, b: int, out: Any) -> tuple[list[Any], dict[str, Any]]:
    q, k, v = inputs.q[b], inputs.k[b], inputs.v[b]
    o = None if out is None else out[b]
    if case.api == "decode":
        q, o = q[0], None if o is None else o[0]
    wrap = wrap_for(case.framework)
    named: dict[str, Any] = options(case)
    if inputs.mask is not None:
        if case.mask == "bool":
            named["custom_mask"] = wrap(inputs.mask[b])
        else:
            named["packed_custom_mask"] = wrap(inputs.packed[b])
    if o is not None:
        named["out"] = wrap(o)
    return [wrap(q), wrap(k), wrap(v)], named


def options(case: Case) -> dict[str, Any]:
    """The options of a case as arguments of the single-request functions."""
    named: dict[str, Any] = {}
    if case.api == "prefill" and case.causal:
        named["causal"] = True
    if case.pos_encoding_mode != "NONE":
        named["pos_encoding_mode"] = case.pos_encoding_mode
    if case.logits_soft_cap:
        named["logits_soft_cap"] = case.logits_soft_cap
    if case.window_left >= 0:
        named["window_left"] = case.window_left
    if case.kv_dtype != "bfloat16":
        named |= {"k_scale": 1.0, "v_scale": 1.0}
    return named


def wrap_for(framework: str) -> Callable[[Any], Any]:
    """How a torch tensor becomes an array of the framework."""
    if framework == "torch":
        return lambda x: x
    import cupy  # type: ignore[import-not-found]

    return cupy.from_dlpack


def to_torch(array: Any, framework: str) -> Any:
    """The way back, for bfloat16 answers."""
    import torch

    if framework == "torch":
        return array
    # The bits travel as int16: not every CuPy exports bfloat16.
    return torch.from_dlpack(array.view("int16")).view(torch.bfloat16)
