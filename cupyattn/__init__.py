"""cupyattn: LLM attention on any DLPack tensors, with CUDA kernels loaded through CuPy.

Names, arguments and semantics follow FlashInfer: `import cupyattn as flashinfer` ports a program.
Importing this package imports none of CuPy, torch and JAX.

One call for all:
    dot_product_attention
One request:
    single_prefill_with_kv_cache, single_prefill_with_kv_cache_return_lse,
    single_decode_with_kv_cache
Batches, planned once and run in every layer:
    BatchDecodeWithPagedKVCacheWrapper, CUDAGraphBatchDecodeWithPagedKVCacheWrapper,
    BatchPrefillWithPagedKVCacheWrapper, BatchPrefillWithRaggedKVCacheWrapper, BatchAttention,
    BatchAttentionWithAttentionSinkWrapper, PODWithPagedKVCacheWrapper,
    BatchPODWithPagedKVCacheWrapper, BatchPrefillWithCausalBidirectionalRangesWrapper,
    fast_decode_plan
Batches whose lengths stay on the GPU:
    trtllm_batch_decode_with_kv_cache, trtllm_batch_context_with_kv_cache,
    trtllm_ragged_attention_deepseek, trtllm_fmha_v2_prefill, xqa_batch_decode_with_kv_cache, xqa,
    cudnn_batch_decode_with_kv_cache, cudnn_batch_prefill_with_kv_cache
Keys that requests share, and states over parts of the keys:
    MultiLevelCascadeAttentionWrapper, BatchDecodeWithSharedPrefixPagedKVCacheWrapper,
    BatchPrefillWithSharedPrefixPagedKVCacheWrapper,
    batch_decode_with_shared_prefix_padded_kv_cache, merge_state, merge_state_in_place,
    merge_states, variable_length_merge_states
Blocks of keys, and keys chosen by scores:
    BlockSparseAttentionWrapper, VariableBlockSparseAttentionWrapper, top_k_page_table_transform,
    top_k_ragged_transform
Latent attention (MLA), planned and with lengths on the GPU; flash_mla has FlashMLA's functions:
    BatchMLAPagedAttentionWrapper, BatchDecodeMlaWithPagedKVCacheWrapper,
    trtllm_batch_decode_with_kv_cache_mla, xqa_batch_decode_with_kv_cache_mla, xqa_mla
Pages and masks:
    append_paged_kv_cache, append_paged_mla_kv_cache, get_batch_indices_positions, get_seq_lens,
    packbits, segment_packbits
Eight bits, and what comes between a layer's projections and its attention:
    quantize_qkv (a QuantizedQKV), rope_and_cache
Keys that several GPUs share:
    get_share_seq_lens, get_share_slots, get_share_lists
Why a kernel runs:
    explain
Modules:
    flash_attn, flash_attn_interface, flash_mla (those libraries' functions), serving (an engine's
    attention backend), distributed (several GPUs), integrations (torch.compile, jax.jit,
    transformers), paging (page tables in NumPy), reference (attention on the CPU), typing
Errors:
    CupyAttnError and its kinds ArgumentError (ExpressionError), UnsupportedError, PlanError,
    WorkspaceError, CompileError, DeviceError, DistributedError, MissingPackageError
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from ._version import __version__

# Public name -> the module that defines it; modules load on first use.
_EXPORTS = {
    "dot_product_attention": "dot_product",
    "single_decode_with_kv_cache": "decode",
    "single_prefill_with_kv_cache": "prefill",
    "single_prefill_with_kv_cache_return_lse": "prefill",
    "BatchDecodeWithPagedKVCacheWrapper": "decode",
    "BatchDecodeMlaWithPagedKVCacheWrapper": "decode",
    "CUDAGraphBatchDecodeWithPagedKVCacheWrapper": "decode",
    "fast_decode_plan": "decode",
    "BatchPrefillWithPagedKVCacheWrapper": "prefill",
    "BatchPrefillWithRaggedKVCacheWrapper": "prefill",
    "BatchAttention": "attention",
    "MultiLevelCascadeAttentionWrapper": "cascade",
    "BatchDecodeWithSharedPrefixPagedKVCacheWrapper": "cascade",
    "BatchPrefillWithSharedPrefixPagedKVCacheWrapper": "cascade",
    "batch_decode_with_shared_prefix_padded_kv_cache": "cascade",
    "trtllm_batch_decode_with_kv_cache": "trtllm",
    "trtllm_batch_context_with_kv_cache": "trtllm",
    "xqa_batch_decode_with_kv_cache": "trtllm",
    "xqa": "xqa",
    "trtllm_fmha_v2_prefill": "trtllm",
    "trtllm_ragged_attention_deepseek": "trtllm",
    "cudnn_batch_decode_with_kv_cache": "cudnn",
    "cudnn_batch_prefill_with_kv_cache": "cudnn",
    "explain": "explanation",
    "merge_state": "cascade",
    "merge_state_in_place": "cascade",
    "merge_states": "cascade",
    "variable_length_merge_states": "cascade",
    "BatchAttentionWithAttentionSinkWrapper": "attention",
    "BatchPrefillWithCausalBidirectionalRangesWrapper": "attention",
    "PODWithPagedKVCacheWrapper": "pod",
    "BatchPODWithPagedKVCacheWrapper": "pod",
    "BlockSparseAttentionWrapper": "sparse",
    "VariableBlockSparseAttentionWrapper": "sparse",
    "append_paged_kv_cache": "page",
    "append_paged_mla_kv_cache": "page",
    "BatchMLAPagedAttentionWrapper": "mla",
    "trtllm_batch_decode_with_kv_cache_mla": "mla",
    "xqa_batch_decode_with_kv_cache_mla": "mla",
    "xqa_mla": "mla",
    "get_batch_indices_positions": "page",
    "get_seq_lens": "page",
    "get_share_lists": "shares",
    "get_share_seq_lens": "shares",
    "get_share_slots": "shares",
    "QuantizedQKV": "quantize",
    "quantize_qkv": "quantize",
    "rope_and_cache": "quantize_pages",
    "top_k_page_table_transform": "topk",
    "top_k_ragged_transform": "topk",
    "packbits": "quantization",
    "segment_packbits": "quantization",
    "CupyAttnError": "errors",
    "ArgumentError": "errors",
    "ExpressionError": "errors",
    "UnsupportedError": "errors",
    "PlanError": "errors",
    "WorkspaceError": "errors",
    "CompileError": "errors",
    "DeviceError": "errors",
    "DistributedError": "errors",
    "MissingPackageError": "errors",
}
_MODULES = (
    *("attention", "cascade", "decode", "mla", "prefill", "trtllm", "cudnn", "flash_attn", "page"),
    "dsa_indexer",
    "flash_attn_interface",
    "flash_mla",
    "msa_ops",
    "paged_mqa",
    "topk",
    *(
        "paging",
        "quantization",
        "quantize",
        "quantize_pages",
        "pod",
        "shares",
        "sparse",
        "errors",
        "typing",
    ),
    *("distributed", "integrations", "reference", "serving", "slots"),
)

__all__ = ["__version__", *_EXPORTS]

if TYPE_CHECKING:
    from . import attention as attention
    from . import cascade as cascade
    from . import cudnn as cudnn
    from . import decode as decode
    from . import distributed as distributed
    from . import dsa_indexer as dsa_indexer
    from . import errors as errors
    from . import flash_attn as flash_attn
    from . import flash_attn_interface as flash_attn_interface
    from . import flash_mla as flash_mla
    from . import integrations as integrations
    from . import mla as mla
    from . import msa_ops as msa_ops
    from . import page as page
    from . import paged_mqa as paged_mqa
    from . import paging as paging
    from . import pod as pod
    from . import prefill as prefill
    from . import quantization as quantization
    from . import quantize as quantize
    from . import quantize_pages as quantize_pages
    from . import reference as reference
    from . import serving as serving
    from . import shares as shares
    from . import slots as slots
    from . import sparse as sparse
    from . import topk as topk
    from . import trtllm as trtllm
    from . import typing as typing
    from .attention import BatchAttention as BatchAttention
    from .attention import (
        BatchAttentionWithAttentionSinkWrapper as BatchAttentionWithAttentionSinkWrapper,
    )
    from .attention import (
        BatchPrefillWithCausalBidirectionalRangesWrapper as BatchPrefillWithCausalBidirectionalRangesWrapper,  # noqa: E501
    )
    from .cascade import (
        BatchDecodeWithSharedPrefixPagedKVCacheWrapper as BatchDecodeWithSharedPrefixPagedKVCacheWrapper,  # noqa: E501
    )
    from .cascade import (
        BatchPrefillWithSharedPrefixPagedKVCacheWrapper as BatchPrefillWithSharedPrefixPagedKVCacheWrapper,  # noqa: E501
    )
    from .cascade import MultiLevelCascadeAttentionWrapper as MultiLevelCascadeAttentionWrapper
    from .cascade import (
        batch_decode_with_shared_prefix_padded_kv_cache as batch_decode_with_shared_prefix_padded_kv_cache,  # noqa: E501
    )
    from .cascade import merge_state as merge_state
    from .cascade import merge_state_in_place as merge_state_in_place
    from .cascade import merge_states as merge_states
    from .cascade import variable_length_merge_states as variable_length_merge_states
    from .cudnn import cudnn_batch_decode_with_kv_cache as cudnn_batch_decode_with_kv_cache
    from .cudnn import cudnn_batch_prefill_with_kv_cache as cudnn_batch_prefill_with_kv_cache
    from .decode import (
        BatchDecodeMlaWithPagedKVCacheWrapper as BatchDecodeMlaWithPagedKVCacheWrapper,
    )
    from .decode import (
        BatchDecodeWithPagedKVCacheWrapper as BatchDecodeWithPagedKVCacheWrapper,
    )
    from .decode import (
        CUDAGraphBatchDecodeWithPagedKVCacheWrapper as CUDAGraphBatchDecodeWithPagedKVCacheWrapper,
    )
    from .decode import fast_decode_plan as fast_decode_plan
    from .decode import single_decode_with_kv_cache as single_decode_with_kv_cache
    from .dot_product import dot_product_attention as dot_product_attention
    from .errors import ArgumentError as ArgumentError
    from .errors import CompileError as CompileError
    from .errors import CupyAttnError as CupyAttnError
    from .errors import DeviceError as DeviceError
    from .errors import DistributedError as DistributedError
    from .errors import ExpressionError as ExpressionError
    from .errors import MissingPackageError as MissingPackageError
    from .errors import PlanError as PlanError
    from .errors import UnsupportedError as UnsupportedError
    from .errors import WorkspaceError as WorkspaceError
    from .explanation import explain as explain
    from .mla import BatchMLAPagedAttentionWrapper as BatchMLAPagedAttentionWrapper
    from .mla import (
        trtllm_batch_decode_with_kv_cache_mla as trtllm_batch_decode_with_kv_cache_mla,
    )
    from .mla import xqa_batch_decode_with_kv_cache_mla as xqa_batch_decode_with_kv_cache_mla
    from .mla import xqa_mla as xqa_mla
    from .page import append_paged_kv_cache as append_paged_kv_cache
    from .page import append_paged_mla_kv_cache as append_paged_mla_kv_cache
    from .page import get_batch_indices_positions as get_batch_indices_positions
    from .page import get_seq_lens as get_seq_lens
    from .pod import BatchPODWithPagedKVCacheWrapper as BatchPODWithPagedKVCacheWrapper
    from .pod import PODWithPagedKVCacheWrapper as PODWithPagedKVCacheWrapper
    from .prefill import (
        BatchPrefillWithPagedKVCacheWrapper as BatchPrefillWithPagedKVCacheWrapper,
    )
    from .prefill import (
        BatchPrefillWithRaggedKVCacheWrapper as BatchPrefillWithRaggedKVCacheWrapper,
    )
    from .prefill import single_prefill_with_kv_cache as single_prefill_with_kv_cache
    from .prefill import (
        single_prefill_with_kv_cache_return_lse as single_prefill_with_kv_cache_return_lse,
    )
    from .quantization import packbits as packbits
    from .quantization import segment_packbits as segment_packbits
    from .quantize import QuantizedQKV as QuantizedQKV
    from .quantize import quantize_qkv as quantize_qkv
    from .quantize_pages import rope_and_cache as rope_and_cache
    from .shares import get_share_lists as get_share_lists
    from .shares import get_share_seq_lens as get_share_seq_lens
    from .shares import get_share_slots as get_share_slots
    from .sparse import BlockSparseAttentionWrapper as BlockSparseAttentionWrapper
    from .sparse import VariableBlockSparseAttentionWrapper as VariableBlockSparseAttentionWrapper
    from .topk import top_k_page_table_transform as top_k_page_table_transform
    from .topk import top_k_ragged_transform as top_k_ragged_transform
    from .trtllm import trtllm_batch_context_with_kv_cache as trtllm_batch_context_with_kv_cache
    from .trtllm import trtllm_batch_decode_with_kv_cache as trtllm_batch_decode_with_kv_cache
    from .trtllm import trtllm_fmha_v2_prefill as trtllm_fmha_v2_prefill
    from .trtllm import trtllm_ragged_attention_deepseek as trtllm_ragged_attention_deepseek
    from .trtllm import xqa_batch_decode_with_kv_cache as xqa_batch_decode_with_kv_cache
    from .xqa import xqa as xqa


# For type checkers a name that is not above is a mistake.
if not TYPE_CHECKING:

    def __getattr__(name: str) -> object:
        module = _EXPORTS.get(name)
        if module is not None:
            value = getattr(importlib.import_module(f".{module}", __name__), name)
            globals()[name] = value
            return value
        if name in _MODULES:
            return importlib.import_module(f".{name}", __name__)
        from .core.names import missing

        raise missing(__name__, name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_EXPORTS, *_MODULES})
