"""cupyattn through its public API, as a caller with torch or CuPy arrays would use it."""

from __future__ import annotations

import functools
from collections.abc import Callable
from importlib import import_module
from typing import Any

import numpy as np

from .candidate import Candidate
from .case import Case
from .inputs import Inputs

NAME = "ours"


def candidates(case: Case, inputs: Inputs) -> list[Candidate]:
    """A call per request, back to back, and for many requests of a prefill one call for all."""
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
    result = [Candidate(NAME, variant, call, output, buffer=out)]
    if case.op == "prefill" and case.batch > 1:
        result.append(_ragged(cupyattn, case, inputs))
    return result


def _ragged(cupyattn: Any, case: Case, inputs: Inputs) -> Candidate:
    """The requests in one call of the batch wrapper; planning is outside, as its users keep it."""
    import torch

    device = inputs.q.device
    workspace = torch.empty(128 << 20, dtype=torch.uint8, device=device)
    wrapper = cupyattn.BatchPrefillWithRaggedKVCacheWrapper(workspace)
    starts = np.arange(case.batch + 1, dtype=np.int32)
    masks: dict[str, Any] = {}
    if inputs.mask is not None and case.mask == "bool":
        masks["custom_mask"] = inputs.mask.reshape(-1)
    elif inputs.mask is not None:
        masks["packed_custom_mask"] = torch.cat([inputs.packed[b] for b in range(case.batch)])
    wrapper.plan(
        starts * case.q_len,
        starts * case.kv_len,
        case.num_qo_heads,
        case.num_kv_heads,
        case.head_dim_qk,
        head_dim_vo=case.head_dim_vo,
        q_data_type=inputs.q.dtype,
        kv_data_type=inputs.k.dtype,
        **masks,
        **options(case),
    )
    q, k, v = (x.flatten(0, 1) for x in (inputs.q, inputs.k, inputs.v))
    shape = (case.batch, case.q_len, case.num_qo_heads, case.head_dim_vo)
    out = torch.empty(shape, dtype=inputs.q.dtype, device=device)
    flat = out.flatten(0, 1)
    return Candidate(
        NAME, "ragged", lambda: wrapper.run(q, k, v, out=flat), lambda _: out, buffer=out
    )


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
