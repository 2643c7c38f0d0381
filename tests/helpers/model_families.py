"""Small models of many families of transformers, with inputs: text, pictures, sound, two parts."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest

_SIZES: dict[str, Any] = {
    **{"vocab_size": 97, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2},
    **{"num_attention_heads": 4, "max_position_embeddings": 64, "pad_token_id": 0},
}
_GROUPED: dict[str, Any] = _SIZES | {"num_key_value_heads": 2, "head_dim": 16}
_ENCODER_DECODER: dict[str, Any] = {
    **{"vocab_size": 97, "d_model": 64, "encoder_layers": 2, "decoder_layers": 2},
    **{"encoder_attention_heads": 4, "decoder_attention_heads": 4, "encoder_ffn_dim": 96},
    **{"decoder_ffn_dim": 96, "max_position_embeddings": 64, "pad_token_id": 0},
    **{"decoder_start_token_id": 1, "bos_token_id": 1, "eos_token_id": 2},
}
_T5: dict[str, Any] = {
    **{"vocab_size": 97, "d_model": 64, "d_kv": 16, "d_ff": 96, "num_layers": 2, "num_heads": 4},
    "decoder_start_token_id": 0,
}
_PICTURES: dict[str, Any] = {
    **{"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2},
    **{"num_attention_heads": 4, "image_size": 32, "patch_size": 8},
}
_GPT2: dict[str, Any] = {
    **{"vocab_size": 97, "n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 64},
}


@dataclass(frozen=True)
class Family:
    """Classes of a config and of a model, sizes, and what the model takes.

    takes   "text", "pair" (text in and text out), "picture", "sound"
    writes  it generates text
    """

    config: str
    model: str
    sizes: dict[str, Any]
    takes: str = "text"
    writes: bool = False
    others: dict[str, Any] = field(default_factory=dict)

    def make(self, transformers: Any, torch: Any, name: str = "eager") -> Any:
        """A model with random weights, attention far from uniform."""
        config = getattr(transformers, self.config)(**(self.sizes | self.others))
        config._attn_implementation = name
        torch.manual_seed(0)
        model = getattr(transformers, self.model)(config).eval()
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.dim() > 1:
                    parameter.mul_(2.0)
        return model

    def inputs(self, torch: Any, padding: int = 0, is_left: bool = True) -> dict[str, Any]:
        """Two requests, the second with so many tokens of padding."""
        random = torch.Generator().manual_seed(1)
        if self.takes == "picture":
            return {"pixel_values": torch.randn(2, 3, 32, 32, generator=random)}
        if self.takes == "sound":
            return {"input_values": torch.randn(2, 4000, generator=random)}
        ids = torch.randint(3, 97, (2, 12), generator=random)
        mask = torch.ones_like(ids)
        if padding:
            where = slice(0, padding) if is_left else slice(-padding, None)
            ids[1, where], mask[1, where] = 0, 0
        given = {"input_ids": ids, "attention_mask": mask}
        if self.takes == "pair":
            given["decoder_input_ids"] = torch.randint(3, 97, (2, 7), generator=random)
        return given


def _text(name: str, sizes: dict[str, Any] = _GROUPED, **others: Any) -> Family:
    return Family(f"{name}Config", f"{name}ForCausalLM", sizes, writes=True, others=others)


def _seen(name: str, model: str = "", sizes: dict[str, Any] = _SIZES, **others: Any) -> Family:
    return Family(f"{name}Config", f"{name}{model or 'Model'}", sizes, others=others)


FAMILIES: dict[str, Family] = {
    # Rows that see what came before, with all that layers ask for.
    "llama": _text("Llama"),
    "mistral, windows": _text("Mistral", sliding_window=5),
    "mixtral": _text("Mixtral", num_local_experts=4),
    "qwen2": _text("Qwen2"),
    "qwen3 moe": _text("Qwen3Moe", num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32),
    "phi3": _text("Phi3"),
    "gemma": _text("Gemma"),
    "olmo2": _text("Olmo2"),
    "granite": _text("Granite", attention_multiplier=0.3),
    "cohere2": _text("Cohere2", sliding_window=5),
    "starcoder2": _text("Starcoder2", sliding_window=5),
    "smollm3": _text("SmolLM3"),
    "glm4": _text("Glm4"),
    "gpt2": Family("GPT2Config", "GPT2LMHeadModel", _GPT2, writes=True),
    "gpt_neox": _text("GPTNeoX", _SIZES),
    "opt": _text("OPT", _SIZES, ffn_dim=96, word_embed_proj_dim=64),
    "doge, computes with its mask": _text("Doge"),
    # Rows that see both sides.
    "bert": _seen("Bert"),
    "roberta": _seen("Roberta", type_vocab_size=1),
    "modernbert, windows": _seen("ModernBert", local_attention=8, global_attn_every_n_layers=2),
    "layoutlm, masks of floats": _seen("LayoutLM"),
    # Two parts, with attention of one's rows over the other's.
    "bart": Family("BartConfig", "BartForConditionalGeneration", _ENCODER_DECODER, "pair", True),
    "marian": Family("MarianConfig", "MarianMTModel", _ENCODER_DECODER, "pair", True),
    "t5, position biases": Family("T5Config", "T5ForConditionalGeneration", _T5, "pair", True),
    # Pictures and sound.
    "vit": Family("ViTConfig", "ViTModel", _PICTURES, "picture"),
    "siglip": Family("SiglipVisionConfig", "SiglipVisionModel", _PICTURES, "picture"),
    "clip": Family("CLIPVisionConfig", "CLIPVisionModel", _PICTURES, "picture"),
    "dinov2": Family("Dinov2Config", "Dinov2Model", _PICTURES, "picture"),
    "wav2vec2": Family(
        "Wav2Vec2Config",
        "Wav2Vec2Model",
        _SIZES
        | {"conv_dim": (32,) * 7, "num_conv_pos_embeddings": 16, "apply_spec_augment": False},
        "sound",
    ),
}


def pair(family: Family, transformers: Any, torch: Any, name: str = "cupyattn") -> Any:
    """(eager, ours), of equal weights; skips what this transformers has no interface in."""
    eager = family.make(transformers, torch)
    try:
        # Made, not told later: of two parts with one class of config 5.17 tells neither.
        return eager, family.make(transformers, torch, name)
    except ValueError as error:
        if "does not support attn_implementation" not in str(error) or eager._supports_sdpa:
            raise
        pytest.skip(f"{transformers.__version__}: {error}")


def answers(model: Any, torch: Any, given: dict[str, Any]) -> Any:
    """The first answer of a model, where it stands for a token."""
    with torch.no_grad():
        answer = model(**given)[0]
    seen = given.get("attention_mask")
    is_of_tokens = seen is not None and answer.shape[:2] == seen.shape
    return answer[seen > 0] if is_of_tokens else answer
