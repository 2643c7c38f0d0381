"""Multi-head latent attention (MLA) of batches."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .core.names import refuse_names
from .wrappers.mla import BatchMLAPagedAttentionWrapper, MLAPlanMetadata

__all__ = ["BatchMLAPagedAttentionWrapper", "MLAPlanMetadata"]

if not TYPE_CHECKING:
    __getattr__ = refuse_names(__name__)
