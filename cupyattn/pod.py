"""Prompts and decodes of one step in one call."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .core.names import refuse_names
from .wrappers.batch_pod import BatchPODWithPagedKVCacheWrapper
from .wrappers.pod import PODWithPagedKVCacheWrapper

__all__ = ["BatchPODWithPagedKVCacheWrapper", "PODWithPagedKVCacheWrapper"]

if not TYPE_CHECKING:
    __getattr__ = refuse_names(__name__)
