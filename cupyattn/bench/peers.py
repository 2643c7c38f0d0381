"""What else is installed: torch's SDPA, FlashInfer, flash-attn. None of them is needed."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import numpy as np

from . import wrappers
from .candidate import Candidate, Skipped, Unsupported
from .cases import Case
from .inputs import Inputs, as_bits

FA3_LIBRARY = "CUPYATTN_BENCH_FA3"
_WORKSPACE_BYTES = 384 << 20


def absence(name: str) -> str:
    """What is not installed of a peer of `NAMES`, or "" if it is there."""
    if find_spec("torch") is None:
        return "torch is not installed"
    if name == "flashinfer" and find_spec("flashinfer") is None:
        return "FlashInfer is not installed"
    libraries = "flash_attn_interface", "flash_attn"
    if name == "flash_attn" and not os.environ.get(FA3_LIBRARY):
        return "" if any(map(find_spec, libraries)) else "flash-attn is not installed"
    return ""


def candidates(
    name: str, case: Case, inputs: Inputs, tried: Mapping[str, str] | None = None
) -> list[Candidate]:
    """What one peer of `NAMES` offers for a case.

    tried: what `trial` found out about a peer of `COMPILES` for this kind of case; only backends
    that worked are called. None: all are.
    Raises Unsupported with the reason if it is not installed or cannot serve the case.
    """
    if reason := absence(name):
        raise Unsupported(reason)
    if name == "flashinfer":
        return _flashinfer(case, _as_torch(inputs), tried)
    return _OFFERS[name](case, _as_torch(inputs))


def _as_torch(inputs: Inputs) -> Inputs:
    """The same memory as torch tensors; `out` is torch's own."""
    import torch

    q, k, v = (_tensor(x) for x in (inputs.q, inputs.k, inputs.v))
    out = torch.empty(inputs.out.shape, dtype=q.dtype, device=q.device)
    indices = None if inputs.indices is None else torch.from_dlpack(inputs.indices)
    return replace(inputs, q=q, k=k, v=v, out=out, indices=indices)


def _tensor(x: Any) -> Any:
    import torch

    return torch.from_dlpack(as_bits(x)).view(torch.bfloat16)


def _dense(case: Case, inputs: Inputs) -> tuple[Any, Any, Any]:
    """q, k, v as [requests, tokens, heads, head dim]; pages are gathered beforehand."""
    import torch

    q = inputs.q.view(case.requests, case.q_len, case.num_qo_heads, -1)
    k, v = inputs.k, inputs.v
    if inputs.tables is not None:
        pages = torch.from_numpy(inputs.tables).to(q.device)
        k, v = (x[pages].flatten(1, 2)[:, : case.kv_len] for x in (k, v))
    shape = case.requests, case.kv_len, case.num_kv_heads, -1
    return q, k.reshape(shape), v.reshape(shape)


def _rows(case: Case, result: Any) -> Any:
    return result.reshape(1, -1, case.num_qo_heads, case.head_dim_vo)


# --- torch ---


def _sdpa(case: Case, inputs: Inputs) -> list[Candidate]:
    """Over dense keys: with the backend that torch chooses, and held to cuDNN."""
    if case.is_latent:
        raise Unsupported("has no kernel for 576 columns")
    q, k, v = (x.transpose(1, 2) for x in _dense(case, inputs))
    note = "dense keys" if case.is_paged else ""
    options = _causality(case)
    backends: dict[str, str | None] = {"torch's choice": None}
    if case.kind == "prefill":
        backends["cuDNN"] = "CUDNN_ATTENTION"

    def output(result: Any) -> Any:
        return _rows(case, result.transpose(1, 2))

    return [
        Candidate("SDPA", variant, _sdpa_call(q, k, v, options, backend), output, note=note)
        for variant, backend in backends.items()
    ]


def _causality(case: Case) -> dict[str, Any]:
    """SDPA's own flag is aligned to the first key, so chunks behind a prefix take a bias."""
    if case.q_len == 1:
        return {}
    if case.q_len == case.kv_len:
        return {"is_causal": True}
    from torch.nn.attention.bias import causal_lower_right

    return {"attn_mask": causal_lower_right(case.q_len, case.kv_len)}


def _sdpa_call(
    q: Any, k: Any, v: Any, options: dict[str, Any], backend: str | None
) -> Callable[[], Any]:
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.nn.functional import scaled_dot_product_attention

    attend = functools.partial(
        scaled_dot_product_attention, q, k, v, enable_gqa=q.shape[1] != k.shape[1], **options
    )

    def held() -> Any:
        with sdpa_kernel(getattr(SDPBackend, backend or "")):
            return attend()

    return attend if backend is None else held


