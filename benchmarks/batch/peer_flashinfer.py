"""FlashInfer's batch wrappers, backends "fa2" and "fa3".

Signatures are those of FlashInfer 0.7. `plan` is outside the timed call unless it is what is timed.
"""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

from ..candidate import Candidate, Unsupported
from .case import BatchCase
from .inputs import BatchInputs
from .several import VARIANTS, bind_several
from .wrappers import Calls, bind, empty_output, plan_tables, workspace

_EIGHT_BIT_DIMS = (64, 128, 256)


def variants(case: BatchCase, backend: str) -> list[str]:
    """The calls that serve a case: tc and cc (decode with and without tensor cores), paged,
    ragged; multilevel and flat; holistic and apart.

    Raises Unsupported with the reason if there is none.
    """
    if case.framework != "torch":
        raise Unsupported("takes torch tensors only")
    if case.arrays == "numpy":
        raise Unsupported("plan() takes torch tensors only")
    if case.sinks:
        if case.api not in ("decode", "paged", "verify"):
            raise Unsupported("its wrapper with sinks takes pages")
        return ["sinks"]
    if case.api in VARIANTS:
        # It has no decode of its own beside chunks that is not "apart".
        return list(VARIANTS[case.api])
    if case.api == "decode":
        if backend == "fa3":
            raise Unsupported("FlashInfer decodes batches with fa2 or XQA on this device")
        return ["tc", "cc"]
    if case.is_8bit:
        if backend == "fa2":
            raise Unsupported("FlashInfer multiplies e4m3 by fa3")
        if case.head_dim_qk != case.head_dim_vo or case.head_dim_qk not in _EIGHT_BIT_DIMS:
            raise Unsupported("FlashInfer's fa3 multiplies e4m3 of head dims 64, 128 and 256")
    elif backend == "fa3" and not case.is_plain:
        raise Unsupported("not built: two minutes a module, and measured in the prefill cases")
    return ["paged" if case.api == "verify" else case.api]


def candidates(
    backend: str, case: BatchCase, inputs: BatchInputs, build: bool = True
) -> list[Candidate]:
    """A candidate for each variant; one that cannot be set up is offered as a call that raises.

    Without `build`, variants whose modules are not built yet are left out; Unsupported where no
    variant is left.
    """
    result = []
    if case.api == "verify":
        # Its decode wrapper takes no mask.
        case = replace(case, api="paged")
    chosen = variants(case, backend)
    if not build:
        from ..peers.prebuild import is_ready

        chosen = [variant for variant in chosen if is_ready(case, backend, variant)]
        if not chosen:
            raise Unsupported("its modules are not built, and none is built here")
    for variant in chosen:
        try:
            result.append(_candidate(backend, variant, case, inputs))
        except Exception as error:
            call = functools.partial(_raise, error)
            result.append(Candidate(f"flashinfer_{backend}", variant, call, lambda answer: answer))
    return result


def _candidate(backend: str, variant: str, case: BatchCase, inputs: BatchInputs) -> Candidate:
    import flashinfer  # type: ignore[import-not-found]
    import torch

    out = empty_output(case, inputs)
    if case.api in VARIANTS:
        calls = bind_several(variant, flashinfer, "flashinfer", case, inputs, lambda x: x, out)
        return calls.candidate(f"flashinfer_{backend}", variant, case, _first_output, None)
    if case.sinks:
        calls = _bind_sinks(flashinfer, backend, case, inputs, out)
        return calls.candidate(f"flashinfer_{backend}", variant, case, _first_output, out)
    constructor: dict[str, Any] = {"backend": backend}
    if case.api == "decode":
        constructor["use_tensor_cores"] = variant == "tc"
    mask = {}
    if inputs.masks is not None:
        # As bool: plan() computes byte offsets only when it packs the mask itself.
        mask["custom_mask"] = torch.cat([mask.reshape(-1) for mask in inputs.masks])
    calls = bind(flashinfer, "flashinfer", case, inputs, lambda x: x, out, mask, **constructor)
    return calls.candidate(f"flashinfer_{backend}", variant, case, lambda answer: answer[None], out)


def _bind_sinks(
    library: Any, backend: str, case: BatchCase, inputs: BatchInputs, out: Any
) -> Calls:
    """FlashInfer's wrapper for models with sinks: a prefill wrapper, also for one row a request."""
    case = replace(case, api="paged", causal=True)
    wrapper = library.BatchAttentionWithAttentionSinkWrapper(
        workspace(f"flashinfer sinks {backend}", str(inputs.q.device)),
        kv_layout="NHD",
        backend=backend,
        q_data_type=inputs.q.dtype,
        kv_data_type=inputs.k.dtype,
        head_dim_qk=case.head_dim_qk,
        head_dim_vo=case.head_dim_vo,
        window_left=case.window_left,
    )
    heads = (case.num_qo_heads, case.num_kv_heads, case.head_dim_qk, case.page_size)
    tables = plan_tables(case, inputs, lambda x: x)
    plan = functools.partial(
        wrapper.plan, *tables, *heads, causal=True, window_left=case.window_left,
        q_data_type=inputs.q.dtype, kv_data_type=inputs.k.dtype,
    )  # fmt: skip
    scale = case.head_dim_qk**-0.5
    cache = (inputs.k, inputs.v)
    return Calls(plan, lambda: wrapper.run(inputs.q, cache, inputs.sinks, scale, out=out))


def _first_output(answer: Any) -> Any:
    return (answer[0] if isinstance(answer, tuple) else answer)[None]


def _raise(error: Exception) -> Any:
    raise error
