"""Attention of mixed batches, and of batches with sinks."""

from __future__ import annotations

from .wrappers.mixed import BatchAttention
from .wrappers.sinks import BatchAttentionWithAttentionSinkWrapper

__all__ = ["BatchAttention", "BatchAttentionWithAttentionSinkWrapper"]
