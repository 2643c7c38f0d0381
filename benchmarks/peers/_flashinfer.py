"""What the two FlashInfer peers share: which of its public calls serve a case, and how.

Signatures are those of FlashInfer 0.7. `plan` is outside the timed call, as its users keep it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from ..candidate import Candidate, Unsupported
from ..case import Case
from ..inputs import Inputs

_WORKSPACE_BYTES = 384 << 20
_PAGE_SIZE = 16

_Built = tuple[Callable[[], Any], Callable[[Any], Any]]  # the call, its output


def variants(case: Case, backend: str) -> list[str]:
    """The calls that serve a case, out of single, ragged, decode_tc, decode_cc and paged_tc.

    Few on purpose: each new combination of options is a module that takes a minute to compile.
    Raises Unsupported with the reason if there is none.
    """
    if case.framework != "torch":
        raise Unsupported("takes torch tensors only")
    if backend == "fa3" and (case.pos_encoding_mode != "NONE" or case.mask != "none"):
        raise Unsupported("FlashInfer's fa3 has no such option")
    if case.api == "decode":
        if backend == "fa3":
            raise Unsupported("FlashInfer's single decode has no fa3")
        paged = ["paged_tc"] if case.kv_dtype != "bfloat16" else []
        return ["decode_tc", "decode_cc", *paged]
    if case.op == "host":
        return ["single"]
    if case.batch == 1:
        common = case.is_plain and case.head_dim_qk == case.head_dim_vo == 128
        return ["single", "ragged"] if common and case.q_len == case.kv_len else ["single"]
    if case.mask == "bool":
        return ["single"]  # plan() would pack it, and the rest is the packed case
    if backend == "fa3" and (case.head_dim_qk != 128 or not case.is_plain):
        return ["ragged"]
    return ["single", "ragged"]


def candidates(backend: str, case: Case, inputs: Inputs) -> list[Candidate]:
    """A candidate for each variant; one that cannot be set up is offered as a call that raises."""
    peer = f"flashinfer_{backend}"
    build: dict[str, Callable[[str, Case, Inputs], _Built]] = {
        "single": _single,
        "ragged": _ragged,
        "decode_tc": functools.partial(_decode, tensor_cores=True),
        "decode_cc": functools.partial(_decode, tensor_cores=False),
        "paged_tc": _paged_decode,
    }
    result = []
    for variant in variants(case, backend):
        label = f"single_x{case.batch}" if variant == "single" and case.batch > 1 else variant
        try:
            call, output = build[variant](backend, case, inputs)
        except Exception as error:
            call, output = functools.partial(_raise, error), _identity
        result.append(Candidate(peer, label, call, output))
    return result


def _single(backend: str, case: Case, inputs: Inputs) -> _Built:
    import flashinfer  # type: ignore[import-not-found]
    import torch

    attend = functools.partial(
        flashinfer.single_prefill_with_kv_cache, backend=backend, **_options(case)
    )
    masks: list[dict[str, Any]] = [{} for _ in range(case.batch)]
    if case.mask == "bool":
        masks = [{"custom_mask": mask} for mask in inputs.mask]
    elif case.mask == "packed":
        masks = [{"packed_custom_mask": bits} for bits in inputs.packed]
    calls = [
        functools.partial(attend, inputs.q[b], inputs.k[b], inputs.v[b], **mask)
        for b, mask in enumerate(masks)
    ]
    if case.batch == 1:
        return calls[0], lambda answer: answer[None]
    return lambda: [call() for call in calls], torch.stack


def _ragged(backend: str, case: Case, inputs: Inputs) -> _Built:
    import flashinfer
    import torch

    wrapper = flashinfer.BatchPrefillWithRaggedKVCacheWrapper(
        _workspace(), kv_layout="NHD", backend=backend
    )
    device = inputs.q.device
    requests = torch.arange(case.batch + 1, dtype=torch.int32, device=device)
    # The mask goes in as bool: plan() computes its byte offsets only when it packs it itself.
    wrapper.plan(
        requests * case.q_len,
        requests * case.kv_len,
        case.num_qo_heads,
        case.num_kv_heads,
        case.head_dim_qk,
        head_dim_vo=case.head_dim_vo,
        custom_mask=None if inputs.mask is None else inputs.mask.reshape(-1),
        q_data_type=inputs.q.dtype,
        kv_data_type=inputs.k.dtype,
        **_options(case),
    )
    q, k, v = (x.flatten(0, 1) for x in (inputs.q, inputs.k, inputs.v))
    shape = (case.batch, case.q_len, case.num_qo_heads, case.head_dim_vo)
    return lambda: wrapper.run(q, k, v), lambda answer: answer.view(shape)


def _decode(backend: str, case: Case, inputs: Inputs, tensor_cores: bool) -> _Built:
    import flashinfer

    call = functools.partial(
        flashinfer.single_decode_with_kv_cache,
        inputs.q[0, 0],
        inputs.k[0],
        inputs.v[0],
        use_tensor_cores=tensor_cores,
    )
    return call, lambda answer: answer[None, None]


def _paged_decode(backend: str, case: Case, inputs: Inputs) -> _Built:
    import flashinfer
    import torch

    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(
        _workspace(), kv_layout="NHD", use_tensor_cores=True, backend=backend
    )
    device = inputs.q.device
    pages = case.kv_len // _PAGE_SIZE

    def int32(*values: int) -> Any:
        return torch.tensor(values, dtype=torch.int32, device=device)

    wrapper.plan(
        int32(0, pages),
        torch.arange(pages, dtype=torch.int32, device=device),
        int32(_PAGE_SIZE),
        case.num_qo_heads,
        case.num_kv_heads,
        case.head_dim_qk,
        _PAGE_SIZE,
        q_data_type=inputs.q.dtype,
        kv_data_type=inputs.k.dtype,
    )
    shape = (pages, _PAGE_SIZE, case.num_kv_heads, case.head_dim_qk)
    cache = (inputs.k[0].view(shape), inputs.v[0].view(shape))
    q = inputs.q[0]
    return lambda: wrapper.run(q, cache), lambda answer: answer[None]


def _options(case: Case) -> dict[str, Any]:
    options: dict[str, Any] = {"causal": case.causal}
    if case.pos_encoding_mode != "NONE":
        options["pos_encoding_mode"] = case.pos_encoding_mode
    if case.logits_soft_cap:
        options["logits_soft_cap"] = case.logits_soft_cap
    if case.window_left >= 0:
        options["window_left"] = case.window_left
    return options


@functools.cache
def _workspace() -> Any:
    import torch

    return torch.zeros(_WORKSPACE_BYTES, dtype=torch.uint8, device="cuda")


def _raise(error: Exception) -> Any:
    raise error


def _identity(answer: Any) -> Any:
    return answer
