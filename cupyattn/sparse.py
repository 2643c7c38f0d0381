"""Attention with block-sparse masks."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .core.names import refuse_names
from .wrappers.block_sparse import BlockSparseAttentionWrapper
from .wrappers.variable_block_sparse import VariableBlockSparseAttentionWrapper

__all__ = ["BlockSparseAttentionWrapper", "VariableBlockSparseAttentionWrapper"]

if not TYPE_CHECKING:
    __getattr__ = refuse_names(__name__)
