"""FlashInfer's records of what latent attention is used for, which its programs read."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class MLAHeadDimensions:
    """Columns of a head before absorption, and of what it is absorbed into."""

    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    kv_lora_rank: int


@dataclass(frozen=True)
class MLALayerDimensions:
    """Dimensions of a layer with a number of heads; every number of heads is served here."""

    head_dimensions: MLAHeadDimensions
    num_heads: int


deepseek_mla_dimensions = MLAHeadDimensions(128, 64, 128, 512)
smaller_mla_dimensions = MLAHeadDimensions(64, 64, 128, 256)
nope_mla_dimensions = MLAHeadDimensions(256, 0, 256, 512)
supported_mla_head_dimensions = [
    deepseek_mla_dimensions,
    smaller_mla_dimensions,
    nope_mla_dimensions,
]
supported_mla_layer_dimensions = [
    MLALayerDimensions(deepseek_mla_dimensions, 128),
    MLALayerDimensions(deepseek_mla_dimensions, 64),
    MLALayerDimensions(smaller_mla_dimensions, 32),
]
