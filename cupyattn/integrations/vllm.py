"""vLLM: --attention-backend CUSTOM, or CUPYATTN_MLA for models with latent attention.

An installed cupyattn is found by vLLM itself (entry point vllm.general_plugins). In a program::

    import cupyattn.integrations.vllm

    cupyattn.integrations.vllm.register()
    llm = LLM(name, attention_config={"backend": "CUSTOM"})

vLLM reads attention_config before its general plug-ins, so register() is also an entry point of
vllm.platform_plugins, which come first; it names no platform.

Examples: :doc:`/docs/integrations/vllm`.
"""

from __future__ import annotations

import dataclasses
import importlib
from typing import Any

from ..core import env, parse
from ..core.device import arch_of_capability
from ..core.packages import needs
from ..core.problem import LATENT_HEAD_DIMS, MAX_HEAD_DIM, WIDE_HEAD_DIMS
from ..errors import ArgumentError, UnsupportedError
from ..flash_attn import flash_attn_varlen_func
from ..mla import trtllm_batch_decode_with_kv_cache_mla
from ..quantize_pages import rope_and_cache
from ..shares import get_share_seq_lens
from ..slots import reshape_and_cache
from . import vllm_sparse
from .engines import joined
from .substitutes import substitute

DENSE, MLA = "CUSTOM", "CUPYATTN_MLA"
_CACHE_DTYPES = ["auto", "float16", "bfloat16", "fp8", "fp8_e4m3"]
_DENSE_CACHE_DTYPES = [*_CACHE_DTYPES, "fp8_e5m2"]
_LATENT_HEAD_SIZES = [a + b for a, b in LATENT_HEAD_DIMS]


@needs("vllm")
def register(sparse_models: bool | None = None) -> None:
    """Make the two backends known to vLLM, in this process. A second call changes nothing, nor does
    CUSTOM where another plug-in has taken it.

    CUSTOM serves dense attention: all of its layers, prompts and decoding. CUPYATTN_MLA serves the
    decoding of latent attention; prompts of such models go vLLM's own way.

    Parameters
    ----------
    sparse_models
        Whether vLLM's functions of MiniMax-M3 and QSA become those of `integrations.vllm_sparse`,
        as far as these serve a call; default the environment's CUPYATTN_SPARSE_MODELS.
    """
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    if not AttentionBackendEnum.CUSTOM.is_overridden():
        register_backend(AttentionBackendEnum.CUSTOM, f"{__name__}.CupyAttnBackend")
    if MLA not in AttentionBackendEnum.__members__:
        register_backend(MLA, f"{__name__}.CupyAttnMLABackend")
    if env.SPARSE_MODELS.flag() if sparse_models is None else sparse_models:
        substitute(vllm_sparse.FUNCTIONS, vllm_sparse.JOINS)


def __getattr__(name: str) -> Any:
    """The classes that vLLM asks for by name: ours, joined with its own bases."""
    if name not in _BASES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    own, path = _BASES[name]
    module, _, base = path.partition(":")
    cls = joined(name, own, getattr(importlib.import_module(module), base))
    if own in (Builder, MLABuilder):
        from vllm.v1.attention.backend import AttentionCGSupport

        cls._cudagraph_support = AttentionCGSupport.UNIFORM_BATCH
    if own is MLABuilder:
        from vllm.model_executor.layers.attention.mla_attention import QueryLenSupport

        cls.query_len_support = QueryLenSupport.UNIFORM
    return cls


# --- dense ---


@dataclasses.dataclass
class Metadata:
    """A batch, as vLLM's CommonAttentionMetadata has it, under its names; all on the device.

    Parameters
    ----------
    causal
        A bool, or an array of one for each request.
    dcp_seq_lens
        This rank's keys of each request, where ranks share them and vLLM says.
    """

    num_actual_tokens: int
    max_query_len: int
    max_seq_len: int
    query_start_loc: Any
    seq_lens: Any
    block_table: Any
    slot_mapping: Any
    causal: Any
    dcp_seq_lens: Any = None


