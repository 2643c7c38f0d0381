"""What user-written logits read in a batch: arrays that fit all requests, and their places."""

from __future__ import annotations

from ..array import ArrayView
from ..core.spec import AttentionSpec
from .logits import check_arrays
from .requests import Batch, with_indices


def check(spec: AttentionSpec, batch: Batch, arrays: tuple[ArrayView, ...]) -> dict[str, ArrayView]:
    """The arrays by what messages call them; ArgumentError unless they fit. Empty without
    expressions."""
    if spec.logits is None:
        return {}
    lengths = batch.requests
    qo_len, kv_len = (int(x.max(initial=0)) for x in (lengths.qo_len, lengths.kv_len))
    return check_arrays(
        spec.logits, arrays, spec, batch.num_requests, qo_len, kv_len, batch.num_rows
    )


def with_request_indices(spec: AttentionSpec, batch: Batch) -> Batch:
    """The batch whose requests know their index in it, if an expression reads that."""
    return with_indices(batch) if spec.logits is not None and spec.logits.reads("batch") else batch