# --- FlashInfer ---


def _flashinfer(case: Case, inputs: Inputs, tried: Mapping[str, str] | None) -> list[Candidate]:
    """Its wrappers with backend "fa2", and "fa3" on Hopper where it has one."""
    import torch

    library = import_module("flashinfer")
    latent = import_module("flashinfer.mla") if case.is_latent else None
    backends = ["fa2"]
    if case.kind != "decode" and torch.cuda.get_device_capability(inputs.q.device)[0] == 9:
        backends.append("fa3")
    options = {"use_tensor_cores": True} if case.kind == "decode" else {}

    def table(values: np.ndarray) -> Any:
        return torch.from_numpy(values).to(inputs.q.device)

    def offer(backend: str) -> Candidate:
        fault = "" if tried is None else tried.get(backend, tried.get("", "was not tried"))
        if fault:
            error = Skipped(fault)
            return Candidate("FlashInfer", backend, functools.partial(_raise, error), _identity)
        own = replace(inputs, out=torch.empty_like(inputs.out))
        space, named = _workspace(str(inputs.q.device)), {"backend": backend, **options}
        try:
            return wrappers.candidate(
                "FlashInfer", library, latent, backend, case, own, space, table, **named
            )
        except Exception as error:  # a module that cannot be built; the other backend may do
            return Candidate("FlashInfer", backend, functools.partial(_raise, error), _identity)

    return [offer(backend) for backend in backends]


def _raise(error: Exception) -> Any:
    raise error


def _identity(result: Any) -> Any:
    return result


@functools.cache
def _workspace(device: str) -> Any:
    import torch

    return torch.zeros(_WORKSPACE_BYTES, dtype=torch.uint8, device=device)


# --- flash-attn ---


def _flash_attn(case: Case, inputs: Inputs) -> list[Candidate]:
    """FlashAttention-3 where it is installed, else FlashAttention-2."""
    forward = _fa3_forward()
    if forward is not None:
        return [_fa3(forward, case, inputs)]
    if case.is_latent:
        raise Unsupported("FlashAttention-2 has no kernel for 576 columns")
    library = import_module("flash_attn")
    # Its pages have 256 tokens, so it gets dense keys.
    attend = library.flash_attn_func if case.kind == "prefill" else library.flash_attn_with_kvcache
    call = functools.partial(attend, *_dense(case, inputs), causal=True)
    note = "dense keys" if case.is_paged else ""
    return [Candidate("flash-attn", "2", call, lambda result: _rows(case, result), note=note)]


@functools.cache
def _fa3_forward() -> Any:
    """The op of FlashAttention-3, of its package or of the library that a variable names."""
    import torch

    if os.environ.get(FA3_LIBRARY):
        torch.ops.load_library(os.environ[FA3_LIBRARY])
    elif find_spec("flash_attn_interface") is not None:
        import_module("flash_attn_interface")
    else:
        return None
    return torch.ops.flash_attn_3.fwd


def _fa3(forward: Any, case: Case, inputs: Inputs) -> Candidate:
    import torch

    device = inputs.q.device
    options: dict[str, Any] = {"softmax_scale": case.sm_scale, "is_causal": True, "num_splits": 0}
    q = inputs.q.view(case.requests, case.q_len, case.num_qo_heads, -1)
    if inputs.tables is None:
        q, k, v = _dense(case, inputs)  # equal lengths: its faster form
    else:
        lengths = torch.full((case.requests,), case.kv_len, dtype=torch.int32, device=device)
        tables = torch.from_numpy(inputs.tables.astype(np.int32)).to(device)
        options |= {"page_table": tables, "seqused_k": lengths}
        k, v = inputs.k, inputs.v
    if case.is_latent:  # the rope columns are its q and k, the latent ones its q_v and v
        options["q_v"] = q[..., : case.head_dim_vo]
        q, k = (x[..., case.head_dim_vo :] for x in (q, k))
    call = functools.partial(forward, q, k, v, **options)
    return Candidate("flash-attn", "3", call, lambda result: _rows(case, result[0]))


_OFFERS: dict[str, Callable[[Case, Inputs], list[Candidate]]] = {
    "sdpa": _sdpa,
    "flash_attn": _flash_attn,
}
# FlashInfer compiles a module at its first call, for minutes, where none is prebuilt.
COMPILES = ("flashinfer",)
NAMES = (*_OFFERS, *COMPILES)
TITLES = {"sdpa": "SDPA", "flash_attn": "flash-attn", "flashinfer": "FlashInfer"}
