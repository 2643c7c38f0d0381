"""Small models with random weights as transformers writes them, and what they should answer."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

_COMMON: dict[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 128,
    "intermediate_size": 192,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 1024,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
# Of each kind: class of the config, of the model, and what differs.
KINDS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", "LlamaForCausalLM", {"num_key_value_heads": 2, "head_dim": 64}),
    "latent": (
        "DeepseekV3Config",
        "DeepseekV3ForCausalLM",
        {
            **{"num_key_value_heads": 4, "q_lora_rank": 48, "kv_lora_rank": 512, "v_head_dim": 64},
            **{"qk_nope_head_dim": 64, "qk_rope_head_dim": 64, "head_dim": 64},
            **{"first_k_dense_replace": 2, "n_routed_experts": 4, "n_group": 1, "topk_group": 1},
        },
    ),
}


def write(folder: Path, kind: str) -> Any:
    """A folder with a model's config and weights, and the model in float32."""
    import torch
    import transformers

    config, name, more = KINDS[kind]
    made = getattr(transformers, config)(**(_COMMON | more))
    made._attn_implementation = "eager"
    torch.manual_seed(0)
    model = getattr(transformers, name)(made).eval()
    with torch.no_grad():
        for title, x in model.named_parameters():
            if "norm" not in title:
                x.normal_(std=1.5 * x.shape[-1] ** -0.5)  # attention far from uniform
    model.save_pretrained(folder)
    return model


def prompts(unit: int = 16) -> list[list[int]]:
    """Of several lengths; some begin alike, some are longer than a chunk of a prompt."""
    import torch

    generator = torch.Generator().manual_seed(3)
    make = lambda n: torch.randint(3, 512, (n,), generator=generator).tolist()  # noqa: E731
    shared = make(5 * unit)
    return [make(5), shared + make(unit), make(1), shared + make(3), make(130), shared[: 2 * unit]]


def differing(model: Any, asked: list[list[int]], got: list[list[int]]) -> list[float]:
    """How far a float32 model's token is ahead of each token that an engine gave in its place, in
    standard deviations of its logits: nothing where all tokens are its own.

    The model reads what the engine had read, so that one difference is not followed by others.
    """
    import torch

    found = []
    for prompt, tokens in zip(asked, got, strict=True):
        ids = torch.tensor([prompt + tokens[:-1]])
        with torch.no_grad():
            logits = model(ids).logits[0, len(prompt) - 1 :].float()
        given = logits.gather(-1, torch.tensor(tokens)[:, None])[:, 0]
        behind = (logits.max(-1).values - given) / logits.std(-1)
        found += behind[behind > 0].tolist()
    return found


def _rounding_attention() -> str:
    """The name of eager attention over keys and values as a cache of e4m3 has them."""
    import torch
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import eager_mask
    from transformers.models.llama.modeling_llama import eager_attention_forward

    def attend(module: Any, q: Any, k: Any, v: Any, mask: Any, **named: Any) -> Any:
        k, v = (x.to(torch.float8_e4m3fn).to(q.dtype) for x in (k, v))
        return eager_attention_forward(module, q, k, v, mask, **named)

    AttentionInterface.register("eight", attend)
    AttentionMaskInterface.register("eight", eager_mask)
    return "eight"


def main(verb: str, folder: str, given: str, cache: str = "auto") -> list[float]:
    """write FOLDER KIND, or compare FOLDER '[prompts, tokens]' [fp8]."""
    from helpers.engines import absent

    absent.install(*"httpcore httpcore2 httpx httpx2".split())
    if verb == "write":
        write(Path(folder), given)
        return []
    import torch
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder,
        dtype=torch.float32,
        attn_implementation=_rounding_attention() if cache == "fp8" else "eager",
    )
    return differing(model.eval(), *json.loads(given))


if __name__ == "__main__":
    print("\n" + json.dumps(main(*sys.argv[1:])))
