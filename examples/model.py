"""A small Llama of random weights: RMSNorm, RoPE, grouped-query attention and SwiGLU.

Attention is the caller's: an engine answers from pages of keys, a check by `dense_attention`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

# attend(layer, q [n, heads, head_dim], k and v [n, kv_heads, head_dim]) -> [n, heads, head_dim]
Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]


class Shape(NamedTuple):
    """The first early_layers do most of the work, and a noisy copy of them is the draft model."""

    vocab: int
    width: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    hidden: int
    early_layers: int


class Llama:
    """weights: by name; those of layers are stacked, [layers, out, in]."""

    def __init__(self, shape: Shape, weights: dict[str, Tensor]) -> None:
        self.shape, self.weights, self.device = shape, weights, weights["embed"].device

    @classmethod
    def random(cls, shape: Shape, dtype: torch.dtype, device: str) -> Llama:
        """Later layers change little, as in trained models, so that the early ones guess well."""
        vocab, width, layers, heads, kv_heads, head_dim, hidden, early_layers = shape
        q, kv = heads * head_dim, kv_heads * head_dim
        random = torch.Generator(device).manual_seed(0)
        sizes = {
            "embed": (vocab, width), "head": (vocab, width),
            "q": (layers, q, width), "k": (layers, kv, width), "v": (layers, kv, width),
            "o": (layers, width, q), "gate": (layers, hidden, width),
            "up": (layers, hidden, width), "down": (layers, width, hidden),
        }  # fmt: skip
        weights = {
            name: torch.randn(size, generator=random, device=device) / size[-1] ** 0.5
            for name, size in sizes.items()
        }
        weights["embed"] *= width**0.5
        weights["q"] *= 2  # attention chooses between keys instead of averaging them,
        weights["o"] *= 3  # what is said depends on all that was said,
        weights["head"] *= 6  # and one word is much likelier than most
        for name in ("o", "down"):
            weights[name][early_layers:] *= 0.1
        return cls(shape, weights).to(dtype)

    def to(self, dtype: torch.dtype) -> Llama:
        return Llama(self.shape, {name: w.to(dtype) for name, w in self.weights.items()})

    def draft_model(self, layers: int | None = None, noise: float = 0.02) -> Llama:
        """The early layers, every weight of them off by `noise` of its size."""
        layers = layers or self.shape.early_layers
        torch.manual_seed(1)
        weights = dict(self.weights)
        for name, w in self.weights.items():
            if w.dim() == 3:
                weights[name] = w[:layers] * (1 + noise * torch.randn_like(w[:layers]))
        return Llama(self.shape._replace(layers=layers), weights)

    def hidden(self, tokens: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """[n, width] of tokens [n] at positions [n] of their requests."""
        w, head_dim = self.weights, self.shape.head_dim
        pairs = torch.arange(0, head_dim, 2, device=self.device)
        angles = positions[:, None, None] * 10000.0 ** (-pairs / head_dim)
        x = w["embed"][tokens]
        for layer in range(self.shape.layers):
            y = _rms_norm(x)
            q, k, v = (F.linear(y, w[n][layer]).view(len(y), -1, head_dim) for n in ("q", "k", "v"))
            y = attend(layer, _rotate(q, angles), _rotate(k, angles), v)
            x = x + F.linear(y.flatten(1), w["o"][layer])
            y = _rms_norm(x)
            y = F.silu(F.linear(y, w["gate"][layer])) * F.linear(y, w["up"][layer])
            x = x + F.linear(y, w["down"][layer])
        return _rms_norm(x)

    def logits(self, hidden: Tensor) -> Tensor:
        """float32 [n, vocab]."""
        return F.linear(hidden, self.weights["head"]).float()


def dense_attention(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal attention over all tokens of one request, by torch."""
    q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
    y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    return y[0].transpose(0, 1)


def _rms_norm(x: Tensor) -> Tensor:
    return F.rms_norm(x, x.shape[-1:], eps=1e-5)


def _rotate(x: Tensor, angles: Tensor) -> Tensor:
    """RoPE: elements i and i + head_dim / 2 of a head turn by angle i."""
    cos, sin, (a, b) = angles.cos(), angles.sin(), x.float().chunk(2, -1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1).to(x.dtype)
