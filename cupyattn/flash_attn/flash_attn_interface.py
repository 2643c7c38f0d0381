"""FlashAttention-2's functions by the name of its module, flash_attn.flash_attn_interface."""

# An absolute import: under another name of the package a relative one would load it again.
from cupyattn.flash_attn import __version__ as __version__
from cupyattn.flash_attn import flash_attn_combine as flash_attn_combine
from cupyattn.flash_attn import flash_attn_func as flash_attn_func
from cupyattn.flash_attn import flash_attn_kvpacked_func as flash_attn_kvpacked_func
from cupyattn.flash_attn import flash_attn_qkvpacked_func as flash_attn_qkvpacked_func
from cupyattn.flash_attn import flash_attn_varlen_func as flash_attn_varlen_func
from cupyattn.flash_attn import flash_attn_varlen_kvpacked_func as flash_attn_varlen_kvpacked_func
from cupyattn.flash_attn import flash_attn_varlen_qkvpacked_func as flash_attn_varlen_qkvpacked_func
from cupyattn.flash_attn import flash_attn_with_kvcache as flash_attn_with_kvcache
from cupyattn.flash_attn import get_scheduler_metadata as get_scheduler_metadata
from cupyattn.flash_attn.raw import _flash_attn_forward as _flash_attn_forward
from cupyattn.flash_attn.raw import _flash_attn_varlen_forward as _flash_attn_varlen_forward
from cupyattn.flash_attn.raw import _get_block_size_n as _get_block_size_n

# FlashAttention's own tests, and programs that look for AMD's kernels, ask for this.
USE_TRITON_ROCM = False
