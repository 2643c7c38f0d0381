"""The oracle in NumPy: float64 inside, written to be read. Arrays on the CPU are served by it."""

from __future__ import annotations

from .attention import attention
from .bits import packbits, segment_packbits, unpack_mask
from .masks import Visibility
from .merge import merge_state, merge_states, variable_length_merge_states
from .pages import store_rows, to_fp8
from .positions import alibi_slopes, rope

__all__ = [
    "Visibility",
    "alibi_slopes",
    "attention",
    "merge_state",
    "merge_states",
    "packbits",
    "rope",
    "segment_packbits",
    "store_rows",
    "to_fp8",
    "unpack_mask",
    "variable_length_merge_states",
]
