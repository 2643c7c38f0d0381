"""SGLang: --attention-backend cupyattn.

An installed cupyattn is found by SGLang itself (entry point sglang.srt.plugins). In a program::

    import cupyattn.integrations.sglang

    cupyattn.integrations.sglang.register()
    engine = sglang.Engine(model_path=path, attention_backend="cupyattn")

Examples: :doc:`/docs/integrations/sglang`.
"""

from __future__ import annotations

from typing import Any

from ..core import env
from ..core.packages import needs
from ..errors import UnsupportedError
from ..serving import FlashAttentionBackend
from . import sglang_sparse
from .engines import joined
from .substitutes import substitute

NAME = "cupyattn"


@needs("sglang")
def register(sparse_models: bool | None = None) -> None:
    """Make attention_backend="cupyattn" known to SGLang, in this process, also for deterministic
    inference. A second call changes nothing.

    Parameters
    ----------
    sparse_models
        Whether SGLang's functions of MiniMax-M3 become those of `integrations.sglang_sparse`, as
        far as these serve a call; default the environment's CUPYATTN_SPARSE_MODELS.
    """
    from sglang.srt import server_args
    from sglang.srt.layers.attention.attention_registry import (
        ATTENTION_BACKENDS,
        register_attention_backend,
    )

    if env.SPARSE_MODELS.flag() if sparse_models is None else sparse_models:
        substitute(sglang_sparse.FUNCTIONS)
    if NAME in ATTENTION_BACKENDS:
        return
    register_attention_backend(NAME)(create)
    server_args.add_attention_backend_choices([NAME])
    server_args.add_deterministic_attention_backend_choices([NAME])


def create(runner: Any) -> Any:
    """The backend of a ModelRunner.

    Raises
    ------
    CupyAttnError
        UnsupportedError for what it cannot serve.
    """
    from sglang.srt.layers.attention.base_attn_backend import AttentionBackend

    _refuse(runner)
    return joined("CupyAttnBackend", Backend, AttentionBackend)(runner)


def _refuse(runner: Any) -> None:
    args = runner.server_args
    if getattr(runner, "use_mla_backend", False):
        raise UnsupportedError(
            "use_mla_backend: latent attention is not served here; choose --attention-backend "
            "flashmla"
        )
    if getattr(args, "speculative_algorithm", None) is not None:
        raise UnsupportedError(
            f"speculative_algorithm: {args.speculative_algorithm} is not served here; leave it "
            "out, or choose --attention-backend fa3"
        )
    if getattr(runner, "is_hybrid_swa", False):
        raise UnsupportedError(
            "is_hybrid_swa: a second pool for windows is not served here; pass "
            "--disable-hybrid-swa-memory"
        )
    for name in ("dcp_size", "attn_cp_size"):
        if (getattr(args, name, 1) or 1) > 1:
            raise UnsupportedError(
                f"{name}: got {getattr(args, name)}; a request on several GPUs is not served "
                "here, leave it at 1"
            )


class Backend(FlashAttentionBackend):
    """SGLang's AttentionBackend over cupyattn.serving.

    Prompts, parts of prompts and mixed batches run eagerly; decoding also in CUDA graphs, which
    record the launch of a step's metadata.
    """

    def __init__(self, runner: Any) -> None:
        super().__init__(runner)
        self.quantises_queries = env.EIGHT_BIT_QUERIES.flag()
        self._plain: set[int] = set()

    @property  # type: ignore[override]
    def forward_metadata(self) -> Any:
        """What SGLang keeps and puts back around graphs."""
        return self.core.forward_metadata

    @forward_metadata.setter
    def forward_metadata(self, metadata: Any) -> None:
        self.core.forward_metadata = metadata

    def get_fused_kv_write_buffers(
        self, layer: Any, forward_batch: Any
    ) -> tuple[Any, Any, Any] | None:
        """(keys [slots, heads, head_dim], values, slots of the batch's tokens) for a kernel of
        SGLang's that rotates and writes; None where such a kernel may not write."""
        slots = getattr(forward_batch, "out_cache_loc", None)
        if layer.is_cross_attention or slots is None:
            return None
        pool = getattr(forward_batch, "token_to_kv_pool", None) or self.core.pool
        buffers = pool.get_kv_buffer(layer.layer_id)
        dims = layer.head_dim, getattr(layer, "v_head_dim", layer.head_dim)
        for buffer, dim in zip(buffers, dims, strict=True):
            shape = layer.tp_k_head_num, dim
            is_plain = tuple(buffer.shape[1:]) == shape and buffer.stride()[-2:] == (dim, 1)
            if not is_plain or str(buffer.dtype) != "torch.bfloat16":
                return None
        return (*buffers, slots)

    def forward(
        self,
        q: Any,
        k: Any,
        v: Any,
        layer: Any,
        forward_batch: Any,
        save_kv_cache: bool = True,
        **options: Any,
    ) -> Any:
        """Write k and v, and attend; q [tokens, heads * head_dim]. A worker without requests gets
        rows of nothing."""
        if forward_batch.forward_mode.is_idle():
            return q.new_empty(q.shape[0], layer.tp_q_head_num * layer.v_head_dim)
        if layer.layer_id not in self._plain:
            _refuse_layer(layer)
            self._plain.add(layer.layer_id)
        return super().forward(q, k, v, layer, forward_batch, save_kv_cache, **options)


def _refuse_layer(layer: Any) -> None:
    """UnsupportedError for what a RadixAttention asks beyond cupyattn.serving."""
    kind = getattr(layer, "attn_type", "decoder")
    features = {
        "attn_type": (getattr(kind, "value", kind), "decoder"),
        "pos_encoding_mode": (getattr(layer, "pos_encoding_mode", "NONE"), "NONE"),
        "logit_capping_method": (getattr(layer, "logit_capping_method", "tanh"), "tanh"),
        "xai_temperature_len": (getattr(layer, "xai_temperature_len", -1), -1),
    }
    for name, (value, wanted) in features.items():
        if value != wanted:
            raise UnsupportedError(
                f"{name}: layer {layer.layer_id} has {value}; only {wanted} is served, choose "
                "another attention backend"
            )