class Asked:
    """What vLLM asks of both backends before it makes layers."""

    supported_kv_cache_dtypes: list[str]

    @classmethod
    def supports_compute_capability(cls, capability: Any) -> bool:
        try:
            arch_of_capability(capability.major, capability.minor)
        except UnsupportedError:
            return False
        return True

    @classmethod
    def supports_batch_invariance(cls) -> bool:
        """No: which kernel runs, and into how many parts keys are split, depends on the batch."""
        return False

    @classmethod
    def supports_combination(
        cls,
        head_size: int,
        dtype: Any,
        kv_cache_dtype: str | None,
        block_size: int | None,
        use_mla: bool,
        has_sink: bool,
        use_sparse: bool,
        use_mm_prefix: bool,
        device_capability: Any,
    ) -> str | None:
        """A sentence that joins vLLM's own reasons: what is refused, and what to choose."""
        known = cls.supported_kv_cache_dtypes
        if kv_cache_dtype is not None and kv_cache_dtype not in known:
            return (
                f"kv_cache_dtype: {kv_cache_dtype} is not read by cupyattn here; wanted one of "
                f"{', '.join(known)}"
            )
        if not cls.supports_compute_capability(device_capability):
            capability = f"{device_capability.major}.{device_capability.minor}"
            return f"compute capability: cupyattn has no kernels for {capability}"
        return None


class Backend(Asked):
    """What vLLM asks of a backend for dense attention: names, head sizes and features."""

    forward_includes_kv_cache_update = False
    supported_kv_cache_dtypes = _DENSE_CACHE_DTYPES

    @staticmethod
    def get_name() -> str:
        return DENSE

    @staticmethod
    def get_impl_cls() -> Any:
        return __getattr__("CupyAttnImpl")

    @staticmethod
    def get_builder_cls() -> Any:
        return __getattr__("CupyAttnBuilder")

    @staticmethod
    def get_kv_cache_shape(
        num_blocks: int,
        block_size: int,
        num_kv_heads: int,
        head_size: int,
        cache_dtype_str: str = "auto",
    ) -> tuple[int, ...]:
        """The layout that vLLM has by itself since 0.28, for releases that ask the backend."""
        return num_blocks, num_kv_heads, block_size, 2 * head_size

    @classmethod
    def supports_head_size(cls, head_size: int) -> bool:
        is_narrow = head_size % 8 == 0 and 8 <= head_size <= MAX_HEAD_DIM
        return is_narrow or (head_size, head_size) in WIDE_HEAD_DIMS

    @classmethod
    def supports_sink(cls) -> bool:
        return True

    @classmethod
    def supports_sliding_window(cls) -> bool:
        return True

    @classmethod
    def supports_non_causal(cls) -> bool:
        return True


class Builder:
    """Metadata of a step: nothing is computed, lengths and tables stay where they are."""

    def __init__(
        self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: Any
    ) -> None:
        self.kv_cache_spec, self.layer_names = kv_cache_spec, layer_names
        self.vllm_config, self.device = vllm_config, device

    def build(
        self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False
    ) -> Metadata:
        common = common_attn_metadata
        return Metadata(
            num_actual_tokens=common.num_actual_tokens,
            max_query_len=common.max_query_len,
            max_seq_len=common.max_seq_len,
            query_start_loc=common.query_start_loc,
            seq_lens=common.seq_lens,
            block_table=common.block_table_tensor,
            slot_mapping=common.slot_mapping,
            causal=common.causal,
            dcp_seq_lens=getattr(common, "dcp_local_seq_lens", None),
        )


