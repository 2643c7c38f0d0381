"""Attention of mixed batches, of batches with sinks, and with ranges seen in both directions."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .core.names import refuse_names
from .wrappers.bidirectional import BatchPrefillWithCausalBidirectionalRangesWrapper
from .wrappers.mixed import BatchAttention
from .wrappers.sinks import BatchAttentionWithAttentionSinkWrapper

__all__ = [
    "BatchAttention",
    "BatchAttentionWithAttentionSinkWrapper",
    "BatchPrefillWithCausalBidirectionalRangesWrapper",
]

if not TYPE_CHECKING:
    __getattr__ = refuse_names(__name__)
