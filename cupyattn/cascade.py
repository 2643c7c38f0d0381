"""Keys that requests share, and the states of attention over parts of the keys."""

from __future__ import annotations

from ._batch_cascade import MultiLevelCascadeAttentionWrapper

__all__ = ["MultiLevelCascadeAttentionWrapper"]