class Impl:
    """The attention of a layer over vLLM's cache, [blocks, kv_heads, block_size, 2 * head_size]."""

    # Ranks may share the keys of every request; prompts are not divided over ranks.
    can_return_lse_for_decode = True
    lse_base_on_e = True
    supports_dcp = True
    supports_pcp = False
    supports_mtp_with_cp_non_trivial_interleave_size = True

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int | None = None,
        alibi_slopes: Any = None,
        sliding_window: int | None = None,
        kv_cache_dtype: str = "auto",
        logits_soft_cap: float | None = None,
        attn_type: str = "decoder",
        kv_sharing_target_layer_name: str | None = None,
        sinks: Any = None,
    ) -> None:
        """As vLLM's; sinks [num_heads]. Raises UnsupportedError for ALiBi and encoders."""
        _refuse(alibi_slopes=alibi_slopes)
        _decoder_only(attn_type)
        self.num_heads, self.head_size, self.scale = num_heads, head_size, float(scale)
        self.num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        self.window_size = (-1, -1) if sliding_window is None else (sliding_window - 1, 0)
        self.kv_cache_dtype, self.softcap = kv_cache_dtype, float(logits_soft_cap or 0)
        self.attn_type, self.sinks = attn_type, sinks
        self.kv_sharing_target_layer_name = kv_sharing_target_layer_name
        self.share = _share_of(self)
        self.combine: Any = _combine() if self.share else None
        has_e4m3 = kv_cache_dtype in ("fp8", "fp8_e4m3") and not self.share
        self.supports_quant_query_input = has_e4m3 and env.EIGHT_BIT_QUERIES.flag()

    def do_kv_cache_update(
        self, layer: Any, key: Any, value: Any, kv_cache: Any, slot_mapping: Any
    ) -> None:
        """Write key and value [tokens, kv_heads, head_size] to slots of the cache: one launch."""
        k_cache, v_cache = self._caches(kv_cache)
        scales: dict[str, Any] = {}
        if k_cache.dtype != key.dtype:
            scales = {"k_scale": layer._k_scale.reshape(1), "v_scale": layer._v_scale.reshape(1)}
        count = slot_mapping.shape[0]
        reshape_and_cache(key[:count], value[:count], k_cache, v_cache, slot_mapping, **scales)

    def fused_rope_kvcache_supported(self) -> bool:
        """Whether vLLM may leave rotary positions to the write of the cache."""
        return self.head_size % 16 == 0 and self.head_size <= MAX_HEAD_DIM

    def fused_qk_norm_rope_kvcache_supported(self) -> bool:
        """The same of the norm of queries and keys ahead of that."""
        return self.fused_rope_kvcache_supported()

    def do_rope_and_kv_cache_update(
        self,
        layer: Any,
        query: Any,
        key: Any,
        value: Any,
        positions: Any,
        cos_sin_cache: Any,
        is_neox: bool,
        kv_cache: Any,
        layer_slot_mapping: Any,
    ) -> None:
        """Rotate query and key in place, and write key and value to slots of the cache: one launch.

        query [tokens, num_heads, head_size], key and value [tokens, kv_heads, head_size], or their
        heads as columns. positions [tokens], cos_sin_cache [positions, rotary_dim].
        """
        q, k, v = (self._by_head(x, layer_slot_mapping) for x in (query, key, value))
        self._fill_cache(
            (q, k, v),
            (q, k),
            layer,
            kv_cache,
            layer_slot_mapping,
            positions=positions[: q.shape[0]],
            cos_sin_cache=cos_sin_cache,
            interleave=not is_neox,
        )

    def do_qk_norm_rope_kvcache_update(
        self,
        layer: Any,
        qkv: Any,
        q_out: Any,
        k_out: Any,
        positions: Any,
        q_weight: Any,
        k_weight: Any,
        rms_norm_eps: float,
        cos_sin_cache: Any,
        is_neox: bool,
        kv_cache: Any,
        layer_slot_mapping: Any,
    ) -> None:
        """Normalise and rotate the queries and keys of qkv [tokens, (num_heads + 2 * kv_heads) *
        head_size] to q_out and k_out, and write keys and values to slots of the cache: one
        launch.
        """
        of_q, of_kv = (n * self.head_size for n in (self.num_heads, self.num_kv_heads))
        parts = qkv.split([of_q, of_kv, of_kv], dim=-1)
        q, k, v = (self._by_head(x, layer_slot_mapping) for x in parts)
        self._fill_cache(
            (q, k, v),
            tuple(self._by_head(x, layer_slot_mapping) for x in (q_out, k_out)),
            layer,
            kv_cache,
            layer_slot_mapping,
            positions=positions[: q.shape[0]],
            cos_sin_cache=cos_sin_cache,
            interleave=not is_neox,
            q_weight=q_weight.reshape(-1),
            k_weight=k_weight.reshape(-1),
            eps=rms_norm_eps,
        )

    def _by_head(self, x: Any, slot_mapping: Any) -> Any:
        """Rows that have slots, [tokens, heads, head_size], in place."""
        count = slot_mapping.shape[0]
        return x[:count].view(count, -1, self.head_size)

    def _fill_cache(
        self,
        qkv: tuple[Any, Any, Any],
        outputs: tuple[Any, ...],
        layer: Any,
        kv_cache: Any,
        slot_mapping: Any,
        **options: Any,
    ) -> None:
        k_cache, v_cache = self._caches(kv_cache)
        if k_cache.dtype != qkv[1].dtype:
            options["k_scale"], options["v_scale"] = (
                x.reshape(1) for x in (layer._k_scale, layer._v_scale)
            )
        q, k, v = qkv
        q_out, k_out = outputs
        rope_and_cache(q, k, v, k_cache, v_cache, slot_mapping, q_out=q_out, k_out=k_out, **options)

    def forward(
        self,
        layer: Any,
        query: Any,
        key: Any,
        value: Any,
        kv_cache: Any,
        attn_metadata: Metadata | None,
        output: Any,
        output_scale: Any = None,
        output_block_scale: Any = None,
    ) -> Any:
        """Write the attention of query [tokens, num_heads, head_size] to output, and return it."""
        _refuse(output_scale=output_scale, output_block_scale=output_block_scale)
        if attn_metadata is None:  # vLLM measures memory
            return output.fill_(0)
        count = attn_metadata.num_actual_tokens
        out = output[:count].view(count, self.num_heads, self.head_size)
        if self.share:
            self._attend_to_share(layer, query[:count], kv_cache, attn_metadata, out)
            return output
        self._attend(
            layer,
            query[:count],
            kv_cache,
            attn_metadata,
            max_seqlen_k=attn_metadata.max_seq_len,
            seqused_k=attn_metadata.seq_lens,
            sinks=self.sinks,
            out=out,
        )
        return output

    def _attend(
        self, layer: Any, query: Any, kv_cache: Any, metadata: Metadata, **options: Any
    ) -> Any:
        """What flash_attn_varlen_func returns; options: its arguments that depend on the share."""
        is_mixed = not isinstance(metadata.causal, bool)
        k_cache, v_cache = self._caches(kv_cache)
        scales: dict[str, Any] = {}
        if k_cache.dtype.itemsize == 1:
            scales = {
                "k_descale": layer._k_scale.reshape(1).expand(self.num_kv_heads),
                "v_descale": layer._v_scale.reshape(1).expand(self.num_kv_heads),
            }
        if query.dtype.itemsize == 1:
            scales["q_descale"] = layer._q_scale.reshape(1).expand(self.num_kv_heads)
        return flash_attn_varlen_func(
            query,
            k_cache,
            v_cache,
            metadata.query_start_loc,
            max_seqlen_q=metadata.max_query_len,
            block_table=metadata.block_table,
            softmax_scale=self.scale,
            causal=is_mixed or metadata.causal,
            dynamic_causal=metadata.causal if is_mixed else None,
            # A causal request sees none of the keys that the second side adds.
            window_size=self._both_sides() if is_mixed or not metadata.causal else self.window_size,
            softcap=self.softcap,
            **scales,
            **options,
        )

    def _attend_to_share(
        self, layer: Any, query: Any, kv_cache: Any, metadata: Metadata, out: Any
    ) -> None:
        """Write this rank's heads of attention over the keys of all ranks to `out`.

        Each rank attends to its own keys by the queries of all; vLLM exchanges and merges the
        states.
        """
        from vllm.distributed.parallel_state import get_dcp_group

        group, share = get_dcp_group(), self.share
        own = metadata.dcp_seq_lens
        if own is None:
            own = get_share_seq_lens(metadata.seq_lens, **share)
        run = share["cp_kv_cache_interleave_size"]
        max_own = -(-metadata.max_seq_len // (share["cp_world_size"] * run)) * run
        states, lse = self._attend(
            layer,
            group.all_gather(query.contiguous(), dim=1),
            kv_cache,
            metadata,
            max_seqlen_k=max_own,
            seqused_k=own,
            return_softmax_lse=True,
            cp_tot_seqused_k=metadata.seq_lens,
            **share,
        )
        merged, lse = self.combine(states, lse.transpose(0, 1), group, return_lse=True)
        if self.sinks is not None:  # of this rank's heads, which no state has counted
            weight = (lse - self.sinks.float()).sigmoid()
            merged = merged * weight[..., None].to(merged.dtype)
        out.copy_(merged)

    def _both_sides(self) -> tuple[int, int]:
        return self.window_size[0], self.window_size[0]

    def _caches(self, kv_cache: Any) -> tuple[Any, Any]:
        """K and V, [blocks, block_size, kv_heads, head_size], in place."""
        if len(kv_cache.shape) != 4 or kv_cache.shape[-1] != 2 * self.head_size:
            raise ArgumentError(
                f"kv_cache: shape is {list(kv_cache.shape)}; wanted [blocks, {self.num_kv_heads}, "
                f"block_size, {2 * self.head_size}], as vLLM has it since 0.28"
            )
        if self.kv_cache_dtype.startswith("fp8"):
            kv_cache = _as_fp8(kv_cache, self.kv_cache_dtype)
        k_cache, v_cache = kv_cache.transpose(1, 2).split(self.head_size, dim=-1)
        return k_cache, v_cache


# --- latent attention ---


class MLABackend(Asked):
    """What vLLM asks of a backend for latent attention."""

    supported_kv_cache_dtypes = _CACHE_DTYPES

    @staticmethod
    def get_name() -> str:
        return MLA

    @staticmethod
    def get_impl_cls() -> Any:
        return __getattr__("CupyAttnMLAImpl")

    @staticmethod
    def get_builder_cls() -> Any:
        return __getattr__("CupyAttnMLABuilder")

    @classmethod
    def get_supported_head_sizes(cls) -> list[int]:
        return _LATENT_HEAD_SIZES


class MLABuilder:
    """vLLM's own metadata of latent attention: decoded requests first, with equally many tokens."""

    def __init__(
        self,
        kv_cache_spec: Any,
        layer_names: list[str],
        vllm_config: Any,
        device: Any,
        metadata_cls: Any = None,
        supports_dcp_with_varlen: bool = True,
    ) -> None:
        """As vLLM's: several rows of each request may see the keys that ranks share."""
        base: Any = super().__init__
        base(
            kv_cache_spec,
            layer_names,
            vllm_config,
            device,
            metadata_cls,
            supports_dcp_with_varlen,
        )


class MLAImpl:
    """The decoding of a layer with latent attention; prompts and caches are vLLM's own."""

    # What a request on several GPUs asks: keys are divided, states are merged by vLLM.
    can_return_lse_for_decode = True
    lse_base_on_e = True
    supports_dcp = True
    supports_mtp_with_cp_non_trivial_interleave_size = True

    num_heads: int
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    kv_cache_dtype: str
    scale: float
    need_to_return_lse_for_decode: bool

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int,
        alibi_slopes: Any,
        sliding_window: int | None,
        kv_cache_dtype: str,
        logits_soft_cap: float | None,
        attn_type: str,
        kv_sharing_target_layer_name: str | None,
        **latent: Any,
    ) -> None:
        """As vLLM's. Raises UnsupportedError for ALiBi, windows, soft caps and encoders."""
        _refuse(
            alibi_slopes=alibi_slopes,
            sliding_window=sliding_window,
            logits_soft_cap=logits_soft_cap or None,
        )
        _decoder_only(attn_type)
        base: Any = super().__init__
        base(
            num_heads,
            head_size,
            scale,
            num_kv_heads,
            alibi_slopes,
            sliding_window,
            kv_cache_dtype,
            logits_soft_cap,
            attn_type,
            kv_sharing_target_layer_name,
            **latent,
        )
        # Keys of 8 bits are widened as they are read: queries stay as they are.
        self.supports_quant_query_input = False
        self.share = _share_of(self)

    def forward_mqa(
        self, q: Any, kv_c_and_k_pe_cache: Any, attn_metadata: Any, layer: Any
    ) -> tuple[Any, Any]:
        """(out [tokens, heads, kv_lora_rank], lse [tokens, heads] or None).

        Parameters
        ----------
        q
            [tokens, heads, kv_lora_rank + qk_rope_head_dim], or a pair of its two parts.
        kv_c_and_k_pe_cache
            [blocks, block_size, the same columns].
        """
        if isinstance(q, tuple):
            import torch

            q = torch.cat(q, dim=-1)
        decode = attn_metadata.decode
        rows, heads, columns = q.shape
        count = decode.seq_lens.shape[0]
        if count == 0 or rows % count:
            raise ArgumentError(f"q: has {rows} rows for {count} requests; wanted as many of each")
        cache, scale = kv_c_and_k_pe_cache, 1.0
        if self.kv_cache_dtype.startswith("fp8"):
            cache, scale = _as_fp8(cache, self.kv_cache_dtype), float(layer._k_scale_float)
        wants_lse = bool(self.need_to_return_lse_for_decode)
        share: dict[str, Any] = {}
        if self.share:
            share = {
                "enable_dcp": True,
                "cp_world": self.share["cp_world_size"],
                "cp_rank": self.share["cp_rank"],
                "cp_kv_cache_interleave_size": self.share["cp_kv_cache_interleave_size"],
                "causal_seqlens_kv_global": decode.dcp_tot_seq_lens,
            }
        result = trtllm_batch_decode_with_kv_cache_mla(
            q.view(count, rows // count, heads, columns),
            cache,
            None,
            self.qk_nope_head_dim,
            self.kv_lora_rank,
            self.qk_rope_head_dim,
            decode.block_table,
            decode.seq_lens,
            attn_metadata.max_seq_len,
            bmm1_scale=self.scale * scale,
            bmm2_scale=scale,
            return_lse=wants_lse,
            return_lse_base="basee",
            **share,
        )
        out, lse = result if wants_lse else (result, None)
        return out.reshape(rows, heads, -1), None if lse is None else lse.reshape(rows, heads)


# --- both ---


def _share_of(impl: Any) -> dict[str, Any]:
    """Which of every request's keys this rank holds, as flash_attn names it; empty: all of them."""
    if (getattr(impl, "dcp_world_size", None) or 1) == 1:
        return {}
    from vllm.config import get_current_vllm_config

    run = get_current_vllm_config().parallel_config.cp_kv_cache_interleave_size
    return {
        "cp_world_size": impl.dcp_world_size,
        "cp_rank": impl.dcp_rank,
        "cp_kv_cache_interleave_size": run,
    }


def _combine() -> Any:
    """vLLM's exchange and merge of states, as its configuration says."""
    from vllm.config import get_current_vllm_config
    from vllm.v1.attention.ops import dcp

    is_a2a = get_current_vllm_config().parallel_config.dcp_comm_backend == "a2a"
    return dcp.dcp_a2a_lse_reduce if is_a2a else dcp.cp_lse_ag_out_rs


def _as_fp8(kv_cache: Any, name: str) -> Any:
    """A cache of bytes in the dtype that vLLM names."""
    import torch

    if kv_cache.dtype != torch.uint8:
        return kv_cache
    return kv_cache.view(torch.float8_e5m2 if name == "fp8_e5m2" else torch.float8_e4m3fn)


def _refuse(**options: Any) -> None:
    for name, x in options.items():
        if x is not None:
            raise UnsupportedError(
                f"{name}: got {parse.shown(x)}, which is not supported here; choose another "
                "backend of vLLM"
            )


def _decoder_only(attn_type: Any) -> None:
    name = getattr(attn_type, "value", attn_type)
    if name != "decoder":
        raise UnsupportedError(
            f"attn_type: got {name}; only decoder layers are served, choose another backend of vLLM"
        )


_DENSE_BASES = "vllm.v1.attention.backend"
_MLA_BASES = "vllm.model_executor.layers.attention.mla_attention"
# By the name that vLLM asks for: our class, and the base that it is joined with.
_BASES: dict[str, tuple[type, str]] = {
    "CupyAttnBackend": (Backend, f"{_DENSE_BASES}:AttentionBackend"),
    "CupyAttnBuilder": (Builder, f"{_DENSE_BASES}:AttentionMetadataBuilder"),
    "CupyAttnImpl": (Impl, f"{_DENSE_BASES}:AttentionImpl"),
    "CupyAttnMLABackend": (MLABackend, f"{_MLA_BASES}:MLACommonBackend"),
    "CupyAttnMLABuilder": (MLABuilder, f"{_MLA_BASES}:MLACommonMetadataBuilder"),
    "CupyAttnMLAImpl": (MLAImpl, f"{_MLA_BASES}:MLACommonImpl"),
}
