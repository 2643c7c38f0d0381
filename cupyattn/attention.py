"""Attention of mixed batches."""

from __future__ import annotations

from ._batch_mixed import BatchAttention

__all__ = ["BatchAttention"]
