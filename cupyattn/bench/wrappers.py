"""The batch wrappers, cupyattn's and FlashInfer's: the names and arguments of both are the same."""

from __future__ import annotations

import functools
from collections.abc import Callable
from importlib import import_module
from typing import Any

import numpy as np

from .. import array
from .candidate import Candidate
from .cases import DTYPE, Case
from .inputs import Inputs

Table = Callable[[np.ndarray], Any]


def ours(case: Case, inputs: Inputs) -> Candidate:
    """cupyattn's wrapper of the case, which makes a workspace of its own on q's device."""
    library = import_module("cupyattn")
    device = str(array.view(inputs.q, "q").device)
    return candidate("cupyattn", library, library, "run", case, inputs, device, lambda x: x)


def candidate(
    name: str,
    library: Any,
    latent_library: Any,
    variant: str,
    case: Case,
    inputs: Inputs,
    workspace: Any,
    table: Table,
    **constructor: Any,
) -> Candidate:
    """One run() of a library's wrapper, planned here: engines plan once for all layers.

    `table` makes what plan() is given of an int32 NumPy array.
    """
    bind = {"decode": _decode, "prefill": _ragged, "append": _append, "mla": _latent}[case.kind]
    owner = latent_library if case.is_latent else library
    call = bind(owner, case, inputs, workspace, table, constructor)
    return Candidate(name, variant, call, lambda _: inputs.out[None], inputs.out)


def _heads(case: Case) -> tuple[int, int, int]:
    return case.num_qo_heads, case.num_kv_heads, case.head_dim_qk


def _offsets(case: Case, step: int) -> np.ndarray:
    return np.arange(case.requests + 1, dtype=np.int32) * np.int32(step)


def _pages(case: Case, inputs: Inputs, table: Table) -> tuple[Any, Any, Any]:
    """indptr, indices and last_page_len."""
    assert inputs.tables is not None
    count = inputs.tables.shape[1]
    last = case.kv_len - (count - 1) * case.page_size
    lengths = np.full(case.requests, last, np.int32)
    return table(_offsets(case, count)), inputs.indices, table(lengths)


def _dtypes() -> dict[str, Any]:
    return {"q_data_type": DTYPE, "kv_data_type": DTYPE}


def _decode(
    library: Any, case: Case, inputs: Inputs, workspace: Any, table: Table, options: dict[str, Any]
) -> Callable[[], Any]:
    wrapper = library.BatchDecodeWithPagedKVCacheWrapper(workspace, "NHD", **options)
    indptr, indices, last = _pages(case, inputs, table)
    q_heads, kv_heads, head_dim = _heads(case)
    wrapper.plan(indptr, indices, last, q_heads, kv_heads, head_dim, case.page_size, **_dtypes())
    return functools.partial(wrapper.run, inputs.q, (inputs.k, inputs.v), out=inputs.out)


def _append(
    library: Any, case: Case, inputs: Inputs, workspace: Any, table: Table, options: dict[str, Any]
) -> Callable[[], Any]:
    wrapper = library.BatchPrefillWithPagedKVCacheWrapper(workspace, "NHD", **options)
    rows = table(_offsets(case, case.q_len))
    indptr, indices, last = _pages(case, inputs, table)
    q_heads, kv_heads, head_dim = _heads(case)
    wrapper.plan(
        rows,
        indptr,
        indices,
        last,
        q_heads,
        kv_heads,
        head_dim,
        case.page_size,
        causal=True,
        **_dtypes(),
    )
    return functools.partial(wrapper.run, inputs.q, (inputs.k, inputs.v), out=inputs.out)


def _ragged(
    library: Any, case: Case, inputs: Inputs, workspace: Any, table: Table, options: dict[str, Any]
) -> Callable[[], Any]:
    wrapper = library.BatchPrefillWithRaggedKVCacheWrapper(workspace, "NHD", **options)
    rows, keys = (table(_offsets(case, length)) for length in (case.q_len, case.kv_len))
    q_heads, kv_heads, head_dim = _heads(case)
    wrapper.plan(rows, keys, q_heads, kv_heads, head_dim, causal=True, **_dtypes())
    return functools.partial(wrapper.run, inputs.q, inputs.k, inputs.v, out=inputs.out)


def _latent(
    library: Any, case: Case, inputs: Inputs, workspace: Any, table: Table, options: dict[str, Any]
) -> Callable[[], Any]:
    wrapper = library.BatchMLAPagedAttentionWrapper(workspace, **options)
    rope = case.head_dim_qk - case.head_dim_vo
    indptr, indices, _ = _pages(case, inputs, table)
    lengths = table(np.full(case.requests, case.kv_len, np.int32))
    wrapper.plan(
        table(_offsets(case, 1)),
        indptr,
        indices,
        lengths,
        case.num_qo_heads,
        case.head_dim_vo,
        rope,
        case.page_size,
        True,
        case.sm_scale,
        inputs.q.dtype,
        inputs.k.dtype,
    )
    q, k = inputs.q, inputs.k[:, :, 0]
    parts = [x[..., columns] for x in (q, k) for columns in _columns(case)]
    return functools.partial(wrapper.run, *parts, out=inputs.out)


def _columns(case: Case) -> tuple[slice, slice]:
    """The latent columns and the rope columns."""
    return slice(None, case.head_dim_vo), slice(case.head_dim_vo, None)
