"""A drawn batch as data."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate


@dataclass(frozen=True)
class TileCase:
    """One batch of bfloat16 queries.

    api       "paged" or "ragged": where its keys are
    requests  (how many, query rows, keys) of groups of equal ones; causal: keys >= rows
    """

    name: str
    api: str
    requests: tuple[tuple[int, int, int], ...]
    page_size: int
    num_qo_heads: int
    num_kv_heads: int
    head_dim_qk: int
    head_dim_vo: int
    causal: bool
    pos_encoding_mode: str = "NONE"
    logits_soft_cap: float = 0.0
    kv_dtype: str = "bfloat16"
    dtype: str = "bfloat16"
    window_left: int = -1
    has_mask: bool = False

    @property
    def kind(self) -> str:
        """What its requests are like: "prompt", "decode", ..."""
        return self.name.split("_")[2]

    @property
    def number(self) -> int:
        """Its place among the batches of a seed."""
        return int(self.name.split("_")[1])

    @property
    def q_lens(self) -> list[int]:
        return [q_len for count, q_len, _ in self.requests for _ in range(count)]

    @property
    def kv_lens(self) -> list[int]:
        return [kv_len for count, _, kv_len in self.requests for _ in range(count)]

    @property
    def q_offsets(self) -> list[int]:
        return [0, *accumulate(self.q_lens)]

    @property
    def kv_offsets(self) -> list[int]:
        return [0, *accumulate(self.kv_lens)]

    def flops(self, q_len: int, kv_len: int) -> int:
        """The operations of both matrix products of one request, over the pairs in sight."""
        unseen = q_len * (q_len - 1) // 2 if self.causal else 0
        width = 2 * (self.head_dim_qk + self.head_dim_vo)
        return width * (q_len * kv_len - unseen) * self.num_qo_heads
