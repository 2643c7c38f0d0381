"""Attention of mixed batches, and of batches with sinks."""

from __future__ import annotations

from ._batch_mixed import BatchAttention
from ._batch_sinks import BatchAttentionWithAttentionSinkWrapper

__all__ = ["BatchAttention", "BatchAttentionWithAttentionSinkWrapper"]
