"""flash_attn's functions for inference: attention over arrays and caches whose lengths stay on the
device, with FlashAttention-2's arguments in its order; by name they take what FlashAttention-3,
SGLang and vLLM add.

For a program that imports flash_attn itself, put the module there first: `sys.modules["flash_attn"]
= cupyattn.flash_attn`. `cupyattn.flash_attn_interface` is for one written for FlashAttention-3.
"""

from __future__ import annotations

from .api import flash_attn_func as flash_attn_func
from .api import flash_attn_varlen_func as flash_attn_varlen_func
from .api import flash_attn_with_kvcache as flash_attn_with_kvcache
from .packed import flash_attn_kvpacked_func as flash_attn_kvpacked_func
from .packed import flash_attn_qkvpacked_func as flash_attn_qkvpacked_func
from .packed import flash_attn_varlen_kvpacked_func as flash_attn_varlen_kvpacked_func
from .packed import flash_attn_varlen_qkvpacked_func as flash_attn_varlen_qkvpacked_func
from .states import flash_attn_combine as flash_attn_combine
from .states import get_scheduler_metadata as get_scheduler_metadata
from .states import merge_attn_states as merge_attn_states
from .states import merge_state_v2 as merge_state_v2

__all__ = [
    "flash_attn_combine",
    "flash_attn_func",
    "flash_attn_kvpacked_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_varlen_kvpacked_func",
    "flash_attn_varlen_qkvpacked_func",
    "flash_attn_with_kvcache",
    "get_scheduler_metadata",
    "merge_attn_states",
    "merge_state_v2",
]

# flash_attn's, whose interface this is: programs ask for the version to learn what it takes.
__version__ = "2.8.4"
