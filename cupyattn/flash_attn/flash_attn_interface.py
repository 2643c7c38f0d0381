"""The functions by the name of the module that FA3 has them in, and flash_attn in a submodule."""

# An absolute import: under another name of the package a relative one would load it again.
from cupyattn.flash_attn import __version__ as __version__
from cupyattn.flash_attn import flash_attn_combine as flash_attn_combine
from cupyattn.flash_attn import flash_attn_func as flash_attn_func
from cupyattn.flash_attn import flash_attn_varlen_func as flash_attn_varlen_func
from cupyattn.flash_attn import flash_attn_with_kvcache as flash_attn_with_kvcache
from cupyattn.flash_attn import get_scheduler_metadata as get_scheduler_metadata
