"""What is measured on several GPUs: decode steps, and prompts, of a model's attention layer."""

from __future__ import annotations

from typing import NamedTuple

PAGE_SIZE = 64
STATE_BYTES = 4  # of an element of a state, and of its LSE: float32


class Decode(NamedTuple):
    """A step of `batch` requests of `keys` tokens each; latent keys have one head."""

    name: str
    batch: int
    keys: int
    num_qo_heads: int
    num_kv_heads: int
    head_dim: int
    rope_dim: int = 0  # latent attention: columns of the keys that the values lack

    @property
    def is_latent(self) -> bool:
        """Whether the keys are latent rows."""
        return self.rope_dim > 0

    @property
    def state_bytes(self) -> int:
        """The bytes of all states: of each request and query head."""
        return self.batch * self.num_qo_heads * (self.head_dim + 1) * STATE_BYTES


class Prompt(NamedTuple):
    """One causal prompt of `tokens` tokens."""

    name: str
    tokens: int
    num_qo_heads: int
    num_kv_heads: int
    head_dim: int

    @property
    def key_bytes(self) -> int:
        """The bytes of K and V, in 16 bits."""
        return 4 * self.tokens * self.num_kv_heads * self.head_dim


DECODES = (
    Decode("decode_1x1M", 1, 1 << 20, 32, 8, 128),
    Decode("decode_1x4M", 1, 1 << 22, 32, 8, 128),
    Decode("decode_8x128k", 8, 1 << 17, 32, 8, 128),
    Decode("decode_64x8k", 64, 1 << 13, 32, 8, 128),
    Decode("mla_8x128k_h128", 8, 1 << 17, 128, 1, 512, 64),
)
PROMPTS = (
    Prompt("prompt_1x128k", 1 << 17, 32, 8, 128),
    Prompt("prompt_1x32k", 1 << 15, 32, 8, 128),
)
# Rows, heads and head dims of exchanges alone.
EXCHANGES = ((1, 32, 128), (8, 32, 128), (64, 32, 128), (256, 32, 128), (8, 128, 512))
# Parts that one GPU's share is measured for, so that larger groups can be foretold.
PARTS = (1, 2, 4, 8, 16, 32, 64, 128)
# Methods of prompts whose kernels are measured so: those that move keys.
SHARE_METHODS = "gather", "overlap"
