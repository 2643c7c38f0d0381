"""One call by lists as data: a batch, and what its lists name."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from ..batch.case import BatchCase

LATENT = ("dsa", "v4")
_MOST_DRAFTS = 8


@dataclass(frozen=True)
class ListCase(BatchCase):
    """A batch whose tokens each list the blocks of keys that they attend to.

    family       "m3", "nsa" and "qsa": keys and values of KV heads; "dsa": rows of 576 latent
                 columns; "v4": rows of 512, and a second list over a second cache; "blocks": a
                 prompt whose mask has blocks of so many rows and columns
    granularity  keys of a block
    entries      of a list
    lists        of a token: 1, or one for each KV head
    kept         how much of a token's list is that of the token before it; 0: lists are random
    row_bytes    of rows of e4m3 with scales of their own: 656 or 584; 0: plain elements
    second       entries of the second list
    block_rows   of a block-sparse mask, whose columns are `granularity`
    density      of that mask: how many of the blocks on and below the diagonal it has
    """

    family: str = "m3"
    granularity: int = 128
    entries: int = 16
    lists: int = 1
    kept: float = 0.0
    row_bytes: int = 0
    second: int = 0
    block_rows: int = 0
    density: float = 1.0

    @property
    def is_latent(self) -> bool:
        return self.family in LATENT

    @property
    def kind(self) -> str:
        """Its family and its phase."""
        tokens = self.q_lens[0]
        phase = "decode" if tokens == 1 else "verify" if tokens <= _MOST_DRAFTS else "prompt"
        return self.family if self.family == "blocks" else f"{self.family} {phase}"

    @property
    def listed(self) -> int:
        """The most keys that a token attends to."""
        return self.entries * self.granularity + self.second

    @property
    def pairs(self) -> int:
        """(row, key) pairs of one head; of a block that the last key cuts the whole block."""
        if self.family == "blocks":
            return int(pattern(self)[1].size) * self.block_rows * self.granularity
        return sum(min(self.listed, seen) for seen in self.seen)

    @property
    def flops(self) -> int:
        return 2 * (self.head_dim_qk + self.head_dim_vo) * self.num_qo_heads * self.pairs

    @property
    def quoted_flops(self) -> int:
        return self.flops

    @property
    def bytes(self) -> int:
        """Least device traffic: q, o and as many distinct rows as lists may name; no lists."""
        rows = sum(
            count * min(kv_len, q_len * self.listed) for count, q_len, kv_len in self.requests
        )
        width = self.head_dim_qk + (0 if self.is_latent else self.head_dim_vo)
        row = self.row_bytes or width * self.groups[0].kv_itemsize
        q_and_o = self.q_offsets[-1] * self.num_qo_heads * 2 * (self.head_dim_qk + self.head_dim_vo)
        return q_and_o + rows * self.num_kv_heads * row

    @property
    def label(self) -> str:
        """What a name says of it, beside its heads and its batch."""
        keys = f"k{'' if len({*self.kv_lens}) == 1 else 'to'}{max(self.kv_lens)}"
        parts = [self.family, f"q{max(self.q_lens)}", keys]
        if self.family == "blocks":
            size = f"{self.block_rows}x{self.granularity}"
            return "_".join([*parts, size, f"dense{round(100 * self.density)}"])
        listed = f"{self.entries}x{self.granularity}" + (f"and{self.second}" if self.second else "")
        parts += [listed, f"kept{round(100 * self.kept)}" if self.kept else "random"]
        if self.row_bytes:
            parts.append(f"{self.row_bytes}B")
        elif self.kv_dtype != self.dtype:
            parts.append("fp8")
        return "_".join(parts)


@lru_cache(maxsize=8)
def pattern(case: ListCase) -> tuple[np.ndarray, np.ndarray]:
    """Offsets and blocks of columns of a block-sparse mask: of each block of rows the blocks on the
    diagonal, and random ones before them."""
    ((_, rows, keys),) = case.requests
    generator = np.random.default_rng(round(1000 * case.density) + rows)
    indptr, blocks = [0], []
    for first in range(0, rows, case.block_rows):
        stop = min(rows, first + case.block_rows)
        before, behind = first // case.granularity, -(-stop // case.granularity)
        wanted = max(0, round(case.density * behind) - (behind - before))
        chosen = generator.choice(before, min(wanted, before), replace=False)
        blocks.append(np.concatenate((np.sort(chosen), np.arange(before, behind))))
        indptr.append(indptr[-1] + len(blocks[-1]))
    assert keys == rows and math.gcd(keys, case.granularity) == case.granularity
    return np.array(indptr, np.int32), np.concatenate(blocks).astype(np.int32)
