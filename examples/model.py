"""A small Llama of random weights: RMSNorm, RoPE, grouped-query attention and SwiGLU.

The model leaves attention to its caller. An engine answers from pages of keys, a check from
`dense_attention`; everything else is the same code.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch.nn import functional as F

# attend(layer, q [n, heads, head_dim], k and v [n, kv_heads, head_dim]) -> [n, heads, head_dim]
Attend = Callable[[int, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class Shape:
    vocab: int
    width: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    hidden: int


class Llama:
    """weights: by name, those of a layer stacked as [layers, out, in]."""

    def __init__(self, shape: Shape, weights: dict[str, torch.Tensor]) -> None:
        self.shape, self.weights = shape, weights

    @classmethod
    def random(
        cls, shape: Shape, dtype: torch.dtype, device: str, early_layers: int, seed: int = 0
    ) -> Llama:
        """Layers past the early ones change little, as in trained models, so that a draft of the
        early layers often guesses right."""
        random = torch.Generator(device).manual_seed(seed)

        def matrix(*size: int, scale: float = 1.0) -> torch.Tensor:
            values = torch.randn(size, generator=random, device=device)
            return (values * scale / size[-1] ** 0.5).to(dtype)

        layers, width, hidden = shape.layers, shape.width, shape.hidden
        q, kv = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
        weights = {
            "embed": matrix(shape.vocab, width, scale=width**0.5),
            "head": matrix(shape.vocab, width),
            # Twice the usual queries make attention choose between keys instead of averaging them.
            "q": matrix(layers, q, width, scale=2.0),
            "k": matrix(layers, kv, width),
            "v": matrix(layers, kv, width),
            "o": matrix(layers, width, q),
            "gate": matrix(layers, hidden, width),
            "up": matrix(layers, hidden, width),
            "down": matrix(layers, width, hidden),
            "attention_norm": 1 + 0.1 * matrix(layers, width, scale=width**0.5),
            "mlp_norm": 1 + 0.1 * matrix(layers, width, scale=width**0.5),
            "norm": 1 + 0.1 * matrix(width, scale=width**0.5),
        }
        for name in ("o", "down"):
            weights[name][early_layers:] *= 0.1
        return cls(shape, weights)

    def first_layers(self, count: int, noise: float, seed: int = 1) -> Llama:
        """A draft model: copies of the first layers, each weight off by `noise` of its size."""
        random = torch.Generator(self.weights["embed"].device).manual_seed(seed)
        weights = dict(self.weights)
        for name in ("q", "k", "v", "o", "gate", "up", "down", "attention_norm", "mlp_norm"):
            w = weights[name][:count]
            error = torch.empty_like(w).normal_(generator=random)
            weights[name] = w * (1 + noise * error)
        return Llama(replace(self.shape, layers=count), weights)

    def to(self, dtype: torch.dtype) -> Llama:
        return Llama(self.shape, {name: w.to(dtype) for name, w in self.weights.items()})

    def hidden(
        self, tokens: torch.Tensor, positions: torch.Tensor, attend: Attend
    ) -> torch.Tensor:
        """[n, width] of tokens [n] at positions [n] of their requests."""
        w, head_dim = self.weights, self.shape.head_dim
        x = w["embed"][tokens]
        rotation = _rotation(positions, head_dim)
        for layer in range(self.shape.layers):
            y = _rms_norm(x, w["attention_norm"][layer])
            q, k, v = (F.linear(y, w[n][layer]).view(len(y), -1, head_dim) for n in ("q", "k", "v"))
            y = attend(layer, _rotate(q, rotation), _rotate(k, rotation), v)
            x = x + F.linear(y.flatten(1), w["o"][layer])
            y = _rms_norm(x, w["mlp_norm"][layer])
            y = F.silu(F.linear(y, w["gate"][layer])) * F.linear(y, w["up"][layer])
            x = x + F.linear(y, w["down"][layer])
        return _rms_norm(x, w["norm"])

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """float32 [n, vocab]."""
        return F.linear(hidden, self.weights["head"]).float()


def dense_attention(
    layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
) -> torch.Tensor:
    """Causal attention over all tokens of one request, by torch."""
    q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
    y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    return y[0].transpose(0, 1)


def _rms_norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return F.rms_norm(x, weight.shape, weight, 1e-5)


def _rotation(positions: torch.Tensor, head_dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines and sines [n, 1, head_dim / 2] of RoPE."""
    pairs = torch.arange(0, head_dim, 2, device=positions.device)
    angles = positions[:, None, None] * 10000.0 ** (-pairs / head_dim)
    return angles.cos(), angles.sin()


def _rotate(x: torch.Tensor, rotation: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """Turn element i and i + head_dim / 2 of each head by the angle of the pair."""
    cos, sin = rotation
    a, b = x.float().chunk(2, -1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1).to(x.dtype)
