"""Outputs on the CPU: the reference, request by request, in the caller's framework."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np

from .. import array, reference
from ..array import ArrayView
from ..core.spec import AttentionSpec


class Request(NamedTuple):
    """The part of a call that one sequence of keys serves.

    rows      of q and of the output
    k, v      [kv_len, num_kv_heads, head_dim]
    mask      bool [qo_len, kv_len]; it replaces causality
    answered  which of `rows` it serves, counted from the first; the default is all
    options   of reference.attention, of this request alone
    """

    rows: slice
    k: np.ndarray
    v: np.ndarray
    mask: np.ndarray | None = None
    answered: slice = slice(None)
    options: Mapping[str, Any] = MappingProxyType({})


def attend(
    spec: AttentionSpec,
    q: np.ndarray,
    requests: Iterable[Request],
    extras: Mapping[str, ArrayView | None],
    logits_arrays: Sequence[ArrayView] = (),
) -> tuple[np.ndarray, np.ndarray]:
    """(o [rows, num_qo_heads, head_dim_vo] in dtype_o, lse [rows, num_qo_heads] in float64).

    An fp8 output is rounded to nearest, and saturated.

    extras: sinks, scale_q, scale_k, scale_v and output_gate by name. logits_arrays: what
    spec.logits reads, in its order. Rows of no request have 0 and -inf.
    """
    extra_options: dict[str, Any] = {
        name: array.as_numpy(v) for name, v in extras.items() if v is not None
    }
    gate = extra_options.pop("output_gate", None)
    extra_options["logits_arrays"] = [array.as_numpy(v) for v in logits_arrays]
    o = np.zeros((len(q), spec.num_qo_heads, spec.head_dim_vo))
    lse = np.full(o.shape[:-1], -np.inf)
    for rows, k, v, mask, answered, options in requests:
        all_options = {**spec.reference_options(), **extra_options, **options}
        if gate is not None:
            all_options["output_gate"] = gate[rows]
        if spec.logits is not None:
            all_options["first_row"] = rows.start or 0
        results = reference.attention(q[rows], k, v, mask=mask, **all_options)
        o[rows][answered], lse[rows][answered] = (x[answered] for x in results)
    with np.errstate(over="ignore", invalid="ignore"):
        o *= spec.output_scale
        if spec.dtype_o.is_fp8:
            return reference.to_fp8(o, 1.0, spec.dtype_o.numpy), lse
        return o.astype(spec.dtype_o.numpy), lse


def tokens_first(v: ArrayView, kv_layout: str) -> np.ndarray:
    """Keys or values with the axis of tokens before that of heads: in rows, or in pages."""
    x = array.as_numpy(v)
    return x.swapaxes(-3, -2) if kv_layout == "HND" else x


def gather(pages: np.ndarray, ids: np.ndarray, kv_len: int) -> np.ndarray:
    """The first kv_len tokens of the pages with these ids: [kv_len, num_kv_heads, head_dim]."""
    return pages[ids].reshape(-1, *pages.shape[2:])[:kv_len]


def float32_lse(lse: np.ndarray) -> np.ndarray:
    """Base-2 LSE as kernels write it: finite where it is, though biases may be as large as float32
    has numbers, which are beyond its range in base 2."""
    max_float = float(np.finfo(np.float32).max)
    return np.where(np.isfinite(lse), lse.clip(-max_float, max_float), lse).astype(np.float32)


def deliver(values: np.ndarray, target: ArrayView | None, like: ArrayView, rows: Any = ...) -> Any:
    """`values` as an array of the framework of `like`, or `target`, of which `rows` are written."""
    if target is None:
        return array.from_numpy(np.ascontiguousarray(values), like)
    array.as_numpy(target)[rows] = values[rows]
    return target.owner
