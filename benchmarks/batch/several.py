"""Cascades and mixed batches: calls of several wrappers, or of one that serves several kinds.

Names and arguments are FlashInfer's, so ours and the peer are called by the same code.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from .case import BatchCase
from .inputs import BatchInputs
from .wrappers import Calls, Wrap, as_array, bind, workspace

# What is called in each kind of case, the wrapper made for it first.
VARIANTS = {"cascade": ("multilevel", "flat"), "mixed": ("holistic", "apart")}

Bind = Callable[[Any, str, BatchCase, BatchInputs, Wrap, Any], Calls]


def bind_several(
    variant: str,
    library: Any,
    owner: str,
    case: BatchCase,
    inputs: BatchInputs,
    wrap: Wrap,
    out: Any,
) -> Calls:
    """plan() and run() of a variant of a cascade or a mixed batch."""
    bound: Calls = _BINDS[variant](library, owner, case, inputs, wrap, out)
    return bound


def _multilevel(
    library: Any, owner: str, case: BatchCase, inputs: BatchInputs, wrap: Wrap, out: Any
) -> Calls:
    """Two levels: the shared pages, and each request's own."""
    tables = inputs.tables
    assert tables is not None
    count, same = case.batch, case.shared // case.page_size
    own = [tables.pages(b)[same:] for b in range(count)]
    levels: list[list[Any]] = [
        [[0, count], np.arange(count + 1)],
        [[0, same], np.cumsum([0, *map(len, own)])],
        [tables.pages(0)[:same], np.concatenate(own)],
        [[case.page_size], tables.last_page_len],
    ]
    arrays = [
        [as_array(np.asarray(x, np.int32), case, inputs, wrap) for x in level] for level in levels
    ]
    space = wrap(workspace(owner, str(inputs.q.device)))
    wrapper = library.MultiLevelCascadeAttentionWrapper(2, space, "NHD")
    sizes = (case.num_qo_heads, case.num_kv_heads, case.head_dim_qk, case.page_size)
    q, cache = wrap(inputs.q), (wrap(inputs.k), wrap(inputs.v))
    # FlashInfer's run() takes no out.
    named = {} if out is None or owner == "flashinfer" else {"out": wrap(out)}
    return Calls(
        lambda: wrapper.plan(*arrays, *sizes, q_data_type=case.dtype, kv_data_type=case.kv_dtype),
        lambda: wrapper.run(q, cache, **named),
    )


def _flat(
    library: Any, owner: str, case: BatchCase, inputs: BatchInputs, wrap: Wrap, out: Any
) -> Calls:
    """The decode wrapper, which reads shared keys for each request."""
    tensor_cores = {"use_tensor_cores": True}
    return bind(library, f"{owner} flat", _like(case, "decode"), inputs, wrap, out, {},
                **tensor_cores)  # fmt: skip


def _holistic(
    library: Any, owner: str, case: BatchCase, inputs: BatchInputs, wrap: Wrap, out: Any
) -> Calls:
    tables = inputs.tables
    assert tables is not None
    given = (inputs.qo_indptr, tables.indptr, tables.indices, tables.kv_lens)
    arrays = [as_array(x, case, inputs, wrap) for x in given]
    wrapper = library.BatchAttention("NHD", str(inputs.q.device))
    dims = (case.head_dim_qk, case.head_dim_vo, case.page_size)
    options = {"causal": True, "q_data_type": inputs.q.dtype, "kv_data_type": inputs.k.dtype}
    q, cache = wrap(inputs.q), (wrap(inputs.k), wrap(inputs.v))
    lse = inputs.q.new_empty(inputs.q.shape[:2], dtype=_float32())
    named = {} if out is None else {"out": wrap(out), "lse": wrap(lse)}
    return Calls(
        lambda: wrapper.plan(*arrays, case.num_qo_heads, case.num_kv_heads, *dims, **options),
        lambda: wrapper.run(q, cache, **named),
    )


def _apart(
    library: Any, owner: str, case: BatchCase, inputs: BatchInputs, wrap: Wrap, out: Any
) -> Calls:
    """The chunks by the prefill wrapper, then the rest by the decode wrapper."""
    tables = inputs.tables
    assert tables is not None and out is not None
    chunks = sum(count for count, q_len, _ in case.requests if q_len > 1)
    rows, pages = int(inputs.qo_indptr[chunks]), tables.indptr
    parts = (
        (inputs.qo_indptr[: chunks + 1], pages[: chunks + 1], tables.last_page_len[:chunks]),
        (None, pages[chunks:], tables.last_page_len[chunks:]),
    )
    sizes = (case.num_qo_heads, case.num_kv_heads, case.head_dim_qk, case.page_size)
    cache = (wrap(inputs.k), wrap(inputs.v))
    plans, runs = [], []
    for (qo_indptr, indptr, last), at in zip(parts, (slice(rows), slice(rows, None)), strict=True):
        name = "BatchDecodeWithPagedKVCacheWrapper"
        given, options = [indptr, tables.indices, last], {"q_data_type": case.dtype}
        if qo_indptr is not None:
            name = "BatchPrefillWithPagedKVCacheWrapper"
            given, options = [qo_indptr, *given], {**options, "causal": True}
        space = wrap(workspace(f"{owner} {name}", str(inputs.q.device)))
        wrapper = getattr(library, name)(space, "NHD")
        arrays = [as_array(x, case, inputs, wrap) for x in given]
        plans.append((wrapper.plan, (*arrays, *sizes), options))
        runs.append((wrapper.run, wrap(inputs.q[at]), wrap(out[at])))

    def plan() -> None:
        for call, positional, named in plans:
            call(*positional, **named)

    def run() -> Any:
        for call, q, part in runs:
            call(q, cache, out=part)
        return wrap(out)

    return Calls(plan, run)


_BINDS: dict[str, Bind] = {
    "multilevel": _multilevel,
    "flat": _flat,
    "holistic": _holistic,
    "apart": _apart,
}


def _like(case: BatchCase, api: str) -> BatchCase:
    return replace(case, api=api)


def _float32() -> Any:
    import torch

    return torch.float32
