"""Attention shapes of real models, from their published configurations."""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Model:
    """The attention layers of one model.

    `windows` are the window_left of its layers, -1 for full attention; a window of n tokens is a
    window_left of n - 1. `head_dim_vo` None means `head_dim`. `prompts_only` marks models that
    decode by another kernel (MLA), `encoder` those whose rows see all keys.
    """

    name: str
    num_qo_heads: int
    num_kv_heads: int
    head_dim: int = 128
    head_dim_vo: int | None = None
    windows: tuple[int, ...] = (-1,)
    soft_cap: float = 0.0
    sinks: bool = False
    prompts_only: bool = False
    encoder: bool = False

    def shard(self, tensor_parallel: int) -> Model | None:
        """The heads of one GPU of so many, or None where they do not divide.

        Fewer KV heads than GPUs are repeated, so each GPU has at least one.
        """
        q, kv = self.num_qo_heads, self.num_kv_heads
        repeated = kv % tensor_parallel and tensor_parallel % kv
        if q % tensor_parallel or repeated:
            return None
        kv_heads = max(1, kv // tensor_parallel)
        if (q // tensor_parallel) % kv_heads:
            return None
        return replace(self, num_qo_heads=q // tensor_parallel, num_kv_heads=kv_heads)


TENSOR_PARALLEL = (1, 2, 4, 8)

MODELS: tuple[Model, ...] = (
    Model("llama3_8b", 32, 8),
    Model("llama3_70b", 64, 8),
    Model("llama3_405b", 128, 8),
    Model("llama3.2_1b", 32, 8, 64),
    Model("llama3.2_3b", 24, 8),
    Model("llama2_7b", 32, 32),
    Model("qwen2.5_0.5b", 14, 2, 64),
    Model("qwen2.5_3b", 16, 2),
    Model("qwen2.5_7b", 28, 4),
    Model("qwen2.5_32b", 40, 8),
    Model("qwen3_0.6b", 16, 8),
    Model("qwen3_14b", 40, 8),
    Model("qwen3_30b_a3b", 32, 4),
    Model("qwen3_235b_a22b", 64, 4),
    Model("mistral_7b", 32, 8, windows=(4095, -1)),
    Model("mistral_large", 96, 8),
    Model("gemma2_9b", 16, 8, 256, windows=(4095, -1), soft_cap=50.0),
    Model("gemma2_27b", 32, 16, windows=(4095, -1), soft_cap=50.0),
    Model("gemma3_4b", 8, 4, 256, windows=(1023, -1)),
    Model("gemma3_12b", 16, 8, 256, windows=(1023, -1)),
    Model("gemma3_27b", 32, 16, windows=(1023, -1)),
    Model("gpt_oss_20b", 64, 8, 64, windows=(127, -1), sinks=True),
    Model("phi3_mini", 32, 32, 96),
    Model("phi4", 40, 10),
    Model("glm4_9b", 32, 2),
    Model("command_r_plus", 96, 8),
    Model("starcoder2_3b", 24, 2, windows=(4095,)),
    Model("falcon_7b", 71, 1, 64),
    Model("deepseek_v3", 128, 128, 192, 128, prompts_only=True),
    Model("whisper_large", 20, 20, 64, prompts_only=True, encoder=True),
    Model("vit_l", 16, 16, 64, prompts_only=True, encoder=True),
)
