"""The oracle in NumPy: float64 inside, written to be read. Arrays on the CPU are served by it."""

from __future__ import annotations

from .attention import Visibility as Visibility
from .attention import alibi_slopes as alibi_slopes
from .attention import attention as attention
from .attention import rope as rope
from .bits import packbits as packbits
from .bits import segment_offsets as segment_offsets
from .bits import segment_packbits as segment_packbits
from .bits import unpack_mask as unpack_mask
from .merge import merge_state as merge_state
from .merge import merge_states as merge_states
from .merge import variable_length_merge_states as variable_length_merge_states
from .pages import store_rows as store_rows
from .pages import to_fp8 as to_fp8
from .selection import choose_blocks as choose_blocks
from .selection import score_blocks as score_blocks
