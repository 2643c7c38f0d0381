"""The problems that `cupyattn bench` measures, each with its exact work and traffic."""

from __future__ import annotations

from dataclasses import dataclass

DTYPE = "bfloat16"
ITEMSIZE = 2


@dataclass(frozen=True)
class Case:
    """`requests` equal requests of `q_len` query tokens that end `kv_len` keys, causal.

    kind       decode and append read paged keys, prefill ragged ones; mla has one head of keys,
               whose first `head_dim_vo` columns are the values
    page_size  tokens; 0 for ragged keys
    """

    name: str
    kind: str
    about: str
    requests: int
    q_len: int
    kv_len: int
    num_qo_heads: int = 32
    num_kv_heads: int = 8
    head_dim_qk: int = 128
    head_dim_vo: int = 128
    page_size: int = 16

    @property
    def is_paged(self) -> bool:
        return self.page_size > 0

    @property
    def is_latent(self) -> bool:
        return self.kind == "mla"

    @property
    def is_bound_by_memory(self) -> bool:
        """Whether the rate to quote is GB/s; else it is TFLOP/s."""
        return self.kind in ("decode", "mla")

    @property
    def sm_scale(self) -> float:
        """What logits are multiplied by. A latent case takes that of DeepSeek's models."""
        return float((192 if self.is_latent else self.head_dim_qk) ** -0.5)

    @property
    def flops(self) -> int:
        """Multiplications and additions of both matrix products over the pairs in sight."""
        pairs = self.q_len * (2 * self.kv_len - self.q_len + 1) // 2
        width = self.head_dim_qk + self.head_dim_vo
        return 2 * width * pairs * self.num_qo_heads * self.requests

    @property
    def bytes(self) -> int:
        """Least traffic: q, o, and each key and value once."""
        width = self.head_dim_qk + self.head_dim_vo
        q_and_o = self.q_len * self.num_qo_heads * width
        columns = self.head_dim_qk if self.is_latent else width
        return self.requests * (q_and_o + self.kv_len * self.num_kv_heads * columns) * ITEMSIZE

    def rate(self, us: float) -> tuple[float, str]:
        """The rate of a call that took so long, and its unit."""
        if self.is_bound_by_memory:
            return self.bytes / us / 1e3, "GB/s"
        return self.flops / us / 1e6, "TFLOP/s"


def _latent(name: str, about: str, requests: int, kv_len: int, num_heads: int) -> Case:
    return Case(name, "mla", about, requests, 1, kv_len, num_heads, 1, 576, 512, 64)


CASES = (
    Case("decode_64x4k", "decode", "64 requests, one new token after 4k", 64, 1, 4096),
    Case("decode_1x64k", "decode", "one request, one new token after 64k", 1, 1, 65536),
    Case("prefill_1x8k", "prefill", "one prompt of 8k", 1, 8192, 8192, page_size=0),
    Case("prefill_16x1k", "prefill", "16 prompts of 1k", 16, 1024, 1024, page_size=0),
    Case("append_8x512_4k", "append", "8 chunks of 512 that end 4k", 8, 512, 4096),
    _latent("mla_32x4k_h16", "latent, 32 requests of 4k, 16 heads", 32, 4096, 16),
    _latent("mla_32x4k_h128", "latent, 32 requests of 4k, 128 heads", 32, 4096, 128),
)
