"""Small models of transformers with random weights, a pair of each: eager, and ours."""

from __future__ import annotations

import copy
from typing import Any

_SMALL: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
    "attention_dropout": 0.0,
}
# Of each kind: class of the config, of the model, and what differs.
KINDS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", "LlamaForCausalLM", {}),
    "qwen3": ("Qwen3Config", "Qwen3ForCausalLM", {}),
    "gemma2": (
        "Gemma2Config",
        "Gemma2ForCausalLM",
        {"sliding_window": 6, "attn_logit_softcapping": 2.0, "query_pre_attn_scalar": 16},
    ),
    "gemma3": (
        "Gemma3TextConfig",
        "Gemma3ForCausalLM",
        {"sliding_window": 6, "query_pre_attn_scalar": 16, "sliding_window_pattern": 2},
    ),
    "gpt_oss": (
        "GptOssConfig",
        "GptOssForCausalLM",
        {"sliding_window": 6, "num_local_experts": 4, "num_experts_per_tok": 2},
    ),
    "deepseek_v3": (
        "DeepseekV3Config",
        "DeepseekV3ForCausalLM",
        {
            **{"num_key_value_heads": 4, "q_lora_rank": 24, "kv_lora_rank": 16, "v_head_dim": 16},
            **{"qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "head_dim": 8, "n_group": 2},
            **{"n_routed_experts": 4, "num_experts_per_tok": 2, "topk_group": 1},
            **{"moe_intermediate_size": 32, "n_shared_experts": 1, "first_k_dense_replace": 1},
        },
    ),
}


def pair(transformers: Any, torch: Any, kind: str, name: str = "cupyattn") -> tuple[Any, Any]:
    """(eager, ours), of equal weights, in float32."""
    config, model, more = KINDS[kind]
    made = getattr(transformers, config)(**(_SMALL | more))
    torch.manual_seed(0)
    made._attn_implementation = "eager"
    eager = getattr(transformers, model)(made).eval()
    with torch.no_grad():
        for parameter in eager.parameters():
            parameter.mul_(3.0)  # attention far from uniform
        for n, parameter in eager.named_parameters():
            if "sinks" in n:
                parameter.normal_()
    ours = copy.deepcopy(eager)
    ours.set_attn_implementation(name)
    return eager, ours


def little_memory(transformers: Any, **others: Any) -> dict[str, Any]:
    """Arguments of generate_batch that keep it from taking most of a machine's memory."""
    make = getattr(transformers.generation, "ContinuousBatchingConfig", None)
    make = getattr(transformers, "ContinuousBatchingConfig", make)
    named = {"max_memory_percent": 0.05} | others
    return {} if make is None else {"continuous_batching_config": make(**named)}
