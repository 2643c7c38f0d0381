"""The attention backend of a serving engine: every forward mode, drafts, pools and CUDA graphs.

`AttentionBackend` is the framework-neutral core. `FlashAttentionBackend` has the method names and
the duck-typed arguments of SGLang's backend of that name.
"""

from __future__ import annotations

from ..slots import reshape_and_cache as reshape_and_cache
from .backend import AttentionBackend as AttentionBackend
from .backend import MultiStepDraftBackend as MultiStepDraftBackend
from .context_parallel import ContextParallelBackend as ContextParallelBackend
from .flash_attention import FlashAttentionBackend as FlashAttentionBackend
from .flash_attention import FlashAttentionMultiStepBackend as FlashAttentionMultiStepBackend
from .metadata import AttentionMetadata as AttentionMetadata
from .metadata import ForwardMetadata as ForwardMetadata
from .modes import BackendConfig as BackendConfig
from .modes import BatchInfo as BatchInfo
from .modes import DraftInfo as DraftInfo
from .modes import ForwardMode as ForwardMode
from .modes import LayerSpec as LayerSpec
from .pools import KVPool as KVPool
from .pools import MHATokenToKVPool as MHATokenToKVPool
from .pools import MLAPool as MLAPool
from .pools import MLATokenToKVPool as MLATokenToKVPool

__all__ = [
    "AttentionBackend",
    "AttentionMetadata",
    "BackendConfig",
    "BatchInfo",
    "ContextParallelBackend",
    "DraftInfo",
    "FlashAttentionBackend",
    "FlashAttentionMultiStepBackend",
    "ForwardMetadata",
    "ForwardMode",
    "KVPool",
    "LayerSpec",
    "MHATokenToKVPool",
    "MLAPool",
    "MLATokenToKVPool",
    "MultiStepDraftBackend",
    "reshape_and_cache",
]
