"""One selection as data: a batch, and how many keys each of its tokens chooses."""

from __future__ import annotations

from dataclasses import dataclass

from ..batch.case import BatchCase

ROW_BYTES = 132  # of a key: 128 columns of e4m3 and a float32 scale
_MOST_DRAFTS = 8


@dataclass(frozen=True)
class SelectionCase(BatchCase):
    """DeepSeek's index: each token chooses the keys whose scores, weighted sums over heads of what
    is positive of q·k, are the greatest. Queries and keys are e4m3, each key has a scale.

    entries  of a list
    """

    entries: int = 2048

    @property
    def is_8bit(self) -> bool:
        """False: its answers are numbers of keys, which have no fewer bits."""
        return False

    @property
    def kind(self) -> str:
        """Its phase."""
        tokens = self.q_lens[0]
        phase = "decode" if tokens == 1 else "verify" if tokens <= _MOST_DRAFTS else "prompt"
        return f"dsa {phase}"

    @property
    def pairs(self) -> int:
        """(token, key) pairs."""
        return sum(self.seen)

    @property
    def flops(self) -> int:
        return 2 * self.head_dim_qk * self.num_qo_heads * self.pairs

    @property
    def quoted_flops(self) -> int:
        return self.flops

    @property
    def bytes(self) -> int:
        """Least device traffic: queries, their weights, each key once, and the lists."""
        of_token = self.num_qo_heads * (self.head_dim_qk + 4) + 4 * self.entries
        return self.q_offsets[-1] * of_token + self.kv_offsets[-1] * ROW_BYTES

    @property
    def label(self) -> str:
        """What a name says of it, beside its heads and its batch."""
        return f"dsa_q{self.q_lens[0]}_k{self.kv_lens[0]}_top{self.entries}"
